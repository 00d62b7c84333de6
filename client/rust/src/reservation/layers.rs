//! Layers of reserved chunks, to be handed over ahead of their commit.

use std::ops::Range;
use std::sync::Arc;

use larder_protocol::handoff::HandOver;

use super::{BLOCK_ALIGNMENT, Claim, CommitPart, Reservation, RoomNeeded};
use crate::error::SessionError;
use crate::link::Link;
use crate::window::WindowRange;
use larder_ipc::Mapping;

/// Room for some layers of some chunks of a reservation, to be filled and handed over. Dropping it frees the room.
pub struct StagedLayers {
    claim: Arc<Claim>,
    positions: Vec<u32>,
    pool: usize,
    layers: Range<u32>,
    /// The index of each chunk in the reservation, for layers that go straight into the arena.
    indices: Vec<usize>,
    range: Option<Arc<WindowRange>>,
}

/// The content of one HandOver message.
pub(crate) struct LayersPart {
    pub(crate) request: HandOver,
    /// The layers' room, which the node reads until it answers.
    pub(crate) range: Option<Arc<WindowRange>>,
}

impl Reservation {
    /// The window, and the bytes of it that some layers of these chunks take; `None` if layers go straight into the arena.
    ///
    /// # Panics
    /// Panics if the reservation has no such chunk or does not write this pool of it, or if the namespace has no such layers.
    pub(crate) fn layers_room(
        &self,
        positions: &[u32],
        pool: usize,
        layers: &Range<u32>,
    ) -> Result<Option<RoomNeeded<'_>>, SessionError> {
        let namespace = &self.claim.namespace;
        let most = namespace.pool_layers()[pool];
        assert!(
            layers.start < layers.end && layers.end <= most,
            "the pool has {most} layers, not {layers:?}"
        );
        for &position in positions {
            let is_written = self.pools[self.index(position)].has(pool);
            assert!(is_written, "pool {pool} of the chunk at {position} is not to be written");
        }
        if self.claim.placed.is_some() {
            return Ok(None);
        }
        let chunk_bytes =
            self.claim.layers_stride(pool, layers) * (positions.len() * namespace.slices()) as u64;
        match &self.claim.link.window {
            Some(window) if chunk_bytes <= window.len() => Ok(Some((window, vec![chunk_bytes]))),
            window => {
                let window_bytes = window.as_ref().map_or(0, |window| window.len());
                Err(SessionError::WindowTooSmall { chunk_bytes, window_bytes })
            }
        }
    }

    /// Some layers of chunks, in their places in the arena. If layers do not go straight into the arena, they have to be [put
    /// into](StagedLayers::put_into) the window.
    ///
    /// # Panics
    /// Panics if the reservation has no such chunk.
    pub(crate) fn staged_layers(&self, positions: &[u32], pool: usize, layers: Range<u32>) -> StagedLayers {
        let indices = positions.iter().map(|&position| self.index(position)).collect();
        let (claim, positions) = (Arc::clone(&self.claim), positions.to_vec());
        StagedLayers { claim, positions, pool, layers, indices, range: None }
    }

    /// Splits the commit of chunks that were handed over into messages.
    ///
    /// # Panics
    /// Panics if the reservation has no such chunk.
    pub(crate) fn handed_over_parts(&self, positions: &[u32]) -> Vec<CommitPart> {
        positions.iter().for_each(|&position| _ = self.index(position));
        let part = |chunks: &[u32]| CommitPart {
            reservation: self.claim.number,
            chunks: chunks.to_vec(),
            sources: Vec::new(),
            ranges: Vec::new(),
            under_way: self.claim.commits(),
        };
        positions.chunks(self.chunks_per_commit()).map(part).collect()
    }
}

impl StagedLayers {
    /// The number of its session.
    pub(crate) fn session(&self) -> u64 {
        self.claim.link.number
    }

    pub(crate) fn link(&self) -> &Link {
        &self.claim.link
    }

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

    /// Copies `bytes` into the layers of the `chunk`-th staged chunk in the `slice`-th slice of the session, at `offset` bytes
    /// from the layers' start, and counts the bytes. All layers must be filled before they are handed over.
    ///
    /// # Panics
    /// Panics if the bytes do not fit, or there is no such chunk or slice.
    pub fn copy_from(&mut self, chunk: usize, slice: usize, offset: u64, bytes: &[u8]) {
        let most = self.bytes();
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= most);
        assert!(fits, "{} bytes at {offset} do not fit in layers of {most}", bytes.len());
        let (mapping, start) = self.place(chunk, slice);
        mapping.copy_from(start + offset, bytes);
        self.claim.link.traffic.count_written(bytes.len() as u64);
    }

    /// The mapping and offset to which a device writes the layers of the `chunk`-th staged chunk in the session's first slice;
    /// counts them as written.
    ///
    /// # Panics
    /// Panics if there is no such chunk.
    pub(crate) fn layers_memory(&self, chunk: usize) -> (Arc<Mapping>, u64) {
        let (mapping, offset) = self.place(chunk, 0);
        self.claim.link.traffic.count_written(self.bytes());
        (Arc::clone(mapping), offset)
    }

    pub(crate) fn put_into(&mut self, range: WindowRange) {
        self.range = Some(Arc::new(range));
    }

    pub(crate) fn part(&self) -> LayersPart {
        let slices = self.claim.namespace.slices();
        let place = |at: usize| self.place(at / slices, at % slices).1;
        let sources = match &self.range {
            Some(_) => (0..self.positions.len() * slices).map(place).collect(),
            None => Vec::new(),
        };
        let request = HandOver {
            reservation: self.claim.number,
            chunks: self.positions.clone(),
            pool: self.pool as u8,
            from_layer: self.layers.start,
            to_layer: self.layers.end,
            sources,
        };
        LayersPart { request, range: self.range.clone() }
    }

    /// The mapping and offset of the layers of a chunk in a slice.
    fn place(&self, chunk: usize, slice: usize) -> (&Arc<Mapping>, u64) {
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

impl Claim {
    fn layer_bytes(&self, pool: usize) -> u64 {
        self.namespace.pool_bytes()[pool] / u64::from(self.namespace.pool_layers()[pool].max(1))
    }

    /// Bytes in the window from the layers of one chunk and slice to the next ones.
    fn layers_stride(&self, pool: usize, layers: &Range<u32>) -> u64 {
        (self.layer_bytes(pool) * u64::from(layers.end - layers.start)).next_multiple_of(BLOCK_ALIGNMENT)
    }
}
