//! The chunks that this node's actors hold, and the changes that the homes have not heard yet.
//!
//! Each actor has a stream of its own to each home, one batch at a time. Within a stream, a key is gained and lost in turn, so
//! both ends can keep the sum of all changes, and compare the sums from time to time. Every doubt (a missing batch, a home that
//! starts again, different sums) leads to a new stream with everything that the actor holds.
//!
//! The changes of all actors for one home go in one message. The times of messages and comparisons are random, but fixed for each
//! pair of nodes: after a new table a thousand nodes do not all speak at once. A new table affects only the nodes whose
//! partitions move.
//!
//! The last batch of waiting changes carries the sum too. Without such a batch, sums are compared at planned times if a
//! connection with the home is open. Without an open connection they are compared only after ten minutes (longer in a cluster of
//! more than a thousand nodes): otherwise comparisons would be most messages of a large cluster, and would keep every pair of
//! nodes connected. Rows that a home lost are back within that time, and sooner if a connection with the home is open.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_protocol::limits::{MAX_ANNOUNCE_CHANGES, MAX_ANNOUNCES, MAX_FETCH_CHUNKS};
use larder_protocol::peer::{Announce, Announced, RowChange};
use larder_protocol::table::{Holder, NodeNumber, PARTITIONS, RowKey, Table};
use larder_protocol::{ChunkHash, Fingerprint};
use xxhash_rust::xxh3::xxh3_64;

use super::agenda::Agenda;
use super::held::{HeldChunks, PackedKey};
use super::stream::{Due, Stream};
use super::{Changes, Page};
use crate::Millis;
use crate::store::{Change, ChangeKind};

/// The chunks that this node's actors hold and announce.
#[derive(Debug, Default)]
pub struct Outbox {
    place: ClusterView,
    devices: BTreeMap<u16, Device>,
    agenda: Agenda,
}

/// This node's place in the cluster.
#[derive(Debug, Default)]
struct ClusterView {
    table: Arc<Table>,
    own: NodeNumber,
    incarnation: u64,
    /// Empty if this node is no member.
    homes: BTreeMap<NodeNumber, Home>,
    streams_begun: u64,
}

/// A home, for all actors.
#[derive(Debug)]
struct Home {
    partitions: Vec<u16>,
    /// Whether the home's partitions differ from those in the table before.
    has_changed: bool,
    /// The time of the next comparison of sums, if a connection is open.
    probe_at: Millis,
    /// The latest time of the next comparison.
    probe_by: Millis,
}

/// One actor.
#[derive(Debug)]
struct Device {
    number: u16,
    held: HeldChunks,
    /// The chunks of the pages so far, with the changes in between.
    paged: Option<HeldChunks>,
    /// For each partition: whether its changes are announced one by one. Otherwise the whole partition is still to be announced.
    is_announced: Vec<bool>,
    /// For each partition: the home to which `is_announced` refers.
    told_to: Vec<Option<NodeNumber>>,
    streams: BTreeMap<NodeNumber, Stream>,
    moves: BTreeMap<PackedKey, Move>,
}

/// The former place of a chunk that moved here.
#[derive(Debug)]
struct Move {
    from: Holder,
    fingerprint: Fingerprint,
    hash: ChunkHash,
}

/// Batches to send in one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// The home that gets the batches; it may be this node.
    pub home: NodeNumber,
    /// The batches, at most one of each actor.
    pub announces: Vec<Announce>,
}

/// The batch that an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId {
    /// The home.
    pub home: NodeNumber,
    /// The actor.
    pub device: u16,
    /// The stream.
    pub stream: u64,
    /// The batch's number in the stream.
    pub sequence: u64,
}

/// The result of an answer to a batch.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Answered {
    /// The home knows the batch.
    Known {
        /// Changes of the batch.
        changes: usize,
        /// How long the oldest of these changes had waited.
        lag_ms: u64,
        /// Holders that may give up their copies.
        moved: Vec<Moved>,
    },
    /// A new stream begins.
    Restarted,
    /// The batch is sent again.
    Again,
    /// Nobody waits for this answer.
    Late,
}

