//! Tests of reading a machine's facts, with the machines that the tests share.

use self::fixtures::Tree;
use super::*;

pub(crate) mod fixtures;
pub(crate) mod machines;

#[test]
fn a_machine_of_one_node_places_every_device_there() {
    let tree = Tree::machine(24 << 20, "0-1");
    tree.numa_node(0, "0-1", 24 << 20).device("0000:65:00.0", -1, "0x030200");
    let facts = HostFacts::read(tree.root()).unwrap();
    assert_eq!(facts.name, "fixture");
    assert_eq!(facts.memory_bytes, 24 << 30);
    assert_eq!(facts.cgroup_limit_bytes, None);
    assert_eq!(facts.cpus.to_string(), "0-1");
    let gpu = "0000:65:00.0".parse().unwrap();
    assert_eq!(facts.pci[&gpu].numa_node, None);
    assert_eq!(facts.numa_node_of(Some(gpu)), Some(0));
}

#[test]
fn each_gpu_of_a_machine_of_two_nodes_is_placed_on_its_own() {
    let tree = Tree::machine(64 << 20, "0-15");
    tree.numa_node(0, "0-3,8-11", 32 << 20).numa_node(1, "4-7,12-15", 32 << 20);
    tree.device("0000:17:00.0", 0, "0x030200").device("0000:e5:00.0", 1, "0x030200");
    tree.device("0000:ff:00.0", -1, "0x020000");
    let facts = HostFacts::read(tree.root()).unwrap();
    let node = |address: &str| facts.numa_node_of(Some(address.parse().unwrap()));
    assert_eq!(node("0000:17:00.0"), Some(0));
    assert_eq!(node("0000:e5:00.0"), Some(1));
    assert_eq!(node("0000:ff:00.0"), None, "nobody knows, and there are two nodes");
    assert_eq!(facts.numa_node_of(None), None);
    assert_eq!(facts.cpus_near(Some(1)).to_string(), "4-7,12-15");
    assert_eq!(facts.cpus_near(None).to_string(), "0-15");
    assert_eq!(facts.numa_nodes[&1].memory_bytes, 32 << 30);
}

#[test]
fn only_the_cpus_that_the_process_may_use_count() {
    let tree = Tree::machine(64 << 20, "0-7");
    tree.numa_node(0, "0-3", 32 << 20).numa_node(1, "4-7", 32 << 20);
    tree.file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t2-3\n");
    let facts = HostFacts::read(tree.root()).unwrap();
    assert_eq!(facts.cpus.to_string(), "2-3");
    assert_eq!(facts.cpus_near(Some(0)).to_string(), "2-3");
    assert_eq!(facts.cpus_near(Some(1)).to_string(), "2-3", "no CPU of node 1 may be used");
}

#[test]
fn a_kernel_without_numa_or_pci_is_a_machine_too() {
    let facts = HostFacts::read(Tree::machine(1 << 20, "0").root()).unwrap();
    assert!(facts.numa_nodes.is_empty() && facts.pci.is_empty());
    assert_eq!(facts.numa_node_of(None), None);
}

#[test]
fn a_missing_or_strange_file_is_named() {
    let tree = Tree::machine(1 << 20, "0");
    tree.file("proc/meminfo", "MemTotal: lots");
    let error = HostFacts::read(tree.root()).unwrap_err().to_string();
    assert!(error.contains("proc/meminfo has no MemTotal:"), "{error}");
    tree.remove("proc/meminfo");
    let error = HostFacts::read(tree.root()).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.ends_with("proc/meminfo"), "{error}");
}

#[test]
fn this_machine_can_be_read() {
    let facts = HostFacts::read(Path::new("/")).unwrap();
    assert!(facts.memory_bytes >= facts.available_bytes && !facts.cpus.is_empty());
}
