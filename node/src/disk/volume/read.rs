//! Reads records: for orders, for the scrubber, for snapshots of the contents.

use std::collections::VecDeque;
use std::io;
use std::mem::discriminant;
use std::sync::Arc;

use larder_core::store::ids::ChunkKey;
use larder_net::seldom::Seldom;
use larder_protocol::{ChunkRef, PoolSet};
use tokio::sync::oneshot;

use super::super::format::{BlockEntry, Footer, FooterEntry, FooterTail, RecordHeader, SegmentHeader};
use super::super::io::Memory;
use super::super::log::RecordPlace;
use super::super::metrics::FoundBy;
use super::super::order::{BlockPlace, ReadAnswer, ReadOrder, SnapshotPage, Why};
use super::check::{Check, Damage};
use super::transfers::{ReadAhead, Region};
use super::{QUIET, Volume, page_bytes};

/// An order, and the channel of its result.
pub type Reading = (ReadOrder, oneshot::Sender<ReadAnswer>);

/// A record on its way into its places.
struct Arriving {
    reading: Reading,
    check: Check,
    /// The record's remaining bytes.
    left: u64,
    way: RecordCopy,
}

/// The way in which a record comes into its places.
enum RecordCopy {
    /// Straight, on the guess that the record has exactly the wanted blocks, in their order.
    Direct,
    /// Through buffers. Has the target of each block, once the header is there.
    Copied(Option<Vec<Option<usize>>>),
}

/// Gives the regions of the next read.
type NextRegions<'a> = dyn FnMut(&mut Volume, &mut VecDeque<Arriving>) -> Option<Vec<Region>> + 'a;

impl Volume {
    /// Carries reads out. While the pieces of one read are verified, those of the next read are under way. `more` is asked for
    /// further reads as soon as the last piece is under way.
    pub(super) fn read_all(
        &mut self,
        readings: Vec<Reading>,
        more: &mut dyn FnMut() -> Option<Reading>,
    ) -> io::Result<()> {
        let mut readings = VecDeque::from(readings);
        let mut arriving = VecDeque::new();
        let mut again = Vec::new();
        let mut next = |volume: &mut Self, arriving: &mut VecDeque<Arriving>| {
            while let Some(reading) = readings.pop_front().or_else(&mut *more) {
                if let Some(regions) = volume.start_read(reading, arriving) {
                    return Some(regions);
                }
            }
            None
        };
        let mut read = self.read_arriving(&mut next, &mut arriving, &mut again);
        // Either the guess or the bytes were wrong. Reading the whole record tells which.
        let mut again = VecDeque::from(again);
        while read.is_ok()
            && let Some((reading, place)) = again.pop_front()
        {
            arriving.push_back(self.arriving(reading, place, RecordCopy::Copied(None)));
            let mut region = Some(vec![self.region(place)]);
            read = self.read_arriving(&mut |_, _| region.take(), &mut arriving, &mut Vec::new());
        }
        if read.is_err() {
            self.transfers.drain();
        }
        let left = arriving.into_iter().map(|record| record.reading);
        for reading in left.chain(again.into_iter().map(|(reading, _)| reading)).chain(readings) {
            self.answer_read(reading, ReadAnswer::Closed);
        }
        read
    }

    /// Begins a read: returns the regions that it needs, or `None` if it is answered already.
    fn start_read(&mut self, reading: Reading, arriving: &mut VecDeque<Arriving>) -> Option<Vec<Region>> {
        if self.is_closed() {
            self.answer_read(reading, ReadAnswer::Closed);
            return None;
        }
        let Some(place) = self.log.find(&reading.0.key) else {
            self.answer_read(reading, ReadAnswer::NotHeld);
            return None;
        };
        let direct = self.direct_regions(place, &reading.0.destinations);
        let way = if direct.is_some() { RecordCopy::Direct } else { RecordCopy::Copied(None) };
        arriving.push_back(self.arriving(reading, place, way));
        Some(direct.unwrap_or_else(|| vec![self.region(place)]))
    }

