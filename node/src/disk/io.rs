//! The device: transfers between aligned memory and the tier's file.
//!
//! One small trait has three implementations: io_uring; plain positional reads and writes if the kernel does not allow
//! io_uring; and in tests a device that loses, tears and damages data on command.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, fstatvfs};
use rustix::io::Errno;

use crate::arena::ExtentMemory;
use crate::private;

mod buffer;
mod uring;

pub use buffer::Buffer;
pub use uring::Ring;

/// Moves bytes. Only one thread uses a device.
pub trait DiskDevice: Send {
    /// Buffers for the device's transfers. Other buffers work too, and may cost more.
    ///
    /// # Errors
    /// Fails if the system gives no memory.
    fn buffers(&mut self, count: usize, bytes: usize) -> io::Result<Vec<Buffer>> {
        std::iter::repeat_with(|| Buffer::new(bytes)).take(count).collect()
    }

    /// Starts a transfer, or carries it out. [`Self::wait`] returns the results, in any order.
    fn start(&mut self, transfer: Transfer);

    /// The next transfer that is finished; `None` if none is under way.
    fn wait(&mut self) -> Option<Finished>;

    /// Makes all finished writes survive a loss of power.
    ///
    /// # Errors
    /// Fails if the device fails.
    fn sync(&mut self) -> io::Result<()>;

    /// Whether the file is still where the next start looks for it.
    ///
    /// # Errors
    /// Fails if the file was removed or cut, or another file is in its place.
    fn look(&self) -> io::Result<()>;
}

/// A transfer. The device owns the memory until the transfer is finished.
#[derive(Debug)]
pub struct Transfer {
    /// Tells the transfer from others.
    pub tag: u64,
    /// The direction.
    pub direction: Direction,
    /// Offset in the file: a multiple of a page.
    pub offset: u64,
    /// The memory.
    pub memory: Memory,
    /// Bytes to transfer: a multiple of a page.
    pub bytes: usize,
}

/// Memory that a transfer reads or writes.
#[derive(Debug)]
pub enum Memory {
    /// A buffer that the transfer owns.
    Buffer(Buffer),
    /// A place in the arena, from this offset on: a multiple of a page. The caller lets nobody else use the place.
    Place(Arc<ExtentMemory>, u64),
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Into memory.
    Read,
    /// Into the file.
    Write,
}

/// A transfer that is over.
#[derive(Debug)]
pub struct Finished {
    /// The transfer's tag.
    pub tag: u64,
    /// The transfer's memory.
    pub memory: Memory,
    /// Whether all bytes were transferred.
    pub result: io::Result<()>,
}

/// How bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoMethod {
    /// io_uring.
    Ring,
    /// Positional reads and writes.
    Plain,
}

/// The tier's file, open and locked.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    path: PathBuf,
    is_direct: bool,
    /// The file's length, as last set.
    made_bytes: AtomicU64,
}

/// Positional reads and writes, one at a time.
#[derive(Debug)]
pub struct Plain {
    file: Arc<DiskFile>,
    finished: Vec<Finished>,
}

