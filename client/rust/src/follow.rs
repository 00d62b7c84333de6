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

/// The options of a follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowOptions {
    /// The node whose engine writes the missing chunks, and the number of the engine's actor. Without it only chunks that are
    /// written on this node are followed.
    pub writer: Option<(String, u16)>,
    /// The earliest attempt whose layers are wanted; 0 for any attempt.
    pub attempt: u64,
    /// The longest silence: after it, the chunks that have not come count as lost.
    pub patience: Duration,
}

/// How much of the followed chunks is in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InPlace {
    /// Chunks that have come or may still come, from the first on.
    pub chunks: u32,
    /// Layers that are in place in each of these chunks, from the first on.
    pub layers: u32,
    /// Whether nothing more will come: all of these chunks are committed.
    pub is_whole: bool,
}

/// Followed chunks: their layers may be read as they come, and the whole chunks once they are committed.
///
/// Dropping the follow lets the chunks go at once, without blocking, from any thread: read them before. A call that waits for
/// layers keeps the chunks until the call ends.
pub struct Follow(pub(crate) Arc<Followed>);

/// The state that a follow shares with the calls that wait for layers.
pub(crate) struct Followed {
    link: Arc<Link>,
    namespace: Namespace,
    asked: Arc<[ChunkHash]>,
    number: u64,
    state: Mutex<FollowState>,
}

struct FollowState {
    known: InPlace,
    /// The lease of the chunks. It has the follow's number: giving back the lease gives back the follow.
    lease: Option<Arc<LeaseGuard>>,
}

impl Follow {
    pub(crate) fn new(link: &Arc<Link>, namespace: Namespace, asked: Arc<[ChunkHash]>, number: u64) -> Self {
        let known = InPlace { chunks: asked.len() as u32, layers: 0, is_whole: asked.is_empty() };
        let state = Mutex::new(FollowState { known, lease: None });
        Self(Arc::new(Followed { link: Arc::clone(link), namespace, asked, number, state }))
    }

    /// The layers in place at the node's last news.
    #[must_use]
    pub fn in_place(&self) -> InPlace {
        self.0.in_place()
    }

    /// A lease of the blocks; `None` until the first layer is in place: then the node tells the places. Reading a layer that has
    /// not come fails with [`Damaged`](crate::Damaged). [`LeaseGuard::block_ptr`] gives a block's place once its first layer has
    /// come: read only the layers that are in place. The guard keeps the chunks even after the follow is dropped.
    #[must_use]
    pub fn lease(&self) -> Option<Arc<LeaseGuard>> {
        self.0.lease()
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        self.0.namespace()
    }

    /// The number of requested chunks.
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

    /// The number of its session.
    pub(crate) fn session(&self) -> u64 {
        self.link.number
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes the node's news.
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
    /// Whether a wait for this many layers is over.
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
