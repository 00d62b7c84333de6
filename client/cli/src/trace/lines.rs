//! Reads lines of JSON, with their numbers.

use std::io::{BufRead, Read as _};

use serde::de::DeserializeOwned;

use super::TraceError;

/// The lines of one file; empty ones are passed over.
#[derive(Debug)]
pub(super) struct Lines<R> {
    source: R,
    line: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, line: 0 }
    }

    /// The next line with its number, from 1; `None` at the end.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<(u64, T)>, TraceError> {
        let mut text = Vec::new();
        loop {
            self.line += 1;
            let line = self.line;
            text.clear();
            let mut limited = self.source.by_ref().take(MAX_LINE_BYTES + 1);
            let bytes =
                limited.read_until(b'\n', &mut text).map_err(|source| TraceError::Read { line, source })?;
            if bytes == 0 {
                return Ok(None);
            }
            if line == 1
                && let Some(&(_, packer, reader)) = PACKED.iter().find(|(magic, ..)| text.starts_with(magic))
            {
                return Err(TraceError::Packed { packer, reader });
            }
            if bytes as u64 > MAX_LINE_BYTES {
                return Err(TraceError::LineTooLong { line });
            }
            if !text.trim_ascii().is_empty() {
                break;
            }
        }
        let line = self.line;
        let parsed =
            serde_json::from_slice(&text).map_err(|error| TraceError::NotARequest { line, error })?;
        Ok(Some((line, parsed)))
    }
}

/// Bytes of one line; the longest prompt has [`super::MAX_CHAIN_CHUNKS`] ids of at most 20 digits.
pub(super) const MAX_LINE_BYTES: u64 = 1 << 20;

/// The first bytes of packed files, the programs that pack so, and those that unpack.
const PACKED: [(&[u8], &str, &str); 2] =
    [(&[0x1f, 0x8b], "gzip", "zcat"), (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "zstdcat")];
