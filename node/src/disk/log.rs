//! The log: decides which segment takes the next record and which is freed next, and knows where each record is.
//!
//! Pure: the log says what to write, and is told when that is done. The segments form a queue by age. The oldest segment
//! is freed as a whole. Before that, its records that were read since they were written move to the young end, up to half a
//! segment, so that each turn gains at least the other half. A segment with bytes that the drive could not read is freed
//! before its turn, and all its records move: the drive replaces unreadable sectors when they are written anew.
//!
//! **Tenants** share the disk as equals (`parts`). The records of a tenant that has clearly less than its part move, too, read or
//! not, up to half a segment; all moves together take three quarters at most. A segment that is mostly theirs goes to the young end
//! as it is.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet, PoolSpec};

use super::format::{Footer, FooterEntry, PAGE_BYTES, SEGMENTS_START, SegmentHeader};

mod index;
mod parts;

use index::Index;

/// The place of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPlace {
    /// The segment.
    pub segment: u32,
    /// The record's first page in the segment.
    pub page: u32,
    /// Pages of the record.
    pub pages: u32,
}

/// How a tier is divided into segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Segments.
    pub segments: u32,
    /// Pages of each segment.
    pub segment_pages: u32,
}

/// The place of a new record, and the numbers that go into its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// The segment.
    pub segment: SegmentHeader,
    /// The record's page in the segment.
    pub page: u32,
    /// The record's sequence.
    pub sequence: u64,
}

/// The purpose of the requested room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoomPurpose {
    /// Writing a new record. This leaves a free segment for moves.
    Write,
    /// Moving a record out of the segment that is given up.
    Move,
}

/// The next step before a record can be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogRoom {
    /// None: [`Log::place`] the record.
    Here,
    /// Sync all records, write the [`Log::footer`], call [`Log::sealed`].
    Seal,
    /// Write this header, sync it, call [`Log::opened`].
    Open(SegmentHeader),
    /// Carry out [`Log::evict_next`]. Seal the open segment first if it [must be](Log::must_seal).
    Evict,
    /// There is no room, and none can be made.
    None,
}

/// The next step of giving up a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evict {
    /// Move this record: it was read since it was written, or its segment fails.
    Move(ChunkKey, RecordPlace),
    /// Sync the moved records, then call [`Log::evicted`].
    Finish,
    /// No segment can be given up.
    Nothing,
}

/// A segment as it was found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// The segment.
    pub segment: SegmentHeader,
    /// The segment's records, in their order.
    pub entries: Vec<FooterEntry>,
    /// The page at which the log goes on in the segment; `None` if it is sealed. At most the newest segment has such a page.
    pub open_at: Option<u32>,
}

/// Segments by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentCounts {
    /// Segments in which nothing is needed.
    pub free: usize,
    /// The segment that takes records.
    pub open: usize,
    /// Full segments.
    pub sealed: usize,
}

/// The state of a tier's segments and records.
#[derive(Debug)]
pub struct Log {
    geometry: Geometry,
    index: Index,
    segments: Vec<Segment>,
    free: VecDeque<u32>,
    /// Oldest first.
    sealed: VecDeque<u32>,
    open: Option<OpenSegment>,
    evicting: Option<Evicting>,
    /// Segments given up since the last write found room.
    evictions: u32,
    /// Segments with unreadable bytes. Few.
    failing: Vec<u32>,
    segment_sequence: u64,
    record_sequence: u64,
}

#[derive(Debug, Default)]
struct Segment {
    /// 0 for a free segment.
    sequence: u64,
    /// Whether nothing in the free segment tells of an earlier use. Not known after a start.
    is_wiped: bool,
    /// Ids of the records that were committed here; some are elsewhere by now, or are gone.
    records: Vec<u32>,
}

#[derive(Debug)]
struct OpenSegment {
    segment: SegmentHeader,
    /// The page of the next record.
    page: u32,
    /// Records that have a place, committed or not.
    placed: usize,
    entries: Vec<FooterEntry>,
}

#[derive(Debug)]
struct Evicting {
    segment: u32,
    /// Position in the segment's records.
    at: usize,
    /// Pages of moved records.
    moved_pages: u64,
    /// Pages of those among them that moved because their tenant has less than its part.
    kept_pages: u64,
    /// Records that should have moved, but could not be read.
    lost: u32,
    /// For each namespace, by its number in the index, whether its records are kept.
    keeps: Vec<bool>,
}

