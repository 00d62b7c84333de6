//! An actor's part in the object store.

use std::sync::Arc;
use std::time::Duration;

use crate::object::ObjectTier;

/// An actor's part in the object store, as it is handed over.
pub struct ObjectParts {
    /// The tier, which all actors share.
    pub tier: Arc<ObjectTier>,
    /// How long a lease waits for it.
    pub deadline: Duration,
    /// How long a lookup waits to hear what is there.
    pub find_deadline: Duration,
    /// Chunks of which the actor remembers whether they are there: about 100 bytes each.
    pub known_chunks: usize,
}

/// An actor's part in the object store.
pub(super) struct Objects {
    pub(super) tier: Arc<ObjectTier>,
    pub(super) find_deadline: Duration,
}

impl Objects {
    pub(super) fn new(parts: ObjectParts) -> Self {
        let ObjectParts { tier, find_deadline, .. } = parts;
        Self { tier, find_deadline }
    }
}
