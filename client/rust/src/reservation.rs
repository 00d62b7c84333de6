//! Chunks that may be written.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use larder_protocol::PoolSet;
use larder_protocol::handoff::HandOver;
use larder_protocol::limits::MAX_MESSAGE_BLOCKS;
use larder_protocol::session::{Request, Reserved};

use crate::error::SessionError;
use crate::extents::Placed;
use crate::link::Link;
use crate::lock;
use crate::mapping::Mapping;
use crate::namespace::Namespace;
use crate::window::{Window, WindowRange};

/// The right to write those chunks of a chain that are missing.
///
/// Stage the chunks, fill them and commit them, all at once or some at a time: a write window may hold fewer than are
/// reserved. What is not committed when this and all its staged chunks are dropped is given back, without blocking.
pub struct Reservation {
    claim: Arc<Claim>,
    chunks: Vec<u32>,
    /// For each of them, the pools to write.
    pools: Vec<PoolSet>,
    deadline: Duration,
}

/// Room for one chunk of a reservation, to be filled and committed. Dropping it frees the room.
pub struct StagedChunk {
    claim: Arc<Claim>,
    position: u32,
    /// The pools to write.
    pools: PoolSet,
    room: Room,
}

/// Room for some layers of some chunks of a reservation, to be filled and handed over. Dropping it frees the room.
pub struct StagedLayers {
    claim: Arc<Claim>,
    positions: Vec<u32>,
    pool: usize,
    layers: Range<u32>,
    /// Where chunks go straight into the arena: which of the reservation's each is.
    indices: Vec<usize>,
    range: Option<WindowRange>,
}

/// What goes out in one HandOver message.
pub(crate) struct LayersPart {
    pub(crate) request: HandOver,
    pub(crate) range: Option<WindowRange>,
}

/// What goes out in one Commit message.
pub(crate) struct CommitPart {
    pub(crate) reservation: u64,
    pub(crate) chunks: Vec<u32>,
    pub(crate) sources: Vec<u64>,
    pub(crate) ranges: Vec<WindowRange>,
    pub(crate) remaining: Remaining,
}

/// The reservation at the node, given back with the last value that could still write to it.
struct Claim {
    link: Arc<Link>,
    namespace: Namespace,
    number: u64,
    remaining: Remaining,
    /// Where the node trusts its engines: the blocks' places in the arena.
    placed: Option<Placed>,
}

/// Chunks of a reservation that are not committed.
#[derive(Clone)]
pub(crate) struct Remaining(Arc<AtomicUsize>);

