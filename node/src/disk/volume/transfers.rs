//! Streams of bytes over a device: pieces of bounded number and size, several under way.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::super::drive::{Drive, Watched};
use super::super::format::PAGE_BYTES;
use super::super::io::{Buffer, Direction, DiskDevice, Finished, Memory, Transfer};
use super::super::metrics::DiskMetrics;
use super::QUIET;
use crate::arena::ExtentMemory;
use crate::clock::Clock;
use larder_net::seldom::Seldom;

/// A device, and the buffers through which everything passes.
pub(super) struct Transfers {
    device: Watched,
    metrics: DiskMetrics,
    clock: Clock,
    spare: Vec<Buffer>,
    /// Writes under way.
    writes: usize,
    /// Reads that are finished before their turn.
    arrived: Vec<Finished>,
    last_tag: u64,
    /// The bytes to write next, not yet a whole piece.
    filling: Option<Filling>,
    unreadable: Seldom,
}

struct Filling {
    offset: u64,
    filled: usize,
    buffer: Buffer,
}

/// Regions of the file that are read one after the other, the next pieces ahead of their turn.
pub(super) struct ReadAhead {
    /// Regions with bytes still to request.
    regions: VecDeque<Region>,
    /// The next byte to request, in the first of these regions.
    next: u64,
    asked: VecDeque<AskedPiece>,
}

/// A part of the file.
#[derive(Debug, Clone)]
pub(super) struct Region {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The target in the arena; `None` for buffers.
    pub(super) to: Option<(Arc<ExtentMemory>, u64)>,
}

struct AskedPiece {
    tag: u64,
    bytes: usize,
}

/// A piece of a region. Give its memory back with [`Transfers::recycle`].
pub(super) struct ReadPart {
    pub(super) memory: Memory,
    pub(super) bytes: usize,
    /// Whether the drive could read the piece. Otherwise the bytes in the memory are undefined.
    pub(super) is_read: bool,
}

impl Transfers {
    pub(super) fn new(device: Box<dyn DiskDevice>, drive: Drive, metrics: DiskMetrics) -> io::Result<Self> {
        let mut device = Watched::new(device, drive);
        let spare = device.buffers(MOST_SPARE, BUFFER_BYTES)?;
        Ok(Self {
            device,
            metrics,
            clock: Clock::start(),
            spare,
            writes: 0,
            arrived: Vec::new(),
            last_tag: WRITE_TAG,
            filling: None,
            unreadable: Seldom::new(QUIET),
        })
    }

    /// The drive below.
    pub(super) fn drive(&self) -> &Drive {
        self.device.drive()
    }

    /// Writes `bytes` bytes at `offset`, joined to the last appended bytes if those ended there. `fill` is given each stretch
    /// of memory to fill, and how many bytes precede it.
    pub(super) fn append(
        &mut self,
        offset: u64,
        bytes: u64,
        fill: &mut dyn FnMut(&mut [u8], u64),
    ) -> io::Result<()> {
        if self.filling.as_ref().is_some_and(|filling| filling.offset + filling.filled as u64 != offset) {
            self.flush();
        }
        let mut done = 0;
        while done < bytes {
            let mut filling = match self.filling.take() {
                Some(filling) => filling,
                None => Filling { offset: offset + done, filled: 0, buffer: self.write_buffer()? },
            };
            let room = PIECE_BYTES as usize - filling.filled;
            let stretch = room.min(usize::try_from(bytes - done).unwrap_or(room));
            fill(&mut filling.buffer.bytes_mut()[filling.filled..][..stretch], done);
            filling.filled += stretch;
            done += stretch as u64;
            let is_full = filling.filled == PIECE_BYTES as usize;
            self.filling = Some(filling);
            if is_full {
                self.flush();
            }
        }
        Ok(())
    }

