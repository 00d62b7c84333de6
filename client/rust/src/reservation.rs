//! Chunks that may be written.

mod layers;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use larder_protocol::PoolSet;
use larder_protocol::limits::MAX_MESSAGE_BLOCKS;
use larder_protocol::session::{Request, Reserved};

use crate::error::SessionError;
use crate::extents::Placed;
use crate::link::{Link, MappedFrom};
use crate::lock;
use crate::namespace::Namespace;
use crate::options::threads_for;
use crate::window::{Window, WindowRange};
use larder_ipc::Mapping;

pub(crate) use layers::LayersPart;
pub use layers::StagedLayers;

/// The right to write those chunks of a chain that are missing.
///
/// Stage the chunks, fill them and commit them, all at once or some at a time: a write window may hold fewer chunks than are
/// reserved. When the reservation and all its staged chunks are dropped, the chunks that were not committed are given back,
/// without blocking.
pub struct Reservation {
    claim: Arc<Claim>,
    chunks: Vec<u32>,
    /// For each chunk, the pools to write.
    pools: Vec<PoolSet>,
    deadline: Duration,
}

/// Room for one chunk of a reservation, to be filled and committed. Dropping it frees the room.
pub struct StagedChunk {
    claim: Arc<Claim>,
    position: u32,
    /// The pools to write.
    pools: PoolSet,
    room: WriteRoom,
}

/// The chunks of one Commit message.
pub(crate) struct CommitPart {
    pub(crate) reservation: u64,
    pub(crate) chunks: Vec<u32>,
    pub(crate) sources: Vec<u64>,
    /// The chunks' room, which the node reads until it answers.
    pub(crate) ranges: Vec<Arc<WindowRange>>,
    pub(crate) under_way: CommitUnderWay,
}

/// A Commit message that is not answered yet. A reservation is given back only when none is under way: the chunks of a message that
/// was sent are committed, even if nobody waits for the answer any more.
pub(crate) struct CommitUnderWay {
    link: Weak<Link>,
    reservation: u64,
    open: Arc<Mutex<Open>>,
}

/// The reservation at the node, given back with the last value that could still write to its chunks.
struct Claim {
    namespace: Namespace,
    number: u64,
    open: Arc<Mutex<Open>>,
    /// If the node trusts its engines: the blocks' places in the arena.
    placed: Option<Placed>,
    /// Dropped last.
    link: MappedFrom,
}

/// The part of a reservation that is open.
struct Open {
    /// Number of chunks that are not committed.
    chunks: usize,
    /// Number of commits under way.
    commits: usize,
    /// Whether the engine can still write to the chunks.
    is_held: bool,
}

/// The window, and the sizes of the pieces of it that are needed.
pub(crate) type RoomNeeded<'a> = (&'a Arc<Window>, Vec<u64>);

enum WriteRoom {
    /// A part of the write window.
    Window(Arc<WindowRange>),
    /// The places in the arena of the reservation's chunk with this index.
    Arena(usize),
}

impl Reservation {
    pub(crate) fn accept(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: usize,
        reserved: Reserved,
        descriptors: &[OwnedFd],
    ) -> Result<Self, SessionError> {
        let Reserved { reservation, chunks, mut pools, places, deadline_ms, extents } = reserved;
        let ascending = chunks.is_sorted_by(|a, b| a < b);
        if !ascending || chunks.last().is_some_and(|&last| last as usize >= asked) {
            return Err(SessionError::wrong_answer(
                "a reservation names chunks that were asked for, in order",
            ));
        }
        let every = namespace.rules().every();
        if pools.is_empty() {
            pools = vec![every; chunks.len()];
        }
        if pools.len() != chunks.len()
            || !pools.iter().all(|&pools| every.has_all(pools) && !pools.is_empty())
        {
            return Err(SessionError::wrong_answer(
                "a reservation names pools of the namespace for each chunk",
            ));
        }
        let mut mapped = lock(&link.extents);
        mapped.add(&extents, descriptors)?;
        let placed = match link.welcome.trusted {
            true => Some(mapped.place(&namespace, chunks.len(), |chunk| pools[chunk], places)?),
            false => None,
        };
        drop(mapped);
        // A reservation without chunks is never used up by commits, so that dropping it gives it back.
        let open = Open { chunks: chunks.len().max(1), commits: 0, is_held: true };
        let open = Arc::new(Mutex::new(open));
        let claim =
            Claim { link: MappedFrom(Arc::clone(link)), namespace, number: reservation, open, placed };
        Ok(Self { claim: Arc::new(claim), chunks, pools, deadline: Duration::from_millis(deadline_ms) })
    }

