//! The time of one get from another node, stage by stage.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::Table;
use larder_net::quic::TransportSettings;
use larder_node::metrics::table::NODE;
use serde::{Deserialize, Serialize};

use super::peer::PeerBench;
use super::placement::CpuPair;
use super::quic::BareQuinn;
use super::tcp::RawTcp;
use super::transfer::Transfer;
use crate::output;
use crate::samples::Samples;

/// The mean time of a stage of a get, in microseconds. Concurrent gets share the stages, so each stage is longer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageTime {
    /// Bytes of the block.
    pub block_bytes: usize,
    /// Gets at a time.
    pub in_flight: usize,
    /// The stage.
    pub stage: String,
    /// The stage's mean time.
    pub us: f64,
    /// The stage's share of the whole get's time.
    pub share: f64,
}

/// Measures gets of one block each from another node, some at a time. Returns the mean times of the asker's stages and the
/// holder's, and the times of a block over bare QUIC and over raw TCP.
///
/// # Errors
/// The cluster does not start, a block does not come, or a node does not tell its metrics.
pub fn timeline(transfer: Transfer, rounds: usize, placement: &CpuPair) -> anyhow::Result<Vec<StageTime>> {
    placement.be_anywhere()?;
    let mut peer = PeerBench::start(transfer, 1)?;
    peer.put_apart(placement)?;
    placement.be_engine()?;
    let mut quinn = BareQuinn::start(transfer, &TransportSettings::default(), placement)?;
    let mut tcp = RawTcp::start(transfer, placement)?;
    peer.pass()?;
    quinn.pass()?;
    tcp.pass()?;
    peer.forget();
    let (mut bare, mut raw) = (Duration::ZERO, Duration::ZERO);
    let before = Told::of(&peer)?;
    for _ in 0..rounds {
        peer.pass()?;
        bare += quinn.pass()?;
        raw += tcp.pass()?;
    }
    let told = Told::of(&peer)?.since(&before);
    let gets = peer.latencies();
    peer.stop()?;
    placement.be_anywhere()?;
    let whole = gets.iter().sum::<Duration>().as_secs_f64() / gets.len().max(1) as f64;
    let a_block =
        |all: Duration| all.as_secs_f64() * transfer.in_flight as f64 / (rounds * transfer.blocks()) as f64;
    let stages = told.stages(whole)?.into_iter().chain([
        ("beside: a block over bare QUIC", a_block(bare)),
        ("beside: a block over raw TCP", a_block(raw)),
    ]);
    let Transfer { block_bytes, in_flight } = transfer;
    let row = |(stage, seconds): (&str, f64)| StageTime {
        block_bytes,
        in_flight,
        stage: stage.to_owned(),
        us: seconds * 1e6,
        share: seconds / whole,
    };
    Ok(stages.map(row).collect())
}

/// The sums and counts of the histograms that matter, by stage.
#[derive(Debug, Default)]
struct Told(BTreeMap<String, (f64, f64)>);

impl Told {
    /// Adds up both nodes' metrics: each stage happens at one side only.
    fn of(peer: &PeerBench) -> anyhow::Result<Self> {
        let mut told = Self::default();
        for text in peer.metrics()? {
            told.add(&text);
        }
        Ok(told)
    }

    fn add(&mut self, text: &str) {
        let samples = Samples::parse(text);
        let metrics = || NODE.iter().flat_map(|section| section.metrics);
        for (metric, label, only) in [(STAGES, "stage", None), (REQUESTS, "request", Some("lease"))] {
            for sample in metrics().filter(|told| told.name == metric).flat_map(|metric| samples.of(metric)) {
                let Some(name) = sample.labels.get(label) else { continue };
                if only.is_none_or(|only| only == name) {
                    let count = sample.count.unwrap_or(0) as f64;
                    let (sum, counted) = self.0.entry(name.clone()).or_default();
                    (*sum, *counted) = (*sum + sample.value * count, *counted + count);
                }
            }
        }
    }

    fn since(mut self, before: &Self) -> Self {
        for (name, (sum, count)) in &mut self.0 {
            let was = before.0.get(name).copied().unwrap_or_default();
            (*sum, *count) = (*sum - was.0, *count - was.1);
        }
        self
    }

    fn mean(&self, stage: &str) -> anyhow::Result<f64> {
        let told = self.0.get(stage).filter(|(_, count)| *count > 0.0);
        told.map(|(sum, count)| sum / count)
            .with_context(|| format!("the nodes have no metrics of the stage `{stage}`"))
    }

