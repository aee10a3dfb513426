//! The arena: allocators compared with bitmaps, the whole with a simulated memory, and the figures of its source.
mod allocators;
mod growth;
mod layout;
mod reports;
mod simulation;

use kvist_cache::arena::{self, *};
use kvist_cache::{BlockEvent, Change, ChangeReason, SeqId};
use kvist_testing::reference::Choices;
use std::collections::BTreeMap;

const N_OPERATIONS: u64 = 100_000;
const A: SeqId = SeqId(1);
const B: SeqId = SeqId(2);
const C: SeqId = SeqId(3);

fn build(name: &str, n_blocks: u32) -> Box<dyn Allocator> {
    arena::build(name, n_blocks).expect("an allocator of the table")
}
