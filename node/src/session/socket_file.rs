//! The file of a tenant's socket. It replaces nothing but a dead socket, and is removed only if it is still the same file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixListener;

/// The path of a tenant's socket has a file that is no socket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is {what}, not a socket, and stays as it is: set the tenant's `socket` to another path, or move it away",
    path.display()
)]
pub struct NotASocket {
    /// The path.
    pub path: PathBuf,
    /// The kind of the file.
    pub what: &'static str,
}

/// Why the node cannot listen on a tenant's socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path has a file that is no socket.
    #[error(transparent)]
    NotASocket(#[from] NotASocket),
    /// Another process listens on the socket.
    #[error("another process serves this socket: stop it, or set the tenant's `socket` to another path")]
    InUse,
    /// The system refuses.
    #[error("check that this user may write in the socket's folder")]
    Io(#[from] io::Error),
}

/// The file of a socket that accepts connections. Dropping it removes the file, unless another file has taken its place.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// `None` for a file that is left alone.
    made: Option<FileId>,
}

/// The identity of a file: device, inode, and the time when it was made, if the file system tells it. The time is needed because
/// inodes are used again.
type FileId = (u64, u64, Option<SystemTime>);

/// Checks that a tenant's socket may be made at `path`: there is no file, or a socket. Follows no link.
///
/// # Errors
/// [`NotASocket`] names the kind of the file. A path that cannot be read passes this check; binding will fail.
pub fn check_socket_path(path: &Path) -> Result<(), NotASocket> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_socket() => return Ok(()),
        () if kind.is_file() => "a file",
        () if kind.is_dir() => "a folder",
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_fifo() => "a pipe",
        () => "a device",
    };
    Err(NotASocket { path: path.to_owned(), what })
}

/// Listens at `path`. Removes a socket there that nobody listens on any more. Needs a tokio runtime.
///
/// # Errors
/// [`BindError`]: the file at `path` stays as it is.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
    check_socket_path(path)?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    match probe(path) {
        Ok(()) | Err(Errno::AGAIN) => return Err(BindError::InUse),
        // The socket's listener has ended.
        Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
        Err(Errno::NOENT) => {}
        Err(Errno::PROTOTYPE) => {
            let what = "a socket of another kind";
            return Err(NotASocket { path: path.to_owned(), what }.into());
        }
        Err(error) => return Err(io::Error::from(error).into()),
    }
    let socket = UnixListener::bind(path)?;
    let file = SocketFile { path: path.to_owned(), made: Some(file_id(path)?) };
    fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok((socket, file))
}

impl SocketFile {
    /// Whether the file is still there.
    pub(super) fn is_there(&self) -> bool {
        file_id(&self.path).is_ok_and(|found| Some(found) == self.made)
    }

    /// Leaves the file alone from now on.
    pub(super) fn abandon(&mut self) {
        self.made = None;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let Some(made) = self.made else { return };
        match file_id(&self.path) {
            Ok(found) if found == made => {
                if let Err(error) = fs::remove_file(&self.path) {
                    tracing::warn!(%error, socket = %self.path.display(), "the socket's file cannot be removed");
                }
            }
            Ok(_) => tracing::warn!(
                socket = %self.path.display(),
                "another file stands in the socket's place, and stays"
            ),
            Err(error) => {
                tracing::debug!(%error, socket = %self.path.display(), "the socket's file was gone already");
            }
        }
    }
}

/// Tries to connect to a listener at `path`. Never waits: the listener's queue may be full.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn file_id(path: &Path) -> io::Result<FileId> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

/// The socket's owner and group may connect.
const SOCKET_MODE: u32 = 0o660;

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixListener as Listener};

    use rustix::net::listen;

    use super::*;

    fn bind_there(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        bind(path)
    }

    #[test]
    fn what_is_no_socket_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link, inner) = (folder.path().join("f"), folder.path().join("l"), folder.path().join("d"));
        fs::write(&file, "precious").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        fs::create_dir(&inner).unwrap();
        for (path, what) in [(&file, "a file"), (&link, "a symbolic link"), (&inner, "a folder")] {
            let refused = NotASocket { path: path.clone(), what };
            assert_eq!(check_socket_path(path), Err(refused.clone()));
            let Err(BindError::NotASocket(found)) = bind_there(path) else { panic!("bound over {what}") };
            assert_eq!(found, refused);
        }
        assert_eq!(fs::read_to_string(&link).unwrap(), "precious");
        let datagrams = folder.path().join("g");
        let _other = UnixDatagram::bind(&datagrams).unwrap();
        assert!(matches!(bind_there(&datagrams), Err(BindError::NotASocket(_))));
        assert!(datagrams.exists());
    }

    #[test]
    fn a_dead_socket_makes_way_and_a_live_one_does_not_even_when_its_queue_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let other = Listener::bind(&path).unwrap();
        listen(&other, 0).unwrap();
        let mut waiting = Vec::new();
        while waiting.len() < 100 {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
            if connect(&socket, &SocketAddrUnix::new(&path).unwrap()).is_err() {
                break;
            }
            waiting.push(socket);
        }
        assert!(waiting.len() < 100, "its queue is full");
        assert!(matches!(bind_there(&path), Err(BindError::InUse)));
        drop(other);
        let (_socket, file) = bind_there(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, SOCKET_MODE);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn what_took_the_place_of_the_socket_outlives_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (_socket, file) = bind_there(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
