//! The outbox: what this node's actors hold, and what the homes have yet to hear of it.
//!
//! One stream of numbered batches for each actor and home, one batch of it under way at a time. A batch that is lost is sent
//! again; a home that missed one, or has other rows than it should, is told everything anew. What is held is kept here as
//! rows, by partition, so that a new home can be told without asking the actors.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::HashTable;
use larder_protocol::limits::MAX_ANNOUNCE_CHANGES;
use larder_protocol::peer::{Announce, Announced, RowChange};
use larder_protocol::table::{Holder, NodeNumber, PARTITIONS, RowKey, RunKey, Table};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

use super::{Change, ChangeKind, Changes};
use crate::clock::Millis;

/// What is to be announced.
#[derive(Debug, Default)]
pub struct Outbox {
    table: Arc<Table>,
    own: NodeNumber,
    incarnation: u64,
    held: BTreeMap<u16, Held>,
    streams: BTreeMap<(u16, NodeNumber), Stream>,
    counts: OutboxCounts,
}

/// What an outbox has counted since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutboxCounts {
    /// Batches that homes know.
    pub batches: u64,
    /// Changes in them.
    pub changes: u64,
    /// Streams that began anew.
    pub restarts: u64,
    /// Batches that had to be sent again.
    pub retries: u64,
}

/// A batch to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Whom to.
    pub home: NodeNumber,
    /// What.
    pub announce: Announce,
}

/// A chunk that moved here: its last holder may give it up, now that its home knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Who had it.
    pub from: Holder,
    /// Its namespace.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub hash: ChunkHash,
}

/// The rows of one actor, by partition.
#[derive(Debug)]
struct Held {
    partitions: Vec<HashTable<PackedRow>>,
    /// The sum of the digests of each partition's rows.
    digests: Vec<u64>,
}

/// A [`RowKey`] in 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedRow([u64; 3]);

#[derive(Debug, Default)]
struct Stream {
    /// The home's life to which it is told.
    home_incarnation: u64,
    number: u64,
    next_sequence: u64,
    /// Everything must be told anew.
    is_anew: bool,
    /// The home's sum is to be compared, though nothing changed.
    is_checked: bool,
    queue: VecDeque<RowChange>,
    moved: VecDeque<(RowKey, Moved)>,
    under_way: Option<UnderWay>,
    not_before: Millis,
}

#[derive(Debug)]
struct UnderWay {
    announce: Announce,
    moved: Vec<Moved>,
    is_sent: bool,
}

impl Outbox {
    /// Notes what an actor gained and lost.
    pub fn changed(&mut self, device: u16, changes: Changes) {
        if !self.held.contains_key(&device) {
            self.held.insert(device, Held::default());
            self.open_streams();
        }
        let held = self.held.entry(device).or_default();
        match changes {
            Changes::Since(changes) => {
                for Change { fingerprint, chunk, kind } in changes {
                    let row = RowKey::new(&fingerprint, &chunk);
                    let is_held = kind != ChangeKind::Lost;
                    if !held.set(row, is_held) {
                        continue;
                    }
                    let Some(home) = self.table.home(row.run.partition()) else { continue };
                    let stream = self.streams.entry((device, home)).or_insert_with(Stream::new);
                    stream.queue.push_back(RowChange { row, is_held });
                    if let ChangeKind::MovedFrom(from) = kind {
                        stream.note_moved(row, Moved { from, fingerprint, hash: chunk.hash });
                    }
                }
            }
            Changes::All(all) => {
                *held = Held::default();
                all.iter().for_each(|(fingerprint, chunk): &(Fingerprint, ChunkRef)| {
                    held.set(RowKey::new(fingerprint, chunk), true);
                });
                let own = self.streams.iter_mut().filter(|((other, _), _)| *other == device);
                own.for_each(|(_, stream)| stream.is_anew = true);
                self.open_streams();
            }
        }
    }

