//! Memory by the page: zeroed, and on huge pages where the system gives them. With pages of 4 KiB a stream through
//! a large cache waits for address translation a third of the time.
use memmap2::MmapMut;

/// Whole cache lines of zeroed memory.
#[derive(Debug)]
pub struct Pages {
    map: MmapMut,
    len: usize,
}

/// Below this, an ordinary map is as good: no huge page would fit.
const HUGE: usize = 2 << 20;

impl Pages {
    /// `len` bytes, 64-byte aligned, or the number of bytes the system refused. Nothing is touched yet: whoever
    /// writes first has the page near.
    pub fn new(len: usize) -> Result<Self, u64> {
        Pages::of(len, true)
    }

    /// The same, asking for huge pages or not.
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
            // A wish: without it everything works, slower.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Pages { map, len })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.len]
    }
}
