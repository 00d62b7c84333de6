//! The second source of a followed chunk: the writer's node that this follow names, if another follow's fetch of the chunk
//! failed.

use larder_protocol::handoff::Writer;
use larder_protocol::{Chain, Fingerprint};

use super::{Follow, Followed, Reader};
use crate::store::ids::ChunkId;
use crate::store::index::Account;
use crate::store::{Source, Store, Wanted};

/// Chunks of a follow for which its own writer's node is to be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedAgain {
    /// The writer.
    pub writer: Writer,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
    /// The earliest attempt that will do.
    pub attempt: u64,
    /// The longest silence before the follow gives up, in milliseconds.
    pub patience_ms: u64,
    /// The fetches to start; [`Store::fetched`] must answer each.
    pub wanted: Vec<Wanted>,
}

impl Store {
    /// Notes that the fetch of a chunk has failed. Unless they were shown the places, two kinds of followers go on waiting: those
    /// whose own writer's node was not asked wait for that node, and engines whose writer is on this node for that writer. Nobody
    /// writes a chunk again that was on disk.
    pub(in crate::store) fn await_again(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        let (hash, may_be_written) = (chunk.hash, chunk.account() != Account::Disk);
        for (follow, position) in self.follows.followers(id) {
            let may_wait = |open: &&mut Follow| {
                !open.is_shown
                    && (open.may_ask[position] || (open.writer.is_none() && may_be_written))
                    && open.chunks[position] == Followed::Coming(id)
            };
            let Some(open) = self.follows.open.get_mut(&follow).filter(may_wait) else { continue };
            let may_ask = open.may_ask[position];
            open.chunks[position] = Followed::Awaited(hash);
            let waits = (open.fingerprint, hash, (follow, position));
            self.follows.let_go(id, Reader::Follow(follow, position));
            self.follows.awaited.insert(waits);
            if may_ask {
                self.follows.again.insert((follow, position));
            }
            self.unclaim(&[id]);
        }
    }

    /// The follows whose writer's node is to be asked, collected since the last call. Each has the positions of its chunks, in
    /// order.
    pub fn take_followed_again(&mut self) -> Vec<(u64, Vec<usize>)> {
        let mut follows: Vec<(u64, Vec<usize>)> = Vec::new();
        for (follow, position) in std::mem::take(&mut self.follows.again) {
            match follows.last_mut() {
                Some((last, positions)) if *last == follow => positions.push(position),
                _ => follows.push((follow, vec![position])),
            }
        }
        follows
    }

    /// Takes room for the chunks that a follow still waits for and that nobody brings or writes. If there is no room for a
    /// chunk, the follow loses this chunk and all later ones. `None` for a follow that has ended.
    pub fn follow_again(&mut self, follow: u64, positions: &[usize]) -> Option<AskedAgain> {
        let mut wanted = Vec::new();
        let open = self.follows.open.get(&follow)?;
        let (fingerprint, attempt, patience_ms) = (open.fingerprint, open.attempt, open.patience_ms);
        let (writer, number) = (open.writer.clone()?, self.namespaces.of(&fingerprint)?);
        let chain = Chain { links: open.links?, hashes: open.hashes.to_vec(), anchor_before: None };
        for &position in positions {
            let Some(open) = self.follows.open.get(&follow) else { break };
            let name = chain.chunk(position);
            let has_slots = |id| self.index.get(id).slots().next().is_some();
            let is_awaited = open.chunks[position] == Followed::Awaited(name.hash);
            if !is_awaited || self.index.find(number, &name.hash).is_some_and(has_slots) {
                continue;
            }
            self.follow_mut(follow, |open| open.may_ask[position] = false);
            let pools = self.wanted_pools(follow, number, position);
            match self.start_fetch_of(number, name, Source::Peer, pools) {
                Some(id) => wanted.push(self.wanted(number, id, position as u32, Source::Peer)),
                None => self.lose_from(follow, position),
            }
        }
        Some(AskedAgain { writer, fingerprint, attempt, patience_ms, wanted })
    }
}