    /// Follows a new table: what has another home now is told there.
    pub fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber, incarnation: u64) {
        let before = std::mem::replace(&mut self.table, Arc::clone(table));
        if (self.own, self.incarnation) != (own, incarnation) {
            // Another life of this node: nobody knows anything of it.
            (self.own, self.incarnation) = (own, incarnation);
            self.streams.clear();
        }
        let living = |home| table.member(home).map(|member| member.incarnation);
        self.streams.retain(|(_, home), stream| {
            let Some(incarnation) = living(*home) else { return false };
            stream.is_anew |= incarnation != stream.home_incarnation;
            stream.home_incarnation = incarnation;
            stream.is_checked = true;
            let is_theirs = |row: &RowKey| table.home(row.run.partition()) == Some(*home);
            stream.queue.retain(|change| is_theirs(&change.row));
            stream.moved.retain(|(row, _)| is_theirs(row));
            stream.not_before = Millis(0);
            true
        });
        for partition in 0..PARTITIONS {
            let Some(home) = table.home(partition) else { continue };
            if before.home(partition) == Some(home) {
                continue;
            }
            for (&device, held) in &self.held {
                let Some(stream) = self.streams.get_mut(&(device, home)).filter(|stream| !stream.is_anew)
                else {
                    continue;
                };
                let rows = held.partitions[usize::from(partition)].iter();
                stream.queue.extend(rows.map(|row| RowChange { row: row.unpack(), is_held: true }));
            }
        }
        self.open_streams();
    }

    /// The batches to send now, at most one a stream.
    pub fn poll(&mut self, now: Millis) -> Vec<Outgoing> {
        let mut outgoing = Vec::new();
        for (&(device, home), stream) in &mut self.streams {
            if now < stream.not_before {
                continue;
            }
            if stream.under_way.is_none() {
                let Some(held) = self.held.get(&device) else { continue };
                let holder = Holder { node: self.own, device };
                if stream.is_anew {
                    stream.begin_anew(held, &self.table, home);
                    self.counts.restarts += 1;
                } else if stream.queue.is_empty() && !stream.is_checked {
                    continue;
                }
                stream.next_batch(holder, self.incarnation, &self.table, home, held);
            }
            if let Some(under_way) = stream.under_way.as_mut().filter(|under_way| !under_way.is_sent) {
                under_way.is_sent = true;
                outgoing.push(Outgoing { home, announce: under_way.announce.clone() });
            }
        }
        outgoing
    }

    /// A batch was answered, or was not (`None`). Answers what moved, and can be given up elsewhere.
    pub fn answered(&mut self, sent: &Outgoing, answer: Option<Announced>, now: Millis) -> Vec<Moved> {
        let Some(stream) = self.streams.get_mut(&(sent.announce.holder.device, sent.home)) else {
            return Vec::new();
        };
        let Announce { stream: number, sequence, .. } = sent.announce;
        let is_current = stream.under_way.as_ref().is_some_and(|under_way| {
            under_way.announce.stream == number && under_way.announce.sequence == sequence
        });
        if !is_current {
            return Vec::new();
        }
        match answer {
            Some(Announced::Known(known)) if known >= sequence => {
                let Some(UnderWay { announce, moved, .. }) = stream.under_way.take() else {
                    return Vec::new();
                };
                self.counts.batches += 1;
                self.counts.changes += announce.changes.len() as u64;
                return moved;
            }
            Some(Announced::Known(_) | Announced::StartAnew) => {
                stream.under_way = None;
                stream.is_anew = true;
            }
            Some(Announced::OtherIncarnation(_)) => {
                stream.under_way = None;
                stream.is_anew = true;
                stream.not_before = now + OUTDATED_RETRY_MS;
            }
            Some(Announced::Later) => stream.send_again(now + LATER_RETRY_MS),
            None => {
                self.counts.retries += 1;
                stream.send_again(now + LOST_RETRY_MS);
            }
        }
        Vec::new()
    }

    /// When [`Outbox::poll`] should be called, where something waits.
    #[must_use]
    pub fn due(&self) -> Option<Millis> {
        let waits = |stream: &&Stream| match &stream.under_way {
            Some(under_way) => !under_way.is_sent,
            None => stream.is_anew || stream.is_checked || !stream.queue.is_empty(),
        };
        self.streams.values().filter(waits).map(|stream| stream.not_before).min()
    }

    /// Changes that no home was told yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.streams.values().map(|stream| stream.queue.len()).sum()
    }

    /// Rows held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.values().flat_map(|held| &held.partitions).map(HashTable::len).sum()
    }

    /// Every row that is held, with the actor that holds it.
    #[must_use]
    pub fn rows(&self) -> BTreeSet<(u16, RowKey)> {
        let rows = |(&device, held): (&u16, &Held)| {
            let rows = held.partitions.iter().flatten().map(move |row| (device, row.unpack()));
            rows.collect::<Vec<_>>()
        };
        self.held.iter().flat_map(rows).collect()
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> OutboxCounts {
        self.counts
    }

    /// Makes a stream for every actor and home that has none, told anew.
    fn open_streams(&mut self) {
        for &device in self.held.keys() {
            for member in &self.table.members {
                let is_home = self.streams.contains_key(&(device, member.number));
                if !is_home {
                    let stream = Stream { home_incarnation: member.incarnation, ..Stream::new() };
                    self.streams.insert((device, member.number), stream);
                }
            }
        }
    }
}

impl Stream {
    fn new() -> Self {
        Self { is_anew: true, ..Self::default() }
    }

    fn note_moved(&mut self, row: RowKey, moved: Moved) {
        // What is not noted stays where it was as well: a copy more.
        if self.moved.len() < MAX_MOVED {
            self.moved.push_back((row, moved));
        }
    }

    /// Puts all that is held of the home's partitions into the queue, under a new number.
    fn begin_anew(&mut self, held: &Held, table: &Table, home: NodeNumber) {
        self.is_anew = false;
        self.number += 1;
        self.next_sequence = 0;
        self.queue.clear();
        let rows = held.of_home(table, home).map(|row| RowChange { row, is_held: true });
        self.queue.extend(rows);
    }

