//! The changes of nodes between two samples.

use serde::Serialize;

use super::sample::{Counters, Gauges, NodeAnswer, NodeSample, Sample};

/// All nodes, between two times.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct View {
    /// The seconds between the two times.
    pub(crate) seconds: f64,
    /// The sum of all nodes.
    pub(crate) total: Numbers,
    pub(crate) nodes: Vec<NodeView>,
    /// Why nothing newer is known.
    #[serde(skip)]
    pub(crate) trouble: Option<String>,
}

/// One node between two times.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) state: String,
    /// `None` if it did not answer.
    #[serde(flatten)]
    pub(crate) numbers: Option<Numbers>,
}

/// Rates are of the time between the samples. They are `None` if the node did not answer at first, or started again meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Numbers {
    /// The hit rate of prompt tokens; `None` too if nobody asked.
    pub(crate) hit_rate: Option<f64>,
    #[serde(skip)]
    pub(super) tokens_asked: f64,
    #[serde(skip)]
    pub(super) tokens_hit: f64,
    pub(crate) requests_per_second: Option<f64>,
    pub(crate) in_bytes_per_second: Option<f64>,
    pub(crate) out_bytes_per_second: Option<f64>,
    pub(crate) peer_in_bytes_per_second: Option<f64>,
    pub(crate) peer_out_bytes_per_second: Option<f64>,
    pub(crate) disk_in_bytes_per_second: Option<f64>,
    pub(crate) disk_out_bytes_per_second: Option<f64>,
    /// `None` too if there is no object store.
    pub(crate) object_in_bytes_per_second: Option<f64>,
    pub(crate) object_out_bytes_per_second: Option<f64>,
    pub(crate) evictions_per_second: Option<f64>,
    pub(crate) host_chunks: u64,
    pub(crate) host_bytes: u64,
    pub(crate) arena_bytes: u64,
    /// `None` if there is no disk.
    pub(crate) disk_chunks: Option<u64>,
    pub(crate) disk_waiting_bytes: u64,
    pub(crate) sessions: u64,
    pub(crate) leases: u64,
}

impl View {
    /// The changes from `before` to `after`.
    pub(crate) fn between(before: &Sample, after: &Sample) -> Self {
        let seconds = (after.at - before.at).as_secs_f64();
        let node = |node: &NodeSample| {
            let earlier = before.nodes.iter().find(|earlier| earlier.name == node.name);
            let earlier = earlier.and_then(|earlier| earlier.said);
            let numbers = node.said.map(|said| Numbers::between(earlier, said, seconds));
            NodeView { name: node.name.clone(), state: node.state.clone(), numbers }
        };
        let nodes: Vec<NodeView> = after.nodes.iter().map(node).collect();
        let total = nodes.iter().filter_map(|node| node.numbers).fold(Numbers::default(), Numbers::plus);
        Self { seconds, total: total.with_hit_rate(), nodes, trouble: None }
    }
}

impl Numbers {
    fn between(before: Option<NodeAnswer>, after: NodeAnswer, seconds: f64) -> Self {
        let NodeAnswer { incarnation, counters, gauges } = after;
        let Gauges {
            host_chunks,
            host_bytes,
            arena_bytes,
            disk_chunks,
            disk_waiting_bytes,
            has_object,
            sessions,
            leases,
        } = gauges;
        // The counters of another life began at 0.
        let before = before.filter(|before| before.incarnation == incarnation && seconds > 0.0);
        let grown =
            |of: fn(&Counters) -> f64| before.map(|before| (of(&counters) - of(&before.counters)).max(0.0));
        let rate = |of| grown(of).map(|grown| grown / seconds);
        let numbers = Self {
            hit_rate: None,
            tokens_asked: grown(|c| c.tokens_asked).unwrap_or(0.0),
            tokens_hit: grown(|c| c.tokens_hit).unwrap_or(0.0),
            requests_per_second: rate(|c| c.requests),
            in_bytes_per_second: rate(|c| c.in_bytes),
            out_bytes_per_second: rate(|c| c.out_bytes),
            peer_in_bytes_per_second: rate(|c| c.peer_in_bytes),
            peer_out_bytes_per_second: rate(|c| c.peer_out_bytes),
            disk_in_bytes_per_second: rate(|c| c.disk_in_bytes),
            disk_out_bytes_per_second: rate(|c| c.disk_out_bytes),
            object_in_bytes_per_second: rate(|c| c.object_in_bytes).filter(|_| has_object),
            object_out_bytes_per_second: rate(|c| c.object_out_bytes).filter(|_| has_object),
            evictions_per_second: rate(|c| c.evictions),
            host_chunks,
            host_bytes,
            arena_bytes,
            disk_chunks,
            disk_waiting_bytes,
            sessions,
            leases,
        };
        numbers.with_hit_rate()
    }

