//! Faults that are planted in a sane machine, one by one, and found.

mod machine;

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use machine::Machine;

use super::clock::ClockState;
use super::probes::Disk;
use super::*;

/// The finding that a fault leads to: its check, its severity, and a part of its text.
type Expected = (&'static str, Level, &'static str);

/// A fault.
type Plant = fn(&mut Machine);

fn find(plant: Plant) -> Vec<Finding> {
    let mut machine = Machine::sane();
    plant(&mut machine);
    machine.examine().into_iter().filter(|finding| finding.level > Level::Ok).collect()
}

/// Each fault is the only finding, and has a remedy.
fn each_is_found(faults: &[(Plant, Expected)]) {
    for (plant, (check, level, part)) in faults {
        let found = find(*plant);
        let expected = found.iter().find(|finding| finding.check == *check && finding.level == *level);
        let finding = expected.unwrap_or_else(|| panic!("{check} is not among {found:#?}"));
        assert!(finding.found.contains(part), "{check} does not say {part}: {finding:?}");
        assert!(finding.advice.as_ref().is_some_and(|advice| !advice.is_empty()), "{finding:?}");
        assert!(found.iter().all(|other| other.check == *check), "more than {check} is found: {found:#?}");
    }
}

#[test]
fn on_a_sane_machine_nothing_is_found() {
    assert_eq!(find(|_| ()), []);
}

#[test]
fn a_socket_may_be_named_relative_to_the_folder_where_the_node_starts() {
    assert_eq!(find(|m| m.set_socket("a.sock")), []);
    assert_eq!(find(|m| m.set_socket("missing/a.sock")), []);
}

#[test]
fn faults_of_memory_are_found() {
    each_is_found(&[
        (|m| m.huge_pages(0), ("huge pages", Level::Warning, "0 B of the arena's 1.0 GiB")),
        (
            |m| m.file("proc/self/limits", &machine::limits("65536", "1048576")),
            ("memlock", Level::Warning, "at most 64.0 KiB may be locked, the arena has 1.0 GiB"),
        ),
        (
            |m| m.file("proc/sys/vm/memfd_noexec", "2"),
            ("shared memory", Level::Problem, "refused (vm.memfd_noexec=2)"),
        ),
        (|m| m.file("proc/sys/vm/max_map_count", "500"), ("shared memory", Level::Problem, "may map 500")),
        (
            |m| m.file("proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n"),
            ("swap", Level::Warning, "swap the arena out"),
        ),
    ]);
}

#[test]
fn an_arena_that_does_not_fit_is_found() {
    let found = find(|m| {
        m.huge_pages(0);
        m.file("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 524288 kB\n");
    });
    let memory = found.iter().find(|finding| finding.check == "memory").unwrap();
    assert_eq!(memory.level, Level::Problem);
    assert!(memory.found.contains("takes 1.0 GiB in ordinary pages, 512.0 MiB are available"), "{memory:?}");

    let found = find(|m| {
        m.huge_pages(0);
        m.file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never] deny force");
        m.file("sys/fs/cgroup/pod/memory.max", "1174405120");
        m.file("proc/sys/vm/overcommit_memory", "2");
        m.file(
            "proc/meminfo",
            "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\nCommitLimit: 9 kB\nCommitted_AS: 0 kB\n",
        );
    });
    let checks: Vec<_> = found.iter().map(|finding| (finding.check, finding.level)).collect();
    let expected = [
        ("memory", Level::Warning),
        ("huge pages", Level::Warning),
        ("transparent huge pages", Level::Warning),
        ("shared memory", Level::Problem),
    ];
    assert_eq!(checks, expected, "{found:#?}");
}

