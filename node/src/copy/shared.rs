//! One copy by several threads: each takes the next layer range that nobody has taken.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use larder_core::store::Checksums;
use larder_protocol::checksum::block_ranges;
use tokio::sync::oneshot;

use super::{CopyDone, CopyOrder, Move};

/// An order on which any number of threads work.
pub(super) struct SharedCopy {
    order: CopyOrder,
    /// The layer ranges of all blocks, in order, with the numbers of their blocks.
    ranges: Vec<(usize, Range<u64>)>,
    /// The checksums of the ranges; 0 until known.
    sums: Vec<AtomicU64>,
    /// The first range that nobody has taken.
    next: AtomicUsize,
    /// Ranges that are not copied yet.
    left: AtomicUsize,
    /// The channel of the result; dropped unused if a thread panics.
    done: Mutex<Option<oneshot::Sender<Vec<Checksums>>>>,
}

impl SharedCopy {
    /// A new order, on which no thread works yet.
    pub(super) fn new(order: CopyOrder) -> (Self, CopyDone) {
        let (done, completion) = oneshot::channel();
        let blocks = order.moves.iter().enumerate();
        let ranges: Vec<_> = blocks
            .flat_map(|(block, Move { to, .. })| {
                block_ranges(to.bytes, to.range_bytes).map(move |range| (block, range))
            })
            .collect();
        let sums = ranges.iter().map(|_| AtomicU64::new(0)).collect();
        let (next, left) = (AtomicUsize::new(0), AtomicUsize::new(ranges.len()));
        let copy = Self { order, ranges, sums, next, left, done: Mutex::new(Some(done)) };
        if copy.ranges.is_empty() {
            copy.tell();
        }
        (copy, completion)
    }

    /// Copies until all ranges are taken, or some `most_bytes` were copied. Returns whether all ranges are taken. The thread that
    /// completes the last range reports the checksums.
    pub(super) fn help(&self, most_bytes: u64) -> bool {
        let mut bytes = 0;
        while bytes < most_bytes {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((block, range)) = self.ranges.get(number) else { return true };
            bytes += range.end - range.start;
            let sum = self.order.perform_range(&self.order.moves[*block], range.clone());
            self.sums[number].store(sum, Ordering::Relaxed);
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.tell();
            }
        }
        self.next.load(Ordering::Relaxed) >= self.ranges.len()
    }

    fn tell(&self) {
        let mut sums = self.sums.iter().map(|sum| sum.load(Ordering::Relaxed));
        let checksums = self.order.moves.iter().map(|Move { to, .. }| {
            Checksums::of(&to.key, sums.by_ref().take(block_ranges(to.bytes, to.range_bytes).count()))
        });
        let checksums = checksums.collect();
        if let Some(done) = larder_net::lock(&self.done).take() {
            // If nobody waits any more, there is nobody to tell.
            drop(done.send(checksums));
        }
    }
}
