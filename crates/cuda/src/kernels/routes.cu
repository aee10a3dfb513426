// Which experts tokens use. Each of `used` experts of a token is a routed row: row t * used + i is token t in its expert i, in order of
// expert number. A buffer of words has, for `rows` routed rows:
//
//   [rows]         each one's expert
//   [rows]         its weight, float
//   [experts + 1]  how many rows are of experts before this one (`sort`)
//   [rows]         the rows in order of expert, those of an expert ascending (`sort`)

__device__ __forceinline__ u32 weight_at(u32 rows, u32 row) {
    return rows + row;
}
__device__ __forceinline__ u32 begin_at(u32 rows, u32 expert) {
    return 2u * rows + expert;
}
__device__ __forceinline__ u32 sorted_at(u32 rows, u32 experts, u32 i) {
    return 2u * rows + experts + 1u + i;
}
