//! Tests of the limits that a configuration comes to.

use super::*;
use crate::host::tests::fixtures::Tree;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// 64 GiB on two NUMA nodes, a GPU on each node, and a third GPU without a known node.
fn machine() -> HostFacts {
    let tree = Tree::machine(64 << 20, "0-15");
    tree.numa_node(0, "0-7", 32 << 20).numa_node(1, "8-15", 32 << 20);
    tree.device("0000:17:00.0", 0, "0x030200").device("0000:e5:00.0", 1, "0x030200");
    tree.device("0000:f0:00.0", -1, "0x030200").device("0000:01:00.0", 0, "0x020000");
    HostFacts::read(tree.root()).unwrap()
}

fn resolve(text: &str) -> Result<Limits, ConfigError> {
    Config::parse(text).unwrap().resolve(&machine())
}

#[test]
fn without_configuration_there_is_one_actor_with_a_gibibyte() {
    let limits = resolve("").unwrap();
    assert_eq!((limits.name.as_str(), limits.actors.len()), ("fixture", 1));
    let actor = &limits.actors[0];
    assert_eq!((actor.pci, actor.numa_node, actor.cpus.len()), (None, None, 16));
    assert_eq!((actor.arena.extents, actor.arena.extent.bytes), (32, 32 * MIB));
    assert_eq!(actor.store.high_watermark_bytes, GIB * 95 / 100);
    assert_eq!(actor.store.low_watermark_bytes, GIB * 93 / 100);
    assert_eq!(actor.store.max_pinned_bytes, GIB / 2);
    assert_eq!(actor.store.tenant_bytes, [u64::MAX]);
    assert_eq!(limits.tenants[0].name, "default");
    assert_eq!(limits.tenants[0].max_window_bytes, 4 * GIB, "64 windows of 64 MiB");
}

#[test]
fn sessions_of_all_tenants_together_take_a_quarter_of_the_descriptors() {
    let two = "tenants = [{ name = 'a', socket = '/a' }, { name = 'b', socket = '/b' }]";
    let session = |open_files| {
        let host = HostFacts { open_files, ..machine() };
        let session = Config::parse(two).unwrap().resolve(&host).unwrap().session;
        assert_eq!(session.shortage().is_some(), session.max_sessions < 64);
        [session.max_sessions, session.max_sessions_in_all, session.max_other_connections]
    };
    assert_eq!(session(1 << 20), [64, 65_536, 256]);
    assert_eq!(session(1_024), [32, 64, 64]);
    assert_eq!(session(16), [1, 1, 2], "one session can open");
    assert_eq!(session(u64::MAX), [64, u32::MAX, 256], "there is no limit");
}

#[test]
fn a_member_of_a_cluster_serves_http_to_other_hosts_unless_the_configuration_says_otherwise() {
    let cluster = "[cluster]\ncoordinator = 'host:7601'\nca = 'a'\ncertificate = 'b'\nkey = 'c'\n";
    let listens = |text: &str| resolve(text).unwrap().http_listen.to_string();
    assert_eq!(listens(""), "127.0.0.1:9440");
    assert_eq!(listens(cluster), "0.0.0.0:9440");
    assert_eq!(listens(&format!("[http]\nlisten = '127.0.0.1:7'\n{cluster}")), "127.0.0.1:7");
}

#[test]
fn write_windows_get_half_of_what_the_arena_leaves_unless_the_configuration_says_how_much() {
    let windows = |text: &str| -> Vec<u64> {
        resolve(text).unwrap().tenants.iter().map(|tenant| tenant.max_window_bytes).collect()
    };
    let two =
        "tenants = [{ name = 'a', socket = '/a' }, { name = 'b', socket = '/b', max_window_bytes = 5000 }]";
    assert_eq!(windows(&format!("host = {{ arena_bytes = '62GiB' }}\n{two}")), [992 * MIB, 8192]);
    let much = two.replace("5000", "'800MiB'");
    let both = windows(&format!("host = {{ arena_bytes = '62GiB' }}\n{much}"));
    assert_eq!(both, [592 * MIB, 800 * MIB], "half of what the other one leaves");
    assert_eq!(windows("host = { arena_bytes = '65440MiB' }"), [32 * MIB], "never less");
    let too_large = resolve("host = { arena_bytes = '65441MiB' }").unwrap_err().to_string();
    assert!(too_large.contains("96 MiB at least"), "{too_large}");
}

