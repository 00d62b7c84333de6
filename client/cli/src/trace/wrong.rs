//! The faults of a trace, and their lines.

use larder_protocol::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_TOKENS};

use super::foreign::Foreign;
use super::history::{Chunks, MAX_NAMESPACES, MAX_PROMPT_TOKENS};
use super::lines::MAX_LINE_BYTES;
use super::places::{MAX_IDS, MAX_REQUESTS};

/// Why a trace cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The rest of the file cannot be read.
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
    /// A file of another kind, without ids.
    #[error("line {line}: {found}")]
    Foreign {
        /// Number of the line.
        line: u64,
        /// The kind of the file.
        found: Foreign,
    },
    /// A request whose blocks or sessions a replay cannot play.
    #[error(
        "line {line}: a Bailian trace, with blocks of 16 tokens, or an AIPerf input, with sessions: a replay does not play these; \
         `larder plan` reads them"
    )]
    ForPlans {
        /// Number of the line.
        line: u64,
    },
    /// More than can be planned.
    #[error(
        "line {line}: the lines before have more than {MAX_REQUESTS} requests or {MAX_IDS} ids: read fewer requests, with --limit"
    )]
    TooLarge {
        /// Number of the line.
        line: u64,
    },
    /// A line is not an object with the four fields.
    #[error("line {line}, column {column}: not a request: {what}", column = .error.column(), what = Unplaced(.error))]
    NotARequest {
        /// Number of the line.
        line: u64,
        /// The JSON reader's error.
        error: serde_json::Error,
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
        "line {line}: {input_tokens} tokens have {expected} blocks of {block_tokens} tokens, but `hash_ids` has {found}{fits}",
        fits = Fits(*.fits)
    )]
    BlockCount {
        /// Number of the line.
        line: u64,
        /// Tokens of the prompt.
        input_tokens: u64,
        /// Tokens of one block.
        block_tokens: u64,
        /// The expected number of ids.
        expected: u64,
        /// Ids found.
        found: usize,
        /// The size of blocks that would give this number of ids, if one is likely.
        fits: Option<u64>,
    },
    /// An id occurs twice in one prompt, or after two different prefixes: ids are not chained.
    #[error(
        "line {line}: block {id} is number {index} after {after}, but on line {known_line} number {known_index} after {known_after}; an id must name its whole prefix (if ids name only blocks, as AIPerf's do, `larder plan --content-ids` chains them)",
        after = Named(*.parent), known_after = Named(*.known_parent)
    )]
    NotChained {
        /// Number of the line.
        line: u64,
        /// The id.
        id: u64,
        /// The id's position in this prompt.
        index: usize,
        /// The id before this id in this prompt.
        parent: Option<u64>,
        /// The line of the id's first occurrence.
        known_line: u64,
        /// The id's position in the earlier prompt.
        known_index: usize,
        /// The id before this id in the earlier prompt.
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
        "line {line}: {found}, but {known} on the lines before; a plan has one size of chunks: choose one namespace with --namespace"
    )]
    ChunkTokens {
        /// Number of the line.
        line: u64,
        /// The chunks on this line.
        found: Chunks,
        /// The chunks on the lines before.
        known: Chunks,
    },
    /// No prompt has this many tokens.
    #[error("line {line}: `input_length` is {found}; it must be at most {MAX_PROMPT_TOKENS}")]
    PromptTokens {
        /// Number of the line.
        line: u64,
        /// Tokens found.
        found: u64,
    },
    /// No chunk has this many tokens.
    #[error("line {line}: `chunk_tokens` is {found}; it must be 1 to {MAX_CHUNK_TOKENS}")]
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
    #[error("line {line}: more than {} namespaces; choose one with --namespace", MAX_NAMESPACES)]
    TooManyNamespaces {
        /// Number of the line.
        line: u64,
    },
    /// The trace has no request.
    #[error("the trace is empty")]
    Empty,
    /// The trace has no request of the given namespace.
    #[error("no lookup has the namespace {wanted}; {}", shown(known))]
    NoSuchNamespace {
        /// The namespace.
        wanted: String,
        /// The namespaces found.
        known: Vec<String>,
    },
}

/// The namespaces of a log, in words.
fn shown(known: &[String]) -> String {
    let named: Vec<&str> = known.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    if named.is_empty() { "no line names one".into() } else { format!("the log has: {}", named.join(", ")) }
}

/// A block before another one, in words.
struct Named(Option<u64>);

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(id) => write!(f, "block {id}"),
            None => write!(f, "nothing"),
        }
    }
}

/// A size that would fit, in words; nothing if there is none.
struct Fits(Option<u64>);

impl std::fmt::Display for Fits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(tokens) => {
                write!(
                    f,
                    ": blocks of {tokens} tokens would fit; set this size by `larder plan --block-tokens`"
                )
            }
            None => Ok(()),
        }
    }
}

/// The JSON reader's words without its position, which counts from the line's beginning.
struct Unplaced<'a>(&'a serde_json::Error);

impl std::fmt::Display for Unplaced<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = self.0.to_string();
        let place = format!(" at line {} column {}", self.0.line(), self.0.column());
        f.write_str(text.strip_suffix(&place).unwrap_or(&text))
    }
}

/// The power of two that would give a prompt this number of blocks.
pub(super) fn size_that_fits(input_tokens: u64, blocks: u64) -> Option<u64> {
    let sizes = (0..=MAX_CHUNK_TOKENS.ilog2()).map(|power| 1 << power);
    sizes.into_iter().find(|&tokens| input_tokens.div_ceil(tokens) == blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_that_fits_is_the_least_power_of_two_that_gives_the_blocks() {
        assert_eq!((size_that_fits(521, 33), size_that_fits(1_025, 3)), (Some(16), Some(512)));
        assert_eq!((size_that_fits(512, 3), size_that_fits(1 << 40, 1)), (None, None));
    }
}
