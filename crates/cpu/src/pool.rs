//! Rows of one side (K or V) of one layer, in one dtype.
//!
//! Where a row lies is private to its pool: nobody outside asks for an address, so that V may interleave cells for
//! integer dot products and K may not. One file per dtype holds how a row is packed; this one holds where.
mod float;
mod q4;
mod q8;

use crate::Growth;
use half::f16;
use kvist_backend::{DType, Storage};
use kvist_cache::Run;

/// What both sides can do.
pub trait RowPool: Send + Sync {
    /// Cells there is room for.
    fn cells(&self) -> u32;
    /// Room for cells up to `cells`, made beside the pool: nothing changes until [`adopt`](Self::adopt). `Err` is
    /// the number of bytes the system refused.
    fn allocate(&self, cells: u32) -> Result<Box<dyn std::any::Any + Send>, u64>;
    /// Take in what [`allocate`](Self::allocate) made.
    fn adopt(&mut self, room: Box<dyn std::any::Any + Send>);
    fn write(&mut self, head: u32, cell: u32, row: &[f32]);
    fn read(&self, head: u32, cell: u32, row: &mut [f32]);
    /// Packed bytes of `len` cells of every head, from `from` to `to`; the runs do not overlap.
    fn copy(&mut self, from: u32, to: u32, len: u32);
}

/// The keys of one layer.
pub trait KeyPool: RowPool {
    /// `scores[query * stride + i] = queries[query] · k[run.start + i]`. Every row is decoded once, into `row`, for
    /// all `queries: [n, head_dim]`.
    fn scores(
        &self,
        head: u32,
        run: Run,
        queries: &[f32],
        scores: &mut [f32],
        stride: usize,
        row: &mut [f32],
    );
}

/// The values of one layer.
pub trait ValuePool: RowPool {
    /// `sums[query] += Σ weights[query * stride + i] * v[run.start + i]`, for `sums: [n, head_dim]`.
    fn accumulate(
        &self,
        head: u32,
        run: Run,
        weights: &[f32],
        stride: usize,
        sums: &mut [f32],
        row: &mut [f32],
    );
}

/// How one dtype packs a row.
trait Codec: Send + Sync + 'static {
    type Code: Copy + Default + Send + Sync;
    /// Codes of a row of `head_dim` values.
    fn codes(head_dim: usize) -> usize;
    /// f16 parameters of a group of codes: 0, a scale, or a scale and a minimum.
    const PARAMS: usize;
    fn encode(row: &[f32], group: usize, codes: &mut [Self::Code], params: &mut [f16]);
    /// The row as f32, in `buffer` or where it lies.
    fn decode<'r>(codes: &'r [Self::Code], params: &[f16], group: usize, buffer: &'r mut [f32]) -> &'r [f32];
}

pub fn keys(storage: Storage, heads: u32, head_dim: u32, growth: Growth) -> Box<dyn KeyPool> {
    match storage.dtype {
        DType::F32 => Box::new(Rows::<float::F32>::new(storage, heads, head_dim, growth)),
        DType::F16 => Box::new(Rows::<float::F16>::new(storage, heads, head_dim, growth)),
        DType::BF16 => Box::new(Rows::<float::BF16>::new(storage, heads, head_dim, growth)),
        DType::Q8 => Box::new(Rows::<q8::Q8>::new(storage, heads, head_dim, growth)),
        DType::Q4 => Box::new(Rows::<q4::Q4>::new(storage, heads, head_dim, growth)),
    }
}

pub fn values(storage: Storage, heads: u32, head_dim: u32, growth: Growth) -> Box<dyn ValuePool> {
    match storage.dtype {
        DType::F32 => Box::new(Rows::<float::F32>::new(storage, heads, head_dim, growth)),
        DType::F16 => Box::new(Rows::<float::F16>::new(storage, heads, head_dim, growth)),
        DType::BF16 => Box::new(Rows::<float::BF16>::new(storage, heads, head_dim, growth)),
        DType::Q8 => Box::new(Rows::<q8::Q8>::new(storage, heads, head_dim, growth)),
        DType::Q4 => Box::new(Rows::<q4::Q4>::new(storage, heads, head_dim, growth)),
    }
}

