//! Reads request traces in Mooncake's JSON lines.
//!
//! One object a line:
//!
//! | field | meaning |
//! | --- | --- |
//! | `timestamp` | arrival in milliseconds since the trace began |
//! | `input_length` | tokens of the prompt |
//! | `output_length` | tokens of the answer |
//! | `hash_ids` | one id for each [`CHUNK_TOKENS`] tokens of the prompt, chained: an id names the whole prefix up to its block's end. The last, partial block has an id of its own |

pub mod history;
mod lines;
mod places;

use std::io::BufRead;

use larder_protocol::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_TOKENS};
use serde::Deserialize;

pub use self::history::History;
use self::lines::{Lines, MAX_LINE_BYTES};
use self::places::Places;

/// Tokens of one block of a trace, and so of one chunk of a replay.
pub const CHUNK_TOKENS: u64 = 512;

/// A request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// When it arrived, in milliseconds since the trace began.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// One id for each block of the prompt, the last, partial one included.
    pub block_ids: Vec<u64>,
}

/// Requests in the order of the file.
#[derive(Debug)]
pub struct TraceReader<R> {
    lines: Lines<R>,
    places: Places,
    ended: bool,
}

/// Why a trace cannot be played.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read on.
    #[error("line {line}: cannot be read")]
    Read {
        /// Number of the line, from 1.
        line: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line is longer than any request.
    #[error("line {line}: longer than {MAX_LINE_BYTES} bytes; is this a trace of one JSON object a line?")]
    LineTooLong {
        /// Number of the line.
        line: u64,
    },
    /// A line is not an object with the four fields.
    #[error("line {line}: not a request")]
    NotARequest {
        /// Number of the line.
        line: u64,
        /// The JSON reader's error.
        source: serde_json::Error,
    },
    /// The prompt has no token.
    #[error("line {line}: `input_length` is 0; a prompt has at least one token")]
    EmptyPrompt {
        /// Number of the line.
        line: u64,
    },
    /// The prompt has more chunks than a session message may carry.
    #[error("line {line}: {blocks} blocks; a prompt of a replay has at most {MAX_CHAIN_CHUNKS}")]
    PromptTooLong {
        /// Number of the line.
        line: u64,
        /// Blocks found.
        blocks: usize,
    },
    /// The number of ids does not fit the number of tokens.
    #[error(
        "line {line}: {input_tokens} tokens have {expected} blocks of {CHUNK_TOKENS} tokens, but `hash_ids` has {found}"
    )]
    BlockCount {
        /// Number of the line.
        line: u64,
        /// Tokens of the prompt.
        input_tokens: u64,
        /// The expected number of ids.
        expected: u64,
        /// Ids found.
        found: usize,
    },
    /// An id stands twice in one prompt, or after two different prefixes: ids are not chained.
    #[error(
        "line {line}: block {id} is number {index} after {after}, but on line {known_line} number {known_index} after {known_after}; an id must name its whole prefix",
        after = Named(*.parent), known_after = Named(*.known_parent)
    )]
    NotChained {
        /// Number of the line.
        line: u64,
        /// The id.
        id: u64,
        /// Its position in this prompt.
        index: usize,
        /// The id before it in this prompt.
        parent: Option<u64>,
        /// The line of its first occurrence.
        known_line: u64,
        /// Its position there.
        known_index: usize,
        /// The id before it there.
        known_parent: Option<u64>,
    },
    /// A recorded lookup has more full chunks than tokens for them.
    #[error(
        "line {line}: {input_tokens} tokens fill {most} chunks of {chunk_tokens} tokens, but `hash_ids` has {found}"
    )]
    LookupCount {
        /// Number of the line.
        line: u64,
        /// Tokens of the prompt.
        input_tokens: u64,
        /// Tokens of one chunk.
        chunk_tokens: u32,
        /// The largest number of ids.
        most: u64,
        /// Ids found.
        found: usize,
    },
    /// Chunks of another size than before.
    #[error(
        "line {line}: {found}, but before {known}; a plan has one size of chunks: choose one namespace with --namespace",
        found = Chunks(*.found), known = Chunks(*.known)
    )]
    ChunkTokens {
        /// Number of the line.
        line: u64,
        /// Tokens of a chunk on this line; `None` for a trace's.
        found: Option<u32>,
        /// Tokens of a chunk on the lines before.
        known: Option<u32>,
    },
    /// No chunk has this many tokens.
    #[error("line {line}: `chunk_tokens` is {found}; it is 1 to {MAX_CHUNK_TOKENS}")]
    ChunkSize {
        /// Number of the line.
        line: u64,
        /// Tokens found.
        found: u32,
    },
    /// A recorded id is no number that a node records.
    #[error("line {line}: the id {id} has more than 53 bits; nodes record 53 at most")]
    LargeId {
        /// Number of the line.
        line: u64,
        /// The id.
        id: u64,
    },
    /// More namespaces than can be told apart.
    #[error("line {line}: more than {} namespaces; choose one with --namespace", history::MAX_NAMESPACES)]
    TooManyNamespaces {
        /// Number of the line.
        line: u64,
    },
    /// Not one request.
    #[error("the trace is empty")]
    Empty,
    /// Not one request of the namespace that was asked for.
    #[error("no lookup has the namespace {wanted}; the log has: {}", known.join(", "))]
    NoSuchNamespace {
        /// The namespace.
        wanted: String,
        /// The namespaces found.
        known: Vec<String>,
    },
}

impl Request {
    /// The ids of the full chunks, which a cache keeps.
    #[must_use]
    pub fn full_chunks(&self) -> &[u64] {
        &self.block_ids[..(self.input_tokens / CHUNK_TOKENS) as usize]
    }

