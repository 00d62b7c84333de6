//! Copies of many parts of blocks at once, by several threads: one thread copies a fraction of what a server's memory can move.

use std::mem;
use std::sync::Mutex;
use std::thread;

use crate::error::Damaged;
use crate::lease::LeaseGuard;
use crate::lock;

/// A part of a leased block, and the memory that it is copied to.
#[derive(Debug)]
pub struct BlockPart<'a> {
    /// The position of the chunk in the lease.
    pub position: usize,
    /// The number of the block in the chunk.
    pub block: usize,
    /// The part's offset from the block's start, in bytes.
    pub offset: u64,
    /// The memory for the part.
    pub out: &'a mut [u8],
}

/// Parts that one thread copies in order.
type Batch<'a> = Vec<BlockPart<'a>>;

impl LeaseGuard {
    /// Copies parts of blocks, and counts their bytes. From 4 MiB on, several threads copy ([`SessionOptions::copy_threads`]),
    /// the calling thread included. Returns when all are done.
    ///
    /// [`SessionOptions::copy_threads`]: crate::SessionOptions::copy_threads
    ///
    /// # Errors
    /// [`Damaged`]: the first damaged part. All earlier parts are copied; the bytes of the others are of no use.
    ///
    /// # Panics
    /// Panics as [`LeaseGuard::copy_range`] does.
    pub fn copy_parts<'a>(&self, parts: impl IntoIterator<Item = BlockPart<'a>>) -> Result<(), Damaged> {
        let mut parts: Vec<_> = parts.into_iter().collect();
        let bytes = parts.iter().map(|part| part.out.len() as u64).sum();
        let threads = self.copy_threads(bytes);
        if threads == 1 {
            return parts.drain(..).try_for_each(|part| self.copy_part(part));
        }
        let batches = divide(parts.into_iter(), |part| self.is_verified_now(part.position, part.block));
        let first_damaged = Mutex::new(None::<(usize, Damaged)>);
        by_threads(threads, batches.into_iter().enumerate(), |(number, batch)| {
            if let Err(damaged) = batch.into_iter().try_for_each(|part| self.copy_part(part)) {
                let mut first = lock(&first_damaged);
                if first.as_ref().is_none_or(|(first, _)| number < *first) {
                    *first = Some((number, damaged));
                }
            }
        });
        let damaged = first_damaged.into_inner().ok().flatten();
        damaged.map_or(Ok(()), |(_, damaged)| Err(damaged))
    }

    /// Copies one part, by the calling thread.
    ///
    /// # Errors
    /// [`Damaged`]: the bytes in `out` are of no use.
    ///
    /// # Panics
    /// Panics as [`LeaseGuard::copy_range`] does.
    pub fn copy_part(
        &self,
        BlockPart { position, block, offset, out }: BlockPart<'_>,
    ) -> Result<(), Damaged> {
        if offset == 0 && out.len() as u64 == self.namespace().block_bytes(block) {
            self.copy_block(position, block, out)
        } else {
            self.copy_range(position, block, offset, out)
        }
    }
}

/// Divides parts among batches of about [`BATCH_BYTES`]. The parts of a block that `is_verified` says is verified now stay
/// together, so that one thread sums the block, once.
fn divide<'a>(
    parts: impl Iterator<Item = BlockPart<'a>>,
    is_verified: impl Fn(&BlockPart<'a>) -> bool,
) -> Vec<Batch<'a>> {
    let (mut batches, mut batch, mut batch_bytes) = (Vec::new(), Batch::new(), 0);
    for mut part in parts {
        let is_whole = is_verified(&part);
        let is_split = !is_whole && part.out.len() > BATCH_BYTES;
        let goes_on =
            batch.last().is_some_and(|last| (last.position, last.block) == (part.position, part.block));
        if is_split || batch_bytes >= BATCH_BYTES && !(is_whole && goes_on) {
            batches.push(mem::take(&mut batch));
            batch_bytes = 0;
        }
        while is_split && part.out.len() > BATCH_BYTES {
            let (out, rest) = part.out.split_at_mut(BATCH_BYTES);
            batches.push(vec![BlockPart { out, ..part }]);
            part = BlockPart { offset: part.offset + BATCH_BYTES as u64, out: rest, ..part };
        }
        batch_bytes += part.out.len();
        batch.push(part);
    }
    batches.push(batch);
    batches
}