enum Room {
    /// A part of the write window.
    Window(WindowRange),
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
        let remaining = Remaining(Arc::new(AtomicUsize::new(chunks.len().max(1))));
        let claim = Claim { link: Arc::clone(link), namespace, number: reservation, remaining, placed };
        Ok(Self { claim: Arc::new(claim), chunks, pools, deadline: Duration::from_millis(deadline_ms) })
    }

    /// Positions (in the chain) of the chunks to write, ascending; the others are here already or are being written.
    #[must_use]
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// For how long, from the answer on, chunks may be committed.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.claim.namespace
    }

    /// Gives back what is not committed. The same as dropping it.
    pub fn abort(self) {}

    /// The window and the bytes in it that staging the chunk at `position` takes; `None` where chunks go straight into the
    /// arena.
    ///
    /// # Panics
    /// Where the reservation has no chunk there.
    pub(crate) fn room_needed(&self, position: u32) -> Result<Option<(&Arc<Window>, u64)>, SessionError> {
        let pools = self.pools[self.index(position)];
        if self.claim.placed.is_some() {
            return Ok(None);
        }
        let chunk_bytes = self.claim.block_offset(pools, self.claim.namespace.blocks_per_chunk());
        match &self.claim.link.window {
            Some(window) if chunk_bytes <= window.len() => Ok(Some((window, chunk_bytes))),
            window => {
                let window_bytes = window.as_ref().map_or(0, |window| window.len());
                Err(SessionError::WindowTooSmall { chunk_bytes, window_bytes })
            }
        }
    }

    /// The chunk at `position` (in the chain), in the room that was taken for it.
    ///
    /// # Panics
    /// Where the reservation has no chunk there.
    pub(crate) fn staged(&self, position: u32, range: Option<WindowRange>) -> StagedChunk {
        let index = self.index(position);
        let room = range.map_or(Room::Arena(index), Room::Window);
        StagedChunk { claim: Arc::clone(&self.claim), position, pools: self.pools[index], room }
    }

    fn index(&self, position: u32) -> usize {
        let index = self.chunks.binary_search(&position);
        index.unwrap_or_else(|_| panic!("the chunk at {position} is not reserved"))
    }

    /// The window and the bytes in it that some layers of these chunks take; `None` where they go straight into the arena.
    ///
    /// # Panics
    /// Where the reservation has no such chunk, or the namespace no such layers.
    pub(crate) fn layers_room(
        &self,
        positions: &[u32],
        pool: usize,
        layers: &Range<u32>,
    ) -> Result<Option<(&Arc<Window>, u64)>, SessionError> {
        let namespace = &self.claim.namespace;
        let most = namespace.pool_layers()[pool];
        assert!(
            layers.start < layers.end && layers.end <= most,
            "the pool has {most} layers, not {layers:?}"
        );
        positions.iter().for_each(|&position| _ = self.index(position));
        if self.claim.placed.is_some() {
            return Ok(None);
        }
        let chunk_bytes =
            self.claim.layers_stride(pool, layers) * (positions.len() * namespace.slices()) as u64;
        match &self.claim.link.window {
            Some(window) if chunk_bytes <= window.len() => Ok(Some((window, chunk_bytes))),
            window => {
                let window_bytes = window.as_ref().map_or(0, |window| window.len());
                Err(SessionError::WindowTooSmall { chunk_bytes, window_bytes })
            }
        }
    }

    /// Some layers of chunks, in the room that was taken for them.
    ///
    /// # Panics
    /// Where the reservation has no such chunk.
    pub(crate) fn staged_layers(
        &self,
        positions: &[u32],
        pool: usize,
        layers: Range<u32>,
        range: Option<WindowRange>,
    ) -> StagedLayers {
        let indices = positions.iter().map(|&position| self.index(position)).collect();
        StagedLayers {
            claim: Arc::clone(&self.claim),
            positions: positions.to_vec(),
            pool,
            layers,
            indices,
            range,
        }
    }

    /// Splits the commit of chunks that were handed over into messages.
    ///
    /// # Panics
    /// Where the reservation has no such chunk.
    pub(crate) fn handed_over_parts(&self, positions: &[u32]) -> Vec<CommitPart> {
        positions.iter().for_each(|&position| _ = self.index(position));
        let blocks = self.claim.namespace.blocks_per_chunk();
        let part = |chunks: &[u32]| CommitPart {
            reservation: self.claim.number,
            chunks: chunks.to_vec(),
            sources: Vec::new(),
            ranges: Vec::new(),
            remaining: self.claim.remaining.clone(),
        };
        positions.chunks((MAX_MESSAGE_BLOCKS / blocks.max(1)).max(1)).map(part).collect()
    }

    /// Splits staged chunks into messages.
    ///
    /// # Panics
    /// Where a chunk belongs to another reservation.
    pub(crate) fn commit_parts(&self, staged: Vec<StagedChunk>) -> Vec<CommitPart> {
        let blocks = self.claim.namespace.blocks_per_chunk();
        let chunks_per_part = (MAX_MESSAGE_BLOCKS / blocks.max(1)).max(1);
        let mut parts: Vec<CommitPart> = Vec::new();
        for chunk in staged {
            assert!(Arc::ptr_eq(&chunk.claim, &self.claim), "a staged chunk belongs to its own reservation");
            if parts.last().is_none_or(|part| part.chunks.len() == chunks_per_part) {
                parts.push(CommitPart {
                    reservation: self.claim.number,
                    chunks: Vec::new(),
                    sources: Vec::new(),
                    ranges: Vec::new(),
                    remaining: self.claim.remaining.clone(),
                });
            }
            if let Some(part) = parts.last_mut() {
                part.chunks.push(chunk.position);
                if let Room::Window(range) = chunk.room {
                    let blocks = self.claim.namespace.blocks_of(chunk.pools);
                    let offset = |block| range.offset() + self.claim.block_offset(chunk.pools, block);
                    part.sources.extend(blocks.map(offset));
                    part.ranges.push(range);
                }
            }
        }
        parts
    }
}

impl StagedChunk {
    /// Its position in the chain.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// The blocks to write, ascending: all of the chunk, unless the reservation was for some of its pools, or the node has
    /// the others.
    pub fn blocks(&self) -> impl Iterator<Item = usize> + use<> {
        self.claim.namespace.blocks_of(self.pools)
    }

