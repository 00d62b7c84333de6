//! Facts that only a trial shows.

use std::fs::OpenOptions;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use larder_net::blocking::aside;
use larder_net::quic::TransportSettings;
use larder_node::disk::io::Ring;
use larder_node::object::ObjectOptions;
use quinn::udp::UdpSocketState;
use rustix::fs::{OFlags, statfs};
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, ip_mtu, ipv6_mtu, set_ip_mtu_discover, set_ipv6_mtu_discover,
    set_socket_recv_buffer_size, socket_recv_buffer_size,
};

use super::clock::ClockState;
use super::network::headers;

/// The results of trials.
#[derive(Debug)]
pub(crate) struct Probes {
    /// Whether a ring can be set up, or the kernel's error.
    pub(super) io_uring: Result<(), String>,
    /// The buffer that a socket gets when QUIC asks for its size.
    pub(super) udp_buffer_bytes: Option<u64>,
    /// Whether the CUDA driver's library is there, with all functions that copies need; or the missing one. No GPU is
    /// touched.
    pub(super) cuda: Result<(), String>,
    /// Datagrams that the kernel takes in one call.
    pub(super) gso_segments: usize,
    /// The state of the clock, if the kernel tells it.
    pub(super) clock: Option<ClockState>,
    /// The servers that the node talks with.
    pub(super) targets: Vec<Target>,
    /// The folder of the disk tier.
    pub(super) disk: Option<Disk>,
    /// The object store.
    pub(super) object: Option<ObjectStore>,
    /// Trials that did not end in time: the check's name, and who did not answer.
    pub(super) silent: Vec<(&'static str, String)>,
    /// How long a trial may take that waits for a drive or a store.
    pub(super) patience: Duration,
    /// Whether a node answers at one of the sockets: then it has its memory already.
    pub(super) node_runs: bool,
}

/// A server that the node talks with.
#[derive(Debug)]
pub(crate) struct Target {
    /// The name that was given.
    pub(super) name: String,
    /// The address, or the reason that there is none.
    pub(super) address: Result<SocketAddr, String>,
    /// The largest packet that the whole path is known or believed to carry.
    pub(super) path_mtu: Option<u32>,
}

/// A folder for the disk tier.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The folder.
    pub(super) folder: PathBuf,
    /// The kind of its file system.
    pub(super) file_system: String,
    /// Free bytes.
    pub(super) free_bytes: u64,
    /// Bytes that the tier's own files take there.
    pub(super) tier_bytes: u64,
    /// Whether files can be read and written without the page cache; or why there can be no file.
    pub(super) is_direct: Result<bool, String>,
}

/// An object store.
#[derive(Debug)]
pub(crate) struct ObjectStore {
    /// The store's URL.
    pub(super) url: String,
    /// Whether the node writes there.
    pub(super) writes: bool,
    /// Whether a small object could be written, read and deleted there, or only read if the node does not write.
    pub(super) is_usable: Result<(), String>,
}

impl Probes {
    /// Makes all trials on this machine. `targets` are `host:port`; small and large datagrams go to each. `disk` is the folder of
    /// the disk tiers of so many actors. A small object is written to the object store, and deleted. A trial of a drive or store
    /// that takes longer than `patience` goes on, and nobody waits for it.
    pub(crate) fn run(
        targets: &[String],
        disk: Option<(&Path, usize)>,
        object: Option<&ObjectOptions>,
        (node_runs, patience): (bool, Duration),
    ) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
        let state = socket.as_ref().ok().and_then(|socket| UdpSocketState::new(socket.into()).ok());
        let mut silent = Vec::new();
        let disk = disk.and_then(|(folder, actors)| {
            let (name, folder) = (format!("the drive of {}", folder.display()), folder.to_owned());
            let found = in_time(patience, move || Disk::probe(&folder, actors));
            silent.extend(found.is_none().then_some(("disk", name)));
            found
        });
        let object = object.and_then(|options| {
            let (name, options) = (format!("the store at {}", options.url), options.clone());
            let found = in_time(patience, move || ObjectStore::probe(&options));
            silent.extend(found.is_none().then_some(("object store", name)));
            found
        });
        Self {
            io_uring: Ring::probe().map_err(|error| error.to_string()),
            udp_buffer_bytes: socket.as_ref().ok().and_then(buffer_bytes),
            cuda: larder_device::cuda::find_driver().map_err(|error| error.to_string()),
            gso_segments: state.map_or(1, |state| state.max_gso_segments()),
            clock: ClockState::read(),
            targets: targets.iter().map(|name| Target::probe(name)).collect(),
            disk,
            object,
            silent,
            patience,
            node_runs,
        }
    }
}