/// Neighbouring cells of every head. Codes and parameters stand apart, so that a stream of codes is only codes.
struct Segment<C: Codec> {
    cells: Run,
    codes: Vec<C::Code>, // [n_heads, cells, codes per row]
    params: Vec<f16>,    // [n_heads, cells, params per row]
}

struct Rows<C: Codec> {
    heads: usize,
    head_dim: usize,
    group: usize,
    codes: usize,  // per row
    params: usize, // per row
    growth: Growth,
    segments: Vec<Segment<C>>,
}

impl<C: Codec> Rows<C> {
    fn new(storage: Storage, heads: u32, head_dim: u32, growth: Growth) -> Self {
        Rows {
            heads: heads as usize,
            head_dim: head_dim as usize,
            group: storage.group as usize,
            codes: C::codes(head_dim as usize),
            params: C::PARAMS * storage.n_groups(head_dim) as usize,
            growth,
            segments: Vec::new(),
        }
    }

    fn segment_of(&self, cell: u32) -> usize {
        let found = self.segments.iter().position(|s| s.cells.contains(cell));
        found.unwrap_or_else(|| panic!("cell {cell} lies past the {} the pool was grown to", self.cells()))
    }

    /// Index of the row of `head` and `cell` inside a segment.
    fn row_index(segment: &Segment<C>, head: u32, cell: u32) -> usize {
        head as usize * segment.cells.len as usize + (cell - segment.cells.start) as usize
    }

    fn row<'r>(&'r self, segment: &'r Segment<C>, index: usize, buffer: &'r mut [f32]) -> &'r [f32] {
        let codes = &segment.codes[index * self.codes..(index + 1) * self.codes];
        let params = &segment.params[index * self.params..(index + 1) * self.params];
        C::decode(codes, params, self.group, buffer)
    }

    /// Call `each(i, row)` for every cell `run.start + i`, decoded.
    #[inline(always)]
    fn for_rows(&self, head: u32, run: Run, buffer: &mut [f32], mut each: impl FnMut(usize, &[f32])) {
        let mut cell = run.start;
        while cell < run.end() {
            let segment = &self.segments[self.segment_of(cell)];
            let end = run.end().min(segment.cells.end());
            let first = Self::row_index(segment, head, cell);
            for i in 0..(end - cell) as usize {
                let row = self.row(segment, first + i, &mut buffer[..self.head_dim]);
                each((cell - run.start) as usize + i, row);
            }
            cell = end;
        }
    }
}

impl<C: Codec> RowPool for Rows<C> {
    fn cells(&self) -> u32 {
        self.segments.last().map_or(0, |s| s.cells.end())
    }

    fn allocate(&self, cells: u32) -> Result<Box<dyn std::any::Any + Send>, u64> {
        let start = if self.growth == Growth::Concatenate { 0 } else { self.cells() };
        let cells = Run { start, len: cells.saturating_sub(start) };
        let rows = self.heads * cells.len as usize;
        let mut segment =
            Segment::<C> { cells, codes: zeros(rows * self.codes)?, params: zeros(rows * self.params)? };
        if self.growth == Growth::Concatenate
            && let Some(old) = self.segments.first()
        {
            for head in 0..self.heads {
                let (to, from) = (head * cells.len as usize, head * old.cells.len as usize);
                let n = (old.cells.len.min(cells.len)) as usize;
                copy_rows(&mut segment.codes, to, &old.codes, from, n, self.codes);
                copy_rows(&mut segment.params, to, &old.params, from, n, self.params);
            }
        }
        Ok(Box::new(segment))
    }

