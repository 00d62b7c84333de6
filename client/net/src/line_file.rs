//! Files of lines that rotate: the lookup log and the audit logs.
//!
//! A thread of its own writes. A line that finds the thread's queue full, or a full disk, is lost, and the owner hears of it.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bytesize::ByteSize;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::blocking::no_thread;
use crate::sizes::{exact, size};

/// Where lines go: the lookup log (hashes only), or an audit log.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct RecordConfig {
    /// The file that is written; older ones beside it end in `.1`, `.2` and so on.
    pub path: PathBuf,
    /// Size of one file.
    #[serde(default = "file_bytes", serialize_with = "exact", deserialize_with = "size")]
    pub max_bytes: ByteSize,
    /// Older files that are kept.
    #[serde(default = "old_files")]
    pub old_files: u32,
}

/// Hears of each line that is lost.
pub type Lost = Arc<dyn Fn() + Send + Sync>;

/// Hands lines of JSON to the thread that writes them. Cheap to clone; the thread ends with the last clone.
#[derive(Clone)]
pub struct LineFile {
    queue: SyncSender<Queued>,
    lost: Lost,
    /// Each line of [`LineFile::write_if_half_empty`] in the queue has one.
    places: Arc<Semaphore>,
}

/// A line in the queue.
struct Queued {
    text: Vec<u8>,
    _place: Option<OwnedSemaphorePermit>,
}

/// The file being written.
struct OpenFile {
    config: RecordConfig,
    file: File,
    /// Whether it is a file, and not a pipe or device.
    rotates: bool,
    /// Bytes of the whole lines in the file.
    bytes: u64,
    /// Lines that are not in the file yet.
    waiting: Vec<u8>,
}

impl Queued {
    fn plain(text: &[u8]) -> Self {
        Self { text: text.to_vec(), _place: None }
    }
}

impl RecordConfig {
    /// Writes to `path`, in files of the usual size and number.
    pub fn to(path: PathBuf) -> Self {
        Self { path, max_bytes: file_bytes(), old_files: old_files() }
    }
}

impl LineFile {
    /// Opens the file for appending, and starts the thread under this name.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or the system gives no thread.
    pub fn start(config: RecordConfig, thread: &str, lost: Lost) -> io::Result<(Self, JoinHandle<()>)> {
        let open = OpenFile::new(config)?;
        let (queue, lines) = sync_channel(QUEUE_LINES);
        let lost_by_thread = Arc::clone(&lost);
        let thread = std::thread::Builder::new()
            .name(thread.into())
            .spawn(move || write_lines(open, &lines, &lost_by_thread))
            .map_err(no_thread)?;
        Ok((Self { queue, lost, places: places() }, thread))
    }

    /// Writes a line.
    pub fn write(&self, line: &impl Serialize) {
        if !self.queue(line, None) {
            (self.lost)();
        }
    }

    /// Writes a line, unless lines that were written in this way fill half of the queue: the other half is for other lines.
    pub fn write_if_half_empty(&self, line: &impl Serialize) {
        if !self.try_write_if_half_empty(line) {
            (self.lost)();
        }
    }

    /// As [`LineFile::write_if_half_empty`], for a line that is tried again: returns whether it is in the queue.
    pub fn try_write_if_half_empty(&self, line: &impl Serialize) -> bool {
        let place = Arc::clone(&self.places).try_acquire_owned();
        place.is_ok_and(|place| self.queue(line, Some(place)))
    }

    fn queue(&self, line: &impl Serialize, place: Option<OwnedSemaphorePermit>) -> bool {
        let text = serde_json::to_vec(line).ok();
        text.is_some_and(|text| self.queue.try_send(Queued { text, _place: place }).is_ok())
    }

    /// Ends the thread, after it has written the lines handed over before. Later lines are lost.
    pub fn end(&self) {
        // An error: the queue is full. Then the thread ends with the last handle.
        let _ = self.queue.try_send(Queued::plain(END));
    }
}

