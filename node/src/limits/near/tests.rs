//! Whole configurations, resolved on machines of one to eight NUMA nodes.

use super::*;
use crate::config::Config;
use crate::host::tests::fixtures::Tree;
use crate::host::tests::machines::{dgx, eighths, facts, quarters, with_cxl, workstation};
use crate::limits::{ConfigError, Limits};

fn resolve(tree: &Tree, gpus: &[&str], rest: &str) -> Result<Limits, ConfigError> {
    let gpus: Vec<String> = gpus.iter().map(|pci| format!("{{ pci = '{pci}' }}")).collect();
    let config = Config::parse(&format!("gpus = [{}]\n{rest}", gpus.join(","))).unwrap();
    config.resolve(&facts(tree))
}

/// One line per actor: the GPU's node, the CPUs of the actor's threads, the arena's node and binding, the nearest interface.
fn places(limits: &Limits) -> Vec<String> {
    let node = |node: Option<u32>| node.map_or_else(|| "-".to_owned(), |node| node.to_string());
    let line = |actor: &ActorLimits| {
        for cpus in [&actor.arena.cpus, &actor.copy.cpus] {
            assert_eq!(*cpus, actor.cpus, "all threads of an actor are near its GPU");
        }
        let (gpu, arena) = (node(actor.numa_node), node(actor.arena.extent.numa_node));
        let interface = actor.interface.as_deref().unwrap_or("-");
        format!("{gpu} {} {arena} {:?} {interface}", actor.cpus, actor.arena.extent.binding)
    };
    limits.actors.iter().map(line).collect()
}

const CLUSTER: &str = "ca = 'c'\ncertificate = 'c'\nkey = 'k'\ncoordinator = 'c:1'\n";

#[test]
fn on_one_node_everything_is_there_whatever_the_firmware_says() {
    let limits = resolve(&workstation(), &["0000:01:00.0"], "").unwrap();
    assert_eq!(places(&limits), ["0 0-15 0 Strict enp2s0"]);
    assert_eq!(limits.mismatches, []);
}

#[test]
fn eight_gpus_of_two_sockets_have_the_cpus_and_memory_of_theirs_and_an_interface_each() {
    let gpus = ["1b", "3e", "4e", "5f", "9d", "bd", "cd", "dd"].map(|bus| format!("0000:{bus}:00.0"));
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let limits = resolve(&dgx(), &gpus, "host.arena_bytes = '1TiB'").unwrap();
    let expected: Vec<String> = (0..8)
        .map(|gpu| match gpu {
            0..4 => format!("0 0-55,112-167 0 Strict gpu{}", 7 - gpu),
            _ => format!("1 56-111,168-223 1 Strict gpu{}", 7 - gpu),
        })
        .collect();
    assert_eq!((places(&limits), limits.mismatches), (expected, vec![]));
    let bytes: u64 = limits.actors.iter().map(|actor| actor.arena.bytes()).sum();
    assert_eq!(bytes, 1 << 40, "each byte once");
}

#[test]
fn of_four_parts_one_lacks_memory_one_cpus_and_one_gpu_is_not_placed_and_the_node_starts() {
    let gpus = ["0000:21:00.0", "0000:41:00.0", "0000:61:00.0", "0000:81:00.0"];
    let limits = resolve(&quarters(), &gpus, "").unwrap();
    let expected =
        ["0 0-7 0 Strict eth1", "1 8-15 0 Strict eth1", "2 0-7 2 Strict eth1", "- 0-15,24-31 - Strict -"];
    assert_eq!(places(&limits), expected);
    let mismatches = [
        Mismatch::NoMemory { numa_node: 1, instead: Some(0) },
        Mismatch::NoCpus { numa_node: 2, instead: Some(0) },
        Mismatch::UnplacedGpu { pci: gpus[3].parse().unwrap() },
    ];
    assert_eq!(limits.mismatches, mismatches);
}