    /// Positions (in the chain) of the chunks to write, ascending; the other chunks are here already or are being written.
    #[must_use]
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// The pools to write of each chunk.
    #[must_use]
    pub fn pools(&self) -> &[PoolSet] {
        &self.pools
    }

    /// The time from the answer on in which chunks may be committed.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.claim.namespace
    }

    /// The number of its session.
    pub(crate) fn session(&self) -> u64 {
        self.claim.link.number
    }

    /// The reservation's number at the node.
    pub(crate) fn number(&self) -> u64 {
        self.claim.number
    }

    /// Gives back the chunks that are not committed, as dropping the reservation does.
    pub fn abort(self) {}

    /// The window, and the bytes of it that each of the chunks at `positions` takes; `None` if they take none: they go straight
    /// into the arena, or there are none.
    ///
    /// # Panics
    /// Panics if the reservation has no chunk there.
    pub(crate) fn room_needed(&self, positions: &[u32]) -> Result<Option<RoomNeeded<'_>>, SessionError> {
        let pools = positions.iter().map(|&position| self.pools[self.index(position)]);
        let blocks = self.claim.namespace.blocks_per_chunk();
        let sizes: Vec<u64> = pools.map(|pools| self.claim.block_offset(pools, blocks)).collect();
        if self.claim.placed.is_some() || sizes.is_empty() {
            return Ok(None);
        }
        let chunk_bytes = sizes.iter().sum();
        match &self.claim.link.window {
            Some(window) if chunk_bytes <= window.len() => Ok(Some((window, sizes))),
            window => {
                let window_bytes = window.as_ref().map_or(0, |window| window.len());
                Err(SessionError::WindowTooSmall { chunk_bytes, window_bytes })
            }
        }
    }

    /// The chunk at `position` (in the chain), in its place in the arena. If chunks do not go straight into the arena, it has to
    /// be [put into](StagedChunk::put_into) the window.
    ///
    /// # Panics
    /// Panics if the reservation has no chunk there.
    pub(crate) fn staged(&self, position: u32) -> StagedChunk {
        let index = self.index(position);
        StagedChunk {
            claim: Arc::clone(&self.claim),
            position,
            pools: self.pools[index],
            room: WriteRoom::Arena(index),
        }
    }

    fn index(&self, position: u32) -> usize {
        let index = self.chunks.binary_search(&position);
        index.unwrap_or_else(|_| panic!("the chunk at {position} is not reserved"))
    }

    /// The most chunks that one message commits: at least one.
    #[must_use]
    pub fn chunks_per_commit(&self) -> usize {
        (MAX_MESSAGE_BLOCKS / self.claim.namespace.blocks_per_chunk().max(1)).max(1)
    }

    /// Splits staged chunks into messages.
    ///
    /// # Panics
    /// Panics if a chunk belongs to another reservation.
    pub(crate) fn commit_parts(&self, staged: &[StagedChunk]) -> Vec<CommitPart> {
        let chunks_per_part = self.chunks_per_commit();
        let mut parts: Vec<CommitPart> = Vec::new();
        for chunk in staged {
            assert!(Arc::ptr_eq(&chunk.claim, &self.claim), "a staged chunk belongs to its own reservation");
            if parts.last().is_none_or(|part| part.chunks.len() == chunks_per_part) {
                parts.push(CommitPart {
                    reservation: self.claim.number,
                    chunks: Vec::new(),
                    sources: Vec::new(),
                    ranges: Vec::new(),
                    under_way: self.claim.commits(),
                });
            }
            if let Some(part) = parts.last_mut() {
                part.chunks.push(chunk.position);
                if let WriteRoom::Window(range) = &chunk.room {
                    let blocks = self.claim.namespace.blocks_of(chunk.pools);
                    let offset = |block| range.offset() + self.claim.block_offset(chunk.pools, block);
                    part.sources.extend(blocks.map(offset));
                    part.ranges.push(Arc::clone(range));
                }
            }
        }
        parts
    }
}

impl StagedChunk {
    pub(crate) fn link(&self) -> &Link {
        &self.claim.link
    }

    /// The chunk's position in the chain.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// The blocks to write, ascending: all blocks of the chunk, unless the reservation was for some pools only, or the node has
    /// the other blocks.
    pub fn blocks(&self) -> impl Iterator<Item = usize> + use<> {
        self.claim.namespace.blocks_of(self.pools)
    }

    /// Threads that may share the work to fill chunks of the session with so many bytes: at least one.
    #[must_use]
    pub fn copy_threads(&self, bytes: u64) -> usize {
        threads_for(self.claim.link.copy_threads, bytes)
    }

