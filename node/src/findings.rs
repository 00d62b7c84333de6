//! The findings of an examination of the host.

use serde::{Deserialize, Serialize};

/// A finding in the list that `GET /doctor` returns, as in `larder doctor`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingStatus {
    /// The check.
    pub check: String,
    /// `ok`, `note` (the node could work better), `warning` (the node works, but slowly or not safely), or `problem` (the node
    /// does not work).
    pub level: String,
    /// The finding.
    pub found: String,
    /// What to do about it, if anything.
    pub advice: Option<String>,
}