impl Geometry {
    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        SEGMENTS_START + u64::from(self.segments) * u64::from(self.segment_pages) * PAGE_BYTES
    }

    /// The offset of a segment's page in the file.
    pub fn offset(&self, segment: u32, page: u32) -> u64 {
        SEGMENTS_START + (u64::from(segment) * u64::from(self.segment_pages) + u64::from(page)) * PAGE_BYTES
    }

    /// Pages of the largest record.
    pub fn most_pages(&self) -> u64 {
        u64::from(self.segment_pages.saturating_sub(FIRST_PAGE + Footer::pages_for(1)))
    }

    /// Whether a segment has room for a chunk with all of these slices and pools.
    pub fn has_room_for(&self, slices: u16, pools: &[PoolSpec]) -> bool {
        let slice_bytes: u64 = pools.iter().map(PoolSpec::block_bytes).fold(0, u64::saturating_add);
        let bytes = slice_bytes.saturating_mul(slices.into());
        // The header of a record has a page at least.
        bytes.div_ceil(PAGE_BYTES) < self.most_pages()
    }
}

impl Log {
    /// The log of an empty tier.
    pub fn new(geometry: Geometry) -> Self {
        Self::restore(geometry, Vec::new())
    }

    /// The log of a tier in which these segments were found. If a chunk has several records, the one written last counts.
    pub fn restore(geometry: Geometry, mut found: Vec<Recovered>) -> Self {
        let mut log = Self {
            geometry,
            index: Index::default(),
            segments: (0..geometry.segments).map(|_| Segment::default()).collect(),
            free: VecDeque::new(),
            sealed: VecDeque::new(),
            open: None,
            evicting: None,
            evictions: 0,
            failing: Vec::new(),
            segment_sequence: 0,
            record_sequence: 0,
        };
        found.sort_by_key(|found| found.segment.sequence);
        for Recovered { segment, entries, open_at } in found {
            let number = segment.segment;
            log.segment_sequence = segment.sequence;
            log.segments[number as usize].sequence = segment.sequence;
            for entry in &entries {
                log.record_sequence = log.record_sequence.max(entry.sequence);
                log.note(number, entry);
            }
            match open_at {
                Some(page) => log.open = Some(OpenSegment { segment, page, placed: entries.len(), entries }),
                None => log.is_sealed(number),
            }
        }
        log.free = (0..geometry.segments).filter(|&n| log.segments[n as usize].sequence == 0).collect();
        log
    }

    /// Skips the sequence numbers that unreadable segments may have. Otherwise the footer of an earlier use of a segment could
    /// pass for that of a later use. The time of day keeps the numbers apart from those of an earlier start that skipped some too.
    pub fn skip_sequences(&mut self, since_1970: Duration) {
        let of_this_start = (since_1970.as_micros() as u64).saturating_mul(SEQUENCES_A_MICROSECOND);
        for sequence in [&mut self.segment_sequence, &mut self.record_sequence] {
            // If the clock went back, only the distance keeps the numbers apart.
            *sequence = if of_this_start > *sequence { of_this_start } else { *sequence + SKIPPED_SEQUENCES };
        }
    }

    /// The place of a chunk's record.
    pub fn find(&self, key: &ChunkKey) -> Option<RecordPlace> {
        self.index.find(key).and_then(|id| self.index.place(id))
    }

    /// Notes that a chunk was used, so that it survives the next time its segment is given up.
    pub fn touch(&mut self, key: &ChunkKey) {
        if let Some(id) = self.index.find(key) {
            self.index.touch(id);
        }
    }

    /// Forgets a chunk; returns whether it was there.
    pub fn forget(&mut self, key: &ChunkKey) -> bool {
        let id = self.index.find(key);
        id.inspect(|&id| self.index.remove(id)).is_some()
    }

    /// The next step before a record of `pages` pages can be placed.
    pub fn room_for(&self, pages: u64, purpose: RoomPurpose) -> LogRoom {
        if pages > self.geometry.most_pages() {
            return LogRoom::None;
        }
        // The last segment takes moves first.
        if purpose == RoomPurpose::Write && self.evicting.is_some() && self.free.is_empty() {
            return LogRoom::Evict;
        }
        if let Some(open) = &self.open {
            let footer = u64::from(Footer::pages_for(open.placed + 1));
            let fits = u64::from(open.page) + pages + footer <= u64::from(self.geometry.segment_pages);
            return if fits { LogRoom::Here } else { LogRoom::Seal };
        }
        let wanted = match purpose {
            RoomPurpose::Write => 2,
            RoomPurpose::Move => 1,
        };
        match self.free.front() {
            Some(&segment) if self.free.len() >= wanted => {
                LogRoom::Open(SegmentHeader { segment, sequence: self.segment_sequence + 1 })
            }
            _ if purpose == RoomPurpose::Write && self.can_evict() => LogRoom::Evict,
            _ => LogRoom::None,
        }
    }

