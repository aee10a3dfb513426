//! Memory of weights: matrices side by side on huge pages.
//!
//! A matrix of its own map would end in small pages, and one of less than a huge page, as all of a small model, would have no other.
//! Processors stop prefetching at the end of a page: a core of Zen 4 reads 31 GB/s from huge pages and 12 from small ones.
use memmap2::{MmapMut, MmapRaw};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;
/// Least bytes of a slab. What is never written to takes address space alone, except on systems that reserve it.
/// The last huge page of each slab may be partly used, so there are few slabs.
const SLAB: usize = if cfg!(target_os = "linux") { 256 << 20 } else { 0 };
/// Pieces begin on cache lines.
const LINE: usize = 64;

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
        let (map, start) = map_huge(len)?;
        Ok(Slab { map: map.into(), start, len })
    }
}

/// Maps `len` bytes, on huge pages if the system provides them, and says where they begin in the map.
///
/// Linux begins a map whose size is not a multiple of huge pages anywhere: of three huge pages and a half only two would be huge. So
/// the map has room to begin at one; address space is all that this takes. Other systems get ordinary maps.
pub fn map_huge(len: usize) -> Result<(MmapMut, usize), u64> {
    let room = if cfg!(target_os = "linux") { len.checked_add(HUGE) } else { Some(len.max(1)) };
    let room = room.ok_or(len as u64)?;
    let map = MmapMut::map_anon(room).map_err(|_| len as u64)?;
    let start = map.as_ptr().align_offset(HUGE).min(room - len);
    // Only a hint: if it fails everything works, but slower.
    #[cfg(target_os = "linux")]
    let _ = map.advise_range(memmap2::Advice::HugePage, start, len / HUGE * HUGE);
    Ok((map, start))
}

/// The slab that has room left, as long as one of its pieces lives, and how much of it is taken.
#[derive(Debug, Default)]
struct Last {
    slab: Weak<Slab>,
    used: usize,
}

/// Where pieces come from. A slab is given back with the last of its pieces.
#[derive(Debug, Default)]
pub struct Arena(Mutex<Last>);

impl Arena {
    /// `len` zeroed bytes, which begin on a cache line. On failure returns the number of bytes the system refused. Does not touch
    /// the memory: the thread that writes a page first has it on its own memory node.
    pub fn piece(&self, len: usize) -> Result<Piece, u64> {
        let lines = len.checked_next_multiple_of(LINE).ok_or(len as u64)?;
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, start) = match last.slab.upgrade() {
            Some(slab) if slab.len - last.used >= lines => (slab, last.used),
            _ => {
                let whole = lines.checked_next_multiple_of(HUGE).ok_or(len as u64)?;
                let slab =
                    Slab::new(whole.max(SLAB)).or_else(|_| Slab::new(lines)).map_err(|_| len as u64)?;
                let slab = Arc::new(slab);
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
        let arena = Arena::default();
        let lens = [1, 0, 64, 100, SLAB.max(HUGE) - 64, 3 * HUGE + 5, SLAB + 1, 7];
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
    fn what_the_system_refuses_is_an_error() {
        let arena = Arena::default();
        for len in [usize::MAX, usize::MAX - 64, 1 << 60] {
            assert_eq!(arena.piece(len).unwrap_err(), len as u64);
        }
        assert_eq!(arena.piece(5).unwrap().bytes(), [0; 5]);
    }
}
