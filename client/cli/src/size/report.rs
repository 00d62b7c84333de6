//! The bytes of a model's KV, for people or for machines.

use serde::Serialize;

use super::measured::MeasuredSpeeds;
use super::{Deployment, Footprint};
use crate::output;

/// The memory, disk and link for the KV.
#[derive(Debug, Clone, PartialEq)]
pub struct Surroundings {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
    /// Speed of the link between two nodes.
    pub link_gbit_per_s: f64,
    /// Tokens that the whole deployment computes in a second of prefill.
    pub prefill_tokens_per_s: f64,
    /// Measured speeds of blocks on this machine, if any.
    pub measured: Option<MeasuredSpeeds>,
}

/// The sizes of a model. Serialised, it is the one object that `--json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sizes {
    /// Tensor-parallel ranks.
    pub tensor_parallel: u32,
    /// Pipeline-parallel ranks.
    pub pipeline_parallel: u32,
    /// Parts of a chunk that ranks hold.
    pub slices: u32,
    /// Bytes of one element.
    pub element_bytes: u32,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Layers of the largest rank that keep every token.
    pub full_layers: u32,
    /// Layers of the largest rank that use a window only.
    pub sliding_layers: u32,
    /// Tokens of that window.
    pub sliding_window: Option<u32>,
    /// Layers of the largest rank with recurrent state.
    pub state_layers: u32,
    /// KV heads of one rank.
    pub kv_heads: u32,
    /// Elements of one head; for MLA of the latent.
    pub head_size: u32,
    /// Whether one latent stands for keys and values (MLA).
    pub mla: bool,
    /// Bytes of one token's KV in one layer on one rank.
    pub bytes_per_token_per_layer_per_rank: u64,
    /// Bytes of one token's KV on the largest rank.
    pub bytes_per_token_per_rank: u64,
    /// Bytes of one token's KV over all slices.
    pub bytes_per_token: u64,
    /// Bytes in layers that use a window only.
    pub sliding_bytes_per_token: u64,
    /// Bytes of the recurrent state at a chunk's end, over all slices.
    pub state_bytes_per_chunk: u64,
    /// Bytes of one chunk on the largest rank.
    pub bytes_per_chunk_per_rank: u64,
    /// Bytes of one chunk over all slices.
    pub bytes_per_chunk: u64,
    /// Tokens whose chunks fit into a GiB.
    pub tokens_per_gib: u64,
    /// The memory's capacity.
    pub memory: Capacity,
    /// The disk's capacity.
    pub disk: Capacity,
    /// Speed of the link.
    pub link_gbit_per_s: f64,
    /// Time of a chunk on the link.
    pub link_chunk_ms: f64,
    /// Speed of prefill.
    pub prefill_tokens_per_s: f64,
    /// Time to compute a chunk.
    pub compute_chunk_ms: f64,
    /// `compute_chunk_ms / link_chunk_ms`.
    pub link_speedup: f64,
    /// Times of a chunk by measured speeds, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredTimes>,
}

/// Times of a chunk, its slices one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeasuredTimes {
    /// From a node's memory to an engine on the same host.
    pub host_chunk_ms: f64,
    /// From another node: the measured time, or the link's time if that is longer.
    pub peer_chunk_ms: f64,
    /// `compute_chunk_ms / peer_chunk_ms`.
    pub peer_speedup: f64,
}

/// The capacity of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Capacity {
    /// Bytes of the place.
    pub bytes: u64,
    /// Whole chunks.
    pub chunks: u64,
    /// Tokens of these chunks.
    pub tokens: u64,
}

impl Sizes {
    /// The sizes of a model that is served and stored like this.
    pub fn new(footprint: &Footprint, deployment: Deployment, around: &Surroundings) -> Self {
        let Deployment { tensor_parallel, pipeline_parallel, element_bytes, chunk_tokens } = deployment;
        let Surroundings { memory_bytes, disk_bytes, link_gbit_per_s, prefill_tokens_per_s, .. } = *around;
        let chunk_bytes = footprint.chunk_bytes();
        let held = |bytes: u64| {
            let chunks = bytes / chunk_bytes.max(1);
            Capacity { bytes, chunks, tokens: chunks.saturating_mul(chunk_tokens.into()) }
        };
        let tokens_of =
            |bytes: u64| u128::from(bytes) * u128::from(chunk_tokens) / u128::from(chunk_bytes.max(1));
        let token_bytes = footprint.kv_chunk_bytes / u64::from(chunk_tokens);
        let link_chunk_ms = chunk_bytes as f64 * 8.0 / (link_gbit_per_s * 1e6);
        let compute_chunk_ms = f64::from(chunk_tokens) / prefill_tokens_per_s * 1e3;
        let rank_bytes = footprint.rank_chunk_bytes(chunk_tokens);
        let measured = around.measured.as_ref().map(|speeds| {
            let host_chunk_ms = chunk_bytes as f64 / speeds.host.at(rank_bytes) * 1e3;
            let peer_chunk_ms = (chunk_bytes as f64 / speeds.peer.at(rank_bytes) * 1e3).max(link_chunk_ms);
            MeasuredTimes { host_chunk_ms, peer_chunk_ms, peer_speedup: compute_chunk_ms / peer_chunk_ms }
        });
        Self {
            tensor_parallel,
            pipeline_parallel,
            slices: footprint.slices,
            element_bytes,
            chunk_tokens,
            full_layers: footprint.full.layers,
            sliding_layers: footprint.sliding.layers,
            sliding_window: footprint.window,
            state_layers: footprint.state_layers,
            kv_heads: footprint.full.kv_heads,
            head_size: footprint.full.head_size,
            mla: footprint.is_mla,
            bytes_per_token_per_layer_per_rank: footprint.full.layer_bytes(1).unwrap_or(u64::MAX),
            bytes_per_token_per_rank: footprint.rank_token_bytes(),
            bytes_per_token: token_bytes,
            sliding_bytes_per_token: footprint.sliding_chunk_bytes / u64::from(chunk_tokens),
            state_bytes_per_chunk: footprint.state_chunk_bytes,
            bytes_per_chunk_per_rank: rank_bytes,
            bytes_per_chunk: chunk_bytes,
            tokens_per_gib: tokens_of(1 << 30) as u64,
            memory: held(memory_bytes),
            disk: held(disk_bytes),
            link_gbit_per_s,
            link_chunk_ms,
            prefill_tokens_per_s,
            compute_chunk_ms,
            link_speedup: compute_chunk_ms / link_chunk_ms,
            measured,
        }
    }

