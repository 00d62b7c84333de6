//! One node of a planned cluster: the production store with one session, and the tiers below its memory.

use std::collections::HashSet;

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::peer::Room;
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{Chain, ChunkHash, ChunkRef, Fingerprint, PoolSet};

use super::disk::DiskLog;
use super::{NodeSize, Shape};
use crate::placement::{Gaps, Placement, PlacementRule, Served, Worth, place_by_reads, place_by_worth};
use crate::store::ids::{Below, ChunkKey, ProcessId, SessionId, TenantId};
use crate::store::{
    Came, Change, ChangeKind, DiskStoreLimits, Gathered, Granted, Leased, ObjectStoreLimits, Offered,
    PeerStoreLimits, Source, Store, StoreLimits, Wanted, WritePolicy,
};
use crate::time::Millis;

/// A store, the session that asks it, and the facts that a shell would have.
#[derive(Debug)]
pub(super) struct Node {
    store: Store,
    session: SessionId,
    namespace: u32,
    fingerprint: Fingerprint,
    root: ChunkHash,
    disk: Option<DiskLog>,
    gaps: Gaps,
    served: Served,
    /// Counts the chunks that several nodes had, so that these nodes take turns.
    turn: usize,
    now: Millis,
}

/// A chunk that another node has sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    grant: u64,
    reads: u32,
    pools: PoolSet,
    /// Whether the chunk is on the holder's disk.
    pub(super) is_on_disk: bool,
    pub(super) was_on_disk_alone: bool,
}

impl Node {
    /// An empty node, for prompts of at most `longest` blocks.
    pub(super) fn new(size: &NodeSize, shape: &Shape, longest: u64) -> Self {
        let mut store = Store::new(limits(size, shape, longest));
        store.keep_journal();
        let session = store.open_session(TenantId(0), ProcessId(0), 0);
        let spec = NamespaceSpec::of_blocks("plan", 16, SLOT_BYTES);
        let registered = store.register(session, "plan", &spec, &[0], &[SLOT_BYTES]);
        let registered = registered.expect("a namespace of one pool is possible");
        let fingerprint = store.fingerprint(registered.namespace).expect("it was just registered");
        Self {
            store,
            session,
            namespace: registered.namespace,
            fingerprint,
            root: registered.root,
            disk: (shape.disk_chunks > 0).then(|| DiskLog::new(shape.disk_chunks)),
            gaps: Gaps::default(),
            served: Served::default(),
            turn: 0,
            now: Millis(0),
        }
    }

    /// Sets the time, in trace time.
    pub(super) fn is_now(&mut self, now_ms: u64) {
        self.now = self.now.max(Millis(now_ms));
        self.store.is_now(self.now);
        let served = self.served.bytes_a_second(self.now.0);
        self.store.neighbours().this_node_serves(served);
    }

    /// The parent of every first chunk; the same for all nodes.
    pub(super) fn root(&self) -> ChunkHash {
        self.root
    }

    /// Uses the longest prefix of a chain that is in memory, and keeps it until it is released.
    pub(super) fn lease(&mut self, chain: &Chain) -> Leased {
        let leased = self.store.lease(self.session, self.namespace, chain);
        leased.expect("a trace's ids are chained, and leases are not limited")
    }

    /// Positions of a chain that are neither in memory nor on disk.
    pub(super) fn absent(&self, chain: &Chain) -> Vec<u32> {
        let walk = self.store.find(self.session, self.namespace, chain);
        walk.expect("a trace's ids are chained").absent(chain.len())
    }

    /// Begins to lease a chain; some of its chunks come from elsewhere.
    pub(super) fn gather(&mut self, chain: &Chain, elsewhere: &[Option<Source>]) -> Gathered {
        let gathered = self.store.gather(self.session, self.namespace, chain, elsewhere);
        gathered.expect("a trace's ids are chained, and leases are not limited")
    }

    /// Ends a gather with a lease of the chunks that are here.
    pub(super) fn finish(&mut self, gather: u64) -> Leased {
        self.store.finish_gather(gather).expect("it was just begun")
    }

    /// Ends a lease.
    pub(super) fn release(&mut self, leased: &Leased) {
        if leased.chunks > 0 {
            self.store.release(self.session, leased.lease).expect("it was leased and not released");
        }
    }

