//! Memory of weights: matrices side by side on huge pages.
//!
//! A matrix of its own map would end in small pages, and one of less than a huge page, as all of a small model, would have no other.
//! Processors stop prefetching at the end of a page: a core of Zen 4 reads 31 GB/s from huge pages and 12 from small ones.
use super::mapped::{HUGE, map_huge};
use memmap2::MmapRaw;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Least bytes of a slab, or none. What is never written to takes address space alone. The last huge page of each slab may be partly
/// used, so there are few slabs.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
const SLAB: usize = 4 << 30;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
const SLAB: usize = 0;
/// Pieces begin on cache lines.
const LINE: usize = 64;
/// Bytes of the largest ordinary pages.
#[cfg(target_os = "linux")]
const PAGE: usize = 64 << 10;

/// Zeroed memory from anonymous maps.
#[derive(Debug)]
struct Slab {
    map: MmapRaw,
    /// Where the first huge page begins.
    start: usize,
    len: usize,
}

impl Slab {
    /// Room for `len` bytes. On failure returns the number of bytes the system refused.
    fn new(len: usize) -> Result<Self, u64> {
        let (map, start) = map_huge(len, false)?;
        Ok(Slab { map: map.into(), start, len })
    }
}

/// The slab that has room left, as long as one of its pieces lives, and how much of it is taken.
#[derive(Debug, Default)]
struct Last {
    slab: Weak<Slab>,
    used: usize,
}

/// Most bytes that huge pages at the ends of slabs take beyond the `bytes` of the pieces of an arena.
pub fn unused(bytes: u64) -> u64 {
    most_slabs(bytes, SLAB as u64).saturating_mul(HUGE as u64)
}

/// Slabs end where a piece finds no room: two neighbours together have more than a slab's bytes.
fn most_slabs(bytes: u64, least_slab: u64) -> u64 {
    match bytes.checked_div(least_slab) {
        Some(pairs) => pairs.saturating_mul(2).saturating_add(1),
        // Each piece has a slab of its own, and no huge page that it does not fill.
        None => 0,
    }
}

/// Where pieces come from. Linux gets the memory of a piece back with it, and its address space with the last piece of its slab; other
/// systems get both with the slab.
#[derive(Debug)]
pub struct Arena {
    least_slab: usize,
    last: Mutex<Last>,
}

impl Default for Arena {
    fn default() -> Self {
        Arena::of_slabs(SLAB)
    }
}

impl Arena {
    fn of_slabs(least_slab: usize) -> Self {
        Arena { least_slab, last: Mutex::default() }
    }

    /// `len` zeroed bytes, which begin on a cache line. On failure returns the number of bytes the system refused. Does not touch
    /// the memory: the thread that writes a page first has it on its own memory node.
    pub fn piece(&self, len: usize) -> Result<Piece, u64> {
        let lines = len.checked_next_multiple_of(LINE).ok_or(len as u64)?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, start) = match last.slab.upgrade() {
            Some(slab) if slab.len - last.used >= lines => (slab, last.used),
            _ => {
                let slab = Slab::new(lines.max(self.least_slab)).or_else(|_| Slab::new(lines));
                let slab = Arc::new(slab.map_err(|_| len as u64)?);
                last.slab = Arc::downgrade(&slab);
                (slab, 0)
            }
        };
        last.used = start + lines;
        let start = slab.start + start;
        Ok(Piece { slab, start, len })
    }
}

/// Bytes that no other piece has.
pub struct Piece {
    slab: Arc<Slab>,
    start: usize,
    len: usize,
}

