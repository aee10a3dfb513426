// Products with rows of one matrix. Included once per matrix, like fetch.wgsl.

// Adds the products of ROWS rows from `row` on to the sums of this lane, which is one of UNIT_LANES.
fn matrix_add_rows(form: Form, row: u32, last: u32, lane: u32, first_token: u32, last_token: u32) {
    for (var unit = lane; unit < form.quads / UNIT_QUADS; unit += UNIT_LANES) {
        unroll(r, ROWS) { units[r] = matrix_fetch(form, min(row + r, last), unit); }
        add_units(Inputs(first_token, last_token, form.quads, unit * UNIT_QUADS));
    }
}
