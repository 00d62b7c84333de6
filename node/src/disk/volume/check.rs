//! Verifies a record's bytes as they come.

use larder_core::store::ids::ChunkKey;
use larder_protocol::checksum::RangeChecksum;

use super::super::format::{FormatError, PAGE_BYTES, RecordHeader, StorageId, wiped_record};
use super::super::log::RecordPlace;
use super::transfers::ReadPart;
use crate::arena::{ExtentMemory, OutOfBounds};

/// Takes a record's bytes in order, and in the end says whether they are right.
pub(crate) struct Check {
    storage: StorageId,
    place: RecordPlace,
    /// The expected key of the header; `None` if any record will do.
    key: Option<ChunkKey>,
    state: CheckPhase,
}

enum CheckPhase {
    /// Bytes of the header so far.
    Header(Vec<u8>),
    Payload(Box<Payload>),
    Damaged(Damage),
}

struct Payload {
    header: RecordHeader,
    /// The present block.
    block: usize,
    at: u64,
    range: RangeChecksum,
    range_number: usize,
}

/// The fault of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    /// A purge wiped the record, and ended before it took the record out of its footer.
    Wiped,
    /// The header is not valid.
    Header(FormatError),
    /// The header belongs to another record.
    Key,
    /// A layer range has a wrong checksum, or there are too few bytes.
    Payload,
    /// The drive cannot read the record.
    Unreadable,
}

/// Receives the header, a block's number, an offset in the block, and the bytes there. The bytes may still turn out wrong.
pub(crate) type Sink<'a> = dyn FnMut(&RecordHeader, usize, u64, &[u8]) + 'a;

/// Adds a stretch (start, count) of the fed bytes to the range's checksum.
type Add<'a> = dyn FnMut(&mut Payload, u64, u64) -> Result<(), OutOfBounds> + 'a;

impl Check {
    pub(crate) fn new(storage: StorageId, place: RecordPlace, key: Option<ChunkKey>) -> Self {
        Self { storage, place, key, state: CheckPhase::Header(Vec::new()) }
    }

