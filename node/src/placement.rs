//! Placement: where the blocks of a chunk stay after a node has read them from another.
//!
//! Blocks stay where they were computed until somebody else reads them. What then happens depends on how many copies
//! there are and how often the chunk was read; the rules were found by replaying production traces: copying on every
//! read costs more than a point of hit rate, since the copies crowd out other chunks.

/// What a node does with blocks that it fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The only copy moves to its reader: it keeps the blocks, and the holder gives up its own.
    Migrate,
    /// Many read the chunk: the reader keeps a further copy.
    Replicate,
    /// The blocks stay only as long as they are read.
    Pass,
}

/// The rule for a chunk with so many copies that was read so often, this time included.
#[must_use]
pub fn place(copies: usize, reads: u32) -> Placement {
    if reads >= REPLICATE_READS {
        Placement::Replicate
    } else if copies <= 1 {
        Placement::Migrate
    } else {
        Placement::Pass
    }
}

/// From so many reads on, whoever reads a chunk keeps a copy.
pub const REPLICATE_READS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_copy_migrates_to_the_node_that_reads_it() {
        assert!((1..REPLICATE_READS).all(|reads| place(1, reads) == Placement::Migrate));
    }

    #[test]
    fn what_is_read_eight_times_is_replicated() {
        assert!((1..5).all(|copies| place(copies, REPLICATE_READS) == Placement::Replicate));
    }

    #[test]
    fn nothing_else_is_copied_on_a_read() {
        assert!((1..REPLICATE_READS).all(|reads| place(2, reads) == Placement::Pass));
    }
}
