//! Configuration files.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};

/// The longest configuration file.
const MAX_BYTES: u64 = 4 << 20;

/// Reads the configuration file at `path`.
///
/// # Errors
/// Fails if the file is no regular file, cannot be read, is not UTF-8, or is longer than 4 MiB.
pub fn read(path: &Path) -> io::Result<String> {
    if !fs::metadata(path)?.is_file() {
        let text = "no regular file: a configuration is read several times, so write it into a file";
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(ErrorKind::InvalidData, "the file is longer than 4 MiB"));
    }
    Ok(text)
}

/// The one spelling of a path. Follows links in the path of the folder, if the folder exists.
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
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_file_that_is_too_long_is_no_configuration() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_BYTES + 1).unwrap();
        let error = read(file.path()).unwrap_err();
        assert!(error.to_string().contains("longer than 4 MiB"), "{error}");
    }

    #[test]
    fn a_pipe_whose_second_reader_finds_nothing_is_no_configuration() {
        let (pipe, _writer) = io::pipe().unwrap();
        for path in [format!("/proc/self/fd/{}", pipe.as_raw_fd()), "/dev/null".into(), "/".into()] {
            let error = read(Path::new(&path)).unwrap_err();
            assert!(error.to_string().contains("write it into a file"), "{path}: {error}");
        }
    }
}
