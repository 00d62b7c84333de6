//! Plays a trace through engine sessions, with every byte checked.

pub mod assignment;
pub mod infinite;
pub mod namespace;
pub mod progress;
pub mod report;
pub mod tally;

pub use report::{Report, WrongBlock};
pub use tally::Tally;

/// Requests of a replay that are under way at a time.
pub const MAX_REQUESTS_IN_FLIGHT: usize = 16;

/// Bytes of one chunk's block where nobody asks for another size.
pub const DEFAULT_BLOCK_BYTES: u64 = 64 << 10;

/// Chunks that a node of a replay keeps where nobody asks for another number.
pub const DEFAULT_CHUNKS_PER_NODE: u64 = 3_000;
