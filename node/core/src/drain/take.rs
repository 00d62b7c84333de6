//! Takes: keeps chunks of a node that drains, as far as they are worth more than the chunks that make way for them.
//!
//! A chunk goes into free room. Without free room, it displaces the next victim, as long as its rank at the draining node is
//! better than the victim's rank here. An actor that has given up a tenth of its chunks for others keeps only chunks that rank
//! among the better nine tenths at the draining node. So the chunks of least worth go, on whichever node they are, and no two
//! nodes have to agree on a unit of worth.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use larder_protocol::Fingerprint;
use larder_protocol::drain::{TakeChunk, TakeNamespace, Taken, WHOLE_RANK_PPM};
use larder_protocol::peer::Class;
use larder_protocol::table::{Holder, NodeNumber};
use smallvec::smallvec;

use crate::Core;
use crate::bring::Fetch;
use crate::cause::Cause;
use crate::effect::Effect;
use crate::event::TakeNumber;
use crate::store::ids::ChunkKey;
use crate::store::{FetchId, FreeRoom, TakeIn};

/// The answer to a node that drains.
#[derive(Debug)]
pub enum TakeReply {
    /// The answer.
    Now(Taken),
    /// Chunks are on their way: [`Effect::Taken`] answers.
    Later(TakeNumber),
    /// No chunk has room for now: the node that drains asks again soon.
    Busy,
}

/// Chunks that are being taken.
#[derive(Debug, Default)]
pub(crate) struct Takes {
    open: BTreeMap<TakeNumber, Take>,
    /// For each fetch: the takes that wait for it, and the position of the chunk in each take.
    waiting: HashMap<FetchId, Vec<(TakeNumber, usize)>>,
    /// For each node that drains: the number of chunks that made way for its chunks, and the time of its last question.
    displaced: BTreeMap<NodeNumber, (u64, Duration)>,
}

#[derive(Debug)]
struct Take {
    is_kept: Vec<bool>,
    keys: Vec<ChunkKey>,
    left: usize,
}

impl Takes {
    /// The number of chunks that lately made way for chunks of nodes that drain.
    fn displaced(&mut self, now: Duration) -> u64 {
        self.displaced.retain(|_, (_, asked)| now.saturating_sub(*asked) < SEASON);
        self.displaced.values().map(|(chunks, _)| chunks).sum()
    }
}

impl Core {
    /// Keeps chunks of an actor of another node that drains.
    pub fn take(
        &mut self,
        now: Duration,
        from: Holder,
        namespace: Option<&TakeNamespace>,
        chunks: &[TakeChunk],
    ) -> TakeReply {
        self.now = self.now.max(now);
        let number = TakeNumber(self.bring.next_number());
        let known = namespace.and_then(|namespace| self.know_of_taken(namespace));
        let mut take = Take { is_kept: vec![false; chunks.len()], keys: Vec::new(), left: 0 };
        let Some(fingerprint) = known.filter(|_| !self.is_draining()) else {
            return TakeReply::Now(self.taken(known.as_ref(), take.is_kept));
        };
        let (mut wanted, mut is_busy) = (Vec::new(), false);
        for (position, &TakeChunk { chunk, rank_ppm }) in chunks.iter().enumerate() {
            take.keys.push(ChunkKey { fingerprint, hash: chunk.hash });
            let Some(displaces) = self.has_room_for(&fingerprint, rank_ppm, from.node) else { continue };
            match self.store.take_from_leaver(&fingerprint, chunk) {
                TakeIn::Here => take.is_kept[position] = true,
                TakeIn::Refused => {}
                TakeIn::Busy => is_busy = true,
                TakeIn::Coming { fetch, wanted: to_fetch } => {
                    if displaces && to_fetch.is_some() {
                        self.takes.displaced.entry(from.node).or_insert((0, self.now)).0 += 1;
                    }
                    take.left += 1;
                    self.takes.waiting.entry(fetch).or_default().push((number, position));
                    match (to_fetch, self.bring.fetches.get_mut(&fetch)) {
                        (Some(to_fetch), _) => wanted.push(to_fetch),
                        (None, Some(under_way)) => under_way.is_taken = true,
                        (None, None) => {}
                    }
                }
            }
        }
        if take.left == 0 {
            if is_busy && !take.is_kept.contains(&true) {
                return TakeReply::Busy;
            }
            return TakeReply::Now(self.taken(Some(&fingerprint), take.is_kept));
        }
        self.takes.open.insert(number, take);
        let deadline = self.now + TAKE_WITHIN;
        let ids: Vec<FetchId> = wanted.iter().map(|wanted| wanted.fetch).collect();
        for wanted in wanted {
            let id = wanted.fetch;
            let cause = Cause::default();
            let mut fetch =
                Fetch::new(wanted, fingerprint, Class::Prefetch, smallvec![from], deadline, cause);
            fetch.is_from_a_drain();
            self.bring.fetches.insert(id, fetch);
        }
        self.order_fetches(ids);
        TakeReply::Later(number)
    }

