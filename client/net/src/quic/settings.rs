//! QUIC's settings and their reasons: every knob is here.
//!
//! Figures are of one core each side, 4 MiB blocks over loopback, quinn 0.11, on small shared machines.
//!
//! - **One endpoint on a current-thread runtime of its own**: 1.9 GB/s, against 1.25 on a multi-threaded runtime. More cores
//!   are used by more endpoints ([`PortShare`](super::PortShare)), not by threads inside one.
//! - **AES-128-GCM alone**: 1.8 GB/s, against 1.2 with AES-256 and 0.9 with ChaCha20; no encryption at all brings 2.0.
//! - **AES by ring**: aws-lc with AVX-512 seals and opens large datagrams 1.9 times as fast (19 against 10 GB/s), but that brings
//!   9 % in all: bare QUIC 2.76 against 2.53 GB/s at 0.67 against 0.74 CPU seconds a GB (three pairs). A second library of
//!   cryptography in C and its build are worth more than that.
//! - **Datagrams as large as the path takes**: 0.7 GB/s at 1,452 bytes, 1.8 at 8,900, no more beyond.

use std::sync::Arc;
use std::time::Duration;

use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

/// The settings that may differ between networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportSettings {
    /// The largest datagram that path discovery tries, in bytes of UDP payload. Sizes that the path does not carry are never
    /// used: a connection starts at 1,200 bytes and probes upwards.
    pub max_datagram_bytes: u16,
    /// Bytes that may be under way in a connection, in each direction. On loopback 4-8 MiB are enough, and much more lets
    /// the congestion window grow without bound; on a real link about twice bandwidth times delay.
    pub window_bytes: u32,
    /// Bytes of the socket's buffers, both ways. The system's defaults lose thousands of packets a second.
    pub socket_buffer_bytes: usize,
    /// The time after which a silent connection counts as dead.
    pub idle_timeout: Duration,
}

impl Default for TransportSettings {
    fn default() -> Self {
        Self {
            max_datagram_bytes: 8_900,
            window_bytes: 8 << 20,
            socket_buffer_bytes: 4 << 20,
            idle_timeout: Duration::from_secs(10),
        }
    }
}

impl TransportSettings {
    /// For connections that carry a few questions and end. They use only small datagrams: a probe for large ones would fill the
    /// first congestion window, and the message that closes the connection would wait for the probe's acknowledgement, which is
    /// not read after the close. The other side would then keep the connection until its idle timeout.
    pub fn brief() -> Self {
        Self { max_datagram_bytes: MIN_DATAGRAM_BYTES, ..Self::default() }
    }

    /// The number of datagrams that may be handed to the kernel in one call.
    ///
    /// The kernel refuses a batch of more than 65,507 bytes, the limit of a UDP datagram; the sender would then use small
    /// datagrams on this path (0.04-0.3 GB/s).
    pub fn max_segments(&self) -> usize {
        (MAX_BATCH_BYTES / usize::from(self.max_datagram_bytes.max(1))).max(1)
    }

    pub(super) fn transport(&self) -> Arc<TransportConfig> {
        Arc::new(self.config())
    }

    /// For connections whose other side has not proved its identity. The limit of a stream cannot be raised later, so the limit
    /// of the connection bounds them.
    pub(super) fn transport_of_strangers(&self) -> Arc<TransportConfig> {
        let mut transport = self.config();
        transport
            .receive_window(VarInt::from_u32(STRANGER_WINDOW_BYTES))
            .max_concurrent_bidi_streams(VarInt::from_u32(1));
        Arc::new(transport)
    }

    fn config(&self) -> TransportConfig {
        let mut transport = TransportConfig::default();
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.max_datagram_bytes.max(MIN_DATAGRAM_BYTES));
        let mut acknowledgements = AckFrequencyConfig::default();
        acknowledgements.ack_eliciting_threshold(VarInt::from_u32(ACK_THRESHOLD));
        let idle = u32::try_from(self.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        transport
            .mtu_discovery_config(Some(discovery))
            .ack_frequency_config(Some(acknowledgements))
            .stream_receive_window(VarInt::from_u32(self.window_bytes))
            .receive_window(VarInt::from_u32(self.window_bytes))
            .send_window(self.window_bytes.into())
            .max_concurrent_bidi_streams(VarInt::from_u32(MAX_STREAMS))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(idle))))
            .keep_alive_interval(Some(self.idle_timeout / KEEP_ALIVES));
        transport
    }
}

/// The most streams that the other side may have open; further streams wait there.
pub const MAX_STREAMS: u32 = 256;

/// Bytes of all requests of a connection, until the other side's identity is known.
const STRANGER_WINDOW_BYTES: u32 = 64 << 10;

/// The largest payload of a UDP datagram over IPv4, and so of a batch.
const MAX_BATCH_BYTES: usize = 65_507;

/// Every path of QUIC carries datagrams of this size (RFC 9000, section 14).
const MIN_DATAGRAM_BYTES: u16 = 1_200;

/// Packets that one acknowledgement may wait for: values from 10 to 50 gave the best 99th percentile.
const ACK_THRESHOLD: u32 = 10;

/// Keep-alive packets within an idle timeout.
const KEEP_ALIVES: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_never_larger_than_a_datagram_may_be() {
        for max_datagram_bytes in [1_200, 1_452, 4_000, 6_550, 6_551, 8_900, 16_000, 65_000] {
            let settings = TransportSettings { max_datagram_bytes, ..TransportSettings::default() };
            let segments = settings.max_segments();
            assert!(segments >= 1 && segments * usize::from(max_datagram_bytes) <= MAX_BATCH_BYTES);
            assert!((segments + 1) * usize::from(max_datagram_bytes) > MAX_BATCH_BYTES, "and no smaller");
        }
    }
}
