//! Counters for each other node.
//!
//! Labels are names of members. A label is removed when its member leaves.

use std::collections::BTreeMap;

use prometheus::IntCounterVec;

use super::ExchangeMetrics;

/// Connections with other nodes, whichever side made them, whose packets are counted.
#[derive(Debug, Default)]
pub(in crate::exchange) struct Watched(BTreeMap<String, PeerConnections>);

#[derive(Debug, Default)]
struct PeerConnections {
    connections: Vec<Connection>,
    /// Packets that came on connections that are closed now.
    came_before: u64,
}

#[derive(Debug)]
struct Connection {
    quic: quinn::Connection,
    /// Packets that were counted already.
    sent_packets: u64,
    lost_packets: u64,
}

impl Watched {
    /// Counts the packets of a connection from now on, until it is closed.
    pub(in crate::exchange) fn add(&mut self, peer: &str, quic: quinn::Connection) {
        let connection = Connection { quic, sent_packets: 0, lost_packets: 0 };
        self.0.entry(peer.to_owned()).or_default().connections.push(connection);
    }

    /// Packets that came from a peer so far. While their number grows, the peer's process is alive.
    pub(in crate::exchange) fn came(&self, peer: &str) -> u64 {
        let Some(PeerConnections { connections, came_before }) = self.0.get(peer) else { return 0 };
        came_before + connections.iter().map(Connection::came).sum::<u64>()
    }

    /// Counts the packets sent and lost since the last time; `is_member` chooses the peers to count.
    pub(in crate::exchange) fn show(&mut self, metrics: &ExchangeMetrics, is_member: impl Fn(&str) -> bool) {
        for (peer, PeerConnections { connections, came_before }) in &mut self.0 {
            let mut slowest: Option<f64> = None;
            for Connection { quic, sent_packets, lost_packets } in connections.iter_mut() {
                let path = quic.stats().path;
                let count = |counters: &IntCounterVec, counted: &mut u64, now: u64| {
                    counters.with_label_values(&[peer]).inc_by(now.saturating_sub(*counted));
                    *counted = now;
                };
                if is_member(peer) {
                    count(&metrics.sent_packets, sent_packets, path.sent_packets);
                    count(&metrics.lost_packets, lost_packets, path.lost_packets);
                    slowest = Some(slowest.unwrap_or_default().max(path.rtt.as_secs_f64()));
                }
            }
            if let Some(rtt) = slowest {
                metrics.rtt_seconds.with_label_values(&[peer]).set(rtt);
            }
            let is_open = |connection: &Connection| connection.quic.close_reason().is_none();
            *came_before +=
                connections.iter().filter(|other| !is_open(other)).map(Connection::came).sum::<u64>();
            connections.retain(is_open);
        }
        self.0.retain(|peer, known| is_member(peer) || !known.connections.is_empty());
    }
}

impl Connection {
    fn came(&self) -> u64 {
        self.quic.stats().udp_rx.datagrams
    }
}

/// Stands for nodes that are not members, or not yet.
pub(in crate::exchange) const OTHER: &str = "other";
