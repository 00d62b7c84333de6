//! Reads the input of the planner: a trace, or the lookup log that a node recorded.
//!
//! A log's lines have two fields more than a trace's (`chunk_tokens`, `namespace`), and ids for full chunks only. Its ids
//! are hashes of 53 bits; a chunk of one namespace is never one of another.
//!
//! Requests of a trace are played in the order of their times, wherever they are in the file.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use larder_protocol::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_TOKENS};

use super::aiperf::{self, Chainer, InputRow};
use super::lines::Lines;
use super::places::Places;
use super::{BAILIAN_BLOCK_TOKENS, CHUNK_TOKENS, Line, Request, TraceError, request, sort_by_time};

/// The requests of one trace or log, from one or several files.
#[derive(Debug, Default)]
pub struct History {
    requests: Vec<Request>,
    /// Unknown before the first request.
    chunks: Option<Chunks>,
    /// Tokens of a block, for a trace that does not give them.
    block_tokens: Option<u32>,
    /// The only namespace whose lookups are read.
    wanted: Option<String>,
    namespaces: Vec<String>,
    places: Places,
    /// The offset added to a log's times.
    offset_ms: u64,
    last_ms: u64,
    /// Requests of a trace that stood behind requests of a later time.
    unordered: usize,
    /// Chains ids that name blocks alone.
    chainer: Option<Chainer>,
}

/// The chunks of a history: their recorder, and their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    /// Blocks of a trace, the last of a prompt partial.
    Trace(u32),
    /// Full chunks of a node's lookups.
    Log(u32),
}

impl History {
    /// An empty history. From logs it reads only the lookups of `namespace`, if one is given. Blocks of traces have
    /// `block_tokens` tokens; without it [`CHUNK_TOKENS`], or in Bailian's traces [`BAILIAN_BLOCK_TOKENS`].
    pub fn new(namespace: Option<String>, block_tokens: Option<u32>) -> Self {
        Self { wanted: namespace, block_tokens, ..Self::default() }
    }

    /// Reads ids of traces as names of their blocks' tokens alone, as in AIPerf's inputs. Without this, an id names its whole
    /// prefix, except in a file whose rows have sessions, delays or no times.
    #[must_use]
    pub fn with_content_ids(self) -> Self {
        Self { chainer: Some(Chainer::default()), ..self }
    }

    /// Reads one more file, until there are `limit` requests.
    ///
    /// # Errors
    /// The first line that is wrong.
    pub fn read(&mut self, lines: impl BufRead, limit: usize) -> Result<(), TraceError> {
        let mut lines = Lines::new(lines);
        while self.requests.len() < limit
            && let Some(next) = lines.next()?
        {
            let line = next.number;
            let parsed = match next.parse::<Line>() {
                Ok(parsed) if self.chainer.is_none() && !parsed.is_of_aiperf() => parsed,
                Ok(parsed) if parsed.chunk_tokens.is_some() || parsed.is_of_bailian() => parsed,
                Ok(_) => {
                    self.row(line, next.parse()?)?;
                    continue;
                }
                Err(error @ TraceError::NotARequest { .. }) => match next.parse::<InputRow>() {
                    Ok(row) if row.is_of_aiperf() || self.chainer.is_some() => {
                        self.row(line, row)?;
                        continue;
                    }
                    _ => return Err(error),
                },
                Err(error) => return Err(error),
            };
            let namespace = parsed.namespace.clone().unwrap_or_default();
            let is_wanted = self.wanted.as_ref().is_none_or(|wanted| *wanted == namespace);
            let number = self.number(namespace);
            if !is_wanted {
                continue;
            }
            let found = self.chunks_of(&parsed);
            let known = *self.chunks.get_or_insert(found);
            if found != known {
                return Err(TraceError::ChunkTokens { line, found, known });
            }
            let request = match known {
                Chunks::Log(chunk_tokens) => {
                    // The only namespace needs no number.
                    let number = if self.wanted.is_some() { Some(0) } else { number };
                    let number = number.ok_or(TraceError::TooManyNamespaces { line })?;
                    self.lookup(line, parsed, chunk_tokens, number as u64)?
                }
                Chunks::Trace(block_tokens) => {
                    let mut request = request(line, parsed, block_tokens.into())?;
                    if let Some(chainer) = &mut self.chainer {
                        let Request { block_ids, input_tokens, .. } = &mut request;
                        *block_ids = chainer.chained(block_ids, *input_tokens, block_tokens.into());
                    }
                    request
                }
            };
            self.places.check(line, &request.block_ids)?;
            self.requests.push(request);
        }
        Ok(())
    }