    /// Keeps the chunks of a chain that are not here yet, if there is room.
    pub(super) fn put(&mut self, chain: &Chain) {
        let Ok(reserved) = self.store.reserve(self.session, self.namespace, chain, 0, self.now) else {
            return;
        };
        if !reserved.chunks.is_empty() {
            let order = self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &[]);
            self.store.finish_commit(order.expect("it was just reserved").order, Some(Vec::new()));
        }
    }

    /// Notes whether a chunk has come from the node's own disk or from the object store.
    pub(super) fn read(&mut self, wanted: &Wanted, is_there: bool) {
        let is_stored = wanted.from == Source::Object;
        let kept = self.store.is_leased_soon(wanted.fetch).then_some(ChangeKind::Gained);
        self.store.fetched(
            wanted.fetch,
            is_there.then(|| came(PoolSet::first(1), 1, false, is_stored)),
            kept,
        );
    }

    /// Puts the holders of a chunk into the order in which they are asked.
    pub(super) fn order(&mut self, holders: &mut [Holder]) {
        if holders.len() > 1 {
            self.store.neighbours().order(holders, self.turn);
            self.turn = self.turn.wrapping_add(1);
        }
    }

    /// Sends a chunk to another node, from memory or disk; [`Self::was_sent`] must follow. `None` if the chunk is not here.
    pub(super) fn send(&mut self, hash: &ChunkHash) -> Option<Sent> {
        let mut granted = self.store.grant(&self.fingerprint, hash, &[SLOT_BYTES]);
        let mut recalled = None;
        if granted == Granted::OnDisk {
            let recall = self.store.recall(&self.fingerprint, hash)?;
            if let Some(wanted) = &recall.wanted {
                self.read(wanted, true);
            }
            granted = self.store.grant(&self.fingerprint, hash, &[SLOT_BYTES]);
            recalled = Some(recall.fetch);
        }
        if let Some(fetch) = recalled {
            self.store.end_recall(fetch);
        }
        let Granted::Held { grant, reads, is_on_disk, pools, .. } = granted else { return None };
        self.served.sent(SLOT_BYTES, self.now.0);
        Some(Sent { grant, reads, pools, is_on_disk, was_on_disk_alone: recalled.is_some() })
    }

    /// Notes that the other node has the chunk that was sent.
    pub(super) fn was_sent(&mut self, sent: &Sent) {
        self.store.end_grant(sent.grant);
    }

    /// Takes a chunk that came from one of its `copies` holders, or did not come. Placement decides whether the chunk stays.
    pub(super) fn fetched(&mut self, wanted: &Wanted, holder: Holder, copies: usize, sent: Option<&Sent>) {
        let Some(&Sent { reads, pools, is_on_disk, .. }) = sent else {
            self.store.fetched(wanted.fetch, None, None);
            return;
        };
        let placement = match self.store.placement() {
            _ if self.store.is_taken_in(wanted.fetch) => Placement::Forwarded,
            PlacementRule::Reads => place_by_reads(copies, reads, is_on_disk),
            PlacementRule::Worth => {
                let gap_ms = self.gaps.read(&wanted.chunk.hash, self.store.age_ms());
                let every_ms = gap_ms.unwrap_or_else(|| self.store.keeps_ms());
                let every_ms = every_ms / self.store.neighbours().transfer_weight(holder.node);
                let copy = self.store.worth_of_copy(&self.fingerprint, every_ms);
                place_by_worth(copy, self.store.least_for(&self.fingerprint))
            }
        };
        let is_copy = self.store.placement() == PlacementRule::Worth && placement == Placement::Replicate;
        let kept = match placement {
            Placement::Migrate | Placement::Forwarded => Some(ChangeKind::MovedFrom(holder)),
            Placement::Replicate => Some(ChangeKind::Gained),
            Placement::Pass => None,
        };
        let came = Came { is_copy, ..came(pools, reads, is_on_disk, false) };
        self.store.fetched(wanted.fetch, Some(came), kept);
    }

    /// Notes that another node has a chunk behind a chunk that is nowhere.
    pub(super) fn is_behind_hole(&mut self, hash: &ChunkHash, holder: Holder) {
        self.store.is_behind_hole(&self.fingerprint, hash, holder);
    }

    /// Notes that other nodes keep a chunk from now on.
    pub(super) fn gives_up(&mut self, hash: &ChunkHash) {
        match self.store.placement() {
            PlacementRule::Worth => self.store.others_keep(&self.fingerprint, &[*hash]),
            PlacementRule::Reads => _ = self.store.give_up(&self.fingerprint, &[*hash]),
        }
    }

    /// The room that the node names in its answers.
    pub(super) fn room(&self) -> Room {
        Room { least: self.store.least_worth().0, served: self.served.bytes_a_second(self.now.0) }
    }

    /// Notes the room that another node named.
    pub(super) fn hears(&mut self, from: NodeNumber, room: Room) {
        self.store.neighbours().heard(from, room, std::time::Duration::from_millis(self.now.0));
    }

    /// The next offer of evicted chunks to another node.
    pub(super) fn next_offer(&mut self) -> Option<Offered> {
        self.store.next_offer()
    }

    /// Takes the other node's answer to an offer.
    pub(super) fn offer_ended(&mut self, number: u64, wanted: &[bool]) {
        self.store.offer_ended(number, wanted);
    }

    /// Begins to take a chunk that another node evicts, if it is worth its place.
    pub(super) fn take_in(&mut self, chunk: ChunkRef, worth: Worth) -> Option<Wanted> {
        self.store.take_in(&self.fingerprint, chunk, worth)
    }

    /// Writes all waiting chunks to the disk and the object store.
    pub(super) fn write_below(&mut self, objects: Option<&mut HashSet<ChunkHash>>) {
        if let Some(disk) = &mut self.disk {
            let of = |hash| ChunkKey { fingerprint: self.fingerprint, hash };
            while let Some(write) = self.store.next_write(Below::Disk) {
                let gone: Vec<ChunkKey> = disk.write(write.chunk.hash).into_iter().map(of).collect();
                self.store.written(write.write, true);
                self.store.left_disk(&gone);
                self.store.take_given_up().iter().for_each(|key| disk.forget(&key.hash));
                self.store.take_touched().iter().for_each(|key| disk.touch(&key.hash));
            }
        }
        if let Some(objects) = objects {
            while let Some(write) = self.store.next_write(Below::Object) {
                objects.insert(write.chunk.hash);
                self.store.written(write.write, true);
            }
        }
    }

    /// The changes since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        self.store.take_changes()
    }
}

