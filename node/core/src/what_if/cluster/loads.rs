//! Chooses the node of each request: the node that has recomputed the fewest tokens lately.

/// The time, in trace time, after which recomputed tokens count half.
pub const HALF_LIFE_MS: u64 = 30_000;

/// Tokens that each node recomputed, fading with trace time.
#[derive(Debug, Clone)]
pub struct LeastRecomputed {
    nodes: Vec<Load>,
}

#[derive(Debug, Clone, Default)]
struct Load {
    tokens: f64,
    at_ms: u64,
}

impl LeastRecomputed {
    /// Begins with no recomputed tokens.
    pub fn new(nodes: usize) -> Self {
        Self { nodes: vec![Load::default(); nodes] }
    }

    /// The node for a request that arrives at `now_ms`; of equal nodes the first.
    ///
    /// # Panics
    /// Panics if there are no nodes.
    pub fn choose(&self, now_ms: u64) -> usize {
        self.choose_among(now_ms, |_| true).expect("a replay has at least one node")
    }

    /// As [`Self::choose`], among the nodes that `may_serve`; `None` if none may.
    pub fn choose_among(&self, now_ms: u64, may_serve: impl Fn(usize) -> bool) -> Option<usize> {
        self.cheapest_among(now_ms, may_serve, |_| 0)
    }

    /// The node with the least `cost` among the nodes that `may_serve`; of equal nodes, the node that recomputed least.
    pub fn cheapest_among(
        &self,
        now_ms: u64,
        may_serve: impl Fn(usize) -> bool,
        cost: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let tokens = |node: usize| self.nodes[node].tokens_at(now_ms);
        let dearer = |a: usize, b: usize| cost(a).cmp(&cost(b)).then(tokens(a).total_cmp(&tokens(b)));
        (0..self.nodes.len()).filter(|&node| may_serve(node)).min_by(|&a, &b| dearer(a, b))
    }

    /// Tokens that `node` recomputed lately, in a second on average: a router takes this number for the node's backlog.
    pub fn backlog(&self, node: usize, now_ms: u64) -> u64 {
        let fades_in_s = HALF_LIFE_MS as f64 / 1e3 / std::f64::consts::LN_2;
        (self.nodes[node].tokens_at(now_ms).max(0.0) / fades_in_s) as u64
    }

    /// Tokens that `node` recomputed, as they count at `now_ms`.
    ///
    /// # Panics
    /// Panics if there is no such node.
    pub fn tokens_at(&self, node: usize, now_ms: u64) -> f64 {
        self.nodes[node].tokens_at(now_ms)
    }

    /// Counts tokens that `node` computed for a request that arrived at `now_ms`.
    pub fn recomputed(&mut self, node: usize, now_ms: u64, tokens: u64) {
        self.add(node, now_ms, tokens as f64);
    }

    /// Takes back tokens that were counted as recomputed when a request was given to `node`, now that its hits are known.
    /// Requests under way must count: otherwise requests that come close together would all go to one node.
    pub fn served(&mut self, node: usize, now_ms: u64, tokens: u64) {
        self.add(node, now_ms, -(tokens as f64));
    }

    fn add(&mut self, node: usize, now_ms: u64, tokens: f64) {
        let load = &mut self.nodes[node];
        load.tokens = load.tokens_at(now_ms) + tokens;
        load.at_ms = load.at_ms.max(now_ms);
    }
}

impl Load {
    /// The tokens as they count at `now_ms`. Requests may finish out of order: tokens that are reported late count from the
    /// newest known time.
    fn tokens_at(&self, now_ms: u64) -> f64 {
        let half_lives = now_ms.saturating_sub(self.at_ms) as f64 / HALF_LIFE_MS as f64;
        self.tokens * (-half_lives).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_that_recomputed_least_gets_the_next_request() {
        let mut nodes = LeastRecomputed::new(3);
        assert_eq!(nodes.choose(0), 0);
        nodes.recomputed(0, 0, 100);
        nodes.recomputed(1, 0, 50);
        assert_eq!(nodes.choose(0), 2);
        nodes.recomputed(2, 0, 60);
        assert_eq!(nodes.choose(0), 1);
        assert_eq!(nodes.choose_among(0, |node| node != 1), Some(2), "one that is gone gets none");
        assert_eq!(nodes.choose_among(0, |_| false), None);
    }

    #[test]
    fn the_cheapest_node_is_chosen_and_of_equal_ones_the_least_loaded() {
        let mut nodes = LeastRecomputed::new(3);
        nodes.recomputed(0, 0, 100);
        assert_eq!(nodes.cheapest_among(0, |_| true, |node| [5, 9, 9][node]), Some(0));
        assert_eq!(nodes.cheapest_among(0, |_| true, |node| [5, 5, 9][node]), Some(1));
        assert_eq!(nodes.cheapest_among(0, |node| node != 0, |node| [5, 9, 9][node]), Some(1));
    }

    #[test]
    fn the_backlog_is_what_comes_in_a_second() {
        let mut nodes = LeastRecomputed::new(1);
        (0..600).for_each(|second| nodes.recomputed(0, second * 1_000, 10_000));
        assert!((9_500..10_500).contains(&nodes.backlog(0, 600_000)), "{}", nodes.backlog(0, 600_000));
    }

    #[test]
    fn a_request_under_way_counts_whole_until_it_is_known_what_was_served() {
        let mut nodes = LeastRecomputed::new(2);
        nodes.recomputed(0, 0, 100);
        nodes.recomputed(1, 0, 60);
        assert_eq!(nodes.choose(0), 1);
        nodes.served(0, 0, 90);
        assert_eq!(nodes.choose(0), 0);
    }

    #[test]
    fn what_was_recomputed_counts_half_after_half_a_minute_of_trace_time() {
        let mut nodes = LeastRecomputed::new(2);
        nodes.recomputed(0, 0, 100);
        nodes.recomputed(1, HALF_LIFE_MS, 49);
        assert_eq!(nodes.choose(HALF_LIFE_MS), 1);
        nodes.recomputed(1, HALF_LIFE_MS, 2);
        assert_eq!(nodes.choose(HALF_LIFE_MS), 0);
    }

    #[test]
    fn tokens_that_are_reported_late_fade_from_the_newest_time() {
        let mut nodes = LeastRecomputed::new(1);
        nodes.recomputed(0, 2 * HALF_LIFE_MS, 100);
        nodes.recomputed(0, 0, 100);
        assert_eq!(nodes.tokens_at(0, 2 * HALF_LIFE_MS), 200.0);
    }
}
