//! Reads request traces in Mooncake's JSON lines, and for a [`History`] in Bailian's.
//!
//! One object a line:
//!
//! | field | meaning |
//! | --- | --- |
//! | `timestamp` | arrival in milliseconds since the trace began; in Bailian's traces in seconds |
//! | `input_length` | tokens of the prompt |
//! | `output_length` | tokens of the answer |
//! | `hash_ids` | one id for each block of the prompt, chained: an id names the whole prefix up to its block's end. The last, partial block has an id of its own; in Bailian's traces it may have none |
//! | `chat_id` | in Bailian's traces only |
//!
//! A block has [`CHUNK_TOKENS`] tokens, in Bailian's traces [`BAILIAN_BLOCK_TOKENS`]. A [`History`] also reads other sizes, and
//! the inputs of AIPerf.

mod aiperf;
mod foreign;
pub mod history;
mod lines;
mod places;
pub mod source;
mod wrong;

use std::io::BufRead;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

pub use self::foreign::Foreign;
pub use self::history::History;
use self::lines::Lines;
use self::places::Places;
pub use self::wrong::TraceError;
use self::wrong::size_that_fits;

/// Tokens of one block of a trace, and so of one chunk of a replay.
pub const CHUNK_TOKENS: u64 = 512;

/// Tokens of one block of Bailian's traces.
pub const BAILIAN_BLOCK_TOKENS: u32 = 16;

/// A request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The request's time in milliseconds since the trace began.
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

impl Request {
    /// The ids of the full chunks; a cache keeps only these.
    pub fn full_chunks(&self) -> &[u64] {
        &self.block_ids[..(self.input_tokens / CHUNK_TOKENS) as usize]
    }

    /// The most chunks that a lookup may answer: at least one token is left to compute.
    pub fn usable_chunks(&self) -> usize {
        (self.input_tokens.saturating_sub(1) / CHUNK_TOKENS) as usize
    }
}

/// Puts requests in the order of their times; equal times keep their order. Returns how many stood behind later ones.
pub fn sort_by_time(requests: &mut [Request]) -> usize {
    let (mut unordered, mut latest_ms) = (0, 0);
    for request in &*requests {
        unordered += usize::from(request.timestamp_ms < latest_ms);
        latest_ms = latest_ms.max(request.timestamp_ms);
    }
    requests.sort_by_key(|request| request.timestamp_ms);
    unordered
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
        let Some(line) = self.lines.next()? else { return Ok(None) };
        let (number, parsed) = (line.number, line.parse::<Line>()?);
        if parsed.is_of_bailian() || parsed.is_of_aiperf() {
            return Err(TraceError::ForPlans { line: number });
        }
        let request = request(number, parsed, CHUNK_TOKENS)?;
        self.places.check(number, &request.block_ids)?;
        Ok(Some(request))
    }
}

/// The request of a trace's line, with blocks of `block_tokens`. Whether its ids are chained is not yet checked.
fn request(line: u64, parsed: Line, block_tokens: u64) -> Result<Request, TraceError> {
    let (timestamp_ms, is_of_bailian) = (parsed.timestamp_ms(), parsed.is_of_bailian());
    let Line { input_length, output_length, hash_ids, .. } = parsed;
    let expected = input_length.div_ceil(block_tokens);
    if input_length == 0 {
        return Err(TraceError::EmptyPrompt { line });
    }
    let found = hash_ids.len();
    let has_full_blocks = is_of_bailian && found as u64 == input_length / block_tokens;
    if found as u64 != expected && !has_full_blocks {
        let fits = size_that_fits(input_length, found as u64);
        let input_tokens = input_length;
        return Err(TraceError::BlockCount { line, input_tokens, block_tokens, expected, found, fits });
    }
    Ok(Request {
        timestamp_ms,
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

/// A line of the file. Other fields are ignored: published traces have several.
#[derive(Debug, Deserialize)]
struct Line {
    #[serde(deserialize_with = "time")]
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    /// In recorded lookups only.
    chunk_tokens: Option<u32>,
    /// In recorded lookups only.
    namespace: Option<String>,
    /// In Bailian's traces only.
    chat_id: Option<IgnoredAny>,
    /// In AIPerf's inputs only.
    session_id: Option<IgnoredAny>,
    /// In AIPerf's inputs only.
    delay: Option<IgnoredAny>,
}

impl Line {
    fn is_of_bailian(&self) -> bool {
        self.chat_id.is_some()
    }

    fn is_of_aiperf(&self) -> bool {
        self.session_id.is_some() || self.delay.is_some()
    }

    fn timestamp_ms(&self) -> u64 {
        (self.timestamp * if self.is_of_bailian() { 1e3 } else { 1.0 }).round() as u64
    }
}

fn time<'de, D: Deserializer<'de>>(source: D) -> Result<f64, D::Error> {
    let time = f64::deserialize(source)?;
    if time < 0.0 { Err(serde::de::Error::custom("`timestamp` is below 0")) } else { Ok(time) }
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
            "line 2: 1024 tokens have 2 blocks of 512 tokens, but `hash_ids` has 1: blocks of 1024 tokens would fit; set this size by `larder plan --block-tokens`"
        );
        assert!(complaint(&line(512, &[1, 2, 3])).ends_with("but `hash_ids` has 3"), "no power of two");
        assert!(complaint(&line(0, &[])).contains("at least one token"));
        assert!(complaint(&" ".repeat(2 << 20)).starts_with("line 1: longer than"));
    }

    #[test]
    fn a_line_that_is_no_request_has_one_position_in_the_file() {
        let good = line(512, &[1]);
        assert_eq!(
            complaint(&format!("{good}{{}}")),
            "line 2, column 2: not a request: missing field `timestamp`"
        );
        let below = complaint(&good.replacen('5', "-5", 1));
        assert!(below.ends_with("not a request: `timestamp` is below 0"), "{below}");
        assert!(below.starts_with("line 1, column "), "{below}");
    }

    #[test]
    fn ids_that_are_not_chained_are_refused() {
        let two_prefixes = format!("{}{}", line(1_024, &[1, 2]), line(1_024, &[3, 2]));
        assert_eq!(
            complaint(&two_prefixes),
            "line 2: block 2 is number 1 after block 3, but on line 1 number 1 after block 1; an id must name its whole prefix (if ids name only blocks, as AIPerf's do, `larder plan --content-ids` chains them)"
        );
        assert!(complaint(&line(1_024, &[4, 4])).contains("number 0 after nothing"));
    }

    #[test]
    fn traces_of_bailian_and_sessions_of_aiperf_are_refused_since_only_a_plan_reads_them() {
        for field in ["\"chat_id\": 7, ", "\"session_id\": \"a\", ", "\"delay\": 50, "] {
            let text = complaint(&line(512, &[1]).replacen('{', &format!("{{{field}"), 1));
            assert!(text.starts_with("line 1: ") && text.contains("`larder plan` reads them"), "{text}");
        }
    }

    #[test]
    fn an_empty_tail_of_blank_lines_ends_the_trace() {
        assert_eq!(read(&format!("{}\n \n", line(512, &[1]))).unwrap().len(), 1);
    }
}