    fn arriving(&self, reading: Reading, place: RecordPlace, way: RecordCopy) -> Arriving {
        let check = Check::new(self.storage, place, Some(reading.0.key));
        Arriving { reading, check, left: page_bytes(place.pages), way }
    }

    /// The regions of a record that has just these blocks, each read straight into its place; `None` if it has others, or
    /// they are not whole pages.
    fn direct_regions(&self, place: RecordPlace, destinations: &[BlockPlace]) -> Option<Vec<Region>> {
        let header = RecordHeader::pages_of(destinations.iter().map(|to| to.bytes.div_ceil(to.range_bytes)));
        let mut regions = vec![self.pages(place.segment, place.page, header.min(place.pages))];
        let mut left = page_bytes(place.pages.checked_sub(header)?);
        for to in destinations {
            let offset = regions.last().map(|region| region.offset + region.bytes)?;
            left = left.checked_sub(to.bytes).filter(|_| to.goes_direct(offset))?;
            let memory = Arc::clone(&to.memory);
            regions.push(Region { offset, bytes: to.bytes, to: Some((memory, to.offset)) });
        }
        (left == 0).then_some(regions)
    }

    /// Reads the regions that `next` gives.
    fn read_arriving(
        &mut self,
        next: &mut NextRegions<'_>,
        arriving: &mut VecDeque<Arriving>,
        again: &mut Vec<(Reading, RecordPlace)>,
    ) -> io::Result<()> {
        let mut ahead = ReadAhead::new(Vec::new());
        loop {
            while ahead.has_room()
                && let Some(regions) = next(self, arriving)
            {
                ahead.add(regions);
            }
            let Some(piece) = self.transfers.next_piece(&mut ahead)? else { break };
            let Some(record) = arriving.front_mut() else { break };
            match &piece.memory {
                _ if !piece.is_read => record.check.unreadable(),
                Memory::Buffer(_) => record.feed(piece.bytes()),
                Memory::Place(memory, offset) => record.check.feed_place(memory, *offset, piece.bytes as u64),
            }
            record.left -= piece.bytes as u64;
            let is_whole = record.left == 0;
            self.transfers.recycle(piece.memory);
            if is_whole && let Some(record) = arriving.pop_front() {
                again.extend(self.finish_read(record)?);
            }
        }
        Ok(())
    }

    /// Answers a read, or gives it back to be tried in another way.
    ///
    /// # Errors
    /// Fails if the drive fails too often.
    fn finish_read(&mut self, record: Arriving) -> io::Result<Option<(Reading, RecordPlace)>> {
        let Arriving { reading, check, way, .. } = record;
        let (place, checked) = (check.place(), check.finish());
        let answer = match checked {
            Ok(header)
                if matches!(way, RecordCopy::Copied(_)) || has_just(&header, &reading.0.destinations) =>
            {
                self.log.touch(&reading.0.key);
                answer(&header, reading.0.chunk, &reading.0.destinations)
            }
            Ok(_) => return Ok(Some((reading, place))),
            Err(_) if matches!(way, RecordCopy::Direct) => return Ok(Some((reading, place))),
            Err(damage) => {
                let key = reading.0.key;
                let answer = if damage == Damage::Wiped { ReadAnswer::NotHeld } else { ReadAnswer::Damaged };
                self.answer_read(reading, answer);
                return self.found_damage(&key, place, damage, FoundBy::Read).map(|()| None);
            }
        };
        if answer == ReadAnswer::Disagrees {
            // The record is useless: the asker knows the chunk with another parent or index, and may write it again.
            let key = reading.0.key;
            tracing::error!(chunk = %key.hash, "the disk has the chunk at another place in its prompt than the store: the chunk is forgotten");
            self.log.forget(&key);
            self.tell_gone(vec![key], Why::Damaged);
        }
        self.answer_read(reading, answer);
        Ok(None)
    }

