//! Purges of a store.

use std::cell::Cell;

use larder_core::store::PurgedKeys;
use larder_protocol::purge::{NamespaceName, PurgeMode, PurgeScope};

use super::*;

/// The first `count` numbers of chunks of the namespace of chunk 0, from its first on.
fn of_one_namespace(count: usize) -> Vec<u64> {
    let fingerprint = single(0).key().fingerprint;
    (0..).filter(|&number| single(number).key().fingerprint == fingerprint).take(count).collect()
}

impl Rig {
    /// Purges, and returns the number of deleted objects and why some are left.
    async fn purge(&self, keys: PurgedKeys, mode: PurgeMode) -> (u64, Option<String>) {
        let purged = Cell::new(0);
        let progress = |more| purged.set(purged.get() + more);
        let result = self.client.purge(keys, mode, &progress).await;
        (purged.get(), result.err().map(|trouble| trouble.to_string()))
    }
}

fn everything() -> PurgedKeys {
    let mut keys = PurgedKeys::default();
    (0..3).for_each(|number| keys.add(single(number).key().fingerprint));
    keys
}

#[tokio::test]
async fn one_object_that_cannot_be_deleted_keeps_no_other_and_is_named() {
    let mut rig = Rig::new();
    for number in 0..50 {
        assert_eq!(rig.write(number).await, WriteAnswer::Durable);
    }
    let held = object_name(single(4));
    rig.store.faults().held = vec![held.clone()];
    for deleted in [49, 0] {
        let (count, said) = rig.purge(everything(), PurgeMode::Remove).await;
        let (said, left) = (said.unwrap(), format!("objects that are left: 1, the first is {held}"));
        assert!(said.contains("may not delete an object (AccessDenied)") && said.contains(&left), "{said}");
        assert_eq!(count, deleted);
    }
    for number in 0..50 {
        assert_eq!(rig.store.has(single(number)).await, number == 4);
    }
    assert_eq!(rig.write(0).await, WriteAnswer::Durable, "nothing is believed to be there");
    rig.store.faults().held.clear();
    assert_eq!(rig.purge(everything(), PurgeMode::Remove).await, (2, None));
}

#[tokio::test]
async fn a_purge_of_a_store_that_refuses_all_deletions_ends_early() {
    let mut rig = Rig::new();
    for number in 0..200 {
        rig.write(number).await;
    }
    rig.store.faults().refuses_deletes = true;
    let (count, said) = rig.purge(everything(), PurgeMode::Remove).await;
    let said = said.unwrap();
    assert!(count == 0 && said.ends_with("; then the purge ended"), "{said}");
}

#[tokio::test]
async fn chunks_that_only_the_store_has_are_purged_with_the_chunk_that_they_continue() {
    let mut rig = Rig::new();
    let numbers = of_one_namespace(20);
    for (at, &number) in numbers.iter().enumerate() {
        let mut order = rig.slots.write_order(single(number));
        // The chunks behind the fifth continue it, in two prompts.
        let parent = if at == 15 { numbers[4] } else { numbers[at.saturating_sub(1)] };
        order.chunk.parent = single(parent).key().hash;
        assert_eq!(rig.client.write(order, deadline()).await, WriteAnswer::Durable);
    }
    let fingerprint = single(0).key().fingerprint;
    let name = NamespaceName(std::array::from_fn(|at| fingerprint.0[at]));
    let purge = async |at: usize, mode| {
        let scope = PurgeScope::Chunks(name, vec![single(numbers[at]).key().hash]);
        rig.purge(PurgedKeys::named_by(&scope), mode).await
    };
    assert_eq!(purge(12, PurgeMode::Count).await, (3, None));
    assert_eq!(purge(12, PurgeMode::Remove).await, (3, None));
    assert_eq!(purge(4, PurgeMode::Remove).await, (13, None));
    for (at, &number) in numbers.iter().enumerate() {
        assert_eq!(rig.store.has(single(number)).await, at < 4, "{at}");
    }
}

#[tokio::test]
async fn a_purge_that_is_repeated_finds_what_the_first_left_below_the_purged_chunk() {
    for named in [1, 3] {
        let mut rig = Rig::new();
        let numbers = of_one_namespace(6);
        // A chain, and a chunk that continues its second chunk too.
        let parents = [0, 0, 1, 2, 3, 1];
        for (&number, parent) in numbers.iter().zip(parents) {
            let mut order = rig.slots.write_order(single(number));
            order.chunk.parent = single(numbers[parent]).key().hash;
            assert_eq!(rig.client.write(order, deadline()).await, WriteAnswer::Durable);
        }
        let fingerprint = single(0).key().fingerprint;
        let name = NamespaceName(std::array::from_fn(|at| fingerprint.0[at]));
        let purge = async |to: usize| {
            // Nodes name the chunks that they know.
            let hashes = numbers[1..=to].iter().map(|&number| single(number).key().hash).collect();
            rig.purge(PurgedKeys::named_by(&PurgeScope::Chunks(name, hashes)), PurgeMode::Remove).await
        };
        rig.store.faults().held = vec![object_name(single(numbers[4]))];
        let (count, said) = purge(named).await;
        assert_eq!(count, 2, "what leads from the purged chunk to the chunk that is left stays");
        let said = said.unwrap();
        assert!(said.contains("objects that are left: 3, the first is"), "{said}");
        assert!(!rig.store.has(single(numbers[1])).await, "the purged chunk itself is gone");
        assert!(purge(1).await.1.is_some(), "it is left still");
        rig.store.faults().held.clear();
        assert_eq!(purge(1).await, (3, None));
        for (at, &number) in numbers.iter().enumerate() {
            assert_eq!(rig.store.has(single(number)).await, at == 0, "{at}");
        }
    }
}

#[tokio::test]
async fn a_chunk_whose_place_in_prompts_cannot_be_read_is_named() {
    let mut rig = Rig::new();
    let numbers = of_one_namespace(2);
    for &number in &numbers {
        rig.write(number).await;
    }
    rig.store.faults().archived = vec![object_name(single(numbers[1]))];
    let fingerprint = single(0).key().fingerprint;
    let name = NamespaceName(std::array::from_fn(|at| fingerprint.0[at]));
    let scope = PurgeScope::Chunks(name, vec![single(numbers[0]).key().hash]);
    let (count, said) = rig.purge(PurgedKeys::named_by(&scope), PurgeMode::Remove).await;
    assert!(count == 1 && said.unwrap().contains("may not read an object"));
    assert!(!rig.client.is_open(metrics::Side::Reading));
}

#[tokio::test]
async fn what_other_nodes_purged_is_written_again_once_a_purge_has_ended() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
    rig.store.inner.delete(&object_name(single(1))).await.unwrap();
    assert_eq!(rig.write(1).await, WriteAnswer::AlreadyThere, "it does not know");
    rig.client.forget_namespaces(&everything());
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
}
