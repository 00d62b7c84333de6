//! A machine as it should be, made of files, and ways to spoil it.

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use larder_net::quic::ca::{Authority, Validity};
use larder_protocol::identity::{Identity, Role};

use super::super::probes::{ObjectStore, Target};
use super::*;

/// A machine that has all needs of a node.
pub(super) struct Machine {
    root: tempfile::TempDir,
    /// Files that are not the kernel's: certificates and sockets.
    own: tempfile::TempDir,
    authority: Authority,
    pub(super) config: String,
    pub(super) probes: Probes,
    pub(super) now: SystemTime,
}

impl Machine {
    pub(super) fn sane() -> Self {
        let (authority, ca) = Authority::create(Validity::days(1_000)).unwrap();
        let mut machine = Self {
            root: tempfile::tempdir().unwrap(),
            own: tempfile::tempdir().unwrap(),
            authority,
            config: String::new(),
            probes: probes(),
            now: SystemTime::now(),
        };
        let own = machine.own.path().display().to_string();
        machine.config = CONFIG.replace("OWN", &own);
        fs::create_dir(machine.own.path().join("run")).unwrap();
        machine.set_mode("run", 0o755);
        machine.credentials("ca.pem", &ca.certificate_pem);
        machine.issue(&Identity::new(Role::Node, "node-0"));
        for (path, text) in FILES {
            machine.file(path, text);
        }
        machine.file("proc/self/limits", &limits("unlimited", "1048576"));
        machine.huge_pages(1_024);
        for (address, path) in [("0000:17:00.0", GPU), ("0000:18:00.0", NIC)] {
            machine.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../devices/{path}"));
            machine.file(&format!("sys/devices/{path}/numa_node"), "0");
            let class = if path == GPU { "0x030200" } else { "0x020000" };
            machine.file(&format!("sys/devices/{path}/class"), class);
        }
        machine.link("proc/self/ns/pid", "pid:[4026531836]");
        machine.gpu_lanes("16");
        machine.interface_mtu(9_000);
        machine.link("sys/class/net/eth0", &format!("../../devices/{NIC}/net/eth0"));
        machine
    }

    /// Sets an object store; the trial of it is real.
    pub(super) fn set_object(&mut self, url: &str) {
        let host = HostFacts::read(self.root.path()).unwrap();
        let config = Config::parse(&format!("{}[object]\nurl = {url:?}\n", self.config)).unwrap();
        let limits = config.resolve(&host).unwrap();
        self.probes.object = limits.object.map(|object| ObjectStore::probe(&object.options));
    }

    /// All findings.
    pub(super) fn examine(self) -> Vec<Finding> {
        let host = HostFacts::read(self.root.path()).unwrap();
        let config = Config::parse(&self.config).unwrap();
        let subject = Subject {
            files: Files::below(self.root.path()),
            limits: config.resolve(&host),
            host,
            config,
            probes: self.probes,
            now: self.now,
        };
        subject.examine()
    }

    pub(super) fn set_socket(&mut self, path: &str) {
        let own = self.config.lines().find(|line| line.starts_with("socket")).unwrap().to_owned();
        self.config = self.config.replace(&own, &format!("socket = {path:?}"));
    }

    pub(super) fn log_in_own_folder(&mut self) {
        self.config += &format!("[audit]\npath = '{}'\n", self.own.path().join("audit").display());
    }

    pub(super) fn file(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        fs::remove_file(self.root.path().join(path)).unwrap();
    }

    /// Reserves huge pages, half on each node, all free.
    pub(super) fn huge_pages(&self, pages: u64) {
        let folders = [
            "sys/kernel/mm/hugepages",
            "sys/devices/system/node/node0/hugepages",
            "sys/devices/system/node/node1/hugepages",
        ];
        for (folder, pages) in folders.iter().zip([pages, pages / 2, pages / 2]) {
            self.file(&format!("{folder}/hugepages-2048kB/nr_hugepages"), &pages.to_string());
            self.file(&format!("{folder}/hugepages-2048kB/free_hugepages"), &pages.to_string());
        }
    }

    pub(super) fn interface_mtu(&mut self, mtu: u32) {
        self.file(&format!("sys/devices/{NIC}/net/eth0/mtu"), &mtu.to_string());
        self.path_mtu(mtu);
    }

    pub(super) fn path_mtu(&mut self, mtu: u32) {
        self.probes.targets[0].path_mtu = Some(mtu);
    }