#[test]
fn of_eight_parts_each_gpu_has_its_own() {
    let gpus: Vec<String> = (0..8).map(|node| format!("0000:{:02x}:00.0", 0x11 + 0x18 * node)).collect();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let limits = resolve(&eighths(), &gpus, "").unwrap();
    let expected: Vec<String> = (0..8)
        .map(|node| format!("{node} {}-{} {node} Strict eth{}", node * 16, node * 16 + 15, node / 4))
        .collect();
    assert_eq!((places(&limits), limits.mismatches), (expected, vec![]));
}

#[test]
fn a_gpu_at_a_node_without_cpus_gets_those_of_the_nearest_node() {
    let gpus = ["0000:17:00.0", "0000:98:00.0"];
    let limits = resolve(&with_cxl(), &gpus, "").unwrap();
    assert_eq!(places(&limits), ["0 0-31 0 Strict eth0", "2 32-63 2 Strict eth0"]);
    assert_eq!(limits.mismatches, [Mismatch::NoCpus { numa_node: 2, instead: Some(1) }]);

    let tree = with_cxl();
    tree.file("proc/self/status", "Cpus_allowed_list:\t0-63\nMems_allowed_list:\t0,2\n");
    tree.file("sys/devices/pci0000:97/0000:97:01.0/0000:98:00.0/numa_node", "1");
    let limits = resolve(&tree, &gpus, "").unwrap();
    assert_eq!(places(&limits)[1], "1 32-63 0 Strict eth0", "memory alone comes last, however near");
}

#[test]
fn arenas_that_do_not_fit_onto_their_node_are_asked_for_there_and_no_failure() {
    let rest = "host.arena_bytes = '300GiB'";
    let limits = resolve(&with_cxl(), &["0000:17:00.0"], rest).unwrap();
    assert_eq!(places(&limits), ["0 0-31 0 Preferred eth0"]);
    let [mismatch] = &limits.mismatches[..] else { panic!("{:?}", limits.mismatches) };
    let expected = "the arenas for NUMA node 0 take 300.0 GiB, the NUMA node has 256.0 GiB: other NUMA nodes";
    assert!(mismatch.to_string().starts_with(expected), "{mismatch}");
    assert_eq!(<&str>::from(mismatch), "arenas_too_large");
}

#[test]
fn the_peer_thread_is_near_the_interface_of_its_address_else_near_the_first_gpu() {
    let place = |address: &str, gpus: &[&str]| {
        let rest = format!("[cluster]\n{CLUSTER}{address}");
        let PeerPlace { interface, numa_node, cpus, .. } =
            resolve(&dgx(), gpus, &rest).unwrap().cluster.unwrap().place;
        (interface, numa_node, cpus.to_string())
    };
    let first = (None, Some(1), "56-111,168-223".to_owned());
    assert_eq!(place("", &["0000:9d:00.0", "0000:1b:00.0"]), first, "the first GPU is at socket 1");
    let bond = (Some("bond0".to_owned()), Some(1), "56-111,168-223".to_owned());
    assert_eq!(place("listen = '10.1.0.7:9441'", &["0000:1b:00.0"]), bond);
    let management = (Some("eno1".to_owned()), Some(0), "0-55,112-167".to_owned());
    assert_eq!(place("advertise = '10.0.0.7:9441'", &["0000:9d:00.0"]), management);
    assert_eq!(place("", &[]), (None, None, "0-223".to_owned()), "nobody says anything");
}

#[test]
fn windows_do_not_count_on_memory_that_a_limit_has_for_an_arena_without_huge_pages() {
    let tree = Tree::machine(64 << 20, "0-7");
    tree.numa_node(0, "0-7", 64 << 20);
    tree.huge_pages(None, 16 * 512, 16 * 512).huge_pages(Some(0), 16 * 512, 16 * 512);
    let of_a_limit = |gib: u64| {
        let host = HostFacts { cgroup_limit_bytes: Some(gib << 30), ..HostFacts::read(tree.root()).unwrap() };
        let limits = Config::parse("host.arena_bytes = '16GiB'").unwrap().resolve(&host).unwrap();
        limits.tenants[0].max_window_bytes
    };
    assert_eq!(of_a_limit(18), 992 << 20, "the pod asks for 2 GiB of ordinary memory");
    assert_eq!(of_a_limit(3), 1_504 << 20, "this limit is for all but the arena");
}

