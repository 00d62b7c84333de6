//! Finds panics in the log of a process.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A log that is read as it grows.
pub(super) struct PanicWatch {
    log: PathBuf,
    read: u64,
    /// When the panic was first seen, and its message.
    pending: Option<(Instant, String)>,
}

impl PanicWatch {
    pub(super) fn new(log: PathBuf) -> Self {
        Self { log, read: 0, pending: None }
    }

    /// Reads the new part of the log.
    pub(super) fn look(&mut self, now: Instant) {
        let Some(text) = self.news() else { return };
        if let Some(panic) = first_panic(&text) {
            self.pending.get_or_insert((now, panic));
        }
    }

    /// The panic of a process that has ended, if its log has one.
    pub(super) fn of_dead(&mut self, now: Instant) -> Option<String> {
        self.look(now);
        self.pending.take().map(|(_, panic)| panic)
    }

    /// A panic that the process has survived.
    pub(super) fn outlived(&mut self, now: Instant) -> Option<String> {
        self.pending.take_if(|(seen, _)| now - *seen > LAST_WORDS).map(|(_, panic)| panic)
    }

    fn news(&mut self) -> Option<String> {
        let mut file = File::open(&self.log).ok()?;
        let bytes = file.metadata().ok()?.len();
        if bytes <= self.read {
            return None;
        }
        file.seek(SeekFrom::Start(self.read)).ok()?;
        let mut text = Vec::new();
        file.take(MOST_BYTES).read_to_end(&mut text).ok()?;
        // An unfinished line is read with the next lines.
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        self.read += whole as u64;
        Some(String::from_utf8_lossy(&text[..whole]).into_owned())
    }
}

/// The place and the message of the first panic of a log.
fn first_panic(log: &str) -> Option<String> {
    let mut lines = log.lines();
    let place = lines.by_ref().find(|line| line.contains("panicked at "))?;
    Some(format!("{place} {}", lines.next().unwrap_or_default()).trim().to_owned())
}

/// How long a process may take to end after a panic that ends it.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Bytes that are read at a time.
const MOST_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::wait::now;

    #[test]
    fn a_panic_is_found_once_with_its_place_and_words_even_where_its_lines_come_apart() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let mut watch = PanicWatch::new(log.path().to_owned());
        let start = now();
        write!(log, "all is well\nthread 'gpu' (7) panicked at node/src/a.rs:1:2:").unwrap();
        watch.look(start);
        assert_eq!(watch.outlived(start + LAST_WORDS * 2), None);
        writeln!(log, "\nno entry found").unwrap();
        watch.look(start);
        assert_eq!(watch.outlived(start + LAST_WORDS / 2), None, "it may be dying");
        let panic = "thread 'gpu' (7) panicked at node/src/a.rs:1:2: no entry found";
        assert_eq!(watch.outlived(start + LAST_WORDS * 2).as_deref(), Some(panic));
        assert_eq!(watch.of_dead(start), None);
    }
}
