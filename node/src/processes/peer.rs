//! Who is at the other end of a Unix socket.
#![expect(unsafe_code, reason = "SO_PEERPIDFD, and the readiness of a pidfd, have no safe wrapper")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// The process that connected.
#[derive(Debug)]
pub struct Peer {
    /// Its number in the node's PID namespace; `None` where it has none there.
    pub pid: Option<u32>,
    /// Its pidfd, which becomes readable when it exits.
    pub pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process that connected this socket.
    ///
    /// # Errors
    /// The socket's own.
    pub fn of(socket: &UnixStream) -> io::Result<Self> {
        // 0 stands for a process outside of this PID namespace.
        let pid = socket.peer_cred()?.pid().and_then(Pid::from_raw);
        // Where the kernel cannot name the process of the socket itself, its number does, if it was not used again.
        let pidfd = peer_pidfd(socket).ok().or_else(|| pidfd_open(pid?, PidfdFlags::empty()).ok());
        let pid = pid.and_then(|pid| u32::try_from(pid.as_raw_pid()).ok());
        Ok(Self { pid, pidfd })
    }
}

/// Waits until the process of a pidfd has exited.
///
/// Cancel safe.
pub(super) async fn exited(pidfd: Arc<OwnedFd>) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is registered, since the registration holds a share of its owner.
    let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
    pidfd.readable().await.map(drop)
}

fn peer_pidfd(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut descriptor: RawFd = -1;
    let mut bytes = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: `descriptor` and `bytes` live through the call, and `bytes` says how large `descriptor` is.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut bytes,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made this descriptor for the caller of getsockopt, who is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Of Linux 6.5 and later; not in the libc crate for every target.
const SO_PEERPIDFD: libc::c_int = 77;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_peer_of_a_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Peer::of(&a).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        assert!(peer.pidfd.is_some());
    }
}