#[test]
fn requests_to_an_object_store_are_bounded() {
    for (key, number, most) in [("max_requests", i64::MAX, 65_536), ("queue_orders", 1 << 61, 1 << 20)] {
        let with = |number: i64| resolve(&format!("object = {{ url = 'file:///p', {key} = {number} }}"));
        let says = format!("`object.{key}` is {number}: set it to at most {most}");
        assert_eq!(with(number).unwrap_err().to_string(), says);
        assert!(with(most).is_ok() && with(most + 1).is_err());
    }
}

#[test]
fn a_coordinator_is_named_by_host_or_address_and_port() {
    for found in ["coordinator:7601", "10.0.0.1:7601", "[::1]:7601", "a.b.example:1"] {
        let keys = format!("coordinator = '{found}', ca = '/ca', certificate = '/c', key = '/k'");
        assert_eq!(
            resolve(&format!("cluster = {{ {keys} }}")).unwrap().cluster.unwrap().coordinators,
            [found]
        );
    }
    let several = "coordinator = 'a:1, b:2,[::1]:3', ca = '/ca', certificate = '/c', key = '/k'";
    let cluster = resolve(&format!("cluster = {{ {several} }}")).unwrap().cluster.unwrap();
    assert_eq!(cluster.coordinators, ["a:1", "b:2", "[::1]:3"]);
}

#[test]
fn each_gpu_gets_an_actor_on_its_numa_node_and_an_even_share() {
    let limits = resolve(
        r#"
        gpus = [{ pci = "0000:17:00.0" }, { pci = "0000:e5:00.0" }, { pci = "0000:f0:00.0" }]
        host = { arena_bytes = "12GiB", capacity_chunks = 8 }
        tenants = [{ name = "a", socket = "/a", max_bytes = "3GiB" }, { name = "b", socket = "/b" }]
        "#,
    )
    .unwrap();
    let nodes: Vec<_> = limits.actors.iter().map(|actor| (actor.numa_node, actor.cpus.to_string())).collect();
    assert_eq!(nodes, [(Some(0), "0-7".into()), (Some(1), "8-15".into()), (None, "0-15".into())]);
    let capacities: Vec<_> = limits.actors.iter().map(|actor| actor.store.capacity_chunks).collect();
    assert_eq!(capacities, [Some(3), Some(3), Some(2)], "the parts add up to the whole");
    for actor in &limits.actors {
        assert_eq!((actor.arena.bytes(), actor.arena.extent.bytes), (4 * GIB, 128 * MIB));
        assert_eq!(actor.arena.extent.numa_node, actor.numa_node);
        assert_eq!(actor.store.tenant_bytes, [GIB, u64::MAX]);
    }
}

