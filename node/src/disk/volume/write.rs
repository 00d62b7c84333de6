//! Writing records, and making room for them.

use std::io;

use larder_core::store::ids::ChunkKey;
use tokio::sync::oneshot;

use super::super::format::{Footer, FooterEntry, PAGE_BYTES, RecordHeader, SegmentHeader, wiped_record};
use super::super::log::{Evict, FIRST_PAGE, LogRoom, RecordPlace, RoomPurpose};
use super::super::metrics::FoundBy;
use super::super::order::{Source, Why, WriteAnswer, WriteOrder};
use super::check::Check;
use super::transfers::ReadAhead;
use super::{EMPTY_PAGE, Volume, page_bytes};

/// An order, and the channel of its result.
pub type Writing = (WriteOrder, oneshot::Sender<WriteAnswer>);

/// A record that is written and not yet synced.
pub(super) struct Pending {
    entry: FooterEntry,
    /// `None` for a moved record: nobody waits for it.
    done: Option<oneshot::Sender<WriteAnswer>>,
    /// The place from which the record was moved. The chunk's record must still be there.
    moved_from: Option<RecordPlace>,
}

impl Volume {
    /// Writes a chunk. The answer comes when the record is synced.
    pub(super) fn write(&mut self, (order, done): Writing) -> io::Result<()> {
        let key = order.key();
        if !order.replaces && self.log.find(&key).is_some() {
            self.answer_write(done, WriteAnswer::AlreadyThere);
            return Ok(());
        }
        let pages = RecordHeader::record_pages_for(&order.entries);
        match self.make_room(pages, RoomPurpose::Write) {
            Ok(true) => {}
            Ok(false) => {
                self.answer_write(done, WriteAnswer::TooLarge);
                return Ok(());
            }
            Err(error) => {
                self.answer_write(done, WriteAnswer::Closed);
                return Err(error);
            }
        }
        let WriteOrder { fingerprint, chunk, sources, entries, .. } = order;
        let placed = self.log.place(pages, RoomPurpose::Write);
        let header = RecordHeader {
            segment: placed.segment,
            page: placed.page,
            sequence: placed.sequence,
            fingerprint,
            chunk,
            blocks: entries,
        };
        // The record is listed for the sync before anything can fail, so that its caller is told.
        self.pending.push(Pending { entry: header.footer_entry(), done: Some(done), moved_from: None });
        self.append_record(&header, &sources)
    }

    fn append_record(&mut self, header: &RecordHeader, sources: &[Source]) -> io::Result<()> {
        let start = self.geometry.offset(header.segment.segment, header.page);
        let encoded = header.encode(self.storage);
        self.transfers.append_bytes(start, &encoded)?;
        let mut offset = start + encoded.len() as u64;
        for Source { place, .. } in sources {
            if place.goes_direct(offset) {
                self.transfers.append_place(offset, &place.memory, place.offset, place.bytes)?;
                offset += place.bytes;
                continue;
            }
            self.transfers.append(offset, place.bytes, &mut |out, done| {
                let copied = place.memory.copy_out(place.offset + done, out);
                debug_assert!(copied.is_ok(), "places are checked when the order is made");
            })?;
            offset += place.bytes;
        }
        self.transfers.append_zeros(offset)
    }

    /// Syncs the written records, and answers all their writers. One sync serves them all.
    pub(super) fn commit(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.transfers.sync()?;
        let mut in_vain = Vec::new();
        for Pending { entry, done, moved_from } in std::mem::take(&mut self.pending) {
            if moved_from.is_none_or(|from| self.log.find(&entry.key()) == Some(from)) {
                self.log.commit(entry);
            } else {
                in_vain
                    .extend(self.log.open_segment().map(|segment| self.geometry.offset(segment, entry.page)));
            }
            if let Some(done) = done {
                self.answer_write(done, WriteAnswer::Durable);
            }
        }
        // These chunks were purged or written anew while their records moved: no start may find the moved records.
        let wiped = wiped_record(self.storage);
        in_vain.into_iter().try_for_each(|record| self.transfers.append_bytes(record, &wiped))
    }

    /// Tells all waiting callers that nothing is written any more.
    pub(super) fn give_up_pending(&mut self) {
        self.transfers.drain();
        for done in std::mem::take(&mut self.pending).into_iter().filter_map(|pending| pending.done) {
            self.answer_write(done, WriteAnswer::Closed);
        }
    }

    pub(super) fn answer_write(&self, done: oneshot::Sender<WriteAnswer>, answer: WriteAnswer) {
        self.metrics.answered(answer.into());
        // If nobody waits any more, there is nobody to tell.
        let _ = done.send(answer);
    }

