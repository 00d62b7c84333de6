//! Whether the paths of logs can be those of files that only they write.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::config_file::place_of;
use crate::line_file::RecordConfig;

/// A log cannot have its path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("[{log}] path is {path:?}, {fault}: set it to a file that only this log writes")]
pub struct BadLogPath {
    /// The section of the configuration.
    pub log: &'static str,
    /// The path.
    pub path: PathBuf,
    /// The fault.
    pub fault: &'static str,
}

/// Checks the logs of a server, by their sections, before they are opened. A pipe or device may serve several logs.
///
/// # Errors
/// [`BadLogPath`]: a path is no file's, or is that of another log or of the configuration file.
pub fn check(
    logs: &[(&'static str, Option<&RecordConfig>)],
    config_file: Option<&Path>,
) -> Result<(), BadLogPath> {
    let place_of = |path: &Path| path.canonicalize().unwrap_or_else(|_| place_of(path));
    let (config_file, mut others) = (config_file.map(place_of), Vec::new());
    for &(log, config) in logs {
        let Some(config @ RecordConfig { path, .. }) = config else { continue };
        let (place, kind) = (place_of(path), fs::metadata(path).map(|found| found.file_type()).ok());
        let log_files = (place, config.old_files);
        let fault = match kind {
            _ if path.as_os_str().is_empty() => "no path",
            Some(kind) if kind.is_dir() => "a folder",
            Some(kind) if !kind.is_file() => continue,
            _ if config_file.as_ref().is_some_and(|file| is_of(&log_files, file)) => {
                "this configuration file"
            }
            _ if others.iter().any(|other| is_of(other, &log_files.0) || is_of(&log_files, &other.0)) => {
                "the path of another log"
            }
            _ => {
                others.push(log_files);
                continue;
            }
        };
        return Err(BadLogPath { log, path: path.clone(), fault });
    }
    Ok(())
}

/// Whether a path is that of a log, of its next file, or of one of its old files.
fn is_of((log, old_files): &(PathBuf, u32), path: &Path) -> bool {
    let rest = path.as_os_str().as_bytes().strip_prefix(log.as_os_str().as_bytes());
    let is_old = |number: &[u8]| {
        let number = str::from_utf8(number).ok().and_then(|number| number.parse::<u32>().ok());
        number.is_some_and(|number| (1..=*old_files).contains(&number))
    };
    rest.is_some_and(|rest| rest.is_empty() || rest == b".new" || rest.strip_prefix(b".").is_some_and(is_old))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_a_file_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let (config, log) = (folder.path().join("node.toml"), folder.path().join("log"));
        fs::write(&config, "").unwrap();
        let check = |audit: &Path, record: &Path| {
            let logs = [audit, record].map(|path| RecordConfig::to(path.to_owned()));
            check(&[("audit", Some(&logs[0])), ("record", Some(&logs[1]))], Some(&config))
                .map_err(|refused| (refused.log, refused.fault))
        };
        assert_eq!(check(&log, &folder.path().join("other")), Ok(()));
        assert_eq!(check(&log, &folder.path().join("./log")), Err(("record", "the path of another log")));
        let rotated = folder.path().join("log.1");
        assert_eq!(check(&log, &rotated), Err(("record", "the path of another log")));
        assert_eq!(check(&config, &log), Err(("audit", "this configuration file")));
        assert_eq!(check(folder.path(), &log), Err(("audit", "a folder")));
        assert_eq!(check(&log, Path::new("")), Err(("record", "no path")));
        assert_eq!(check(Path::new("/dev/null"), Path::new("/dev/null")), Ok(()));
    }
}
