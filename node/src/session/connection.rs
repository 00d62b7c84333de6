//! The end of a connection, away from the threads that serve others.
//!
//! Closing a descriptor may block for as long as its maker wishes: a TCP socket that lingers over bytes that nobody reads, a file
//! of a FUSE server that does not answer. An engine can send such descriptors to the node, and the kernel closes those that the
//! node never received together with the connection's socket. So the last descriptor of each connection, and all descriptors that
//! the node has no use for, are closed on a thread of their own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use rustix::fs::fstatfs;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

/// The last descriptor of a connection, and what is to be closed with it. Dropping this closes them on another thread: drop the
/// socket first.
pub(super) struct Connection(Option<Remains>);

struct Remains {
    last: OwnedFd,
    unwanted: Vec<OwnedFd>,
    /// Free again when all is closed: so a tenant has no more threads that close than it may have connections.
    permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Keeps a connection's last descriptor.
    ///
    /// # Errors
    /// Fails if the node may open no further file.
    pub(super) fn of(socket: &UnixStream, permit: OwnedSemaphorePermit) -> io::Result<Self> {
        let last = socket.as_fd().try_clone_to_owned()?;
        Ok(Self(Some(Remains { last, unwanted: Vec::new(), permit })))
    }

    /// Closes these descriptors too when the connection is closed.
    pub(super) fn closes(&mut self, unwanted: Vec<OwnedFd>) {
        if let Some(remains) = &mut self.0 {
            remains.unwanted.extend(unwanted);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(Remains { last, unwanted, permit }) = self.0.take() else { return };
        let closing = move || {
            drop((last, unwanted));
            drop(permit);
        };
        if let Err(error) = thread::Builder::new().name("close".to_owned()).spawn(closing) {
            tracing::warn!(%error, "a connection was closed by the thread that served it");
        }
    }
}

/// Whether closing this descriptor never waits for anybody: it is memory, a device or an anonymous file of the kernel.
pub(super) fn closes_at_once(descriptor: &OwnedFd) -> bool {
    let system = fstatfs(descriptor).map(|system| system.f_type as u32);
    system.is_ok_and(|system| MEMORY_AND_DEVICES.contains(&system))
}

/// The magic numbers of tmpfs (also of `memfd_create` and of `/dev`), ramfs, hugetlbfs, anonymous inodes and DMA buffers.
const MEMORY_AND_DEVICES: [u32; 5] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6, 0x0904_1934, 0x444d_4142];
