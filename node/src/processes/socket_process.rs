//! The process at the other end of a Unix socket.
#![expect(unsafe_code, reason = "SO_PEERPIDFD, and the readiness of a pidfd, have no safe wrapper")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{fstat, fstatfs};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// The process that connected.
#[derive(Debug)]
pub struct SocketProcess {
    /// The process's number in the node's PID namespace; `None` if it has no number there.
    pub pid: Option<u32>,
    /// Tells the process from others, if the kernel does.
    pub identity: Option<Identity>,
    /// The process's pidfd. It becomes readable when the process exits.
    pub pidfd: OwnedFd,
}

/// What no two living processes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Identity {
    /// The number in the node's PID namespace.
    Pid(u32),
    /// The inode of the process's pidfds (Linux 6.9 and later).
    Inode(u64),
}

/// The reason why the connecting process is unknown.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The process has exited. A process that inherited its socket opens no session: nobody could tell when that process ends.
    #[error("the process that connected has exited: connect from the process that uses the session")]
    Gone,
    /// The node cannot see the process.
    #[error(
        "the node cannot see when this engine's process ends, so it could never reuse the engine's memory: run the node on \
         Linux 6.5 or later, or let it share the engine's PID namespace (`hostPID: true`, `--pid=host`)"
    )]
    Unseen,
    /// The system refuses the node something, such as one more open file.
    #[error("the node cannot look at this engine's process now: try again")]
    Io(#[source] io::Error),
}

/// A process whose exit can be waited for.
#[derive(Debug)]
pub(super) struct Exit(AsyncFd<Arc<OwnedFd>>);

impl SocketProcess {
    /// The process that connected this socket.
    ///
    /// # Errors
    /// [`PeerError`]: the process gets no session.
    pub fn of(socket: &UnixStream) -> Result<Self, PeerError> {
        // 0 stands for a process outside of this PID namespace.
        let pid = socket.peer_cred().map_err(PeerError::Io)?.pid().and_then(Pid::from_raw);
        let pidfd = identify(peer_pidfd(socket), || Some(pidfd_open(pid?, PidfdFlags::empty())))?;
        let pid = pid.and_then(|pid| u32::try_from(pid.as_raw_pid()).ok());
        let identity = pid.map(Identity::Pid).or_else(|| inode_of(&pidfd).map(Identity::Inode));
        Ok(Self { pid, identity, pidfd })
    }
}

impl Exit {
    /// The exit of this pidfd's process. Needs a tokio runtime.
    ///
    /// # Errors
    /// Fails if the system cannot watch one more descriptor.
    pub(super) fn of(pidfd: Arc<OwnedFd>) -> io::Result<Self> {
        // SAFETY: the descriptor is open for as long as it is registered, since the registration holds a share of its owner.
        Ok(Self(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?))
    }

    /// Waits for the exit.
    ///
    /// Cancel safe.
    pub(super) async fn wait(self) -> io::Result<()> {
        self.0.readable().await.map(drop)
    }
}

/// The pidfd of the process at a socket. If the kernel cannot name the socket's process, `by_number` opens the pidfd by the
/// process's number. This is right unless the number was used again. `by_number` returns `None` if the process has no number
/// here.
fn identify(
    of_socket: Result<OwnedFd, Errno>,
    by_number: impl FnOnce() -> Option<Result<OwnedFd, Errno>>,
) -> Result<OwnedFd, PeerError> {
    match of_socket {
        Ok(pidfd) => return Ok(pidfd),
        // `INVAL` (Linux before 6.9) and `SRCH` (later): the process was waited for. `NODATA`: the socket has no process.
        Err(Errno::INVAL | Errno::SRCH | Errno::NODATA) => return Err(PeerError::Gone),
        Err(Errno::NOPROTOOPT | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(PeerError::Io(error.into())),
    }
    match by_number() {
        Some(Ok(pidfd)) => Ok(pidfd),
        Some(Err(Errno::SRCH)) => Err(PeerError::Gone),
        None | Some(Err(Errno::NOSYS | Errno::PERM | Errno::INVAL)) => Err(PeerError::Unseen),
        Some(Err(error)) => Err(PeerError::Io(error.into())),
    }
}

/// The inode of a pidfd. Before Linux 6.9 all pidfds have the same inode, in another file system.
fn inode_of(pidfd: &OwnedFd) -> Option<u64> {
    let system = fstatfs(pidfd).ok()?;
    let is_own = system.f_type as u64 == PIDFD_FILES;
    is_own.then(|| fstat(pidfd).ok().map(|file| file.st_ino)).flatten()
}

fn peer_pidfd(socket: &UnixStream) -> Result<OwnedFd, Errno> {
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
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel made this descriptor for the caller of getsockopt, who is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// An option of Linux 6.5 and later; not in the libc crate for every target.
const SO_PEERPIDFD: libc::c_int = 77;

/// The magic number of the file system of pidfds.
const PIDFD_FILES: u64 = 0x5049_4446;

#[cfg(test)]
mod tests {
    use super::*;

    fn some_descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[tokio::test]
    async fn the_peer_of_a_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = SocketProcess::of(&a).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        let (other, _d) = UnixStream::pair().unwrap();
        let other = SocketProcess::of(&other).unwrap();
        assert_eq!(inode_of(&peer.pidfd), inode_of(&other.pidfd), "for an engine that has no number here");
    }

    #[test]
    fn a_process_that_was_waited_for_is_gone_whatever_its_number_means_now() {
        for error in [Errno::SRCH, Errno::INVAL, Errno::NODATA] {
            let found = identify(Err(error), || Some(Ok(some_descriptor())));
            assert!(matches!(found, Err(PeerError::Gone)), "{error}: {found:?}");
        }
        let found = identify(Err(Errno::NOPROTOOPT), || Some(Err(Errno::SRCH)));
        assert!(matches!(found, Err(PeerError::Gone)), "{found:?}");
    }

    #[test]
    fn an_older_kernel_finds_the_process_by_its_number_or_says_what_helps() {
        assert!(identify(Err(Errno::NOPROTOOPT), || Some(Ok(some_descriptor()))).is_ok());
        for by_number in [None, Some(Err(Errno::NOSYS)), Some(Err(Errno::PERM))] {
            let found = identify(Err(Errno::NOPROTOOPT), || by_number).unwrap_err();
            assert!(matches!(found, PeerError::Unseen), "{found:?}");
            let text = found.to_string();
            assert!(text.contains("Linux 6.5") && text.contains("hostPID"), "{text}");
        }
    }

    #[test]
    fn a_node_without_descriptors_takes_nobody_for_gone() {
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            let found = identify(Err(error), || Some(Err(Errno::SRCH)));
            assert!(matches!(found, Err(PeerError::Io(_))), "{error}: {found:?}");
            let found = identify(Err(Errno::NOPROTOOPT), || Some(Err(error)));
            assert!(matches!(found, Err(PeerError::Io(_))), "{error}: {found:?}");
        }
    }
}
