//! The command line of the scale mode.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Figures, Goal, Load, Measured, Trace, goals, pictures, run, table};

/// The clusters and their load.
#[derive(Debug, Args)]
pub struct Options {
    /// Nodes of each cluster.
    #[arg(long, value_delimiter = ',', default_value = "16,128,1024", value_name = "NUMBERS")]
    nodes: Vec<usize>,
    /// The most nodes that play requests and hold chunks; all other nodes are only homes.
    #[arg(long, default_value_t = 1_024, value_name = "COUNT")]
    players: usize,
    /// Chunks for which a node has room; each node starts full.
    #[arg(long, default_value_t = 10_000, value_name = "COUNT")]
    chunks: usize,
    /// Bytes of the blocks of one chunk.
    #[arg(long, default_value_t = 16 << 20, value_name = "BYTES")]
    block_bytes: u64,
    /// Requests a second at each node.
    #[arg(long, default_value_t = 2.0, value_name = "COUNT")]
    rate: f64,
    /// Seconds of requests before the figures count, in virtual time.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    warm_up: u64,
    /// Seconds of requests for which the figures count, in virtual time.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    seconds: u64,
    /// The seed of all random choices.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    seed: u64,
    /// Traces to play, in Mooncake's JSON lines [default: those of ../shared/traces beside the project, else a generated one]
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Plays a generated trace instead of the traces beside the project.
    #[arg(long, conflicts_with = "trace")]
    generated: bool,
    /// Plays nothing: reports the figures in earlier output of `--json`.
    #[arg(long, value_name = "FILE")]
    from: Vec<PathBuf>,
    /// Draws pictures of the figures into this folder.
    #[arg(long, value_name = "FOLDER")]
    pictures: Option<PathBuf>,
}

/// A cluster of one size.
#[derive(Debug, Serialize, Deserialize)]
pub struct Played {
    /// The figures that depend only on the load.
    pub figures: Figures,
    /// The measurements.
    pub measured: Measured,
    /// Both, compared with the goals.
    pub goals: Vec<Goal>,
}

impl Options {
    /// Plays all clusters. Returns the report, as JSON or as a table.
    ///
    /// # Errors
    /// Fails for traces that cannot be read, impossible loads, and pictures that cannot be written.
    pub fn play(&self, as_json: bool, allocated: Option<fn() -> usize>) -> Result<String> {
        let all = if self.from.is_empty() { self.play_all(allocated)? } else { self.read_all()? };
        if let Some(folder) = &self.pictures {
            pictures::draw(folder, &all).context("cannot draw the pictures")?;
        }
        if as_json { Ok(serde_json::to_string_pretty(&all)?) } else { Ok(table::table(&all)) }
    }

    fn play_all(&self, allocated: Option<fn() -> usize>) -> Result<Vec<Played>> {
        for &nodes in &self.nodes {
            anyhow::ensure!(
                (4..=MOST_NODES).contains(&nodes),
                "--nodes: {nodes} nodes; a cluster has 4 to {MOST_NODES}"
            );
        }
        anyhow::ensure!(self.players >= 4, "--players: at least 4 nodes must play, not {}", self.players);
        anyhow::ensure!(
            (100..=MOST_CHUNKS).contains(&self.chunks),
            "--chunks: a node has 100 to {MOST_CHUNKS}"
        );
        anyhow::ensure!(
            self.rate > 0.0 && self.rate <= 1_000.0,
            "--rate: a node serves up to 1,000 requests a second, and more than 0"
        );
        anyhow::ensure!(self.seconds > 0, "--seconds: requests must come for at least 1 s");
        let trace = self.traces()?;
        let mut all = Vec::new();
        for &nodes in &self.nodes {
            let load = Load {
                seed: self.seed,
                nodes,
                players: self.players,
                chunks: self.chunks,
                block_bytes: self.block_bytes,
                rate: self.rate,
                warm_up: self.warm_up,
                seconds: self.seconds,
                trace: trace.clone(),
            };
            let (figures, measured) = run(&load, allocated);
            let goals = goals(&figures, &measured);
            all.push(Played { figures, measured, goals });
        }
        Ok(all)
    }

    fn read_all(&self) -> Result<Vec<Played>> {
        let mut all = Vec::new();
        for file in &self.from {
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            let played: Vec<Played> = serde_json::from_str(&text)
                .with_context(|| format!("{} is not what `scale --json` prints", file.display()))?;
            all.extend(played);
        }
        Ok(all)
    }

    fn traces(&self) -> Result<Trace> {
        if self.generated {
            return Ok(Trace::generated(self.seed));
        }
        if !self.trace.is_empty() {
            return Trace::read(&self.trace);
        }
        Ok(Trace::published()?.unwrap_or_else(|| Trace::generated(self.seed)))
    }
}

/// Nodes of the largest cluster that is played.
const MOST_NODES: usize = 20_000;

const MOST_CHUNKS: usize = 10_000_000;