    /// Makes room for a record of `pages`; returns whether there is room.
    fn make_room(&mut self, pages: u64, purpose: RoomPurpose) -> io::Result<bool> {
        loop {
            match self.log.room_for(pages, purpose) {
                LogRoom::Here => return Ok(true),
                LogRoom::None => return Ok(false),
                LogRoom::Seal => self.seal()?,
                LogRoom::Open(header) => {
                    self.write_header(&header)?;
                    self.log.opened(header);
                }
                LogRoom::Evict => self.evict_step()?,
            }
        }
    }

    /// Begins a use of a segment. Then no start takes the segment for empty, though its header may become unreadable.
    pub(super) fn write_header(&mut self, header: &SegmentHeader) -> io::Result<()> {
        let head = self.geometry.offset(header.segment, 0);
        self.transfers.append_bytes(head, &header.encode(self.storage))?;
        self.transfers.append_bytes(self.last_page(header.segment), &EMPTY_PAGE)?;
        // Synced before any record is written here: a header older than its records would hide them.
        self.transfers.sync()
    }

    /// Writes the footer of the open segment. It names only synced records.
    fn seal(&mut self) -> io::Result<()> {
        self.commit()?;
        let footer = self.log.footer();
        self.write_footer(&footer)?;
        self.log.sealed();
        Ok(())
    }

    pub(super) fn write_footer(&mut self, footer: &Footer) -> io::Result<()> {
        let encoded = footer.encode(self.storage);
        let pages = (encoded.len() as u64 / PAGE_BYTES) as u32;
        let page = self.geometry.segment_pages - pages;
        debug_assert!(page >= footer.end_page.max(FIRST_PAGE), "the footer has its place behind the records");
        self.transfers.append_bytes(self.geometry.offset(footer.segment.segment, page), &encoded)
    }

    /// One step of freeing a segment: moves one record, or ends the segment.
    pub(crate) fn evict_step(&mut self) -> io::Result<()> {
        if self.log.must_seal() {
            self.seal()?;
        }
        match self.log.evict_next(|namespace| self.owners.of(namespace)) {
            Evict::Move(key, place) => self.move_record(key, place),
            Evict::Finish => {
                self.commit()?;
                let gone = self.log.evicted();
                self.metrics.evicted.inc_by(gone.len() as u64);
                self.tell_gone(gone, Why::Evicted);
                Ok(())
            }
            Evict::Nothing => Ok(()),
        }
    }

    /// Writes a record again at the young end. Without room the record is lost with its segment.
    fn move_record(&mut self, key: ChunkKey, from: RecordPlace) -> io::Result<()> {
        if !self.make_room(u64::from(from.pages), RoomPurpose::Move)? || self.log.find(&key) != Some(from) {
            return Ok(());
        }
        let mut check = Check::new(self.storage, from, Some(key));
        let mut ahead = ReadAhead::new(vec![self.region(from)]);
        let mut moved = None;
        while let Some(piece) = self.transfers.next_piece(&mut ahead)? {
            let mut payload = Vec::new();
            check.feed_piece(&piece, &mut |_, _, _, stretch| payload.extend_from_slice(stretch));
            self.transfers.recycle(piece.memory);
            if moved.is_none()
                && let Some(header) = check.header()
            {
                let placed = self.log.place(u64::from(from.pages), RoomPurpose::Move);
                let (segment, page, sequence) = (placed.segment, placed.page, placed.sequence);
                let header = RecordHeader { segment, page, sequence, ..header.clone() };
                let start = self.geometry.offset(segment.segment, page);
                let encoded = header.encode(self.storage);
                self.transfers.append_bytes(start, &encoded)?;
                moved = Some((header.footer_entry(), start + encoded.len() as u64));
            }
            if let Some((_, at)) = &mut moved {
                self.transfers.append_bytes(*at, &payload)?;
                *at += payload.len() as u64;
            }
        }
        self.finish_move(key, from, check, moved)
    }

    fn finish_move(
        &mut self,
        key: ChunkKey,
        from: RecordPlace,
        check: Check,
        moved: Option<(FooterEntry, u64)>,
    ) -> io::Result<()> {
        if let Some((_, end)) = moved {
            // Even if the payload was wrong, the next record begins on a page.
            self.transfers.append_zeros(end)?;
        }
        match (check.finish(), moved) {
            (Ok(_), Some((entry, _))) => {
                self.metrics.moved_bytes.inc_by(page_bytes(from.pages));
                self.pending.push(Pending { entry, done: None, moved_from: Some(from) });
            }
            (Err(damage), _) => {
                self.log.could_not_move();
                self.found_damage(&key, from, damage, FoundBy::Move)?;
            }
            (Ok(_), None) => {}
        }
        Ok(())
    }
}
