//! The file of a tenant's socket: made where nothing else stands, and removed only if it is still the same file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixListener;

/// Something that is no socket stands where a tenant's socket is to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is {what}, not a socket, and stays as it is: set the tenant's `socket` to another path, or move it away",
    path.display()
)]
pub struct NotASocket {
    /// The address.
    pub path: PathBuf,
    /// The kind of file that stands there.
    pub what: &'static str,
}

/// Why a tenant's socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Something else stands there.
    #[error(transparent)]
    NotASocket(#[from] NotASocket),
    /// Somebody listens there.
    #[error("another process serves this socket: stop it, or set the tenant's `socket` to another path")]
    InUse,
    /// The system does not let the node.
    #[error("may this user write there?")]
    Io(#[from] io::Error),
}

/// The file of a socket that is being listened on. Dropping it takes the file away, unless another one stands there by then.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    made: FileId,
}

/// The identity of a file: device, inode, and the time when it was made, if the file system tells it, since inodes are used
/// again.
type FileId = (u64, u64, Option<SystemTime>);

/// Whether a tenant's socket may be made at `path`: nothing stands there, or a socket. Follows no link.
///
/// # Errors
/// [`NotASocket`] says which kind of file stands there. A path that cannot be read is not refused here: binding tells.
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

/// Listens at `path`. A socket that nobody listens on any more makes way. Needs a tokio runtime.
///
/// # Errors
/// [`BindError`]: the file there stays as it is.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), BindError> {
    check_socket_path(path)?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    match probe(path) {
        Ok(()) | Err(Errno::AGAIN) => return Err(BindError::InUse),
        // Its listener has ended.
        Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
        Err(Errno::NOENT) => {}
        Err(Errno::PROTOTYPE) => {
            let what = "a socket of another kind";
            return Err(NotASocket { path: path.to_owned(), what }.into());
        }
        Err(error) => return Err(io::Error::from(error).into()),
    }
    let socket = UnixListener::bind(path)?;
    let file = SocketFile { path: path.to_owned(), made: file_id(path)? };
    fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok((socket, file))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        match file_id(&self.path) {
            Ok(found) if found == self.made => {
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

/// Whether somebody listens at `path`. Never waits: a listener whose queue is full is one.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn file_id(path: &Path) -> io::Result<FileId> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

/// The owner and its group may connect.
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
