//! K or V of one layer on the device: `[kv_heads, cells, words]`, in as many buffers of whole heads as bindings require.
use crate::driver::{Args, BufferCopy, Driver};
use crate::form::Form;
use crate::kernels::Kernel;
use kvist_cache::CellCopy;
use kvist_device::{DeviceError, Storage};

/// Neighbouring heads in one buffer: the first one, how many, and the buffer.
type Part<D> = (u32, u32, <D as Driver>::Buffer);

/// K or V of a layer.
#[derive(Debug)]
pub struct PoolSide<D: Driver> {
    pub storage: Storage,
    pub form: Form,
    pub heads: u32,
    pub dim: u32,
    pub words: u32, // of a row
    pub cells: u32,
    /// In order.
    pub parts: Vec<Part<D>>,
}

impl<D: Driver> PoolSide<D> {
    /// A side without cells.
    ///
    /// # Errors
    /// There are no kernels for the storage.
    pub fn new(storage: Storage, heads: u32, dim: u32) -> Result<Self, DeviceError> {
        let form = Form::new(storage, dim)?;
        Ok(PoolSide { storage, form, heads, dim, words: form.words(dim), cells: 0, parts: Vec::new() })
    }

    /// Heads of each part if there are so many cells: as many as a binding holds. `None` if not even one fits.
    fn heads_per_part(gpu: &D, words: u32, heads: u32, cells: u32) -> Option<u32> {
        let head = u64::from(words) * u64::from(cells) * 4;
        let most = gpu.limits().max_part_bytes.checked_div(head.max(1))?;
        (most > 0).then(|| u32::try_from(most).unwrap_or(heads).min(heads))
    }

    pub fn bytes(&self, cells: u32) -> Option<u64> {
        u64::from(self.words).checked_mul(4 * u64::from(self.heads))?.checked_mul(cells.into())
    }

    /// Refuses so many cells if a head of them is larger than a binding.
    pub fn check(&self, gpu: &D, cells: u32) -> Result<u32, DeviceError> {
        Self::heads_per_part(gpu, self.words, self.heads, cells).ok_or_else(|| {
            DeviceError::Unsupported(format!(
                "{cells} cells of one KV head are larger than the {} bytes that {} binds: use a shorter context",
                gpu.limits().max_part_bytes,
                gpu.limits().adapter
            ))
        })
    }

    /// New buffers for so many cells: zeros, until [`copies_to`](Self::copies_to) have run.
    ///
    /// # Errors
    /// As [`check`](Self::check), or the device has no memory.
    pub fn parts_for(&self, gpu: &D, cells: u32) -> Result<Vec<Part<D>>, DeviceError> {
        let per_part = self.check(gpu, cells)?;
        let mut parts = Vec::new();
        for first in (0..self.heads).step_by(per_part as usize).filter(|_| cells > 0) {
            let heads = per_part.min(self.heads - first);
            let bytes = u64::from(self.words) * 4 * u64::from(heads) * u64::from(cells);
            parts.push((first, heads, gpu.buffer("KV cache", bytes)?));
        }
        Ok(parts)
    }

    /// Copies of the cells that this side has to buffers for `cells` cells, as far as those go.
    pub fn copies_to<'a>(&'a self, parts: &'a [Part<D>], cells: u32) -> Vec<BufferCopy<'a, D>> {
        // Head by head, because a part of the new buffers may have other heads than one of the old.
        let mut copies = Vec::new();
        let row = u64::from(self.words) * 4;
        for (first, heads, from) in &self.parts {
            for head in *first..first + heads {
                let to = parts.iter().rfind(|part| part.0 <= head).map(|part| (head - part.0, &part.2));
                let Some((at, to)) = to else { continue };
                let bytes = row * u64::from(self.cells.min(cells));
                let source = u64::from(head - first) * row * u64::from(self.cells);
                let target = u64::from(at) * row * u64::from(cells);
                copies.push(BufferCopy { from, from_byte: source, to, to_byte: target, bytes });
            }
        }
        copies
    }
}

/// Records a copy within a side.
pub fn copy_cells<D: Driver>(gpu: &D, recorder: &mut D::Recorder, side: &PoolSide<D>, copy: &CellCopy) {
    for (_, heads, buffer) in &side.parts {
        let args = Args::new(&[side.words, *heads, side.cells, side.cells, copy.from, copy.to, copy.len]);
        let groups = (copy.len * side.words).div_ceil(64);
        let groups = [groups.min(65_535), groups.div_ceil(65_535), *heads];
        gpu.record(recorder, &Kernel::Copy { within: true }, &[Some(buffer), None], args, groups);
    }
}