/// Chunks that moved here, after their home has heard of the move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The former holder.
    pub holder: Holder,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
    /// The chunks' hashes; at most [`MAX_FETCH_CHUNKS`].
    pub hashes: Vec<ChunkHash>,
}

impl Outbox {
    /// An empty outbox for a node that has begun streams already: its next streams have higher numbers.
    #[must_use]
    pub fn begin_again(&self) -> Self {
        let place = ClusterView { streams_begun: self.place.streams_begun + 1, ..ClusterView::default() };
        Self { place, ..Self::default() }
    }

    /// Takes an actor's gained and lost chunks.
    pub fn changed(&mut self, device: u16, changes: &Changes, now: Millis) {
        let Self { place, devices, agenda } = self;
        let device = devices.entry(device).or_insert_with(|| Device::new(device, place, now));
        match changes {
            Changes::Since(changes) => {
                for change in changes {
                    device.change(place, agenda, change, now);
                }
            }
            Changes::Page(page) => device.take_page(place, agenda, page, now),
        }
    }

    /// Takes a new table. The new homes of moved partitions hear all held chunks of these partitions; a home that started again
    /// hears those of all its partitions. The other homes hear nothing.
    pub fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber, now: Millis) {
        let Self { place, devices, agenda } = self;
        let was_another = place.new_table(table, own, now);
        agenda.retain(|home| place.homes.contains_key(&home));
        for device in devices.values_mut() {
            if was_another {
                device.streams.clear();
            }
            device.new_table(place, now);
        }
        let homes: Vec<_> = place.homes.keys().copied().collect();
        homes.into_iter().for_each(|home| self.plan(home));
    }

    /// The next time at which [`due`](Self::due) has something to send, as far as is known now.
    pub fn next_due(&mut self) -> Option<Millis> {
        self.agenda.next_due()
    }

    /// The messages to send now. `is_near` says whether a connection with a node is open, so that a message needs no handshake.
    pub fn due(&mut self, now: Millis, is_near: impl Fn(NodeNumber) -> bool) -> Vec<Outgoing> {
        let mut outgoing = Vec::new();
        while let Some(home) = self.agenda.take_due(now) {
            let announces = self.announces(home, now, &is_near);
            if !announces.is_empty() {
                outgoing.push(Outgoing { home, announces });
            }
            self.plan(home);
        }
        outgoing
    }

    /// The batches for a home whose time has come.
    fn announces(
        &mut self,
        home: NodeNumber,
        now: Millis,
        is_near: impl Fn(NodeNumber) -> bool,
    ) -> Vec<Announce> {
        let Self { place, devices, .. } = self;
        let (homes, own) = (place.homes.len(), place.own);
        let Some(at_home) = place.homes.get_mut(&home) else { return Vec::new() };
        let is_time = at_home.probe_at <= now;
        let probes = is_time && (at_home.probe_by <= now || home == own || is_near(home));
        if is_time && !probes {
            at_home.probe_at = at_home.probe_by.min(now + LOOK_MS);
        }
        let (mut announces, mut room) = (Vec::new(), MAX_ANNOUNCE_CHANGES);
        for device in devices.values_mut() {
            if room > 0 && announces.len() < MAX_ANNOUNCES {
                let announce = device.announce(place, home, room, probes, now);
                room -= announce.as_ref().map_or(0, |announce| announce.changes.len()).min(room);
                announces.extend(announce);
            }
        }
        let compares =
            announces.len() == devices.len() && announces.iter().all(|announce| announce.digest.is_some());
        if let Some(at_home) = place.homes.get_mut(&home).filter(|_| probes || compares) {
            // A comparison with a batch replaces the planned comparison. The planned time still counts, so that the homes' times
            // stay apart.
            let turn = if probes { now } else { at_home.probe_at.min(now + probe_ms(homes)) };
            at_home.probe_at = turn + probe_ms(homes);
            at_home.probe_by = at_home.probe_at + far_ms(homes);
        }
        announces
    }

    /// Plans the next message to a home.
    fn plan(&mut self, home: NodeNumber) {
        let Some(at_home) = self.place.homes.get(&home) else { return };
        let streams = self.devices.values().filter_map(|device| device.streams.get(&home));
        let next = streams.filter_map(Stream::next_due).min();
        self.agenda.plan(home, next.map_or(at_home.probe_at, |next| next.min(at_home.probe_at)));
    }

    /// Takes the answer to a batch; `None` if it did not come.
    pub fn answered(&mut self, batch: &BatchId, answer: Option<Announced>, now: Millis) -> Answered {
        let answered = self.take_answer(batch, answer, now);
        self.plan(batch.home);
        answered
    }

    fn take_answer(&mut self, batch: &BatchId, answer: Option<Announced>, now: Millis) -> Answered {
        let Some(device) = self.devices.get_mut(&batch.device) else { return Answered::Late };
        let stream = device.streams.get_mut(&batch.home);
        let Some(stream) = stream.filter(|stream| stream.waits_for(batch.stream, batch.sequence)) else {
            return Answered::Late;
        };
        match answer {
            Some(Announced::Known(sequence)) if sequence >= batch.sequence => {
                let Some(sent) = stream.acknowledged() else { return Answered::Late };
                let changes = sent.announce.changes.len();
                let moved = device.moved(&sent.announce.changes);
                Answered::Known { changes, lag_ms: now.since(sent.since), moved }
            }
            Some(Announced::StartAnew) => {
                device.restart(batch.home, &mut self.place, now);
                Answered::Restarted
            }
            None | Some(Announced::Known(_) | Announced::Later | Announced::OtherIncarnation(_)) => {
                stream.failed(now);
                Answered::Again
            }
        }
    }

    /// The number of changes that no batch carries yet. Changes of partitions that are announced as a whole do not count.
    pub fn waiting(&self) -> usize {
        let streams = self.devices.values().flat_map(|device| device.streams.values());
        streams.map(|stream| stream.pending.len()).sum()
    }

    /// Chunks that the actors hold.
    pub fn held(&self) -> usize {
        self.devices.values().map(|device| device.held.len()).sum()
    }

    /// The keys of all chunks that an actor holds.
    pub fn keys(&self, device: u16) -> impl Iterator<Item = RowKey> {
        let held = self.devices.get(&device).map(|device| device.held.iter());
        held.into_iter().flatten().map(PackedKey::unpacked)
    }
}