    /// Copies `bytes` into block `block`, at `offset` bytes from its start, and counts them. All bytes of all
    /// [`StagedChunk::blocks`] must be written before the commit.
    ///
    /// # Panics
    /// Panics if the bytes do not fit in the block, there is no such block, or it is not to be written.
    pub fn copy_from(&mut self, block: usize, offset: u64, bytes: &[u8]) {
        let block_bytes = self.claim.namespace.block_bytes(block);
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= block_bytes);
        assert!(fits, "{} bytes at {offset} do not fit in a block of {block_bytes}", bytes.len());
        let (mapping, start) = self.block(block);
        mapping.copy_from(start + offset, bytes);
        self.claim.link.traffic.count_written(bytes.len() as u64);
    }

    /// The address and size of block `block`, for a copy by a device; counts the block as written. The address is valid until the
    /// chunk is committed or dropped: do that only when the device has completed the copy.
    ///
    /// # Panics
    /// Panics if there is no such block, or it is not to be written.
    #[must_use]
    pub fn block_ptr(&mut self, block: usize) -> (*mut u8, usize) {
        let bytes = self.claim.namespace.block_bytes(block);
        let (mapping, start) = self.block(block);
        self.claim.link.traffic.count_written(bytes);
        (mapping.as_ptr().wrapping_add(start as usize), bytes as usize)
    }

    /// The address of block `block`, for a device; counts `bytes` of it as written.
    ///
    /// # Panics
    /// Panics if there is no such block, or it is not to be written.
    pub(crate) fn block_memory(&self, block: usize, bytes: u64) -> (Arc<Mapping>, u64) {
        let (mapping, offset) = self.block(block);
        self.claim.link.traffic.count_written(bytes);
        (Arc::clone(mapping), offset)
    }

    /// The namespace of the chunk.
    pub(crate) fn namespace(&self) -> &Namespace {
        &self.claim.namespace
    }

    pub(crate) fn put_into(&mut self, range: WindowRange) {
        self.room = WriteRoom::Window(Arc::new(range));
    }

    /// The mapping in which block `block` lies, and its offset.
    fn block(&self, block: usize) -> (&Arc<Mapping>, u64) {
        let namespace = &self.claim.namespace;
        let is_written = self.pools.has(block % namespace.pool_bytes().len());
        assert!(is_written, "block {block} of the chunk at {} is not to be written", self.position);
        match (&self.room, &self.claim.placed) {
            (WriteRoom::Arena(index), Some(placed)) => {
                placed.block(namespace, *index, block).expect("what is to be written has a place")
            }
            (WriteRoom::Window(range), _) => {
                (range.mapping(), range.offset() + self.claim.block_offset(self.pools, block))
            }
            (WriteRoom::Arena(_), None) => {
                unreachable!("a chunk is staged in the arena only where it has places there")
            }
        }
    }
}

impl CommitUnderWay {
    /// Notes that `chunks` more chunks are committed.
    pub(crate) fn settle(&self, chunks: usize) {
        let mut open = lock(&self.open);
        open.chunks = open.chunks.saturating_sub(chunks);
    }
}

impl Drop for CommitUnderWay {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.commits -= 1;
        let is_over = open.is_over();
        drop(open);
        if is_over && let Some(link) = self.link.upgrade() {
            link.give_back(Request::Abort(self.reservation));
        }
    }
}

impl Open {
    /// Whether the node has to be told that nobody will commit the rest.
    fn is_over(&self) -> bool {
        !self.is_held && self.commits == 0 && self.chunks > 0
    }
}

impl Claim {
    /// Notes that a commit is under way.
    fn commits(&self) -> CommitUnderWay {
        lock(&self.open).commits += 1;
        let (link, open) = (Arc::downgrade(&self.link.0), Arc::clone(&self.open));
        CommitUnderWay { link, reservation: self.number, open }
    }

    /// The offset of block `block` in the window's room for a chunk of which these pools are written. Blocks are one behind the
    /// other, each at a multiple of [`BLOCK_ALIGNMENT`]. If `block` is the number of blocks, the result is the size of the whole
    /// room.
    fn block_offset(&self, pools: PoolSet, block: usize) -> u64 {
        let all = self.namespace.pool_bytes();
        let bytes = |pools: PoolSet| -> u64 {
            pools
                .iter()
                .filter_map(|pool| all.get(pool))
                .map(|bytes| bytes.next_multiple_of(BLOCK_ALIGNMENT))
                .sum()
        };
        (block / all.len()) as u64 * bytes(pools) + bytes(pools.common(PoolSet::first(block % all.len())))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.is_held = false;
        let is_over = open.is_over();
        drop(open);
        if self.number != 0 && is_over {
            self.link.give_back(Request::Abort(self.number));
        }
    }
}

/// A cache line, the best alignment for copies by a processor or device.
const BLOCK_ALIGNMENT: u64 = 64;
