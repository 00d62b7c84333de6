//! The chunks that a tier finds, and the cost of finding them.

use std::ops::Range;

use larder_core::tiers::presence::ABSENT_FOR;
use larder_protocol::{ChunkRef, Fingerprint};

use super::*;
use crate::object::metrics::Side;

/// Chunks of one chain. Every third [`TestChunk`] is in the same namespace.
fn chain(chunks: u64) -> Vec<ChunkRef> {
    (0..chunks).map(|number| single(number * 3).chunk_ref()).collect()
}

/// Chunks of a namespace without chains.
fn flat(numbers: Range<u64>) -> Vec<ChunkRef> {
    let chunks = numbers.map(|number| single(number * 3).chunk_ref());
    chunks
        .map(|chunk| ChunkRef { anchor: chunk.hash, index: 0, parent: namespace().root(), ..chunk })
        .collect()
}

async fn find(rig: &Rig, chunks: &[ChunkRef]) -> usize {
    let found = rig.client.find(namespace(), chunks, &BLOCKS, deadline()).await;
    let present = found.iter().take_while(|&&is_there| is_there == Some(true)).count();
    assert!(
        found[present..].iter().all(|&is_there| is_there != Some(true)),
        "nothing is there behind a hole"
    );
    present
}

fn namespace() -> Fingerprint {
    single(0).key().fingerprint
}

async fn write_chain(store: &Faulty, chunks: u64) {
    let mut writer = Rig::over(store.clone());
    for number in 0..chunks {
        assert_eq!(writer.write(number * 3).await, WriteAnswer::Durable);
    }
}

#[tokio::test(start_paused = true)]
async fn a_chain_is_found_in_few_rounds_and_then_without_a_question() {
    let rig = Rig::new();
    write_chain(&rig.store, 37).await;
    rig.store.faults().heads = 0;
    rig.store.faults().delay = Duration::from_millis(10);
    let start = Instant::now();
    assert_eq!(find(&rig, &chain(100)).await, 37);
    assert!(start.elapsed() <= Duration::from_millis(60), "three rounds of at most two turns each");
    let asked = rig.store.faults().heads;
    assert!(asked <= 8 + 7 + 7, "{asked} questions");
    assert_eq!(find(&rig, &chain(100)).await, 37);
    assert_eq!(rig.store.faults().heads, asked, "it is known");
    assert_eq!(find(&rig, &chain(20)).await, 20);
    assert!(rig.store.faults().most_at_once <= 8);
}

#[tokio::test(start_paused = true)]
async fn what_was_absent_is_looked_for_again_after_a_while() {
    let rig = Rig::new();
    assert_eq!(find(&rig, &chain(3)).await, 0);
    write_chain(&rig.store, 3).await;
    assert_eq!(find(&rig, &chain(3)).await, 0);
    sleep(ABSENT_FOR).await;
    assert_eq!(find(&rig, &chain(3)).await, 3);
}

#[tokio::test]
async fn chunks_of_a_flat_namespace_are_told_one_by_one() {
    let mut rig = Rig::new();
    rig.write(3).await;
    let flat = flat(0..3);
    assert_eq!(
        rig.client.find(namespace(), &flat, &BLOCKS, deadline()).await,
        [Some(false), Some(true), Some(false)]
    );
}

