//! What hands out contiguous blocks.
use super::{Buddy, FirstFit};

/// Neighbouring blocks that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// First block.
    pub start: u32,
    /// Blocks that may be used.
    pub len: u32,
    /// Blocks that are taken, at least `len`: what an allocator rounds up is waste, and room to grow in place.
    pub reserved: u32,
}

impl Handle {
    /// One past the last block that may be used.
    pub fn end(self) -> u32 {
        self.start + self.len
    }
    /// Tokens there is room for.
    pub fn tokens(self, block_tokens: u32) -> u64 {
        u64::from(self.len) * u64::from(block_tokens)
    }
}

/// Finds places for handles, and knows which blocks are free.
///
/// Looking is pure and taking is positional, so that a plan can be made and dropped. `take` and `release` undo each
/// other exactly. All are O(log blocks).
pub trait Allocator: Send {
    /// Its name in [`ALLOCATORS`].
    fn name(&self) -> &'static str;
    /// Blocks it manages.
    fn n_blocks(&self) -> u32;
    /// Blocks that no handle reserves.
    fn n_free(&self) -> u32;
    /// The longest handle that [`find`](Self::find) would find.
    fn largest_free_run(&self) -> u32;
    /// Where `n` blocks would go. `None` if no free run is long enough, or `n` is 0.
    fn find(&self, n: u32) -> Option<Handle>;
    /// `handle` with `n` blocks at the same place, if what follows it is free. `n` is at least its length.
    fn extended(&self, handle: Handle, n: u32) -> Option<Handle>;
    /// The blocks that `handle` reserves are no longer free. All of them must be.
    fn take(&mut self, handle: Handle);
    /// They are free again. None of them may be.
    fn release(&mut self, handle: Handle);
    /// An empty one of the same sort over `n_blocks` blocks.
    fn fresh(&self, n_blocks: u32) -> Box<dyn Allocator>;
}

/// Builds an allocator of this many blocks.
pub type BuildAllocator = fn(u32) -> Box<dyn Allocator>;

/// Name and builder of every allocator. A new one: one file and one line.
pub const ALLOCATORS: &[(&str, BuildAllocator)] = &[
    ("first_fit", |n_blocks| Box::new(FirstFit::new(n_blocks))),
    ("buddy", |n_blocks| Box::new(Buddy::new(n_blocks))),
];

/// No allocator of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAllocator {
    /// What was asked for.
    pub name: String,
}

impl std::fmt::Display for UnknownAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = ALLOCATORS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        write!(f, "there is no allocator `{}`: take one of {known}", self.name)
    }
}
impl std::error::Error for UnknownAllocator {}

/// The allocator `name` over `n_blocks` blocks.
pub fn build(name: &str, n_blocks: u32) -> Result<Box<dyn Allocator>, UnknownAllocator> {
    let entry = ALLOCATORS.iter().find(|(known, _)| *known == name);
    let (_, build) = entry.ok_or_else(|| UnknownAllocator { name: name.to_owned() })?;
    Ok(build(n_blocks))
}