#[test]
fn faults_of_processors_are_found() {
    each_is_found(&[
        (
            |m| m.file("sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/numa_node", "-1"),
            ("NUMA", Level::Warning, "does not tell the NUMA node of GPU 0000:17:00.0"),
        ),
        (
            |m| m.file("proc/sys/kernel/numa_balancing", "1"),
            ("NUMA balancing", Level::Warning, "pages to move"),
        ),
        (
            |m| m.file("sys/fs/cgroup/pod/cpu.max", "150000 100000"),
            ("CPU quota", Level::Warning, "1.5 CPUs for 5 threads"),
        ),
    ]);
}

#[test]
fn faults_of_the_system_are_found() {
    each_is_found(&[
        (
            |m| m.file("proc/self/limits", &machine::limits("unlimited", "256")),
            ("open files", Level::Problem, "256 may be open"),
        ),
        (
            |m| m.file("proc/self/limits", &machine::limits("unlimited", "800")),
            ("open files", Level::Warning, "800 may be open: a tenant gets 50 sessions, not 64"),
        ),
        (
            |m| m.file("proc/sys/kernel/io_uring_disabled", "2"),
            ("io_uring", Level::Warning, "kernel.io_uring_disabled=2"),
        ),
        (
            |m| m.probes.io_uring = Err("Operation not permitted".into()),
            ("io_uring", Level::Warning, "Operation not permitted"),
        ),
        (
            |m| m.probes.clock = Some(ClockState::Unsynchronised),
            ("clock", Level::Warning, "nothing keeps it right"),
        ),
        (
            |m| m.probes.clock = Some(ClockState::Synchronised { error_us: 9_000_000 }),
            ("clock", Level::Warning, "off by 9.0 s"),
        ),
        (
            |m| m.config = m.config.replace("0000:17:00.0", "0000:99:00.0"),
            ("configuration", Level::Problem, "0000:99:00.0: no such device"),
        ),
    ]);
}

#[test]
fn what_copies_of_gpu_memory_would_lack_is_found() {
    each_is_found(&[
        (|m| m.remove("proc/driver/nvidia/version"), ("GPU", Level::Note, "no NVIDIA driver is loaded")),
        (
            |m| {
                m.file(
                    "proc/driver/nvidia/version",
                    "NVRM version: NVIDIA UNIX Kernel Module  570.133.20  x\n",
                )
            },
            ("GPU", Level::Note, "the driver is of version 570"),
        ),
        (
            |m| m.probes.cuda = Err("no CUDA driver is installed".into()),
            ("CUDA", Level::Note, "no CUDA driver is installed"),
        ),
        (|m| m.remove("dev/nvidia-uvm"), ("GPU devices", Level::Note, "does not see /dev/nvidia-uvm")),
        (
            |m| m.link("proc/self/ns/pid", "pid:[4026532201]"),
            ("GPU memory sharing", Level::Note, "a PID namespace of its own"),
        ),
        (|m| m.gpu_lanes("8"), ("GPU link", Level::Note, "GPU 0000:17:00.0 has 8 of 16 PCIe lanes")),
    ]);
}

#[test]
fn faults_of_the_network_are_found() {
    each_is_found(&[
        (
            |m| m.file("proc/sys/net/core/rmem_max", "212992"),
            ("UDP buffers", Level::Warning, "208.0 KiB at most, QUIC asks for 4.0 MiB"),
        ),
        (
            |m| {
                m.remove("proc/sys/net/core/rmem_max");
                m.probes.udp_buffer_bytes = Some(212_992);
            },
            ("UDP buffers", Level::Warning, "208.0 KiB at most"),
        ),
        (|m| m.probes.gso_segments = 1, ("GSO", Level::Warning, "one by one")),
        (|m| m.path_mtu(1_500), ("MTU", Level::Warning, "to peer:9441 carries packets of 1500")),
        (|m| m.interface_mtu(1_500), ("MTU", Level::Note, "carries packets of 1500")),
        (|m| m.interface_mtu(1_000), ("MTU", Level::Problem, "carries packets of 1000")),
        (
            |m| m.probes.targets[0].address = Err("no such host".into()),
            ("MTU", Level::Problem, "peer:9441 cannot be found: no such host"),
        ),
        (|m| m.remove("proc/net/route"), ("MTU", Level::Problem, "no route leads to peer:9441")),
    ]);
}

