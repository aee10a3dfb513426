//! The directory of a store: one process has it at a time, and its regions are as many and as large as the options say, or as large as they
//! were.
//!
//! With other options than before, blocks stay as far as there is room. Each region is a file that foyer reads by itself, up to where
//! its blocks end. So there may be more of them later, or fewer, and they may get longer. They cannot get shorter, because that would
//! cut blocks off: if fewer than [`LEAST_REGIONS`] of the old length fit, the store begins empty.
use super::room::{ages, check_room, leave_one_empty, remove_regions};
use super::{DiskOptions, NAME};
use crate::regions::{MOST_REGIONS, PAGE, REGION_BYTES, room_bytes};
use crate::{Regions, StoreError};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

const LOCK: &str = "kvist-store.lock";
const LAYOUT: &str = "kvist-store.layout";
const LEAST_REGIONS: u64 = Regions::LEAST;

/// Released by the system when the process ends, however it ends.
pub struct Lock(File);

impl Drop for Lock {
    /// Closing the file is not enough: a process that another thread is just starting has it too, until it runs its own program.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

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
        let Regions { n: regions, bytes: region_bytes } =
            Regions::new(options.capacity_bytes, options.largest_block_bytes);
        if region_bytes > u64::from(u32::MAX) {
            let most = u64::from(u32::MAX) * MOST_REGIONS;
            return Err(open(
                format!("a capacity of {} bytes is more than {most}", options.capacity_bytes),
                "Take less".into(),
            ));
        }
        if regions < LEAST_REGIONS {
            let problem = format!("a capacity of {} bytes is too small", options.capacity_bytes);
            let least = region_bytes * LEAST_REGIONS;
            return Err(open(problem, format!("Give it {least} bytes ({} MiB) or more", least >> 20)));
        }
        Ok(Layout {
            region_bytes,
            regions,
            buffer_bytes: room_bytes(options.largest_block_bytes).max(REGION_BYTES),
        })
    }

    /// When so many bytes have been written, every region has been written to: all of them, the one that is being filled, and
    /// what is buffered at both ends.
    pub fn cycle_bytes(&self) -> u64 {
        self.regions * self.region_bytes + 2 * (self.region_bytes + self.buffer_bytes)
    }

    fn text(&self) -> String {
        format!("kvist disk store 1: {} regions of {} bytes\n", self.regions, self.region_bytes)
    }

    /// The number of regions and their length.
    fn read(text: &str) -> Option<(u64, u64)> {
        let figures = text.strip_prefix("kvist disk store 1: ")?.strip_suffix(" bytes\n")?;
        let (regions, region_bytes) = figures.split_once(" regions of ")?;
        let (regions, region_bytes) = (regions.parse().ok()?, region_bytes.parse::<u32>().ok()?.into());
        (region_bytes >= REGION_BYTES && region_bytes % PAGE == 0).then_some((regions, region_bytes))
    }
}

/// What becomes of the regions that a directory has.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    layout: Layout,
    /// Regions that stay: the first ones.
    kept: u64,
    /// For the log: what does not stay, and how to keep it the next time.
    loss: Option<String>,
}

impl Plan {
    /// `before`: the text of the directory's layout file.
    fn of(dir: &Path, capacity_bytes: u64, wanted: Layout, before: Option<&str>) -> Plan {
        let Some(before) = before else { return Plan { layout: wanted, kept: 0, loss: None } };
        let dir = dir.display();
        let Some((regions, before_bytes)) = Layout::read(before) else {
            let loss = format!(
                "the blocks on disk in {dir} were removed: its files are those of another version of kvist ({:?}). Give each version \
                 a directory of its own",
                before.trim_end()
            );
            return Plan { layout: wanted, kept: 0, loss: Some(loss) };
        };
        let region_bytes = wanted.region_bytes.max(before_bytes);
        let fitting = capacity_bytes / region_bytes;
        if fitting < LEAST_REGIONS {
            let loss = format!(
                "the blocks on disk in {dir} were removed: its {regions} files of {before_bytes} bytes do not fit into {capacity_bytes} \
                 bytes, the size that was given now. To keep blocks the next time, give {} bytes or more",
                region_bytes.saturating_mul(LEAST_REGIONS)
            );
            return Plan { layout: wanted, kept: 0, loss: Some(loss) };
        }
        let layout = Layout { region_bytes, regions: fitting, ..wanted };
        let kept = regions.min(fitting);
        let loss = (kept < regions).then(|| {
            format!(
                "blocks on disk in {dir} were removed: the size that was given now, {capacity_bytes} bytes, has room for {kept} of its \
                 {regions} files. To keep all blocks the next time, give {} bytes or more",
                regions.saturating_mul(region_bytes)
            )
        });
        Plan { layout, kept, loss }
    }
}

/// A directory that is ready to be opened.
pub struct Prepared {
    pub lock: Lock,
    pub layout: Layout,
    /// Regions of earlier runs: the first ones.
    pub kept: u64,
    /// Of all regions.
    pub ages: Vec<Option<u64>>,
}