impl Target {
    fn probe(name: &str) -> Self {
        let found = name.to_socket_addrs().map_err(|error| error.to_string());
        let address =
            found.and_then(|mut found| found.next().ok_or_else(|| "the name has no address".to_owned()));
        let path_mtu = address.as_ref().ok().and_then(|&address| path_mtu(address).ok());
        Self { name: name.to_owned(), address, path_mtu }
    }
}

impl ObjectStore {
    pub(super) fn probe(options: &ObjectOptions) -> Self {
        let is_usable = larder_node::object::check(options).map_err(|error| error.to_string());
        Self { url: options.url.clone(), writes: options.writes, is_usable }
    }
}

impl Disk {
    pub(super) fn probe(folder: &Path, actors: usize) -> Self {
        // The node makes the folder: it will be on the same drive as its nearest ancestor.
        let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
        let (file_system, free_bytes) = statfs(there).map_or_else(
            |_| ("an unknown file system".to_owned(), 0),
            |stat| (file_system(stat.f_type.cast_unsigned()), stat.f_bavail * stat.f_bsize.cast_unsigned()),
        );
        let is_direct = is_direct(there).map_err(|error| error.to_string());
        let tier_bytes = tier_bytes(folder, actors);
        Self { folder: folder.to_owned(), file_system, free_bytes, tier_bytes, is_direct }
    }
}

/// The result of work that a drive or a store may hold up; `None` if it takes longer than `patience`. The work goes on then.
///
/// # Panics
/// Panics if the work does.
pub(super) fn in_time<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = mpsc::channel();
    // An error: nobody waits any more.
    aside(move || _ = done.send(work()));
    match result.recv_timeout(patience) {
        Ok(found) => Some(found),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => panic!("a trial of the host has panicked"),
    }
}

/// The buffer that a socket gets when QUIC asks for its size. The kernel reports twice the size, for its own bookkeeping.
fn buffer_bytes(socket: &UdpSocket) -> Option<u64> {
    set_socket_recv_buffer_size(socket, TransportSettings::default().socket_buffer_bytes).ok()?;
    Some(socket_recv_buffer_size(socket).ok()? as u64 / 2)
}

/// The largest of some packets that pass the path to `address`, as the server's answers and the reports of routers tell. Packets
/// may not be fragmented. If the server answers none, only the reports count.
fn path_mtu(address: SocketAddr) -> io::Result<u32> {
    let (any, is_v4) = match address {
        SocketAddr::V4(_) => (SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), true),
        SocketAddr::V6(_) => (SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), false),
    };
    let socket = UdpSocket::bind(any)?;
    if is_v4 {
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO)?;
    } else {
        set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO)?;
    }
    socket.connect(address)?;
    socket.set_read_timeout(Some(ANSWER_TIME))?;
    // A router that refuses a packet reports it to the kernel, which then knows a smaller size and refuses larger packets.
    let known = || if is_v4 { ip_mtu(&socket) } else { ipv6_mtu(&socket) };
    let is_answered = |packet_bytes: u32| {
        let _ = socket.send(&question(packet_bytes - headers(address), packet_bytes));
        let mut answer = [0; 64];
        let _ = socket.recv(&mut answer);
        answer[5] == 4 && answer[6..10] == packet_bytes.to_be_bytes()
    };
    let passes = |most: u32| -> io::Result<Option<u32>> {
        for _ in 0..TRIES {
            let packet_bytes = known()?.min(most);
            if is_answered(packet_bytes) {
                return Ok(Some(packet_bytes));
            }
        }
        Ok(None)
    };
    if passes(LEAST_PACKET_BYTES)?.is_none() {
        is_answered(known()?.min(MOST_PACKET_BYTES));
        return Ok(known()?);
    }
    for most in [MOST_PACKET_BYTES, 1_500, 1_400] {
        if let Some(packet_bytes) = passes(most)? {
            return Ok(packet_bytes);
        }
    }
    Ok(LEAST_PACKET_BYTES)
}

