//! What this node's actors hold, and what of it the homes have still to be told.
//!
//! To each home every actor speaks in a stream of its own, one batch at a time. A stream toggles: within it, a key is
//! gained and lost in turn, so that both ends can keep the sum of what was said and compare it from time to time. Every
//! doubt (a batch that is missing, a home that starts again, sums that differ) ends in a new stream with all that is held.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_protocol::limits::{MAX_ANNOUNCE_CHANGES, MAX_FETCH_CHUNKS};
use larder_protocol::peer::{Announce, Announced, RowChange};
use larder_protocol::table::{Holder, NodeNumber, PARTITIONS, RowKey, Table};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

use super::held::{Held, PackedKey};
use super::stream::{Due, Stream};
use super::{ChangeKind, Changes};
use crate::clock::Millis;

/// What this node's actors hold and have to announce.
#[derive(Debug, Default)]
pub struct Outbox {
    place: Place,
    devices: BTreeMap<u16, Device>,
}

/// Where this node stands.
#[derive(Debug, Default)]
struct Place {
    table: Arc<Table>,
    own: NodeNumber,
    incarnation: u64,
    /// The partitions of each home; none where this node is no member.
    homes: BTreeMap<NodeNumber, Vec<u16>>,
    streams_begun: u64,
}

/// One actor.
#[derive(Debug)]
struct Device {
    number: u16,
    held: Held,
    /// By partition: whether its stream tells changes one by one. Else all of it has still to be told.
    is_announced: Vec<bool>,
    streams: BTreeMap<NodeNumber, Stream>,
    moves: BTreeMap<PackedKey, Move>,
}

/// Where a chunk moved here from.
#[derive(Debug)]
struct Move {
    from: Holder,
    fingerprint: Fingerprint,
    hash: ChunkHash,
}

/// A batch to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// To whom; this node may be among them.
    pub home: NodeNumber,
    /// What.
    pub announce: Announce,
}

/// Which batch an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId {
    /// The home.
    pub home: NodeNumber,
    /// The actor.
    pub device: u16,
    /// The stream.
    pub stream: u64,
    /// The batch in it.
    pub sequence: u64,
}

/// What an answer to a batch comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answered {
    /// The home knows.
    Known {
        /// Changes of the batch.
        changes: usize,
        /// How long the oldest of them had waited, from when it happened.
        lag_ms: u64,
        /// Holders that may give up their copies.
        moved: Vec<Moved>,
    },
    /// A new stream begins.
    Restarted,
    /// The batch is sent again.
    Again,
    /// It is the answer to nothing that is waited for.
    Late,
}

/// Chunks that moved here, which their home knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// Who had them.
    pub holder: Holder,
    /// Their namespace.
    pub fingerprint: Fingerprint,
    /// Their hashes; at most [`MAX_FETCH_CHUNKS`].
    pub hashes: Vec<ChunkHash>,
}

impl Outbox {
    /// Takes what an actor gained and lost.
    pub fn changed(&mut self, device: u16, changes: &Changes, now: Millis) {
        let place = &mut self.place;
        let device = self.devices.entry(device).or_insert_with(|| Device::new(device, place, now));
        match changes {
            Changes::Since(changes) => {
                for change in changes {
                    device.change(place, &change.fingerprint, &change.chunk, change.kind, now);
                }
            }
            Changes::All(all) => {
                let keys = all.iter().map(|(space, chunk)| RowKey::new(space, chunk).into());
                device.replace(place, keys.collect(), now);
            }
        }
    }