impl Piece {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `Arena::piece` gives every byte of a slab, all of which are mapped, to one piece at most: `used` only grows while the
        // slab lives. Writers of this piece have borrowed it.
        unsafe { std::slice::from_raw_parts(self.slab.map.as_ptr().add(self.start), self.len) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the piece is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.slab.map.as_mut_ptr().add(self.start), self.len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Piece {
    fn drop(&mut self) {
        // A slab begins at a page; its map may not begin at one of the largest.
        let (slab, from) = (&self.slab, self.start - self.slab.start);
        let pages = from.next_multiple_of(PAGE)..(from + self.len) / PAGE * PAGE;
        if !pages.is_empty() {
            let (advice, at) = (memmap2::UncheckedAdvice::DontNeed, slab.start + pages.start);
            // SAFETY: these pages have bytes of this piece alone, which is going away. If it fails they are given back with the slab.
            let _ = unsafe { slab.map.unchecked_advise_range(advice, at, pages.len()) };
        }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of a slab", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_share_slabs_and_no_bytes() {
        const SLAB: usize = 2 * HUGE;
        let arena = Arena::of_slabs(SLAB);
        let lens = [1, 0, 64, 100, SLAB - 64, 3 * HUGE + 5, SLAB + 1, 7];
        let mut pieces: Vec<Piece> = lens.iter().map(|len| arena.piece(*len).unwrap()).collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!((piece.bytes().as_ptr().align_offset(LINE), piece.bytes().len()), (0, lens[i]));
            assert!(piece.bytes().iter().all(|byte| *byte == 0));
            piece.bytes_mut().fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.bytes().iter().all(|byte| *byte == i as u8 + 1), "piece {i}");
        }
        assert!(Arc::ptr_eq(&pieces[0].slab, &pieces[3].slab));
        assert!(!Arc::ptr_eq(&pieces[3].slab, &pieces[4].slab));
        let first = pieces[0].slab.map.as_ptr().wrapping_add(pieces[0].start);
        assert!(cfg!(not(target_os = "linux")) || first.align_offset(HUGE) == 0);
    }

    #[test]
    fn there_are_no_more_slabs_than_the_bound() {
        const SLAB: usize = 2 * HUGE;
        for lens in [
            vec![64; 3],
            vec![SLAB; 3],
            vec![SLAB - 64, 128, SLAB - 64, 128, SLAB - 64],
            vec![SLAB / 2 + 64; 5],
            vec![3 * SLAB, 64, SLAB],
        ] {
            let arena = Arena::of_slabs(SLAB);
            let pieces: Vec<Piece> = lens.iter().map(|len| arena.piece(*len).unwrap()).collect();
            let slabs = 1 + pieces.windows(2).filter(|two| !Arc::ptr_eq(&two[0].slab, &two[1].slab)).count();
            let most = most_slabs(lens.iter().sum::<usize>() as u64, SLAB as u64);
            assert!(slabs as u64 <= most, "{slabs} slabs, at most {most}: {lens:?}");
        }
        assert_eq!((most_slabs(1 << 40, 0), most_slabs(u64::MAX, 1)), (0, u64::MAX));
    }

    #[test]
    fn a_slab_goes_with_its_last_piece_and_its_successor_is_zeroed() {
        let arena = Arena::default();
        let (mut a, b) = (arena.piece(1000).unwrap(), arena.piece(1000).unwrap());
        a.bytes_mut().fill(7);
        let slab = Arc::downgrade(&a.slab);
        drop(a);
        assert!(slab.upgrade().is_some());
        drop(b);
        assert!(slab.upgrade().is_none());
        assert!(arena.piece(2000).unwrap().bytes().iter().all(|byte| *byte == 0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_pages_of_a_piece_go_with_it_and_those_of_its_neighbours_stay() {
        let arena = Arena::of_slabs(2 * HUGE);
        let mut pieces = [64, 5 * PAGE, 100].map(|len| arena.piece(len).unwrap());
        pieces.iter_mut().for_each(|piece| piece.bytes_mut().fill(7));
        let [before, gone, behind] = pieces;
        assert!(Arc::ptr_eq(&before.slab, &behind.slab));
        let first = gone.start;
        drop(gone);
        let byte = |at: usize| {
            // SAFETY: the slab lives, and no piece has these bytes.
            unsafe { before.slab.map.as_ptr().add(at).read_volatile() }
        };
        let given_back = (first..first + 5 * PAGE).filter(|at| byte(*at) == 0).count();
        assert_eq!(given_back, 4 * PAGE, "all but the two pages that neighbours share");
        assert!(before.bytes().iter().chain(behind.bytes()).all(|byte| *byte == 7));
    }

    #[test]
    fn what_the_system_refuses_is_an_error() {
        let arena = Arena::default();
        for len in [usize::MAX, usize::MAX - 64, 1 << 60] {
            assert_eq!(arena.piece(len).unwrap_err(), len as u64);
        }
        assert_eq!(arena.piece(5).unwrap().bytes(), [0; 5]);
    }
}
