//! The folders into which an authority's certificates were issued: `larder ca rotate` must find every certificate.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::failure::Usage;

/// Notes beside the authority that it issued a certificate into `out`, unless `out` is in the authority's own folder.
pub(super) fn remember(authority: &Path, out: &Path) -> io::Result<()> {
    let (own, out) = (authority.canonicalize()?, out.canonicalize()?);
    if out.starts_with(&own) || remembered(authority)?.contains(&out) {
        return Ok(());
    }
    let mut file = OpenOptions::new().create(true).append(true).open(authority.join(NAME))?;
    file.write_all(&[out.as_os_str().as_bytes(), b"\n"].concat())
}

/// The authority's folder and the noted folders.
///
/// # Errors
/// A noted folder is gone.
pub(super) fn all(authority: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let file = authority.join(NAME);
    let noted = remembered(authority).with_context(|| Usage(format!("cannot read {}", file.display())))?;
    if let Some(gone) = noted.iter().find(|folder| !folder.is_dir()) {
        let text = format!(
            "certificates were issued into {}, which is gone: name every folder that has certificates with --certificates, or \
             remove the folder's line from {}",
            gone.display(),
            file.display()
        );
        return Err(Usage(text).into());
    }
    Ok([vec![authority.to_owned()], noted].concat())
}

fn remembered(authority: &Path) -> io::Result<Vec<PathBuf>> {
    let lines = match fs::read(authority.join(NAME)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        lines => lines?,
    };
    let lines = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.map(|line| PathBuf::from(std::ffi::OsString::from_vec(line.to_vec()))).collect())
}

/// The file's name in the authority's folder.
const NAME: &str = "ca-folders.txt";
