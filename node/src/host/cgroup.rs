//! The memory limit that control groups set on this process.

use std::path::Path;

/// The lowest limit of the process's groups and the groups above them, version 1 and 2; `None` where none is set.
pub(super) fn memory_limit(root: &Path) -> Option<u64> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    groups.lines().filter_map(|line| limit_of_group(root, line)).min()
}

/// The lowest limit on the way up from a group, given as a line of `/proc/self/cgroup`: `4:memory:/pod` (version 1) or
/// `0::/pod` (version 2).
///
/// In a container the path may be the one outside of it: then only the mount's root exists, which is the container's own.
fn limit_of_group(root: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let (mounts, file): (&[&str], _) = match controllers {
        "" => (&["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (&["sys/fs/cgroup/memory"], "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let path = Path::new(path.trim_start_matches('/'));
    let limit = |mount: &str, group: &Path| {
        std::fs::read_to_string(root.join(mount).join(group).join(file)).ok()?.trim().parse().ok()
    };
    mounts.iter().flat_map(|mount| path.ancestors().filter_map(move |group| limit(mount, group))).min()
}

#[cfg(test)]
mod tests {
    use crate::host::HostFacts;
    use crate::host::fixtures::Tree;

    fn limit(tree: &Tree) -> Option<u64> {
        HostFacts::read(tree.root()).unwrap().cgroup_limit_bytes
    }

    #[test]
    fn the_lowest_limit_of_version_2_on_the_way_up_counts() {
        let tree = Tree::machine(64 << 20, "0");
        tree.file("proc/self/cgroup", "0::/kubepods/pod1/engine\n");
        tree.file("sys/fs/cgroup/kubepods/pod1/engine/memory.max", "max\n");
        assert_eq!(limit(&tree), None);
        tree.file("sys/fs/cgroup/kubepods/pod1/memory.max", "1073741824\n");
        tree.file("sys/fs/cgroup/kubepods/memory.max", "8589934592\n");
        assert_eq!(limit(&tree), Some(1 << 30));
    }

    #[test]
    fn a_limit_of_version_1_counts_and_its_absence_does_not() {
        let tree = Tree::machine(64 << 20, "0");
        tree.file("proc/self/cgroup", "9:name=systemd:/\n4:hugetlb,memory:/a\n0::/\n");
        tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(&tree), None);
        tree.file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2147483648\n");
        assert_eq!(limit(&tree), Some(2 << 30));
    }

    #[test]
    fn in_a_container_the_limit_is_found_at_the_mounts_root() {
        let tree = Tree::machine(64 << 20, "0");
        tree.file("proc/self/cgroup", "0::/kubepods/pod1\n");
        tree.file("sys/fs/cgroup/memory.max", "1048576\n");
        assert_eq!(limit(&tree), Some(1 << 20));
    }
}
