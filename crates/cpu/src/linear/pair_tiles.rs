//! Many tokens, as products of tiles of bf16 pairs: weights of bf16, and with [`Compute::fast_prefill`] packed ones.
//!
//! ```text
//! y[32 tokens][32 outputs] += x [tokens][32 inputs] × w [inputs][outputs]      four products per step of 32 inputs
//! ```
//!
//! x is rounded to bf16, as torch does. Packed weights are decoded, and rounded too; their halves are rounded away from 0.
//!
//! Loops, from the outside: up to 512 tokens (128 if the weights are bf16); 256 inputs; pairs of panels, whose weights of these
//! inputs stay in the first-level cache; pairs of tiles of tokens. Packed weights are decoded once per 512 tokens. The inputs and
//! the sums of a unit stay in the second-level cache.
//!
//! Per step and 32 × 32 sums: four products of 16 cycles, and four tiles loaded (32 cycles): the products are the limit.
//!
//! Measured on an Intel Xeon (docs/performance.md): a quarter of what the matrix unit can do, because inputs come from the
//! second-level cache; a prompt of 512 tokens of packed weights at 2.2 (q8_0) and 3 times (q4_K) the speed of vectors.
use super::ahead;
use super::decode::{Decode, Map, TakeQuads};
use super::inputs::{GROUP, InputFormat, Inputs, PAIR_STEPS, TILE_PAIRS, TILE_TOKENS};
use super::room::Room;
use super::{Layout, Panels, put};
use crate::Compute;
use crate::arch::{Columns, LANES, Shapes, Simd, TileIsa, TileKernel, Tiles};
use std::marker::PhantomData;
use std::ops::Range;

/// Fewest tokens for packed weights, which are decoded once per 512 tokens.
pub const DECODE_FROM: usize = 64;
/// Most tokens that go through the panels of a unit together: packed weights are decoded again for each so many. bf16 weights
/// are not, and then the buffers are small.
pub const MOST_TOKENS: usize = 512;
pub const MOST_TOKENS_OF_PAIRS: usize = 128;
/// Pairs of the weights of a panel and a step: a line per pair of inputs.
const STEP: usize = TILE_PAIRS;
/// Pairs of the decoded weights of two panels.
pub const WEIGHTS: usize = 2 * PAIR_STEPS * STEP;
/// Bytes of inputs that stay in the second-level cache beside what else a kernel reads.
const FEW_BYTES: usize = 512 << 10;
/// f32 of a token's sums.
pub const SUMS: usize = super::tiles::PANELS * LANES;

/// The format in which packed weights read `n` tokens, if as pairs.
pub fn input(compute: &Compute, n: usize) -> Option<InputFormat> {
    compute.fast_tiles().filter(|_| n >= DECODE_FROM).map(|_| InputFormat::TilePairs)
}

/// Rounds to pairs: a line per pair of inputs.
struct Pairs<'o>(&'o mut [[u32; LANES]; LANES]);

impl<S: Simd> TakeQuads<S> for Pairs<'_> {
    #[inline(always)]
    fn take(&mut self, s: S, quad: usize, [a, b, c, d]: [S::F; 4]) {
        s.store_i(s.round_pairs(a, b), &mut self.0[2 * quad]);
        s.store_i(s.round_pairs(c, d), &mut self.0[2 * quad + 1]);
    }
}

/// Tiles 0 to 3 are sums of two times 16 tokens and two times 16 outputs, 4 and 5 tokens, 6 and 7 weights.
struct Whole;

impl Shapes for Whole {
    const ROWS: [usize; 8] = [16; 8];
    const BYTES: [usize; 8] = [64; 8];
}

struct Multiply<'k, 'o, F> {
    weights: Panels<'k>,
    inputs: &'k Inputs,
    room: &'k mut Room,
    out: &'k mut Columns<'o, f32>,
    format: PhantomData<F>,
}

