//! Memory that the system can provide without swapping, within the limits of this process's container.
use std::path::Path;

pub fn available() -> Option<u64> {
    let machine = of_machine(&std::fs::read_to_string("/proc/meminfo").ok()?);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let container = of_groups(&groups, Path::new("/sys/fs/cgroup"));
    [machine, container].into_iter().flatten().min()
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Free memory by the tightest limit of the control groups named in `/proc/self/cgroup` and of all groups above them:
/// limit less use. Cached files count as free, because they can be dropped. A limit that cannot be read counts as none.
fn of_groups(groups: &str, root: &Path) -> Option<u64> {
    let mut min: Option<u64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit, usage, cache) = match controllers {
            "" => (root.to_path_buf(), "memory.max", "memory.current", "inactive_file "),
            c if c.split(',').any(|c| c == "memory") => (
                root.join("memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            ),
            _ => continue,
        };
        // Inside a container the path may be the host's: if a group is not found, try those above it.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let group = root.join(group);
            let number =
                |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
            let (Some(limit), Some(used)) = (number(limit), number(usage)) else { continue };
            let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            let cached = stat.lines().find_map(|l| l.strip_prefix(cache)?.trim().parse().ok()).unwrap_or(0);
            let free = limit.saturating_sub(used.saturating_sub(cached));
            min = Some(min.map_or(free, |min| min.min(free)));
        }
    }
    min
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_tightest_limit_counts() {
        assert_eq!(of_machine("MemFree: 1 kB\nMemAvailable:    20 kB\n"), Some(20 << 10));
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                ("a/memory.max", "1000\n"),
                ("a/memory.current", "700\n"),
                ("a/memory.stat", "anon 5\ninactive_file 100\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "600\n"),
                ("a/c/memory.max", "50\n"),
                ("a/c/memory.current", "60\n"),
                ("memory/d/memory.limit_in_bytes", "500\n"),
                ("memory/d/memory.usage_in_bytes", "80\n"),
            ],
        );
        assert_eq!(of_groups("0::/a/b\n", root), Some(400), "that of the parent");
        assert_eq!(of_groups("0::/a/c\n", root), Some(0), "more is used than allowed");
        assert_eq!(of_groups("4:cpu,memory:/d\n1:name=x:/a\n", root), Some(420));
        for none in ["", "0::/", "0::/nowhere", "what", "3:cpu:/a"] {
            assert_eq!(of_groups(none, root), None, "{none:?}");
        }
    }
}