    /// Gives a record of `pages` pages its place. [`Self::room_for`] must have just said [`LogRoom::Here`].
    ///
    /// # Panics
    /// Panics if no segment is open, or the record does not fit.
    pub fn place(&mut self, pages: u64, purpose: RoomPurpose) -> Placed {
        if purpose == RoomPurpose::Write {
            self.evictions = 0;
        }
        let open = self.open.as_mut().expect("a record is placed where there is room");
        let placed = Placed { segment: open.segment, page: open.page, sequence: self.record_sequence + 1 };
        self.record_sequence += 1;
        open.page += u32::try_from(pages).expect("a record fits into a segment");
        open.placed += 1;
        assert!(open.page < self.geometry.segment_pages, "a record fits into its segment");
        placed
    }

    /// Notes that a placed record is synced. From now on it is found. Its segment must still be open.
    ///
    /// # Panics
    /// Panics if no segment is open.
    pub fn commit(&mut self, entry: FooterEntry) {
        let open = self.open.as_mut().expect("records are committed before their segment is sealed");
        open.entries.push(entry);
        let segment = open.segment.segment;
        self.note(segment, &entry);
    }

    /// The open segment.
    pub fn open_segment(&self) -> Option<u32> {
        self.open.as_ref().map(|open| open.segment.segment)
    }

    /// The footer of the open segment.
    ///
    /// # Panics
    /// Panics if none is open.
    pub fn footer(&self) -> Footer {
        let open = self.open.as_ref().expect("an open segment is sealed");
        Footer { segment: open.segment, end_page: open.page, entries: open.entries.clone() }
    }

    /// Free segments that are not known to be wiped.
    pub fn unwiped(&self) -> Vec<u32> {
        self.free.iter().copied().filter(|&segment| !self.segments[segment as usize].is_wiped).collect()
    }

    /// Notes that free segments are wiped.
    pub fn wiped(&mut self, segments: &[u32]) {
        segments.iter().for_each(|&segment| self.segments[segment as usize].is_wiped = true);
    }

    /// A header with the next sequence number, if no segment in use has the last number. It must be written into a free segment
    /// before the headers of free segments are wiped. Then no start gives this number, or an earlier number, again.
    pub fn mark_sequence(&mut self) -> Option<SegmentHeader> {
        let segment = *self.free.front()?;
        if self.segments.iter().any(|segment| segment.sequence == self.segment_sequence) {
            return None;
        }
        self.segment_sequence += 1;
        Some(SegmentHeader { segment, sequence: self.segment_sequence })
    }

    /// Takes records out of the list for the open segment's footer.
    pub fn take_out_of_open(&mut self, is_one: impl Fn(&FooterEntry) -> bool) {
        if let Some(open) = &mut self.open {
            open.entries.retain(|entry| !is_one(entry));
        }
    }

    /// Notes that the open segment's footer is written.
    pub fn sealed(&mut self) {
        if let Some(open) = self.open.take() {
            self.is_sealed(open.segment.segment);
        }
    }

    /// Notes that a segment gets no more records. An id may be listed several times: its record was replaced, or removed and the id
    /// used again. It must be moved once at most.
    fn is_sealed(&mut self, segment: u32) {
        let records = &mut self.segments[segment as usize].records;
        let mut listed = HashSet::with_capacity(records.len());
        records.retain(|&id| listed.insert(id));
        records.shrink_to_fit();
        self.sealed.push_back(segment);
    }

    /// Notes that a segment's new header is written.
    ///
    /// # Panics
    /// Panics if another segment is open, or this one is not the next.
    pub fn opened(&mut self, segment: SegmentHeader) {
        assert!(self.open.is_none(), "one segment is open at a time");
        assert_eq!(self.free.pop_front(), Some(segment.segment), "the segment that was longest free is next");
        self.segment_sequence = segment.sequence;
        let used = &mut self.segments[segment.segment as usize];
        (used.sequence, used.is_wiped) = (segment.sequence, false);
        self.open = Some(OpenSegment { segment, page: FIRST_PAGE, placed: 0, entries: Vec::new() });
    }

    /// Whether a segment should be given up ahead of need.
    pub fn wants_eviction(&self) -> bool {
        !self.failing.is_empty() || self.free.len() < SPARE_SEGMENTS && self.can_evict()
    }