    /// Takes a new table. The homes of partitions that moved are told what is held of them; a home that started again,
    /// everything.
    pub fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber, now: Millis) {
        let incarnation = table.member(own).map_or(0, |member| member.incarnation);
        let was_another = (own, incarnation) != (self.place.own, self.place.incarnation);
        let old = std::mem::replace(&mut self.place.table, Arc::clone(table));
        (self.place.own, self.place.incarnation) = (own, incarnation);
        self.place.homes = if table.member(own).is_some() { homes(table) } else { BTreeMap::new() };
        for device in self.devices.values_mut() {
            if was_another {
                device.streams.clear();
            }
            device.new_table(&mut self.place, &old, now);
        }
    }

    /// The batches to send now.
    pub fn due(&mut self, now: Millis) -> Vec<Outgoing> {
        let place = &self.place;
        self.devices.values_mut().flat_map(|device| device.due(place, now)).collect()
    }

    /// Takes the answer to a batch; `None` where it did not come.
    pub fn answered(&mut self, batch: &BatchId, answer: Option<Announced>, now: Millis) -> Answered {
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

    /// Changes that no batch carries yet, without those of partitions that are told as a whole.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let streams = self.devices.values().flat_map(|device| device.streams.values());
        streams.map(|stream| stream.pending.len()).sum()
    }

    /// Chunks that the actors hold.
    #[must_use]
    pub fn held(&self) -> usize {
        self.devices.values().map(|device| device.held.len()).sum()
    }

    /// The keys of all that an actor holds.
    pub fn keys(&self, device: u16) -> impl Iterator<Item = RowKey> {
        let held = self.devices.get(&device).map(|device| device.held.iter());
        held.into_iter().flatten().map(PackedKey::unpacked)
    }
}

impl Outgoing {
    /// Which batch it is.
    #[must_use]
    pub fn id(&self) -> BatchId {
        let Announce { holder, stream, sequence, .. } = self.announce;
        BatchId { home: self.home, device: holder.device, stream, sequence }
    }
}

impl Place {
    /// The next stream's number. They grow over all streams, so that a home that was left and comes back hears a new one.
    fn begin_stream(&mut self) -> u64 {
        self.streams_begun += 1;
        self.streams_begun
    }

    fn home_incarnation(&self, home: NodeNumber) -> Option<u64> {
        self.table.member(home).map(|member| member.incarnation)
    }
}

impl Device {
    fn new(number: u16, place: &mut Place, now: Millis) -> Self {
        let is_announced = vec![false; usize::from(PARTITIONS)];
        let (streams, moves) = (BTreeMap::new(), BTreeMap::new());
        let mut device = Self { number, held: Held::new(), is_announced, streams, moves };
        device.new_table(place, &Arc::default(), now);
        device
    }

    fn change(
        &mut self,
        place: &Place,
        space: &Fingerprint,
        chunk: &ChunkRef,
        kind: ChangeKind,
        now: Millis,
    ) {
        let key = PackedKey::from(RowKey::new(space, chunk));
        let has_changed = match kind {
            ChangeKind::Gained | ChangeKind::MovedFrom(_) => self.held.insert(key),
            ChangeKind::Lost => self.held.remove(key),
        };
        if !has_changed {
            return;
        }
        self.toggle(place, key, now);
        match kind {
            ChangeKind::MovedFrom(from) if from.node != place.own && self.moves.len() < MAX_MOVES => {
                self.moves.insert(key, Move { from, fingerprint: *space, hash: chunk.hash });
            }
            ChangeKind::Lost if !self.moves.is_empty() => drop(self.moves.remove(&key)),
            ChangeKind::Gained | ChangeKind::MovedFrom(_) | ChangeKind::Lost => {}
        }
    }

    /// Holds exactly these keys from now on.
    fn replace(&mut self, place: &Place, mut keys: Vec<PackedKey>, now: Millis) {
        keys.sort_unstable();
        keys.dedup();
        let lost: Vec<_> = self.held.iter().filter(|key| keys.binary_search(key).is_err()).collect();
        for key in lost {
            self.held.remove(key);
            self.toggle(place, key, now);
            self.moves.remove(&key);
        }
        for key in keys {
            if self.held.insert(key) {
                self.toggle(place, key, now);
            }
        }
    }

    /// A key was just gained or lost.
    fn toggle(&mut self, place: &Place, key: PackedKey, now: Millis) {
        let partition = key.partition();
        let home = place.table.home(partition);
        let Some(stream) = home.and_then(|home| self.streams.get_mut(&home)) else { return };
        let digest = key.digest();
        let change = if self.held.contains(key) { digest } else { digest.wrapping_neg() };
        stream.digest = stream.digest.wrapping_add(change);
        if self.is_announced[usize::from(partition)] {
            stream.toggle(key, now);
        }
    }