    fn with_hit_rate(self) -> Self {
        let hit_rate = (self.tokens_asked > 0.0).then(|| self.tokens_hit / self.tokens_asked);
        Self { hit_rate, ..self }
    }

    fn plus(self, other: Self) -> Self {
        let add = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(|a, b| a + b);
        Self {
            hit_rate: None,
            tokens_asked: self.tokens_asked + other.tokens_asked,
            tokens_hit: self.tokens_hit + other.tokens_hit,
            requests_per_second: add(self.requests_per_second, other.requests_per_second),
            in_bytes_per_second: add(self.in_bytes_per_second, other.in_bytes_per_second),
            out_bytes_per_second: add(self.out_bytes_per_second, other.out_bytes_per_second),
            peer_in_bytes_per_second: add(self.peer_in_bytes_per_second, other.peer_in_bytes_per_second),
            peer_out_bytes_per_second: add(self.peer_out_bytes_per_second, other.peer_out_bytes_per_second),
            disk_in_bytes_per_second: add(self.disk_in_bytes_per_second, other.disk_in_bytes_per_second),
            disk_out_bytes_per_second: add(self.disk_out_bytes_per_second, other.disk_out_bytes_per_second),
            object_in_bytes_per_second: add(
                self.object_in_bytes_per_second,
                other.object_in_bytes_per_second,
            ),
            object_out_bytes_per_second: add(
                self.object_out_bytes_per_second,
                other.object_out_bytes_per_second,
            ),
            evictions_per_second: add(self.evictions_per_second, other.evictions_per_second),
            host_chunks: self.host_chunks + other.host_chunks,
            host_bytes: self.host_bytes + other.host_bytes,
            arena_bytes: self.arena_bytes + other.arena_bytes,
            disk_chunks: self.disk_chunks.into_iter().chain(other.disk_chunks).reduce(|a, b| a + b),
            disk_waiting_bytes: self.disk_waiting_bytes + other.disk_waiting_bytes,
            sessions: self.sessions + other.sessions,
            leases: self.leases + other.leases,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn said(incarnation: u64, tokens: f64) -> NodeAnswer {
        let counters = Counters {
            tokens_asked: tokens,
            tokens_hit: tokens / 4.0,
            requests: tokens,
            ..Counters::default()
        };
        NodeAnswer { incarnation, counters, gauges: Gauges { host_chunks: 5, ..Gauges::default() } }
    }

    fn sample(at: Instant, nodes: &[(&str, Option<NodeAnswer>)]) -> Sample {
        let node = |&(name, said): &(&str, Option<NodeAnswer>)| NodeSample {
            name: name.to_owned(),
            state: "alive".to_owned(),
            said,
        };
        Sample { at, nodes: nodes.iter().map(node).collect() }
    }

    #[test]
    fn rates_are_those_of_the_interval_and_not_since_the_start() {
        let start = crate::clock::now();
        let before = sample(start, &[("a", Some(said(7, 1_000.0)))]);
        let mut later = said(7, 1_200.0);
        later.counters.tokens_hit = 250.0 + 150.0;
        let view = View::between(&before, &sample(start + Duration::from_secs(2), &[("a", Some(later))]));
        let numbers = view.nodes[0].numbers.unwrap();
        assert_eq!((numbers.hit_rate, numbers.requests_per_second), (Some(0.75), Some(100.0)));
        assert_eq!((view.seconds, view.total), (2.0, numbers));
    }

    #[test]
    fn a_node_that_is_new_or_started_again_has_no_rates_and_one_that_is_silent_no_numbers() {
        let start = crate::clock::now();
        let before = sample(start, &[("a", Some(said(7, 1_000.0))), ("c", Some(said(8, 1.0)))]);
        let after = [("a", Some(said(9, 1_008.0))), ("b", Some(said(10, 8.0))), ("c", None)];
        let view = View::between(&before, &sample(start + Duration::from_secs(3), &after));
        for number in [0, 1] {
            let numbers = view.nodes[number].numbers.unwrap();
            assert_eq!((numbers.hit_rate, numbers.requests_per_second, numbers.host_chunks), (None, None, 5));
        }
        assert_eq!((view.nodes[2].numbers, view.total.host_chunks), (None, 10));
    }
}
