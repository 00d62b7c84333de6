//! The object store's part of a node's configuration file.

use std::collections::BTreeMap;
use std::fmt;

use larder_core::store::WritePolicy;
use serde::Deserialize;

use super::default_write_after_uses;

/// The object tier: a store that all nodes share. Credentials come from the environment, by the names that the store's own
/// tools use (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, ...).
#[derive(Deserialize, Clone, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ObjectConfig {
    /// The store and the place in it: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`.
    pub url: String,
    /// The store's address, if it differs from its maker's own.
    pub endpoint: Option<String>,
    /// Whether it may be spoken to without TLS.
    #[serde(default)]
    pub allow_http: bool,
    /// Other settings of the store, by the names that the `object_store` crate gives them (`region`, ...).
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// When chunks are written: `write_through`, `write_through_selective`, `write_back` or `off`.
    #[serde(default)]
    pub write: ObjectWrite,
    /// For `write_through_selective`: from which use of a chunk on, its commit included.
    #[serde(default = "default_write_after_uses")]
    pub write_after_uses: u32,
    /// Requests at a time; writes take half of them at most.
    #[serde(default = "default_object_requests")]
    pub max_requests: usize,
    /// Chunks that wait to be written, and as many that wait to be read; more are left out.
    #[serde(default = "default_object_queue")]
    pub queue_orders: usize,
    /// How long one request may take.
    #[serde(default = "default_request_timeout_ms")]
    pub request_timeout_ms: u64,
    /// How long a lease waits for chunks from the store, and a write may take, repeated requests included.
    #[serde(default = "default_object_deadline_ms")]
    pub read_deadline_ms: u64,
    /// How long a lookup waits for the store's answers.
    #[serde(default = "default_object_find_deadline_ms")]
    pub find_deadline_ms: u64,
}

/// When chunks are written to the object store.
#[derive(Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ObjectWrite {
    /// When they are committed: every node finds them from then on.
    #[default]
    WriteThrough,
    /// When they were used often enough.
    WriteThroughSelective,
    /// When they are evicted from memory.
    WriteBack,
    /// Never: it is only read.
    Off,
}

impl fmt::Debug for ObjectConfig {
    /// Without the settings' values, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<&String> = self.settings.keys().collect();
        let Self { url, endpoint, write, .. } = self;
        f.debug_struct("ObjectConfig")
            .field("url", url)
            .field("endpoint", endpoint)
            .field("settings", &settings)
            .field("write", write)
            .finish_non_exhaustive()
    }
}

impl From<ObjectWrite> for Option<WritePolicy> {
    fn from(write: ObjectWrite) -> Self {
        match write {
            ObjectWrite::WriteThrough => Some(WritePolicy::WriteThrough),
            ObjectWrite::WriteThroughSelective => Some(WritePolicy::WriteThroughSelective),
            ObjectWrite::WriteBack => Some(WritePolicy::WriteBack),
            ObjectWrite::Off => None,
        }
    }
}

fn default_object_requests() -> usize {
    32
}

fn default_object_queue() -> usize {
    1_024
}

fn default_request_timeout_ms() -> u64 {
    5_000
}

fn default_object_deadline_ms() -> u64 {
    10_000
}

fn default_object_find_deadline_ms() -> u64 {
    200
}
