//! The bytes of a model's KV: from its `config.json` to bytes, tokens and seconds.

pub mod config;
pub mod layers;
pub mod measured;
pub mod report;
pub mod state;

use larder_protocol::geometry::AttentionGeometry;

pub use config::{ModelConfig, SizeError};

use self::layers::LayerKind;
use self::state::StateShape;

/// The deployment of a model: its ranks and types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deployment {
    /// Tensor-parallel ranks.
    pub tensor_parallel: u32,
    /// Pipeline-parallel ranks.
    pub pipeline_parallel: u32,
    /// Bytes of one element of the KV.
    pub element_bytes: u32,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
}

/// The KV of one rank of a model: the rank of the pipeline stage that holds most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// The attention of one rank; `layers` are those with full attention.
    pub full: AttentionGeometry,
    /// The geometry of the layers that look back a window only.
    pub sliding: AttentionGeometry,
    /// Tokens that the sliding layers look back.
    pub window: Option<u32>,
    /// Layers with recurrent state on this rank.
    pub state_layers: u32,
    /// Bytes of all recurrent state at the end of one chunk on this rank.
    pub state_bytes: u64,
    /// Parts of a chunk: one a rank, or one a pipeline stage if tensor-parallel ranks hold the same bytes.
    pub slices: u32,
    /// Whether tensor-parallel ranks hold the same latent (MLA).
    pub is_mla: bool,
    /// Bytes of the KV of one chunk over all slices.
    pub kv_chunk_bytes: u64,
    /// Bytes of the sliding layers among these.
    pub sliding_chunk_bytes: u64,
    /// Bytes of the recurrent state of one chunk over all slices.
    pub state_chunk_bytes: u64,
}

impl Footprint {
    /// The footprint of a model.
    ///
    /// # Errors
    /// [`SizeError`]: a field is missing or makes no sense, or the model cannot be split like this.
    pub fn of(config: &ModelConfig, deployment: Deployment) -> Result<Self, SizeError> {
        let Deployment { tensor_parallel: tp, pipeline_parallel: pp, chunk_tokens, .. } = deployment;
        let layers = layers::of(config)?;
        let has_attention = layers.iter().any(|layer| layer.has_attention());
        let has_state = layers.iter().any(|layer| layer.has_state());
        let shape = if has_attention { attention(config, deployment)? } else { NO_ATTENTION };
        let state = if has_state { StateShape::of(config, deployment.element_bytes)?.bytes(tp) } else { 0 };
        if pp as usize > layers.len() {
            return Err(SizeError::TooManyStages { pipeline_parallel: pp, layers: layers.len() });
        }
        let is_mla = has_attention && shape.tensors == 1;
        let window = layers.iter().find_map(|layer| layer.window());
        let stages = stages(&layers, pp as usize);
        let footprints: Vec<Self> = stages
            .map(|stage| {
                let count =
                    |wanted: fn(&LayerKind) -> bool| stage.iter().filter(|l| wanted(l)).count() as u32;
                let state_layers = count(LayerKind::has_state);
                let full = AttentionGeometry { layers: count(LayerKind::is_full), ..shape };
                let sliding = AttentionGeometry { layers: count(LayerKind::is_sliding), ..shape };
                let kv = full.block_bytes(chunk_tokens).zip(sliding.block_bytes(chunk_tokens));
                let kv =
                    kv.and_then(|(full, sliding)| full.checked_add(sliding)).ok_or(SizeError::TooLarge)?;
                let state_bytes = state.checked_mul(state_layers.into()).ok_or(SizeError::TooLarge)?;
                Ok(Self {
                    full,
                    sliding,
                    window,
                    state_layers,
                    state_bytes,
                    slices: if is_mla && !has_state { pp } else { tp * pp },
                    is_mla,
                    kv_chunk_bytes: kv,
                    sliding_chunk_bytes: sliding.block_bytes(chunk_tokens).unwrap_or(0),
                    state_chunk_bytes: state_bytes,
                })
            })
            .collect::<Result<_, SizeError>>()?;
        let ranks = |parts: u64, ranks: u32| parts.checked_mul(ranks.into()).ok_or(SizeError::TooLarge);
        let copies = if is_mla { 1 } else { tp };
        let kv_chunk_bytes = ranks(footprints.iter().map(|f| f.kv_chunk_bytes).sum(), copies)?;
        let sliding_chunk_bytes = ranks(footprints.iter().map(|f| f.sliding_chunk_bytes).sum(), copies)?;
        let state_chunk_bytes = ranks(footprints.iter().map(|f| f.state_chunk_bytes).sum(), tp)?;
        let largest = footprints.into_iter().max_by_key(|f| f.kv_chunk_bytes + f.state_chunk_bytes);
        let largest = largest.ok_or(SizeError::NoLayers)?;
        Ok(Self { kv_chunk_bytes, sliding_chunk_bytes, state_chunk_bytes, ..largest })
    }