    /// Writes a place in the arena, without a copy. Both offsets and the bytes are whole pages.
    pub(super) fn append_place(
        &mut self,
        offset: u64,
        memory: &Arc<ExtentMemory>,
        start: u64,
        bytes: u64,
    ) -> io::Result<()> {
        self.flush();
        let mut done = 0;
        while done < bytes {
            self.wait_for_turn()?;
            let piece = (bytes - done).min(DIRECT_BYTES);
            let place = Memory::Place(Arc::clone(memory), start + done);
            self.write(offset + done, place, piece as usize);
            done += piece;
        }
        Ok(())
    }

    /// Writes these bytes.
    pub(super) fn append_bytes(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.append(offset, bytes.len() as u64, &mut |out, done| {
            out.copy_from_slice(&bytes[done as usize..][..out.len()]);
        })
    }

    /// Writes zeros from `offset` to the next page.
    pub(super) fn append_zeros(&mut self, offset: u64) -> io::Result<()> {
        self.append(offset, offset.next_multiple_of(PAGE_BYTES) - offset, &mut |out, _| out.fill(0))
    }

    /// Waits until everything that was appended would survive a loss of power.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.settle()?;
        let start = self.clock.elapsed();
        self.device.sync()?;
        self.metrics.sync_seconds.observe((self.clock.elapsed() - start).as_secs_f64());
        Ok(())
    }

    /// Checks that the file is still at its path, where the next start looks for it.
    pub(super) fn look(&self) -> io::Result<()> {
        self.device.look()
    }

    /// Waits until everything that was appended can be read.
    pub(super) fn settle(&mut self) -> io::Result<()> {
        self.flush();
        while self.writes > 0 {
            self.reap()?;
        }
        Ok(())
    }

    /// The next piece of the reads ahead; `None` after the last.
    pub(super) fn next_piece(&mut self, ahead: &mut ReadAhead) -> io::Result<Option<ReadPart>> {
        while ahead.asked.len() < PIECES_AHEAD
            && let Some(piece) = ahead.ask()
        {
            self.last_tag += 1;
            let tag = self.last_tag;
            let memory = match piece.to {
                Some((memory, offset)) => Memory::Place(memory, offset),
                None => Memory::Buffer(self.buffer()?),
            };
            let bytes = piece.bytes as usize;
            let direction = Direction::Read;
            self.device.start(Transfer { tag, direction, offset: piece.offset, memory, bytes });
            ahead.asked.push_back(AskedPiece { tag, bytes });
        }
        let Some(AskedPiece { tag, bytes }) = ahead.asked.pop_front() else { return Ok(None) };
        loop {
            if let Some(at) = self.arrived.iter().position(|finished| finished.tag == tag) {
                let Finished { memory, result, .. } = self.arrived.swap_remove(at);
                match &result {
                    Ok(()) => self.metrics.read_bytes.inc_by(bytes as u64),
                    Err(error) => {
                        if let Some(more) = self.unreadable.says(self.clock.elapsed()) {
                            tracing::warn!(%error, bytes, more, "the drive cannot read a piece of the disk tier");
                        }
                    }
                }
                return Ok(Some(ReadPart { memory, bytes, is_read: result.is_ok() }));
            }
            self.reap()?;
        }
    }

    /// Reads a region that fits into memory; `None` if the drive cannot read all of it.
    pub(super) fn read(&mut self, region: Region) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::with_capacity(region.bytes as usize);
        let mut ahead = ReadAhead::new(vec![region]);
        let mut is_read = true;
        while let Some(piece) = self.next_piece(&mut ahead)? {
            bytes.extend_from_slice(piece.bytes());
            is_read &= piece.is_read;
            self.recycle(piece.memory);
        }
        Ok(is_read.then_some(bytes))
    }

    /// Gives memory back.
    pub(super) fn recycle(&mut self, memory: Memory) {
        if let Memory::Buffer(buffer) = memory
            && self.spare.len() < MOST_SPARE
        {
            self.spare.push(buffer);
        }
    }

    /// Waits until no transfer runs, whatever their results: no place in the arena is read or written any more.
    pub(super) fn drain(&mut self) {
        while self.device.wait().is_some() {}
        self.arrived.clear();
        self.filling = None;
        self.writes = 0;
    }

    /// Starts to write an incomplete piece.
    fn flush(&mut self) {
        if let Some(Filling { offset, filled: bytes, buffer }) = self.filling.take() {
            self.write(offset, Memory::Buffer(buffer), bytes);
        }
    }

    fn write(&mut self, offset: u64, memory: Memory, bytes: usize) {
        debug_assert!((bytes as u64).is_multiple_of(PAGE_BYTES), "records are whole pages");
        self.device.start(Transfer { tag: WRITE_TAG, direction: Direction::Write, offset, memory, bytes });
        self.writes += 1;
        self.metrics.written_bytes.inc_by(bytes as u64);
    }

    fn wait_for_turn(&mut self) -> io::Result<()> {
        while self.writes >= PIECES_AHEAD {
            self.reap()?;
        }
        Ok(())
    }

    fn write_buffer(&mut self) -> io::Result<Buffer> {
        self.wait_for_turn()?;
        self.buffer()
    }

    fn buffer(&mut self) -> io::Result<Buffer> {
        self.spare.pop().map_or_else(|| Buffer::new(BUFFER_BYTES), Ok)
    }

    /// Waits for one transfer.
    fn reap(&mut self) -> io::Result<()> {
        let finished = self.device.wait().ok_or_else(|| io::Error::other("a transfer was lost"))?;
        if finished.tag != WRITE_TAG {
            self.arrived.push(finished);
            return Ok(());
        }
        self.writes -= 1;
        self.recycle(finished.memory);
        finished.result
    }
}

