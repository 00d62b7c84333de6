//! Configuration files.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};

/// The longest configuration file.
const MAX_BYTES: u64 = 4 << 20;

/// Reads the configuration file at `path`.
///
/// # Errors
/// Fails if the file cannot be read, is not UTF-8, or is longer than 4 MiB.
pub fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(ErrorKind::InvalidData, "the file is longer than 4 MiB"));
    }
    Ok(text)
}

/// The one spelling of a path. Follows links in the path of the folder, if the folder exists.
#[must_use]
pub fn place_of(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, path.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_an_end_is_no_configuration() {
        let error = read(Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("longer than 4 MiB"), "{error}");
    }
}