    fn new_table(&mut self, place: &mut Place, old: &Table, now: Millis) {
        self.streams.retain(|&home, stream| place.home_incarnation(home) == Some(stream.home_incarnation));
        for stream in self.streams.values_mut() {
            stream.unannounced.clear();
            stream.digest = 0;
            stream.probe_soon(now);
        }
        self.streams.retain(|home, _| place.homes.contains_key(home));
        let homes = std::mem::take(&mut place.homes);
        for (&home, partitions) in &homes {
            let stream = self.streams.entry(home).or_insert_with(|| {
                let incarnation = place.home_incarnation(home).unwrap_or_default();
                Stream::new(incarnation, place.begin_stream(), now)
            });
            let has_spoken = stream.has_spoken();
            for &partition in partitions {
                let is_announced = &mut self.is_announced[usize::from(partition)];
                *is_announced &= has_spoken && old.home(partition) == Some(home);
                stream.digest = stream.digest.wrapping_add(self.held.digest(partition));
                if !*is_announced {
                    stream.unannounced.push(partition);
                    stream.wait_since(now);
                }
            }
            stream.pending.retain(|key| place.table.home(key.partition()) == Some(home));
        }
        place.homes = homes;
    }

    fn due(&mut self, place: &Place, now: Millis) -> Vec<Outgoing> {
        let mut outgoing = Vec::new();
        for (&home, stream) in &mut self.streams {
            let announce = match stream.due(now) {
                Due::Nothing => continue,
                Due::Again(announce) => announce,
                Due::Batch => {
                    let changes = next_changes(&self.held, &mut self.is_announced, stream);
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
                    announce
                }
            };
            outgoing.push(Outgoing { home, announce });
        }
        outgoing
    }

    fn restart(&mut self, home: NodeNumber, place: &mut Place, now: Millis) {
        let Some(stream) = self.streams.get_mut(&home) else { return };
        let unannounced = place.homes.get(&home).cloned().unwrap_or_default();
        unannounced.iter().for_each(|&partition| self.is_announced[usize::from(partition)] = false);
        stream.restart(place.begin_stream(), unannounced, now);
    }

    /// The moves that a home knows with these changes, by whom they are from.
    fn moved(&mut self, changes: &[RowChange]) -> Vec<Moved> {
        let mut moved: BTreeMap<(Holder, [u8; 32]), Vec<ChunkHash>> = BTreeMap::new();
        if self.moves.is_empty() {
            return Vec::new();
        }
        for change in changes.iter().filter(|change| change.is_held) {
            // A chunk that was lost again meanwhile is not among the moves any more: its holder must keep it.
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
        // A home that is no member is nobody's: the coordinator makes no such table.
        if let Some(partitions) = partitions.get_mut(usize::from(home.0)) {
            partitions.push(partition);
        }
    }
    let homes = (0..).map(NodeNumber).zip(partitions);
    homes.filter(|(_, partitions)| !partitions.is_empty()).collect()
}

/// Takes the next batch's changes from a stream.
fn next_changes(held: &Held, is_announced: &mut [bool], stream: &mut Stream) -> Vec<RowChange> {
    while stream.pending.len() < MAX_ANNOUNCE_CHANGES {
        let Some(partition) = stream.unannounced.pop() else { break };
        is_announced[usize::from(partition)] = true;
        stream.pending.extend(held.partition(partition));
    }
    let mut changes = Vec::with_capacity(stream.pending.len().min(MAX_ANNOUNCE_CHANGES));
    while changes.len() < MAX_ANNOUNCE_CHANGES {
        let Some(key) = stream.pending.pop_first() else { break };
        changes.push(RowChange { row: key.unpacked(), is_held: held.contains(key) });
    }
    changes
}

/// Moves that wait until their home knows, for one actor. Past it a chunk has a copy more than it needs.
const MAX_MOVES: usize = 65_536;

#[cfg(test)]
mod tests;
