//! The measures of a transfer of blocks between two ends: its speed, and its CPU time.

use std::time::Duration;

use bytes::Bytes;
use larder_net::quic::TransportSettings;

use super::measure::{Pass, timed};
use super::peer::{NodeKind, PeerBench};
use super::placement::CpuPair;
use super::quic::BareQuinn;
use super::tcp::RawTcp;
use super::yardsticks::WORKING_SET_BYTES;
use super::{Measurement, measure};
use crate::clock::process_seconds;

/// Blocks that one end asks the other for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes of each.
    pub block_bytes: usize,
    /// Number of blocks that are asked for before the first has come.
    pub in_flight: usize,
}

/// Counts the CPU time of passes with both ends in this process.
#[derive(Debug, Default)]
pub(super) struct CpuMeter {
    bytes: usize,
    seconds: f64,
}

impl Transfer {
    /// Blocks of this size, as many asked for at a time as one connection carries best.
    pub fn of(block_bytes: usize) -> Self {
        Self { block_bytes, in_flight: IN_FLIGHT }
    }

    /// Blocks of one pass: enough that no cache holds them, and that all places in flight are taken.
    pub fn blocks(&self) -> usize {
        (WORKING_SET_BYTES / self.block_bytes).max(self.in_flight)
    }

    /// Bytes of one pass.
    pub fn bytes(&self) -> usize {
        self.blocks() * self.block_bytes
    }

    /// The blocks to send: too many for any CPU cache.
    pub(super) fn source(&self) -> Source {
        let blocks = (WORKING_SET_BYTES / self.block_bytes).max(1);
        let bytes: Vec<u8> = (0..blocks * self.block_bytes).map(byte).collect();
        Source { bytes: bytes.into(), block_bytes: self.block_bytes, next: 0 }
    }

    /// The targets of the blocks in flight: memory that was touched before.
    pub(super) fn targets(&self) -> Vec<Vec<u8>> {
        vec![vec![1; self.block_bytes]; self.in_flight]
    }
}

/// The blocks that an end sends, in a ring.
#[derive(Debug)]
pub(super) struct Source {
    bytes: Bytes,
    block_bytes: usize,
    next: usize,
}

impl Source {
    /// The next block.
    pub(super) fn block(&mut self) -> Bytes {
        let at = self.next;
        self.next = (at + self.block_bytes) % self.bytes.len();
        self.bytes.slice(at..at + self.block_bytes)
    }
}