    /// Ends the history.
    ///
    /// # Errors
    /// [`TraceError::Empty`], or [`TraceError::NoSuchNamespace`]: there is no request to plan with.
    pub fn finish(mut self) -> Result<Self, TraceError> {
        if !self.is_log() {
            self.unordered = sort_by_time(&mut self.requests);
        }
        match self.wanted {
            _ if !self.requests.is_empty() => Ok(self),
            Some(wanted) if !self.namespaces.is_empty() => {
                Err(TraceError::NoSuchNamespace { wanted, known: self.namespaces })
            }
            _ => Err(TraceError::Empty),
        }
    }

    /// The requests: of a trace in the order of their times, of a log in the order of the files.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Whether nodes recorded it: then ids stand for full chunks only.
    pub fn is_log(&self) -> bool {
        matches!(self.chunks, Some(Chunks::Log(_)))
    }

    /// Requests of a trace that stood behind later ones; once it is [finished](Self::finish), they are in their places.
    pub fn unordered(&self) -> usize {
        self.unordered
    }

    /// Tokens of one chunk.
    pub fn chunk_tokens(&self) -> u64 {
        match self.chunks {
            Some(Chunks::Trace(tokens) | Chunks::Log(tokens)) => tokens.into(),
            None => CHUNK_TOKENS,
        }
    }

    fn chunks_of(&self, line: &Line) -> Chunks {
        let usual = if line.is_of_bailian() { BAILIAN_BLOCK_TOKENS } else { CHUNK_TOKENS as u32 };
        match line.chunk_tokens {
            Some(tokens) => Chunks::Log(tokens),
            None => Chunks::Trace(self.block_tokens.unwrap_or(usual)),
        }
    }

    /// Requests of a trace that had no time.
    pub fn untimed(&self) -> usize {
        self.chainer.as_ref().map_or(0, |chainer| chainer.untimed)
    }

    /// Takes a row of AIPerf's inputs.
    fn row(&mut self, line: u64, row: InputRow) -> Result<(), TraceError> {
        let found = Chunks::Trace(self.block_tokens.unwrap_or(CHUNK_TOKENS as u32));
        let known = *self.chunks.get_or_insert(found);
        let Chunks::Trace(block_tokens) = known else {
            return Err(TraceError::ChunkTokens { line, found, known });
        };
        let block_tokens = u64::from(block_tokens);
        let chainer = self.chainer.get_or_insert_with(|| {
            // The earlier rows did not show that ids name blocks alone.
            self.places = Places::default();
            let mut chainer = Chainer::default();
            for request in &mut self.requests {
                request.block_ids = chainer.chained(&request.block_ids, request.input_tokens, block_tokens);
            }
            chainer
        });
        let output_tokens = row.output_length;
        let aiperf::Prompt { at_ms, tokens, block_ids } = chainer.prompt(line, row, block_tokens)?;
        self.places.check(line, &block_ids)?;
        self.requests.push(Request { timestamp_ms: at_ms, input_tokens: tokens, output_tokens, block_ids });
        Ok(())
    }

    /// The number of a namespace; `None` if there are too many.
    fn number(&mut self, namespace: String) -> Option<usize> {
        let known = self.namespaces.iter().position(|known| *known == namespace);
        if known.is_some() || self.namespaces.len() == MAX_NAMESPACES {
            return known;
        }
        self.namespaces.push(namespace);
        Some(self.namespaces.len() - 1)
    }

    /// The request that a log's line describes.
    fn lookup(
        &mut self,
        line: u64,
        parsed: Line,
        chunk_tokens: u32,
        namespace: u64,
    ) -> Result<Request, TraceError> {
        let timestamp = parsed.timestamp_ms();
        let Line { input_length: input_tokens, output_length, hash_ids, .. } = parsed;
        if !(1..=MAX_CHUNK_TOKENS).contains(&chunk_tokens) {
            return Err(TraceError::ChunkSize { line, found: chunk_tokens });
        }
        if input_tokens > MAX_PROMPT_TOKENS {
            return Err(TraceError::PromptTokens { line, found: input_tokens });
        }
        let (most, found) = (input_tokens / u64::from(chunk_tokens), hash_ids.len());
        if found as u64 > most {
            return Err(TraceError::LookupCount { line, input_tokens, chunk_tokens, most, found });
        }
        if let Some(&id) = hash_ids.iter().find(|&&id| id >> ID_BITS != 0) {
            return Err(TraceError::LargeId { line, id });
        }
        let block_ids: Vec<u64> = hash_ids.into_iter().map(|id| namespace << ID_BITS | id).collect();
        let timestamp_ms = self.time(timestamp);
        Ok(Request { timestamp_ms, input_tokens, output_tokens: output_length, block_ids })
    }

