//! Opening a tier's folder: lock, superblock, size.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use larder_net::failure::Failure;

use super::super::drive::Drive;
use super::super::format::{FormatError, PAGE_BYTES, StorageId, Superblock};
use super::super::io::DiskFile;
use super::super::log::Geometry;
use super::super::metrics::DiskMetrics;
use super::super::{DiskOptions, format, unusable};
use super::transfers::{Region, Transfers};
use super::{OnGone, Volume};
use crate::private;

impl Volume {
    /// Opens the tier in a folder, or makes one.
    pub(crate) fn open(
        options: &DiskOptions,
        drive: &Drive,
        metrics: DiskMetrics,
        on_gone: OnGone,
    ) -> Result<Self, Failure> {
        let geometry = options.geometry()?;
        let path = options.folder.join(FILE_NAME);
        let (shown, broken) = (path.display(), |error| unusable(&path, error));
        let unwritable = |error: io::Error| {
            Failure::because(
                error,
                format!("the disk tier's {shown} cannot be opened: check that this user can write there"),
            )
        };
        let asked = drive.asked();
        private::make_folder(&options.folder).map_err(unwritable)?;
        let opened = open_locked(&path);
        drop(asked);
        let file = opened.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => Failure::new(format!(
                "the disk tier's {shown} belongs to another running process: give each node a folder of its own"
            )),
            _ => unwritable(error),
        })?;
        let file = Arc::new(file);
        if !file.is_direct() {
            tracing::warn!(path = %shown, "the file system has no O_DIRECT: the disk tier uses the page cache");
        }
        let (device, lane) = file.device(options.lane);
        let mut transfers = Transfers::new(device, drive.clone(), metrics.clone()).map_err(|error| {
            Failure::because(
                error,
                "the system gives no memory for the disk tier's buffers: is the address space limited (ulimit -v)?",
            )
        })?;
        let (found, is_whole) = find(&file, &mut transfers, &path, options.segment_bytes)?;
        let storage = fit(&file, &mut transfers, &path, geometry, found)?;
        if !is_whole {
            mend_superblock(&mut transfers, &path, geometry, storage);
        }
        let asked = drive.asked();
        File::open(&options.folder).and_then(|folder| folder.sync_all()).map_err(broken)?;
        drop(asked);
        let volume = Self::with(transfers, geometry, storage, metrics, on_gone).map_err(broken)?;
        tracing::info!(
            path = %shown, ?lane, records = volume.log.records(), segments = geometry.segments,
            "the disk tier is open"
        );
        Ok(volume)
    }
}

/// Opens the file and locks it. After a process is killed, the kernel holds its lock until its transfers have ended. The next
/// owner waits for that moment.
fn open_locked(path: &Path) -> io::Result<DiskFile> {
    for _ in 0..LOCK_TRIES {
        match DiskFile::open(path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(LOCK_PAUSE),
            other => return other,
        }
    }
    DiskFile::open(path)
}

/// The superblock of the file, and whether both of its copies are right; `None` for a new file.
fn find(
    file: &DiskFile,
    transfers: &mut Transfers,
    path: &Path,
    asked: u64,
) -> Result<(Option<Superblock>, bool), Failure> {
    let (shown, broken) = (path.display(), |error| unusable(path, error));
    let foreign = || {
        Failure::new(format!("{shown} is no disk tier of Larder: name another folder, or remove the file"))
    };
    let bytes = file.bytes().map_err(broken)?;
    if bytes == 0 {
        return Ok((None, true));
    }
    if bytes < 2 * PAGE_BYTES {
        return Err(foreign());
    }
    let (copies, are_readable) = superblocks(transfers).map_err(broken)?;
    let [first, second] = copies;
    match Superblock::decode(&first).or_else(|error| Superblock::decode(&second).map_err(|_| error)) {
        Ok(Superblock { segment_bytes, .. }) if segment_bytes != asked => Err(Failure::new(format!(
            "{shown} has segments of {}, not {}: set the size back, or remove the file to begin anew",
            ByteSize(segment_bytes),
            ByteSize(asked)
        ))),
        Ok(superblock) => Ok((Some(superblock), are_readable && first == second)),
        // The process that made the file was killed before it wrote anything.
        Err(_) if first.iter().chain(&second).all(|&byte| byte == 0) => Ok((None, true)),
        Err(FormatError::Version { found }) => Err(Failure::new(format!(
            "{shown} has format version {found}, this build reads {}: remove the file to begin anew, or run the build that wrote it",
            format::VERSION
        ))),
        Err(_) => Err(foreign()),
    }
}

/// Both copies of the superblock, and whether the drive can read both. If it can read only one copy, that stands for both.
fn superblocks(transfers: &mut Transfers) -> io::Result<([Vec<u8>; 2], bool)> {
    let copy = |number| Region { offset: number * PAGE_BYTES, bytes: PAGE_BYTES, to: None };
    match [transfers.read(copy(0))?, transfers.read(copy(1))?] {
        [None, None] => Err(io::Error::other("neither copy of the superblock can be read")),
        [Some(first), Some(second)] => Ok(([first, second], true)),
        [Some(only), None] | [None, Some(only)] => Ok(([only.clone(), only], false)),
    }
}

/// Gives file and superblock the configured size. Growing adds free segments, shrinking gives up the last segments. The
/// superblock is written when the file has its space: it marks a complete tier.
fn fit(
    file: &DiskFile,
    transfers: &mut Transfers,
    path: &Path,
    geometry: Geometry,
    found: Option<Superblock>,
) -> Result<StorageId, Failure> {
    let bytes = geometry.file_bytes();
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => Failure::new(format!(
            "{} needs {}, but the file system has less: lower the capacity or free space",
            path.display(),
            ByteSize(bytes)
        )),
        _ => unusable(path, error),
    };
    let storage = match found {
        Some(superblock) => superblock.storage,
        None => StorageId(random().map_err(failed)?),
    };
    let segment_bytes = u64::from(geometry.segment_pages) * PAGE_BYTES;
    let wanted = Superblock { storage, segment_bytes, segments: geometry.segments };
    let has = file.bytes().map_err(failed)?;
    // Also if the file is long enough: it may have holes if it is a copy, or the tier of an earlier build.
    file.allocate(bytes).map_err(failed)?;
    if found != Some(wanted) {
        write_superblock(transfers, &wanted).map_err(failed)?;
    }
    if has > bytes {
        file.resize(bytes).map_err(failed)?;
    }
    Ok(storage)
}

/// Writes both copies anew: with only one right copy, the next damage would lose the whole tier.
fn mend_superblock(transfers: &mut Transfers, path: &Path, geometry: Geometry, storage: StorageId) {
    let segment_bytes = u64::from(geometry.segment_pages) * PAGE_BYTES;
    let superblock = Superblock { storage, segment_bytes, segments: geometry.segments };
    match write_superblock(transfers, &superblock) {
        Ok(()) => {
            tracing::warn!(path = %path.display(), "a copy of the superblock was damaged, and is written anew")
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "a copy of the superblock is damaged: check the drive");
        }
    }
}

/// Writes both copies, one after the other: one copy is whole at any time.
fn write_superblock(transfers: &mut Transfers, superblock: &Superblock) -> io::Result<()> {
    for copy in 0..2 {
        transfers.append_bytes(copy * PAGE_BYTES, &superblock.encode())?;
        transfers.sync()?;
    }
    Ok(())
}

fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The tier's file in its folder.
const FILE_NAME: &str = "larder.disk";

/// How often, and how far apart, a locked file is tried again: half a second in all.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