impl DiskFile {
    /// Opens or makes the file, for this user alone, and locks it. Does without O_DIRECT if the file system has none.
    ///
    /// # Errors
    /// Fails with `WouldBlock` if another process holds the lock, else with the system's error.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = private::options();
        options.read(true).write(true).create(true).truncate(false);
        let (file, is_direct) = match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (options.open(path)?, false),
            Err(error) => return Err(error),
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        private::take_from_others(&file, path);
        Ok(Self { file, path: path.to_owned(), is_direct, made_bytes: AtomicU64::new(0) })
    }

    /// Takes the space for `bytes` bytes, if the file system can, and also fills holes of the file. Then gives the file that
    /// size if it is smaller.
    ///
    /// # Errors
    /// Fails if there is not enough space: the file is as it was.
    pub fn allocate(&self, bytes: u64) -> io::Result<()> {
        let has = self.bytes()?;
        // Checked first: an attempt to take more than there is fills the file system for everybody for a moment.
        self.check_room(bytes)?;
        // The size is set last: a file of that size is a tier that has its space. Some file systems take space in one way only.
        let ways = [FallocateFlags::KEEP_SIZE, FallocateFlags::empty()];
        let taken = ways.into_iter().find_map(|way| match fallocate(&self.file, way, 0, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => None,
            taken => Some(taken),
        });
        match taken {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                // Gives back the space that was taken beyond the end of the file.
                self.file.set_len(has)?;
                return Err(error.into());
            }
            None => {
                tracing::warn!("the file system cannot reserve the disk tier's space: keep this space free")
            }
        }
        self.resize(has.max(bytes))
    }

    /// Gives the file its size without taking space.
    ///
    /// # Errors
    /// The system's error.
    pub fn resize(&self, bytes: u64) -> io::Result<()> {
        self.made_bytes.store(bytes, Ordering::Relaxed);
        self.file.set_len(bytes)
    }

    /// Checks that the file has the space for `bytes` bytes, or could have it now.
    fn check_room(&self, bytes: u64) -> io::Result<()> {
        let (system, has) = (fstatvfs(&self.file)?, self.file.metadata()?.blocks() * STAT_BLOCK_BYTES);
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        if has.saturating_add(free) < bytes { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    /// Checks that the file is where it was opened, and not shorter than it was made.
    fn look(&self) -> io::Result<()> {
        let gone = |what: &str| io::Error::other(format!("{} {what}", self.path.display()));
        let open = self.file.metadata()?;
        if open.nlink() == 0 {
            return Err(gone("was removed while the node runs"));
        }
        let there = self.path.metadata().map_err(|error| gone(&format!("is not there any more: {error}")))?;
        if (there.dev(), there.ino()) != (open.dev(), open.ino()) {
            return Err(gone("was replaced by another file"));
        }
        if open.len() < self.made_bytes.load(Ordering::Relaxed) {
            return Err(gone("was shortened while the node runs"));
        }
        Ok(())
    }

    /// The file's size.
    ///
    /// # Errors
    /// The system's error.
    pub fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// The best device for the file, or the plain device if it is `asked` for.
    #[must_use]
    pub fn device(self: &Arc<Self>, asked: Option<IoMethod>) -> (Box<dyn DiskDevice>, IoMethod) {
        let file = Arc::clone(self);
        if asked == Some(IoMethod::Plain) {
            return (Box::new(Plain::new(file)), IoMethod::Plain);
        }
        match Ring::new(Arc::clone(self)) {
            Ok(ring) => (Box::new(ring), IoMethod::Ring),
            Err(error) => {
                tracing::info!(%error, "no io_uring here: the disk tier reads and writes one piece at a time");
                (Box::new(Plain::new(file)), IoMethod::Plain)
            }
        }
    }

    /// Carries out the rest of a transfer after its first `from` bytes. A place in the arena is read and written through a
    /// buffer, since other processes see it.
    fn transfer(&self, transfer: &mut Transfer, from: usize) -> io::Result<()> {
        let offset = transfer.offset + from as u64;
        let bytes = transfer.bytes;
        match (&mut transfer.memory, transfer.direction) {
            (Memory::Buffer(buffer), Direction::Read) => {
                self.file.read_exact_at(&mut buffer.bytes_mut()[from..bytes], offset)
            }
            (Memory::Buffer(buffer), Direction::Write) => {
                self.file.write_all_at(&buffer.bytes()[from..bytes], offset)
            }
            (Memory::Place(memory, start), direction) => {
                let mut buffer = Buffer::new(bytes - from)?;
                let start = *start + from as u64;
                if direction == Direction::Read {
                    self.file.read_exact_at(buffer.bytes_mut(), offset)?;
                    return memory.copy_in(start, buffer.bytes()).map_err(io::Error::other);
                }
                memory.copy_out(start, buffer.bytes_mut()).map_err(io::Error::other)?;
                self.file.write_all_at(buffer.bytes(), offset)
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl Plain {
    /// A device over `file`.
    pub fn new(file: Arc<DiskFile>) -> Self {
        Self { file, finished: Vec::new() }
    }
}

impl DiskDevice for Plain {
    fn start(&mut self, mut transfer: Transfer) {
        let result = self.file.transfer(&mut transfer, 0);
        self.finished.push(Finished { tag: transfer.tag, memory: transfer.memory, result });
    }

    fn wait(&mut self) -> Option<Finished> {
        self.finished.pop()
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }

    fn look(&self) -> io::Result<()> {
        self.file.look()
    }
}

/// The unit in which `stat` counts blocks.
const STAT_BLOCK_BYTES: u64 = 512;