/// Does work by up to `threads` threads, the calling thread among them, and returns when all is done. The calling thread also does
/// the work of threads that the system does not give.
///
/// # Panics
/// Panics if `each` does.
pub fn by_threads<T: Send>(threads: usize, work: impl Iterator<Item = T> + Send, each: impl Fn(T) + Sync) {
    let left = Mutex::new(work);
    let go_on = || {
        while let Some(one) = next(&left) {
            each(one);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            _ = thread::Builder::new().name("larder-copy".into()).spawn_scoped(scope, go_on);
        }
        go_on();
    });
}

fn next<T>(left: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    lock(left).next()
}

/// Bytes that a thread takes at a time: enough to hide the taking, few enough to end together.
const BATCH_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// A part without its memory: position, block, offset and bytes.
    type OnePart = (usize, usize, u64, usize);

    fn places(batches: &[Batch<'_>]) -> Vec<Vec<OnePart>> {
        let place = |part: &BlockPart<'_>| (part.position, part.block, part.offset, part.out.len());
        batches.iter().map(|batch| batch.iter().map(place).collect()).collect()
    }

    proptest! {
        #[test]
        fn batches_have_all_bytes_in_order_and_a_verified_block_is_in_one_batch(
            sizes in prop::collection::vec((1_usize..4, 1_usize..BATCH_BYTES * 3), 1..12),
            verified in any::<u16>(),
        ) {
            let mut memory = vec![0_u8; sizes.iter().map(|(parts, bytes)| parts * bytes).sum()];
            let (mut left, mut parts) = (&mut memory[..], Vec::new());
            for (position, &(count, bytes)) in sizes.iter().enumerate() {
                for number in 0..count {
                    let (out, rest) = left.split_at_mut(bytes);
                    parts.push(BlockPart { position, block: 0, offset: (number * bytes) as u64, out });
                    left = rest;
                }
            }
            let is_verified = |position: usize| verified & (1 << position) != 0;
            let batches = places(&divide(parts.into_iter(), |part| is_verified(part.position)));
            let mut next = batches.iter().flatten();
            for (position, &(count, bytes)) in sizes.iter().enumerate() {
                let mut at = 0;
                while at < (count * bytes) as u64 {
                    let &(of, block, offset, bytes) = next.next().unwrap();
                    prop_assert_eq!((of, block, offset), (position, 0, at));
                    prop_assert!(bytes > 0);
                    at += bytes as u64;
                }
            }
            prop_assert!(next.next().is_none());
            let mut finished = HashSet::<usize>::new();
            for batch in &batches {
                let here: HashSet<usize> = batch.iter().map(|&(position, ..)| position).collect();
                prop_assert!(here.iter().all(|position| !finished.contains(position)));
                finished.extend(here.iter().filter(|&&position| is_verified(position)));
                let bytes = batch.iter().map(|&(.., bytes)| bytes).sum::<usize>();
                prop_assert!(bytes <= 2 * BATCH_BYTES || here.iter().any(|&position| is_verified(position)));
            }
        }
    }

    #[test]
    fn all_work_is_done_once_by_no_more_threads_than_allowed() {
        for threads in [0, 1, 3] {
            let done = Mutex::new((Vec::new(), HashSet::new()));
            by_threads(threads, 0..1_000, |one| {
                let mut done = lock(&done);
                done.0.push(one);
                done.1.insert(thread::current().id());
            });
            let (mut work, by) = done.into_inner().unwrap();
            work.sort_unstable();
            assert_eq!(work, (0..1_000).collect::<Vec<_>>());
            assert!(by.len() <= threads.max(1));
        }
    }
}
