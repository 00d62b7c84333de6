//! The lookup log: records the lookups of engines, as hashes only, never tokens.
//!
//! One line of JSON a lookup, in the format of Mooncake's traces with two more fields, so that other tools read it too:
//! `{"timestamp":ms,"input_length":tokens,"output_length":0,"chunk_tokens":tokens,"namespace":"...","hash_ids":[...]}`. The
//! ids are the first 53 bits of the full chunks' hashes, which every JSON reader keeps exact; a prompt's last, partial chunk
//! has none.
//!
//! A thread of its own writes. A lookup that finds the thread's queue full is left out and counted. After a failed write
//! nothing more is written.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_core::Millis;
use larder_protocol::{ChunkHash, Fingerprint};
use prometheus::IntCounter;
use serde::Serialize;

use crate::config::RecordConfig;
use crate::private;

/// Hands lookups to the thread that writes them. Cheap to clone; the thread ends with the last one.
#[derive(Debug, Clone)]
pub struct Recorder {
    queue: SyncSender<Line>,
    lost: IntCounter,
}

#[derive(Debug, Serialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    chunk_tokens: u32,
    namespace: String,
    hash_ids: Vec<u64>,
}

/// The file being written.
struct LogFile {
    config: RecordConfig,
    file: BufWriter<File>,
    bytes: u64,
}

impl Recorder {
    /// Opens the log for appending, and starts the thread. `lost` counts the lookups that are left out.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or the system gives no thread.
    pub fn start(config: RecordConfig, lost: IntCounter) -> io::Result<(Self, JoinHandle<()>)> {
        let log = LogFile::open(config)?;
        let (queue, lines) = sync_channel(QUEUE_LINES);
        let lost_by_thread = lost.clone();
        let thread = std::thread::Builder::new()
            .name("larder-record".into())
            .spawn(move || write_lines(log, &lines, &lost_by_thread))?;
        Ok((Self { queue, lost }, thread))
    }

    /// Records a lookup of a whole prompt's full chunks.
    pub fn record(
        &self,
        namespace: Fingerprint,
        chunk_tokens: u32,
        prompt_tokens: u64,
        chunks: &[ChunkHash],
        now: Millis,
    ) {
        let line = Line {
            timestamp: now.0,
            input_length: prompt_tokens,
            output_length: 0,
            chunk_tokens,
            namespace: namespace.to_string(),
            hash_ids: chunks.iter().map(|hash| hash.short() & EXACT_IN_JSON).collect(),
        };
        match self.queue.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.lost.inc(),
        }
    }
}

impl LogFile {
    fn open(config: RecordConfig) -> io::Result<Self> {
        let file = private::options().create(true).append(true).open(&config.path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { config, file: BufWriter::new(file), bytes })
    }

    fn write(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        if self.bytes > 0 && self.bytes + text.len() as u64 > self.config.max_bytes.0 {
            self.rotate()?;
        }
        self.bytes += text.len() as u64;
        self.file.write_all(&text)
    }

    /// Moves every file one number up, the oldest out, and starts a new one.
    fn rotate(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let path = &self.config.path;
        for number in (1..=self.config.old_files).rev() {
            let younger = if number == 1 { path.clone() } else { numbered(path, number - 1) };
            match fs::rename(younger, numbered(path, number)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let file = private::options().write(true).create(true).truncate(true).open(path)?;
        self.file = BufWriter::new(file);
        self.bytes = 0;
        Ok(())
    }
}

fn write_lines(mut log: LogFile, lines: &Receiver<Line>, lost: &IntCounter) {
    loop {
        let written = match lines.recv_timeout(FLUSH_AFTER) {
            Ok(line) => log.write(&line),
            // Nothing came for a while: what is there should be seen.
            Err(RecvTimeoutError::Timeout) => log.file.flush(),
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Err(error) = written {
            let path = log.config.path.display();
            tracing::error!(%error, %path, "the lookup log cannot be written: nothing more is recorded");
            lines.iter().for_each(|_| lost.inc());
            return;
        }
    }
    if let Err(error) = log.file.flush() {
        tracing::error!(%error, "the end of the lookup log is lost");
    }
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

/// Lines that wait for the thread.
const QUEUE_LINES: usize = 1_024;

/// The integers that every JSON reader keeps exact.
const EXACT_IN_JSON: u64 = (1 << 53) - 1;

/// How long a line may wait to be seen.
const FLUSH_AFTER: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use bytesize::ByteSize;

    use super::*;

    fn record(limits: RecordConfig, lookups: u64) -> u64 {
        let lost = IntCounter::new("lost", "lost").unwrap();
        let (recorder, thread) = Recorder::start(limits, lost.clone()).unwrap();
        for n in 0..lookups {
            let hash = ChunkHash([0xff; 32]);
            // The queue is bounded: wait for the thread, as no engine would.
            while recorder.queue.try_send(line(n)).is_err() {
                std::thread::yield_now();
            }
            if n == 0 {
                recorder.record(Fingerprint([1; 32]), 16, 40, &[hash, hash], Millis(5));
            }
        }
        drop(recorder);
        thread.join().unwrap();
        lost.get()
    }

    fn line(n: u64) -> Line {
        Line {
            timestamp: n,
            input_length: 40,
            output_length: 0,
            chunk_tokens: 16,
            namespace: "n".into(),
            hash_ids: vec![n, n + 1],
        }
    }

    #[test]
    fn a_lookup_is_a_line_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lookups.jsonl");
        let limits = RecordConfig { path: path.clone(), max_bytes: ByteSize(1 << 20), old_files: 2 };
        assert_eq!(record(limits, 1), 0);
        let text = fs::read_to_string(path).unwrap();
        let expected = r#"{"timestamp":5,"input_length":40,"output_length":0,"chunk_tokens":16,"namespace":"0101010101010101","hash_ids":[9007199254740991,9007199254740991]}"#;
        assert_eq!(text.lines().nth(1), Some(expected));
    }

    #[test]
    fn files_rotate_and_the_oldest_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lookups.jsonl");
        let limits = RecordConfig { path: path.clone(), max_bytes: ByteSize(10_000), old_files: 2 };
        record(limits, 1_000);
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["lookups.jsonl", "lookups.jsonl.1", "lookups.jsonl.2"]);
        for name in names {
            assert!(fs::metadata(folder.path().join(name)).unwrap().len() <= 10_000);
        }
        let last = fs::read_to_string(path).unwrap();
        assert!(last.lines().last().unwrap().contains(r#""timestamp":999"#), "nothing of the end is lost");
    }

    #[test]
    fn a_log_that_exists_is_continued() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lookups.jsonl");
        let limits = RecordConfig { path: path.clone(), max_bytes: ByteSize(1 << 20), old_files: 1 };
        record(limits.clone(), 3);
        record(limits, 3);
        assert_eq!(fs::read_to_string(path).unwrap().lines().count(), 8);
    }
}
