// The levels of t4, those of least mean square error for a normal distribution (Max, 1960):
// -127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127
const T4_LEVELS: array<u32, 4> = array(0xc6b5a081u, 0xfaeee1d4u, 0x2c1f1206u, 0x7f604b3au);

fn t4_level(code: u32) -> f32 {
    var table = T4_LEVELS;
    return signed_byte(table[code >> 2u], code & 3u);
}
