//! Allocators of contiguous blocks.
use super::{Buddy, FirstFit};

/// Contiguous blocks that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// First block.
    pub start: u32,
    /// Number of usable blocks.
    pub len: u32,
    /// Number of blocks taken, at least `len`. Blocks that an allocator adds by rounding up are waste, but allow
    /// growth in place.
    pub reserved: u32,
}

impl Handle {
    /// One past the last usable block.
    pub fn end(self) -> u32 {
        self.start + self.len
    }
    /// Tokens that fit.
    pub fn tokens(self, block_tokens: u32) -> u64 {
        u64::from(self.len) * u64::from(block_tokens)
    }
}

/// Finds free ranges for handles, and tracks which blocks are free.
///
/// Searching is pure and taking names the range, so a plan can be made and dropped. `take` and `release` undo each
/// other exactly. All operations are O(log blocks).
pub trait Allocator: Send {
    /// Its name in [`ALLOCATORS`].
    fn name(&self) -> &'static str;
    /// Number of blocks.
    fn n_blocks(&self) -> u32;
    /// Blocks that no handle reserves.
    fn n_free(&self) -> u32;
    /// Length of the longest handle that [`find`](Self::find) can find.
    fn largest_free_run(&self) -> u32;
    /// A free range for `n` blocks. `None` if no free run is long enough, or if `n` is 0.
    fn find(&self, n: u32) -> Option<Handle>;
    /// `handle` grown in place to `n` blocks, if the blocks after it are free. `n` must be at least its length.
    fn extended(&self, handle: Handle, n: u32) -> Option<Handle>;
    /// Marks the blocks that `handle` reserves as taken. All of them must be free.
    fn take(&mut self, handle: Handle);
    /// Marks the blocks that `handle` reserves as free. None of them may be free already.
    fn release(&mut self, handle: Handle);
    /// An empty allocator of the same type over `n_blocks` blocks.
    fn new_empty(&self, n_blocks: u32) -> Box<dyn Allocator>;
}

/// Builds an allocator over a number of blocks.
type BuildAllocator = fn(u32) -> Box<dyn Allocator>;

/// Name and builder of every allocator. A new one needs one file and one line here.
pub const ALLOCATORS: &[(&str, BuildAllocator)] = &[
    ("first_fit", |n_blocks| Box::new(FirstFit::new(n_blocks))),
    ("buddy", |n_blocks| Box::new(Buddy::new(n_blocks))),
];

/// There is no allocator of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAllocator {
    /// The name that was asked for.
    pub name: String,
}

impl std::fmt::Display for UnknownAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = ALLOCATORS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        write!(f, "there is no allocator `{}`: use one of {known}", self.name)
    }
}
impl std::error::Error for UnknownAllocator {}

/// Builds the allocator `name` over `n_blocks` blocks.
pub fn build(name: &str, n_blocks: u32) -> Result<Box<dyn Allocator>, UnknownAllocator> {
    let entry = ALLOCATORS.iter().find(|(known, _)| *known == name);
    let (_, build) = entry.ok_or_else(|| UnknownAllocator { name: name.to_owned() })?;
    Ok(build(n_blocks))
}
