//! Reads lines, with their numbers.

use std::io::{BufRead, Read as _};

use serde::de::DeserializeOwned;

use super::TraceError;
use super::foreign::Foreign;

/// The lines of one file; empty lines are skipped.
#[derive(Debug)]
pub(super) struct Lines<R> {
    source: R,
    text: Vec<u8>,
    number: u64,
}

/// A line that is not empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbered<'a> {
    /// From 1, in the file as it is unpacked.
    pub(super) number: u64,
    text: &'a [u8],
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, text: Vec::new(), number: 0 }
    }

    /// The next line; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Numbered<'_>>, TraceError> {
        loop {
            self.number += 1;
            let line = self.number;
            self.text.clear();
            let mut limited = self.source.by_ref().take(MAX_LINE_BYTES + 1);
            let bytes = limited
                .read_until(b'\n', &mut self.text)
                .map_err(|source| TraceError::Read { line, source })?;
            if bytes == 0 {
                return Ok(None);
            }
            if bytes as u64 > MAX_LINE_BYTES {
                return Err(match Foreign::of(&self.text) {
                    Some(found) => TraceError::Foreign { line, found },
                    None => TraceError::LineTooLong { line },
                });
            }
            if !self.text.trim_ascii().is_empty() {
                return Ok(Some(Numbered { number: line, text: &self.text }));
            }
        }
    }
}

impl Numbered<'_> {
    /// Reads the line's object.
    pub(super) fn parse<T: DeserializeOwned>(&self) -> Result<T, TraceError> {
        let line = self.number;
        serde_json::from_slice(self.text).map_err(|error| match Foreign::of(self.text) {
            Some(found) => TraceError::Foreign { line, found },
            None => TraceError::NotARequest { line, error },
        })
    }
}

/// Bytes of one line; the longest prompt has [`super::MAX_CHAIN_CHUNKS`] ids of at most 20 digits.
pub(super) const MAX_LINE_BYTES: u64 = 1 << 20;
