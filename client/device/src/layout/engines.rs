//! The layouts of the engines: vLLM's six orders of dimensions, SGLang's pools, latent attention in both.

use std::str::FromStr;

use super::{Dim, LayoutError, LayoutSpec, Plane};

/// Sizes of an engine's KV memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Attention layers.
    pub layers: u32,
    /// Pages.
    pub pages: u32,
    /// KV heads of this rank; 1 for latent attention.
    pub heads: u32,
    /// Tokens of a page.
    pub tokens: u32,
    /// Bytes of one head for one token: key and value, or the latent; in SGLang's split pools, one of the two.
    pub content_bytes: u64,
    /// Pages of a chunk.
    pub pages_per_chunk: u32,
}

/// The order in which vLLM's memory has layers (L), blocks (B: pages), heads (H), tokens (N), contents (C); outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the orders")]
pub enum VllmOrder {
    Lbhnc,
    Lbnhc,
    Lhbnc,
    Blhnc,
    Blnhc,
    Bhlnc,
}

impl VllmOrder {
    /// All orders.
    pub const ALL: [Self; 6] = [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The order's name in vLLM.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }
}

impl FromStr for VllmOrder {
    type Err = LayoutError;

    fn from_str(name: &str) -> Result<Self, LayoutError> {
        let found = Self::ALL.into_iter().find(|order| order.name() == name);
        found.ok_or_else(|| LayoutError::UnknownOrder(name.to_owned()))
    }
}

/// All of vLLM's layers in one region without padding, and the bytes of the region. Latent attention is a shape of one head.
#[must_use]
pub fn vllm(order: VllmOrder, shape: &Shape) -> (LayoutSpec, Vec<u64>) {
    let count = |letter| match letter {
        'L' => u64::from(shape.layers),
        'B' => shape.pages.into(),
        'H' => shape.heads.into(),
        'N' => shape.tokens.into(),
        _ => shape.content_bytes,
    };
    let stride = |letter| -> u64 {
        let inside = order.name().split_once(letter).map_or("", |(_, inside)| inside);
        inside.chars().map(count).product()
    };
    let mut run_bytes = shape.content_bytes;
    let mut dims: Vec<Dim> = Vec::new();
    // From the inside out: a dimension that directly continues the run becomes part of it.
    for letter in order.name().chars().rev().filter(|letter| matches!(letter, 'H' | 'N')) {
        if dims.is_empty() && stride(letter) == run_bytes {
            run_bytes *= count(letter);
        } else if count(letter) > 1 {
            dims.insert(0, Dim { count: count(letter) as u32, stride: stride(letter) });
        }
    }
    let planes = (0..u64::from(shape.layers)).map(|layer| Plane {
        region: 0,
        offset: layer * stride('L'),
        page_stride: stride('B'),
    });
    let spec = LayoutSpec {
        planes: planes.collect(),
        planes_per_layer: 1,
        pages: shape.pages,
        pages_per_chunk: shape.pages_per_chunk,
        dims,
        run_bytes,
    };
    (spec, vec![order.name().chars().map(count).product()])
}

/// SGLang's pool for attention with heads: keys and values of each layer in a region each, tokens outermost.
#[must_use]
pub fn sglang_split(shape: &Shape) -> (LayoutSpec, Vec<u64>) {
    pool(shape, 2)
}

/// SGLang's pool for latent attention: one region a layer.
#[must_use]
pub fn sglang_latent(shape: &Shape) -> (LayoutSpec, Vec<u64>) {
    pool(shape, 1)
}

fn pool(shape: &Shape, planes_per_layer: u32) -> (LayoutSpec, Vec<u64>) {
    let run_bytes = u64::from(shape.tokens) * u64::from(shape.heads) * shape.content_bytes;
    let planes = (0..shape.layers * planes_per_layer)
        .map(|region| Plane { region, offset: 0, page_stride: run_bytes })
        .collect::<Vec<_>>();
    let regions = vec![run_bytes * u64::from(shape.pages); planes.len()];
    let spec = LayoutSpec {
        planes,
        planes_per_layer,
        pages: shape.pages,
        pages_per_chunk: shape.pages_per_chunk,
        dims: Vec::new(),
        run_bytes,
    };
    (spec, regions)
}