impl CpuMeter {
    /// Times all of `work`; it moves the given number of bytes.
    pub(super) fn timed(
        &mut self,
        bytes: usize,
        work: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Duration> {
        let start = process_seconds();
        let took = timed(work)?;
        self.seconds += process_seconds() - start;
        self.bytes += bytes;
        Ok(took)
    }

    /// CPU seconds for 10^9 bytes so far.
    pub(super) fn per_gigabyte(&self) -> f64 {
        self.seconds / self.bytes as f64 * 1e9
    }
}

/// QUIC beside raw TCP, in turns: throughput, then CPU time.
///
/// # Errors
/// The system gives no socket or no thread.
pub fn quinn_beside_tcp(
    name: &str,
    transfer: Transfer,
    settings: &TransportSettings,
    rounds: usize,
    placement: &CpuPair,
) -> anyhow::Result<[Measurement; 2]> {
    let mut quinn = BareQuinn::start(transfer, settings, placement)?;
    let mut tcp = RawTcp::start(transfer, placement)?;
    let [subject, yardstick] = measure::medians(rounds, [&mut || quinn.pass(), &mut || tcp.pass()])?;
    let bytes = transfer.bytes() as u64;
    let cpu = [quinn.cpu_s_per_gigabyte(), tcp.cpu_s_per_gigabyte()];
    Ok([
        Measurement::throughput(name, "raw TCP", bytes, subject, yardstick),
        Measurement::cpu(&format!("{name}_cpu"), "raw TCP", cpu),
    ])
}

/// Gets through two nodes beside raw TCP and beside bare QUIC, in turns: throughput, then CPU time, against
/// either. A get is a lease of a prompt of 4 MiB, or of one block where that is more.
///
/// # Errors
/// The system gives no socket or no thread, or the cluster does not start.
pub fn peer_get_beside_both(
    name: &str,
    transfer: Transfer,
    rounds: usize,
    placement: &CpuPair,
) -> anyhow::Result<[Measurement; 4]> {
    placement.be_anywhere()?;
    let mut peer = PeerBench::start(transfer, (PROMPT_BYTES / transfer.block_bytes).max(1))?;
    peer.put_apart(placement)?;
    placement.be_engine()?;
    let mut quinn = BareQuinn::start(transfer, &TransportSettings::default(), placement)?;
    let mut tcp = RawTcp::start(transfer, placement)?;
    let passes: [Pass<'_>; 3] = [&mut || peer.pass(), &mut || tcp.pass(), &mut || quinn.pass()];
    let [subject, raw, bare] = measure::medians(rounds, passes)?;
    let bytes = transfer.bytes() as u64;
    let cpu = [peer.cpu_s_per_gigabyte(), tcp.cpu_s_per_gigabyte()];
    let bare_cpu = [cpu[0], quinn.cpu_s_per_gigabyte()];
    peer.stop()?;
    Ok([
        Measurement::throughput(name, "raw TCP", bytes, subject, raw),
        Measurement::throughput(&format!("{name}_of_quic"), "bare QUIC", bytes, subject, bare),
        Measurement::cpu(&format!("{name}_cpu"), "raw TCP", cpu),
        Measurement::cpu(&format!("{name}_of_quic_cpu"), "bare QUIC", bare_cpu),
    ])
}

/// Measures gets through two nodes of one kind, in turns with the same gets through two nodes of another kind: throughput, then
/// CPU time. `beside` names the other kind. With a `placement` each node has one CPU, so that more threads bring no more CPU time.
/// Without a `placement` the nodes run on all CPUs.
///
/// # Errors
/// A cluster does not start.
pub fn kind_beside_another(
    (name, beside): (&str, &str),
    (transfer, blocks_per_get): (Transfer, usize),
    rounds: usize,
    [kind, other]: [NodeKind; 2],
    placement: Option<&CpuPair>,
) -> anyhow::Result<[Measurement; 2]> {
    let mut one = PeerBench::with(transfer, blocks_per_get, kind)?;
    let mut other = PeerBench::with(transfer, blocks_per_get, other)?;
    if let Some(placement) = placement {
        one.put_apart(placement)?;
        other.put_apart(placement)?;
        placement.be_engine()?;
    }
    let passes: [Pass<'_>; 2] = [&mut || one.pass(), &mut || other.pass()];
    let [subject, yardstick] = measure::medians(rounds, passes)?;
    let cpu = [one.cpu_s_per_gigabyte(), other.cpu_s_per_gigabyte()];
    one.stop()?;
    other.stop()?;
    Ok([
        Measurement::throughput(name, beside, transfer.bytes() as u64, subject, yardstick),
        Measurement::cpu(&format!("{name}_cpu"), beside, cpu),
    ])
}

fn byte(at: usize) -> u8 {
    (at / 4_099) as u8
}

/// More bulk streams at a time than this on a connection bring nothing, and make the slowest much slower.
const IN_FLIGHT: usize = 4;

/// Bytes of a prompt that is got at a time, if one block is not larger.
const PROMPT_BYTES: usize = 4 << 20;

/// Bytes of a request: about the bytes of a real request.
pub(super) const REQUEST_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_fills_its_places_in_flight_and_the_source_comes_round() {
        let large = Transfer { block_bytes: 48 << 20, in_flight: 3 };
        assert_eq!((large.blocks(), large.bytes()), (3, 144 << 20));
        let mut source = Transfer::of(16 << 20).source();
        let blocks: Vec<_> = (0..5).map(|_| source.block()).collect();
        assert!(blocks[0] == blocks[4] && blocks[0] != blocks[1]);
    }

    #[test]
    fn both_yardsticks_move_blocks_and_say_what_it_took() {
        let placement = CpuPair::choose().unwrap();
        let transfer = Transfer::of(1 << 20);
        let settings = TransportSettings::default();
        for found in quinn_beside_tcp("blocks", transfer, &settings, 1, &placement).unwrap() {
            assert!(found.value > 0.0 && found.yardstick_value > 0.0, "{found:?}");
        }
    }
}
