//! The limits that control groups set on this process.

use std::path::Path;

/// The lowest memory limit of the process's groups and the groups above them, version 1 and 2; `None` if none is set.
pub(super) fn memory_limit(root: &Path) -> Option<u64> {
    lowest(&values(root, "memory", "memory.max", "memory.limit_in_bytes"))
}

/// The lowest limit of huge pages of 2 MiB, found the same way. Memory limits do not count these pages.
pub(super) fn huge_page_limit(root: &Path) -> Option<u64> {
    lowest(&values(root, "hugetlb", "hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes"))
}

/// The contents of a file in each group of this process and in the groups above it: the file `v2` in groups of version 2, the
/// file `v1` in the controller's groups of version 1. `root` is `/` for this machine.
///
/// In a container, the kernel may give the path on the host. Then only the mount's root exists; it is the container's own group.
pub fn values(root: &Path, controller: &str, v2: &str, v1: &str) -> Vec<String> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in groups.lines() {
        // `4:memory:/pod` (version 1) or `0::/pod` (version 2).
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let v1_mount = format!("sys/fs/cgroup/{controller}");
        let (mounts, file): (&[&str], _) = match controllers {
            "" => (&["sys/fs/cgroup", "sys/fs/cgroup/unified"], v2),
            _ if controllers.split(',').any(|name| name == controller) => (&[&v1_mount], v1),
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        let places =
            mounts.iter().flat_map(|mount| path.ancestors().map(move |group| root.join(mount).join(group)));
        found.extend(places.filter_map(|place| std::fs::read_to_string(place.join(file)).ok()));
    }
    found
}

fn lowest(values: &[String]) -> Option<u64> {
    values.iter().filter_map(|value| value.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use crate::host::HostFacts;
    use crate::host::tests::fixtures::Tree;

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
