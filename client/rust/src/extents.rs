//! The extents of the arena that a session has mapped.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use larder_protocol::session::{Extent, Place};

use crate::error::SessionError;
use crate::mapping::Mapping;
use crate::namespace::Namespace;

/// The session's extents by number.
pub(crate) struct Extents {
    mapped: HashMap<u32, Arc<Mapping>>,
    /// Whether to map them writable.
    writable: bool,
}

/// The places of blocks, with the mappings in which they lie. They stay mapped as long as this lives, even where the
/// node renews an extent meanwhile.
pub(crate) struct Placed {
    mappings: Vec<(u32, Arc<Mapping>)>,
    places: Vec<Place>,
}

impl Extents {
    pub(crate) fn new(writable: bool) -> Self {
        Self { mapped: HashMap::new(), writable }
    }

    /// Maps the extents that came with an answer; one that is known is renewed.
    ///
    /// # Errors
    /// Where there is not one descriptor of the right kind for each.
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

    /// Finds the mappings of the blocks of `chunks` chunks.
    ///
    /// # Errors
    /// Where there is not one place for each block, or one lies outside of all extents.
    pub(crate) fn place(
        &self,
        namespace: &Namespace,
        chunks: usize,
        places: Vec<Place>,
    ) -> Result<Placed, SessionError> {
        let blocks = namespace.blocks_per_chunk();
        if Some(places.len()) != chunks.checked_mul(blocks) {
            return Err(SessionError::wrong_answer("one place comes for each block"));
        }
        let mut mappings: Vec<(u32, Arc<Mapping>)> = Vec::new();
        for (i, place) in places.iter().enumerate() {
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
            if !mapping.contains(place.offset, namespace.block_bytes(i % blocks)) {
                return Err(SessionError::wrong_answer("a place outside of its extent"));
            }
        }
        Ok(Placed { mappings, places })
    }
}

impl Placed {
    /// The mapping and offset of the block at `index`.
    ///
    /// # Panics
    /// Where there is no such block.
    pub(crate) fn block(&self, index: usize) -> (&Mapping, u64) {
        let place = self.places[index];
        let found = self.mappings.iter().find(|(number, _)| *number == place.extent);
        let (_, mapping) = found.expect("`place` kept the mapping of every place");
        (mapping, place.offset)
    }
}
