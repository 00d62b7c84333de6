//! A trace as the planner plays it: blocks numbered from 0, partial ones in or out.

use std::collections::HashMap;

pub use larder_core::what_if::cluster::Prompt;

use crate::trace::{CHUNK_TOKENS, History, Request};

/// The prompts of a trace.
#[derive(Debug, Clone)]
pub struct Workload {
    /// In the order of the trace, with times since its earliest request.
    pub prompts: Vec<Prompt>,
    /// Number of different blocks among the prompts.
    pub distinct_blocks: u64,
    /// Whether partial last blocks count as blocks.
    pub partial_blocks: bool,
    /// Tokens of one block.
    pub chunk_tokens: u64,
}

impl Workload {
    /// Numbers the blocks of a trace. Without `partial_blocks`, only full blocks are kept and one token of each prompt is always
    /// computed, as a node does.
    pub fn new(trace: &[Request], partial_blocks: bool) -> Self {
        Self::of(trace, CHUNK_TOKENS, partial_blocks)
    }

    /// A workload of a history. A log knows full blocks only.
    pub fn of_history(history: &History, partial_blocks: bool) -> Self {
        Self::of(history.requests(), history.chunk_tokens(), partial_blocks && !history.is_log())
    }

    fn of(trace: &[Request], chunk_tokens: u64, partial_blocks: bool) -> Self {
        // An absolute time would change the ages that policies measure.
        let start_ms = trace.iter().map(|request| request.timestamp_ms).min().unwrap_or_default();
        let mut numbers = HashMap::new();
        let prompts: Vec<Prompt> = trace
            .iter()
            .map(|request| {
                let full = (request.input_tokens / chunk_tokens) as usize;
                let usable = (request.input_tokens.saturating_sub(1) / chunk_tokens) as usize;
                let (kept, usable) = match partial_blocks {
                    true => (request.block_ids.len(), usize::MAX),
                    false => (full.min(request.block_ids.len()), usable),
                };
                let mut number = |id: &u64| {
                    let next = numbers.len() as u32;
                    *numbers.entry(*id).or_insert(next)
                };
                Prompt {
                    at_ms: request.timestamp_ms - start_ms,
                    tokens: request.input_tokens,
                    blocks: request.block_ids[..kept].iter().map(&mut number).collect(),
                    usable,
                    block_tokens: chunk_tokens,
                }
            })
            .collect();
        Self { prompts, distinct_blocks: numbers.len() as u64, partial_blocks, chunk_tokens }
    }

    /// Trace time between the first request and the last, in milliseconds.
    pub fn span_ms(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.at_ms).max().unwrap_or_default()
    }

    /// Tokens of all prompts.
    pub fn tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.tokens).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Vec<Request> {
        let request = |timestamp_ms, input_tokens, ids: &[u64]| Request {
            timestamp_ms,
            input_tokens,
            output_tokens: 1,
            block_ids: ids.to_vec(),
        };
        vec![request(25, 600, &[70, 90]), request(5, 1_024, &[70, 80])]
    }

    #[test]
    fn times_begin_at_the_first_request_whatever_the_clock_of_the_trace() {
        let workload = Workload::new(&trace(), true);
        assert!(workload.prompts.iter().map(|prompt| prompt.at_ms).eq([20, 0]));
    }

    #[test]
    fn blocks_are_numbered_as_they_appear_with_partial_ones_or_without() {
        let with = Workload::new(&trace(), true);
        assert_eq!((&with.prompts[0].blocks[..], &with.prompts[1].blocks[..]), (&[0, 1][..], &[0, 2][..]));
        assert_eq!((with.distinct_blocks, with.span_ms(), with.tokens()), (3, 20, 1_624));
        let without = Workload::new(&trace(), false);
        assert_eq!((&without.prompts[0].blocks[..], without.prompts[1].usable), (&[0][..], 1));
    }

    #[test]
    fn a_partial_block_has_the_tokens_that_are_left() {
        let prompt = &Workload::new(&trace(), true).prompts[0];
        assert_eq!((prompt.tokens_of(1), prompt.tokens_of(2)), (512, 600));
    }
}