impl ReadPart {
    /// The piece's bytes; none if they are in the arena.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Buffer(buffer) => &buffer.bytes()[..self.bytes],
            Memory::Place(..) => &[],
        }
    }
}

impl ReadAhead {
    pub(super) fn new(regions: Vec<Region>) -> Self {
        Self { regions: regions.into(), next: 0, asked: VecDeque::new() }
    }

    /// Whether pieces of further regions could be under way already.
    pub(super) fn has_room(&self) -> bool {
        self.regions.is_empty() && self.asked.len() < PIECES_AHEAD
    }

    /// Adds regions to read.
    pub(super) fn add(&mut self, regions: Vec<Region>) {
        self.regions.extend(regions);
    }

    fn ask(&mut self) -> Option<Region> {
        let at = self.next;
        let region = self.regions.front()?;
        let (left, piece) = (region.bytes - at, if region.to.is_some() { DIRECT_BYTES } else { PIECE_BYTES });
        // A short rest joins the piece before it: a piece of its own would take the drive's time.
        let bytes = if left <= piece + REST_BYTES { left } else { piece };
        let to = region.to.as_ref().map(|(memory, offset)| (Arc::clone(memory), offset + at));
        let end = at + bytes;
        let piece = Region { offset: region.offset + at, bytes, to };
        if end == region.bytes {
            self.regions.pop_front();
            self.next = 0;
        } else {
            self.next = end;
        }
        Some(piece)
    }
}

/// Bytes of a piece: large enough for the drive, small enough that sums and copies overlap with the next piece's transfer.
const PIECE_BYTES: u64 = 2 << 20;

/// Largest rest that makes no piece of its own: a record is a page longer than its blocks.
const REST_BYTES: u64 = 64 << 10;

const BUFFER_BYTES: usize = (PIECE_BYTES + REST_BYTES) as usize;

/// Bytes of a piece that goes between arena and drive without a copy.
const DIRECT_BYTES: u64 = 2 << 20;

/// Pieces under way in each direction: with more, a virtual drive became slower.
const PIECES_AHEAD: usize = 4;

/// Buffers that are kept.
const MOST_SPARE: usize = 2 * PIECES_AHEAD;

const WRITE_TAG: u64 = 0;
