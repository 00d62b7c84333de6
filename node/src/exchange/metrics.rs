//! The counters of the exchange.

mod by_peer;

use std::time::Duration;

use larder_core::Arrival;
use larder_core::exchange::{Closing, Dialler};
use larder_net::metrics::Label;
use larder_net::metrics_table;
use larder_protocol::peer::Class;
use prometheus::IntGauge;
use strum::VariantNames;

pub(super) use by_peer::{OTHER, Watched};

metrics_table! {
    /// The metrics of blocks between nodes.
    pub struct ExchangeMetrics: "Peers", SHARING => {
        received_bytes: IntCounterVec = "larder_peer_received_bytes_total", "bytes", [PEER],
            "Bytes of blocks that came from another node";
        block_thread_bytes: IntCounter = "larder_peer_block_thread_bytes_total", "bytes", [],
            "Bytes of blocks from other nodes that block threads received; the thread between nodes received the others";
        tcp_bytes: IntCounter = "larder_peer_tcp_received_bytes_total", "bytes", [],
            "Bytes of blocks that came from other nodes over TCP; the others came over QUIC";
        sent_bytes: IntCounterVec = "larder_peer_sent_bytes_total", "bytes", [PEER],
            "Bytes of blocks sent to another node";
        in_flight_bytes: IntGaugeVec = "larder_peer_in_flight_bytes", "bytes", [PEER],
            "Bytes of blocks that were requested from another node and have not come, in credits";
        credit_wait_seconds: CounterVec = "larder_peer_credit_wait_seconds_total", "seconds",
            [PEER, Label::one_of("class", &CLASSES)],
            "Time that fetches waited for a stream or credits, summed, because the limit for that node was reached";
        rtt_seconds: GaugeVec = "larder_peer_rtt_seconds", "seconds", [PEER],
            "Smoothed round trip of packets, as QUIC measures it; for several connections, the slowest";
        sent_packets: IntCounterVec = "larder_peer_sent_packets_total", "packets", [PEER],
            "Packets sent to another node";
        lost_packets: IntCounterVec = "larder_peer_lost_packets_total", "packets", [PEER],
            "Sent packets that QUIC declared lost and sent again";
        round_trip_seconds: Histogram = "larder_peer_round_trip_seconds", "seconds", [],
            "Time of a small request to another node, until its answer"
            in [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 1.0];
        stage_seconds: HistogramVec = "larder_peer_stage_seconds", "seconds", [Label::one_of("stage", Stage::VARIANTS)],
            "Time of blocks between nodes, by stage: at the asker the queue before the thread between nodes, the turn (credits), the answer that says which blocks come, the blocks themselves; at the holder the grant by its actor, the send into the connection, the acknowledgement of the last byte"
            in [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5];
        fetches_in_flight: IntGauge = "larder_peer_fetches_in_flight", "chunks", [],
            "Chunks that are being fetched from other nodes";
        fetched: IntCounterVec = "larder_peer_fetches_total", "chunks",
            [Label::one_of("outcome", &["here", "not_held", "busy", "unreachable", "deadline", "broken",
                "malformed", "checksum", "full"])],
            "Chunks requested from other nodes, by outcome; checksum: wrong bytes, which no reader got";
        silent: IntGauge = "larder_peer_silent", "nodes", [], "Nodes that do not answer this node";
        missed: IntCounterVec = "larder_peer_missed_deadlines_total", "requests",
            [Label::one_of("how", &["slow", "silent"])],
            "Requests to other nodes whose answer did not come in time; slow: something else came from the node meanwhile";
        stalled: IntCounter = "larder_peer_stalled_sends_total", "fetches", [],
            "Fetches by other nodes that this node gave up because the other node did not read the sent bytes";
        connections: IntGauge = "larder_peer_connections", "connections", [],
            "Connections that other processes made to this node";
        connected: IntGauge = "larder_peer_connections_open", "connections", [],
            "Connections with other nodes, whichever side made them";
        opened: IntCounterVec = "larder_peer_connections_opened_total", "connections",
            [Label::one_of("by", &["here", "there"])],
            "Connections made with other nodes, by the side that dialled";
        closed: IntCounterVec = "larder_peer_connections_closed_total", "connections",
            [Label::one_of("why", &["idle", "bound", "double", "gone"])],
            "Connections that this node closed; idle: unused for a minute, bound: unused for longest when there were too many, double: another connection with the same node is used, gone: the other node is no member any more";
        requests: IntCounterVec = "larder_peer_requests_total", "requests",
            [Label::one_of("request", &["find", "announce", "repair", "fetch", "moved", "damaged", "ping", "take"])],
            "Requests that other processes made, by kind";
        rejected: IntCounterVec = "larder_peer_rejected_total", "refusals",
            [Label::one_of("reason", &["handshakes", "connections", "certificate", "identity", "version", "handshake",
                "malformed", "too_long", "not_allowed"])],
            "Connections and requests turned away, by reason";
    }
}

