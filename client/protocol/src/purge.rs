//! Messages about purges: an admin makes a node remove chunks, wherever the node has them.
//!
//! A purge of a cluster begins at every node ([`PurgeCommand::Start`]). It ends at each node when all nodes have removed their
//! chunks ([`PurgeCommand::End`]). Until then, no node brings chunks of the purge from elsewhere: otherwise a node that is done
//! could get them back from a node that is not done.

use std::fmt;
use std::str::FromStr;

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::{ChunkHash, ParseHashError};
use crate::namespace::Fingerprint;

/// The chunks to remove.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum PurgeScope {
    /// All chunks of a tenant.
    Tenant(String),
    /// All chunks of a namespace.
    Namespace(NamespaceName),
    /// These chunks of a namespace, and all chunks after them that the node knows of; at most
    /// [`MAX_CHAIN_CHUNKS`](crate::limits::MAX_CHAIN_CHUNKS).
    Chunks(NamespaceName, Vec<ChunkHash>),
}

/// A namespace as people know it: the first eight bytes of its fingerprint.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceName(pub [u8; 8]);

/// An admin's command about a node's purge.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum PurgeCommand {
    /// Remove these chunks, or only count them.
    Start(PurgeScope, PurgeMode),
    /// Only report the progress of the purge with this number.
    Report(u64),
    /// End the purge with this number: its chunks may come again.
    End(u64),
}

/// Whether a purge removes anything.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurgeMode {
    /// The purge only counts the chunks.
    Count,
    /// The purge removes the chunks.
    Remove,
}

/// The progress of a node's purge.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PurgeReport {
    /// The purge's number.
    pub purge: u64,
    /// Whether all chunks are removed.
    pub is_over: bool,
    /// The reason why some chunks could not be removed, as a text for people.
    pub trouble: Option<String>,
    /// The counts of the purge's chunks so far.
    pub counts: PurgeCounts,
}

/// Chunks that a purge removed, or would remove.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PurgeCounts {
    /// Chunks in memory.
    pub memory_chunks: u64,
    /// Bytes of the slots of these chunks.
    pub memory_bytes: u64,
    /// Chunks in memory that somebody reads: nobody finds them any more, and their memory is free when the readers let go.
    pub read_chunks: u64,
    /// Records on disk.
    pub disk_chunks: u64,
    /// Objects in the object store.
    pub objects: u64,
}

impl PurgeCounts {
    /// The sums of two purges' counts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            memory_chunks: self.memory_chunks + other.memory_chunks,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            read_chunks: self.read_chunks + other.read_chunks,
            disk_chunks: self.disk_chunks + other.disk_chunks,
            objects: self.objects + other.objects,
        }
    }
}

impl PurgeScope {
    /// Whether a namespace of a tenant has chunks of the purge.
    #[must_use]
    pub fn covers(&self, tenant: &str, fingerprint: &Fingerprint) -> bool {
        match self {
            Self::Tenant(name) => name == tenant,
            Self::Namespace(name) | Self::Chunks(name, _) => name.names(fingerprint),
        }
    }

    /// The chunks, if the purge is not for a whole tenant or namespace.
    #[must_use]
    pub fn chunks(&self) -> Option<&[ChunkHash]> {
        match self {
            Self::Chunks(_, hashes) => Some(hashes),
            Self::Tenant(_) | Self::Namespace(_) => None,
        }
    }
}

impl NamespaceName {
    /// Whether this is the name of the namespace of this fingerprint.
    #[must_use]
    pub fn names(&self, fingerprint: &Fingerprint) -> bool {
        fingerprint.0.starts_with(&self.0)
    }
}

impl fmt::Display for NamespaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for NamespaceName {
    type Err = ParseHashError;

    fn from_str(text: &str) -> Result<Self, ParseHashError> {
        if !(16..=64).contains(&text.len()) {
            return Err(ParseHashError::NamespaceLength { found: text.len() });
        }
        // Digits beyond the first 16 are checked and ignored.
        let whole: ChunkHash = format!("{text:0<64}").parse()?;
        Ok(Self(std::array::from_fn(|at| whole.0[at])))
    }
}

impl fmt::Display for PurgeScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(name) => write!(f, "tenant {name}"),
            Self::Namespace(name) => write!(f, "namespace {name}"),
            Self::Chunks(name, hashes) => {
                write!(f, "{} chunks of namespace {name}", hashes.len())?;
                hashes.first().map_or(Ok(()), |first| write!(f, ", the first {first}"))
            }
        }
    }
}
