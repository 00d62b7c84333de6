//! Files and folders that only this user may read: they hold KV or lookups of prompts.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Options to open a file. A new file gets mode 0600.
pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Makes a folder and the missing folders above it, each with mode 0700.
///
/// # Errors
/// The system's error.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Takes other users' rights away from a file that an earlier build made.
pub(crate) fn take_from_others(file: &File, path: &Path) {
    let tighten = || {
        let mode = file.metadata()?.permissions().mode();
        if mode & OTHERS != 0 {
            file.set_permissions(Permissions::from_mode(mode & 0o700))?;
            tracing::warn!(path = %path.display(), "other users could use this file: the node has removed their permissions");
        }
        io::Result::Ok(())
    };
    if let Err(error) = tighten() {
        tracing::warn!(%error, path = %path.display(), "other users may use this file: remove their permissions (chmod go=)");
    }
}

/// Whether a folder lets every user of the machine in.
pub(crate) fn is_open_to_all(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.permissions().mode() & 0o005 == 0o005)
}

const OTHERS: u32 = 0o077;

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::Mode;
    use rustix::process::umask;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn what_is_made_is_this_users_alone_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let before = umask(Mode::empty());
        let (folder, file) = (dir.path().join("a/b"), dir.path().join("file"));
        make_folder(&folder).unwrap();
        make_folder(&folder).unwrap();
        options().write(true).create(true).truncate(true).open(&file).unwrap();
        umask(before);
        assert_eq!((mode(&dir.path().join("a")), mode(&folder), mode(&file)), (0o700, 0o700, 0o600));
    }

    #[test]
    fn a_file_of_an_earlier_build_is_taken_from_others() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::set_permissions(file.path(), Permissions::from_mode(0o644)).unwrap();
        take_from_others(file.as_file(), file.path());
        assert_eq!(mode(file.path()), 0o600);
    }
}
