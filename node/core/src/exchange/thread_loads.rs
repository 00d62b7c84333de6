//! Chooses the thread that fetches blocks: the thread between nodes, or one of the block threads beside it.

/// The bytes that each thread fetches now. Number 0 is the thread between nodes, the others are block threads.
#[derive(Debug)]
pub struct ThreadLoads {
    in_flight: Vec<u64>,
    last: usize,
}

impl ThreadLoads {
    /// Begins without fetches. `block_threads` is the number of threads beside the thread between nodes.
    pub fn new(block_threads: usize) -> Self {
        Self { in_flight: vec![0; block_threads + 1], last: 0 }
    }

    /// Chooses the thread for a fetch of `bytes` bytes. The bytes count as in flight there until [`Self::give_back`].
    ///
    /// The thread with the fewest bytes in flight fetches. A large fetch would delay the other work of the thread between nodes,
    /// so the fetch itself counts as in flight there already. A block thread costs a hop, which counts as `HOP_BYTES` bytes.
    /// Equal block threads take turns, so that block threads of different nodes meet each other evenly.
    pub fn take(&mut self, bytes: u64) -> usize {
        let others = self.in_flight.len() - 1;
        let turns = (1..=others).map(|turn| (self.last + turn - 1) % others + 1);
        let least = turns.min_by_key(|&thread| self.in_flight[thread]);
        let thread = least
            .filter(|&thread| {
                self.in_flight[thread].saturating_add(HOP_BYTES) < self.in_flight[0].saturating_add(bytes)
            })
            .unwrap_or(0);
        if thread > 0 {
            self.last = thread;
        }
        self.in_flight[thread] += bytes;
        thread
    }

    /// Notes the end of a fetch that [`Self::take`] gave to a thread.
    pub fn give_back(&mut self, thread: usize, bytes: u64) {
        self.in_flight[thread] = self.in_flight[thread].saturating_sub(bytes);
    }
}

/// Bytes that a thread moves in the time of the hops to a block thread and back.
const HOP_BYTES: u64 = 512 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: u64 = 256 << 10;
    const LARGE: u64 = 4 << 20;

    #[test]
    fn a_node_without_block_threads_fetches_on_the_thread_between_nodes() {
        let mut threads = ThreadLoads::new(0);
        assert!((0..10).all(|_| threads.take(LARGE) == 0));
    }

    #[test]
    fn small_fetches_need_no_hop_until_many_are_in_flight() {
        let mut threads = ThreadLoads::new(2);
        let taken: Vec<_> = (0..6).map(|_| threads.take(SMALL)).collect();
        assert_eq!(taken, [0, 0, 1, 2, 0, 1]);
        taken.iter().for_each(|&thread| threads.give_back(thread, SMALL));
        assert_eq!(threads.in_flight, [0; 3]);
    }

    #[test]
    fn large_fetches_spread_over_the_block_threads_in_turns() {
        let mut threads = ThreadLoads::new(3);
        assert_eq!([(); 4].map(|()| threads.take(LARGE)), [1, 2, 3, 0]);
        threads.give_back(2, LARGE);
        assert_eq!(threads.take(LARGE), 2, "it has the least");
        (1..=3).for_each(|thread| threads.give_back(thread, LARGE));
        assert_eq!(threads.take(SMALL), 3, "the thread between nodes has much to do, and 2 had its turn");
    }
}
