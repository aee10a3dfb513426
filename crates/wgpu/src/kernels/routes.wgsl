// Which experts tokens use. Each of `used` experts of a token is a routed row: row t * used + i is token t in its expert i, in order of
// expert number. A buffer of words has, for `rows` routed rows:
//
//   [rows]         each one's expert
//   [rows]         its weight, f32
//   [experts + 1]  how many rows are of experts before this one (`sort`)
//   [rows]         the rows in order of expert, those of an expert ascending (`sort`)

fn weight_at(rows: u32, row: u32) -> u32 {
    return rows + row;
}
fn begin_at(rows: u32, expert: u32) -> u32 {
    return 2u * rows + expert;
}
fn sorted_at(rows: u32, experts: u32, i: u32) -> u32 {
    return 2u * rows + experts + 1u + i;
}
