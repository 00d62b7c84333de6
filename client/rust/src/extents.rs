//! The extents of the arena that a session has mapped.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use larder_protocol::PoolSet;
use larder_protocol::session::{Extent, Place};

use crate::error::SessionError;
use crate::namespace::Namespace;
use larder_ipc::Mapping;

/// The session's extents by number.
pub(crate) struct Extents {
    mapped: HashMap<u32, Arc<Mapping>>,
    /// Whether to map extents writable.
    writable: bool,
}

/// The places of blocks, with their mappings. The mappings stay as long as this value lives, even if the node renews an extent
/// meanwhile.
pub(crate) struct Placed {
    mappings: Vec<(u32, Arc<Mapping>)>,
    places: Vec<Place>,
    /// For each chunk, the index of its first place, and the pools in which it has places; empty if each chunk has all pools.
    chunks: Vec<(usize, PoolSet)>,
}

impl Extents {
    pub(crate) fn new(writable: bool) -> Self {
        Self { mapped: HashMap::new(), writable }
    }

    /// Maps the extents that came with an answer; an extent that is already mapped is replaced.
    ///
    /// # Errors
    /// Fails if an extent does not have exactly one descriptor, of the right kind.
    pub(crate) fn add(&mut self, extents: &[Extent], descriptors: &[OwnedFd]) -> Result<(), SessionError> {
        if extents.len() != descriptors.len() {
            return Err(SessionError::wrong_answer("one descriptor comes for each extent"));
        }
        for (extent, descriptor) in extents.iter().zip(descriptors) {
            let mapping = if self.writable {
                Mapping::writable(descriptor.as_fd(), extent.bytes)?
            } else {
                Mapping::read_only(descriptor.as_fd(), extent.bytes)?
            };
            self.mapped.insert(extent.extent, Arc::new(mapping));
        }
        Ok(())
    }

    /// Forgets all extents. Each stays mapped as long as a value of [`Self::place`] uses it.
    pub(crate) fn clear(&mut self) {
        self.mapped.clear();
    }

    /// Finds the mappings of the blocks of `chunks` chunks. `pools` names the pools in which each chunk has places.
    ///
    /// # Errors
    /// Fails if a block does not have exactly one place, or a place lies outside of all extents.
    pub(crate) fn place(
        &self,
        namespace: &Namespace,
        chunks: usize,
        pools: impl Fn(usize) -> PoolSet,
        places: Vec<Place>,
    ) -> Result<Placed, SessionError> {
        let (blocks, every) = (namespace.blocks_per_chunk(), namespace.rules().every());
        let mut starts = Vec::new();
        let mut expected = chunks.saturating_mul(blocks);
        if (0..chunks).any(|chunk| pools(chunk) != every) {
            expected = 0;
            for pools in (0..chunks).map(pools) {
                starts.push((expected, pools));
                expected += pools.len() * namespace.slices();
            }
        }
        if places.len() != expected {
            return Err(SessionError::wrong_answer("one place comes for each block"));
        }
        let mut mappings: Vec<(u32, Arc<Mapping>)> = Vec::new();
        let partial = starts.iter().flat_map(|&(_, pools)| namespace.blocks_of(pools));
        let whole = (0..if starts.is_empty() { places.len() } else { 0 }).map(|i| i % blocks);
        for (place, block) in places.iter().zip(whole.chain(partial)) {
            let mapping = match mappings.iter().position(|(number, _)| *number == place.extent) {
                Some(i) => &mappings[i].1,
                None => {
                    let known = self.mapped.get(&place.extent);
                    let known =
                        known.ok_or_else(|| SessionError::wrong_answer("a place in an unknown extent"))?;
                    mappings.push((place.extent, Arc::clone(known)));
                    known
                }
            };
            if !mapping.contains(place.offset, namespace.block_bytes(block)) {
                return Err(SessionError::wrong_answer("a place outside of its extent"));
            }
        }
        Ok(Placed { mappings, places, chunks: starts })
    }
}

impl Placed {
    /// The mapping and offset of block `block` of the chunk with this index, if the block has a place.
    ///
    /// # Panics
    /// Panics if there is no such chunk.
    pub(crate) fn block(
        &self,
        namespace: &Namespace,
        chunk: usize,
        block: usize,
    ) -> Option<(&Arc<Mapping>, u64)> {
        self.index(namespace, chunk, block).map(|index| self.at(index))
    }

    /// The index of the place of block `block` of the chunk with this index, if the block has a place.
    ///
    /// # Panics
    /// Panics if there is no such chunk.
    pub(crate) fn index(&self, namespace: &Namespace, chunk: usize, block: usize) -> Option<usize> {
        let per_slice = namespace.pool_bytes().len();
        if self.chunks.is_empty() {
            return Some(chunk * namespace.blocks_per_chunk() + block);
        }
        let (start, pools) = self.chunks[chunk];
        let pool = block % per_slice;
        let in_slice = pools.common(PoolSet::first(pool)).len();
        pools.has(pool).then(|| start + block / per_slice * pools.len() + in_slice)
    }

    /// The number of places.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The mapping and offset of a place.
    ///
    /// # Panics
    /// Panics if there is no such place.
    pub(crate) fn at(&self, index: usize) -> (&Arc<Mapping>, u64) {
        let place = self.places[index];
        let found = self.mappings.iter().find(|(number, _)| *number == place.extent);
        let (_, mapping) = found.expect("`place` kept the mapping of every place");
        (mapping, place.offset)
    }
}
