//! The layers of a block that are in place.

use std::ops::Range;

use larder_protocol::PoolSpec;

/// Layers of a block that were handed over, ordered by layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::store) struct Layers(Vec<LayerPiece>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct LayerPiece {
    layers: Range<u32>,
    checksum: u64,
}

impl Layers {
    pub(in crate::store) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether some of these layers are in place already.
    pub(in crate::store) fn overlaps(&self, layers: &Range<u32>) -> bool {
        self.0.iter().any(|piece| piece.layers.start < layers.end && layers.start < piece.layers.end)
    }

    /// Adds layers. None of them may be in place already.
    pub(in crate::store) fn add(&mut self, layers: Range<u32>, checksum: u64) {
        let at = self.0.partition_point(|piece| piece.layers.start < layers.start);
        self.0.insert(at, LayerPiece { layers, checksum });
    }

    /// The number of layers that are in place without a gap, from the first layer on.
    pub(in crate::store) fn contiguous(&self) -> u32 {
        let next =
            |end, piece: &LayerPiece| (piece.layers.start == end).then_some(piece.layers.end).ok_or(end);
        self.0.iter().try_fold(0, next).unwrap_or_else(|end| end)
    }

    /// Each piece: its offset in the block, its bytes, and their checksum.
    pub(in crate::store) fn pieces(&self, pool: &PoolSpec) -> Vec<(u64, u64, u64)> {
        let bytes = |layers: u32| u64::from(layers) * pool.layer_bytes;
        let piece = |LayerPiece { layers, checksum }: &LayerPiece| {
            (bytes(layers.start), bytes(layers.end - layers.start), *checksum)
        };
        self.0.iter().map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_count_from_the_first_on_whatever_order_they_come_in() {
        let mut layers = Layers::default();
        for (piece, contiguous) in [(4..6, 0), (0..1, 1), (2..4, 1), (1..2, 6), (6..7, 7)] {
            assert!(!layers.overlaps(&piece));
            layers.add(piece.clone(), 0);
            assert!(layers.overlaps(&piece));
            assert_eq!(layers.contiguous(), contiguous);
        }
    }
}