#[tokio::test(start_paused = true)]
async fn chunks_of_a_flat_namespace_that_the_store_says_nothing_of_are_not_absent() {
    let mut rig = Rig::new();
    rig.write(3).await;
    let found = async |rig: &Rig| rig.client.find(namespace(), &flat(0..3), &BLOCKS, deadline()).await;
    rig.store.faults().delay = 10 * FIND_DEADLINE;
    assert_eq!(found(&rig).await, [None, Some(true), None]);
    rig.store.faults().delay = Duration::ZERO;
    rig.client.try_again(Side::Reading, deadline()).await;
    rig.store.faults().refuses_reads = true;
    assert_eq!(found(&rig).await, [None, Some(true), None]);
    assert_eq!(
        rig.client.find(namespace(), &chain(1), &BLOCKS, deadline()).await,
        [],
        "nor those of a chain"
    );
    rig.store.faults().refuses_reads = false;
    assert_eq!(found(&rig).await, [Some(false), Some(true), Some(false)]);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_known_at_the_deadline_is_not_found_and_what_is_known_is() {
    let mut rig = Rig::new();
    write_chain(&rig.store, 4).await;
    rig.read(0).await;
    rig.read(3).await;
    rig.store.faults().delay = 10 * FIND_DEADLINE;
    let start = Instant::now();
    assert_eq!(find(&rig, &chain(4)).await, 2);
    assert_eq!(start.elapsed(), FIND_DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_costs_one_deadline() {
    let rig = Rig::new();
    rig.store.faults().delay = Duration::from_secs(3_600);
    let start = Instant::now();
    for _ in 0..100 {
        assert_eq!(find(&rig, &chain(10)).await, 0);
    }
    assert_eq!(start.elapsed(), FIND_DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_only_slow_is_asked_again_as_soon_as_it_answers() {
    let rig = Rig::new();
    write_chain(&rig.store, 3).await;
    rig.store.faults().delay = 2 * FIND_DEADLINE;
    assert_eq!(find(&rig, &chain(3)).await, 0);
    assert!(rig.client.is_open(Side::Reading));
    rig.client.trial(Side::Reading).await;
    rig.client.try_again(Side::Reading, deadline()).await;
    rig.store.faults().delay = Duration::ZERO;
    assert_eq!((rig.client.is_open(Side::Reading), find(&rig, &chain(3)).await), (false, 3));
}

#[tokio::test(start_paused = true)]
async fn a_lookup_does_not_wait_behind_blocks() {
    let mut rig = Rig::new();
    write_chain(&rig.store, 32).await;
    rig.store.faults().delay = FIND_DEADLINE / 4 * 3;
    let reads: Vec<_> = (0..30).map(|number| rig.slots.read_order(single(3 * number))).collect();
    let writes: Vec<_> = (100..130).map(|number| rig.slots.write_order(single(3 * number))).collect();
    let blocks = async {
        let reads = join_all(reads.into_iter().map(|order| rig.client.read(order, deadline())));
        let writes = join_all(writes.into_iter().map(|order| rig.client.write(order, deadline())));
        let (reads, writes) = tokio::join!(reads, writes);
        assert!(reads.iter().all(|answer| matches!(answer, ReadAnswer::Here { .. })));
        assert!(writes.iter().all(|answer| *answer == WriteAnswer::Durable));
    };
    let asks = async {
        sleep(Duration::from_millis(1)).await;
        rig.client.find(namespace(), &flat(30..32), &BLOCKS, deadline()).await
    };
    assert_eq!(tokio::join!(blocks, asks).1, [Some(true), Some(true)]);
}

#[tokio::test(start_paused = true)]
async fn a_lookup_of_a_few_chunks_is_answered_beside_one_of_thousands() {
    let rig = Rig::new();
    write_chain(&rig.store, 2).await;
    rig.store.faults().delay = FIND_DEADLINE / 10;
    let [many, few] = [flat(10..5_000), flat(0..2)];
    let large = rig.client.find(namespace(), &many, &BLOCKS, deadline());
    let small = async {
        sleep(Duration::from_millis(1)).await;
        let start = Instant::now();
        let found = rig.client.find(namespace(), &few, &BLOCKS, deadline()).await;
        (found, start.elapsed())
    };
    let (found, took) = tokio::join!(large, small).1;
    assert_eq!(found, [Some(true), Some(true)]);
    assert!(took <= 2 * FIND_DEADLINE / 10, "it waits for one turn: {took:?}");
    assert!(rig.store.faults().most_at_once <= options("").max_in_flight);
}

#[tokio::test(start_paused = true)]
async fn an_answer_at_the_deadline_says_nothing_of_the_chunks_that_are_not_known() {
    let mut rig = Rig::new();
    write_chain(&rig.store, 4).await;
    rig.read(0).await;
    rig.read(3).await;
    rig.store.faults().delay = 10 * FIND_DEADLINE;
    let found = rig.client.find(namespace(), &chain(4), &BLOCKS, deadline()).await;
    assert_eq!(found, [Some(true), Some(true)], "and not that the third is absent");
    rig.store.faults().delay = Duration::ZERO;
    rig.client.trial(Side::Reading).await;
    rig.client.try_again(Side::Reading, deadline()).await;
    let found = rig.client.find(namespace(), &chain(6), &BLOCKS, deadline()).await;
    assert_eq!(found, [Some(true), Some(true), Some(true), Some(true), Some(false)]);
}

#[tokio::test(start_paused = true)]
async fn reads_do_not_wait_for_the_bytes_of_writes() {
    let mut rig = Rig::new();
    write_chain(&rig.store, 1).await;
    rig.store.faults().delay = Duration::from_secs(1);
    let writes: Vec<_> = (100..400).map(|number| rig.slots.write_order(single(3 * number))).collect();
    let read = rig.slots.read_order(single(0));
    let start = Instant::now();
    let client = &rig.client;
    let writes = async { join_all(writes.into_iter().map(|order| client.write(order, deadline()))).await };
    let read = async {
        sleep(Duration::from_millis(1)).await;
        assert!(matches!(client.read(read, deadline()).await, ReadAnswer::Here { .. }));
        start.elapsed()
    };
    let took = tokio::join!(writes, read).1;
    assert!(took <= Duration::from_secs(2), "{took:?}");
}
