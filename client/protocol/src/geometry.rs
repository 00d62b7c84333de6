//! The one formula for the bytes of KV, shared by the namespace, the connectors and the sizing command.

/// The shape of a model's attention KV on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionGeometry {
    /// Layers on this rank.
    pub layers: u32,
    /// KV heads on this rank: the model's heads, divided by TP if they are split. 1 for MLA: its latent counts as one head.
    pub kv_heads: u32,
    /// Elements of one head; for MLA the latent rank plus the rotary part.
    pub head_size: u32,
    /// 2 if keys and values are separate, 1 if one tensor serves as both (MLA).
    pub tensors: u32,
    /// Bytes of one element: 2 for fp16 and bf16, 1 for fp8.
    pub element_bytes: u32,
}

impl AttentionGeometry {
    /// Bytes that `tokens` tokens take in one layer on one rank; `None` if that exceeds 64 bits.
    #[must_use]
    pub fn layer_bytes(&self, tokens: u32) -> Option<u64> {
        [self.kv_heads, self.head_size, self.tensors, tokens, self.element_bytes]
            .into_iter()
            .try_fold(1_u64, |product, factor| product.checked_mul(factor.into()))
    }

    /// Bytes that `tokens` tokens take on one rank over all its layers; `None` if that exceeds 64 bits.
    ///
    /// layers x KV heads x head size x 2 (K and V) x tokens x bytes an element.
    #[must_use]
    pub fn block_bytes(&self, tokens: u32) -> Option<u64> {
        self.layer_bytes(tokens)?.checked_mul(self.layers.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_layer_of_qwen2_5_7b_at_tp_2_takes_16_kib_for_16_tokens() {
        let shape =
            AttentionGeometry { layers: 1, kv_heads: 2, head_size: 128, tensors: 2, element_bytes: 2 };
        assert_eq!(shape.block_bytes(16), Some(16_384));
    }

    #[test]
    fn a_block_beyond_64_bits_is_none() {
        let m = u32::MAX;
        let shape = AttentionGeometry { layers: m, kv_heads: m, head_size: m, tensors: 2, element_bytes: 2 };
        assert_eq!(shape.block_bytes(16), None);
    }
}
