//! The actors of one node among themselves: which actor holds a chunk, and how to ask for it.
//!
//! Each actor has its own store, an arena near its GPU, and a disk tier. A sibling is a holder like a peer: it grants its chunk,
//! the copy threads copy the blocks into the reader's arena and check them, and the placement rules between nodes apply. So
//! leases, tickets, pools, chunks on the sibling's disk and load-or-recompute work as they do with peers, and a chunk ends up
//! near the GPU that reads it. Chunks are copied, not read in place: in both cases the engine reads a chunk over its bus once
//! more, a far arena would be read across the NUMA link at every use, and isolation of tenants relies on extents that stay with
//! one actor's processes.
//!
//! Each chunk of a namespace is whole in one store. So all ranks of an engine talk to the same actor, or each rank registers a
//! namespace with the rank in its `layout`: then each rank's share is found, fetched and evicted by itself, and the engine's
//! scheduler uses the shortest of the ranks' prefixes.

mod fetch;

use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use actix::Recipient;
use hashbrown::{DefaultHashBuilder, HashMap};
use larder_core::directory::Holders;
use larder_core::store::{Change, ChangeKind};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkHash, Fingerprint};

use crate::exchange::AskBlocks;
use crate::tell::Tell;

/// How long a sibling may take to answer from memory or from its disk.
pub const SIBLING_DEADLINE: Duration = Duration::from_secs(2);

/// How one actor reaches the others of its node. Cloning shares.
#[derive(Clone)]
pub struct Siblings {
    device: u16,
    map: Arc<NodeMap>,
    actors: Arc<OnceLock<Vec<Sibling>>>,
}

/// An actor, as its siblings see it.
pub struct Sibling {
    /// Asks the actor for blocks.
    pub blocks: Recipient<AskBlocks>,
    /// Tells the actor's core that its chunks have moved, or may be damaged.
    pub tell: Recipient<Tell>,
}

/// For each chunk, the actors of this node that hold it in memory or on disk. The map is a hint, like the directory: an actor may
/// have lost the chunk. A chunk takes 16 bytes, besides the free room of a hash table.
#[derive(Debug)]
struct NodeMap {
    /// Has a secret key, so that nobody can make the keys of two chunks collide.
    hasher: DefaultHashBuilder,
    shards: Vec<Mutex<HashMap<u64, Devices, BuildHasherDefault<IsHashed>>>>,
}

/// A set of actors: one bit for each number.
type Devices = u64;

impl Siblings {
    /// The handles of `devices` actors, at most 64, by number. They reach each other once `actors` is set.
    pub fn of(devices: u16, actors: &Arc<OnceLock<Vec<Sibling>>>) -> Vec<Self> {
        let map = Arc::new(NodeMap::new());
        let sibling = |device| Self { device, map: Arc::clone(&map), actors: Arc::clone(actors) };
        (0..devices).map(sibling).collect()
    }

    /// This actor's number.
    pub fn device(&self) -> u16 {
        self.device
    }

    /// Notes this actor's gained and lost chunks.
    pub fn note(&self, changes: &[Change]) {
        for Change { fingerprint, chunk, kind, .. } in changes {
            self.map.note(self.device, fingerprint, &chunk.hash, *kind != ChangeKind::Lost);
        }
    }

    /// Notes that this actor lost all its chunks.
    pub fn forget_all(&self) {
        self.map.forget(self.device);
    }

    /// The other actors that have a chunk. The first is the next after this actor, by number, so that not all actors ask the same
    /// holder.
    pub fn holders(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Holders {
        let own = u32::from(self.device);
        let mut others = (self.map.devices(fingerprint, hash) & !(1 << self.device)).rotate_right(own);
        let mut holders = Holders::new();
        while others != 0 {
            let device = (others.trailing_zeros() + own) % Devices::BITS;
            holders.push(Holder { node: NodeNumber::THIS_NODE, device: device as u16 });
            others &= others - 1;
        }
        holders
    }

    /// The actor with this number; `None` before all actors are started.
    pub fn actor(&self, device: u16) -> Option<&Sibling> {
        self.actors.get()?.get(usize::from(device))
    }
}

impl NodeMap {
    fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { hasher: DefaultHashBuilder::default(), shards }
    }