/// Multiplies adjacent panels with all tokens.
pub fn multiply<F: Decode>(
    isa: TileIsa,
    weights: Panels<'_>,
    inputs: &Inputs,
    room: &mut Room,
    out: &mut Columns<'_, f32>,
) {
    isa.run(Multiply::<F> { weights, inputs, room, out, format: PhantomData });
}

impl<F: Decode> TileKernel for Multiply<'_, '_, F> {
    type Shapes = Whole;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Whole>>(self, s: S, tiles: &mut T) {
        let Multiply { weights, inputs, room, out, .. } = self;
        let most_tokens = room.most_tokens;
        let (sums, decoded) = room.of_tiles(inputs.n);
        let row = weights.n * LANES;
        for first in (0..inputs.n).step_by(most_tokens) {
            let tokens = first..inputs.n.min(first + most_tokens);
            let range = first / TILE_TOKENS..tokens.end.div_ceil(TILE_TOKENS);
            let sums = &mut sums[..range.len() * TILE_TOKENS * row];
            sums.fill(0.0);
            let order = Order::new(inputs.width, range.len(), weights.n);
            for i in 0..order.len() {
                let (chunk, panel) = order.at(i);
                let steps = order.steps(chunk);
                let next = match i + 1 < order.len() {
                    true => blocks_of::<F>(&weights, order.at(i + 1).1, order.steps(order.at(i + 1).0)),
                    false => [&[][..]; 2],
                };
                let two_panels = panel + 1 < weights.n;
                let (first, second) = decoded.split_at_mut(PAIR_STEPS * STEP);
                let w = [
                    lines::<S, F>(s, &weights, panel, &steps, first),
                    match two_panels {
                        true => lines::<S, F>(s, &weights, panel + 1, &steps, second),
                        false => Lines::Decoded(&[]),
                    },
                ];
                for (i, tile) in range.clone().enumerate().step_by(2) {
                    for codes in next {
                        ahead::prefetch_part(s, codes, 0, i / 2, range.len().div_ceil(2));
                    }
                    let two_tiles = tile + 1 < range.end;
                    let x = [tile, if two_tiles { tile + 1 } else { tile }];
                    let x = x.map(|tile| inputs.tile_pairs(tile, chunk));
                    let sums = &mut sums[i * TILE_TOKENS * row + panel * LANES..];
                    square(tiles, x, w, sums, row, (two_tiles, two_panels));
                }
            }
            for (token, sums) in tokens.zip(sums.chunks_exact(row)) {
                for (panel, sums) in sums.as_chunks().0.iter().enumerate() {
                    put(s, out, token, panel, s.load(sums));
                }
            }
        }
    }
}

/// In which order chunks of steps and pairs of panels are multiplied.
struct Order {
    steps: usize,
    chunks: usize,
    pairs: usize,
    /// All chunks of a pair of panels, then the next pair: memory is read from front to back, but the inputs are read again for
    /// each pair. With many tokens they do not stay in a cache, so then a chunk's inputs meet all panels.
    by_pairs: bool,
}

impl Order {
    fn new(width: usize, n_tiles: usize, panels: usize) -> Self {
        let steps = width.div_ceil(GROUP);
        let by_pairs = n_tiles * steps * 4 * STEP <= FEW_BYTES;
        Order { steps, chunks: steps.div_ceil(PAIR_STEPS), pairs: panels.div_ceil(2), by_pairs }
    }
    fn len(&self) -> usize {
        self.chunks * self.pairs
    }
    /// The chunk, and the first panel of the pair.
    fn at(&self, i: usize) -> (usize, usize) {
        match self.by_pairs {
            true => (i % self.chunks, i / self.chunks * 2),
            false => (i / self.pairs, i % self.pairs * 2),
        }
    }
    fn steps(&self, chunk: usize) -> Range<usize> {
        chunk * PAIR_STEPS..self.steps.min((chunk + 1) * PAIR_STEPS)
    }
}