    /// The stages of a get that took `whole` seconds, in their order.
    fn stages(&self, whole: f64) -> anyhow::Result<Vec<(&'static str, f64)>> {
        let [lease, queue, turn, answer, blocks] = [
            self.mean("lease")?,
            self.mean("queue")?,
            self.mean("turn")?,
            self.mean("answer")?,
            self.mean("blocks")?,
        ];
        let [grant, send, acknowledged] =
            [self.mean("grant")?, self.mean("send")?, self.mean("acknowledged")?];
        Ok(vec![
            ("get, as the engine sees it", whole),
            ("engine: to its node and back", whole - lease),
            (
                "asker: decisions, and handing over to and from the peer thread",
                lease - queue - turn - answer - blocks,
            ),
            ("asker: order waits for the peer thread", queue),
            ("asker: order waits for its turn", turn),
            ("wire: request there, answer back", answer - grant),
            ("holder: its actor leases the block", grant),
            ("asker: the block comes, is copied and summed", blocks),
            ("beside: the holder writes the block", send),
            ("beside: the holder waits for the acknowledgement", acknowledged),
        ])
    }
}

/// The stages as a table.
pub fn table(stages: &[StageTime]) -> Table {
    let mut table = output::table(&["block", "at a time", "stage", "us", "of the get"]);
    for StageTime { block_bytes, in_flight, stage, us, share } in stages {
        let (block, share) = (output::bytes(*block_bytes as u64), output::percent(*share));
        table.add_row([&block, &in_flight.to_string(), stage, &format!("{us:.1}"), &share]);
    }
    for column in [0, 1, 3, 4] {
        output::align_right(&mut table, column);
    }
    table
}

/// The transfers that `larder bench --timeline` measures.
pub fn transfers() -> Vec<Transfer> {
    [(256 << 10, 1), (256 << 10, 4), (4 << 20, 1)]
        .map(|(block_bytes, in_flight)| Transfer { block_bytes, in_flight })
        .to_vec()
}

/// The histogram of stages, by `stage`.
const STAGES: &str = "larder_peer_stage_seconds";

/// The histogram of engines' requests, by `request`.
const REQUESTS: &str = "larder_request_seconds";

#[cfg(test)]
mod tests {
    use super::*;

    /// The metrics of a node that saw each stage once, for the given microseconds, and answered `leases` leases of 100 us.
    fn metrics(stages: &[(&str, u64)], leases: u64) -> String {
        let stage = |&(name, us): &(&str, u64)| {
            format!(
                "{STAGES}_sum{{stage=\"{name}\"}} {}\n{STAGES}_count{{stage=\"{name}\"}} 1\n",
                us as f64 / 1e6
            )
        };
        let sum = leases as f64 * 1e-4;
        stages.iter().map(stage).collect::<String>()
            + &format!(
                "{REQUESTS}_sum{{request=\"lease\"}} {sum}\n{REQUESTS}_count{{request=\"lease\"}} {leases}\n"
            )
            + &format!("{REQUESTS}_sum{{request=\"lookup\"}} 9\n{REQUESTS}_count{{request=\"lookup\"}} 1\n")
    }

    #[test]
    fn the_stages_of_a_get_add_up_to_the_whole_whatever_was_counted_before() {
        let before = metrics(&[("queue", 900)], 7);
        let mut was = Told::default();
        was.add(&before);
        let asker = [("queue", 910), ("turn", 2), ("answer", 30), ("blocks", 40)];
        let mut told = Told::default();
        told.add(&metrics(&asker, 8).replace("count{stage=\"queue\"} 1", "count{stage=\"queue\"} 2"));
        told.add(&metrics(&[("grant", 12), ("send", 5), ("acknowledged", 6)], 0));
        let stages = told.since(&was).stages(120e-6).unwrap();
        let parts: f64 =
            stages[1..].iter().filter(|(name, _)| !name.starts_with("beside")).map(|(_, us)| us).sum();
        assert!((parts - 120e-6).abs() < 1e-9, "{stages:?}");
        let us = |part: &str| {
            stages
                .iter()
                .find(|(name, _)| name.contains(part))
                .map(|(_, seconds)| (seconds * 1e6).round() as u64)
        };
        assert_eq!(us("waits for the peer thread"), Some(10));
        assert_eq!(us("wire"), Some(18));
        assert_eq!(us("actor leases"), Some(12));
        assert_eq!(us("decisions"), Some(100 - 10 - 2 - 30 - 40));
        assert_eq!(us("to its node"), Some(20));
    }

    #[test]
    fn a_node_that_tells_nothing_of_a_stage_is_an_error() {
        let mut told = Told::default();
        told.add(&metrics(&[("queue", 1)], 1));
        assert!(told.stages(1e-3).unwrap_err().to_string().contains("`turn`"));
    }
}
