//! Placement: decides where the blocks of a chunk stay, in the cluster.
//!
//! A copy must earn its place against the chunk that it displaces, anywhere in the cluster. [`Worth`] is the one unit for both.
//! Each rule is a function here:
//!
//! - **Chunks stay where they were computed**, as a rule. A fetch passes through ([`Placement::Pass`]).
//! - **A copy earns its place** (`earns_its_place`) in free room, and where it saves its reader more transfers than the chunk
//!   that makes way saves.
//! - **Copies go first** ([`copy_goes_first`]): the copy that nobody used for longest goes before a chunk that only this node
//!   has, unless the copy saves transfers of more worth. If an engine computes a chunk again that another node has behind a hole in
//!   the prompt, the other node's chunk is a copy from then on.
//! - **A chunk that another node has read stays longer** ([`goes_before_read`]): its prompt probably goes on there, and without
//!   this chunk the rest of the prompt is lost. The policy sees only this node's chunks and takes the chunk for the prompt's end.
//! - **A transfer from a busy node counts more** ([`transfer_weight`]): its readers keep copies of chunks that they read often,
//!   so that the busy node serves less.
//! - **An only copy that was used again is forwarded** ([`may_be_forwarded`], [`pays_to_forward`]) to the node whose next victim
//!   is worth less. A forwarded chunk keeps its age, and must be used before it is forwarded again.
//!
//! No node asks a neighbor for its worth or how much it serves: each answer between nodes bears both of its sender
//! ([`Neighbours`]).
//!
//! The earlier rule is [`PlacementRule::Reads`]. It was found on chat traffic with enough memory: the only copy migrates to its
//! reader, and a chunk that was read [`REPLICATE_READS`] times is replicated. On sessions of agents, whose prompts are long and
//! whose memory is scarce, it costs 13 points of hit rate: whole prompts pile up on their last reader.

mod gaps;
mod neighbours;
mod served;
mod worth;

use strum::{Display, EnumString, IntoStaticStr};

pub use gaps::Gaps;
pub use neighbours::Neighbours;
pub use served::Served;
pub use worth::{Pressure, Saves, Stake, Worth};

/// The rule by which nodes place chunks, as configuration and commands write it.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    Display,
    EnumString,
    IntoStaticStr,
    serde::Serialize,
    serde::Deserialize,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PlacementRule {
    /// A copy earns its place against the chunk that it displaces, anywhere in the cluster.
    #[default]
    Worth,
    /// The only copy migrates to its reader; a chunk that was read eight times is replicated.
    Reads,
}

impl PlacementRule {
    /// Every rule there is.
    pub const ALL: [Self; 2] = [Self::Worth, Self::Reads];
}

/// A node's treatment of fetched blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The only copy moves to its reader: the reader keeps the blocks, and the holder gives up its own.
    Migrate,
    /// The reader keeps a further copy.
    Replicate,
    /// The blocks stay only as long as they are read.
    Pass,
    /// The holder evicts the chunk, and this node keeps it instead.
    Forwarded,
}

/// Whether a further copy earns its place at its reader: the transfers that it saves are worth no less than `least`, the worth of
/// the chunk that makes way. Without `least` there is free room.
fn earns_its_place(copy: Worth, least: Option<Worth>) -> bool {
    least.is_none_or(|least| copy >= least)
}

/// Whether a copy of a chunk that others hold goes before an only copy that is worth `least`. Without `least`, nothing is known
/// of only copies yet, and the copy goes.
pub fn copy_goes_first(copy: Worth, least: Option<Worth>) -> bool {
    least.is_none_or(|least| copy <= least)
}

/// Whether a chunk that no other node has read goes before the policy's victim, a chunk that another node has read. Nobody used
/// the first chunk for `idle`, and the victim for `idle_of_read`, in one unit: a chunk that was read elsewhere stays up to twice
/// as long.
pub fn goes_before_read(idle: u32, idle_of_read: u32) -> bool {
    idle >= idle_of_read / READ_STAYS
}

/// Whether an only copy that was read this often since it was computed may be forwarded when it is evicted.
pub fn may_be_forwarded(reads: u32) -> bool {
    reads >= FORWARD_READS
}

/// Whether an only copy that is evicted is worth its transfer to a node whose next victim is worth `there`: that node must keep
/// it half as long again as this node did.
pub fn pays_to_forward(chunk: Worth, there: Worth) -> bool {
    chunk > Worth::NOTHING && there.0.saturating_mul(FORWARD_GAIN_HALVES) <= chunk.0.saturating_mul(2)
}

/// How many transfers one transfer counts for, from a node that sends `served` bytes a second, where nodes send `mean` on
/// average.
pub fn transfer_weight(served: u64, mean: u64) -> u64 {
    let is_above = |quarters| served.saturating_mul(4) > mean.saturating_mul(quarters);
    if is_above(OVERLOADED_QUARTERS) {
        OVERLOADED_WEIGHT
    } else if is_above(BUSY_QUARTERS) {
        BUSY_WEIGHT
    } else {
        1
    }
}

/// The rule [`PlacementRule::Worth`] for a fetched chunk: a copy stays where it earns its place. Without `copy`, nobody
/// registered the chunk's namespace.
pub fn place_by_worth(copy: Option<Worth>, least: Option<Worth>) -> Placement {
    match copy {
        Some(copy) if earns_its_place(copy, least) => Placement::Replicate,
        _ => Placement::Pass,
    }
}