#[test]
fn faults_of_certificates_are_found() {
    each_is_found(&[
        (|m| m.now += machine::DAYS * 120, ("certificate", Level::Problem, "expired 20 days ago")),
        (
            |m| m.now += machine::DAYS * 94,
            ("certificate", Level::Warning, "larder://node/node-0 expires in 5 days"),
        ),
        (|m| m.now -= Duration::from_secs(7_200), ("certificate", Level::Problem, "becomes valid in ")),
        (
            |m| m.config = m.config.replace("node-0", "node-1"),
            ("certificate", Level::Problem, "belongs to larder://node/node-0, not to the node node-1"),
        ),
        (
            |m| m.issue(&larder_protocol::identity::Identity::engine("red", "node-0")),
            ("certificate", Level::Problem, "larder://engine/red/node-0, not to the node node-0"),
        ),
        (Machine::change_authority, ("certificate", Level::Problem, "none of the authorities")),
        (
            |m| m.credentials("key.pem", "garbage"),
            ("certificate", Level::Problem, "the file has no private key"),
        ),
        (
            |m| m.set_mode("key.pem", 0o644),
            ("private key", Level::Problem, "everybody on this host can read"),
        ),
        (|m| m.set_mode("key.pem", 0o660), ("private key", Level::Warning, "the group can replace")),
    ]);
}

#[test]
fn a_new_certificate_of_30_days_is_no_fault() {
    assert_eq!(find(|m| m.now += machine::DAYS * 71), []);
}

#[test]
fn faults_of_folders_are_found() {
    let disk = |file_system: &str, is_direct| {
        let (folder, file_system) = ("/var/lib/larder".into(), file_system.to_owned());
        Some(Disk { folder, file_system, free_bytes: 1 << 40, tier_bytes: 0, is_direct })
    };
    each_is_found(&[
        (|m| m.set_mode("run", 0o777), ("socket", Level::Problem, "anybody can write")),
        (
            |m| m.credentials("run/larder.sock", "text"),
            ("socket", Level::Problem, "not a socket: the node will not start"),
        ),
    ]);
    let faults = [
        (disk("tmpfs", Ok(true)), Level::Problem, "lost at a restart"),
        (disk("nfs", Ok(true)), Level::Warning, "over the network"),
        (disk("overlayfs", Ok(false)), Level::Warning, "has no O_DIRECT"),
        (disk("ext4", Err("Permission denied".into())), Level::Problem, "Permission denied"),
    ];
    for (disk, level, part) in faults {
        let mut machine = Machine::sane();
        machine.probes.disk = disk;
        let found = machine.examine();
        let finding = found.iter().find(|finding| finding.check == "disk").unwrap();
        assert!(finding.level == level && finding.found.contains(part), "{finding:?}");
    }
}

#[test]
fn a_drive_that_does_not_answer_is_a_problem() {
    let mut machine = Machine::sane();
    machine.probes.patience = Duration::from_secs(20);
    machine.probes.silent.push(("disk", "the drive of /var/lib/larder".to_owned()));
    let finding = machine.examine().into_iter().find(|finding| finding.check == "disk").unwrap();
    assert_eq!(
        (finding.level, &*finding.found),
        (Level::Problem, "the drive of /var/lib/larder has not answered for 20 s")
    );
}

#[test]
fn a_disk_tier_has_the_space_that_is_free_and_its_own_and_more_is_found() {
    let level_of = |free_gib: u64, tier_gib: u64| {
        let mut machine = Machine::sane();
        machine.config += "[disk]\nfolder = '/var/lib/larder'\ncapacity_bytes = '1TiB'\n";
        let (free_bytes, tier_bytes) = (free_gib << 30, tier_gib << 30);
        let (folder, file_system, is_direct) = ("/var/lib/larder".into(), "ext4".to_owned(), Ok(true));
        machine.probes.disk = Some(Disk { folder, file_system, free_bytes, tier_bytes, is_direct });
        let finding = machine.examine().into_iter().find(|finding| finding.check == "disk").unwrap();
        (finding.level, finding.found)
    };
    assert_eq!(level_of(1_024, 0).0, Level::Ok);
    assert_eq!(level_of(1, 1_023).0, Level::Ok, "the tier of a running node has its space");
    let (level, found) = level_of(500, 23);
    assert_eq!(level, Level::Warning);
    assert!(found.contains("takes 1.0 TiB, and has 523.0 GiB there"), "{found}");
}

