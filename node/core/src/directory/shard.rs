//! The rows of which this node is home.
//!
//! A row is ten bytes: the digest of the chunk's key, and a number for its holder. Each partition has its own table, so that a
//! partition moves away as a whole. Two chunks with one digest cost a round trip, as any stale row does. A row for which the home
//! has no room is counted; the home asks for the row again once it has room.

use std::collections::HashMap;
use std::sync::Arc;

use hashbrown::HashTable;
use larder_protocol::peer::{Announce, Announced, Find, RowSpan, Rows};
use larder_protocol::table::{Holder, NodeNumber, PARTITIONS, RowKey, Table};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::holders::{HolderIndex, KnownHolders, Next};
use crate::Millis;

/// The rows of the partitions whose home this node is.
#[derive(Debug)]
pub struct Shard {
    table: Arc<Table>,
    own: NodeNumber,
    holders: KnownHolders,
    /// The rows of each partition.
    partitions: Vec<HashTable<Row>>,
    rows: u64,
    max_rows: u64,
    /// Rows that a reader found wrong, and the time until which each is hidden.
    doubts: HashMap<Doubt, Millis>,
    counts: ShardCounts,
}

/// A shard's counts since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardCounts {
    /// Changes left out because their partition has another home.
    pub foreign: u64,
    /// Rows left out because there was no room.
    pub dropped: u64,
    /// Rows left out because the home knows enough other holders of the chunk.
    pub crowded: u64,
    /// Holders that were told to announce anew once there was room for rows that had been left out.
    pub refilled: u64,
    /// Streams that were told to start anew.
    pub restarts: u64,
    /// Comparisons with different sums.
    pub differing: u64,
    /// Rows hidden because a reader found them wrong.
    pub repaired: u64,
}

/// A row: a chunk, by its digest, and one holder of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(Rust, packed(2))]
struct Row {
    digest: u64,
    holder: HolderIndex,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Doubt {
    partition: u16,
    row: Row,
}

impl Shard {
    /// A shard without rows, before the first table. The shard takes `max_rows` rows at most, at about 17 bytes each.
    pub fn new(max_rows: u64) -> Self {
        Self {
            table: Arc::default(),
            own: NodeNumber::default(),
            holders: KnownHolders::default(),
            partitions: std::iter::repeat_with(HashTable::new).take(usize::from(PARTITIONS)).collect(),
            rows: 0,
            max_rows,
            doubts: HashMap::new(),
            counts: ShardCounts::default(),
        }
    }

    /// An empty shard that counts on.
    #[must_use]
    pub fn begin_again(&self) -> Self {
        Self { counts: self.counts, ..Self::new(self.max_rows) }
    }

    /// Takes a new table: the rows of partitions that have left, and of holders that have left or have started again,
    /// are gone.
    pub fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber) {
        (self.table, self.own) = (Arc::clone(table), own);
        for partition in 0..PARTITIONS {
            if !self.partitions[usize::from(partition)].is_empty() && !self.is_home_of(partition) {
                for row in std::mem::take(&mut self.partitions[usize::from(partition)]) {
                    self.holders.get_mut(row.holder).forget(row.digest);
                    self.rows -= 1;
                }
            }
        }
        let gone = self.holders.gone(table);
        self.drop_rows(&gone);
        self.holders.remove(&gone);
        let partitions = &self.partitions;
        self.doubts.retain(|doubt, _| {
            !gone.contains(&doubt.row.holder) && !partitions[usize::from(doubt.partition)].is_empty()
        });
    }

    /// Takes a holder's gained and lost chunks.
    pub fn announce(&mut self, announce: &Announce) -> Announced {
        if announce.epoch > self.table.epoch {
            return Announced::Later;
        }
        let is_known = self.table.member(announce.holder.node);
        if is_known.is_none_or(|member| member.incarnation != announce.incarnation) {
            return Announced::OtherIncarnation(self.table.epoch);
        }
        let Some(slot) = self.holders.slot(announce.holder, announce.incarnation) else {
            return Announced::Later;
        };
        match self.holders.get_mut(slot).next(announce.stream, announce.sequence) {
            Next::Known(sequence) => return Announced::Known(sequence),
            Next::Missing => return self.start_anew(),
            Next::Anew => self.drop_rows(&[slot]),
            Next::Takes => {}
        }
        for change in &announce.changes {
            self.change(slot, change.row, change.is_held);
        }
        let state = self.holders.get_mut(slot);
        let differs = announce.digest.is_some_and(|digest| digest != state.digest);
        if differs && announce.epoch == self.table.epoch {
            state.distrust();
            self.counts.differing += 1;
            return self.start_anew();
        }
        if announce.digest.is_some() && self.has_room_for_missing(slot) {
            self.holders.get_mut(slot).distrust();
            self.counts.refilled += 1;
            return self.start_anew();
        }
        Announced::Known(announce.sequence)
    }

