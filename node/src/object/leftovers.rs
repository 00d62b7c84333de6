//! Removes half uploads that crashed nodes left in a local folder.
//!
//! The `object_store` crate writes a file `NAME#1` (or `#2`, ...), and then links or renames it to `NAME`. A process that ends in
//! between leaves `NAME#1`: nobody sees this file, and it takes room for ever. A node may be writing such a file at this moment. So
//! only a file that nobody has changed for [`LEFT_FOR`] is removed, by the file system's own clock.

use std::collections::hash_map::RandomState;
use std::fs::{self, DirEntry};
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use larder_protocol::ChunkHash;

use super::record::PROBE;
use crate::private;

/// Removes the half uploads below `folder`, the folder of all objects. Returns their number. Ends early if `stops`. Blocks the
/// thread.
///
/// # Errors
/// Fails if the file system's clock cannot be read. A file that cannot be removed stays.
pub(super) fn remove(folder: &Path, stops: &AtomicBool) -> io::Result<usize> {
    let now = time_there(folder)?;
    let (mut removed, mut folders) = (0, vec![(folder.to_owned(), 0)]);
    while let Some((folder, depth)) = folders.pop() {
        // Purges and other nodes change folders meanwhile.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if stops.load(Ordering::Acquire) {
                return Ok(removed);
            }
            if depth < DEPTH && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push((entry.path(), depth + 1));
            } else if is_half_upload(&entry) && is_left(&entry, now) {
                removed += usize::from(fs::remove_file(entry.path()).is_ok());
            }
        }
    }
    Ok(removed)
}

/// The time by the file system's clock, which may differ from this machine's.
fn time_there(folder: &Path) -> io::Result<SystemTime> {
    // Other nodes look for half uploads in the same folder.
    let path = folder.join(format!("{CLOCK}{}", RandomState::new().build_hasher().finish()));
    let mut file = private::options().write(true).create(true).truncate(true).open(&path)?;
    file.write_all(b"now")?;
    let now = file.metadata()?.modified();
    fs::remove_file(&path)?;
    now
}

fn is_half_upload(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let Some((name, number)) = name.to_str().and_then(|name| name.split_once('#')) else { return false };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let is_block = || name.split('-').next().is_some_and(|hash| hash.parse::<ChunkHash>().is_ok());
    is_number && (name == PROBE || is_block()) && entry.file_type().is_ok_and(|kind| kind.is_file())
}

fn is_left(entry: &DirEntry, now: SystemTime) -> bool {
    let changed = entry.metadata().and_then(|found| found.modified());
    changed.is_ok_and(|changed| now.duration_since(changed).is_ok_and(|age| age >= LEFT_FOR))
}

/// How long nobody has changed a file that nobody writes any more: far longer than any upload takes.
pub(super) const LEFT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Folders of namespaces, and folders of the first digits of hashes, are below the folder of all objects.
const DEPTH: usize = 2;

/// The beginning of the name of a file whose time of change tells the time. If a node crashes beside it, it is a half upload.
const CLOCK: &str = "probe#0";
