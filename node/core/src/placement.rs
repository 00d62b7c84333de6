//! Placement: decides where the blocks of a chunk stay after a node has read them from another.
//!
//! Blocks stay where they were computed until somebody else reads them. The decision then depends on the number of copies and
//! the number of reads: the only copy migrates to its reader, a chunk with [`REPLICATE_READS`] reads or more is replicated,
//! and any other chunk passes through. A chunk that its holder has on disk does not migrate: its reader keeps a copy in
//! memory and does not write it again, since each move would wear a drive. The rules were found by replaying production
//! traces: copying on every read costs more than a point of hit rate, since the copies crowd out other chunks. A replica is
//! made of a fetch that a reader made for itself, so replication has no transfers of its own.

/// A node's treatment of fetched blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The only copy moves to its reader: it keeps the blocks, and the holder gives up its own.
    Migrate,
    /// Many read the chunk, or the holder has it on disk anyway: the reader keeps a further copy.
    Replicate,
    /// The blocks stay only as long as they are read.
    Pass,
}

/// The rule for a chunk with `copies` copies and `reads` reads, this one included. `is_on_disk` says that the holder has it
/// on disk: there it stays, since each move would wear a drive.
#[must_use]
pub fn place(copies: usize, reads: u32, is_on_disk: bool) -> Placement {
    if reads >= REPLICATE_READS || (is_on_disk && copies <= 1) {
        Placement::Replicate
    } else if copies <= 1 {
        Placement::Migrate
    } else {
        Placement::Pass
    }
}

/// From this number of reads on, a reader keeps a copy of its own.
pub const REPLICATE_READS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_copy_migrates_to_the_node_that_reads_it() {
        assert!((1..REPLICATE_READS).all(|reads| place(1, reads, false) == Placement::Migrate));
    }

    #[test]
    fn what_is_read_eight_times_is_replicated() {
        assert!((1..5).all(|copies| place(copies, REPLICATE_READS, false) == Placement::Replicate));
    }

    #[test]
    fn nothing_else_is_copied_on_a_read() {
        assert!((1..REPLICATE_READS).all(|reads| place(2, reads, false) == Placement::Pass));
        assert!((1..REPLICATE_READS).all(|reads| place(2, reads, true) == Placement::Pass));
    }

    #[test]
    fn what_is_on_its_holders_disk_stays_there_and_its_reader_keeps_a_copy_in_memory() {
        assert!((1..REPLICATE_READS).all(|reads| place(1, reads, true) == Placement::Replicate));
    }
}