impl BatchId {
    /// The id of a message's batch.
    pub fn new(home: NodeNumber, announce: &Announce) -> Self {
        let &Announce { holder, stream, sequence, .. } = announce;
        Self { home, device: holder.device, stream, sequence }
    }
}

impl ClusterView {
    /// Takes a new table; returns whether this node's number or incarnation changed with it.
    fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber, now: Millis) -> bool {
        let incarnation = table.member(own).map_or(0, |member| member.incarnation);
        let was_another = (own, incarnation) != (self.own, self.incarnation);
        (self.table, self.own, self.incarnation) = (Arc::clone(table), own, incarnation);
        let before = std::mem::take(&mut self.homes);
        let partitions = if table.member(own).is_some() { homes(table) } else { BTreeMap::new() };
        self.homes = BTreeMap::new();
        let (probe_ms, count) = (probe_ms(partitions.len()), partitions.len() as u64);
        let far_ms = far_ms(partitions.len());
        for (home, partitions) in partitions {
            let soon = |range_ms| now + PROBE_SOON_MS + self.phase(home, range_ms);
            let (has_changed, probe_at, probe_by) = match before.get(&home) {
                Some(before) if before.partitions == partitions => (false, before.probe_at, before.probe_by),
                Some(before) => (true, before.probe_at.min(soon(count)), before.probe_by),
                None => (true, soon(probe_ms), soon(probe_ms) + far_ms),
            };
            self.homes.insert(home, Home { partitions, has_changed, probe_at, probe_by });
        }
        was_another
    }

    /// A time below `range_ms`: fixed for this node, this home and this table, and random among pairs of nodes.
    fn phase(&self, home: NodeNumber, range_ms: u64) -> u64 {
        let mut name = [0; 20];
        name[..2].copy_from_slice(&self.own.0.to_le_bytes());
        name[2..4].copy_from_slice(&home.0.to_le_bytes());
        name[4..12].copy_from_slice(&self.incarnation.to_le_bytes());
        name[12..].copy_from_slice(&self.table.epoch.number.to_le_bytes());
        xxh3_64(&name) % range_ms.max(1)
    }

    /// The next stream's number. Numbers grow over all streams, so that a home that comes back gets a new number.
    fn begin_stream(&mut self) -> u64 {
        self.streams_begun += 1;
        self.streams_begun
    }

    fn home_incarnation(&self, home: NodeNumber) -> Option<u64> {
        self.table.member(home).map(|member| member.incarnation)
    }
}

