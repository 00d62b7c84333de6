//! Facts that only a trial shows.

use std::fs::OpenOptions;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// The largest packet that the kernel believes the whole path to carry.
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
    /// Makes all trials on this machine. `targets` are `host:port`; a meaningless datagram goes to each. A small object is
    /// written to the object store, and deleted.
    pub(crate) fn run(
        targets: &[String],
        disk: Option<&Path>,
        object: Option<&ObjectOptions>,
        node_runs: bool,
    ) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
        let state = socket.as_ref().ok().and_then(|socket| UdpSocketState::new(socket.into()).ok());
        Self {
            io_uring: Ring::probe().map_err(|error| error.to_string()),
            udp_buffer_bytes: socket.as_ref().ok().and_then(buffer_bytes),
            cuda: larder_device::cuda::find_driver().map_err(|error| error.to_string()),
            gso_segments: state.map_or(1, |state| state.max_gso_segments()),
            clock: ClockState::read(),
            targets: targets.iter().map(|name| Target::probe(name)).collect(),
            disk: disk.map(Disk::probe),
            object: object.map(ObjectStore::probe),
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
    fn probe(folder: &Path) -> Self {
        // The node makes the folder: it will be on the same drive as its nearest ancestor.
        let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
        let (file_system, free_bytes) = statfs(there).map_or_else(
            |_| ("an unknown file system".to_owned(), 0),
            |stat| (file_system(stat.f_type.cast_unsigned()), stat.f_bavail * stat.f_bsize.cast_unsigned()),
        );
        let is_direct = is_direct(there).map_err(|error| error.to_string());
        Self { folder: folder.to_owned(), file_system, free_bytes, is_direct }
    }
}

/// The buffer that a socket gets when QUIC asks for its size. The kernel reports twice the size, for its own bookkeeping.
fn buffer_bytes(socket: &UdpSocket) -> Option<u64> {
    set_socket_recv_buffer_size(socket, TransportSettings::default().socket_buffer_bytes).ok()?;
    Some(socket_recv_buffer_size(socket).ok()? as u64 / 2)
}

/// The largest packet that the kernel believes the path to `address` to carry. Sends a packet that may not be fragmented first.
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
    let known = || if is_v4 { ip_mtu(&socket) } else { ipv6_mtu(&socket) };
    let (before, headers) = (known()?, if is_v4 { 28 } else { 48 });
    let datagram = vec![0; before.min(MOST_PACKET_BYTES).saturating_sub(headers) as usize];
    // Refused if a router has just reported that the datagram is too large: then the kernel knows a smaller size.
    let _ = socket.send(&datagram);
    socket.set_read_timeout(Some(ANSWER_TIME))?;
    // The server does not answer such a datagram. A router that refuses it answers the kernel.
    let _ = socket.recv(&mut [0; 64]);
    Ok(known()?)
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

/// Time in which a router on the way must refuse a packet.
const ANSWER_TIME: Duration = Duration::from_millis(300);

/// The largest packet of IP.
const MOST_PACKET_BYTES: u32 = 65_535;