    fn answer_read(&self, (_, done): Reading, answer: ReadAnswer) {
        self.metrics.answered((&answer).into());
        // If nobody waits any more, there is nobody to tell.
        drop(done.send(answer));
    }

    /// Verifies the next record, and begins again after the last. Returns its bytes, or `None` if there are no records.
    pub(crate) fn scrub_next(&mut self) -> io::Result<Option<u64>> {
        let next = self.log.scrub_after(self.scrub_at).or_else(|| self.log.scrub_after(0));
        let Some((key, place, after)) = next else { return Ok(None) };
        self.scrub_at = after;
        let region = self.region(place);
        let mut check = Check::new(self.storage, place, Some(key));
        let bytes = region.bytes;
        let mut ahead = ReadAhead::new(vec![region]);
        while let Some(piece) = self.transfers.next_piece(&mut ahead)? {
            check.feed_piece(&piece, &mut |_, _, _, _| ());
            self.transfers.recycle(piece.memory);
        }
        self.metrics.scrubbed_bytes.inc_by(bytes);
        if let Err(damage) = check.finish() {
            self.found_damage(&key, place, damage, FoundBy::Scrub)?;
        }
        Ok(Some(bytes))
    }

    /// The chunks of the segment with the next sequence number after `after`.
    pub(crate) fn snapshot(&mut self, after: u64) -> io::Result<SnapshotPage> {
        // A footer may be under way.
        self.transfers.settle()?;
        let Some((segment, is_open)) = self.log.segment_after(after) else {
            return Ok(SnapshotPage { held: Vec::new(), next: None });
        };
        let entries = if is_open {
            self.log.footer().entries
        } else {
            match self.footer_of(segment)? {
                Some(footer) => footer.entries,
                None => self.scan(segment.segment, Some(segment.sequence))?.entries,
            }
        };
        let is_held = |entry: &&FooterEntry| {
            let FooterEntry { page, pages, .. } = **entry;
            self.log.find(&entry.key()) == Some(RecordPlace { segment: segment.segment, page, pages })
        };
        let held = entries.iter().filter(is_held).map(FooterEntry::held).collect();
        Ok(SnapshotPage { held, next: Some(segment.sequence) })
    }

    /// The footer of a segment; `None` if the segment has no footer that is right and readable.
    pub(super) fn footer_of(&mut self, segment: SegmentHeader) -> io::Result<Option<Footer>> {
        let pages = self.geometry.segment_pages;
        let last = self.pages(segment.segment, pages - 1, 1);
        let Some(last) = self.transfers.read(last)? else { return Ok(None) };
        let Ok(tail) = FooterTail::decode(&last, self.storage, segment) else { return Ok(None) };
        if tail.pages() >= pages {
            return Ok(None);
        }
        let all = self.pages(segment.segment, pages - tail.pages(), tail.pages());
        let all = if tail.pages() == 1 { Some(last) } else { self.transfers.read(all)? };
        Ok(all.and_then(|all| Footer::decode(&all, &tail).ok()))
    }

    pub(super) fn region(&self, place: RecordPlace) -> Region {
        self.pages(place.segment, place.page, place.pages)
    }

    pub(super) fn pages(&self, segment: u32, page: u32, pages: u32) -> Region {
        Region { offset: self.geometry.offset(segment, page), bytes: page_bytes(pages), to: None }
    }

    /// The offset of the page with a segment's footer's end.
    pub(super) fn last_page(&self, segment: u32) -> u64 {
        self.geometry.offset(segment, self.geometry.segment_pages - 1)
    }

