//! Purges of the disk: removes records so that no start finds them again.
//!
//! A chunk may have records in several segments; the last record counts. A purge wipes the first page of each of the chunk's
//! records, a segment at a time, so that no search through a segment finds them. Then it takes the chunk out of the segment's
//! footer: a purge that ends half way finds in the footer what it still has to wipe when it is repeated. The rest of a record's
//! bytes stays on the drive until it is overwritten, and cannot be told from free space. In the end the first and the last page of
//! each free segment are wiped, since a start would believe what an earlier use left there; each of the two pages alone tells a
//! start that the segment is empty. One free segment may get a header with a later sequence number instead. Then no start gives a
//! number again whose footer may still be somewhere.

use std::io;

use larder_protocol::purge::PurgeMode;

use super::super::format::{Footer, FooterEntry, wiped_record};
use super::super::log::{Log, RecordPlace};
use super::super::order::{DiskPurge, PurgedSegment};
use super::recover::Scanned;
use super::{EMPTY_PAGE, Volume};

impl Volume {
    /// Purges the segment with the next sequence number after `after`.
    pub(super) fn purge(&mut self, purge: &DiskPurge, after: u64) -> io::Result<PurgedSegment> {
        // The log does not have records that are still being written, and a footer may be under way.
        self.commit()?;
        self.transfers.settle()?;
        let Some((segment, is_open)) = self.log.segment_after(after) else {
            return self.wipe_free(purge.mode, after);
        };
        let number = segment.segment;
        let footer = if is_open { Some(self.log.footer()) } else { self.footer_of(segment)? };
        let has_footer = footer.is_some() && !is_open;
        let (end_page, entries, unreadable) = match footer {
            Some(Footer { end_page, entries, .. }) => (end_page, entries, 0),
            None => {
                let Scanned { entries, unreadable, .. } = self.scan(number, Some(segment.sequence))?;
                (0, entries, unreadable)
            }
        };
        let (purged, kept): (Vec<FooterEntry>, Vec<FooterEntry>) =
            entries.into_iter().partition(|entry| purge.keys.has(&entry.key()));
        let is_last = |log: &Log, entry: &FooterEntry| {
            let place = RecordPlace { segment: number, page: entry.page, pages: entry.pages };
            log.find(&entry.key()) == Some(place)
        };
        let records = purged.iter().filter(|entry| is_last(&self.log, entry)).count() as u64;
        let answer = PurgedSegment { records, unreadable, next: Some(segment.sequence) };
        if purge.mode == PurgeMode::Count || purged.is_empty() {
            return Ok(answer);
        }
        if is_open {
            self.log.take_out_of_open(|entry| purge.keys.has(&entry.key()));
        }
        let wiped = wiped_record(self.storage);
        for entry in purged {
            // A later record of the chunk counts, and goes with its own segment.
            if is_last(&self.log, &entry) {
                self.log.forget(&entry.key());
            }
            self.transfers.append_bytes(self.geometry.offset(number, entry.page), &wiped)?;
        }
        self.transfers.sync()?;
        if has_footer {
            self.write_footer(&Footer { segment, end_page, entries: kept })?;
            self.transfers.sync()?;
        }
        Ok(answer)
    }

    /// Wipes free segments that are not wiped yet, some at a time, so that reads do not wait for all of them.
    fn wipe_free(&mut self, mode: PurgeMode, after: u64) -> io::Result<PurgedSegment> {
        if mode == PurgeMode::Count {
            return Ok(PurgedSegment::default());
        }
        let mut unwiped = self.log.unwiped();
        let mark = if unwiped.is_empty() { None } else { self.log.mark_sequence() };
        if let Some(mark) = mark {
            let head = self.geometry.offset(mark.segment, 0);
            self.transfers.append_bytes(head, &mark.encode(self.storage))?;
            self.transfers.sync()?;
        }
        let is_more = unwiped.len() > MOST_WIPED;
        unwiped.truncate(MOST_WIPED);
        let wiped = wiped_record(self.storage);
        for &segment in &unwiped {
            if mark.is_none_or(|mark| mark.segment != segment) {
                self.transfers.append_bytes(self.geometry.offset(segment, 0), &EMPTY_PAGE)?;
            }
            self.transfers.append_bytes(self.last_page(segment), &wiped)?;
        }
        self.transfers.sync()?;
        self.log.wiped(&unwiped);
        Ok(PurgedSegment { next: is_more.then_some(after), ..PurgedSegment::default() })
    }
}

/// Free segments that are wiped at a time.
const MOST_WIPED: usize = 1_024;