    fn next_batch(&mut self, holder: Holder, incarnation: u64, table: &Table, home: NodeNumber, held: &Held) {
        let changes = coalesce(self.queue.drain(..self.queue.len().min(MAX_ANNOUNCE_CHANGES)).collect());
        let is_all = self.queue.is_empty();
        self.is_checked = false;
        let moved = self.take_moved(&changes, is_all);
        let announce = Announce {
            holder,
            incarnation,
            epoch: table.epoch,
            stream: self.number,
            sequence: self.next_sequence,
            digest: is_all.then(|| held.digest_of_home(table, home)),
            changes,
        };
        self.next_sequence += 1;
        self.under_way = Some(UnderWay { announce, moved, is_sent: false });
    }

    /// What moved here and is told with these changes. What is not held any more stays where it was.
    fn take_moved(&mut self, changes: &[RowChange], is_all: bool) -> Vec<Moved> {
        if self.moved.is_empty() {
            return Vec::new();
        }
        let told: BTreeSet<RowKey> =
            changes.iter().filter(|change| change.is_held).map(|change| change.row).collect();
        let mut done = Vec::new();
        self.moved.retain(|(row, moved)| {
            let is_told = told.contains(row);
            if is_told {
                done.push(*moved);
            }
            !is_told && !is_all
        });
        done
    }

    fn send_again(&mut self, not_before: Millis) {
        self.not_before = not_before;
        if let Some(under_way) = &mut self.under_way {
            under_way.is_sent = false;
        }
    }
}

impl Held {
    /// Notes whether a row is held; whether that is news.
    fn set(&mut self, row: RowKey, is_held: bool) -> bool {
        let partition = usize::from(row.run.partition());
        let (rows, digest) = (&mut self.partitions[partition], &mut self.digests[partition]);
        let packed = PackedRow::new(row);
        let known = rows.find_entry(packed.hash(), |other| *other == packed);
        match (known, is_held) {
            (Err(_), true) => {
                rows.insert_unique(packed.hash(), packed, PackedRow::hash);
                *digest = digest.wrapping_add(row.digest());
                true
            }
            (Ok(entry), false) => {
                entry.remove();
                *digest = digest.wrapping_sub(row.digest());
                true
            }
            _ => false,
        }
    }

    fn of_home<'a>(&'a self, table: &'a Table, home: NodeNumber) -> impl Iterator<Item = RowKey> + 'a {
        let partitions = (0..PARTITIONS).filter(move |&partition| table.home(partition) == Some(home));
        partitions
            .flat_map(|partition| self.partitions[usize::from(partition)].iter().map(|row| row.unpack()))
    }

    fn digest_of_home(&self, table: &Table, home: NodeNumber) -> u64 {
        let partitions = (0..PARTITIONS).filter(|&partition| table.home(partition) == Some(home));
        partitions.fold(0, |sum, partition| sum.wrapping_add(self.digests[usize::from(partition)]))
    }
}

impl Default for Held {
    fn default() -> Self {
        let partitions = usize::from(PARTITIONS);
        let tables = std::iter::repeat_with(HashTable::new).take(partitions).collect();
        Self { partitions: tables, digests: vec![0; partitions] }
    }
}

impl PackedRow {
    fn new(row: RowKey) -> Self {
        Self([(row.run.0 >> 64) as u64, row.run.0 as u64, row.chunk])
    }

    fn unpack(&self) -> RowKey {
        let [high, low, chunk] = self.0;
        RowKey { run: RunKey(u128::from(high) << 64 | u128::from(low)), chunk }
    }

    /// The run's lower half and the chunk are hashes already.
    fn hash(&self) -> u64 {
        self.0[1] ^ self.0[2].rotate_left(32)
    }
}

/// Only the last word on each row counts, and a row that is back where it was says nothing: a batch never announces what
/// its home was told already.
fn coalesce(changes: Vec<RowChange>) -> Vec<RowChange> {
    let mut last = hashbrown::HashMap::<RowKey, (usize, usize)>::with_capacity(changes.len());
    for (at, change) in changes.iter().enumerate() {
        let (said, place) = last.entry(change.row).or_insert((0, at));
        *said += 1;
        *place = at;
    }
    // Changes of one row alternate: an even number of them ends where it began.
    let stays = |(at, change): &(usize, RowChange)| {
        last.get(&change.row).is_some_and(|&(said, place)| said % 2 == 1 && place == *at)
    };
    changes.into_iter().enumerate().filter(stays).map(|(_, change)| change).collect()
}

/// Chunks of one stream that moved and whose home was not told: more stay where they were as well.
const MAX_MOVED: usize = 65_536;

/// When a batch is sent again that was not answered.
const LOST_RETRY_MS: u64 = 100;

/// When a batch is sent again to a home that has an older table.
const LATER_RETRY_MS: u64 = 10;

/// When a stream begins anew whose home knows another life of this node: a table is on its way.
const OUTDATED_RETRY_MS: u64 = 100;
