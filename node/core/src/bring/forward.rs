//! Forwards between nodes: offers evicted chunks that another node may keep, and takes chunks that other nodes offer.

use std::time::Duration;

use larder_protocol::peer::{Class, Room};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkRef, Fingerprint};

use super::Fetch;
use crate::Core;
use crate::cause::Cause;
use crate::effect::Effect;
use crate::placement::Worth;

impl Core {
    /// Takes chunks that another actor evicts and offers, as far as they are worth their place here. The result says for each
    /// chunk, in order, whether it is taken. These chunks are fetched like all others, and their holder hears that they moved.
    pub fn take_in(
        &mut self,
        now: Duration,
        holder: Holder,
        fingerprint: Fingerprint,
        chunks: &[ChunkRef],
        worth: Worth,
    ) -> Vec<bool> {
        self.now = self.now.max(now);
        self.store.is_now(self.millis());
        if self.is_draining() {
            return vec![false; chunks.len()];
        }
        let mut ids = Vec::new();
        let mut is_wanted = Vec::with_capacity(chunks.len());
        let deadline = self.now + self.bring.others_deadline();
        for &chunk in chunks {
            let wanted = self.store.take_in(&fingerprint, chunk, worth);
            is_wanted.push(wanted.is_some());
            let Some(wanted) = wanted else { continue };
            let (id, candidates) = (wanted.fetch, std::iter::once(holder).collect());
            ids.push(id);
            let mut fetch =
                Fetch::new(wanted, fingerprint, Class::Prefetch, candidates, deadline, Cause::default());
            // Only the offering actor has the chunk.
            (fetch.is_asked_again, fetch.is_object_asked) = (true, true);
            self.bring.fetches.insert(id, fetch);
        }
        self.order_fetches(ids);
        is_wanted
    }

    /// The worth of the next victim, as other nodes are told. A node that drains keeps nothing more, whatever its worth.
    pub fn least_worth(&self) -> Worth {
        if self.is_draining() { Worth(u64::MAX) } else { self.store.least_worth() }
    }

    /// Notes a node's room and how much it serves, as its answer said.
    pub fn neighbour_says(&mut self, now: Duration, node: NodeNumber, room: Room) {
        self.now = self.now.max(now);
        self.store.neighbours().heard(node, room, self.now);
    }

    /// Notes the bytes of blocks a second that this node sends to others.
    pub fn this_node_serves(&mut self, bytes_a_second: u64) {
        self.store.neighbours().this_node_serves(bytes_a_second);
    }

    /// Offers chunks that the store has evicted and that are worth their transfer.
    pub(crate) fn offer_evicted(&mut self) {
        while let Some(offered) = self.store.next_offer() {
            self.effects.push_back(Effect::Offer(offered));
        }
    }
}
