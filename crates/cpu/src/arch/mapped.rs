//! Files as memory.
use memmap2::{MmapMut, MmapOptions};
use std::fs::File;

/// Maps the first `len` bytes of a file. Its pages are shared with all processes that map it, until one is written to: that
/// page is then copied, and the file does not change.
pub fn copy_on_write(file: &File, len: usize) -> std::io::Result<MmapMut> {
    // SAFETY: the map lives as long as the returned value, and writes to it do not reach the file. Changes to the file by
    // other processes cannot be prevented; the documentation of `Pools::map` says so.
    unsafe { MmapOptions::new().len(len).map_copy(file) }
}
