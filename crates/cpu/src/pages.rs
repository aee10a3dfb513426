//! Memory in whole pages: of a file, or zeroed memory from anonymous maps, on huge pages if the system provides them. With 4 KiB pages, streaming a large
//! cache spends a third of the time in address translation.
use crate::arch::copy_on_write;
use kvist_device::Reservation;
use memmap2::MmapMut;
use std::fs::File;
use std::sync::Arc;

/// Whole cache lines of zeroed memory.
#[derive(Debug)]
pub struct Pages {
    map: MmapMut,
    len: usize,
    /// Given back after the map is gone, and after all others who keep it.
    _memory: Option<Arc<Reservation>>,
}

/// Below this size no huge page fits, so an ordinary map is as good.
const HUGE: usize = 2 << 20;

impl Pages {
    /// Allocates `len` bytes, 64-byte aligned. On failure returns the number of bytes the system refused. Does not
    /// touch the pages: the thread that writes a page first has it on its own memory node.
    pub fn new(len: usize) -> Result<Self, u64> {
        Pages::of(len, true)
    }

    /// Like [`new`](Self::new), with or without huge pages.
    pub fn of(len: usize, huge: bool) -> Result<Self, u64> {
        let refused = |_| len as u64;
        if len == 0 {
            return Ok(Pages { map: MmapMut::map_anon(1).map_err(refused)?, len, _memory: None });
        }
        let map = MmapMut::map_anon(len).map_err(refused)?;
        #[cfg(not(target_os = "linux"))]
        let _ = huge;
        #[cfg(target_os = "linux")]
        if huge && len >= HUGE {
            // Only a hint: if it fails everything works, but slower.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Pages { map, len, _memory: None })
    }

    /// The first `len` bytes of a file, shared with all processes that map it. Pages that are written to become copies of
    /// this process. `memory` is what a file that lies in memory takes of the budget.
    pub fn of_file(file: &File, len: usize, memory: Option<Arc<Reservation>>) -> std::io::Result<Self> {
        Ok(Pages { map: copy_on_write(file, len)?, len, _memory: memory })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.len]
    }
}
