//! Skipping a test that cannot run on this machine: then it does not count as passed.
//!
//! `tests/run` names a file in the environment (`LARDER_SKIPS`), reads it after the tests, and prints each skip with its reason.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::{env, thread};

/// Reports that the calling test, or a part of it, cannot run here, and the reason.
///
/// # Panics
/// Panics if the file that `LARDER_SKIPS` names cannot be written: the test would count as passed.
#[expect(clippy::print_stdout, reason = "tests print")]
pub fn skip(reason: &str) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("a test");
    println!("skipped  {test}: {reason}");
    if let Some(path) = env::var_os("LARDER_SKIPS") {
        append(Path::new(&path), test, reason).expect("skips are written");
    }
}

/// A published trace beside the project; `None` if the trace is missing; then the calling test is skipped.
pub fn published_trace(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let path = folder.join(name).with_extension("jsonl");
    let is_there = path.exists();
    if !is_there {
        skip(&format!("there is no trace {name}.jsonl in shared/traces beside the project"));
    }
    is_there.then_some(path)
}

/// One write for each line: tests of several processes append to one file.
fn append(path: &Path, test: &str, reason: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(format!("{test}\t{reason}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_stand_in_the_file_line_by_line_behind_those_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("skips");
        append(&path, "one", "no trace").unwrap();
        append(&path, "two", "no GPU").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "one\tno trace\ntwo\tno GPU\n");
    }
}
