//! The lookup log: records the lookups of engines, as hashes only, never tokens.
//!
//! Each lookup is one line of JSON, in the format of Mooncake's traces with two more fields, so that other tools can read it:
//! `{"timestamp":ms,"input_length":tokens,"output_length":0,"chunk_tokens":tokens,"namespace":"...","hash_ids":[...]}`. The ids
//! are 53 bits of the full chunks' hashes: every JSON reader keeps them exact. A prompt's last, partial chunk has no id. Lookups
//! that cannot be written are counted.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use larder_core::Millis;
use larder_protocol::{ChunkHash, Fingerprint};
use prometheus::IntCounter;
use serde::Serialize;

use crate::config::RecordConfig;
use larder_net::line_file::LineFile;

/// Records lookups. Cheap to clone; its thread ends with the last clone.
#[derive(Debug, Clone)]
pub struct Recorder(LineFile);

#[derive(Debug, Serialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    chunk_tokens: u32,
    namespace: String,
    hash_ids: Vec<u64>,
}

impl Recorder {
    /// Opens the log for appending, and starts the thread. `lost` counts the lookups that are left out.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or the system gives no thread.
    pub fn start(config: RecordConfig, lost: IntCounter) -> io::Result<(Self, JoinHandle<()>)> {
        let (file, thread) = LineFile::start(config, "larder-record", Arc::new(move || lost.inc()))?;
        Ok((Self(file), thread))
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
        self.0.write(&Line {
            timestamp: now.0,
            input_length: prompt_tokens,
            output_length: 0,
            chunk_tokens,
            namespace: namespace.to_string(),
            hash_ids: chunks.iter().map(|hash| hash.short() & EXACT_IN_JSON).collect(),
        });
    }
}

/// The integers that every JSON reader keeps exact.
const EXACT_IN_JSON: u64 = (1 << 53) - 1;

#[cfg(test)]
mod tests {
    use bytesize::ByteSize;

    use super::*;

    #[test]
    fn a_lookup_is_a_line_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lookups.jsonl");
        let config = RecordConfig { path: path.clone(), max_bytes: ByteSize(1 << 20), old_files: 2 };
        let lost = IntCounter::new("lost", "lost").unwrap();
        let (recorder, thread) = Recorder::start(config, lost.clone()).unwrap();
        let hash = ChunkHash([0xff; 32]);
        recorder.record(Fingerprint([1; 32]), 16, 40, &[hash, hash], Millis(5));
        drop(recorder);
        thread.join().unwrap();
        assert_eq!(lost.get(), 0);
        let expected = r#"{"timestamp":5,"input_length":40,"output_length":0,"chunk_tokens":16,"namespace":"0101010101010101","hash_ids":[9007199254740991,9007199254740991]}"#;
        assert_eq!(std::fs::read_to_string(path).unwrap().trim(), expected);
    }
}