/// A part of the time that blocks take from node to node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(super) enum Stage {
    /// The order waits for the thread between nodes.
    Queue,
    /// The request waits for its turn.
    Turn,
    /// The holder is asked, and says which blocks come.
    Answer,
    /// The blocks come, and are copied and summed.
    Blocks,
    /// The holder's actor leases the blocks.
    Grant,
    /// The blocks are written into the connection.
    Send,
    /// The last bytes are on their way, and are acknowledged.
    Acknowledged,
}

impl ExchangeMetrics {
    /// Counts how long a stage took.
    pub(super) fn took(&self, stage: Stage, took: Duration) {
        self.stage_seconds.with_label_values(&[<&str>::from(stage)]).observe(took.as_secs_f64());
    }

    /// Counts a chunk's result.
    pub fn fetched(&self, came: &Arrival) {
        let outcome = match came {
            Arrival::Here { .. } => "here",
            Arrival::NotHeld => "not_held",
            Arrival::Busy { .. } => "busy",
            Arrival::Damaged => "checksum",
            Arrival::Failed(why) => why.into(),
        };
        self.fetched.with_label_values(&[outcome]).inc();
    }

    /// Adds the counters of a node that is a member now.
    pub(super) fn know(&self, peer: &str) {
        self.received_bytes.with_label_values(&[peer]);
        self.sent_bytes.with_label_values(&[peer]);
        self.in_flight_bytes.with_label_values(&[peer]);
        CLASSES.iter().for_each(|class| _ = self.credit_wait_seconds.with_label_values(&[peer, class]));
        self.sent_packets.with_label_values(&[peer]);
        self.lost_packets.with_label_values(&[peer]);
    }

    /// Removes the counters of a node that is no member any more.
    pub(super) fn forget(&self, peer: &str) {
        // An error means that the counter is not there, as wanted.
        let _ = self.received_bytes.remove_label_values(&[peer]);
        let _ = self.sent_bytes.remove_label_values(&[peer]);
        let _ = self.in_flight_bytes.remove_label_values(&[peer]);
        for class in CLASSES {
            let _ = self.credit_wait_seconds.remove_label_values(&[peer, class]);
        }
        let _ = self.rtt_seconds.remove_label_values(&[peer]);
        let _ = self.sent_packets.remove_label_values(&[peer]);
        let _ = self.lost_packets.remove_label_values(&[peer]);
    }

    /// Counts how long a fetch waited until its peer could be asked.
    pub(super) fn waited(&self, peer: &str, class: Class, took: Duration) {
        let waited = &self.credit_wait_seconds;
        waited.with_label_values(&[peer, <&str>::from(class)]).inc_by(took.as_secs_f64());
    }

    /// Counts a deadline that passed without the answer: `slow` if the peer was heard meanwhile, else `silent`.
    pub(super) fn missed(&self, how: &str) {
        self.missed.with_label_values(&[how]).inc();
    }

    /// Counts a connection that was made.
    pub(super) fn opened(&self, dialler: Dialler) {
        self.opened.with_label_values(&[<&str>::from(dialler)]).inc();
    }

    /// Counts a connection that this node closes.
    pub(super) fn closed(&self, why: Closing) {
        self.closed.with_label_values(&[<&str>::from(why)]).inc();
    }

    /// Counts blocks that were given up because their asker did not read them.
    pub(super) fn stalled(&self) {
        self.stalled.inc();
    }

    #[cfg(test)]
    pub(super) fn counted(&self, stage: Stage) -> u64 {
        self.stage_seconds.with_label_values(&[<&str>::from(stage)]).get_sample_count()
    }

    #[cfg(test)]
    pub(super) fn requests(&self, request: &str) -> u64 {
        self.requests.with_label_values(&[request]).get()
    }

    #[cfg(test)]
    pub(super) fn rejections(&self, reason: &str) -> u64 {
        self.rejected.with_label_values(&[reason]).get()
    }

    #[cfg(test)]
    pub(super) fn stalled_sends(&self) -> u64 {
        self.stalled.get()
    }

    /// Counts a request to this node.
    pub fn requested(&self, request: &str) {
        self.requests.with_label_values(&[request]).inc();
    }

    /// Counts a refused connection or request.
    pub fn rejected(&self, reason: &str) {
        self.rejected.with_label_values(&[reason]).inc();
    }
}

/// A part of a gauge's value, as long as this value lives.
#[derive(Debug)]
pub(super) struct Counted {
    gauge: IntGauge,
    count: i64,
}

impl Counted {
    pub(super) fn new(gauge: &IntGauge, count: i64) -> Self {
        gauge.add(count);
        Self { gauge: gauge.clone(), count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.sub(self.count);
    }
}

/// The nodes that have metrics of peers.
pub(crate) const SHARING: &str = "nodes that share chunks in a cluster";

const PEER: Label =
    Label::each("peer", "each other node of the table; `other` for one that is not in it (yet)");

/// The classes of waiters for fetches.
const CLASSES: [&str; 2] = ["decode", "prefetch"];
