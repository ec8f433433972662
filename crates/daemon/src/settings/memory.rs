//! What the maps of disks may take of the memory that the process may use. That is what the machine
//! has, or the limit of a control group that the process is in, whichever is less (Linux,
//! `admin-guide/cgroup-v2.rst`, "memory.max"; `admin-guide/cgroup-v1/memory.rst`,
//! "memory.limit_in_bytes").

use super::Size;
use mica_qcow2::CACHE_BYTES_DEFAULT;
use std::fs;
use std::path::Path;

/// Which part of the memory the maps of volumes may take by default, and what they may at most, in
/// bytes: they have an entry for each 4 KiB that was written by itself, 16 times those of images.
const VOLUMES_CACHE_PART: u64 = 64;
const VOLUMES_CACHE_MAX: u64 = 1 << 30;

/// Where control groups are.
const GROUPS: &str = "/sys/fs/cgroup";
/// The limit of a group of version 2, and of version 1, which has a hierarchy for memory.
const LIMIT: &str = "memory.max";
const LIMIT_V1: &str = "memory.limit_in_bytes";
const HIERARCHY_V1: &str = "memory";

/// What the maps of a process may take, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct MapBudgets {
    /// Those of all images.
    pub(crate) images: u64,
    /// Those of the volumes of each store.
    pub(crate) volumes: u64,
}

impl MapBudgets {
    /// The largest of what is said of several disks, or of one. Looks at what the sandbox hides.
    pub(crate) fn largest(given: impl Iterator<Item = Option<Size>>) -> Self {
        let part = usable_bytes() / VOLUMES_CACHE_PART;
        let usual = Self {
            images: CACHE_BYTES_DEFAULT,
            volumes: part.clamp(CACHE_BYTES_DEFAULT, VOLUMES_CACHE_MAX),
        };
        let all = given.map(|given| match given {
            Some(Size(bytes)) => Self { images: bytes, volumes: bytes },
            None => usual,
        });
        let larger = |one: Self, other: Self| Self {
            images: one.images.max(other.images),
            volumes: one.volumes.max(other.volumes),
        };
        all.reduce(larger).unwrap_or(usual)
    }
}

/// The memory that the process may use, in bytes.
fn usable_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = u64::from(info.mem_unit).saturating_mul(info.totalram);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine.min(limit_of(&groups, Path::new(GROUPS)).unwrap_or(u64::MAX))
}

/// The least limit of the `groups`, as the system lists them, and of those that they are in.
fn limit_of(groups: &str, root: &Path) -> Option<u64> {
    groups.lines().filter_map(|line| limit_of_line(line, root)).min()
}

fn limit_of_line(line: &str, root: &Path) -> Option<u64> {
    let (_, line) = line.split_once(':')?;
    let (controllers, group) = line.split_once(':')?;
    let (root, file) = match controllers {
        "" => (root.to_owned(), LIMIT),
        _ if controllers.split(',').any(|one| one == HIERARCHY_V1) => {
            (root.join(HIERARCHY_V1), LIMIT_V1)
        }
        _ => return None,
    };
    // In a container the root may be the group, whatever it is called outside.
    let inside = Path::new(group.trim_start_matches('/'));
    let limits = inside.ancestors().filter_map(|group| {
        let limit = fs::read_to_string(root.join(group).join(file)).ok()?;
        // Without one there is a word.
        limit.trim().parse().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, limit: &str) {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, limit).unwrap();
    }

    #[test]
    fn least_limit_of_a_group_and_those_that_it_is_in_counts() {
        let root = tempfile::tempdir().unwrap();
        let limit = |groups: &str| limit_of(groups, root.path());
        assert_eq!(limit("0::/a/b\n"), None);
        write(root.path(), "a/b/memory.max", "max\n");
        assert_eq!(limit("0::/a/b\n"), None);
        write(root.path(), "a/memory.max", "3000\n");
        assert_eq!(limit("0::/a/b\n"), Some(3000));
        write(root.path(), "memory/c/memory.limit_in_bytes", "2000\n");
        assert_eq!(limit("5:cpu:/c\n4:hugetlb,memory:/c\n0::/a/b\n"), Some(2000));
        // The group's own, in a container that does not see its path.
        write(root.path(), "memory.max", "1000\n");
        assert_eq!(limit("0::/outside\n"), Some(1000));
        assert_eq!(limit("what is this?\n"), None);
    }

    #[test]
    fn process_may_use_some() {
        assert!(usable_bytes() > 1 << 20);
    }
}