    /// Takes the bytes that follow.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], sink: &mut Sink<'_>) {
        if let CheckPhase::Header(so_far) = &mut self.state {
            match take_header(so_far, &mut bytes, self.storage) {
                Ok(None) => {}
                Ok(Some(header)) => self.state = self.begin(header),
                Err(error) => {
                    let is_wiped = *so_far == wiped_record(self.storage);
                    let damage = if is_wiped { Damage::Wiped } else { Damage::Header(error) };
                    self.state = CheckPhase::Damaged(damage);
                }
            }
        }
        self.feed_payload(bytes.len() as u64, &mut |payload, from, count| {
            let stretch = &bytes[from as usize..][..count as usize];
            payload.range.update(stretch);
            sink(&payload.header, payload.block, payload.at, stretch);
            Ok(())
        });
    }

    /// Takes the piece that follows.
    pub(super) fn feed_piece(&mut self, piece: &ReadPart, sink: &mut Sink<'_>) {
        if piece.is_read { self.feed(piece.bytes(), sink) } else { self.unreadable() }
    }

    /// Takes the bytes of the payload that follow, in place in the arena.
    pub(crate) fn feed_place(&mut self, memory: &ExtentMemory, offset: u64, bytes: u64) {
        if matches!(self.state, CheckPhase::Header(_)) {
            self.state = CheckPhase::Damaged(Damage::Payload);
        }
        self.feed_payload(bytes, &mut |payload, from, count| {
            memory.add_to(&mut payload.range, offset + from, count)
        });
    }

    /// Notes that the drive cannot read the bytes that follow.
    pub(super) fn unreadable(&mut self) {
        self.state = CheckPhase::Damaged(Damage::Unreadable);
    }

    fn feed_payload(&mut self, bytes: u64, add: &mut Add<'_>) {
        if let CheckPhase::Payload(payload) = &mut self.state
            && let Err(damage) = payload.feed(bytes, add)
        {
            self.state = CheckPhase::Damaged(damage);
        }
    }

    /// The place of the record.
    pub(crate) fn place(&self) -> RecordPlace {
        self.place
    }

    /// The header, once it has come and is right.
    pub(crate) fn header(&self) -> Option<&RecordHeader> {
        match &self.state {
            CheckPhase::Payload(payload) => Some(&payload.header),
            CheckPhase::Header(_) | CheckPhase::Damaged(_) => None,
        }
    }

    /// Whether a fault was found. Then the bytes that follow change nothing.
    pub(crate) fn is_damaged(&self) -> bool {
        matches!(self.state, CheckPhase::Damaged(_))
    }

    /// Ends the check after the last byte or the first fault. Returns the header if all was right.
    pub(crate) fn finish(self) -> Result<RecordHeader, Damage> {
        match self.state {
            CheckPhase::Payload(payload) if payload.block == payload.header.blocks.len() => {
                Ok(payload.header)
            }
            CheckPhase::Payload(_) => Err(Damage::Payload),
            CheckPhase::Header(_) => Err(Damage::Header(FormatError::Field)),
            CheckPhase::Damaged(damage) => Err(damage),
        }
    }

    fn begin(&self, header: RecordHeader) -> CheckPhase {
        let stands_here = header.segment.segment == self.place.segment
            && header.page == self.place.page
            && header.record_pages() == u64::from(self.place.pages);
        let is_asked_for =
            self.key.is_none_or(|key| (key.fingerprint, key.hash) == (header.fingerprint, header.chunk.hash));
        if !(stands_here && is_asked_for) {
            return CheckPhase::Damaged(Damage::Key);
        }
        let (block, at, range_number) = (0, 0, 0);
        CheckPhase::Payload(Box::new(Payload {
            header,
            block,
            at,
            range: RangeChecksum::new(),
            range_number,
        }))
    }
}

impl Payload {
    fn feed(&mut self, bytes: u64, add: &mut Add<'_>) -> Result<(), Damage> {
        let mut fed = 0;
        while let Some(block) = self.header.blocks.get(self.block)
            && fed < bytes
        {
            let (range_bytes, whole) = (block.range_bytes, block.bytes);
            let end = (self.at / range_bytes + 1).saturating_mul(range_bytes).min(whole);
            let stretch = (end - self.at).min(STRETCH_BYTES).min(bytes - fed);
            add(self, fed, stretch).map_err(|_| Damage::Payload)?;
            fed += stretch;
            self.at += stretch;
            if self.at < end {
                continue;
            }
            let right = self.header.blocks[self.block].checksums.ranges[self.range_number];
            if std::mem::take(&mut self.range).finish() != right {
                return Err(Damage::Payload);
            }
            self.range_number += 1;
            if self.at == whole {
                (self.block, self.at, self.range_number) = (self.block + 1, 0, 0);
            }
        }
        Ok(())
    }
}

/// Moves bytes of the header from `bytes` to `so_far`. Returns the header once it is complete.
fn take_header(
    so_far: &mut Vec<u8>,
    bytes: &mut &[u8],
    storage: StorageId,
) -> Result<Option<RecordHeader>, FormatError> {
    let page = PAGE_BYTES as usize;
    loop {
        let wanted = match so_far.len() {
            short if short < page => page,
            _ => RecordHeader::peek_pages(so_far)? as usize * page,
        };
        if so_far.len() == wanted {
            return RecordHeader::decode(so_far, storage).map(Some);
        }
        let (more, rest) = bytes.split_at(bytes.len().min(wanted - so_far.len()));
        so_far.extend_from_slice(more);
        *bytes = rest;
        if so_far.len() < wanted {
            return Ok(None);
        }
    }
}

/// Bytes of a stretch: few enough to stay in the CPU core's own cache between sum and copy.
const STRETCH_BYTES: u64 = 128 << 10;
