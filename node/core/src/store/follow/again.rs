//! The second source of a followed chunk: the writer's node that this follow names, if another follow's fetch of the chunk
//! failed.

use larder_protocol::{Chain, Fingerprint};

use super::{Followed, Reader};
use crate::store::ids::ChunkId;
use crate::store::{Source, Store, Wanted};

impl Store {
    /// Notes that the fetch of a chunk has failed: followers whose own writer's node was not asked wait for that node, unless
    /// they were shown the places.
    pub(in crate::store) fn await_again(&mut self, id: ChunkId) {
        let hash = self.index.get(id).hash;
        for follow in self.follows.followers(id) {
            let Some(open) = self.follows.open.get_mut(&follow).filter(|open| !open.is_shown) else {
                continue;
            };
            let Some(position) = open.coming(id, &hash).filter(|&position| open.may_ask[position]) else {
                continue;
            };
            open.chunks[position] = Followed::Awaited(hash);
            let key = (open.fingerprint, hash);
            self.follows.let_go(id, Reader::Follow(follow));
            self.follows.awaited.entry(key).or_default().push(follow);
            self.follows.again.insert((follow, position));
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

    /// Takes room for the chunks that a follow still waits for and that nobody brings or writes. Returns their namespace and
    /// their fetches; [`Store::fetched`] must answer each. If there is no room for a chunk, the follow loses this chunk and all
    /// later ones. `None` for a follow that has ended.
    pub fn follow_again(&mut self, follow: u64, positions: &[usize]) -> Option<(Fingerprint, Vec<Wanted>)> {
        let mut wanted = Vec::new();
        let open = self.follows.open.get(&follow)?;
        let (fingerprint, number) = (open.fingerprint, self.namespaces.of(&open.fingerprint)?);
        let chain = Chain { links: open.links?, hashes: open.names.all().to_vec(), anchor_before: None };
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
        Some((fingerprint, wanted))
    }

    /// Whether a follow is open.
    #[must_use]
    pub fn is_followed(&self, follow: u64) -> bool {
        self.follows.open.contains_key(&follow)
    }
}
