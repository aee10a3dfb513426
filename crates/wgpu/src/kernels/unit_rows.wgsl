// Products with rows of one matrix. Included once per matrix, like fetch.wgsl.

// Adds the products of ROWS rows from `row` on to the sums of this lane, which is one of UNIT_LANES.
fn matrix_add_rows(form: Form, row: u32, last: u32, lane: u32, inputs: Inputs) {
    for (var unit = lane; unit < matrix_units(form); unit += UNIT_LANES) {
        unroll(r, ROWS) { units[r] = matrix_fetch(form, min(row + r, last), unit); }
        add_units(inputs, unit * UNIT_QUADS);
    }
}