/// The rule [`PlacementRule::Reads`] for a chunk with `copies` copies and `reads` reads, this read included. `is_on_disk` says
/// that the holder has the chunk on disk: it stays there, since each move would wear a drive.
pub fn place_by_reads(copies: usize, reads: u32, is_on_disk: bool) -> Placement {
    if reads >= REPLICATE_READS || (is_on_disk && copies <= 1) {
        Placement::Replicate
    } else if copies <= 1 {
        Placement::Migrate
    } else {
        Placement::Pass
    }
}

/// From this number of reads on, a reader keeps a copy of its own by [`PlacementRule::Reads`].
pub const REPLICATE_READS: u32 = 8;

/// Above this many quarters of the mean, a node is busy: its reader keeps a chunk that it reads two and a half times as often as
/// the chunk that makes way.
const BUSY_QUARTERS: u64 = 5;
const BUSY_WEIGHT: u64 = 4;

/// Above this many quarters of the mean, a node is overloaded: its readers keep nearly all that they read.
const OVERLOADED_QUARTERS: u64 = 6;
const OVERLOADED_WEIGHT: u64 = 1_000;

/// A chunk that another node has read stays up to this many times as long as others. Replayed traces gain as much with factors
/// from 1.25 to 2; without a bound, nodes keep the beginnings of prompts that nobody continues.
const READ_STAYS: u32 = 2;

/// A chunk is forwarded to a node that keeps it this many halves as long. On replayed traces, a smaller factor costs transfers and
/// gains nothing; from a factor of two on it costs a few tenths of a point.
const FORWARD_GAIN_HALVES: u64 = 3;

/// A chunk that was read less often is not forwarded. Most evicted chunks are never used again, and a forward costs a transfer
/// now. Chunks that were read twice are half of those that a node would forward; the others gain nothing on replayed traces.
pub const FORWARD_READS: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: Stake = Stake { tokens: 512, bytes: 16 << 20 };

    fn worth(saves: Saves, every_ms: u64) -> Worth {
        CHUNK.worth(saves, every_ms)
    }

    #[test]
    fn a_copy_earns_its_place_where_it_is_read_ten_times_as_often_as_what_goes_for_it() {
        let least = Some(worth(Saves::Prefill, 10_000));
        assert!(earns_its_place(worth(Saves::Transfer, 1_000), least));
        assert!(!earns_its_place(worth(Saves::Transfer, 1_100), least));
    }

    #[test]
    fn every_copy_earns_its_place_in_free_room_and_what_stays_on_disk_makes_way_for_an_equal() {
        assert!(earns_its_place(worth(Saves::Transfer, u64::MAX), None));
        assert!(earns_its_place(worth(Saves::Transfer, 5_000), Some(worth(Saves::Transfer, 5_000))));
        assert!(!earns_its_place(worth(Saves::Transfer, 5_001), Some(worth(Saves::Transfer, 4_000))));
    }

    #[test]
    fn a_copy_goes_before_an_only_copy_unless_its_transfers_are_worth_more() {
        let least = Some(worth(Saves::Prefill, 10_000));
        assert!(copy_goes_first(worth(Saves::Transfer, 1_000), least));
        assert!(!copy_goes_first(worth(Saves::Transfer, 900), least));
        assert!(copy_goes_first(worth(Saves::Transfer, 1), None));
    }

    #[test]
    fn a_chunk_that_no_other_node_has_read_goes_first_once_it_was_idle_for_half_as_long() {
        assert!(goes_before_read(500, 1_000));
        assert!(!goes_before_read(499, 1_000));
        assert!(goes_before_read(0, 0));
    }

    #[test]
    fn an_only_copy_is_forwarded_to_a_node_that_keeps_it_half_as_long_again() {
        let chunk = worth(Saves::Prefill, 1_000);
        assert!(pays_to_forward(chunk, worth(Saves::Prefill, 1_501)));
        assert!(!pays_to_forward(chunk, worth(Saves::Prefill, 1_490)));
        assert!(pays_to_forward(chunk, Worth::NOTHING));
        assert!(!pays_to_forward(Worth::NOTHING, Worth::NOTHING), "a chunk of no worth goes nowhere");
    }

    #[test]
    fn a_chunk_that_was_computed_and_read_once_is_not_forwarded() {
        assert_eq!([0, 1, 2, 255].map(may_be_forwarded), [false, false, true, true]);
    }

    #[test]
    fn a_transfer_counts_more_from_a_node_that_serves_more_than_its_share() {
        assert_eq!(
            [100, 125, 126, 150, 151, 900].map(|served| transfer_weight(served, 100)),
            [1, 1, 4, 4, 1_000, 1_000]
        );
        assert_eq!(transfer_weight(0, 0), 1, "where nobody serves, nobody serves too much");
        assert_eq!(transfer_weight(u64::MAX, u64::MAX), 1);
    }

    #[test]
    fn by_reads_the_only_copy_migrates_to_the_node_that_reads_it() {
        assert!((1..REPLICATE_READS).all(|reads| place_by_reads(1, reads, false) == Placement::Migrate));
    }

    #[test]
    fn by_reads_what_is_read_eight_times_is_replicated() {
        assert!((1..5).all(|copies| place_by_reads(copies, REPLICATE_READS, false) == Placement::Replicate));
    }

    #[test]
    fn by_reads_a_chunk_with_two_copies_is_not_copied_before_the_eighth_read() {
        assert!((1..REPLICATE_READS).all(|reads| place_by_reads(2, reads, false) == Placement::Pass));
        assert!((1..REPLICATE_READS).all(|reads| place_by_reads(2, reads, true) == Placement::Pass));
    }

    #[test]
    fn by_reads_what_is_on_its_holders_disk_stays_there_and_its_reader_keeps_a_copy_in_memory() {
        assert!((1..REPLICATE_READS).all(|reads| place_by_reads(1, reads, true) == Placement::Replicate));
    }
}
