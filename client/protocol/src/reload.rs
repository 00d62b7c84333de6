//! The answer of a node that has read its configuration again.

use rkyv::{Archive, Deserialize, Serialize};

/// The settings that have changed.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Changed settings that take effect at once.
    pub applied: Vec<ChangedSetting>,
    /// Keys of changed settings that take effect at the next start.
    pub at_restart: Vec<String>,
}

/// A setting that has another value than before.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ChangedSetting {
    /// The setting's key, such as `host.policy`. The key of a tenant's setting has the tenant's name, such as
    /// `tenants.chat.max_bytes`.
    pub key: String,
    /// The value in force before, as JSON; `null` if there was none.
    pub before: String,
    /// The value in the file, as JSON; `null` if there is none.
    pub after: String,
}