impl Device {
    fn new(number: u16, place: &mut ClusterView, now: Millis) -> Self {
        let is_announced = vec![false; usize::from(PARTITIONS)];
        let told_to = vec![None; usize::from(PARTITIONS)];
        let (streams, moves) = (BTreeMap::new(), BTreeMap::new());
        let (held, paged) = (HeldChunks::new(), None);
        let mut device = Self { number, held, paged, is_announced, told_to, streams, moves };
        device.new_table(place, now);
        device
    }

    fn change(&mut self, place: &ClusterView, agenda: &mut Agenda, change: &Change, now: Millis) {
        let &Change { fingerprint, chunk, kind, .. } = change;
        let key = PackedKey::from(RowKey::new(&fingerprint, &chunk));
        if let Some(paged) = &mut self.paged {
            match kind {
                ChangeKind::Gained | ChangeKind::MovedFrom(_) => paged.insert(key),
                ChangeKind::Lost => paged.remove(key),
            };
        }
        let has_changed = match kind {
            ChangeKind::Gained | ChangeKind::MovedFrom(_) => self.held.insert(key),
            ChangeKind::Lost => self.held.remove(key),
        };
        if !has_changed {
            return;
        }
        self.toggle(place, agenda, key, now);
        match kind {
            ChangeKind::MovedFrom(from) if from.node != place.own && self.moves.len() < MAX_MOVES => {
                self.moves.insert(key, Move { from, fingerprint, hash: chunk.hash });
            }
            ChangeKind::Lost if !self.moves.is_empty() => drop(self.moves.remove(&key)),
            ChangeKind::Gained | ChangeKind::MovedFrom(_) | ChangeKind::Lost => {}
        }
    }

    /// Takes a page of the chunks that the actor holds. After the last page, the actor holds the chunks of the pages and nothing
    /// else.
    fn take_page(&mut self, place: &ClusterView, agenda: &mut Agenda, page: &Page, now: Millis) {
        if page.is_first {
            self.paged = Some(HeldChunks::new());
        }
        // The first page was not seen: the actor will begin again.
        let Some(paged) = &mut self.paged else { return };
        for (space, chunk) in &page.chunks {
            paged.insert(RowKey::new(space, chunk).into());
        }
        if page.is_last {
            let paged = self.paged.take().unwrap_or_else(HeldChunks::new);
            self.replace(place, agenda, &paged, now);
        }
    }

    /// Makes these keys the only keys that the actor holds.
    fn replace(&mut self, place: &ClusterView, agenda: &mut Agenda, keys: &HeldChunks, now: Millis) {
        for partition in 0..PARTITIONS {
            let of_it = keys.partition(partition);
            let is_lost = |key: &&PackedKey| of_it.binary_search(key).is_err();
            let lost: Vec<_> = self.held.partition(partition).iter().filter(is_lost).copied().collect();
            for key in lost {
                self.held.remove(key);
                self.toggle(place, agenda, key, now);
                self.moves.remove(&key);
            }
            for &key in of_it {
                if self.held.insert(key) {
                    self.toggle(place, agenda, key, now);
                }
            }
        }
    }