#[test]
fn the_bytes_of_a_tiers_own_files_are_found_and_not_those_of_an_actor_that_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    for device in ["device-0", "device-1"] {
        std::fs::create_dir(folder.path().join(device)).unwrap();
        std::fs::write(folder.path().join(device).join("segments"), vec![1; 1 << 20]).unwrap();
    }
    let Disk { tier_bytes, .. } = Disk::probe(folder.path(), 1);
    assert!((1 << 20..2 << 20).contains(&tier_bytes), "{tier_bytes}");
}

#[test]
fn a_log_that_cannot_be_written_is_found() {
    each_is_found(&[
        (
            |m| m.config += "[audit]\npath = '/proc/larder/audit'\n",
            ("log", Level::Problem, "cannot write /proc/larder/audit, the path of [audit]"),
        ),
        (
            |m| m.config += "[record]\npath = '/proc/larder/record'\n",
            ("log", Level::Problem, "cannot write /proc/larder/record, the path of [record]"),
        ),
    ]);
    assert_eq!(find(|m| m.log_in_own_folder()), []);
}

#[test]
fn an_object_store_that_cannot_be_used_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let level_of = |url: String| {
        let mut machine = Machine::sane();
        machine.set_object(&url);
        let found = machine.examine();
        let finding = found.into_iter().find(|finding| finding.check == "object store").unwrap();
        (finding.level, finding.found)
    };
    assert_eq!(level_of(format!("file://{}", folder.path().display())).0, Level::Ok);
    let (level, found) = level_of("file:///proc/larder".into());
    assert!(level == Level::Warning && found.contains("check that this user can write"), "{found}");
}

#[test]
fn many_faults_at_once_are_all_found() {
    let found = find(|m| {
        m.huge_pages(0);
        m.file("proc/self/limits", &machine::limits("65536", "256"));
        m.file("proc/sys/kernel/numa_balancing", "1");
        m.file("proc/sys/kernel/io_uring_disabled", "2");
        m.file("proc/sys/net/core/wmem_max", "212992");
        m.file("sys/fs/cgroup/pod/cpu.max", "100000 100000");
        m.probes.gso_segments = 1;
        m.probes.clock = Some(ClockState::Unsynchronised);
        m.path_mtu(1_500);
        m.now += machine::DAYS * 120;
        m.set_mode("key.pem", 0o644);
        m.remove("proc/driver/nvidia/version");
    });
    let checks: Vec<_> = found.iter().map(|finding| finding.check).collect();
    let planted = [
        "huge pages",
        "memlock",
        "NUMA balancing",
        "CPU quota",
        "open files",
        "io_uring",
        "clock",
        "GPU",
        "UDP buffers",
        "GSO",
        "MTU",
        "certificate",
        "private key",
    ];
    assert_eq!(checks, planted, "{found:#?}");
}

#[test]
fn a_node_that_runs_has_its_memory_already() {
    let found = find(|m| {
        m.huge_pages(0);
        m.file("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 524288 kB\n");
        m.probes.node_runs = true;
    });
    assert_eq!(found, []);

    let found = find(|m| {
        m.huge_pages(1_024);
        m.file("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512");
        m.file("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "0");
        m.file("proc/meminfo", "MemTotal: 2621440 kB\nMemAvailable: 262144 kB\n");
        m.probes.node_runs = true;
    });
    assert_eq!(found, [], "it has its huge pages too");
}
