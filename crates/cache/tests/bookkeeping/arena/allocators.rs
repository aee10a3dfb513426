//! Allocators compared with bitmaps.
use super::*;

/// Which blocks are taken, searched linearly.
struct Bitmap {
    buddies: bool,
    taken: Vec<bool>,
}

impl Bitmap {
    fn is_free(&self, start: u64, len: u64) -> bool {
        start + len <= self.taken.len() as u64 && (start..start + len).all(|b| !self.taken[b as usize])
    }
    fn first_free(&self, len: u64, step: u64) -> Option<u64> {
        (0..self.taken.len() as u64).step_by(step as usize).find(|&start| self.is_free(start, len))
    }
    /// The lowest run of `n` blocks. For buddies: the lowest aligned free run of the smallest sufficient size that is
    /// not part of a larger free run.
    fn find(&self, n: u32) -> Option<Handle> {
        let size = u64::from(if self.buddies { n.next_power_of_two() } else { n });
        let handle = |start: u64| Handle { start: start as u32, len: n, reserved: size as u32 };
        if n == 0 {
            return None;
        }
        if !self.buddies {
            return self.first_free(size, 1).map(handle);
        }
        let sizes = std::iter::successors(Some(size), |size| Some(size * 2));
        sizes.take_while(|&size| size <= self.taken.len() as u64).find_map(|size| {
            let mut starts = (0..self.taken.len() as u64).step_by(size as usize);
            let whole = |start: u64| !self.is_free(start / (2 * size) * 2 * size, 2 * size);
            starts.find(|&start| self.is_free(start, size) && whole(start)).map(handle)
        })
    }
    fn largest(&self) -> u32 {
        let n_blocks = self.taken.len() as u32;
        (1..=n_blocks).rev().find(|&n| self.find(n).is_some_and(|h| h.reserved == n)).unwrap_or(0)
    }
    fn extended(&self, handle: Handle, n: u32) -> Option<Handle> {
        let size = if self.buddies { n.next_power_of_two().max(handle.reserved) } else { n };
        let aligned = !self.buddies || handle.start.is_multiple_of(size);
        let (end, more) = (handle.start + handle.reserved, size - handle.reserved);
        (aligned && self.is_free(u64::from(end), u64::from(more))).then_some(Handle {
            len: n,
            reserved: size,
            ..handle
        })
    }
    fn set(&mut self, handle: Handle, taken: bool) {
        for block in handle.start..handle.start + handle.reserved {
            assert_eq!(self.taken[block as usize], !taken, "block {block} of {handle:?}");
            self.taken[block as usize] = taken;
        }
    }
}

fn allocator_agrees(name: &str, n_blocks: u32, seed: u64, n_operations: u64) {
    let mut choices = Choices::from_seed(seed, n_operations);
    let mut clever = build(name, n_blocks);
    let mut model = Bitmap { buddies: name == "buddy", taken: vec![false; n_blocks as usize] };
    let mut live: Vec<Handle> = Vec::new();
    while choices.go_on() {
        match choices.below(8) {
            0..=3 => {
                let up_to = if choices.one_in(8) { n_blocks + 2 } else { 9 };
                let n = choices.below(up_to);
                let found = clever.find(n);
                assert_eq!(found, model.find(n), "{name} of {n_blocks}, seed {seed}: find {n}");
                if let Some(handle) = found {
                    clever.take(handle);
                    model.set(handle, true);
                    live.push(handle);
                }
            }
            4..=5 if !live.is_empty() => {
                let i = choices.below(live.len() as u32) as usize;
                let n = live[i].len + choices.below(9);
                let grown = clever.extended(live[i], n);
                assert_eq!(grown, model.extended(live[i], n), "{name}, seed {seed}: {:?} to {n}", live[i]);
                if let Some(grown) = grown {
                    clever.release(live[i]);
                    clever.take(grown);
                    model.set(live[i], false);
                    model.set(grown, true);
                    live[i] = grown;
                }
            }
            _ if !live.is_empty() => {
                let handle = live.swap_remove(choices.below(live.len() as u32) as usize);
                clever.release(handle);
                model.set(handle, false);
            }
            _ => {}
        }
        let n_free = model.taken.iter().filter(|taken| !**taken).count() as u32;
        assert_eq!(clever.n_free(), n_free);
        assert_eq!(clever.largest_free_run(), model.largest(), "{name} of {n_blocks}, seed {seed}");
    }
    live.drain(..).for_each(|handle| clever.release(handle));
    assert_eq!(clever.largest_free_run(), build(name, n_blocks).largest_free_run(), "{name}: all is merged");
}

#[test]
fn allocators_agree_with_bitmaps() {
    const PER_DRIVE: u64 = 500;
    let sizes = [1, 2, 3, 7, 16, 31, 48, 64];
    for (name, _) in ALLOCATORS {
        for seed in 0..N_OPERATIONS / PER_DRIVE {
            allocator_agrees(name, sizes[seed as usize % sizes.len()], seed, PER_DRIVE);
        }
    }
}
