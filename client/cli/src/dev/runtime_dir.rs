//! The directory in which commands find a user's running clusters.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// Why there is no runtime directory.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// The directory cannot be made or read.
    #[error("cannot use the runtime directory {}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Others could put something there.
    #[error("{} is not this user's own directory with mode 0700: remove it, or set XDG_RUNTIME_DIR", path.display())]
    NotPrivate {
        /// The directory.
        path: PathBuf,
    },
}

/// `$XDG_RUNTIME_DIR/larder`, or `/tmp/larder-UID` if the variable is not set; made if it is missing.
///
/// # Errors
/// [`RuntimeDirError`]: it cannot be made, or is not this user's alone.
pub fn runtime_dir() -> Result<PathBuf, RuntimeDirError> {
    let path = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir()) {
        Some(dir) => Path::new(&dir).join("larder"),
        None => PathBuf::from(format!("/tmp/larder-{}", geteuid().as_raw())),
    };
    make_private(&path)?;
    Ok(path)
}

pub(super) fn make_private(path: &Path) -> Result<(), RuntimeDirError> {
    let failed = |source| RuntimeDirError::Io { path: path.to_owned(), source };
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(path).map_err(failed)?;
    let is_private = found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0;
    if is_private { Ok(()) } else { Err(RuntimeDirError::NotPrivate { path: path.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_directory_that_others_could_use_is_refused() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("larder");
        make_private(&path).unwrap();
        make_private(&path).unwrap();
        let link = outer.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(matches!(make_private(&link), Err(RuntimeDirError::NotPrivate { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(make_private(&path), Err(RuntimeDirError::NotPrivate { .. })));
    }
}