    /// Notes that a segment has unreadable bytes: it is freed before others, and its good records are moved.
    pub fn give_up_soon(&mut self, segment: u32) {
        let is_used = self.segments[segment as usize].sequence > 0;
        if !is_used || self.failing.contains(&segment) {
            return;
        }
        self.failing.push(segment);
        if let Some(evicting) = self.evicting.as_mut().filter(|evicting| evicting.segment == segment) {
            // Records that were passed over must be moved, too.
            evicting.at = 0;
        }
    }

    /// Whether the open segment is the next to be given up, and must be sealed first.
    pub fn must_seal(&self) -> bool {
        self.evicting.is_none()
            && self.open.as_ref().is_some_and(|open| self.failing.contains(&open.segment.segment))
    }

    /// The next step of giving up a segment. Begins with the next segment if none is being given up. `owner` gives the tenant of a
    /// namespace.
    pub fn evict_next<Owner: Eq + Hash>(&mut self, owner: impl Fn(&Fingerprint) -> Option<Owner>) -> Evict {
        if self.evicting.is_none() {
            // If no write found room for so long, records of all tenants go.
            let is_in_vain = self.evictions as usize > self.segments.len();
            let keeps = if is_in_vain { Vec::new() } else { parts::keeps(&self.index.pages(owner)) };
            let Some(segment) = self.next_to_evict(&keeps) else { return Evict::Nothing };
            self.evictions = self.evictions.saturating_add(1);
            let (moved_pages, kept_pages) = (0, 0);
            self.evicting = Some(Evicting { segment, at: 0, moved_pages, kept_pages, lost: 0, keeps });
        }
        let Some(evicting) = self.evicting.as_mut() else { return Evict::Nothing };
        let moves_all = self.failing.contains(&evicting.segment);
        let half = u64::from(self.geometry.segment_pages) / 2;
        let records = &self.segments[evicting.segment as usize].records;
        while let Some(&id) = records.get(evicting.at) {
            evicting.at += 1;
            let Some(place) = self.index.place(id).filter(|place| place.segment == evicting.segment) else {
                continue;
            };
            let pages = u64::from(place.pages);
            let moved_pages = evicting.moved_pages + pages;
            // Hot records and those of tenants have half a segment each, and both together three quarters.
            let is_hot = self.index.is_hot(id) && moved_pages - evicting.kept_pages <= half;
            let is_kept =
                !is_hot && is_kept(&evicting.keeps, &self.index, id) && evicting.kept_pages + pages <= half;
            let is_moved = match moves_all {
                true => evicting.lost < MOST_LOST,
                false => (is_hot || is_kept) && moved_pages <= half + half / 2,
            };
            if is_moved {
                evicting.moved_pages = moved_pages;
                evicting.kept_pages += if is_kept { pages } else { 0 };
                return Evict::Move(self.index.key(id), place);
            }
        }
        Evict::Finish
    }

    /// Counts a record that should have moved, but could not be read or was wrong.
    pub fn could_not_move(&mut self) {
        if let Some(evicting) = &mut self.evicting {
            evicting.lost += 1;
        }
    }

    /// Notes that the moved records are synced, and frees the segment. Returns the chunks that are gone with it.
    pub fn evicted(&mut self) -> Vec<ChunkKey> {
        let Some(Evicting { segment, .. }) = self.evicting.take() else { return Vec::new() };
        let records = std::mem::take(&mut self.segments[segment as usize].records);
        let mut gone = Vec::new();
        for id in records {
            if self.index.place(id).is_some_and(|place| place.segment == segment) {
                gone.push(self.index.key(id));
                self.index.remove(id);
            }
        }
        self.segments[segment as usize].sequence = 0;
        self.failing.retain(|&failing| failing != segment);
        self.free.push_back(segment);
        gone
    }

    /// The segment with the next sequence number after `after`, and whether it is open.
    pub fn segment_after(&self, after: u64) -> Option<(SegmentHeader, bool)> {
        let used = (0..).zip(&self.segments).filter(|(_, segment)| segment.sequence > after);
        let (number, segment) = used.min_by_key(|(_, segment)| segment.sequence)?;
        let is_open = self.open.as_ref().is_some_and(|open| open.segment.segment == number);
        Some((SegmentHeader { segment: number, sequence: segment.sequence }, is_open))
    }

    /// The record that the scrubber looks at after position `from`, and the position after it.
    pub fn scrub_after(&self, from: u32) -> Option<(ChunkKey, RecordPlace, u32)> {
        let id = self.index.next(from)?;
        Some((self.index.key(id), self.index.place(id)?, id + 1))
    }

    /// The namespaces that have records, those with the most first.
    pub fn namespaces(&self) -> Vec<Fingerprint> {
        self.index.namespaces()
    }

