//! The cost of serving a request at a node: routers send a request to the cheapest node, and schedulers order their queues by
//! cost.
//!
//! The unit is a token of prefill, since all engines of a model compute a token in about the same time.

use std::time::Duration;

/// A prompt, and how much of it the cluster holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt's tokens.
    pub tokens: u64,
    /// Tokens of the longest prefix whose chunks all have a holder.
    pub cluster_tokens: u64,
}

/// A node that could serve the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Candidate {
    /// Tokens that the node's engines have yet to compute for other requests.
    pub backlog_tokens: u64,
    /// Tokens of the cluster's prefix that the node holds itself, wherever they are in the prefix.
    pub held_tokens: u64,
}

impl Prompt {
    /// Tokens that must be computed at any node, at least the last token.
    #[must_use]
    pub fn to_compute(&self) -> u64 {
        (self.tokens - self.cluster_tokens.min(self.tokens)).max(1)
    }

    /// The cost at a node: its backlog, the tokens to compute, and a tenth of the tokens to move there.
    #[must_use]
    pub fn cost_tokens(&self, node: Candidate) -> u64 {
        let to_move = self.cluster_tokens.saturating_sub(node.held_tokens);
        node.backlog_tokens.saturating_add(self.to_compute()).saturating_add(to_move / TOKENS_MOVED)
    }
}

/// The place of a request in the queue of a scheduler: the lowest key goes first.
///
/// A request with a long cached prefix goes before requests that arrived a little earlier and have more to compute. No request
/// starves: only requests that arrive within the time of its own prefill can pass it.
#[must_use]
pub fn queue_key(arrived: Duration, to_compute_tokens: u64, prefill_tokens_per_s: f64) -> Duration {
    let prefill = to_compute_tokens as f64 / prefill_tokens_per_s.max(1.0);
    arrived.saturating_add(Duration::try_from_secs_f64(prefill).unwrap_or(Duration::MAX))
}

/// Tokens whose blocks can be moved in the time in which one token is computed: about ten. Placement weighs them the same.
const TOKENS_MOVED: u64 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: Prompt = Prompt { tokens: 10_000, cluster_tokens: 8_000 };

    fn node(backlog_tokens: u64, held_tokens: u64) -> Candidate {
        Candidate { backlog_tokens, held_tokens }
    }

    #[test]
    fn a_request_goes_where_its_prefix_is_until_the_backlog_costs_more_than_the_transfer() {
        assert_eq!(PROMPT.cost_tokens(node(0, 8_000)), 2_000);
        assert_eq!(PROMPT.cost_tokens(node(0, 0)), 2_800);
        let elsewhere = PROMPT.cost_tokens(node(0, 0));
        assert!(PROMPT.cost_tokens(node(799, 8_000)) < elsewhere);
        assert!(PROMPT.cost_tokens(node(801, 8_000)) > elsewhere);
    }

    #[test]
    fn a_prompt_that_is_held_whole_has_a_token_to_compute() {
        let whole = Prompt { tokens: 512, cluster_tokens: 512 };
        assert_eq!(whole.cost_tokens(node(0, 512)), 1);
    }

    #[test]
    fn a_cached_request_passes_others_for_no_longer_than_their_prefill_takes() {
        let second = Duration::from_secs;
        let cold = queue_key(second(10), 50_000, 10_000.0);
        assert!(queue_key(second(14), 100, 10_000.0) < cold);
        assert!(queue_key(second(16), 100, 10_000.0) > cold);
        assert_eq!(queue_key(second(1), u64::MAX, 0.0), Duration::MAX);
    }
}
