//! The membership, shared by the coordinator's tasks and threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::membership::Membership;

/// The membership, shared with HTTP. It is locked only briefly.
#[derive(Debug, Clone)]
pub(crate) struct SharedMembership(Arc<Mutex<Membership>>);

impl SharedMembership {
    pub(crate) fn new(membership: Membership) -> Self {
        Self(Arc::new(Mutex::new(membership)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Membership> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