    /// Copies `bytes` into block `block`, at `offset` bytes from its start, and counts them. All bytes of all
    /// [`StagedChunk::blocks`] must be written before the commit.
    ///
    /// # Panics
    /// Where they do not fit in the block, there is no such block, or it is not to be written.
    pub fn copy_from(&mut self, block: usize, offset: u64, bytes: &[u8]) {
        let block_bytes = self.claim.namespace.block_bytes(block);
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= block_bytes);
        assert!(fits, "{} bytes at {offset} do not fit in a block of {block_bytes}", bytes.len());
        let (mapping, start) = self.block(block);
        mapping.copy_from(start + offset, bytes);
        self.claim.link.traffic.count_written(bytes.len() as u64);
    }

    /// Where block `block` is to be written, and its bytes, for a copy by a device; counts it as written. Valid until the
    /// chunk is committed or dropped: do that only when the device has completed the copy.
    ///
    /// # Panics
    /// Where there is no such block, or it is not to be written.
    #[must_use]
    pub fn block_ptr(&mut self, block: usize) -> (*mut u8, usize) {
        let bytes = self.claim.namespace.block_bytes(block);
        let (mapping, start) = self.block(block);
        self.claim.link.traffic.count_written(bytes);
        (mapping.as_ptr().wrapping_add(start as usize), bytes as usize)
    }

    /// The mapping in which block `block` lies, and where.
    fn block(&self, block: usize) -> (&Mapping, u64) {
        let namespace = &self.claim.namespace;
        let is_written = self.pools.has(block % namespace.pool_bytes().len());
        assert!(is_written, "block {block} of the chunk at {} is not to be written", self.position);
        match (&self.room, &self.claim.placed) {
            (Room::Arena(index), Some(placed)) => {
                placed.block(namespace, *index, block).expect("what is to be written has a place")
            }
            (Room::Window(range), _) => {
                (range.mapping(), range.offset() + self.claim.block_offset(self.pools, block))
            }
            (Room::Arena(_), None) => {
                unreachable!("a chunk is staged in the arena only where it has places there")
            }
        }
    }
}

impl StagedLayers {
    /// Positions of the chunks in the chain.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The layers.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// Slices of the session.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.claim.namespace.slices()
    }

    /// Bytes of these layers of one chunk in one slice.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.claim.layer_bytes(self.pool) * u64::from(self.layers.end - self.layers.start)
    }

    /// Copies `bytes` to the layers of the `chunk`-th of the chunks in the `slice`-th slice of the session, at `offset` bytes
    /// from their start, and counts them. All bytes of all of them must be written before they are handed over.
    ///
    /// # Panics
    /// Where they do not fit, or there is no such chunk or slice.
    pub fn copy_from(&mut self, chunk: usize, slice: usize, offset: u64, bytes: &[u8]) {
        let most = self.bytes();
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= most);
        assert!(fits, "{} bytes at {offset} do not fit in layers of {most}", bytes.len());
        let (mapping, start) = self.place(chunk, slice);
        mapping.copy_from(start + offset, bytes);
        self.claim.link.traffic.count_written(bytes.len() as u64);
    }

    pub(crate) fn into_part(self) -> LayersPart {
        let slices = self.claim.namespace.slices();
        let place = |at: usize| self.place(at / slices, at % slices).1;
        let sources = match &self.range {
            Some(_) => (0..self.positions.len() * slices).map(place).collect(),
            None => Vec::new(),
        };
        let request = HandOver {
            reservation: self.claim.number,
            chunks: self.positions,
            pool: self.pool as u8,
            from_layer: self.layers.start,
            to_layer: self.layers.end,
            sources,
        };
        LayersPart { request, range: self.range }
    }

    /// Where the layers of a chunk in a slice stand.
    fn place(&self, chunk: usize, slice: usize) -> (&Mapping, u64) {
        let namespace = &self.claim.namespace;
        let (slices, pools) = (namespace.slices(), namespace.pool_bytes().len());
        assert!(chunk < self.positions.len() && slice < slices, "there is no such chunk or slice");
        match (&self.range, &self.claim.placed) {
            (Some(range), _) => {
                let stride = self.claim.layers_stride(self.pool, &self.layers);
                (range.mapping(), range.offset() + (chunk * slices + slice) as u64 * stride)
            }
            (None, Some(placed)) => {
                let block = placed.block(namespace, self.indices[chunk], slice * pools + self.pool);
                let (mapping, start) = block.expect("what is to be written has a place");
                (mapping, start + u64::from(self.layers.start) * self.claim.layer_bytes(self.pool))
            }
            (None, None) => unreachable!("layers are staged in the arena only where they have places there"),
        }
    }
}

impl Remaining {
    /// `chunks` more chunks are committed.
    pub(crate) fn settle(&self, chunks: usize) {
        let less = |remaining: usize| Some(remaining.saturating_sub(chunks));
        // The update always yields a value.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }
}

impl Claim {
    fn layer_bytes(&self, pool: usize) -> u64 {
        self.namespace.pool_bytes()[pool] / u64::from(self.namespace.pool_layers()[pool].max(1))
    }

    /// Bytes from the layers of one chunk and slice to those of the next, in the window.
    fn layers_stride(&self, pool: usize, layers: &Range<u32>) -> u64 {
        (self.layer_bytes(pool) * u64::from(layers.end - layers.start)).next_multiple_of(BLOCK_ALIGNMENT)
    }

    /// Where block `block` stands in the room in the window of a chunk of which these pools are written: one behind the
    /// other, each at a multiple of [`BLOCK_ALIGNMENT`]. For the number of blocks, the bytes of the whole room.
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
        if self.number != 0 && self.remaining.0.load(Ordering::Acquire) > 0 {
            self.link.give_back(Request::Abort(self.number));
        }
    }
}

/// A cache line, which is what copies by a processor or device like best.
const BLOCK_ALIGNMENT: u64 = 64;
