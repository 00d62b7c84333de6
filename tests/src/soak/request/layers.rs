//! Hand-overs: chunks that are written, and followed, layer by layer.

use std::time::Duration;

use larder_cli::content;
use larder_client::{FollowOptions, Reservation, SessionError};
use larder_protocol::Chain;

use super::Asked;

impl Asked<'_> {
    /// Whether a chunk has one block in each slice.
    pub(super) fn has_one_pool(&self) -> bool {
        self.space.block_bytes.len() == 1
    }

    /// Writes chunks of a reservation layer by layer. Returns whether the node took them.
    pub(super) async fn hand_over(
        &self,
        part: &Chain,
        reservation: &Reservation,
        positions: &[u32],
    ) -> Result<bool, SessionError> {
        if positions.is_empty() {
            return Ok(true);
        }
        let layers = self.namespace.pool_layers()[0];
        let mut block = vec![0; self.space.block_bytes[0] as usize];
        let layer_bytes = block.len() / layers as usize;
        for layer in 0..layers {
            let mut staged = self.session.stage_layers(reservation, positions, 0, layer..layer + 1).await?;
            for (chunk, &position) in positions.iter().enumerate() {
                for slice in 0..staged.slices() {
                    let key = self.space.key(self.tenant, &part.hashes[position as usize], slice);
                    content::fill(&key, &mut block);
                    let from = layer as usize * layer_bytes;
                    staged.copy_from(chunk, slice, 0, &block[from..from + layer_bytes]);
                }
            }
            if !self.was_taken(self.session.hand_over(staged).await)? {
                return Ok(false);
            }
        }
        self.was_taken(self.session.commit_handed_over(reservation, positions).await)
    }

    /// Follows the writer of these chunks on this node, and checks the layers that are in place.
    pub(super) async fn follow(&self, chain: &Chain) -> Result<(), SessionError> {
        if !self.has_one_pool() {
            return Ok(());
        }
        let options = FollowOptions { writer: None, attempt: 0, patience: PATIENCE };
        let ask = async || self.session.follow(self.namespace, chain, options.clone()).await;
        let Some(follow) = self.patiently(ask).await? else { return Ok(()) };
        let layers = self.namespace.pool_layers()[0];
        let place = self.session.wait_for_layers(&follow, layers, PATIENCE).await?;
        let Some(lease) = follow.lease() else { return Ok(()) };
        let most = self.space.block_bytes[0] as usize;
        let in_place = if place.is_whole { most } else { most / layers as usize * place.layers as usize };
        let mut bytes = vec![0; in_place];
        for (position, hash) in chain.hashes.iter().enumerate().take(place.chunks as usize) {
            for block in 0..lease.blocks_per_chunk() {
                let is_damaged = lease.copy_range(position, block, 0, &mut bytes).is_err();
                let key = self.space.key(self.tenant, hash, block);
                if is_damaged || content::first_difference(&key, &bytes).is_some() {
                    self.complain(&key, &bytes, || {
                        format!("block {block} of chunk {position}, {hash}, followed")
                    });
                }
            }
        }
        self.tally.count(|counts| {
            counts.bytes_checked += u64::from(place.chunks) * (bytes.len() * lease.blocks_per_chunk()) as u64;
        });
        Ok(())
    }
}

/// How long a writer may be silent.
const PATIENCE: Duration = Duration::from_millis(200);