    /// Answers who holds chunks.
    pub fn find(&self, find: &Find, now: Millis) -> Rows {
        let mut spans: Vec<RowSpan> = Vec::new();
        // The spans that end at this position so far.
        let mut open: SmallVec<[usize; MAX_FOUND_HOLDERS]> = SmallVec::new();
        for (position, key) in (0_u32..).zip(find.rows.iter().take(larder_protocol::limits::MAX_FIND_ROWS)) {
            let mut still_open = SmallVec::new();
            for holder in self.some_holders_of(key, now) {
                let span = open.iter().copied().find(|&span| spans[span].holder == holder);
                let span = span.unwrap_or_else(|| {
                    spans.push(RowSpan { from: position, to: position, holder });
                    spans.len() - 1
                });
                spans[span].to = position + 1;
                still_open.push(span);
            }
            open = still_open;
        }
        Rows { epoch: self.table.epoch, spans }
    }

    /// Hides rows whose holder said that it has no such chunks. The holder's announcements decide: a row is shown again after a
    /// new announcement, or if the holder has not announced its loss some seconds later.
    pub fn not_held(&mut self, holder: Holder, rows: &[RowKey], now: Millis) {
        let Some(slot) = self.holders.find(holder) else { return };
        for key in rows {
            let (partition, row) = (key.run.partition(), Row { digest: key.digest(), holder: slot });
            let is_here = self.find_row(partition, row);
            if is_here && self.doubts.len() < MAX_DOUBTS {
                self.doubts.insert(Doubt { partition, row }, now + DOUBT_MS);
                self.counts.repaired += 1;
            }
        }
    }

    /// Forgets old doubts.
    pub fn tick(&mut self, now: Millis) {
        self.doubts.retain(|_, until| *until > now);
    }

    /// The number of rows, with the hidden ones.
    pub fn len(&self) -> u64 {
        self.rows
    }

    /// Whether the shard has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Rows that were announced, and for which there is no room.
    pub fn missing(&self) -> u64 {
        self.holders.missing()
    }

    /// Rows that the shard can keep.
    pub fn max_rows(&self) -> u64 {
        self.max_rows
    }

    /// Holders that announce to this home.
    pub fn holders(&self) -> usize {
        self.holders.len()
    }

    /// The shard's counts.
    pub fn counts(&self) -> ShardCounts {
        self.counts
    }

    /// Bytes of the shard's tables.
    pub fn table_bytes(&self) -> usize {
        self.partitions.iter().map(HashTable::allocation_size).sum()
    }

    /// All rows that are not hidden: partition, digest and holder of each.
    pub fn rows(&self, now: Millis) -> Vec<(u16, u64, Holder)> {
        let tables = (0_u16..).zip(&self.partitions);
        let rows = tables.flat_map(|(partition, rows)| rows.iter().map(move |&row| Doubt { partition, row }));
        let shown = rows.filter(|&doubt| !self.is_doubted(doubt, now));
        shown
            .map(|Doubt { partition, row }| (partition, row.digest, self.holders.get(row.holder).holder))
            .collect()
    }

    fn is_home_of(&self, partition: u16) -> bool {
        self.table.home(partition) == Some(self.own)
    }

    fn start_anew(&mut self) -> Announced {
        self.counts.restarts += 1;
        Announced::StartAnew
    }

