//! `GET /links` and `GET /usage`: counters from the node's metrics, for web pages that cannot read metrics.

use std::collections::BTreeMap;

use prometheus::proto::{Metric, MetricFamily};
use serde::{Deserialize, Serialize};

use super::HttpState;

/// A link to another node, in the list that `GET /links` returns. Counters begin at 0 with each life of the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkStatus {
    /// The other node's name; `other` for all nodes that are not members.
    pub peer: String,
    /// Bytes of blocks sent to the other node.
    pub sent_bytes: u64,
    /// Bytes of blocks received from the other node.
    pub received_bytes: u64,
    /// Round trip of packets, as QUIC smooths it; `None` before the first connection.
    pub rtt_seconds: Option<f64>,
    /// Packets sent to the other node.
    pub sent_packets: u64,
    /// Sent packets that were lost and sent again.
    pub lost_packets: u64,
}

/// A namespace in the list that `GET /usage` returns: the tokens that lookups asked for and found in this life of the node, over
/// all actors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageStatus {
    /// The namespace's tenant.
    pub tenant: String,
    /// The first digits of the namespace's fingerprint.
    pub namespace: String,
    /// Prompt tokens of all lookups.
    pub tokens_asked: u64,
    /// Tokens that were found, by tier; a tier without hits is left out.
    pub hits: Vec<TierHits>,
    /// Seconds of prefill that hits saved. Counts only engines that report how fast they compute.
    pub prefill_seconds_saved: f64,
}

/// Hits in a tier, in [`UsageStatus`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TierHits {
    /// The tier's name, as in metrics.
    pub tier: String,
    /// Prompt tokens that were found in the tier.
    pub tokens: u64,
}

/// The links to other nodes, by name.
pub(super) fn links(state: &HttpState) -> Vec<LinkStatus> {
    links_of(&state.metrics.registry().gather())
}

/// The namespaces of all lookups.
pub(super) fn usage(state: &HttpState) -> Vec<UsageStatus> {
    usage_of(&state.metrics.registry().gather())
}

fn links_of(families: &[MetricFamily]) -> Vec<LinkStatus> {
    let mut links = BTreeMap::<String, LinkStatus>::new();
    for family in families {
        for metric in family.get_metric() {
            let Some(peer) = label(metric, "peer") else { continue };
            let link = links.entry(peer.to_owned()).or_default();
            match family.name() {
                "larder_peer_sent_bytes_total" => link.sent_bytes = counted(metric),
                "larder_peer_received_bytes_total" => link.received_bytes = counted(metric),
                "larder_peer_rtt_seconds" => link.rtt_seconds = Some(metric.get_gauge().get_value()),
                "larder_peer_sent_packets_total" => link.sent_packets = counted(metric),
                "larder_peer_lost_packets_total" => link.lost_packets = counted(metric),
                _ => {}
            }
        }
    }
    links.into_iter().map(|(peer, link)| LinkStatus { peer, ..link }).collect()
}

fn usage_of(families: &[MetricFamily]) -> Vec<UsageStatus> {
    let mut all = BTreeMap::<(String, String), (UsageStatus, BTreeMap<String, u64>)>::new();
    for family in families {
        for metric in family.get_metric() {
            let Some((tenant, namespace)) = label(metric, "tenant").zip(label(metric, "namespace")) else {
                continue;
            };
            let (usage, hits) = all.entry((tenant.to_owned(), namespace.to_owned())).or_default();
            match family.name() {
                "larder_tokens_asked_total" => usage.tokens_asked += counted(metric),
                "larder_tokens_hit_total" => {
                    let tier = label(metric, "tier").unwrap_or_default();
                    *hits.entry(tier.to_owned()).or_default() += counted(metric);
                }
                "larder_recompute_avoided_seconds_total" => {
                    usage.prefill_seconds_saved += metric.get_counter().get_value();
                }
                _ => {}
            }
        }
    }
    let usage = |((tenant, namespace), (usage, hits)): (_, (UsageStatus, BTreeMap<String, u64>))| {
        let hits = hits.into_iter().filter(|&(_, tokens)| tokens > 0);
        let hits = hits.map(|(tier, tokens)| TierHits { tier, tokens }).collect();
        UsageStatus { tenant, namespace, hits, ..usage }
    };
    all.into_iter().map(usage).collect()
}

fn label<'a>(metric: &'a Metric, name: &str) -> Option<&'a str> {
    metric.get_label().iter().find(|label| label.name() == name).map(|label| label.value())
}

fn counted(metric: &Metric) -> u64 {
    metric.get_counter().get_value() as u64
}

#[cfg(test)]
mod tests {
    use prometheus::{CounterVec, GaugeVec, IntCounterVec, Opts, Registry};

    use super::*;

    #[test]
    fn the_counters_of_a_link_come_together_by_peer() {
        let registry = Registry::new();
        let bytes = IntCounterVec::new(Opts::new("larder_peer_sent_bytes_total", "b"), &["peer"]).unwrap();
        let rtt = GaugeVec::new(Opts::new("larder_peer_rtt_seconds", "s"), &["peer"]).unwrap();
        registry.register(Box::new(bytes.clone())).unwrap();
        registry.register(Box::new(rtt.clone())).unwrap();
        bytes.with_label_values(&["node-1"]).inc_by(7);
        bytes.with_label_values(&["node-2"]).inc_by(9);
        rtt.with_label_values(&["node-2"]).set(0.25);
        let link = |peer: &str, sent_bytes, rtt_seconds| LinkStatus {
            peer: peer.into(),
            sent_bytes,
            rtt_seconds,
            ..LinkStatus::default()
        };
        let expected = [link("node-1", 7, None), link("node-2", 9, Some(0.25))];
        assert_eq!(links_of(&registry.gather()), expected);
    }

    #[test]
    fn hits_are_summed_by_tier_over_requests_that_were_preempted_or_not() {
        let registry = Registry::new();
        let labels = ["tenant", "namespace", "preempted", "tier"];
        let hit = IntCounterVec::new(Opts::new("larder_tokens_hit_total", "t"), &labels).unwrap();
        let saved = Opts::new("larder_recompute_avoided_seconds_total", "s");
        let saved = CounterVec::new(saved, &labels[..2]).unwrap();
        registry.register(Box::new(hit.clone())).unwrap();
        registry.register(Box::new(saved.clone())).unwrap();
        hit.with_label_values(&["a", "ns", "false", "host"]).inc_by(3);
        hit.with_label_values(&["a", "ns", "true", "host"]).inc_by(4);
        hit.with_label_values(&["a", "ns", "true", "disk"]);
        saved.with_label_values(&["a", "ns"]).inc_by(0.5);
        let usage = usage_of(&registry.gather());
        assert_eq!(usage.len(), 1);
        assert_eq!(usage[0].hits, [TierHits { tier: "host".into(), tokens: 7 }]);
        assert!((usage[0].prefill_seconds_saved - 0.5).abs() < 1e-9);
    }
}