/// Waits until the thread of a log has written its last lines, for up to `LAST_LINES_WITHIN`. The thread goes on if its disk
/// stalls, nobody reads its pipe, or somebody still holds the log.
///
/// # Cancel safety
/// If dropped, the thread goes on.
pub async fn last_lines(thread: Option<JoinHandle<()>>) {
    let Some(thread) = thread else { return };
    let name = thread.thread().name().unwrap_or_default().to_owned();
    let until = tokio::time::Instant::now() + LAST_LINES_WITHIN;
    while !thread.is_finished() {
        if tokio::time::Instant::now() >= until {
            tracing::error!(
                thread = name,
                "the last lines of a log file may be lost: its disk or pipe takes none, or it is still in use"
            );
            return;
        }
        tokio::time::sleep(LAST_LINES_LOOK).await;
    }
    if thread.join().is_err() {
        tracing::error!(thread = name, "the thread of a log file ended in a panic");
    }
}

impl std::fmt::Debug for LineFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LineFile").finish_non_exhaustive()
    }
}

impl OpenFile {
    fn new(config: RecordConfig) -> io::Result<Self> {
        is_read(&config.path)?;
        let file = open_locked(&config.path)?;
        let found = file.metadata()?;
        let (rotates, bytes) = (found.is_file(), found.len());
        Ok(Self { config, file, rotates, bytes, waiting: Vec::new() })
    }

    /// Takes a line, which [`OpenFile::flush`] writes.
    fn add(&mut self, line: &[u8]) -> io::Result<()> {
        let all = self.bytes + self.waiting.len() as u64;
        let is_full = self.rotates && all > 0 && all + line.len() as u64 + 1 > self.config.max_bytes.0;
        if is_full || self.waiting.len() >= MOST_WAITING_BYTES {
            self.flush()?;
        }
        if is_full {
            self.rotate()?;
        }
        self.waiting.extend_from_slice(line);
        self.waiting.push(b'\n');
        Ok(())
    }

    /// Writes the lines that wait; returns whether there were some. After an error they still wait, and no part of them is in the
    /// file.
    fn flush(&mut self) -> io::Result<bool> {
        if self.waiting.is_empty() {
            return Ok(false);
        }
        let mut written = 0;
        while written < self.waiting.len() {
            let error = match self.file.write(&self.waiting[written..]) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(some) => {
                    written += some;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            if self.file.set_len(self.bytes).is_err() {
                // A pipe keeps what it has.
                self.waiting.drain(..written);
            }
            return Err(error);
        }
        self.bytes += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(true)
    }

    /// Moves every file one number up, the oldest out, and starts a new one.
    fn rotate(&mut self) -> io::Result<()> {
        let path = &self.config.path;
        // Made first: if there is no room for it, all files stay as they are.
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let file = options().create(true).append(true).open(&new)?;
        lock(&file)?;
        file.set_len(0)?;
        for number in (1..=self.config.old_files).rev() {
            let moved = match number {
                // The file keeps its path too: no other log finds the path free.
                1 => link(path, &numbered(path, 1)),
                _ => fs::rename(numbered(path, number - 1), numbered(path, number)),
            };
            match moved {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&new, path)?;
        (self.file, self.bytes) = (file, 0);
        Ok(())
    }
}

/// Gives a file a second name. Renames it on a file system where it can have only one.
fn link(path: &Path, other: &Path) -> io::Result<()> {
    let linked = fs::hard_link(path, other).or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => fs::remove_file(other).and_then(|()| fs::hard_link(path, other)),
        _ => Err(error),
    });
    linked.or_else(|_| fs::rename(path, other))
}

/// Whether a file fails, for its log.
#[derive(Default)]
struct Failing(bool);