    /// Bytes of one chunk on this rank, recurrent state included.
    pub fn rank_chunk_bytes(&self, chunk_tokens: u32) -> u64 {
        let bytes = |geometry: &AttentionGeometry| geometry.block_bytes(chunk_tokens).unwrap_or(u64::MAX);
        bytes(&self.full).saturating_add(bytes(&self.sliding)).saturating_add(self.state_bytes)
    }

    /// Bytes of one token's KV on this rank, without recurrent state.
    pub fn rank_token_bytes(&self) -> u64 {
        self.rank_chunk_bytes(1) - self.state_bytes
    }

    /// Bytes of one chunk over all slices.
    pub fn chunk_bytes(&self) -> u64 {
        self.kv_chunk_bytes.saturating_add(self.state_chunk_bytes)
    }
}

/// The attention of one rank in one layer; its `layers` are not set.
fn attention(config: &ModelConfig, deployment: Deployment) -> Result<AttentionGeometry, SizeError> {
    let Deployment { tensor_parallel: tp, element_bytes, .. } = deployment;
    if let Some(latent) = config.number(&["kv_lora_rank"])? {
        let rotary = config.required(&["qk_rope_head_dim"])?;
        let head_size = latent.checked_add(rotary).ok_or(SizeError::TooLarge)?;
        return Ok(AttentionGeometry { layers: 0, kv_heads: 1, head_size, tensors: 1, element_bytes });
    }
    let heads = config.number(&HEADS)?;
    let kv_heads = match config.number(&["num_key_value_heads", "num_kv_heads", "n_head_kv"])? {
        Some(kv_heads) => kv_heads,
        None => config.required(&HEADS)?,
    };
    let head_size = match config.number(&["head_dim", "attention_head_dim"])? {
        Some(head_size) => head_size,
        None => {
            let hidden = config.required(&["hidden_size", "n_embd", "d_model"])?;
            let heads = heads.map_or_else(|| config.required(&HEADS), Ok)?;
            if hidden < heads {
                return Err(SizeError::HeadSize { hidden, heads });
            }
            hidden / heads
        }
    };
    let fits = kv_heads.is_multiple_of(tp) || tp.is_multiple_of(kv_heads);
    if !fits {
        return Err(SizeError::Heads { kv_heads, tensor_parallel: tp });
    }
    let kv_heads = (kv_heads / tp).max(1);
    Ok(AttentionGeometry { layers: 0, kv_heads, head_size, tensors: 2, element_bytes })
}

const HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];

const NO_ATTENTION: AttentionGeometry =
    AttentionGeometry { layers: 0, kv_heads: 0, head_size: 0, tensors: 0, element_bytes: 0 };

/// The layers of each pipeline stage, as even as possible: the first stages may have one more.
fn stages(layers: &[LayerKind], stages: usize) -> impl Iterator<Item = &[LayerKind]> {
    let (each, more) = (layers.len() / stages, layers.len() % stages);
    let start = move |stage: usize| stage * each + stage.min(more);
    (0..stages).map(move |stage| &layers[start(stage)..start(stage + 1)])
}

#[cfg(test)]
mod tests;