    fn adopt(&mut self, room: Box<dyn std::any::Any + Send>) {
        if let Ok(segment) = room.downcast::<Segment<C>>() {
            if self.growth == Growth::Concatenate {
                self.segments.clear();
            }
            self.segments.push(*segment);
        }
    }

    fn write(&mut self, head: u32, cell: u32, row: &[f32]) {
        let at = self.segment_of(cell);
        let (codes, params, group) = (self.codes, self.params, self.group);
        let segment = &mut self.segments[at];
        let index = Self::row_index(segment, head, cell);
        C::encode(
            row,
            group,
            &mut segment.codes[index * codes..(index + 1) * codes],
            &mut segment.params[index * params..(index + 1) * params],
        );
    }

    fn read(&self, head: u32, cell: u32, out: &mut [f32]) {
        let segment = &self.segments[self.segment_of(cell)];
        let mut buffer = vec![0.0; self.head_dim];
        out.copy_from_slice(self.row(segment, Self::row_index(segment, head, cell), &mut buffer));
    }

    fn copy(&mut self, from: u32, to: u32, len: u32) {
        let (codes, params) = (self.codes, self.params);
        for i in 0..len {
            let (source, target) = (self.segment_of(from + i), self.segment_of(to + i));
            for head in 0..self.heads as u32 {
                let a = Self::row_index(&self.segments[source], head, from + i);
                let b = Self::row_index(&self.segments[target], head, to + i);
                if source == target {
                    let segment = &mut self.segments[source];
                    segment.codes.copy_within(a * codes..(a + 1) * codes, b * codes);
                    segment.params.copy_within(a * params..(a + 1) * params, b * params);
                } else {
                    let [source, target] =
                        self.segments.get_disjoint_mut([source, target]).expect("two segments");
                    copy_rows(&mut target.codes, b, &source.codes, a, 1, codes);
                    copy_rows(&mut target.params, b, &source.params, a, 1, params);
                }
            }
        }
    }
}

impl<C: Codec> KeyPool for Rows<C> {
    fn scores(
        &self,
        head: u32,
        run: Run,
        queries: &[f32],
        scores: &mut [f32],
        stride: usize,
        row: &mut [f32],
    ) {
        let head_dim = self.head_dim;
        self.for_rows(head, run, row, |i, key| {
            for (query, scores) in queries.chunks_exact(head_dim).zip(scores.chunks_mut(stride)) {
                scores[i] = dot(query, key);
            }
        });
    }
}

impl<C: Codec> ValuePool for Rows<C> {
    fn accumulate(
        &self,
        head: u32,
        run: Run,
        weights: &[f32],
        stride: usize,
        sums: &mut [f32],
        row: &mut [f32],
    ) {
        let head_dim = self.head_dim;
        self.for_rows(head, run, row, |i, value| {
            for (sum, weights) in sums.chunks_exact_mut(head_dim).zip(weights.chunks(stride)) {
                let weight = weights[i];
                // Masked cells have no weight, and must not spread a NaN that nobody may see.
                if weight != 0.0 {
                    sum.iter_mut().zip(value).for_each(|(s, v)| *s += weight * v);
                }
            }
        });
    }
}

/// Zeroed, or the bytes that could not be had.
fn zeros<T: Copy + Default>(n: usize) -> Result<Vec<T>, u64> {
    let mut all = Vec::new();
    all.try_reserve_exact(n).map_err(|_| (n * size_of::<T>()) as u64)?;
    all.resize(n, T::default());
    Ok(all)
}

fn copy_rows<T: Copy>(to: &mut [T], to_row: usize, from: &[T], from_row: usize, n: usize, len: usize) {
    to[to_row * len..(to_row + n) * len].copy_from_slice(&from[from_row * len..(from_row + n) * len]);
}

/// Sixteen independent sums: additions of one would wait for each other, and the compiler may not reorder them.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a16.zip(b16) {
        for i in 0..16 {
            sums[i] += x[i] * y[i];
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0] + rest
}
