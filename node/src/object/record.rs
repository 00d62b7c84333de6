//! A block as an object: its name, its body, and its way back into the arena.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use bytes::Bytes;
use larder_core::store::ids::ChunkKey;
use larder_protocol::limits::MAX_BLOCK_BYTES;
use object_store::PutPayload;
use object_store::path::Path;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{BlockId, STORAGE};
use crate::disk::format::{PAGE_BYTES, RecordHeader, SegmentHeader};
use crate::disk::log::RecordPlace;
use crate::disk::volume::{Check, Damage, fits};
use crate::disk::{BlockPlace, Source, WriteOrder};

/// The key of an object, which is one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ObjectKey {
    pub(super) chunk: ChunkKey,
    pub(super) block: BlockId,
}

/// The name of a block's object.
pub(super) fn name(prefix: &Path, ObjectKey { chunk, block: BlockId { slice, pool } }: &ObjectKey) -> Path {
    let hash = chunk.hash.to_string();
    let file = format!("{hash}-{slice}-{pool}");
    format_folder(prefix).join(format!("{:x}", chunk.fingerprint)).join(&hash[..2]).join(file)
}

/// The folder of all objects of this version of the format.
pub(super) fn format_folder(prefix: &Path) -> Path {
    prefix.clone().join("v1")
}

/// The name of an object that is written and read to see whether the store answers.
pub(super) fn probe_name(prefix: &Path) -> Path {
    format_folder(prefix).join(PROBE)
}

/// Ends, with an error, when nothing reads the arena any more: its sender is dropped then.
pub(super) type Released = oneshot::Receiver<()>;

/// The body of a chunk's block, straight from the arena, without a copy. If engines could write there, the body is a copy.
pub(super) fn body(order: &WriteOrder, at: usize) -> (PutPayload, Released) {
    let (lease, released) = oneshot::channel::<()>();
    let lease = Arc::new(lease);
    let header = RecordHeader {
        segment: SegmentHeader { segment: 0, sequence: 0 },
        page: 0,
        sequence: 0,
        fingerprint: order.fingerprint,
        chunk: order.chunk,
        blocks: vec![order.entries[at].clone()],
    };
    let Source { place, .. } = &order.sources[at];
    let block = place.memory.share(place.offset, place.bytes, lease);
    let mut parts = vec![Bytes::from(header.encode(STORAGE)), block];
    let payload = header.payload_bytes();
    let padding = (payload.next_multiple_of(PAGE_BYTES) - payload) as usize;
    parts.push(Bytes::from_static(&ZEROS[..padding]));
    (PutPayload::from_iter(parts), released)
}

/// An object whose bytes are coming into their place.
pub(super) struct Arriving {
    to: BlockPlace,
    check: Check,
    /// Bytes that came.
    pub(super) bytes: u64,
}

impl Arriving {
    /// A reader of an object of `bytes` bytes.
    pub(super) fn new(key: ChunkKey, to: &BlockPlace, bytes: u64) -> Self {
        Self { to: to.clone(), check: check_of(key, bytes), bytes: 0 }
    }

    /// Takes the bytes that follow.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let to = &self.to;
        self.check.feed(bytes, &mut |header, block, at, stretch| {
            if fits(to, &header.blocks[block]) {
                to.copy_in(at, stretch);
            }
        });
    }

    /// Whether a fault was found. Then the rest need not come: an object may be far longer than its block.
    pub(super) fn is_damaged(&self) -> bool {
        self.check.is_damaged()
    }

    /// Takes a file to its end or to its first fault; stops at the deadline. Blocks the thread.
    pub(super) fn feed_file(&mut self, mut file: File, deadline: Instant) -> std::io::Result<()> {
        let mut buffer = vec![0; FILE_BUFFER_BYTES];
        while !self.is_damaged() {
            match file.read(&mut buffer)? {
                0 => break,
                bytes => self.feed(&buffer[..bytes]),
            }
            if Instant::now() > deadline {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Ends the object after its last byte or first fault. Returns the header if all was right.
    pub(super) fn finish(self) -> Result<RecordHeader, Damage> {
        self.check.finish()
    }
}

/// Reads an object of `bytes` bytes as a store sends it, in pieces, and keeps nothing of its blocks. Returns the header if the
/// whole object is right and has this name, else `None`.
pub fn read_object<'a>(
    key: ChunkKey,
    bytes: u64,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Option<RecordHeader> {
    let mut check = check_of(key, bytes);
    pieces.into_iter().for_each(|piece| check.feed(piece, &mut |_, _, _, _| {}));
    check.finish().ok()
}

/// A check of an object of `bytes` bytes. If `bytes` is no whole number of pages, the header will not match.
fn check_of(key: ChunkKey, bytes: u64) -> Check {
    let pages = if bytes.is_multiple_of(PAGE_BYTES) { bytes / PAGE_BYTES } else { 0 };
    let place = RecordPlace { segment: 0, page: 0, pages: u32::try_from(pages).unwrap_or(0) };
    Check::new(STORAGE, place, Some(key))
}

/// The name of the probe's object.
pub(super) const PROBE: &str = "probe";

static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Bytes read at a time: enough that system calls cost little, few enough to stay in a CPU core's own cache.
const FILE_BUFFER_BYTES: usize = 256 << 10;

const _: () = assert!(MAX_BLOCK_BYTES / PAGE_BYTES < u32::MAX as u64);