    /// Writes a file that is not the kernel's.
    pub(super) fn credentials(&self, name: &str, text: &str) {
        fs::write(self.own.path().join(name), text).unwrap();
    }

    pub(super) fn set_mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.own.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Issues a certificate for 100 days.
    pub(super) fn issue(&self, identity: &Identity) {
        let issued = self.authority.issue(identity, Validity::days(100)).unwrap();
        self.credentials("node.pem", &issued.certificate_pem);
        self.credentials("key.pem", &issued.key_pem);
        self.set_mode("key.pem", 0o600);
    }

    /// Trusts another authority than the issuer of the certificate.
    pub(super) fn change_authority(&mut self) {
        let (_, other) = Authority::create(Validity::days(1_000)).unwrap();
        self.credentials("ca.pem", &other.certificate_pem);
    }

    /// Sets the number of the GPU's working lanes, of 16.
    pub(super) fn gpu_lanes(&self, lanes: &str) {
        for (name, text) in
            [("current_link_width", lanes), ("max_link_width", "16"), ("max_link_speed", "32.0 GT/s PCIe")]
        {
            self.file(&format!("sys/devices/{GPU}/{name}"), text);
        }
    }

    /// Makes a link, or replaces it.
    pub(super) fn link(&self, path: &str, target: &str) {
        let path: PathBuf = self.root.path().join(path);
        fs::remove_file(&path).ok();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }
}

/// `/proc/self/limits` with hard limits.
pub(super) fn limits(locked: &str, files: &str) -> String {
    format!(
        "Limit                     Soft Limit           Hard Limit           Units\n\
         Max open files            1024                 {files}              files\n\
         Max locked memory         {locked}             {locked}             bytes\n"
    )
}

fn probes() -> Probes {
    let target =
        Target { name: "peer:9441".into(), address: Ok("10.0.0.9:9441".parse().unwrap()), path_mtu: None };
    Probes {
        io_uring: Ok(()),
        udp_buffer_bytes: None,
        cuda: Ok(()),
        gso_segments: 64,
        clock: Some(ClockState::Synchronised { error_us: 2_000 }),
        targets: vec![target],
        disk: None,
        object: None,
        silent: Vec::new(),
        patience: Duration::MAX,
        node_runs: false,
    }
}

pub(super) const DAYS: Duration = Duration::from_secs(86_400);

const GPU: &str = "pci0000:16/0000:16:01.0/0000:17:00.0";
const NIC: &str = "pci0000:16/0000:16:02.0/0000:18:00.0";

const CONFIG: &str = r#"
name = "node-0"
gpus = [{ pci = "0000:17:00.0" }]
[host]
arena_bytes = "1GiB"
[[tenants]]
name = "default"
socket = "OWN/run/larder.sock"
[cluster]
coordinator = "peer:9441"
ca = "OWN/ca.pem"
certificate = "OWN/node.pem"
key = "OWN/key.pem"
"#;

const FILES: &[(&str, &str)] = &[
    ("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n"),
    ("proc/self/cgroup", "0::/pod\n"),
    ("proc/self/status", "Name:\tlarder\nCapEff:\t0000000000000000\n"),
    ("proc/swaps", "Filename Type Size Used Priority\n"),
    ("proc/net/route", "Iface Destination Gateway\neth0 0000000A 00000000 0001 0 0 0 0000FFFF 0 0 0\n"),
    ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1\n"),
    ("dev/nvidiactl", ""),
    ("dev/nvidia-uvm", ""),
    ("proc/sys/kernel/hostname", "fixture\n"),
    ("proc/sys/kernel/io_uring_disabled", "0\n"),
    ("proc/sys/kernel/numa_balancing", "0\n"),
    ("proc/sys/vm/overcommit_memory", "0\n"),
    ("proc/sys/vm/max_map_count", "65530\n"),
    ("proc/sys/vm/memfd_noexec", "0\n"),
    ("proc/sys/net/core/rmem_max", "4194304\n"),
    ("proc/sys/net/core/wmem_max", "4194304\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n"),
    ("sys/fs/cgroup/pod/memory.max", "max\n"),
    ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
    ("sys/devices/system/cpu/online", "0-15\n"),
    ("sys/devices/system/node/node0/cpulist", "0-7\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 33554432 kB\n"),
    ("sys/devices/system/node/node0/distance", "10 21\n"),
    ("sys/devices/system/node/node1/cpulist", "8-15\n"),
    ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 33554432 kB\n"),
    ("sys/devices/system/node/node1/distance", "21 10\n"),
];
