//! The room of the regions: a file for each, which has all of it from the start.
use super::age::age;
use super::{DiskOptions, Layout, NAME};
use crate::StoreError;
use std::fs;
#[cfg(target_os = "linux")]
use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// foyer names them so.
const REGIONS: &str = "foyer-storage-direct-fs-";

fn regions(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(REGIONS) {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

/// Removes all regions but the first `kept`.
pub(super) fn remove_regions(dir: &Path, kept: u64) -> io::Result<()> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(REGIONS)?.parse::<u64>().ok();
    let goes = |path: &PathBuf| number(path).is_none_or(|number| number >= kept);
    regions(dir)?.into_iter().filter(goes).try_for_each(fs::remove_file)
}

fn region(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{REGIONS}{number:08}"))
}

/// The [age] of each of so many regions.
pub(super) fn ages(dir: &Path, n_regions: u64) -> io::Result<Vec<Option<u64>>> {
    (0..n_regions).map(|number| age(&region(dir, number))).collect()
}

/// Removes the oldest of the regions with these [ages] if none of them is empty. foyer empties a region when it takes the last empty one, and never
/// writes again if it finds none when it is opened: after a kill between the two, or with fewer regions than before.
pub(super) fn leave_one_empty(dir: &Path, ages: &mut [Option<u64>]) -> io::Result<()> {
    if ages.iter().any(Option::is_none) {
        return Ok(());
    }
    let Some((number, age)) = (0..).zip(ages).min_by_key(|(_, age)| **age) else { return Ok(()) };
    fs::remove_file(region(dir, number))?;
    *age = None;
    Ok(())
}

/// Asks first: taking room that is not there would fill the disk before it fails.
#[cfg(unix)]
pub(super) fn check_room(options: &DiskOptions, layout: &Layout) -> Result<(), StoreError> {
    use std::os::unix::fs::MetadataExt;
    let read = |error: io::Error| no_room(options, &error.to_string());
    let taken: io::Result<u64> =
        regions(&options.dir).map_err(read)?.iter().map(|path| Ok(fs::metadata(path)?.blocks() * 512)).sum();
    let needed = (layout.regions * layout.region_bytes).saturating_sub(taken.map_err(read)?);
    let disk = nix::sys::statvfs::statvfs(&options.dir).map_err(|error| read(error.into()))?;
    // The types of these counts differ between systems.
    #[allow(clippy::useless_conversion)]
    let free = u64::from(disk.blocks_available()).saturating_mul(u64::from(disk.fragment_size()));
    match needed <= free {
        true => Ok(()),
        false => {
            Err(no_room(options, &format!("the disk has {free} bytes free, and {needed} more are needed")))
        }
    }
}

#[cfg(not(unix))]
pub(super) fn check_room(_: &DiskOptions, _: &Layout) -> Result<(), StoreError> {
    Ok(())
}

/// Takes the room of all regions now: foyer cannot go on after a write that failed for lack of it.
#[cfg(target_os = "linux")]
pub(super) fn reserve(dir: &Path, region_bytes: u64) -> io::Result<()> {
    use nix::errno::Errno;
    use nix::fcntl::{FallocateFlags, fallocate};
    for path in regions(dir)? {
        let file = OpenOptions::new().write(true).open(path)?;
        let length = i64::try_from(region_bytes).map_err(|_| io::Error::from(ErrorKind::FileTooLarge))?;
        match fallocate(&file, FallocateFlags::empty(), 0, length) {
            Ok(()) => {}
            // This file system cannot. Then a full disk shows as failed writes.
            Err(Errno::EOPNOTSUPP) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn reserve(_: &Path, _: u64) -> io::Result<()> {
    Ok(())
}

pub(super) fn no_room(options: &DiskOptions, error: &str) -> StoreError {
    StoreError::Open {
        store: NAME.into(),
        problem: format!(
            "cannot take {} bytes in {}: {error}",
            options.capacity_bytes,
            options.dir.display()
        ),
        advice: "Free some room on that disk, or give the store less".into(),
    }
}
