//! Machines as they are sold, as fixtures: one, two, four and eight NUMA nodes, with GPUs and network interfaces.

use super::fixtures::Tree;
use crate::host::HostFacts;

/// A workstation or virtual machine: one NUMA node, and firmware that places no device.
pub(crate) fn workstation() -> Tree {
    let tree = Tree::machine(64 * GIB, "0-15");
    tree.numa_node(0, "0-15", 64 * GIB).distances(0, "10");
    tree.device_at("pci0000:00/0000:00:01.0/0000:01:00.0", -1, GPU);
    tree.nic_at("pci0000:00/0000:00:1c.0/0000:02:00.0", -1, "enp2s0");
    tree
}

/// Two sockets and eight GPUs. Each GPU has a switch with a network interface below it (`gpu0` to `gpu7`). Each socket has an
/// interface for storage; both are members of a bond. One more interface is for management.
pub(crate) fn dgx() -> Tree {
    let tree = Tree::machine(2_048 * GIB, "0-223");
    tree.numa_node(0, "0-55,112-167", 1_024 * GIB).distances(0, "10 21");
    tree.numa_node(1, "56-111,168-223", 1_024 * GIB).distances(1, "21 10");
    for (gpu, bus) in (0_u8..).zip(DGX_BUSES) {
        let node = i32::from(gpu / 4);
        let switch = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0", bus + 1);
        tree.device_at(&format!("{switch}/0000:{:02x}:00.0/0000:{:02x}:00.0", bus + 2, bus + 6), node, GPU);
        let nic = format!("{switch}/0000:{:02x}:01.0/0000:{:02x}:00.0", bus + 2, bus + 3);
        tree.nic_at(&nic, node, &format!("gpu{}", 7 - gpu));
    }
    tree.nic_at("pci0000:29/0000:29:02.0/0000:2a:00.0", 0, "storage0");
    tree.nic_at("pci0000:a9/0000:a9:02.0/0000:aa:00.0", 1, "storage1");
    tree.nic_at("pci0000:00/0000:00:1c.0/0000:02:00.0", 0, "eno1");
    tree.interface("virtual/net/bond0", 9_000, "up").interface("virtual/net/lo", 65_536, "unknown");
    tree.link("sys/devices/virtual/net/bond0/lower_storage1", "../../../pci0000:a9");
    tree.file(
        "proc/net/route",
        &routes(&[("eno1", "0000000A", "0000FFFF"), ("bond0", "0000010A", "0000FFFF")]),
    );
    tree
}

/// One socket in four parts, each with a GPU. The firmware does not place the last GPU. Parts 0 and 3 have network interfaces;
/// the interface at part 0 is down. Part 1 has no memory, and this process may not use the CPUs of part 2.
pub(crate) fn quarters() -> Tree {
    let tree = Tree::machine(96 * GIB, "0-31");
    for node in 0..4_u32 {
        let memory = if node == 1 { 0 } else { 32 * GIB };
        tree.numa_node(node, &format!("{}-{}", node * 8, node * 8 + 7), memory);
        let distances = (0..4).map(|to| if to == node { "10 " } else { "12 " }).collect::<String>();
        tree.distances(node, &distances);
        let placed = if node == 3 { -1 } else { node.cast_signed() };
        let bus = 0x20 * (node + 1);
        tree.device_at(
            &format!("pci0000:{bus:02x}/0000:{bus:02x}:01.1/0000:{:02x}:00.0", bus + 1),
            placed,
            GPU,
        );
    }
    tree.nic_at("pci0000:20/0000:20:03.1/0000:28:00.0", 0, "eth0");
    tree.file("sys/devices/pci0000:20/0000:20:03.1/0000:28:00.0/net/eth0/operstate", "down\n");
    tree.nic_at("pci0000:88/0000:88:03.1/0000:89:00.0", 3, "eth1");
    tree.file("proc/self/status", "Cpus_allowed_list:\t0-15,24-31\nMems_allowed_list:\t0-3\n");
    tree
}

/// Two sockets of four parts each. Each part has a GPU, and each socket's second part has a network interface.
pub(crate) fn eighths() -> Tree {
    let tree = Tree::machine(1_024 * GIB, "0-127");
    for node in 0..8_u32 {
        tree.numa_node(node, &format!("{}-{}", node * 16, node * 16 + 15), 128 * GIB);
        let distance = |to: u32| match () {
            () if to == node => "10 ",
            () if to / 4 == node / 4 => "12 ",
            () => "32 ",
        };
        tree.distances(node, &(0..8).map(distance).collect::<String>());
        let bus = 0x10 + 0x18 * node;
        let root = format!("pci0000:{bus:02x}");
        tree.device_at(
            &format!("{root}/0000:{bus:02x}:01.1/0000:{:02x}:00.0", bus + 1),
            node.cast_signed(),
            GPU,
        );
        if node % 4 == 1 {
            let nic = format!("{root}/0000:{bus:02x}:03.1/0000:{:02x}:00.0", bus + 8);
            tree.nic_at(&nic, node.cast_signed(), &format!("eth{}", node / 4));
        }
    }
    tree
}

