//! Rows with the columns that comparisons of stores use: one row for each block size and number of gets at a time.

use std::fs::read_to_string;
use std::time::Duration;

use super::peer::PeerBench;
use super::placement::CpuPair;
use super::tcp::RawTcp;
use super::transfer::Transfer;
use super::yardsticks::Memcpy;
use crate::bench::measure::timed;
use crate::clock::now;

/// The names of the columns, in their order.
pub const COLUMNS: &str = "system,op,value_bytes,concurrency,gbps,p50_us,p99_us,ops_per_s,cpu_s_per_gb,reps,gbps_min,\
                           gbps_max,foreign_cpu,yard_memcpy_gbps,yard_tcp_gbps,note";

/// Gets of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gets {
    /// Bytes of a block.
    block_bytes: usize,
    /// Blocks that are asked for before the first has come.
    blocks: usize,
    /// Whether one lease asks for all these blocks, or one lease for each.
    at_once: bool,
}

/// Measures gets of blocks from another node, over QUIC with mutual TLS; returns a row.
///
/// # Errors
/// The cluster does not start, or a block does not come.
pub fn peer_get(gets: Gets, repetitions: usize, placement: &CpuPair) -> anyhow::Result<String> {
    let Gets { block_bytes, blocks, at_once } = gets;
    let transfer = Transfer { block_bytes, in_flight: if at_once { 1 } else { blocks } };
    placement.be_anywhere()?;
    let mut peer = PeerBench::start(transfer, if at_once { blocks } else { 1 })?;
    peer.put_apart(placement)?;
    placement.be_engine()?;
    let mut tcp = RawTcp::start(transfer, placement)?;
    let mut memcpy = Memcpy::new(transfer.block_bytes);
    peer.pass()?;
    peer.forget();
    let (mut rates, mut raw, mut copies, mut foreign) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..repetitions {
        let copied = timed(|| {
            memcpy.pass();
            Ok(())
        });
        copies.push(rate(transfer.block_bytes, copied?));
        raw.push(rate(transfer.bytes(), tcp.pass()?));
        let others = Others::start(&peer)?;
        rates.push(rate(transfer.bytes(), peer.pass()?));
        foreign.push(others.cpus(&peer)?);
    }
    let (latencies, cpu) = (peer.latencies(), peer.cpu_s_per_gigabyte());
    peer.stop()?;
    placement.be_anywhere()?;
    let quantile = |part: f64| {
        let at = (part * latencies.len() as f64) as usize;
        latencies.get(at.min(latencies.len() - 1)).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    };
    let [middle, raw, copies, foreign] = [&rates, &raw, &copies, &foreign].map(|values| median(values));
    let (least, most) =
        rates.iter().fold((f64::MAX, 0.0_f64), |(least, most), &rate| (least.min(rate), most.max(rate)));
    Ok(format!(
        "larder,{},{block_bytes},{blocks},{middle:.3},{:.1},{:.1},{:.1},{cpu:.3},{repetitions},{least:.3},{most:.3},{foreign:.2},{copies:.2},{raw:.2},",
        if at_once { "peer_get_batch" } else { "peer_get" },
        quantile(0.5),
        quantile(0.99),
        middle * 1e9 / block_bytes as f64,
    ))
}

/// Measures the CPU time of other processes during a pass.
struct Others {
    busy: f64,
    own: f64,
    start: std::time::Instant,
}

impl Others {
    fn start(peer: &PeerBench) -> anyhow::Result<Self> {
        Ok(Self { busy: busy_seconds()?, own: peer.cpu_seconds()?, start: now() })
    }

    /// The CPUs that other processes have used since the start.
    fn cpus(&self, peer: &PeerBench) -> anyhow::Result<f64> {
        let (busy, own) = (busy_seconds()? - self.busy, peer.cpu_seconds()? - self.own);
        Ok(((busy - own) / (now() - self.start).as_secs_f64()).max(0.0))
    }
}

/// Time that all CPUs were neither idle nor waiting for a device.
fn busy_seconds() -> anyhow::Result<f64> {
    let text = read_to_string("/proc/stat")?;
    let ticks: Vec<u64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .take(8)
        .flat_map(str::parse)
        .collect();
    let [user, nice, system, _idle, _waiting, interrupts @ ..] = &ticks[..] else {
        anyhow::bail!("the system does not say how busy it is");
    };
    let busy = user + nice + system + interrupts.iter().sum::<u64>();
    Ok(busy as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The gets of all rows, with at most as many bytes in flight as a node's staging takes. Large blocks have no batches, since a
/// batch of them is no faster than its blocks.
pub fn gets() -> Vec<Gets> {
    let sizes = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20];
    let kinds = [(1, false), (4, false), (16, false), (4, true), (16, true)];
    let of_size = |block_bytes| kinds.map(|(blocks, at_once)| Gets { block_bytes, blocks, at_once });
    let fits = |gets: &Gets| {
        let most = if gets.at_once { MOST_BATCH_BYTES } else { MOST_BYTES_IN_FLIGHT };
        gets.block_bytes * gets.blocks <= most
    };
    sizes.into_iter().flat_map(of_size).filter(fits).collect()
}

const MOST_BYTES_IN_FLIGHT: usize = 128 << 20;

const MOST_BATCH_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_stay_within_what_a_node_passes_through() {
        let gets = gets();
        assert_eq!(gets.iter().filter(|gets| !gets.at_once).count(), 13);
        assert_eq!(gets.iter().filter(|gets| gets.at_once).count(), 5);
        assert!(gets.iter().all(|gets| gets.block_bytes * gets.blocks <= 128 << 20));
    }

    #[test]
    fn the_median_is_in_the_middle_and_the_machine_has_been_busy() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!(busy_seconds().unwrap() > 0.0);
    }
}