    /// Notes that a key was just gained or lost.
    fn toggle(&mut self, place: &ClusterView, agenda: &mut Agenda, key: PackedKey, now: Millis) {
        let partition = key.partition();
        let Some(home) = place.table.home(partition) else { return };
        let Some(stream) = self.streams.get_mut(&home) else { return };
        let digest = key.digest();
        let change = if self.held.contains(key) { digest } else { digest.wrapping_neg() };
        stream.digest = stream.digest.wrapping_add(change);
        if self.is_announced[usize::from(partition)] {
            stream.toggle(key, now);
            if let Some(due) = stream.next_due() {
                agenda.plan_sooner(home, due);
            }
        }
    }

    /// Takes the homes of a new table. A stream goes on if its home has the same partitions as before.
    fn new_table(&mut self, place: &mut ClusterView, now: Millis) {
        self.streams.retain(|&home, stream| {
            place.home_incarnation(home) == Some(stream.home_incarnation) && place.homes.contains_key(&home)
        });
        let homes = std::mem::take(&mut place.homes);
        let spread_ms = (homes.len() as u64 / 2).min(MAX_SPREAD_MS);
        for (&home, Home { partitions, has_changed, .. }) in &homes {
            let is_known = self.streams.contains_key(&home);
            if is_known && !has_changed {
                continue;
            }
            let stream = self.streams.entry(home).or_insert_with(|| {
                let incarnation = place.home_incarnation(home).unwrap_or_default();
                Stream::new(incarnation, place.begin_stream(), now)
            });
            stream.unannounced.clear();
            stream.digest = 0;
            for &partition in partitions {
                let at = usize::from(partition);
                let told_by_one = is_known && self.told_to[at] == Some(home) && self.is_announced[at];
                self.told_to[at] = Some(home);
                stream.digest = stream.digest.wrapping_add(self.held.digest(partition));
                // A partition without held chunks needs no announcement.
                self.is_announced[at] = told_by_one || self.held.partition(partition).is_empty();
                if !self.is_announced[at] {
                    stream.unannounced.push(partition);
                }
                if !told_by_one {
                    stream.pending.retain(|key| key.partition() != partition);
                }
            }
            stream.pending.retain(|key| place.table.home(key.partition()) == Some(home));
            if !stream.unannounced.is_empty() {
                stream.wait(now, now + place.phase(home, spread_ms));
            }
        }
        place.homes = homes;
    }

    /// The next batch for a home, with at most `room` changes.
    fn announce(
        &mut self,
        place: &ClusterView,
        home: NodeNumber,
        room: usize,
        probes: bool,
        now: Millis,
    ) -> Option<Announce> {
        let stream = self.streams.get_mut(&home)?;
        match stream.due(now, probes) {
            Due::Nothing => None,
            Due::Again(announce) => Some(announce),
            Due::Batch => {
                let changes = next_changes(&self.held, &mut self.is_announced, stream, room);
                let (number, sequence) = stream.numbers();
                let announce = Announce {
                    holder: Holder { node: place.own, device: self.number },
                    incarnation: place.incarnation,
                    epoch: place.table.epoch,
                    stream: number,
                    sequence,
                    digest: stream.is_told().then_some(stream.digest),
                    changes,
                };
                stream.sent(announce.clone(), now);
                Some(announce)
            }
        }
    }

    fn restart(&mut self, home: NodeNumber, place: &mut ClusterView, now: Millis) {
        let Some(stream) = self.streams.get_mut(&home) else { return };
        let unannounced = place.homes.get(&home).map_or_else(Vec::new, |home| home.partitions.clone());
        unannounced.iter().for_each(|&partition| self.is_announced[usize::from(partition)] = false);
        stream.restart(place.begin_stream(), unannounced, now);
    }

