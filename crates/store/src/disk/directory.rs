//! The directory of a store: one process has it at a time, and its regions are as many and as large as the options say.
use super::room::remove_regions;
use super::{DiskOptions, NAME, OVERHEAD_BYTES, PAGE, REGION_BYTES};
use crate::{Frame, StoreError};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

const LOCK: &str = "kvist-store.lock";
const LAYOUT: &str = "kvist-store.layout";
/// Above that, regions get larger: each is an open file.
const MOST_REGIONS: u64 = 512;
const LEAST_REGIONS: u64 = 8;

/// Released by the system when the process ends, however it ends.
pub struct Lock(#[allow(dead_code)] File);

/// How the files are divided: other figures cannot read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub region_bytes: u64,
    pub regions: u64,
    pub buffer_bytes: u64,
}

impl Layout {
    pub fn of(options: &DiskOptions) -> Result<Layout, StoreError> {
        let open = |problem: String, advice: String| StoreError::Open { store: NAME.into(), problem, advice };
        // foyer addresses a region with 32 bits.
        let largest = u64::from(u32::MAX) / 2;
        if options.largest_block_bytes > largest {
            let problem = format!("blocks of {} bytes are more than {largest}", options.largest_block_bytes);
            return Err(open(problem, "Take smaller blocks".into()));
        }
        let block =
            (options.largest_block_bytes + Frame::HEAD_BYTES as u64 + OVERHEAD_BYTES).next_multiple_of(PAGE);
        let region_bytes =
            block.max(REGION_BYTES).max((options.capacity_bytes / MOST_REGIONS).next_multiple_of(PAGE));
        if region_bytes > u64::from(u32::MAX) {
            let most = u64::from(u32::MAX) * MOST_REGIONS;
            return Err(open(
                format!("a capacity of {} bytes is more than {most}", options.capacity_bytes),
                "Take less".into(),
            ));
        }
        let regions = options.capacity_bytes / region_bytes;
        if regions < LEAST_REGIONS {
            let problem = format!("a capacity of {} bytes is too small", options.capacity_bytes);
            return Err(open(problem, format!("Give it {} bytes or more", region_bytes * LEAST_REGIONS)));
        }
        Ok(Layout { region_bytes, regions, buffer_bytes: block.max(REGION_BYTES) })
    }

    /// When so many bytes have been written, every region has been written to: all of them, the one that is being filled, and
    /// what is buffered at both ends.
    pub fn cycle_bytes(&self) -> u64 {
        self.regions * self.region_bytes + 2 * (self.region_bytes + self.buffer_bytes)
    }

    fn text(&self) -> String {
        format!("kvist disk store 1: {} regions of {} bytes\n", self.regions, self.region_bytes)
    }
}

/// Takes the directory, and empties it if its files are of another layout.
pub fn prepare(dir: &Path, layout: &Layout) -> Result<Lock, StoreError> {
    let open = |problem: String, advice: &str| StoreError::Open {
        store: NAME.into(),
        problem,
        advice: advice.into(),
    };
    let writable = "Give a directory that this user may write to";
    fs::create_dir_all(dir)
        .map_err(|error| open(format!("cannot create {}: {error}", dir.display()), writable))?;
    let path = dir.join(LOCK);
    let is_ours = path.exists();
    let read = |error: io::Error| open(format!("cannot read {}: {error}", dir.display()), writable);
    if !is_ours && fs::read_dir(dir).map_err(read)?.next().is_some() {
        let problem = format!("{} contains files that are not a store's", dir.display());
        return Err(open(problem, "Give an empty directory: old blocks are overwritten"));
    }
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let lock = lock.map_err(|error| open(format!("cannot write {}: {error}", path.display()), writable))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let problem = format!("another process uses {}", dir.display());
            return Err(open(problem, "Stop it, or give each process a directory of its own"));
        }
        Err(TryLockError::Error(error)) => {
            let problem = format!("cannot lock {}: {error}", path.display());
            return Err(open(problem, "Give a directory on a local disk"));
        }
    }
    let path = dir.join(LAYOUT);
    let write = |error: io::Error| open(format!("cannot write {}: {error}", path.display()), writable);
    if !matches!(fs::read_to_string(&path), Ok(text) if text == layout.text()) {
        remove_regions(dir).map_err(write)?;
        fs::write(&path, layout.text()).map_err(write)?;
    }
    Ok(Lock(lock))
}
