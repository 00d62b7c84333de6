//! Messages about pins: an admin makes a node keep chunks from eviction, on behalf of the chunks' tenant.

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::ChunkHash;
use crate::namespace::Fingerprint;

/// An admin's command about a node's pins.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum PinCommand {
    /// Pins a prompt: every actor that has the first chunks of the prompt in memory keeps them.
    Start(PinStart),
    /// Ends a pin: the actor, and the pin's number there.
    End(u16, u64),
}

/// A prompt to pin.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PinStart {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The prompt's chunks from its first on; at most [`MAX_CHAIN_CHUNKS`](crate::limits::MAX_CHAIN_CHUNKS).
    pub hashes: Vec<ChunkHash>,
    /// The pin's duration; a node may grant less.
    pub duration_ms: u64,
}

/// The part of a prompt that an actor pinned.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePin {
    /// The actor.
    pub device: u16,
    /// The pin's number there.
    pub pin: u64,
    /// The number of the prompt's first chunks that the actor keeps.
    pub chunks: u32,
    /// The duration of the pin.
    pub duration_ms: u64,
}
