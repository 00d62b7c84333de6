//! The object store's part of a node's configuration file.

use std::collections::BTreeMap;
use std::fmt;

use larder_core::store::WritePolicy;
use serde::{Deserialize, Serialize};

use super::{WRITE_AFTER_USES, number};

/// The object tier: a store that all nodes share. Credentials come from the environment, by the names that the store's own
/// tools use (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, ...).
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ObjectConfig {
    /// The store and the place in it: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`.
    pub url: String,
    /// The store's address, if it differs from the provider's usual address.
    pub endpoint: Option<String>,
    /// Whether the node may speak to the store without TLS.
    #[serde(default)]
    pub allow_http: bool,
    /// Other settings of the store, by the names that the `object_store` crate gives them (`region`, ...).
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// When chunks are written: `write_through`, `write_through_selective`, `write_back` or `off`.
    #[serde(default)]
    pub write: ObjectWrite,
    /// For `write_through_selective`: the number of uses, the commit included, from which a chunk is written.
    #[serde(default = "number::<WRITE_AFTER_USES, _>")]
    pub write_after_uses: u32,
    /// Maximum number of requests at a time; writes take at most half of this number, and writes and reads together at most three
    /// quarters, so that questions which chunks are there do not wait behind blocks.
    #[serde(default = "number::<REQUESTS, _>")]
    pub max_requests: usize,
    /// Maximum number of chunks that wait to be written, and of chunks that wait to be read. Further chunks are skipped.
    #[serde(default = "number::<QUEUE_ORDERS, _>")]
    pub queue_orders: usize,
    /// Time limit of one request, besides a second for each 4 MiB.
    #[serde(default = "number::<REQUEST_TIMEOUT_MS, _>")]
    pub request_timeout_ms: u64,
    /// Time for which a lease waits for chunks from the store, and for which a write waits for its upload to begin.
    #[serde(default = "number::<READ_DEADLINE_MS, _>")]
    pub read_deadline_ms: u64,
    /// Time for which a lookup waits for the store's answers.
    #[serde(default = "number::<FIND_DEADLINE_MS, _>")]
    pub find_deadline_ms: u64,
}

/// The time at which chunks are written to the object store.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ObjectWrite {
    /// At their commit: every node finds them from then on.
    #[default]
    WriteThrough,
    /// After `write_after_uses` uses.
    WriteThroughSelective,
    /// When they are evicted from memory.
    WriteBack,
    /// Never: the node only reads the store.
    Off,
}

impl ObjectConfig {
    /// The store at `url`, with all the defaults.
    pub fn new(url: String) -> Self {
        Self {
            url,
            endpoint: None,
            allow_http: false,
            settings: BTreeMap::new(),
            write: ObjectWrite::default(),
            write_after_uses: WRITE_AFTER_USES.into(),
            max_requests: REQUESTS.into(),
            queue_orders: QUEUE_ORDERS.into(),
            request_timeout_ms: REQUEST_TIMEOUT_MS.into(),
            read_deadline_ms: READ_DEADLINE_MS.into(),
            find_deadline_ms: FIND_DEADLINE_MS.into(),
        }
    }
}

impl fmt::Debug for ObjectConfig {
    /// Leaves out the settings' values, which may be secret.
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

/// Limits of requests and orders, and the time limit of each kind.
const REQUESTS: u16 = 32;
const QUEUE_ORDERS: u16 = 1_024;
const REQUEST_TIMEOUT_MS: u16 = 5_000;
const READ_DEADLINE_MS: u16 = 10_000;
const FIND_DEADLINE_MS: u16 = 200;