impl Failing {
    /// Notes a result, and logs changes. `Ok(false)`: nothing was written.
    fn note(&mut self, written: &io::Result<bool>, path: &Path) {
        let path = path.display();
        match written {
            Err(error) if !self.0 => {
                tracing::error!(%error, %path, "a log file cannot be written: lines are lost until it can");
            }
            Ok(true) if self.0 => {
                tracing::warn!(%path, "a log file can be written again; lines may be missing")
            }
            _ => {}
        }
        match written {
            Err(_) => self.0 = true,
            Ok(true) => self.0 = false,
            Ok(false) => {}
        }
    }
}

/// Checks that a file that is a pipe has a reader. Opening a pipe without one would wait for a reader, perhaps for ever.
fn is_read(path: &Path) -> io::Result<()> {
    if !fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo()) {
        return Ok(());
    }
    let opened = options().append(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    opened.map(drop).map_err(|_| io::Error::other("it is a pipe that nobody reads: name a file"))
}

/// Opens a log, which no other log may write and rotate. Waits for a process that is ending.
fn open_locked(path: &Path) -> io::Result<File> {
    for _ in 0..LOCK_TRIES {
        if let Some(file) = try_open(path)? {
            return Ok(file);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Err(io::Error::other("another process or log writes this file: each log needs a path of its own"))
}

/// Opens a log and locks it; `None` if another log has it.
fn try_open(path: &Path) -> io::Result<Option<File>> {
    let file = options().create(true).append(true).open(path)?;
    if lock(&file).is_err() {
        return Ok(None);
    }
    let place = |of: Metadata| (of.dev(), of.ino());
    // The other log may have rotated meanwhile. Its new file is locked before it has the path.
    let is_still_there =
        fs::metadata(path).is_ok_and(|now| file.metadata().is_ok_and(|of| place(of) == place(now)));
    Ok(is_still_there.then_some(file))
}

/// Locks a file for as long as it is open. Does nothing for a pipe or device, nor if the file system has no locks.
fn lock(file: &File) -> io::Result<()> {
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK.into()),
        _ => Ok(()),
    }
}

fn write_lines(mut open: OpenFile, lines: &Receiver<Queued>, lost: &Lost) {
    let mut failing = Failing::default();
    loop {
        let line = match lines.try_recv() {
            // Nothing more to write for now: what is written can be seen before the thread waits.
            Err(TryRecvError::Empty) => {
                failing.note(&open.flush(), &open.config.path);
                let waits =
                    if failing.0 { lines.recv_timeout(TRY_AGAIN) } else { lines.recv().map_err(Into::into) };
                match waits {
                    Err(RecvTimeoutError::Timeout) => continue,
                    line => line.ok(),
                }
            }
            line => line.ok(),
        };
        let Some(line) = line.filter(|line| line.text != END) else { break };
        if let Err(error) = open.add(&line.text) {
            lost();
            failing.note(&Err(error), &open.config.path);
        }
    }
    if let Err(error) = open.flush() {
        let path = open.config.path.display();
        tracing::error!(%error, %path, "the last lines of a log file are lost");
    }
}

/// Options to open a file. Nobody else may read a file made with them: lookups tell of prompts.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// The places in the queue for lines that leave half of it to others.
fn places() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(QUEUE_LINES / 2))
}

fn file_bytes() -> ByteSize {
    ByteSize::mib(64)
}