/// Takes the directory, and removes what the options leave no room for. If the disk has no room for more, no block is lost.
pub fn prepare(options: &DiskOptions) -> Result<Prepared, StoreError> {
    let (dir, wanted) = (&options.dir, Layout::of(options)?);
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
    let lock = Lock(lock);
    let path = dir.join(LAYOUT);
    let write = |error: io::Error| open(format!("cannot write {}: {error}", path.display()), writable);
    let before = match fs::read(&path) {
        Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(open(format!("cannot read {}: {error}", path.display()), writable)),
    };
    let Plan { layout, kept, loss } = Plan::of(dir, options.capacity_bytes, wanted, before.as_deref());
    check_room(options, &layout)?;
    remove_regions(dir, kept).map_err(write)?;
    let mut ages = ages(dir, layout.regions).map_err(read)?;
    leave_one_empty(dir, &mut ages).map_err(write)?;
    if let Some(loss) = loss {
        tracing::warn!(target: "kvist::store", "{loss}");
    }
    if before.as_deref() != Some(&layout.text()) {
        fs::write(&path, layout.text()).map_err(write)?;
    }
    Ok(Prepared { lock, layout, kept, ages })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    const MIB: u64 = 1 << 20;

    fn wanted(capacity_bytes: u64, largest_block_bytes: u64) -> Layout {
        let (dir, limits) = ("blocks".into(), Limits::default());
        Layout::of(&DiskOptions { dir, capacity_bytes, largest_block_bytes, limits }).unwrap()
    }

    /// The plan for `after` in the files of `before`, both a capacity and the largest block.
    fn plan(before: (u64, u64), after: (u64, u64)) -> Plan {
        let text = wanted(before.0, before.1).text();
        Plan::of(Path::new("blocks"), after.0, wanted(after.0, after.1), Some(&text))
    }

    /// The regions of a plan and their length, those that stay, and what of its loss is in the log.
    fn figures(plan: &Plan) -> (u64, u64, u64, &str) {
        let loss = plan.loss.as_deref().unwrap_or_default();
        (plan.layout.regions, plan.layout.region_bytes, plan.kept, loss)
    }

    #[test]
    fn blocks_stay_as_far_as_they_fit() {
        let gib = 1024 * MIB;
        for (before, after, expected) in [
            // The same; more; more, in larger regions; and back.
            ((gib, 1), (gib, 1), (64, 16 * MIB, 64)),
            ((gib, 1), (2 * gib, 1), (128, 16 * MIB, 64)),
            ((8 * gib, 1), (64 * gib, 1), (512, 128 * MIB, 512)),
            ((64 * gib, 1), (8 * gib, 1), (64, 128 * MIB, 64)),
            // Less, down to the least.
            ((gib, 1), (gib / 2, 1), (32, 16 * MIB, 32)),
            ((gib, 1), (128 * MIB, 1), (8, 16 * MIB, 8)),
            // Larger blocks need larger regions, and smaller ones keep those.
            ((gib, 1), (gib, 31 * MIB), (33, 31 * MIB + 3 * PAGE, 33)),
            ((gib, 31 * MIB), (gib, 1), (33, 31 * MIB + 3 * PAGE, 33)),
            // No room.
            ((64 * gib, 1), (gib - 1, 1), (63, 16 * MIB, 0)),
        ] {
            let plan = plan(before, after);
            let (regions, region_bytes, kept, loss) = figures(&plan);
            assert_eq!((regions, region_bytes, kept), expected, "{before:?} then {after:?}: {loss}");
            let had = wanted(before.0, before.1).regions;
            assert_eq!(loss.is_empty(), kept == had, "{loss}");
            assert!(plan.layout.regions * plan.layout.region_bytes <= after.0);
        }
    }

    /// Of no kvist: foyer addresses a region with 32 bits.
    const HUGE: &str = "kvist disk store 1: 8 regions of 8589934592 bytes\n";

    #[test]
    fn the_log_says_what_was_lost_and_how_to_keep_it() {
        let smaller = plan((1024 * MIB, 1), (512 * MIB, 1));
        assert_eq!(
            figures(&smaller).3,
            "blocks on disk in blocks were removed: the size that was given now, 536870912 bytes, has room for 32 of its 64 files. To \
             keep all blocks the next time, give 1073741824 bytes or more"
        );
        let none = plan((1 << 36, 1), (1 << 29, 1));
        assert_eq!(
            figures(&none).3,
            "the blocks on disk in blocks were removed: its 512 files of 134217728 bytes do not fit into 536870912 bytes, the size that \
             was given now. To keep blocks the next time, give 1073741824 bytes or more"
        );
        for strange in
            ["", "kvist disk store 2: 8 regions of 16777216 bytes\n", "kvist disk store 1: 8 regions", HUGE]
        {
            let plan = Plan::of(Path::new("blocks"), MIB << 10, wanted(MIB << 10, 1), Some(strange));
            assert_eq!((plan.kept, plan.layout), (0, wanted(MIB << 10, 1)));
            assert!(plan.loss.is_some_and(|loss| loss.contains("another version of kvist")), "{strange:?}");
        }
        let new = Plan::of(Path::new("blocks"), MIB << 10, wanted(MIB << 10, 1), None);
        assert_eq!(new, Plan { layout: wanted(MIB << 10, 1), kept: 0, loss: None });
    }

    #[test]
    fn the_text_of_a_layout_says_what_it_is() {
        let layout = wanted(1 << 30, 1);
        assert_eq!(Layout::read(&layout.text()), Some((layout.regions, layout.region_bytes)));
    }
}