    fn change(&mut self, slot: HolderIndex, key: RowKey, is_held: bool) {
        let partition = key.run.partition();
        if !self.is_home_of(partition) {
            self.counts.foreign += 1;
            return;
        }
        let row = Row { digest: key.digest(), holder: slot };
        if !self.doubts.is_empty() {
            self.doubts.remove(&Doubt { partition, row });
        }
        // The sum counts all announced rows, also those left out: a row that was left out is no reason to announce everything
        // again.
        let state = self.holders.get_mut(slot);
        let rows = &mut self.partitions[usize::from(partition)];
        if is_held {
            state.digest = state.digest.wrapping_add(row.digest);
            let mut others = 0;
            for other in rows.iter_hash(row.digest).filter(|other| other.digest == key.digest()) {
                if other.holder == slot {
                    return;
                }
                others += 1;
            }
            if others >= MAX_ROW_HOLDERS {
                self.counts.crowded += 1;
                return;
            }
            if self.rows >= self.max_rows {
                self.counts.dropped += 1;
                state.missing += 1;
                return;
            }
            rows.insert_unique(row.digest, row, |row| row.digest);
            state.rows += 1;
            self.rows += 1;
        } else {
            state.digest = state.digest.wrapping_sub(row.digest);
            if let Ok(entry) = rows.find_entry(row.digest, |other| *other == row) {
                entry.remove();
                state.rows -= 1;
                self.rows -= 1;
            } else if rows.iter_hash(row.digest).filter(|other| other.digest == row.digest).count()
                < MAX_ROW_HOLDERS
            {
                // The row was left out because there was no room, not because enough others have the chunk.
                state.missing = state.missing.saturating_sub(1);
            }
        }
    }

    /// Whether rows of a holder were left out, and there is now more room than they need. With just enough room, the holder would
    /// be told to announce them again and again.
    fn has_room_for_missing(&self, slot: HolderIndex) -> bool {
        let missing = self.holders.get(slot).missing;
        missing > 0 && self.rows.saturating_add(missing) <= self.max_rows - self.max_rows / KEPT_FREE
    }

    /// As many holders of a chunk as an answer names. If there are more holders, the choice changes with time, so that each of
    /// them serves.
    fn some_holders_of(&self, key: &RowKey, now: Millis) -> SmallVec<[Holder; MAX_FOUND_HOLDERS]> {
        let mut holders: SmallVec<[Holder; MAX_FOUND_HOLDERS]> = self.holders_of(key, now).collect();
        if holders.len() > MAX_FOUND_HOLDERS {
            let place = |holder: &Holder| {
                let number = u64::from(holder.node.0) << 16 | u64::from(holder.device);
                xxh3_64_with_seed(&number.to_le_bytes(), now.0)
            };
            holders.sort_unstable_by_key(place);
            holders.truncate(MAX_FOUND_HOLDERS);
        }
        holders
    }

    fn holders_of(&self, key: &RowKey, now: Millis) -> impl Iterator<Item = Holder> {
        let (partition, digest) = (key.run.partition(), key.digest());
        let rows = self.partitions[usize::from(partition)].iter_hash(digest);
        let rows = rows.filter(move |row| row.digest == digest).copied();
        rows.filter(move |&row| !self.is_doubted(Doubt { partition, row }, now))
            .map(|row| self.holders.get(row.holder).holder)
    }

    fn is_doubted(&self, doubt: Doubt, now: Millis) -> bool {
        !self.doubts.is_empty() && self.doubts.get(&doubt).is_some_and(|&until| until > now)
    }

    fn find_row(&self, partition: u16, row: Row) -> bool {
        self.partitions[usize::from(partition)].find(row.digest, |other| *other == row).is_some()
    }

    /// Drops all rows of these holders. It looks at every row, which takes some milliseconds for a million rows. It is seldom
    /// needed.
    fn drop_rows(&mut self, slots: &[HolderIndex]) {
        let had: u64 = slots.iter().map(|&slot| self.holders.get(slot).rows).sum();
        if had > 0 {
            let is_gone = self.holders.mask(slots);
            for rows in self.partitions.iter_mut().filter(|rows| !rows.is_empty()) {
                rows.retain(|row| !is_gone[usize::from(row.holder)]);
            }
            self.rows -= had;
        }
        for &slot in slots {
            self.holders.get_mut(slot).forget_all();
        }
    }
}

/// One part in `KEPT_FREE` of the room must stay free for missing rows to be asked for.
const KEPT_FREE: u64 = 16;

/// Holders of one chunk that a home keeps: enough to read from, and few enough that a hot chunk needs no long search.
pub const MAX_ROW_HOLDERS: usize = 32;

/// Holders of one chunk that an answer names. An answer about 8,192 chunks with different holders still fits a message.
pub const MAX_FOUND_HOLDERS: usize = 8;

/// The most rows that are hidden at a time. Beyond this number, a stale row costs round trips until its holder announces the
/// loss.
const MAX_DOUBTS: usize = 4_096;

/// How long a row is hidden: longer than a living holder needs to announce a loss.
const DOUBT_MS: u64 = 5_000;

#[cfg(test)]
mod tests;
