//! The answer of a node that has read its configuration again.

use rkyv::{Archive, Deserialize, Serialize};

/// What became of a changed configuration.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Settings that have changed, and count from now on.
    pub applied: Vec<ChangedSetting>,
    /// Keys of settings that differ from those in force, and count from the next start on.
    pub at_restart: Vec<String>,
}

/// A setting that has another value than before.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ChangedSetting {
    /// Its key, as `host.policy`; that of a tenant has the tenant's name, as `tenants.chat.max_bytes`.
    pub key: String,
    /// The value in force before, as JSON; `null` if there was none.
    pub before: String,
    /// The value in the file, as JSON; `null` if there is none.
    pub after: String,
}
