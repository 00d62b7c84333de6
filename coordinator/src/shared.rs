//! The membership, shared by the coordinator's tasks and threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_net::audit::Audit;

use crate::membership::{IsMember, Membership};

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

    /// Forgets a lost node as an admin wants; returns whether it was lost. The audit log has a line of it.
    ///
    /// # Errors
    /// The node is a member.
    pub(crate) fn forget(&self, node: &str, by: &str, audit: &Audit) -> Result<bool, IsMember> {
        let forgot = self.lock().forget(node);
        let outcome = match &forgot {
            Ok(true) => Ok(()),
            Ok(false) => Err("it is not lost"),
            Err(_) => Err("it is a member"),
        };
        tracing::info!(by, node, ?outcome, "an admin has a lost node forgotten");
        audit.note(by, "forget", node, outcome);
        forgot
    }
}