/// A datagram that every QUIC server answers by the versions that it speaks (RFC 9000, section 6.1), from a connection whose id has
/// four bytes: the size of the packet.
fn question(bytes: u32, packet_bytes: u32) -> Vec<u8> {
    let mut datagram = vec![0xc0, 0x1a, 0x2a, 0x3a, 0x4a, 8, 0, 0, 0, 0, 0, 0, 0, 0, 4];
    datagram.extend(packet_bytes.to_be_bytes());
    datagram.resize(bytes as usize, 0);
    datagram
}

/// Whether a file in `folder` can be opened past the page cache. The file is gone when this returns.
fn is_direct(folder: &Path) -> io::Result<bool> {
    let file = tempfile::Builder::new().prefix(".larder-doctor-").tempfile_in(folder)?;
    let flags = OFlags::DIRECT.bits().cast_signed();
    match OpenOptions::new().read(true).write(true).custom_flags(flags).open(file.path()) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error),
    }
}

/// Bytes of the files that the tiers of so many actors have in their folder, each in a folder of its own. Files that cannot be read
/// have none.
fn tier_bytes(folder: &Path, actors: usize) -> u64 {
    let within = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = (0..actors).flat_map(|actor| within(folder.join(format!("device-{actor}"))));
    let files = files.filter_map(|file| file.metadata().ok());
    files.map(|file| file.blocks() * STAT_BLOCK_BYTES).sum()
}

/// Names of the file systems that matter (linux/magic.h).
fn file_system(magic: u64) -> String {
    match magic & 0xffff_ffff {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x794c_7630 => "overlayfs",
        0x2fc1_2fc1 => "zfs",
        0x6969 => "nfs",
        0xff53_4d42 | 0xfe53_4d42 => "cifs",
        0x6573_5546 => "fuse",
        other => return format!("a file system of type {other:#x}"),
    }
    .to_owned()
}

/// The unit in which the system tells the space of a file.
const STAT_BLOCK_BYTES: u64 = 512;

/// Time in which a server must answer, or a router on the way refuse a packet.
const ANSWER_TIME: Duration = Duration::from_millis(300);

/// How often a packet is sent before it counts as lost.
const TRIES: u32 = 3;

/// The least packet that QUIC needs on every path, with the headers of IPv6.
const LEAST_PACKET_BYTES: u32 = 1_280;

/// The largest packet of IP.
const MOST_PACKET_BYTES: u32 = 65_535;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_hangs_is_not_waited_for() {
        assert_eq!(in_time(Duration::MAX, || 7), Some(7));
        let hangs = || {
            loop {
                std::thread::park();
            }
        };
        assert_eq!(in_time::<()>(Duration::from_millis(5), hangs), None);
    }

    #[test]
    #[should_panic(expected = "a trial of the host has panicked")]
    fn a_trial_that_panics_is_not_taken_for_one_that_hangs() {
        in_time(Duration::MAX, || panic!("a fault"));
    }

    #[test]
    fn a_path_that_drops_large_packets_without_a_word_is_found_by_a_servers_answers() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = server.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut datagram = [0; 65_536];
            while let Ok((bytes, from)) = server.recv_from(&mut datagram) {
                if bytes + 28 <= 1_450 {
                    let answer = [&[0xc0, 0, 0, 0, 0, 4], &datagram[15..19], &[8], &datagram[6..14]].concat();
                    server.send_to(&answer, from).unwrap();
                }
            }
        });
        assert_eq!(path_mtu(address).unwrap(), 1_400);
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(
            path_mtu(silent.local_addr().unwrap()).unwrap() > 1_500,
            "a server that does not answer proves nothing"
        );
    }
}