/// The blocks of some steps of panel `panel` and the next one, as far as there are any.
#[inline(always)]
fn blocks_of<'w, F: Decode>(weights: &'w Panels<'_>, panel: usize, steps: Range<usize>) -> [&'w [u8]; 2] {
    let of = |panel: usize| match panel < weights.n {
        true => {
            let blocks = steps.start * GROUP / F::INPUTS..(steps.end * GROUP).div_ceil(F::INPUTS);
            &weights.get(panel)[Layout::<F>::span(blocks.start..blocks.end.min(weights.blocks))]
        }
        false => &[],
    };
    [of(panel), of(panel + 1)]
}

/// The pairs of some steps of a panel, `[steps][16 pairs][16 rows]`: as they lie in the panel, or decoded.
#[derive(Clone, Copy)]
enum Lines<'w> {
    Panel(&'w [u8]),
    Decoded(&'w [u32]),
}

impl Lines<'_> {
    /// Loads a step into tile `B`.
    #[inline(always)]
    fn load<T: Tiles<Whole>, const B: usize>(self, tiles: &mut T, step: usize) {
        match self {
            Lines::Panel(bytes) => tiles.load::<B, u8>(&bytes[step * 4 * STEP..], 4 * LANES),
            Lines::Decoded(pairs) => tiles.load::<B, u32>(&pairs[step * STEP..], LANES),
        }
    }
}

#[inline(always)]
fn lines<'w, S: Simd, F: Decode>(
    s: S,
    weights: &'w Panels<'_>,
    panel: usize,
    steps: &Range<usize>,
    decoded: &'w mut [u32],
) -> Lines<'w> {
    let panel = weights.get(panel);
    if F::ARE_PAIRS {
        let pairs = &panel[Layout::<F>::span(0..weights.blocks)][steps.start * 4 * STEP..];
        if pairs.len() >= steps.len() * 4 * STEP {
            return Lines::Panel(pairs);
        }
        // The last step has fewer than 32 inputs: filled up with zeros.
        decoded[..steps.len() * STEP].fill(0);
        for (out, pair) in decoded.iter_mut().zip(pairs.as_chunks().0) {
            *out = u32::from_le_bytes(*pair);
        }
        return Lines::Decoded(decoded);
    }
    for (step, out) in steps.clone().zip(decoded.as_chunks_mut().0.as_chunks_mut().0) {
        let (codes, scales, group) = F::step(panel, step);
        F::decode(s, codes, scales, group, Map::identity(s), &mut Pairs(out));
    }
    Lines::Decoded(decoded)
}

/// `sums += x × w` over some steps. Rows of sums are `row` apart.
#[inline(always)]
fn square<T: Tiles<Whole>>(
    tiles: &mut T,
    x: [&[[i32; TILE_PAIRS]]; 2],
    w: [Lines<'_>; 2],
    sums: &mut [f32],
    row: usize,
    (two_tiles, two_panels): (bool, bool),
) {
    let below = TILE_TOKENS * row;
    tiles.load::<0, f32>(sums, row);
    if two_panels {
        tiles.load::<1, f32>(&sums[LANES..], row);
    }
    if two_tiles {
        tiles.load::<2, f32>(&sums[below..], row);
        if two_panels {
            tiles.load::<3, f32>(&sums[below + LANES..], row);
        }
    }
    for (step, (first, second)) in x[0].iter().zip(x[1]).enumerate() {
        tiles.load::<4, i32>(first, LANES);
        w[0].load::<T, 6>(tiles, step);
        tiles.dot_bf16::<0, 4, 6>();
        if two_panels {
            w[1].load::<T, 7>(tiles, step);
            tiles.dot_bf16::<1, 4, 7>();
        }
        if two_tiles {
            tiles.load::<5, i32>(second, LANES);
            tiles.dot_bf16::<2, 5, 6>();
            if two_panels {
                tiles.dot_bf16::<3, 5, 7>();
            }
        }
    }
    tiles.store::<0, f32>(sums, row);
    if two_panels {
        tiles.store::<1, f32>(&mut sums[LANES..], row);
    }
    if two_tiles {
        tiles.store::<2, f32>(&mut sums[below..], row);
        if two_panels {
            tiles.store::<3, f32>(&mut sums[below + LANES..], row);
        }
    }
}