    /// The sizes as a table.
    pub fn table(&self) -> String {
        let mut table = output::table(&["", ""]);
        let mut row = |name: &str, value: String| {
            table.add_row([name, &value]);
        };
        let of_bytes = |bytes: u64| format!("{} B  ({})", output::count(bytes), output::bytes(bytes));
        let held = |held: Capacity| {
            format!("{} chunks, {} tokens", output::count(held.chunks), output::count(held.tokens))
        };
        row(
            "ranks (TP x PP), slices of a chunk",
            format!("{} x {}, {}", self.tensor_parallel, self.pipeline_parallel, self.slices),
        );
        row("layers of a rank", self.layers());
        row(
            "KV heads x size on a rank",
            format!("{} x {}{}", self.kv_heads, self.head_size, if self.mla { " (MLA)" } else { "" }),
        );
        row("a token, on a rank", of_bytes(self.bytes_per_token_per_rank));
        row("a token, whole", of_bytes(self.bytes_per_token));
        if self.state_bytes_per_chunk > 0 {
            row("recurrent state at a chunk's end, whole", of_bytes(self.state_bytes_per_chunk));
        }
        row(
            &format!("a chunk of {} tokens, on a rank", self.chunk_tokens),
            of_bytes(self.bytes_per_chunk_per_rank),
        );
        row(&format!("a chunk of {} tokens, whole", self.chunk_tokens), of_bytes(self.bytes_per_chunk));
        row("a GiB holds", format!("{} tokens", output::count(self.tokens_per_gib)));
        row(&format!("memory of {} holds", output::bytes(self.memory.bytes)), held(self.memory));
        row(&format!("disk of {} holds", output::bytes(self.disk.bytes)), held(self.disk));
        let takes = |ms: f64| format!("{ms:.2} ms");
        row(&format!("a chunk on {} Gbit/s takes, at best", self.link_gbit_per_s), takes(self.link_chunk_ms));
        if let Some(measured) = self.measured {
            row("a chunk from another node takes, measured", takes(measured.peer_chunk_ms));
            row("a chunk from this host's memory takes, measured", takes(measured.host_chunk_ms));
        }
        row(
            &format!("a chunk computed at {} tokens/s takes", self.prefill_tokens_per_s),
            takes(self.compute_chunk_ms),
        );
        output::align_right(&mut table, 1);
        format!("{table}\n{}", self.verdict())
    }

    fn layers(&self) -> String {
        let kinds =
            [(self.full_layers, "full"), (self.sliding_layers, "sliding"), (self.state_layers, "recurrent")];
        let kinds = kinds.iter().filter(|(layers, _)| *layers > 0);
        kinds.map(|(layers, kind)| format!("{layers} {kind}")).collect::<Vec<_>>().join(", ")
    }

    fn verdict(&self) -> String {
        let speedup = self.measured.map_or(self.link_speedup, |measured| measured.peer_speedup);
        let mut text = if speedup >= 1.0 {
            format!("Fetching a chunk is {speedup:.1} times as fast as computing it.")
        } else {
            format!("Fetching a chunk takes {:.1} times as long as computing it.", 1.0 / speedup)
        };
        if let Some(window) = self.sliding_window {
            text += &format!(
                "\nOf each token {} are in sliding layers, which use the last {} tokens only.",
                output::bytes(self.sliding_bytes_per_token),
                output::count(window.into())
            );
        }
        if self.state_bytes_per_chunk > 0 {
            text += "\nOnly the state of the last chunk of a prefix is needed to go on from it; larger chunks store less of it.";
        }
        text
    }
}
