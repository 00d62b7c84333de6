//! Chunks that are read while they are being written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_protocol::ChunkHash;
use larder_protocol::handoff::LayersSum;
use larder_protocol::session::Request;

use crate::error::SessionError;

use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::lock;
use crate::namespace::Namespace;

/// What a follow may say besides its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowOptions {
    /// The node whose engine writes what is not here, and the number of the actor that it talks to. Without it only what is
    /// written on this node is followed.
    pub writer: Option<(String, u16)>,
    /// The earliest attempt whose layers are wanted; 0 where any will do.
    pub attempt: u64,
    /// For how long nothing may come before the chunks that did not count as lost.
    pub patience: Duration,
}

/// How much of what is followed is in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InPlace {
    /// Chunks, from the first on, that have come or may still come.
    pub chunks: u32,
    /// Layers that are in place in every one of them, from the first on.
    pub layers: u32,
    /// Whether nothing is to come any more: all of these chunks are committed.
    pub is_whole: bool,
}

/// Chunks that are followed: layers of them may be read as they come, and all of them from when they are whole.
///
/// Dropping it lets them go at once, without blocking, from any thread: read what is wanted before. A call that waits for its layers
/// keeps them until it ends.
pub struct Follow(pub(crate) Arc<Followed>);

/// What calls that wait for layers share with the follow.
pub(crate) struct Followed {
    link: Arc<Link>,
    namespace: Namespace,
    asked: Arc<[ChunkHash]>,
    number: u64,
    state: Mutex<State>,
}

struct State {
    known: InPlace,
    /// Given back in place of the follow itself, whose number it has.
    lease: Option<Arc<LeaseGuard>>,
}

impl Follow {
    pub(crate) fn new(link: &Arc<Link>, namespace: Namespace, asked: Arc<[ChunkHash]>, number: u64) -> Self {
        let known = InPlace { chunks: asked.len() as u32, layers: 0, is_whole: asked.is_empty() };
        let state = Mutex::new(State { known, lease: None });
        Self(Arc::new(Followed { link: Arc::clone(link), namespace, asked, number, state }))
    }

    /// What was in place when the node told last.
    #[must_use]
    pub fn in_place(&self) -> InPlace {
        self.0.in_place()
    }

    /// The blocks, once the node has told where they stand, which it has when the first layer is in place. Layers that have
    /// not come are [`Damaged`](crate::Damaged). Where a block stands ([`LeaseGuard::block_ptr`]) is told when its first layer has come:
    /// read only the layers in place there. It keeps the chunks, also when this is dropped.
    #[must_use]
    pub fn lease(&self) -> Option<Arc<LeaseGuard>> {
        self.0.lease()
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        self.0.namespace()
    }

    /// Chunks that were asked for.
    #[must_use]
    pub fn asked(&self) -> usize {
        self.0.asked.len()
    }
}

impl Followed {
    pub(crate) fn in_place(&self) -> InPlace {
        lock(&self.state).known
    }

    pub(crate) fn lease(&self) -> Option<Arc<LeaseGuard>> {
        lock(&self.state).lease.clone()
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub(crate) fn hashes(&self) -> &[ChunkHash] {
        &self.asked
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes what the node told.
    pub(crate) fn heard(
        &self,
        in_place: InPlace,
        lease: Option<LeaseGuard>,
        sums: Vec<LayersSum>,
        checksums: Vec<u64>,
    ) -> Result<(), SessionError> {
        let mut state = lock(&self.state);
        if let Some(lease) = lease {
            state.lease = Some(Arc::new(lease));
        }
        if let Some(lease) = &state.lease {
            let layers = if in_place.is_whole { u32::MAX } else { in_place.layers };
            lease.heard((in_place.chunks as usize, layers), sums, checksums)?;
        }
        state.known = in_place;
        Ok(())
    }
}

impl InPlace {
    /// Whether there is nothing to wait for until so many layers are in place.
    pub(crate) fn has(&self, layers: u32) -> bool {
        self.is_whole || self.chunks == 0 || self.layers >= layers
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if lock(&self.state).lease.is_none() {
            self.link.post(&Request::Release(self.number));
        }
    }
}
