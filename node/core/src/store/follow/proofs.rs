//! Checksums by which a session verifies the layers that it follows.

use std::ops::Range;

use larder_protocol::checksum::layers_checksum;
use larder_protocol::handoff::LayersSum;
use larder_protocol::limits::MAX_MESSAGE_BLOCKS;

use super::{Follow, FollowProgress, Followed};
use crate::store::ids::{ChunkId, SessionId};
use crate::store::{Refused, Store};

/// The progress of a follow, and its checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowProofs {
    /// The progress, or less if the checksums of all layers do not fit into a message.
    pub progress: FollowProgress,
    /// Checksums of the new layers, if some chunk is incomplete.
    pub sums: Vec<LayersSum>,
    /// Checksums of all blocks, in the order of their places, if all chunks are whole.
    pub checksums: Vec<u64>,
}

impl Store {
    /// The checksums of a follow's layers, for a session that already has those of the first `known_layers` layers.
    ///
    /// # Errors
    /// As [`Store::followed`].
    pub fn prove_followed(
        &self,
        session: SessionId,
        follow: u64,
        known_layers: u32,
    ) -> Result<FollowProofs, Refused> {
        let mut progress = self.followed(session, follow)?;
        let unknown = Refused::Unknown { what: "follow", number: follow };
        let open = self.follows.open.get(&follow).ok_or(unknown)?;
        let living = || open.chunks[..progress.chunks as usize].iter().copied().enumerate();
        let ids = living().filter_map(|(position, chunk)| match chunk {
            Followed::Coming(id) | Followed::Here(id) => Some((position as u32, id)),
            Followed::Awaited(_) | Followed::Lost(_) => None,
        });
        let ids: Vec<(u32, ChunkId)> = ids.collect();
        if progress.is_whole {
            let of_chunk = |&(position, id): &(u32, ChunkId)| {
                let chunk = self.index.get(id);
                let namespace = self.namespaces.get(chunk.namespace);
                let wanted = open.wants(position as usize, &namespace.rules);
                let of_slice = |&slice: &u16| wanted.iter().map(move |pool| namespace.block(slice, pool));
                let blocks = open.slices.iter().flat_map(of_slice);
                blocks.map(|block| chunk.blocks[block].checksum()).collect::<Vec<u64>>()
            };
            let checksums = ids.iter().flat_map(of_chunk).collect();
            return Ok(FollowProofs { progress, sums: Vec::new(), checksums });
        }
        let mut sums = Vec::new();
        for &(position, id) in &ids {
            self.sums_of(open, (position, id), &(known_layers..progress.layers), &mut sums);
        }
        // Layers that are left out now are sent the next time. One layer has at most one sum per block, so it fits.
        while sums.len() > MAX_MESSAGE_BLOCKS && progress.layers > known_layers + 1 {
            progress.layers = known_layers.midpoint(progress.layers).max(known_layers + 1);
            let news = known_layers..progress.layers;
            sums.retain(|sum| sum.from_layer < news.end);
        }
        Ok(FollowProofs { progress, sums, checksums: Vec::new() })
    }

    /// Adds the checksums of a chunk's new layers.
    fn sums_of(
        &self,
        open: &Follow,
        (position, id): (u32, ChunkId),
        news: &Range<u32>,
        sums: &mut Vec<LayersSum>,
    ) {
        let chunk = self.index.get(id);
        let namespace = self.namespaces.get(chunk.namespace);
        for (part, &slice) in open.slices.iter().enumerate() {
            for pool in open.wants(position as usize, &namespace.rules).iter() {
                let block = namespace.block(slice, pool);
                let layer_bytes = namespace.pools[pool].spec.layer_bytes.max(1);
                let key = namespace.key(chunk.hash, block);
                for (offset, bytes, sum) in self.pieces_in_place(chunk, id, block) {
                    let (from_layer, to_layer) =
                        ((offset / layer_bytes) as u32, ((offset + bytes) / layer_bytes) as u32);
                    if from_layer < news.end && news.start < to_layer {
                        let checksum = layers_checksum(&key, &(offset..offset + bytes), sum);
                        let block = (part * namespace.pools.len() + pool) as u32;
                        sums.push(LayersSum { chunk: position, block, from_layer, to_layer, checksum });
                    }
                }
            }
        }
    }
}
