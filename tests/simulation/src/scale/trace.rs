//! The traces that a cluster plays: published ones if they are there, otherwise a generated one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use larder_protocol::run::run_start;
use serde::Deserialize;

use super::blocks::Id;

/// Tokens of one chunk.
pub(super) const CHUNK_TOKENS: u64 = 512;

/// The requests of some traces, in the order of their arrival.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The name of each file, or of the generated trace.
    pub names: Vec<String>,
    pub(super) requests: Vec<Request>,
    chunks: u32,
}

/// A request of a trace. Blocks are numbered from 0 over all files.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) tokens: u64,
    blocks: Vec<u32>,
    at: u64,
}

/// The needed fields of a file's line.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads files in Mooncake's JSON lines. Their requests are merged by time.
    ///
    /// # Errors
    /// Fails for a file that cannot be read, or has a line that is no request.
    pub fn read(files: &[PathBuf]) -> Result<Self> {
        let mut trace = Self::default();
        for file in files {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            trace.names.push(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
            let mut numbers = HashMap::new();
            for (number, line) in (1..).zip(text.lines()) {
                let line: Line = serde_json::from_str(line)
                    .with_context(|| format!("{}: line {number} is no request", file.display()))?;
                let whole = (line.input_length / CHUNK_TOKENS) as usize;
                let blocks = line.hash_ids.iter().take(whole).map(|id| {
                    *numbers.entry(*id).or_insert_with(|| {
                        trace.chunks += 1;
                        trace.chunks - 1
                    })
                });
                let blocks = blocks.collect();
                trace.requests.push(Request { tokens: line.input_length, blocks, at: line.timestamp });
            }
        }
        anyhow::ensure!(!trace.requests.is_empty(), "the traces have no request");
        trace.requests.sort_by_key(|request| request.at);
        Ok(trace)
    }

    /// The published traces beside the project; `None` if they are not there.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn published() -> Result<Option<Self>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
        let files = PUBLISHED.map(|name| folder.join(name));
        files.iter().all(|file| file.exists()).then(|| Self::read(&files)).transpose()
    }

    /// A generated trace: conversations of several turns after a few system prompts.
    pub fn generated(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut trace = Self { names: vec!["generated".to_owned()], ..Self::default() };
        let system: Vec<Vec<u32>> = (0..4).map(|_| trace.fresh(random.u32(2..12))).collect();
        let mut open: Vec<Vec<u32>> = Vec::new();
        for at in 0..GENERATED_REQUESTS {
            if open.len() < OPEN_CONVERSATIONS {
                open.push(system[random.usize(..system.len())].clone());
            }
            let which = random.usize(..open.len());
            let turn = trace.fresh(random.u32(1..16));
            open[which].extend(turn);
            let tokens = open[which].len() as u64 * CHUNK_TOKENS + random.u64(..CHUNK_TOKENS);
            trace.requests.push(Request { tokens, blocks: open[which].clone(), at });
            if random.u8(..5) == 0 {
                open.swap_remove(which);
            }
        }
        trace
    }

    fn fresh(&mut self, count: u32) -> Vec<u32> {
        self.chunks += count;
        (self.chunks - count..self.chunks).collect()
    }

    /// The blocks of a request of a copy, with each block's anchor.
    pub(super) fn blocks(&self, copy: u32, request: &Request) -> Vec<(Id, Id)> {
        let id = |at: usize| Id::of(copy, request.blocks[at]);
        let anchor = |at: usize| id(run_start(at as u32) as usize);
        (0..request.blocks.len()).map(|at| (id(at), anchor(at))).collect()
    }
}

/// Traces beside the project.
const PUBLISHED: [&str; 3] = ["conversation.jsonl", "synthetic.jsonl", "agents.jsonl"];

const GENERATED_REQUESTS: u64 = 4_000;
const OPEN_CONVERSATIONS: usize = 200;
