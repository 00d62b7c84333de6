//! Plays a trace through engine sessions, with every byte checked.

pub mod driver;
mod engine;
pub(crate) mod holdings;
pub mod infinite;
pub mod link;
pub mod losses;
pub mod namespace;
pub mod progress;
pub mod report;
pub mod route;
pub mod sessions;
pub mod tally;
pub(crate) mod upkeep;

pub use driver::{Driver, Load};
pub use report::{Report, WrongBlock};
pub use tally::Tally;

/// Sessions of a replay that are in flight at a time.
///
/// Concurrent requests for the same chunks find none of them saved. So hit rates differ from those of one session after the
/// other: on the public traces by up to 0.15 points with 4 sessions.
pub const REQUESTS_IN_FLIGHT: u16 = 4;

/// The most requests of a replay that may be under way at a time.
pub const MAX_REQUESTS_IN_FLIGHT: u16 = 256;

/// Default number of requests under way that a development cluster has room for.
pub const USUAL_REQUESTS_IN_FLIGHT: u16 = 16;

/// Bytes of one chunk's block if nobody asks for another size.
pub const DEFAULT_BLOCK_BYTES: u64 = 64 << 10;

/// Chunks that a node of a replay keeps if nobody asks for another number.
pub const DEFAULT_CHUNKS_PER_NODE: u64 = 3_000;

/// Chunks that are reserved, written and committed together: [`MAX_PART_CHUNKS`], or fewer if [`STAGING_BYTES`] would not hold
/// the blocks of all requests under way; at least one.
pub fn part_chunks(block_bytes: u64, in_flight: u16) -> u64 {
    let of_each = STAGING_BYTES / u64::from(in_flight.max(USUAL_REQUESTS_IN_FLIGHT));
    (of_each / block_bytes.max(1)).clamp(1, MAX_PART_CHUNKS)
}

/// The most chunks that are reserved, written and committed together.
pub const MAX_PART_CHUNKS: u64 = 64;

/// Limit of bytes that are written at a time. One block of each request in flight may be written even beyond it.
pub const STAGING_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_are_written_in_smaller_parts() {
        let parts = [1, 4_096, 256 << 10, 1 << 20, 4 << 20, 1 << 30].map(|bytes| part_chunks(bytes, 4));
        assert_eq!(parts, [64, 64, 16, 4, 1, 1]);
        assert_eq!((part_chunks(4_096, 256), part_chunks(64 << 10, 256)), (64, 4));
    }
}
