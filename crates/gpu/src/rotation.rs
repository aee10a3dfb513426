//! Rotary embeddings. They wait until another operation needs what they rotate: mostly that is attention, for which a driver may rotate
//! queries and keys and store the new rows in one launch ([`Kernel::StoreBoth`]).
use crate::driver::{Args, Driver};
use crate::kernels::Kernel;
use crate::stream::{Buffer, Stream};
use std::sync::Arc;

/// An embedding that is not recorded yet.
#[derive(Debug)]
pub struct Rotation<D: Driver> {
    data: Arc<D::Buffer>,
    heads: u32,
    head_dim: u32,
    angles: Angles,
}

/// Which angles an embedding has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Angles {
    pub pairs: u32,
    /// The first element in [`Stream::angles`].
    pub first: u32,
}

impl<D: Driver> Rotation<D> {
    /// `None` if `x` has no elements.
    pub fn new(s: &Stream<D>, x: &Buffer<D>, head_dim: u32, rope: usize) -> Option<Self> {
        let pairs = |rope: usize| s.ropes[rope].inverse_frequencies.len() as u32;
        let first = (0..rope).map(|rope| 2 * pairs(rope) * s.n_tokens).sum();
        let angles = Angles { pairs: pairs(rope), first };
        Some(Rotation { data: x.data.clone()?, heads: x.width / head_dim, head_dim, angles })
    }

    fn is_of(&self, buffer: &Buffer<D>) -> bool {
        buffer.data.as_ref().is_some_and(|data| Arc::ptr_eq(data, &self.data))
    }

    fn record(&self, gpu: &D, recorder: &mut D::Recorder, angles: &D::Buffer, n: u32) {
        let Angles { pairs, first } = self.angles;
        let args = Args::new(&[self.heads, self.head_dim, pairs, first, n]);
        let groups = [(self.heads * pairs).div_ceil(64), n, 1];
        gpu.record(recorder, &Kernel::Rope, &[Some(angles), Some(&self.data)], args, groups);
    }
}

impl<D: Driver> Stream<D> {
    /// Records the embeddings that wait. Every operation begins with this, unless it touches no buffer that is rotated.
    pub fn rotate(&mut self, gpu: &D) {
        for rotation in self.rotations.drain(..) {
            rotation.record(gpu, &mut self.recorder, &self.angles, self.n_tokens);
        }
    }

    /// The same if one of them is of these buffers.
    pub fn rotate_if_of(&mut self, gpu: &D, buffers: [&Buffer<D>; 2]) {
        if self.rotations.iter().any(|rotation| buffers.iter().any(|buffer| rotation.is_of(buffer))) {
            self.rotate(gpu);
        }
    }

    /// Takes the embeddings that wait, if they are the same one of `q` and of `k`, whose heads have `head_dim` elements.
    pub fn take_rotation(&mut self, (q, k): (&Buffer<D>, &Buffer<D>), head_dim: usize) -> Option<Angles> {
        let [one, other] = &self.rotations[..] else { return None };
        let are_both = one.is_of(q) && other.is_of(k) || one.is_of(k) && other.is_of(q);
        let dims = [one.head_dim as usize, other.head_dim as usize];
        if !are_both || one.angles != other.angles || dims != [head_dim; 2] {
            return None;
        }
        let angles = one.angles;
        self.rotations.clear();
        Some(angles)
    }
}