    /// The number of takes that wait for chunks, plus the number of chunks that they wait for.
    pub fn takes_under_way(&self) -> usize {
        self.takes.open.len() + self.takes.waiting.len()
    }

    /// Takes the end of a fetch: tells the takes that wait for it whether its chunk is kept.
    pub(crate) fn end_takes(&mut self, id: FetchId) {
        for (number, position) in self.takes.waiting.remove(&id).unwrap_or_default() {
            let Some(take) = self.takes.open.get_mut(&number) else { continue };
            take.is_kept[position] = self.store.holds(&take.keys[position]);
            take.left -= 1;
            self.store.end_recall(id);
            if take.left == 0
                && let Some(Take { is_kept, keys, .. }) = self.takes.open.remove(&number)
            {
                let taken = self.taken(keys.first().map(|key| &key.fingerprint), is_kept);
                self.effects.push_back(Effect::Taken { take: number, taken });
            }
        }
    }

    /// Makes the namespace of another node's chunks known here. `None` if this node does not serve its tenant, or if the
    /// namespace does not fit this node.
    fn know_of_taken(&mut self, namespace: &TakeNamespace) -> Option<Fingerprint> {
        let TakeNamespace { tenant, spec } = namespace;
        let fingerprint = spec.fingerprint(tenant);
        if self.store.described(&fingerprint).is_none() {
            self.know_of_another(tenant, fingerprint, spec).ok()?;
        }
        Some(fingerprint)
    }

    /// Whether a chunk of this rank may stay, and if so, whether another chunk makes way for it.
    fn has_room_for(&mut self, fingerprint: &Fingerprint, rank_ppm: u32, from: NodeNumber) -> Option<bool> {
        let now = self.now;
        self.takes.displaced.entry(from).and_modify(|(_, asked)| *asked = now);
        let FreeRoom { chunks, bytes } = self.free_room(Some(fingerprint));
        if chunks > 0 && bytes >= self.store.chunk_bytes_by(fingerprint) {
            return Some(false);
        }
        (rank_ppm < self.rank_limit_ppm()).then_some(true)
    }

    /// Chunks below this rank may displace others.
    fn rank_limit_ppm(&mut self) -> u32 {
        let own = self.store.cached_chunks();
        let displaced = self.takes.displaced(self.now).min(own);
        match own {
            0 => 0,
            own => ((own - displaced) * u64::from(WHOLE_RANK_PPM) / own) as u32,
        }
    }

    fn taken(&mut self, fingerprint: Option<&Fingerprint>, is_kept: Vec<bool>) -> Taken {
        if self.is_draining() {
            return Taken { is_kept, ..Taken::default() };
        }
        let FreeRoom { chunks: free_chunks, bytes: free_bytes } = self.free_room(fingerprint);
        Taken { is_kept, free_chunks, free_bytes, rank_limit_ppm: self.rank_limit_ppm() }
    }

    /// Free room, without the room that chunks on their way will take.
    fn free_room(&self, fingerprint: Option<&Fingerprint>) -> FreeRoom {
        let coming = self.takes.waiting.len() as u64;
        let FreeRoom { chunks, bytes } = self.store.free_room(fingerprint);
        FreeRoom {
            chunks: chunks.saturating_sub(coming),
            bytes: bytes.saturating_sub(self.store.passing_bytes()),
        }
    }
}

/// How long a take waits for the draining node: less than the draining node waits for the answer.
const TAKE_WITHIN: Duration = Duration::from_secs(6);

/// After this time without a question, a node that drained counts as gone, and so do the chunks that made way for its chunks.
const SEASON: Duration = Duration::from_secs(3);
