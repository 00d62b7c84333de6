//! Divides the bytes that may be in flight among the peers that this node sends to.
//!
//! No peer has a fixed share. A peer may have as many bytes in flight as stay free for others: the first peer gets half of all
//! bytes, each further peer half of the rest. So peers that stop reading never take everything. A quarter of the bytes is kept
//! from prefetches: the peers that ask for them are told when to ask again.

use std::collections::HashMap;

use larder_protocol::peer::Class;

/// Bytes that are being sent, by peer.
#[derive(Debug)]
pub struct Sending {
    all_bytes: u64,
    free_bytes: u64,
    by_peer: HashMap<String, u64>,
}

impl Sending {
    /// Begins without bytes in flight; `all_bytes` may be in flight to all peers together.
    pub(super) fn new(all_bytes: u64) -> Self {
        Self { all_bytes, free_bytes: all_bytes, by_peer: HashMap::new() }
    }

    /// Takes room to send a chunk to a peer, and returns the bytes to give back. A peer with nothing in flight gets all
    /// the free room if its chunk needs that much. A prefetch leaves some room free.
    pub fn take(&mut self, peer: &str, bytes: u64, class: Class) -> Option<u64> {
        // A chunk larger than all that may be sent goes alone.
        let bytes = bytes.min(self.all_bytes);
        let kept_free = match class {
            Class::Decode => 0,
            Class::Prefetch => (self.all_bytes / KEPT_FOR_DECODE).min(self.all_bytes - bytes),
        };
        let free = self.free_bytes.checked_sub(bytes).filter(|&free| free >= kept_free)?;
        match self.by_peer.get_mut(peer) {
            Some(has) if *has > 0 && *has + bytes > free => return None,
            Some(has) => *has += bytes,
            None => _ = self.by_peer.insert(peer.to_owned(), bytes),
        }
        self.free_bytes = free;
        Some(bytes)
    }

    /// Bytes that are being sent.
    pub fn under_way_bytes(&self) -> u64 {
        self.all_bytes - self.free_bytes
    }

    /// Gives back the room of bytes that were sent to a peer, or will not be sent.
    pub fn give_back(&mut self, peer: &str, bytes: u64) {
        self.free_bytes += bytes;
        if let Some(has) = self.by_peer.get_mut(peer) {
            *has = has.saturating_sub(bytes);
            if *has == 0 {
                self.by_peer.remove(peer);
            }
        }
    }
}

/// One part in `KEPT_FOR_DECODE` of the bytes in flight is kept from prefetches.
const KEPT_FOR_DECODE: u64 = 4;