    /// Counts and forgets a record that is wrong or cannot be read.
    ///
    /// # Errors
    /// Fails if the drive fails too often.
    pub(super) fn found_damage(
        &mut self,
        key: &ChunkKey,
        place: RecordPlace,
        damage: Damage,
        by: FoundBy,
    ) -> io::Result<()> {
        if self.log.find(key) != Some(place) {
            // Another read of the same batch has found the damage already.
            return Ok(());
        }
        if damage == Damage::Wiped {
            self.log.forget(key);
            self.tell_gone(vec![*key], Why::Evicted);
            return Ok(());
        }
        if damage != Damage::Unreadable {
            let said = self.damaged.entry(discriminant(&damage)).or_insert_with(|| Seldom::new(QUIET));
            if let Some(more) = said.says(self.clock.elapsed()) {
                tracing::error!(chunk = %key.hash, ?damage, ?by, more, "wrong bytes on disk: the chunk is forgotten");
            }
        }
        self.log.forget(key);
        self.tell_gone(vec![*key], Why::Damaged);
        if damage == Damage::Unreadable {
            return self.found_unreadable(place.segment);
        }
        self.metrics.found_damage(by);
        self.found.wrong_bytes();
        Ok(())
    }

    /// Counts a record or page that cannot be read, and has the good records of its segment moved away.
    ///
    /// # Errors
    /// Fails if the drive fails too often.
    pub(super) fn found_unreadable(&mut self, segment: u32) -> io::Result<()> {
        if let Some(more) = self.unreadable.says(self.clock.elapsed()) {
            tracing::error!(
                segment,
                more,
                "the drive cannot read a part of the disk tier: its chunk is forgotten, the rest of its segment is moved away"
            );
        }
        self.metrics.read_errors.inc();
        self.found.unreadable();
        self.log.give_up_soon(segment);
        if self.read_budget.failed(self.clock.elapsed()) {
            return Ok(());
        }
        Err(io::Error::other("too many reads fail"))
    }
}

impl Arriving {
    fn feed(&mut self, bytes: &[u8]) {
        let destinations = &self.reading.0.destinations;
        let way = &mut self.way;
        self.check.feed(bytes, &mut |header, block, at, stretch| {
            let RecordCopy::Copied(wanted) = way else { return };
            let wanted = wanted.get_or_insert_with(|| place_blocks(header, destinations));
            if let Some(place) = wanted[block].map(|at| &destinations[at]) {
                place.copy_in(at, stretch);
            }
        });
    }
}

/// Whether a record has these blocks, in this order, and no others.
fn has_just(header: &RecordHeader, destinations: &[BlockPlace]) -> bool {
    header.blocks.len() == destinations.len()
        && header.blocks.iter().zip(destinations).all(|(block, to)| fits(to, block))
}

/// Whether a block of a record is the block that is wanted at a place.
pub(crate) fn fits(to: &BlockPlace, block: &BlockEntry) -> bool {
    (to.slice, to.pool, to.bytes, to.range_bytes) == (block.slice, block.pool, block.bytes, block.range_bytes)
}

/// The destination that each block of a record goes to, if one fits.
fn place_blocks(header: &RecordHeader, destinations: &[BlockPlace]) -> Vec<Option<usize>> {
    let position = |block| destinations.iter().position(|to| fits(to, block));
    header.blocks.iter().map(position).collect()
}

/// The answer to a read whose record is right by itself.
pub(crate) fn answer(header: &RecordHeader, chunk: ChunkRef, destinations: &[BlockPlace]) -> ReadAnswer {
    if !header.chunk.stands_with(&chunk) {
        return ReadAnswer::Disagrees;
    }
    let block_for = |place: &BlockPlace| header.blocks.iter().find(|block| fits(place, block));
    let checksums: Option<Vec<_>> =
        destinations.iter().map(|place| block_for(place).map(|block| block.checksums.clone())).collect();
    let pools = destinations.iter().fold(PoolSet::default(), |pools, to| pools.with(to.pool.into()));
    checksums.map_or(ReadAnswer::OtherBlocks, |checksums| ReadAnswer::Here { pools, checksums })
}
