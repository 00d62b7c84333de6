//! The status and metrics of nodes and coordinator at one time.

use std::time::Instant;

use larder_node::Status;

use crate::clock::now;
use crate::http;
use crate::samples::Samples;
use crate::survey::{Surveyed, Targets};
use crate::together::together;

/// All nodes at one time.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    pub(crate) nodes: Vec<NodeSample>,
}

/// One node at one time.
#[derive(Debug, Clone)]
pub(crate) struct NodeSample {
    pub(crate) name: String,
    /// `alive`, `suspect`, `not ready`, `silent` or `lost`.
    pub(crate) state: String,
    /// The node's answer; `None` if it is silent.
    pub(crate) said: Option<NodeAnswer>,
}

/// The answer of one node.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeAnswer {
    /// The node's life.
    pub(crate) incarnation: u64,
    pub(crate) counters: Counters,
    pub(crate) gauges: Gauges,
}

/// Values that grow from a node's start on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) tokens_asked: f64,
    pub(crate) tokens_hit: f64,
    pub(crate) requests: f64,
    pub(crate) in_bytes: f64,
    pub(crate) out_bytes: f64,
    pub(crate) evictions: f64,
    pub(crate) peer_in_bytes: f64,
    pub(crate) peer_out_bytes: f64,
    pub(crate) disk_in_bytes: f64,
    pub(crate) disk_out_bytes: f64,
    pub(crate) object_in_bytes: f64,
    pub(crate) object_out_bytes: f64,
}

/// Present values of a node.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gauges {
    pub(crate) host_chunks: u64,
    pub(crate) host_bytes: u64,
    pub(crate) arena_bytes: u64,
    pub(crate) disk_chunks: Option<u64>,
    pub(crate) disk_waiting_bytes: u64,
    /// Whether there is an object store.
    pub(crate) has_object: bool,
    pub(crate) sessions: u64,
    pub(crate) leases: u64,
}

impl Sample {
    /// Asks all of them at once.
    ///
    /// # Errors
    /// The coordinator does not answer. A node without an answer is shown as silent.
    pub(crate) fn of(targets: &Targets) -> anyhow::Result<Self> {
        let survey = targets.survey()?;
        let mut nodes = together(&survey.nodes, NodeSample::of);
        let lost = survey.coordinator.iter().flat_map(|(_, coordinator)| &coordinator.lost);
        nodes.extend(lost.map(|lost| NodeSample {
            name: lost.name.clone(),
            state: "lost".into(),
            said: None,
        }));
        Ok(Self { at: now(), nodes })
    }
}

impl NodeSample {
    fn of(node: &Surveyed) -> Self {
        let answers = node.said.clone().and_then(|(_, status)| {
            let metrics = http::get_text(&node.http, "/metrics");
            metrics.map(|metrics| NodeAnswer::of(&status, &metrics)).map_err(|error| format!("{error:#}"))
        });
        let name = node.name.clone();
        match answers {
            Ok(said) => Self { state: node.state().to_owned(), said: Some(said), name },
            Err(error) => {
                tracing::debug!(name, error, "a node does not answer");
                Self { name, state: "silent".to_owned(), said: None }
            }
        }
    }
}

impl NodeAnswer {
    fn of(status: &Status, metrics: &str) -> Self {
        let actors = || status.actors.iter();
        let metrics = Samples::parse(metrics);
        let total = |name, labels: &[(&str, &str)]| metrics.sum(name, labels);
        let disk = || actors().filter_map(|actor| actor.disk.as_ref());
        Self {
            incarnation: status.incarnation,
            counters: Counters {
                // Not those of the status, where an actor that is late is missing for a moment.
                tokens_asked: total("larder_tokens_asked_total", &[]),
                tokens_hit: total("larder_tokens_hit_total", &[]),
                requests: total("larder_requests_total", &[]),
                in_bytes: total("larder_moved_bytes_total", &[("movement", "committed")]),
                out_bytes: total("larder_moved_bytes_total", &[("movement", "leased")]),
                evictions: total("larder_evicted_chunks_total", &[]),
                peer_in_bytes: total("larder_peer_received_bytes_total", &[]),
                peer_out_bytes: total("larder_peer_sent_bytes_total", &[]),
                disk_in_bytes: total("larder_disk_written_bytes_total", &[]),
                disk_out_bytes: total("larder_disk_read_bytes_total", &[]),
                object_in_bytes: total("larder_object_written_bytes_total", &[]),
                object_out_bytes: total("larder_object_read_bytes_total", &[]),
            },
            gauges: Gauges {
                host_chunks: actors().map(|actor| actor.chunks).sum(),
                host_bytes: actors().map(|actor| actor.used_bytes).sum(),
                arena_bytes: actors().map(|actor| actor.arena_bytes).sum(),
                disk_chunks: disk().next().is_some().then(|| disk().map(|disk| disk.chunks).sum()),
                disk_waiting_bytes: disk().map(|disk| disk.waiting_bytes).sum(),
                has_object: status.object.is_some(),
                sessions: actors().map(|actor| actor.sessions).sum(),
                leases: actors().map(|actor| actor.leases).sum(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_actors_of_a_node_are_added_and_unknown_fields_pass() {
        let actor = |chunks: u64, disk| {
            json!({
                "device": 0, "chunks": chunks, "used_bytes": 10, "arena_bytes": 100, "sessions": 1, "leases": 2,
                "disk": disk, "later": true
            })
        };
        let disk = json!({"chunks": 7, "waiting_bytes": 5, "shed": 0});
        let status = json!({
            "name": "a", "ready": true, "uptime_seconds": 4.5, "object": {"url": "s3://b/p"}, "actors": [actor(1, json!(null)), actor(2, disk)]
        });
        let metrics = "larder_moved_bytes_total{movement=\"leased\"} 40\nlarder_disk_read_bytes_total{device=\"1\"} 9\n\
                       larder_object_read_bytes_total 8\nlarder_tokens_hit_total{tier=\"host\"} 1000\n\
                       larder_evicted_chunks_total{device=\"0\"} 2\nlarder_evicted_chunks_total{device=\"1\"} 4\n";
        let said = NodeAnswer::of(&serde_json::from_value(status).unwrap(), metrics);
        assert_eq!((said.gauges.host_chunks, said.gauges.disk_chunks), (3, Some(7)));
        assert_eq!((said.counters.tokens_hit, said.counters.out_bytes), (1000.0, 40.0));
        assert_eq!((said.counters.disk_out_bytes, said.counters.evictions), (9.0, 6.0));
        assert_eq!((said.counters.object_out_bytes, said.gauges.has_object), (8.0, true));
    }
}
