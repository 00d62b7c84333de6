//! The object tier: chunks in a store that all nodes share, and that outlives them.
//!
//! A tier is independent: a node has one tier, which its actors share. Its thread ([`tier`]) takes orders that name places in
//! the arena, as the disk tier's does. A block is one object, so that ranks and pools never overwrite each other. The object is
//! a record of the disk tier's format ([`crate::disk::format`]) with this block alone, at page 0 of segment 0 of a
//! storage whose identity is [`STORAGE`]. Its name is `PREFIX/v1/FINGERPRINT/HH/HASH-SLICE-POOL`: fingerprint and hash of the
//! chunk as 64 hexadecimal digits, `HH` the first two of the hash, so that names spread evenly over a store's partitions and
//! a local folder's directories; slice and pool as decimal numbers. A pool that a chunk lacks has no object. The number after
//! `v` is the format's version: builds with another version neither read nor delete these objects.
//!
//! A node does not know which objects the store has. It remembers those that it saw (`larder_core::tiers::presence`), and asks
//! for the rest (`larder_core::tiers::search`). A chunk's block is uploaded only if the store has no object of that name
//! (`If-None-Match`), so two nodes never overwrite each other.
//!
//! | fault | result |
//! | --- | --- |
//! | the store refuses, or cannot be reached | [`OpenError`] says what to change; or the node starts without the tier |
//! | the store fails later | the answer is `Closed`; after some failures in a row the node leaves the store alone for a while |
//! | bytes are damaged | a miss, counted; the object is deleted, or else replaced by the next write |
//! | more orders than the queue holds | `Busy` |
//! | the store asks for a pause (`Retry-After`) | once it is left alone, the next trial waits for the end of the pause |
//! | the store is slow | an order ends at its deadline, or with its upload; fewer uploads are under way at a time ([`pace`]) |
//! | the store is slow to find | a `find` answers at its own deadline with the facts that it has |
//! | a node ends while it writes to a folder | half an upload stays, for a day |

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use larder_net::metrics::Part as _;

use crate::disk::format::{StorageId, VERSION};
use crate::host::CpuSet;

pub mod breaker;
mod client;
mod leftovers;
pub mod metrics;
mod ordered;
pub mod pace;
mod patience;
mod record;
mod store;
pub mod tier;
mod trouble;

pub use client::PurgeTrouble;
pub use metrics::ObjectMetrics;
pub use record::read_object;
pub use store::unknown_setting;
pub use tier::ObjectTier;
pub use trouble::{Trouble, TroubleKind};

/// The options of a tier.
#[derive(Clone, PartialEq)]
pub struct ObjectOptions {
    /// The store and the place in it: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`.
    pub url: String,
    /// Settings of the store, by the names that the `object_store` crate gives them (`endpoint`, `region`, `access_key_id`,
    /// ...). They override the environment (`AWS_ACCESS_KEY_ID`, ...). Their values are never shown.
    pub settings: BTreeMap<String, String>,
    /// Whether the store may be spoken to without TLS.
    pub allow_http: bool,
    /// Whether a node starts even if the store refuses, or does not answer within two seconds. The node then leaves the store
    /// alone, and tries it again every few seconds.
    pub start_without: bool,
    /// Whether chunks are written. If not, nothing is written to try the store out either, so the right to read and list is enough.
    pub writes: bool,
    /// Orders that may wait, in each of the queues of writes, reads and finds; more are refused with `Busy`.
    pub queue_orders: usize,
    /// Requests at a time. Writes take half of them at most. A request of 4 MiB takes a distant store some 50 ms,
    /// so 32 requests fill a link of 20 Gbit/s.
    pub max_in_flight: usize,
    /// Bytes of blocks that are being read and written at a time.
    pub bytes_in_flight: u64,
    /// How long one request may take, in addition to the time that its bytes take at 4 MiB a second. A request that failed for a
    /// passing reason is tried again within this time.
    pub timeout: Duration,
    /// How long an order may take, waiting and all tries included. An upload that has begun by then may end.
    pub deadline: Duration,
    /// How long a `find` may take: chunks that are unknown by then are not found.
    pub find_deadline: Duration,
    /// Limit of chunks for which the actor remembers whether the store has them: about 100 bytes each.
    pub known_chunks: usize,
    /// The CPUs of the tier's thread.
    pub cpus: CpuSet,
}

/// Tells a block from a chunk's other blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// The part of the chunk that one engine rank holds.
    pub slice: u16,
    /// The kind of state.
    pub pool: u8,
}

/// Why a tier cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL is invalid, or names an unknown kind of store.
    #[error(
        "the object tier knows no store `{0}`: write s3://BUCKET/PREFIX, gs://..., az://... or file:///FOLDER"
    )]
    Url(String),
    /// This kind of store does not have the setting.
    #[error("the object tier's {store} has no setting `{key}`: correct its name or remove it")]
    Setting {
        /// The kind of store.
        store: &'static str,
        /// The setting's name.
        key: String,
    },
    /// The folder cannot be made.
    #[error("the object tier's folder {} cannot be made: check that this user can write there", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A setting is missing, or wrong.
    #[error("the object tier's {url} cannot be used: {reason}. Correct its settings or the environment")]
    Settings {
        /// The store's URL, as configured.
        url: String,
        /// The error of the `object_store` crate.
        reason: String,
    },
    /// The store refuses, or does not answer.
    #[error("the object tier's {url}: {trouble}")]
    Refused {
        /// The store's URL, as configured.
        url: String,
        /// The store's answer.
        trouble: Trouble,
    },
    /// The system gives no thread.
    #[error("cannot start the object tier's thread")]
    Thread(#[source] std::io::Error),
}

impl fmt::Debug for ObjectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<&String> = self.settings.keys().collect();
        f.debug_struct("ObjectOptions")
            .field("url", &self.url)
            .field("settings", &settings)
            .field("allow_http", &self.allow_http)
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

/// Whether a URL names a kind of store that a tier can be in.
pub fn is_url_of_a_store(url: &str) -> bool {
    store::parse(url).is_some()
}

/// Tries a store out as a node does when it starts: writes, reads and deletes a small object, or only reads. A node that may
/// not delete serves all the same, and its purges fail.
///
/// # Errors
/// [`OpenError`] says what to change.
pub fn check(options: &ObjectOptions) -> Result<(), OpenError> {
    let metrics = ObjectMetrics::register(&prometheus::Registry::new());
    let options =
        ObjectOptions { start_without: false, deadline: options.deadline.min(CHECK_TIME), ..options.clone() };
    let metrics = metrics.unwrap_or_else(|error| unreachable!("the table has them: {error}"));
    let tier = ObjectTier::open(&options, metrics)?;
    let not_deleted = tier.not_deleted();
    not_deleted.map_or(Ok(()), |trouble| Err(OpenError::Refused { url: options.url, trouble }))
}

/// How long a store that is tried out may take.
const CHECK_TIME: Duration = Duration::from_secs(5);

/// The storage identity in every object's record.
pub const STORAGE: StorageId = StorageId(*b"larder object 1\0");

/// Bytes of the largest object: the limit of one request to S3.
pub const MAX_OBJECT_BYTES: u64 = 5 << 30;

const _: () = assert!(VERSION == 1, "objects of another version have other names: change `record::name` too");

#[cfg(test)]
mod tests;
