//! Memory in whole pages: of a file, or zeroed memory from anonymous maps, on huge pages if the system provides them. With 4 KiB pages, streaming a large
//! cache spends a third of the time in address translation.
use crate::arch::copy_on_write;
use memmap2::MmapMut;
use std::fs::File;

/// Whole cache lines of zeroed memory.
#[derive(Debug)]
pub struct Pages {
    map: MmapMut,
    len: usize,
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
            return Ok(Pages { map: MmapMut::map_anon(1).map_err(refused)?, len });
        }
        let map = MmapMut::map_anon(len).map_err(refused)?;
        #[cfg(not(target_os = "linux"))]
        let _ = huge;
        #[cfg(target_os = "linux")]
        if huge && len >= HUGE {
            // Only a hint: if it fails everything works, but slower.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Pages { map, len })
    }

    /// The first `len` bytes of a file, shared with all processes that map it. Pages that are written to become copies of
    /// this process.
    pub fn of_file(file: &File, len: usize) -> std::io::Result<Self> {
        Ok(Pages { map: copy_on_write(file, len)?, len })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.len]
    }
}