    /// The most chunks that a lookup may answer: at least one token is left to compute.
    #[must_use]
    pub fn usable_chunks(&self) -> usize {
        (self.input_tokens.saturating_sub(1) / CHUNK_TOKENS) as usize
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `lines`.
    pub fn new(lines: R) -> Self {
        Self { lines: Lines::new(lines), places: Places::default(), ended: false }
    }

    /// Reads the first `limit` requests, all if there is no limit.
    ///
    /// # Errors
    /// The first line that is wrong, or [`TraceError::Empty`].
    pub fn read_all(self, limit: Option<usize>) -> Result<Vec<Request>, TraceError> {
        let requests = self.take(limit.unwrap_or(usize::MAX)).collect::<Result<Vec<_>, _>>()?;
        if requests.is_empty() { Err(TraceError::Empty) } else { Ok(requests) }
    }

    fn read_request(&mut self) -> Result<Option<Request>, TraceError> {
        let Some((line, parsed)) = self.lines.next()? else { return Ok(None) };
        request(line, parsed, &mut self.places).map(Some)
    }
}

/// The request that a trace's line describes.
fn request(line: u64, parsed: Line, places: &mut Places) -> Result<Request, TraceError> {
    let Line { timestamp, input_length, output_length, hash_ids, .. } = parsed;
    let expected = input_length.div_ceil(CHUNK_TOKENS);
    if input_length == 0 {
        return Err(TraceError::EmptyPrompt { line });
    }
    if hash_ids.len() as u64 != expected {
        let found = hash_ids.len();
        return Err(TraceError::BlockCount { line, input_tokens: input_length, expected, found });
    }
    places.check(line, &hash_ids)?;
    Ok(Request {
        timestamp_ms: timestamp,
        input_tokens: input_length,
        output_tokens: output_length,
        block_ids: hash_ids,
    })
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read_request().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// A line as it stands in the file. Other fields are let pass: published traces carry several.
#[derive(Debug, Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    /// Of recorded lookups only.
    chunk_tokens: Option<u32>,
    /// Of recorded lookups only.
    namespace: Option<String>,
}

struct Named(Option<u64>);

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(id) => write!(f, "block {id}"),
            None => write!(f, "nothing"),
        }
    }
}

struct Chunks(Option<u32>);

impl std::fmt::Display for Chunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(tokens) => write!(f, "a recorded lookup with chunks of {tokens} tokens"),
            None => f.write_str("a trace's request"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Request>, TraceError> {
        TraceReader::new(text.as_bytes()).read_all(None)
    }

    fn complaint(text: &str) -> String {
        format!("{:#}", anyhow::Error::from(read(text).unwrap_err()))
    }

    fn line(tokens: u64, ids: &[u64]) -> String {
        format!(
            "{{\"timestamp\": 5, \"input_length\": {tokens}, \"output_length\": 7, \"hash_ids\": {ids:?}}}\n"
        )
    }

    #[test]
    fn a_trace_is_read_in_order_with_blank_lines_skipped() {
        let requests = read(&format!("{}\n{}", line(1_025, &[1, 2, 3]), line(512, &[1]))).unwrap();
        assert_eq!(
            requests[0],
            Request { timestamp_ms: 5, input_tokens: 1_025, output_tokens: 7, block_ids: vec![1, 2, 3] }
        );
        assert_eq!(requests.len(), 2);
    }

    #[test]
    fn a_limit_stops_before_the_lines_behind_it_are_judged() {
        let text = format!("{}nonsense", line(512, &[1]));
        assert_eq!(TraceReader::new(text.as_bytes()).read_all(Some(1)).unwrap().len(), 1);
    }

    #[test]
    fn only_full_chunks_are_kept_and_one_token_is_always_left_to_compute() {
        let chunks = |tokens: u64| {
            let request = &read(&line(tokens, &Vec::from_iter(0..tokens.div_ceil(512)))).unwrap()[0];
            (request.full_chunks().len(), request.usable_chunks())
        };
        assert_eq!(chunks(1), (0, 0));
        assert_eq!(chunks(512), (1, 0));
        assert_eq!(chunks(513), (1, 1));
        assert_eq!(chunks(1_024), (2, 1));
        assert_eq!(chunks(1_500), (2, 2));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let good = line(512, &[1]);
        assert_eq!(complaint(""), "the trace is empty");
        assert_eq!(
            complaint(&format!("{good}{}", line(1_024, &[1]))),
            "line 2: 1024 tokens have 2 blocks of 512 tokens, but `hash_ids` has 1"
        );
        assert!(complaint(&format!("{good}{{}}")).starts_with("line 2: not a request: missing field"));
        assert!(complaint(&line(0, &[])).contains("at least one token"));
        assert!(complaint(&line(512, &[1]).replace('5', "-5")).starts_with("line 1: not a request"));
        assert!(complaint(&" ".repeat(2 << 20)).starts_with("line 1: longer than"));
    }

    #[test]
    fn ids_that_are_not_chained_are_refused() {
        let two_prefixes = format!("{}{}", line(1_024, &[1, 2]), line(1_024, &[3, 2]));
        assert_eq!(
            complaint(&two_prefixes),
            "line 2: block 2 is number 1 after block 3, but on line 1 number 1 after block 1; an id must name its whole prefix"
        );
        assert!(complaint(&line(1_024, &[4, 4])).contains("number 0 after nothing"));
    }

    #[test]
    fn an_empty_tail_of_blank_lines_ends_the_trace() {
        assert_eq!(read(&format!("{}\n \n", line(512, &[1]))).unwrap().len(), 1);
    }
}