    /// The time in a log, which counts on after a restart, although a node counts time from its start.
    fn time(&mut self, timestamp: u64) -> u64 {
        let mut time = timestamp.saturating_add(self.offset_ms);
        if time.saturating_add(JITTER_MS) < self.last_ms {
            self.offset_ms += self.last_ms - time;
            time = self.last_ms;
        }
        self.last_ms = self.last_ms.max(time);
        time
    }
}

impl std::fmt::Display for Chunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Log(tokens) => write!(f, "a recorded lookup with chunks of {tokens} tokens"),
            Self::Trace(tokens) => write!(f, "a trace's request with blocks of {tokens} tokens"),
        }
    }
}

/// Files in the order in which they were written: a node's log as `FILE.2`, `FILE.1.gz`, `FILE`, in whatever order a
/// shell names them; others as they are given. Numbers without `FILE` itself may be those of a trace's parts: `is_log` tells.
pub fn oldest_first(mut files: Vec<PathBuf>, is_log: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let of_one = files.windows(2).all(|two| rotation(&two[0]).0 == rotation(&two[1]).0);
    let has_bare = files.iter().any(|file| rotation(file).1.is_none());
    if of_one && (has_bare || files.len() > 1 && is_log(&files[0])) {
        files.sort_by_key(|file| std::cmp::Reverse(rotation(file).1));
    }
    files
}

/// A file without the number that rotation gave it and without its packer's ending, and the number; the file that is being
/// written has none.
fn rotation(file: &Path) -> (PathBuf, Option<u32>) {
    let is_packed = file.extension().is_some_and(|packer| packer == "gz" || packer == "zst");
    let file = if is_packed { file.with_extension("") } else { file.to_owned() };
    let number = file.extension().and_then(|number| number.to_str()?.parse().ok());
    (if number.is_some() { file.with_extension("") } else { file }, number)
}

/// Bits of a recorded id; the bits above tell namespaces apart.
const ID_BITS: u32 = 53;

/// Tokens of the longest prompt: it fills as many of the largest chunks as a chain has.
pub(super) const MAX_PROMPT_TOKENS: u64 = MAX_CHAIN_CHUNKS as u64 * MAX_CHUNK_TOKENS as u64;

/// Namespaces of one log.
pub(super) const MAX_NAMESPACES: usize = 1 << (64 - ID_BITS);

