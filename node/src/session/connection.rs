//! The end of a connection, away from the threads that serve others.
//!
//! Closing a descriptor may block for as long as its maker wishes: a TCP socket that lingers over bytes that nobody reads, a file
//! of a FUSE server that does not answer. An engine can send such descriptors to the node, and the kernel closes those that the
//! node never received together with the connection's socket. So the last descriptor of each connection, and all descriptors that
//! the node has no use for, are closed on a thread of their own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx};
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

/// Whether closing this descriptor never waits for anybody: it is memory, a device or an anonymous file of the kernel. The check
/// itself waits for nobody either: unlike `fstatfs` and a plain `fstat`, it asks no server of a file system.
pub(super) fn closes_at_once(descriptor: &OwnedFd) -> bool {
    // Only files in memory have seals.
    if fcntl_get_seals(descriptor).is_ok() {
        return true;
    }
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(descriptor, "", flags, StatxFlags::TYPE).is_ok_and(|status| {
        // Anonymous inodes and DMA buffers have no type.
        matches!(
            FileType::from_raw_mode(status.stx_mode.into()),
            FileType::CharacterDevice | FileType::Unknown
        )
    })
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn memory_and_devices_close_at_once_files_and_sockets_may_not() {
        let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let device = std::fs::File::open("/dev/null").unwrap().into();
        let anonymous = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!([memory, device, anonymous].iter().all(closes_at_once));
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
        let (socket, _other_end) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(![file, OwnedFd::from(socket)].iter().any(closes_at_once));
    }
}
