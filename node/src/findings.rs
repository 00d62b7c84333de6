//! The findings of an examination of the host.

use serde::{Deserialize, Serialize};

/// A finding in the body of `GET /doctor`, a list: as `larder doctor` finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingStatus {
    /// The check.
    pub check: String,
    /// `ok`, `note` (the node could work better), `warning` (it works, but slowly or not safely), or `problem` (it does not work).
    pub level: String,
    /// The finding.
    pub found: String,
    /// What to do about it, if anything.
    pub advice: Option<String>,
}