fn came(pools: PoolSet, reads: u32, is_on_disk_elsewhere: bool, is_stored: bool) -> Came {
    Came { checksums: Vec::new(), pools, reads, is_on_disk_elsewhere, is_stored, is_copy: false }
}

/// The smallest slot: nothing is ever written to it.
const SLOT_BYTES: u64 = 4_096;

/// The limits of a store that only the capacity bounds. The engine is trusted, so nothing is copied.
fn limits(size: &NodeSize, shape: &Shape, longest: u64) -> StoreLimits {
    let NodeSize { policy, capacity_chunks } = *size;
    // Forwards may take a quarter of the room for passing chunks, and a whole prompt may pass.
    let passing_chunks = if shape.shares { 4 * longest } else { 0 };
    let below_chunks = if shape.disk_chunks > 0 || shape.has_objects { 4 * longest } else { 0 };
    let slots = capacity_chunks + (1 + u64::from(shape.in_flight)) * longest + passing_chunks + below_chunks;
    let peers = PeerStoreLimits {
        passing_bytes: passing_chunks * SLOT_BYTES,
        max_granted_chunks: u64::MAX,
        placement: shape.placement,
    };
    let (max_waiting_bytes, max_reading_bytes) = (u64::MAX, longest.max(1) * SLOT_BYTES);
    let write = WritePolicy::WriteThrough;
    let disk = DiskStoreLimits { write, write_after_uses: 1, max_waiting_bytes, max_reading_bytes };
    let object =
        ObjectStoreLimits { write: Some(write), write_after_uses: 1, max_waiting_bytes, max_reading_bytes };
    StoreLimits {
        trust_engines: true,
        peers: shape.shares.then_some(peers),
        disk: (shape.disk_chunks > 0).then_some(disk),
        object: shape.has_objects.then_some(object),
        ..StoreLimits::of_chunks(1, slots * SLOT_BYTES, capacity_chunks, policy)
    }
}
