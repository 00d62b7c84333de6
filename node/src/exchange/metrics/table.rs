//! The metrics of blocks between nodes.

use larder_net::metrics::{Label, Metric, Section};

/// Blocks between nodes.
pub(crate) const PEERS: Section = Section {
    title: "Peers",
    only: SHARING,
    metrics: &[
        Metric::counter(
            "larder_peer_received_bytes_total",
            "bytes",
            &[PEER],
            "Bytes of blocks that came from another node",
        ),
        Metric::counter(
            "larder_peer_sent_bytes_total",
            "bytes",
            &[PEER],
            "Bytes of blocks sent to another node",
        ),
        Metric::gauge(
            "larder_peer_in_flight_bytes",
            "bytes",
            &[PEER],
            "Bytes of blocks that were asked of another node and have not come, in credits",
        ),
        Metric::counter(
            "larder_peer_credit_wait_seconds_total",
            "seconds",
            &[PEER, Label::one_of("class", &["decode", "prefetch"])],
            "How long fetches waited, summed, for a stream or credits because as much was under way from that node as may be",
        ),
        Metric::gauge(
            "larder_peer_rtt_seconds",
            "seconds",
            &[PEER],
            "Round trip of packets, as QUIC smooths it; of several connections the slowest",
        ),
        Metric::counter("larder_peer_sent_packets_total", "packets", &[PEER], "Packets sent to another node"),
        Metric::counter(
            "larder_peer_lost_packets_total",
            "packets",
            &[PEER],
            "Packets of those that QUIC gave up for lost, and repeated",
        ),
        Metric::histogram(
            "larder_peer_round_trip_seconds",
            &[5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 1.0],
            "seconds",
            &[],
            "Time of a small request to another node, from asking to answer",
        ),
        Metric::gauge(
            "larder_peer_fetches_in_flight",
            "chunks",
            &[],
            "Chunks that are being fetched from other nodes",
        ),
        Metric::counter(
            "larder_peer_fetches_total",
            "chunks",
            &[Label::one_of("outcome", FETCHED)],
            "Chunks asked of other nodes, by what came of it; checksum: wrong bytes, which nobody was given",
        ),
        Metric::gauge("larder_peer_silent", "nodes", &[], "Nodes that do not answer this one"),
        Metric::counter(
            "larder_peer_missed_deadlines_total",
            "requests",
            &[Label::one_of("how", &["slow", "silent"])],
            "Requests to other nodes whose answer did not come in time; slow: the node was heard meanwhile",
        ),
        Metric::counter(
            "larder_peer_stalled_sends_total",
            "fetches",
            &[],
            "Fetches of other nodes that were given up because they did not read what was sent",
        ),
        Metric::gauge(
            "larder_peer_connections",
            "connections",
            &[],
            "Connections that others made to this node",
        ),
        Metric::counter(
            "larder_peer_requests_total",
            "requests",
            &[Label::one_of("request", &["find", "announce", "repair", "fetch", "moved", "damaged", "ping"])],
            "Requests that other processes made, by kind",
        ),
        Metric::counter(
            "larder_peer_rejected_total",
            "refusals",
            &[Label::one_of("reason", REJECTED)],
            "Connections and requests turned away, by reason",
        ),
    ],
};

/// The nodes that have metrics of peers.
pub(crate) const SHARING: &str = "nodes that share chunks in a cluster";

const PEER: Label =
    Label::each("peer", "each other node of the table; `other` for one that is not in it (yet)");

/// The results for a chunk that is asked of another node.
const FETCHED: &[&str] =
    &["here", "not_held", "busy", "unreachable", "deadline", "broken", "malformed", "checksum", "full"];

/// Why somebody is turned away.
const REJECTED: &[&str] = &[
    "handshakes",
    "connections",
    "certificate",
    "identity",
    "handshake",
    "malformed",
    "too_long",
    "not_allowed",
];
