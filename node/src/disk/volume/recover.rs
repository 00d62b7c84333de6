//! Finds the records on disk at the start.
//!
//! A sealed segment's footer lists its records; nothing else of the segment is read. A segment without a right footer was
//! open or is damaged, and is searched page by page. A record counts only when its payload is right too, so that a
//! half-written record of a killed process is never found later. Unreadable pages count as empty; the good records of their
//! segment are moved away. A segment without a right header is empty if a purge wiped its last page.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use super::super::format::{Footer, FooterEntry, PAGE_BYTES, RecordHeader, SegmentHeader, wiped_record};
use super::super::log::{FIRST_PAGE, Log, RecordPlace, Recovered};
use super::super::metrics::FoundBy;
use super::check::Check;
use super::{Volume, page_bytes};

/// The result of a search through a segment.
pub(super) struct Scanned {
    sequence: u64,
    pub(super) entries: Vec<FooterEntry>,
    end_page: u32,
    /// Pages that could not be read.
    pub(super) unreadable: u32,
}

/// A segment's pages, read some at a time.
struct ReadAhead {
    segment: u32,
    first: u32,
    bytes: Vec<u8>,
    unreadable: u32,
}

impl Volume {
    /// Finds the records on disk. Open segments are closed, except the newest.
    pub(super) fn recover(&mut self) -> io::Result<Log> {
        let mut sealed = Vec::new();
        let mut unsealed = Vec::new();
        let mut failing = Vec::new();
        for segment in 0..self.geometry.segments {
            let head = self.pages(segment, 0, 1);
            let head = self.transfers.read(head)?;
            if head.as_ref().is_some_and(|head| head.iter().all(|&byte| byte == 0)) {
                continue;
            }
            if head.is_none() {
                failing.push(segment);
                self.found_unreadable(segment)?;
            }
            let header = head.and_then(|head| SegmentHeader::decode(&head, self.storage, segment).ok());
            if let Some(header) = header
                && let Some(footer) = self.footer_of(header)?
            {
                let is_within = |entry: &FooterEntry| entry.is_within(self.geometry.segment_pages);
                let entries = footer.entries.into_iter().filter(is_within).collect();
                sealed.push(Recovered { segment: header, entries, open_at: None });
            } else if header.is_none() && self.is_wiped(segment)? {
                // The header may have had the last sequence number.
                failing.push(segment);
            } else {
                let scanned = self.scan(segment, header.map(|header| header.sequence))?;
                if scanned.unreadable > 0 {
                    failing.push(segment);
                }
                unsealed.push((segment, scanned));
            }
        }
        let newest = sealed.iter().map(|sealed| sealed.segment.sequence);
        let newest = newest.chain(unsealed.iter().map(|(_, scanned)| scanned.sequence)).max();
        for (segment, scanned) in unsealed.into_iter().filter(|(_, scanned)| scanned.sequence > 0) {
            let newest = newest.filter(|_| !failing.contains(&segment));
            sealed.push(self.close_scanned(segment, scanned, newest)?);
        }
        let mut log = Log::restore(self.geometry, sealed);
        if !failing.is_empty() {
            log.skip_sequences(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        }
        failing.into_iter().for_each(|segment| log.give_up_soon(segment));
        Ok(log)
    }

    /// Writes the missing footer of a segment that had to be searched, so that the next start need not search it. The segment
    /// with sequence `newest` stays open.
    fn close_scanned(
        &mut self,
        segment: u32,
        scanned: Scanned,
        newest: Option<u64>,
    ) -> io::Result<Recovered> {
        let Scanned { sequence, entries, end_page, .. } = scanned;
        let header = SegmentHeader { segment, sequence };
        self.write_header(&header)?;
        let mut recovered = Recovered { segment: header, entries, open_at: Some(end_page) };
        if Some(sequence) != newest {
            let entries = std::mem::take(&mut recovered.entries);
            let footer = Footer { segment: header, end_page, entries };
            self.write_footer(&footer)?;
            recovered = Recovered { segment: header, entries: footer.entries, open_at: None };
        }
        Ok(recovered)
    }

    /// Whether a purge wiped the segment, and no use of it began since.
    fn is_wiped(&mut self, segment: u32) -> io::Result<bool> {
        let last = self.pages(segment, self.geometry.segment_pages - 1, 1);
        let last = self.transfers.read(last)?;
        Ok(last.is_some_and(|last| last == wiped_record(self.storage)))
    }

    /// Searches a segment for the records of its use `sequence`, or of the last use that left any.
    pub(super) fn scan(&mut self, segment: u32, sequence: Option<u64>) -> io::Result<Scanned> {
        let mut scanned = Scanned {
            sequence: sequence.unwrap_or(0),
            entries: Vec::new(),
            end_page: FIRST_PAGE,
            unreadable: 0,
        };
        let mut window = ReadAhead { segment, first: 0, bytes: Vec::new(), unreadable: 0 };
        let mut page = FIRST_PAGE;
        let mut damaged = 0;
        while page < self.geometry.segment_pages {
            let is_asked_for = |header: &RecordHeader| match sequence {
                Some(right) => header.segment.sequence == right,
                None => header.segment.sequence >= scanned.sequence,
            };
            let Some(header) = self.record_at(&mut window, page)?.filter(is_asked_for) else {
                page += 1;
                continue;
            };
            let entry = header.footer_entry();
            if !self.is_right(&mut window, segment, &entry)? {
                damaged += 1;
                page += 1;
                continue;
            }
            if header.segment.sequence > scanned.sequence {
                scanned.sequence = header.segment.sequence;
                scanned.entries.clear();
            }
            page += entry.pages;
            scanned.end_page = page;
            scanned.entries.push(entry);
        }
        (0..damaged).for_each(|_| self.metrics.found_damage(FoundBy::Recovery));
        scanned.unreadable = window.unreadable;
        let (records, unreadable) = (scanned.entries.len(), window.unreadable);
        tracing::info!(segment, records, damaged, unreadable, "a segment had to be searched");
        Ok(scanned)
    }

    /// The header of the record that begins at a page.
    fn record_at(&mut self, window: &mut ReadAhead, page: u32) -> io::Result<Option<RecordHeader>> {
        let first = window.from(self, page, 1)?;
        let Ok(pages) = RecordHeader::peek_pages(first) else { return Ok(None) };
        if pages > self.geometry.segment_pages - page {
            return Ok(None);
        }
        let bytes = &window.from(self, page, pages)?[..page_bytes(pages) as usize];
        let header = RecordHeader::decode(bytes, self.storage).ok();
        let end = u64::from(self.geometry.segment_pages - page);
        let stands_here = |header: &RecordHeader| {
            (header.segment.segment, header.page) == (window.segment, page) && header.record_pages() <= end
        };
        Ok(header.filter(stands_here))
    }

    /// Whether a record's payload is right.
    fn is_right(&mut self, window: &mut ReadAhead, segment: u32, entry: &FooterEntry) -> io::Result<bool> {
        let place = RecordPlace { segment, page: entry.page, pages: entry.pages };
        let mut check = Check::new(self.storage, place, Some(entry.key()));
        let (mut page, end) = (entry.page, entry.page + entry.pages);
        while page < end {
            let bytes = window.from(self, page, 1)?;
            let pages = ((bytes.len() as u64 / PAGE_BYTES) as u32).min(end - page);
            check.feed(&bytes[..page_bytes(pages) as usize], &mut |_, _, _, _| ());
            page += pages;
        }
        Ok(check.finish().is_ok())
    }
}

impl ReadAhead {
    /// The bytes from `page` on, at least `pages` pages of them.
    fn from(&mut self, volume: &mut Volume, page: u32, pages: u32) -> io::Result<&[u8]> {
        let has = (self.bytes.len() as u64 / PAGE_BYTES) as u32;
        if page < self.first || page + pages > self.first + has {
            let most = (volume.geometry.segment_pages - page).min(pages.max(WINDOW_PAGES));
            let region = volume.pages(self.segment, page, most);
            self.bytes = match volume.transfers.read(region)? {
                Some(bytes) => bytes,
                None => self.page_by_page(volume, page, most)?,
            };
            self.first = page;
        }
        Ok(&self.bytes[page_bytes(page - self.first) as usize..])
    }

    /// The readable pages among these; zeros for the others.
    fn page_by_page(&mut self, volume: &mut Volume, page: u32, pages: u32) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(page_bytes(pages) as usize);
        for page in page..page + pages {
            let region = volume.pages(self.segment, page, 1);
            // A drive may take seconds for each page that fails.
            let is_tried = self.unreadable < MOST_UNREADABLE;
            let read = if is_tried { volume.transfers.read(region)? } else { None };
            if is_tried && read.is_none() {
                self.unreadable += 1;
                volume.found_unreadable(self.segment)?;
            }
            bytes.extend(read.unwrap_or_else(|| vec![0; PAGE_BYTES as usize]));
        }
        Ok(bytes)
    }
}

/// Pages that are read at a time.
const WINDOW_PAGES: u32 = 2_048;

/// Unreadable pages of a segment after which single pages are no longer tried.
const MOST_UNREADABLE: u32 = 8;