    /// Records.
    pub fn records(&self) -> usize {
        self.index.len()
    }

    /// Segments by state; a segment that is being freed still counts as sealed.
    pub fn counts(&self) -> SegmentCounts {
        SegmentCounts {
            free: self.free.len(),
            open: usize::from(self.open.is_some()),
            sealed: self.sealed.len() + usize::from(self.evicting.is_some()),
        }
    }

    /// Bytes of the file that records have taken, including unneeded records until their segment is freed.
    pub fn used_bytes(&self) -> u64 {
        let open = self.open.as_ref().map_or(0, |open| u64::from(open.page));
        let full = self.counts().sealed as u64 * u64::from(self.geometry.segment_pages);
        (full + open) * PAGE_BYTES
    }

    /// Bytes of memory that the log takes.
    pub fn memory_bytes(&self) -> usize {
        let lists: usize = self.segments.iter().map(|segment| segment.records.capacity() * 4).sum();
        self.index.memory_bytes() + lists + self.segments.len() * size_of::<Segment>()
    }

    fn can_evict(&self) -> bool {
        self.evicting.is_some() || !self.sealed.is_empty()
    }

    /// Takes the next segment to free out of the queue: a failing one, if there is room for its records, else the oldest that is
    /// not mostly kept. Older segments go to the young end.
    fn next_to_evict(&mut self, keeps: &[bool]) -> Option<u32> {
        let failing = self.sealed.iter().position(|segment| self.failing.contains(segment));
        if let Some(failing) = failing.filter(|_| !self.free.is_empty() || self.sealed.len() == 1) {
            return self.sealed.remove(failing);
        }
        let half = u64::from(self.geometry.segment_pages) / 2;
        let looked_at = self.sealed.len().min(if keeps.contains(&true) { MOST_LOOKED_AT } else { 1 });
        let kept = |at: &usize| self.kept_pages(self.sealed[*at], keeps);
        let found = (0..looked_at).find(|at| kept(at) <= half);
        let passed = found.or_else(|| (0..looked_at).min_by_key(kept))?;
        self.sealed.rotate_left(passed);
        self.sealed.pop_front()
    }

    /// Pages of a segment's records that are kept.
    fn kept_pages(&self, segment: u32, keeps: &[bool]) -> u64 {
        let records = self.segments[segment as usize].records.iter();
        let kept = records.filter(|&&id| is_kept(keeps, &self.index, id));
        let places = kept.filter_map(|&id| self.index.place(id).filter(|place| place.segment == segment));
        places.map(|place| u64::from(place.pages)).sum()
    }

    fn note(&mut self, segment: u32, entry: &FooterEntry) {
        let key = ChunkKey { fingerprint: entry.fingerprint, hash: entry.chunk.hash };
        let id = self.index.insert(&key, RecordPlace { segment, page: entry.page, pages: entry.pages });
        self.segments[segment as usize].records.push(id);
    }
}

impl FooterEntry {
    /// The key of the record.
    pub fn key(&self) -> ChunkKey {
        ChunkKey { fingerprint: self.fingerprint, hash: self.chunk.hash }
    }

    /// The chunk, as it is to be announced, with the pools of its blocks.
    pub fn held(&self) -> (Fingerprint, ChunkRef, PoolSet) {
        (self.fingerprint, self.chunk, self.pools)
    }
}

/// Whether the namespace of a record keeps its records.
fn is_kept(keeps: &[bool], index: &Index, id: u32) -> bool {
    keeps.get(index.namespace(id)).copied().unwrap_or_default()
}

/// The page of a segment at which its first record begins.
pub const FIRST_PAGE: u32 = 1;

/// Segments that are kept free, so that few writes wait until one is given up.
const SPARE_SEGMENTS: usize = 2;

/// Segments that are looked at for one that is not mostly kept. A look visits all records of the segment: all looks together take
/// milliseconds.
const MOST_LOOKED_AT: usize = 64;

/// Unreadable records of a failing segment after which its other records are given up, too: a drive may take seconds for each.
const MOST_LOST: u32 = 8;

/// Sequence numbers to skip: more than the segments that a tier begins, or the records that it writes, between two starts.
const SKIPPED_SEQUENCES: u64 = 1 << 40;

/// More than a drive takes. The product fits until the year 2540.
const SEQUENCES_A_MICROSECOND: u64 = 1_024;

/// Segments that the log needs: the open one, a free one for moves, one that is being freed, one spare.
pub const MIN_SEGMENTS: u32 = 4;

#[cfg(test)]
mod tests;