    /// Takes out the moves that a home knows after these changes, grouped by former holder and namespace.
    fn moved(&mut self, changes: &[RowChange]) -> Vec<Moved> {
        let mut moved: BTreeMap<(Holder, [u8; 32]), Vec<ChunkHash>> = BTreeMap::new();
        if self.moves.is_empty() {
            return Vec::new();
        }
        for change in changes.iter().filter(|change| change.is_held) {
            // A chunk that was lost again meanwhile is no longer among the moves: its former holder must keep it.
            if let Some(gained) = self.moves.remove(&PackedKey::from(change.row)) {
                moved.entry((gained.from, gained.fingerprint.0)).or_default().push(gained.hash);
            }
        }
        let pieces = moved.iter().flat_map(|((holder, fingerprint), hashes)| {
            hashes.chunks(MAX_FETCH_CHUNKS).map(|hashes| Moved {
                holder: *holder,
                fingerprint: Fingerprint(*fingerprint),
                hashes: hashes.to_vec(),
            })
        });
        pieces.collect()
    }
}

/// The partitions of each home.
fn homes(table: &Table) -> BTreeMap<NodeNumber, Vec<u16>> {
    let numbers = table.members.last().map_or(0, |member| usize::from(member.number.0) + 1);
    let mut partitions = vec![Vec::new(); numbers];
    for (partition, home) in (0..PARTITIONS).zip(&table.homes) {
        // In the coordinator's tables, every home is a member.
        if let Some(partitions) = partitions.get_mut(usize::from(home.0)) {
            partitions.push(partition);
        }
    }
    let homes = (0..).map(NodeNumber).zip(partitions);
    homes.filter(|(_, partitions)| !partitions.is_empty()).collect()
}

/// Takes the next batch's changes from a stream.
fn next_changes(
    held: &HeldChunks,
    is_announced: &mut [bool],
    stream: &mut Stream,
    room: usize,
) -> Vec<RowChange> {
    while stream.pending.len() < room {
        let Some(partition) = stream.unannounced.pop() else { break };
        is_announced[usize::from(partition)] = true;
        stream.pending.extend(held.partition(partition));
    }
    let mut changes = Vec::with_capacity(stream.pending.len().min(room));
    while changes.len() < room {
        let Some(key) = stream.pending.pop_first() else { break };
        changes.push(RowChange { row: key.unpacked(), is_held: held.contains(key) });
    }
    changes
}

/// The interval at which a home and a node compare sums, if there are `homes` homes: each node compares twenty times a second at
/// most.
fn probe_ms(homes: usize) -> u64 {
    (homes as u64 * PROBE_EACH_MS).max(PROBE_MS)
}

/// The time after which a home and a node compare sums although no connection is open, if there are `homes` homes. A node opens
/// two connections a second at most for these comparisons.
fn far_ms(homes: usize) -> u64 {
    (homes as u64 * FAR_EACH_MS).max(FAR_MS)
}

/// The time between comparisons of sums with one home, in a small cluster.
const PROBE_MS: u64 = 5_000;

/// In a large cluster, the time between comparisons with one home and the next home.
const PROBE_EACH_MS: u64 = 50;

/// In a cluster of up to a thousand nodes, rows that a home lost are back after this time and two intervals at the latest, if the
/// home answers.
const FAR_MS: u64 = 600_000;

/// In a larger cluster, the time between comparisons with one home and the next home, of the homes without an open connection.
const FAR_EACH_MS: u64 = 600;

/// How often a waiting comparison looks for an open connection: a connection of a large cluster stays open for a few seconds at
/// least.
const LOOK_MS: u64 = 3_000;

/// The time after which sums are compared with a home whose partitions changed.
const PROBE_SOON_MS: u64 = 500;

/// In a large cluster a node tells new homes their chunks spread over this time, not all at once.
const MAX_SPREAD_MS: u64 = 500;

/// The most moves of one actor that wait until their home knows. Beyond this number, the former holder of a chunk keeps its copy
/// too.
const MAX_MOVES: usize = 65_536;

#[cfg(test)]
mod tests;