    fn note(&self, device: u16, fingerprint: &Fingerprint, hash: &ChunkHash, is_held: bool) {
        let key = self.key(fingerprint, hash);
        let mut shard = larder_net::lock(self.shard(key));
        let devices = shard.entry(key).or_default();
        if is_held {
            *devices |= 1 << device;
        } else {
            *devices &= !(1 << device);
        }
        if *devices == 0 {
            shard.remove(&key);
        }
    }

    fn forget(&self, device: u16) {
        for shard in &self.shards {
            let mut shard = larder_net::lock(shard);
            shard.retain(|_, devices| {
                *devices &= !(1 << device);
                *devices != 0
            });
        }
    }

    fn devices(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Devices {
        let key = self.key(fingerprint, hash);
        let shard = larder_net::lock(self.shard(key));
        shard.get(&key).copied().unwrap_or(0)
    }

    fn key(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> u64 {
        self.hasher.hash_one((fingerprint.0, hash.0))
    }

    fn shard(&self, key: u64) -> &Mutex<HashMap<u64, Devices, BuildHasherDefault<IsHashed>>> {
        // A shard's own table uses the other end of the key.
        &self.shards[key as usize % SHARDS]
    }
}

/// A hasher for keys that are hashes already.
#[derive(Debug, Default)]
struct IsHashed(u64);

impl Hasher for IsHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are single numbers");
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key.rotate_left(32);
    }
}

/// Number of shards: so many that actors seldom wait for the same shard.
const SHARDS: usize = 64;

#[cfg(test)]
mod tests {
    use larder_protocol::ChunkRef;

    use super::*;

    const SPACE: Fingerprint = Fingerprint([1; 32]);

    fn change(name: u8, kind: ChangeKind) -> Change {
        let hash = ChunkHash([name; 32]);
        Change {
            fingerprint: SPACE,
            chunk: ChunkRef { hash, parent: hash, index: 0, anchor: hash },
            kind,
            evicted: None,
        }
    }

    fn holders(of: &Siblings, name: u8) -> Vec<u16> {
        let holders = of.holders(&SPACE, &ChunkHash([name; 32]));
        assert!(holders.iter().all(|holder| holder.node == NodeNumber::THIS_NODE));
        holders.iter().map(|holder| holder.device).collect()
    }

    #[test]
    fn what_one_actor_gains_the_others_find_until_it_is_lost() {
        let siblings = Siblings::of(64, &Arc::default());
        siblings[63].note(&[change(1, ChangeKind::Gained), change(2, ChangeKind::Gained)]);
        siblings[5]
            .note(&[change(2, ChangeKind::MovedFrom(Holder { node: NodeNumber::THIS_NODE, device: 63 }))]);
        assert_eq!((holders(&siblings[0], 1), holders(&siblings[63], 1)), (vec![63], vec![]));
        siblings[63].note(&[change(1, ChangeKind::Lost), change(2, ChangeKind::Lost)]);
        assert_eq!((holders(&siblings[0], 1), holders(&siblings[0], 2)), (vec![], vec![5]));
        siblings[5].note(&[change(2, ChangeKind::Lost)]);
        assert!(siblings[0].map.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
    }

    #[test]
    fn of_several_holders_each_actor_asks_the_next() {
        let siblings = Siblings::of(8, &Arc::default());
        for device in [0, 3, 6] {
            siblings[device].note(&[change(1, ChangeKind::Gained)]);
        }
        let first: Vec<_> = siblings.iter().map(|actor| holders(actor, 1)[0]).collect();
        assert_eq!(first, [3, 3, 3, 6, 6, 6, 0, 0]);
        assert_eq!((holders(&siblings[3], 1), holders(&siblings[4], 1)), (vec![6, 0], vec![6, 0, 3]));
    }
}