fn old_files() -> u32 {
    4
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

/// Ends the thread. No line is empty.
const END: &[u8] = b"";

/// Lines that wait for the thread.
const QUEUE_LINES: usize = 1_024;

/// Bytes of lines that wait for the file, before they are written although more lines are there, and while the disk is full.
const MOST_WAITING_BYTES: usize = 64 << 10;

/// How often a file that cannot be written is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// How often, and how far apart, a locked file is tried again: longer than the process before waits for its last lines.
const LOCK_TRIES: u32 = 120;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// How long a stopping server waits for the last lines of a log, and how often it looks for them.
const LAST_LINES_WITHIN: Duration = Duration::from_secs(5);
const LAST_LINES_LOOK: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Writes this many lines; returns how many were lost.
    fn write(config: RecordConfig, lines: u64) -> u64 {
        let lost = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&lost);
        let count: Lost = Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed));
        let (file, thread) = LineFile::start(config, "test", count).unwrap();
        for number in 0..lines {
            // The queue is bounded, so this waits for the thread; an engine would not wait.
            let line = format!(r#"{{"number":{number},"more":"{:20}"}}"#, "");
            while file.queue.try_send(Queued::plain(line.as_bytes())).is_err() {
                std::thread::yield_now();
            }
        }
        drop(file);
        thread.join().unwrap();
        lost.load(Ordering::Relaxed)
    }

    fn make_pipe(path: &Path) {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_pipe_that_nobody_empties_holds_up_no_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        make_pipe(&path);
        let _reader = File::options().read(true).write(true).open(&path).unwrap();
        let (file, thread) = LineFile::start(RecordConfig::to(path), "test", Arc::new(|| {})).unwrap();
        // No pipe has room for this line.
        file.write(&"x".repeat(2 << 20));
        file.end();
        last_lines(Some(thread)).await;
    }

    #[test]
    fn lines_that_leave_half_of_the_queue_to_others_do_not_crowd_them_out() {
        let (queue, lines) = sync_channel(QUEUE_LINES);
        let lost = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&lost);
        let count: Lost = Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed));
        // Nobody takes the lines: the disk stalls.
        let file = LineFile { queue, lost: count, places: places() };
        (0..2 * QUEUE_LINES).for_each(|line| file.write_if_half_empty(&line));
        let half = QUEUE_LINES as u64 / 2;
        assert_eq!(lost.load(Ordering::Relaxed), 2 * QUEUE_LINES as u64 - half);
        (0..half).for_each(|line| file.write(&line));
        assert_eq!(lost.load(Ordering::Relaxed), 2 * QUEUE_LINES as u64 - half, "there was room");
        drop(lines.recv().unwrap());
        file.write_if_half_empty(&"again");
        assert_eq!(lost.load(Ordering::Relaxed), 2 * QUEUE_LINES as u64 - half);
    }

    #[test]
    fn a_pipe_is_no_file_until_somebody_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        make_pipe(&path);
        let config = || RecordConfig { path: path.clone(), max_bytes: ByteSize(10_000), old_files: 2 };
        let lost: Lost = Arc::new(|| ());
        let error = LineFile::start(config(), "test", Arc::clone(&lost)).unwrap_err();
        assert!(error.to_string().contains("a pipe that nobody reads"), "{error}");
        let _reader = File::options().read(true).write(true).open(&path).unwrap();
        let mut open = OpenFile::new(RecordConfig { max_bytes: ByteSize(1), ..config() }).unwrap();
        (0..3).for_each(|_| open.add(b"a line").unwrap());
        assert!(open.flush().unwrap() && fs::metadata(&path).unwrap().file_type().is_fifo(), "it stays one");
    }

    #[test]
    fn files_rotate_and_the_oldest_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let config = RecordConfig { path: path.clone(), max_bytes: ByteSize(10_000), old_files: 2 };
        assert_eq!(write(config, 1_000), 0);
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["lines.jsonl", "lines.jsonl.1", "lines.jsonl.2"]);
        for name in names {
            assert!(fs::metadata(folder.path().join(name)).unwrap().len() <= 10_000);
        }
        let last = fs::read_to_string(path).unwrap();
        assert!(last.lines().last().unwrap().contains(r#""number":999"#), "nothing of the end is lost");
    }

    #[test]
    fn a_file_has_one_log_also_after_it_rotated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let config = RecordConfig { path: path.clone(), max_bytes: ByteSize(1), old_files: 1 };
        let mut open = OpenFile::new(config).unwrap();
        std::thread::scope(|scope| {
            let rotates = scope.spawn(|| (0..1_000).for_each(|_| open.add(b"a line").unwrap()));
            while !rotates.is_finished() {
                assert!(try_open(&path).unwrap().is_none());
            }
        });
        drop(open);
        assert!(try_open(&path).unwrap().is_some());
    }

    #[test]
    fn an_end_loses_nothing_that_came_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let (file, thread) =
            LineFile::start(RecordConfig::to(path.clone()), "test", Arc::new(|| {})).unwrap();
        file.write(&"one");
        file.end();
        thread.join().unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "\"one\"\n");
    }

    #[test]
    fn no_part_of_a_line_stays_in_a_file_that_has_no_room_for_all_of_it() {
        // A file in memory with room for a page, which then stays as it is.
        let file = rustix::fs::memfd_create("lines", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4_096).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::GROW).unwrap();
        let (file, config) = (File::from(file), RecordConfig::to("a full disk".into()));
        let mut open = OpenFile { config, file, rotates: true, bytes: 0, waiting: Vec::new() };
        open.add(&[b'.'; 5_000]).unwrap();
        open.flush().unwrap_err();
        assert_eq!((open.file.metadata().unwrap().len(), open.waiting.len()), (0, 5_001));
    }

    #[test]
    fn a_file_that_cannot_be_written_ends_too() {
        let full = RecordConfig::to("/dev/full".into());
        let (file, thread) = LineFile::start(full, "test", Arc::new(|| {})).unwrap();
        // No buffer holds this line.
        file.write(&"x".repeat(1 << 20));
        file.end();
        thread.join().unwrap();
    }

    #[test]
    fn lines_are_seen_before_the_file_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let (file, _thread) =
            LineFile::start(RecordConfig::to(path.clone()), "test", Arc::new(|| {})).unwrap();
        for lines in 1..=3 {
            file.write(&lines);
            while fs::read_to_string(&path).unwrap().lines().count() < lines {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_full_disk_costs_the_lines_that_find_no_room_and_no_later_ones() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let (mut reader, mut writer) = (File::from(reader), File::from(writer));
        // As a disk without room: a write fails until something is taken out.
        while writer.write(&[b'.'; 1_024]).is_ok() {}
        let config = RecordConfig::to("a pipe".into());
        let open = OpenFile { config, file: writer, rotates: false, bytes: 0, waiting: Vec::new() };
        let (lost, count) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
        let of_thread = Arc::clone(&lost);
        let lost_one: Lost = Arc::new(move || _ = of_thread.fetch_add(1, Ordering::Relaxed));
        let (queue, lines) = sync_channel(1);
        let thread = std::thread::spawn(move || write_lines(open, &lines, &lost_one));
        while lost.load(Ordering::Relaxed) == 0 {
            let number = count.fetch_add(1, Ordering::Relaxed);
            queue.send(Queued::plain(format!("{number} {}", "x".repeat(1_000)).as_bytes())).unwrap();
        }
        let mut seen = String::new();
        while !seen.ends_with("the last\n") {
            let mut some = [0; 4_096];
            if let Ok(bytes) = reader.read(&mut some) {
                seen.push_str(std::str::from_utf8(&some[..bytes]).unwrap());
            }
            _ = queue.try_send(Queued::plain(b"the last"));
        }
        drop(queue);
        thread.join().unwrap();
        let lines = seen.trim_start_matches('.').lines().filter(|line| line.ends_with('x'));
        let kept = lines.inspect(|line| assert_eq!(line.matches('x').count(), 1_000)).count() as u64;
        assert!(kept + lost.load(Ordering::Relaxed) >= count.into_inner(), "the lost lines were counted");
    }

    #[test]
    fn a_file_that_exists_is_continued() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines.jsonl");
        let config = RecordConfig { path: path.clone(), max_bytes: ByteSize(1 << 20), old_files: 1 };
        write(config.clone(), 3);
        write(config, 3);
        assert_eq!(fs::read_to_string(path).unwrap().lines().count(), 6);
    }
}