#[test]
fn extents_follow_the_arena_between_two_bounds() {
    let extents = |host: &str| {
        let arena = &resolve(&format!("host = {{ {host} }}")).unwrap().actors[0].arena.clone();
        (arena.extents, arena.extent.bytes)
    };
    assert_eq!(extents(r#"arena_bytes = "4MiB""#), (2, 2 * MIB));
    assert_eq!(extents(r#"arena_bytes = "100MiB""#), (50, 2 * MIB));
    assert_eq!(extents(r#"arena_bytes = "200MiB""#), (33, 6 * MIB));
    assert_eq!(extents(r#"arena_bytes = "20GiB""#), (80, 256 * MIB));
    assert_eq!(extents(r#"arena_bytes = "1GiB", extent_bytes = "300MiB""#), (3, 300 * MIB));
}

#[test]
fn two_tenants_with_one_socket_are_refused_however_its_path_is_spelled() {
    for (one, other) in [("/tmp/a", "/tmp/../tmp//a"), ("a", "./a"), ("/none/a", "/none/./a")] {
        let tenants =
            format!("tenants = [{{ name = 'a', socket = '{one}' }}, {{ name = 'b', socket = '{other}' }}]");
        let error = resolve(&tenants).unwrap_err().to_string();
        assert!(error.contains(&format!("b has the socket {other} of")), "{error}");
    }
}

#[test]
fn impossible_settings_are_refused_with_the_remedy() {
    let long = format!("tenants = [{{ name = 'a', socket = '/{}' }}]", "x".repeat(107));
    let cases = [
        ("name = ''", "the node has no name: set `name`"),
        ("host = { policy = 'lfru' }", "[host] policy: there is no eviction policy `lfru`; there are: "),
        ("gpu = { policy = 'lfru' }", "[gpu] policy: there is no eviction policy `lfru`; there are: "),
        ("host = { arena_bytes = 0 }", "`host.arena_bytes` is 0"),
        (
            "host = { arena_bytes = '65GiB' }",
            "[host] arena_bytes is 65.0 GiB, the machine has 64.0 GiB: set it to 57.6 GiB",
        ),
        ("host = { arena_bytes = 4194303 }", "so set it to 4.0 MiB or more"),
        (
            "host = { arena_bytes = '1GiB', extent_bytes = '1GiB' }",
            "each needs at least 2 extents of 1.0 GiB, so set it to 2.0 GiB or more",
        ),
        (
            "host = { arena_bytes = '66GiB' }\ngpus = [{ pci = '0000:17:00.0' }]",
            "arena_bytes is 66.0 GiB, the machine",
        ),
        ("host = { extent_bytes = '1MiB' }", "[host] extent_bytes is 1.0 MiB: set it to 2.0 MiB or more"),
        (
            "host = { extent_bytes = 2097153 }",
            "(2097153 bytes): set it to 2.0 MiB or more, in multiples of 4096",
        ),
        ("host = { extent_bytes = 0 }", "[host] extent_bytes is 0"),
        ("host = { capacity_chunks = 0 }", "capacity_chunks is 0: each of the 1 actors"),
        ("host = { low_watermark = 0.95 }", "must be 0 < low < high <= 1"),
        ("host = { high_watermark = 1.5 }", "must be 0 < low < high <= 1"),
        ("host = { low_watermark = nan }", "must be 0 < low < high <= 1"),
        ("host = { low_watermark = 0.0 }", "must be 0 < low < high <= 1"),
        (
            "gpus = [{ pci = '0000:99:00.0' }]",
            "0000:99:00.0: no such device; this machine has 0000:17:00.0, ",
        ),
        ("gpus = [{ pci = '0000:17:00.0' }, { pci = '0000:17:00.0' }]", "names 0000:17:00.0 twice"),
        ("tenants = []", "no [[tenants]]: add one"),
        ("tenants = [{ name = 'a', socket = '' }]", "a socket's has 1 to 107"),
        (&long, "has 108 bytes; a socket's has 1 to 107"),
        (
            "tenants = [{ name = 'a', socket = \"/a\\u0000\" }]",
            "a\\0\" has 3 bytes; a socket's has 1 to 107, none of",
        ),
        ("tenants = [{ name = 'a', socket = '/a' }, { name = 'a', socket = '/b' }]", "has a twice"),
        (
            "tenants = [{ name = 'a', socket = '/a' }, { name = 'b', socket = '/a' }]",
            "b has the socket /a of",
        ),
        ("tenants = [{ name = 'a', socket = '/a', max_bytes = 0 }]", "`tenants.max_bytes` is 0"),
        (
            "trust_engines = true\ntenants = [{ name = 'a', socket = '/a' }, { name = 'b', socket = '/b' }]",
            "it needs a single tenant, not 2",
        ),
        ("session = { max_sessions = 0 }", "`session.max_sessions` is 0"),
        ("session = { max_window_bytes = 0 }", "`session.max_window_bytes` is 0"),
        ("session = { max_leased_blocks = 0 }", "`session.max_leased_blocks` is 0"),
        ("session = { reservation_ttl_ms = 0 }", "`session.reservation_ttl_ms` is 0"),
        ("session = { max_pin_ms = 0 }", "`session.max_pin_ms` is 0"),
        ("session = { max_lingering_processes = 0 }", "`session.max_lingering_processes` is 0"),
        (
            "session = { max_pinned_fraction = 1.1 }",
            "`session.max_pinned_fraction` is 1.1: set it to between",
        ),
    ];
    for (text, part) in cases {
        let error = resolve(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?} gives: {error}");
    }
}

#[test]
fn names_sizes_and_addresses_that_nobody_could_use_are_refused() {
    let endless = format!("name = '{}'", "x".repeat(10_000));
    let cluster = |keys: &str| format!("cluster = {{ {keys}, ca = '/ca', certificate = '/c', key = '/k' }}");
    let cases = [
        ("tenants = [{ name = '', socket = '/a' }]", "[[tenants]] name \"\": it must be 1 to 256 of"),
        (
            "tenants = [{ name = 'a b', socket = '/a' }]",
            "name \"a b\": it must be 1 to 256 of the characters",
        ),
        (
            "tenants = [{ name = 'a', socket = '/a', max_window_bytes = 0 }]",
            "`tenants.max_window_bytes` is 0",
        ),
        (
            "tenants = [{ name = 'a', socket = '/a', max_window_bytes = '63GiB' }]",
            "max_window_bytes together are 63.0 GiB, but the arena and the node itself leave 62.9 GiB (67561848832 bytes): lower",
        ),
        (
            "name = 'a/b'",
            "the node's name is \"a/b\": set `name` to 1 to 256 of the characters A-Z a-z 0-9 . _ -",
        ),
        ("name = \"a\\u0000\"", "the node's name is \"a\\0\": set `name`"),
        (&endless, "xxxx\"... (10000 bytes): set `name`"),
        ("disk = { folder = '', capacity_bytes = '1TiB' }", "[disk] folder is empty"),
        (
            "disk = { folder = '/d', capacity_bytes = '1MiB' }",
            "capacity_bytes is 1.0 MiB for 1 actors: each needs at least 4 segments of 256.0 MiB, so set it to 1.0 GiB or",
        ),
        (
            "disk = { folder = '/d', capacity_bytes = '1TiB', segment_bytes = 100 }",
            "each has at most 65536 segments, of 64.0 KiB to 16.0 GiB, in multiples of 4096",
        ),
        (
            "object = { url = 's3://b/p', settings = { colour = 'x' } }",
            "[object.settings] colour: there is no such setting of `s3://b/p`",
        ),
        (
            "object = { url = 'file:///p', settings = { region = 'x' } }",
            "[object.settings] region: there is no such",
        ),
        (
            &cluster("coordinator = 'host:7601', advertise = '10.0.0.1:0'"),
            "[cluster] advertise is 10.0.0.1:0: write",
        ),
        (
            &cluster("coordinator = 'a:1', block_threads = 9"),
            "`cluster.block_threads` is 9: set it to at most 8",
        ),
        (&cluster("coordinator = 'host:7601', advertise = '[::]:7'"), "[cluster] advertise is [::]:7: write"),
        (&cluster("coordinator = 'a:1', advertise = '[fd00::1]:7'"), "set listen to [::]:9441"),
        (
            "tenants = [{ name = 't', socket = '/s', max_bytes = '1KiB' }]",
            "[[tenants]] t: max_bytes is 1.0 KiB, less than a tenant's smallest part of the arena: set it to",
        ),
        (&cluster("coordinator = 'host'"), "[cluster] coordinator is `host`: write HOST:PORT"),
        (&cluster("coordinator = 'host:1,'"), "[cluster] coordinator is ``: write HOST:PORT"),
        (&cluster("coordinator = 'host:0'"), "[cluster] coordinator is `host:0`: write HOST:PORT"),
        (&cluster("coordinator = ':7601'"), "[cluster] coordinator is `:7601`: write HOST:PORT"),
        (&cluster("coordinator = '::1:7601'"), "[cluster] coordinator is `::1:7601`: write HOST:PORT"),
        (&cluster("coordinator = 'https://host:7601'"), "[cluster] coordinator is `https://host:7601`"),
        (
            &cluster("coordinator = 'host:7601', max_datagram_bytes = 10"),
            "[cluster] max_datagram_bytes is 10: set it to between 1200 and 65507",
        ),
        (&cluster("coordinator = 'host:7601', zone = 'two words'"), "[cluster] zone is"),
    ];
    for (text, part) in cases {
        let error = resolve(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?} gives: {error}");
    }
}

#[test]
fn too_many_gpus_are_refused() {
    let gpus: Vec<String> = (0..65).map(|i| format!("{{ pci = '0000:{i:02x}:00.0' }}")).collect();
    let error = resolve(&format!("gpus = [{}]", gpus.join(","))).unwrap_err();
    assert_eq!(error, ConfigError::TooManyGpus(65));
}

#[test]
fn an_arena_larger_than_the_control_group_is_refused_with_both_numbers() {
    let tree = Tree::machine(64 << 20, "0-3");
    tree.file("proc/self/cgroup", "0::/pod\n").file("sys/fs/cgroup/pod/memory.max", "536870912\n");
    let host = HostFacts::read(tree.root()).unwrap();
    let error = Config::default().resolve(&host).unwrap_err().to_string();
    let expected = "[host] arena_bytes is 1.0 GiB, the node's control group has 512.0 MiB: set it to";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn an_arena_larger_than_what_other_processes_leave_is_refused_at_the_start_and_not_before() {
    let tree = Tree::machine(64 << 20, "0-3");
    tree.file("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 524288 kB\n");
    let host = HostFacts::read(tree.root()).unwrap();
    let limits = Config::default().resolve(&host).unwrap();
    let error = limits.check_available(&host).unwrap_err().to_string();
    let expected =
        "[host] arena_bytes is 1.0 GiB, but other processes leave 512.0 MiB of this machine's memory now: ";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(limits.check_available(&machine()), Ok(()));
}

#[test]
fn a_machine_without_gpus_says_so() {
    let host = HostFacts::read(Tree::machine(64 << 20, "0").root()).unwrap();
    let config = Config::parse("gpus = [{ pci = '0000:17:00.0' }]").unwrap();
    let error = config.resolve(&host).unwrap_err().to_string();
    assert!(error.ends_with("this machine has no display controller: leave [[gpus]] out"), "{error}");
}
