//! Memory in whole pages: of files, and huge ones.
use memmap2::{MmapMut, MmapOptions};
use std::fs::File;

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;

/// Maps `len` bytes, on huge pages if the system provides them, and says where they begin in the map.
///
/// Linux begins a map whose size is not a multiple of huge pages anywhere: of three huge pages and a half only two would be huge. So
/// the map has room to begin at one; address space is all that this takes. Other systems get ordinary maps. Memory that is not
/// `reserved` is refused when it is written to, not here, so that a map may be larger than the machine's memory.
pub fn map_huge(len: usize, reserved: bool) -> Result<(MmapMut, usize), u64> {
    let room = if cfg!(target_os = "linux") { len.checked_add(HUGE) } else { Some(len.max(1)) };
    let room = room.ok_or(len as u64)?;
    let mut options = MmapOptions::new();
    options.len(room);
    if !reserved {
        options.no_reserve_swap();
    }
    let map = options.map_anon().map_err(|_| len as u64)?;
    let start = map.as_ptr().align_offset(HUGE).min(room - len);
    // Only a hint: if it fails everything works, but slower.
    #[cfg(target_os = "linux")]
    let _ = map.advise_range(memmap2::Advice::HugePage, start, len / HUGE * HUGE);
    Ok((map, start))
}

/// Maps the first `len` bytes of a file. Its pages are shared with all processes that map it, until one is written to: that
/// page is then copied, and the file does not change.
pub fn copy_on_write(file: &File, len: usize) -> std::io::Result<MmapMut> {
    // SAFETY: the map lives as long as the returned value, and writes to it do not reach the file. Changes to the file by
    // other processes cannot be prevented; the documentation of `Pools::map` says so.
    unsafe { MmapOptions::new().len(len).map_copy(file) }
}