#[test]
fn huge_pages_count_beside_the_limit_of_ordinary_memory_as_far_as_they_are_reserved() {
    let tree = workstation();
    tree.file("proc/self/cgroup", "0::/pod\n").file("sys/fs/cgroup/pod/memory.max", "1073741824\n");
    tree.huge_pages(None, 8 * 512, 8 * 512).huge_pages(Some(0), 8 * 512, 8 * 512);
    let arena = |rest: &str| resolve(&tree, &[], rest).map(drop).map_err(|error| error.to_string());
    assert_eq!(arena("host.arena_bytes = '8GiB'"), Ok(()), "all of it in huge pages");
    assert_eq!(arena("host.arena_bytes = '9120MiB'"), Ok(()), "and as much as the group allows, less 96 MiB");
    let error = arena("host.arena_bytes = '10GiB'").unwrap_err();
    assert!(error.contains("the node's control group has 9.0 GiB"), "{error}");
    let error = arena("host = { arena_bytes = '2GiB', huge_pages = 'never' }").unwrap_err();
    assert!(error.contains("the node's control group has 1.0 GiB"), "{error}");

    tree.file("sys/fs/cgroup/pod/hugetlb.2MB.max", "2147483648\n");
    let error = arena("host.arena_bytes = '4GiB'").unwrap_err();
    assert!(
        error.contains("the node's control group has 3.0 GiB"),
        "the group limits huge pages too: {error}"
    );
}

#[test]
fn huge_pages_that_this_node_or_engines_of_its_life_before_still_have_are_only_not_available() {
    let available = |tree: &Tree, rest: &str| {
        let host = facts(tree);
        let limits = Config::parse(rest).unwrap().resolve(&host).unwrap();
        assert_eq!(limits.mismatches, []);
        limits.check_available(&host).map_err(|error| error.to_string())
    };
    let most = "host.arena_bytes = '16GiB'\ngpus = [{ pci = '0000:01:00.0' }]\n\
        tenants = [{ name = 'a', socket = '/a', max_window_bytes = '4GiB' }]";
    let tree = Tree::machine(24 << 20, "0-15");
    tree.numa_node(0, "0-15", 24 << 20).device("0000:01:00.0", 0, "0x030200");
    tree.huge_pages(None, 16 * 512, 16 * 512).huge_pages(Some(0), 16 * 512, 16 * 512);
    assert_eq!(available(&tree, most), Ok(()));
    tree.huge_pages(None, 16 * 512, 0).huge_pages(Some(0), 16 * 512, 0);
    let error = available(&tree, most).unwrap_err();
    assert!(error.contains("other processes leave 7.9 GiB"), "{error}");

    let tree = workstation();
    tree.file("proc/self/cgroup", "0::/pod\n").file("sys/fs/cgroup/pod/memory.max", "1073741824\n");
    tree.huge_pages(None, 16 * 512, 8 * 512).huge_pages(Some(0), 16 * 512, 8 * 512);
    assert_eq!(available(&tree, "host.arena_bytes = '8GiB'"), Ok(()));
    let error = available(&tree, "host.arena_bytes = '10GiB'").unwrap_err();
    assert!(error.contains("other processes leave 8.9 GiB"), "the group holds the rest: {error}");
}

#[test]
fn block_threads_suit_the_link_and_leave_most_cpus_to_others() {
    let threads = |megabits_per_second, cpus: u32| {
        let (interface, numa_node) = (None, None);
        PeerPlace { interface, numa_node, megabits_per_second, cpus: (0..cpus).collect() }.block_threads()
    };
    let rates = [Some(1_000), Some(20_000), Some(25_000), Some(100_000), Some(400_000), None];
    assert_eq!(rates.map(|rate| threads(rate, 64)), [0, 0, 2, 5, 8, 8]);
    assert_eq!([2, 4, 8, 16].map(|cpus| threads(None, cpus)), [0, 1, 2, 4]);
    assert_eq!(threads(Some(100_000), 8), 2);
}