/// Two sockets, and a third NUMA node: memory behind CXL, nearer to socket 1. The firmware places the second GPU on the third
/// node.
pub(crate) fn with_cxl() -> Tree {
    let tree = Tree::machine(768 * GIB, "0-63");
    tree.numa_node(0, "0-31", 256 * GIB).distances(0, "10 21 24");
    tree.numa_node(1, "32-63", 256 * GIB).distances(1, "21 10 14");
    tree.numa_node(2, "", 256 * GIB).distances(2, "24 14 10");
    tree.device_at("pci0000:16/0000:16:01.0/0000:17:00.0", 0, GPU);
    tree.device_at("pci0000:97/0000:97:01.0/0000:98:00.0", 2, GPU);
    tree.nic_at("pci0000:97/0000:97:02.0/0000:a0:00.0", 1, "eth0");
    tree
}

/// The facts of a machine.
pub(crate) fn facts(tree: &Tree) -> HostFacts {
    HostFacts::read(tree.root()).unwrap()
}

/// `/proc/net/route` with connected networks: interface, network and mask as they stand in memory.
fn routes(networks: &[(&str, &str, &str)]) -> String {
    let line = |(interface, network, mask): &(&str, &str, &str)| {
        format!("{interface}\t{network}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n")
    };
    let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
    std::iter::once(head.to_owned()).chain(networks.iter().map(line)).collect()
}

/// The root buses of eight switches.
const DGX_BUSES: [u8; 8] = [0x15, 0x38, 0x48, 0x59, 0x97, 0xb7, 0xc7, 0xd7];

/// A GiB in the kernel's unit, kB.
const GIB: u64 = 1 << 20;

/// The class of a GPU without outputs.
const GPU: &str = "0x030200";

fn near(tree: &Tree, gpu: &str) -> Option<String> {
    facts(tree).interface_near(gpu.parse().unwrap()).map(str::to_owned)
}

#[test]
fn the_interface_below_the_switch_of_a_gpu_is_the_nearest_to_it() {
    let tree = dgx();
    for (gpu, bus) in (0..8).zip(DGX_BUSES) {
        let address = format!("0000:{:02x}:00.0", bus + 6);
        assert_eq!(near(&tree, &address), Some(format!("gpu{}", 7 - gpu)), "of {address}");
    }
}

#[test]
fn without_a_common_switch_the_nearest_node_counts_and_one_that_is_down_comes_last() {
    let tree = eighths();
    assert_eq!(near(&tree, "0000:29:00.0").as_deref(), Some("eth0"), "on the GPU's own part");
    assert_eq!(near(&tree, "0000:a1:00.0").as_deref(), Some("eth1"), "on its socket");
    let tree = quarters();
    assert_eq!(near(&tree, "0000:21:00.0").as_deref(), Some("eth1"), "the near one is down");
    assert_eq!(near(&tree, "0000:81:00.0"), None, "nobody knows where that GPU is");
    assert_eq!(near(&workstation(), "0000:01:00.0").as_deref(), Some("enp2s0"), "there is one node");
}

#[test]
fn the_interface_of_an_address_is_that_of_the_most_specific_route() {
    let facts = facts(&dgx());
    let to = |address: &str| facts.interface_to(address.parse().unwrap());
    assert_eq!((to("10.0.7.7"), to("10.1.0.1"), to("192.0.2.1")), (Some("eno1"), Some("bond0"), None));
    assert_eq!(to("127.0.0.1"), Some("lo"));
    assert_eq!(facts.numa_node_of_interface("bond0"), Some(1), "where what it is made of is");
}

#[test]
fn routes_of_both_families_are_read() {
    let tree = workstation();
    tree.file(
        "proc/net/route",
        &routes(&[("enp2s0", "00000000", "00000000"), ("x", "0002000A", "00FFFFFF")]),
    );
    let line = |network: &str, bits, interface| {
        format!("{network} {bits} {0} 00 {0} 00000100 1 0 00000001 {interface}\n", "0".repeat(32))
    };
    let own = "20010db8000000000000000000000001";
    let v6 = line("20010db8000000000000000000000000", "40", "enp2s0") + &line(own, "80", "lo");
    let facts = facts(tree.file("proc/net/ipv6_route", &v6));
    let to = |address: &str| facts.interface_to(address.parse().unwrap());
    assert_eq!((to("10.0.2.9"), to("192.0.2.1")), (Some("x"), Some("enp2s0")));
    assert_eq!((to("2001:db8::1"), to("2001:db9::1")), (Some("enp2s0"), None));
    assert_eq!(to("::ffff:10.0.2.9"), Some("x"));
}

#[test]
fn what_a_node_lacks_comes_from_the_nearest_that_has_it() {
    let cxl = facts(&with_cxl());
    assert_eq!((cxl.node_with_cpus(Some(2)), cxl.node_with_memory(Some(2))), (Some(1), Some(2)));
    let quarters = facts(&quarters());
    assert_eq!((quarters.node_with_memory(Some(1)), quarters.node_with_cpus(Some(1))), (Some(0), Some(1)));
    assert_eq!((quarters.node_with_cpus(Some(2)), quarters.node_with_memory(Some(2))), (Some(0), Some(2)));
    assert_eq!(quarters.node_with_cpus(None), None);
}