/// Limit by which lookups of one node may be out of order, since several actors record.
const JITTER_MS: u64 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(at: u64, tokens: u64, chunk_tokens: u32, namespace: &str, ids: &[u64]) -> String {
        format!(
            "{{\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":0,\"chunk_tokens\":{chunk_tokens},\"namespace\":\"{namespace}\",\"hash_ids\":{ids:?}}}\n"
        )
    }

    fn read(files: &[&str], namespace: Option<&str>) -> Result<History, TraceError> {
        let mut history = History::new(namespace.map(str::to_owned), None);
        files.iter().try_for_each(|text| history.read(text.as_bytes(), usize::MAX))?;
        history.finish()
    }

    fn complaint(text: &str) -> String {
        read(&[text], None).unwrap_err().to_string()
    }

    #[test]
    fn a_log_has_full_chunks_only_of_the_size_that_it_says() {
        let text = [line(5, 40, 16, "a", &[7, 8]), line(9, 15, 16, "a", &[]), line(9, 48, 16, "a", &[7])];
        let history = read(&[&text.concat()], None).unwrap();
        assert_eq!((history.is_log(), history.chunk_tokens(), history.requests().len()), (true, 16, 3));
        assert_eq!(history.requests()[0].block_ids, [7, 8]);
    }

    #[test]
    fn a_trace_is_read_as_before() {
        let text = "{\"timestamp\":1,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n";
        let history = read(&[text, text], None).unwrap();
        assert_eq!((history.is_log(), history.chunk_tokens(), history.requests().len()), (false, 512, 2));
        assert!(
            complaint(&format!("{text}{}", line(5, 40, 16, "a", &[7])))
                .contains("line 2: a recorded lookup with chunks of 16 tokens, but a trace's request")
        );
    }

    #[test]
    fn a_trace_of_bailian_has_seconds_and_blocks_of_16_tokens_the_partial_one_with_an_id_or_without() {
        let line = |at: &str, tokens: u64, ids: &[u64]| {
            format!(
                "{{\"chat_id\":7,\"parent_chat_id\":-1,\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":3,\"type\":\"text\",\"turn\":1,\"hash_ids\":{ids:?}}}\n"
            )
        };
        let text = [line("61.114", 40, &[1, 2, 3]), line("62", 40, &[1, 2]), line("62.5", 17, &[1, 4])];
        let history = read(&[&text.concat()], None).unwrap();
        assert_eq!((history.is_log(), history.chunk_tokens()), (false, 16));
        let requests =
            history.requests().iter().map(|request| (request.timestamp_ms, request.block_ids.len()));
        assert_eq!(requests.collect::<Vec<_>>(), [(61_114, 3), (62_000, 2), (62_500, 2)]);
        assert!(complaint(&line("1", 40, &[1])).contains("40 tokens have 3 blocks of 16 tokens"));
    }

    #[test]
    fn a_trace_has_blocks_of_the_size_that_is_given() {
        let text = "{\"timestamp\":1.6,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2,3]}\n";
        assert!(complaint(text).contains("blocks of 256 tokens would fit"));
        let mut history = History::new(None, Some(256));
        history.read(text.as_bytes(), usize::MAX).unwrap();
        let history = history.finish().unwrap();
        assert_eq!((history.chunk_tokens(), history.requests()[0].timestamp_ms), (256, 2));
    }

    #[test]
    fn a_file_of_aiperf_is_known_by_sessions_delays_or_rows_without_times() {
        let plain = "{\"timestamp\":7,\"input_length\":600,\"output_length\":52,\"hash_ids\":[1,2]}\n";
        let turn = "{\"session_id\":\"a\",\"timestamp\":9,\"input_length\":600,\"hash_ids\":[1,2]}\n";
        let next =
            "{\"session_id\":\"a\",\"delay\":50,\"input_length\":512,\"output_length\":1,\"hash_ids\":[2]}\n";
        let untimed = "{\"input_length\":600,\"hash_ids\":[1,2]}\n";
        let history = read(&[plain, turn, next, untimed], None).unwrap();
        assert_eq!((history.is_log(), history.chunk_tokens(), history.untimed()), (false, 512, 1));
        let requests = history.requests();
        assert!(requests.iter().map(|request| request.timestamp_ms).eq([7, 9, 59, 59]));
        assert_eq!(requests[0].block_ids, requests[1].block_ids, "the first row is chained with the others");
        assert_eq!((requests[2].input_tokens, requests[2].block_ids.len()), (1_112, 3));
        assert_eq!(requests[2].block_ids[0], requests[0].block_ids[0]);
        assert!(complaint("{\"input_length\":600}\n").contains("missing field `timestamp`"));
    }

    #[test]
    fn ids_that_name_blocks_alone_are_chained_where_the_caller_says_so() {
        let text = "{\"timestamp\":0,\"input_length\":1024,\"output_length\":1,\"hash_ids\":[1,2]}\n\
                    {\"timestamp\":5,\"input_length\":1024,\"output_length\":1,\"hash_ids\":[3,2]}\n";
        assert!(complaint(text).contains("`larder plan --content-ids` chains them"));
        let mut history = History::new(None, None).with_content_ids();
        history.read(text.as_bytes(), usize::MAX).unwrap();
        let history = history.finish().unwrap();
        assert_ne!(history.requests()[0].block_ids[1], history.requests()[1].block_ids[1]);
        assert_eq!(history.untimed(), 0);
        let line = |at: u64, ids: &[u64]| {
            format!(
                "{{\"chat_id\":7,\"timestamp\":{at},\"input_length\":40,\"output_length\":3,\"hash_ids\":{ids:?}}}\n"
            )
        };
        let mut history = History::new(None, None).with_content_ids();
        let text = [line(1, &[1, 1, 2]), line(2, &[1, 1])].concat();
        history.read(text.as_bytes(), usize::MAX).unwrap();
        let of_bailian = history.finish().unwrap();
        assert_eq!(of_bailian.requests()[0].block_ids[..2], of_bailian.requests()[1].block_ids);
        let wrong = History::new(None, None).with_content_ids().read(line(1, &[1, 2, 3, 4]).as_bytes(), 9);
        assert!(wrong.unwrap_err().to_string().contains("40 tokens have 3 blocks of 16 tokens"));
    }

    #[test]
    fn requests_of_a_trace_are_played_by_their_times() {
        let line = |at: u64, id: u64| {
            format!("{{\"timestamp\":{at},\"input_length\":9,\"output_length\":1,\"hash_ids\":[{id}]}}\n")
        };
        let text = [line(30, 1), line(10, 2), line(30, 3), line(20, 4)].concat();
        let history = read(&[&text], None).unwrap();
        let ids: Vec<u64> = history.requests().iter().map(|request| request.block_ids[0]).collect();
        assert_eq!((ids, history.unordered()), (vec![2, 4, 1, 3], 2));
    }

    #[test]
    fn chunks_of_two_namespaces_are_never_the_same_and_one_can_be_chosen() {
        let text = [line(1, 16, 16, "a", &[7]), line(2, 16, 16, "b", &[7]), line(3, 32, 16, "b", &[7, 9])];
        let both = read(&[&text.concat()], None).unwrap();
        assert_ne!(both.requests()[0].block_ids, both.requests()[1].block_ids);
        assert_eq!(both.requests()[1].block_ids[0], both.requests()[2].block_ids[0]);
        assert_eq!(read(&[&text.concat()], Some("b")).unwrap().requests().len(), 2);
        let error = read(&[&text.concat()], Some("c")).unwrap_err().to_string();
        assert_eq!(error, "no lookup has the namespace c; the log has: a, b");
        let trace = "{\"timestamp\":0,\"input_length\":9,\"output_length\":1,\"hash_ids\":[1]}\n";
        let error = read(&[trace], Some("c")).unwrap_err().to_string();
        assert_eq!(error, "no lookup has the namespace c; no line names one");
    }

    #[test]
    fn one_of_more_namespaces_than_can_be_told_apart_is_read() {
        let text: String = (0..=MAX_NAMESPACES).map(|at| line(1, 16, 16, &at.to_string(), &[7])).collect();
        assert!(complaint(&text).contains("choose one with --namespace"));
        let last = MAX_NAMESPACES.to_string();
        assert_eq!(read(&[&text], Some(&last)).unwrap().requests().len(), 1);
    }

    #[test]
    fn time_goes_on_where_a_node_started_anew() {
        let old = [line(400, 16, 16, "a", &[1]), line(90_000, 16, 16, "a", &[2])].concat();
        let new = [line(89_900, 16, 16, "a", &[2]), line(10, 16, 16, "a", &[3]), line(30, 16, 16, "a", &[4])];
        let history = read(&[&old, &new.concat()], None).unwrap();
        let times: Vec<u64> = history.requests().iter().map(|request| request.timestamp_ms).collect();
        assert_eq!(times, [400, 90_000, 89_900, 90_000, 90_020]);
    }

    #[test]
    fn what_no_node_records_is_refused_with_its_line() {
        let good = line(1, 32, 16, "a", &[1, 2]);
        assert_eq!(
            complaint(&format!("{good}{}", line(2, 31, 16, "a", &[1, 2]))),
            "line 2: 31 tokens fill 1 chunks of 16 tokens, but `hash_ids` has 2"
        );
        assert!(complaint(&line(1, 32, 0, "a", &[])).contains("line 1: `chunk_tokens` is 0"));
        assert!(complaint(&line(1, u64::MAX, 16, "a", &[])).contains("it must be at most 536870912"));
        assert!(complaint(&line(1, 32, 16, "a", &[1 << 53])).contains("more than 53 bits"));
        assert!(complaint(&format!("{good}{}", line(2, 32, 32, "b", &[1]))).contains("--namespace"));
        assert!(complaint(&format!("{good}{}", line(2, 32, 16, "a", &[2]))).contains("line 2: block 2 is"));
        assert_eq!(complaint("\n"), "the trace is empty");
    }

    #[test]
    fn rotated_files_are_put_in_the_order_in_which_they_were_written() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let log = ["d/log.jsonl", "d/log.jsonl.1", "d/log.jsonl.10", "d/log.jsonl.2"];
        let log = oldest_first(paths(&log), |_| panic!("the file itself is there"));
        assert_eq!(log, paths(&["d/log.jsonl.10", "d/log.jsonl.2", "d/log.jsonl.1", "d/log.jsonl"]));
        let packed = oldest_first(paths(&["log.jsonl.1", "log.jsonl.2.gz", "log.jsonl.3.zst"]), |_| true);
        assert_eq!(packed, paths(&["log.jsonl.3.zst", "log.jsonl.2.gz", "log.jsonl.1"]));
        for others in
            [&["monday.jsonl", "tuesday.jsonl.3"][..], &["trace.1", "trace.2"], &["trace.00", "trace.01"]]
        {
            assert_eq!(oldest_first(paths(others), |_| false), paths(others));
        }
    }
}
