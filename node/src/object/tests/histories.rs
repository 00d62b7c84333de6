//! Random histories of two nodes on one store that fails, against a model.

use std::collections::{BTreeMap, BTreeSet};

use larder_core::tiers::presence::ABSENT_FOR;

use super::*;
use crate::object::metrics::Side;

struct History {
    random: fastrand::Rng,
    nodes: [Rig; 2],
    store: Faulty,
    /// Chunks that were acknowledged, and not removed since.
    must: BTreeSet<u64>,
    damaged: BTreeSet<u64>,
    /// Chunks that a node found damaged and could not delete. The node's next write replaces them, whatever became of them.
    suspected: BTreeSet<u64>,
    counts: BTreeMap<&'static str, u64>,
}

impl History {
    fn new(seed: u64) -> Self {
        let store = Faulty::default();
        let nodes = [(); 2].map(|()| Rig::over(store.clone()));
        let (must, damaged, suspected, counts) = Default::default();
        Self { random: fastrand::Rng::with_seed(seed), nodes, store, must, damaged, suspected, counts }
    }

    async fn step(&mut self) {
        let (node, chunk) = (self.random.usize(..2), self.random.u64(..30));
        match self.random.u8(..20) {
            0..7 => self.write(node, chunk).await,
            7..14 => self.read(node, chunk).await,
            14 => self.remove(node, chunk).await,
            15 => self.damage(chunk).await,
            16 => self.store.faults().refuses_reads ^= true,
            17 => self.store.faults().refuses_writes ^= true,
            18 => self.store.faults().refuses_deletes ^= true,
            _ => {
                for side in [Side::Reading, Side::Writing] {
                    self.nodes[node].client.try_again(side, deadline()).await;
                }
            }
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    async fn write(&mut self, node: usize, chunk: u64) {
        let was_there = self.store.has(single(chunk)).await;
        match self.nodes[node].write(chunk).await {
            WriteAnswer::Durable => {
                assert!(!was_there || self.suspected.contains(&chunk), "it was uploaded twice");
                self.count("written");
                self.damaged.remove(&chunk);
                self.must.insert(chunk);
            }
            // The node knew the chunk from before: another node may have removed it since.
            WriteAnswer::AlreadyThere => self.count("already there"),
            WriteAnswer::Closed => self.count("write closed"),
            WriteAnswer::TooLarge => panic!("it fits"),
        }
    }

    async fn read(&mut self, node: usize, chunk: u64) {
        match self.nodes[node].read(chunk).await {
            ReadAnswer::Here { .. } => {
                assert!(!self.damaged.contains(&chunk), "damage goes unseen");
                self.count("read");
            }
            ReadAnswer::Damaged => {
                assert!(self.damaged.contains(&chunk), "it was never damaged");
                self.count("damaged");
                if self.store.has(single(chunk)).await {
                    self.suspected.insert(chunk);
                } else {
                    self.damaged.remove(&chunk);
                    self.must.remove(&chunk);
                }
            }
            // For a while, a node does not notice another node's write.
            ReadAnswer::NotHeld => self.count("not held"),
            ReadAnswer::Closed => self.count("read closed"),
            ReadAnswer::OtherBlocks | ReadAnswer::Disagrees => panic!("these are its blocks and its name"),
        }
    }

    async fn remove(&mut self, node: usize, chunk: u64) {
        if self.nodes[node].remove(chunk).await {
            self.must.remove(&chunk);
            self.damaged.remove(&chunk);
        }
    }

    async fn damage(&mut self, chunk: u64) {
        if self.store.has(single(chunk)).await && !self.damaged.contains(&chunk) {
            self.store.change(single(chunk), |bytes| bytes[4_096] ^= 1).await;
            self.damaged.insert(chunk);
        }
    }

    /// Ends all faults, and checks that both nodes read the acknowledged chunks.
    async fn settle(&mut self) {
        {
            let mut faults = self.store.faults();
            (faults.refuses_reads, faults.refuses_writes) = (false, false);
        }
        sleep(2 * ABSENT_FOR).await;
        for node in 0..2 {
            for side in [Side::Reading, Side::Writing] {
                self.nodes[node].client.try_again(side, deadline()).await;
            }
            for chunk in self.must.clone() {
                let is_right = matches!(self.nodes[node].read(chunk).await, ReadAnswer::Here { .. });
                assert!(is_right || self.damaged.contains(&chunk), "{chunk} was acknowledged and is lost");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_acknowledged_is_lost_nor_uploaded_twice_and_no_byte_is_wrong() {
    let histories = if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { 500 } else { 30 };
    let mut counts = BTreeMap::<_, u64>::new();
    for _ in 0..histories {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut history = History::new(seed);
        for _ in 0..300 {
            history.step().await;
        }
        history.settle().await;
        history.counts.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    println!("{counts:?}");
    for what in ["written", "already there", "read", "not held", "damaged", "read closed", "write closed"] {
        assert!(counts.contains_key(what), "{what} never happened");
    }
}
