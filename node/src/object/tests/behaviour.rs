//! Answers of a tier, each behavior by itself.

use larder_protocol::PoolSet;
use rustix::fs::{CWD, Mode, mkfifoat};

use super::*;
use crate::disk::format::{PAGE_BYTES, RecordHeader};
use crate::disk::{BlockPlace, ReadOrder, Refused};

#[test]
fn a_chunk_comes_back_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let local = options(&format!("file://{}/made/anew", folder.path().display()));
    let in_memory = (Arc::new(Faulty::default()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let tiers = [
        ObjectTier::open(&local, metrics()).unwrap(),
        ObjectTier::start(in_memory, &options("memory:///"), metrics()).unwrap(),
    ];
    for tier in tiers {
        let mut slots = Slots::new();
        for number in 0..20 {
            let answer = tier.write(slots.write_order(single(number))).unwrap();
            assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
        }
        for number in 0..20 {
            let answer = tier.read(slots.read_order(single(number))).unwrap().blocking_recv().unwrap();
            slots.assert_right(single(number), &answer);
        }
        let missing = tier.read(slots.read_order(single(99))).unwrap();
        assert_eq!(missing.blocking_recv(), Ok(ReadAnswer::NotHeld));
        // Every third chunk of the tests is in this namespace; the chunks from 20 on were never written.
        let chunks = (0..10).map(|number| single(3 * number).chunk_ref()).collect();
        let found = tier.find(single(0).key().fingerprint, chunks, BLOCKS.into()).unwrap();
        let found = found.blocking_recv().unwrap();
        assert_eq!(
            found,
            (0..8).map(|number| Some(3 * number < 20)).collect::<Vec<_>>(),
            "up to the first hole"
        );
    }
}

#[test]
fn a_tier_over_a_file_system_that_hangs_ends() {
    let folder = tempfile::tempdir().unwrap();
    let options = ObjectOptions {
        deadline: Duration::from_secs(2),
        ..options(&format!("file://{}", folder.path().display()))
    };
    let tier = ObjectTier::open(&options, metrics()).unwrap();
    let slots = Slots::new();
    // Opening a pipe waits until somebody writes to the pipe.
    let name = record::name(&Path::default(), &ObjectKey { chunk: single(1).key(), block: BLOCKS[0] });
    let file = folder.path().join(name.as_ref());
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    mkfifoat(CWD, &file, Mode::RUSR | Mode::WUSR).unwrap();
    let read = tier.read(slots.read_order(single(1))).unwrap().blocking_recv();
    assert_ne!(read, Ok(ReadAnswer::NotHeld));
    let (ended, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(tier);
        ended.send(()).unwrap();
    });
    ends.recv_timeout(Duration::from_secs(30)).unwrap();
}

#[test]
fn a_tier_whose_store_holds_the_bytes_of_an_upload_for_ever_ends() {
    let store = Faulty::default();
    let opened = (Arc::new(store.clone()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let second = Duration::from_secs(1);
    let options = ObjectOptions { deadline: second, timeout: second, ..options("memory:///") };
    let tier = ObjectTier::start(opened, &options, metrics()).unwrap();
    store.faults().holds = Duration::from_secs(86_400);
    let written = tier.write(Slots::new().write_order(single(1))).unwrap();
    let (ended, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(tier);
        ended.send(()).unwrap();
    });
    ends.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(written);
}

#[test]
fn a_name_tells_version_namespace_chunk_and_block() {
    let key = ObjectKey { chunk: TestChunk(1).key(), block: BlockId { slice: 12, pool: 3 } };
    let name = record::name(&Path::from("a/b"), &key);
    let hash = "07070707070707070100000000000000".to_owned() + &"07".repeat(16);
    assert_eq!(name.as_ref(), format!("a/b/v1/{}/07/{hash}-12-3", "02".repeat(32)));
    assert!(record::name(&Path::default(), &key).as_ref().starts_with("v1/"));
}

#[tokio::test]
async fn an_object_is_a_record_of_the_disk_format_blocks_included() {
    let mut rig = Rig::new();
    rig.write(1).await;
    let name = object_name(single(1));
    let body = rig.store.inner.get(&name).await.unwrap().bytes().await.unwrap();
    let pages = RecordHeader::peek_pages(&body).unwrap();
    let header = RecordHeader::decode(&body[..pages as usize * PAGE_BYTES as usize], STORAGE).unwrap();
    assert_eq!((header.chunk, header.page, header.segment.segment), (single(1).chunk_ref(), 0, 0));
    assert_eq!(header.record_pages() * PAGE_BYTES, body.len() as u64);
}

#[tokio::test]
async fn a_chunk_that_is_there_is_not_uploaded_again_by_this_node_or_another() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
    assert_eq!(rig.write(1).await, WriteAnswer::AlreadyThere);
    let mut other = Rig::over(rig.store.clone());
    assert_eq!(other.write(1).await, WriteAnswer::AlreadyThere);
    assert_eq!(rig.store.faults().puts, 1);
}

#[tokio::test]
async fn a_node_that_believes_a_chunk_absent_does_not_write_over_it() {
    let (mut rig, store) = {
        let rig = Rig::new();
        let store = rig.store.clone();
        (rig, store)
    };
    assert_eq!(rig.read(1).await, ReadAnswer::NotHeld);
    assert_eq!(Rig::over(store).write(1).await, WriteAnswer::Durable);
    assert_eq!(rig.write(1).await, WriteAnswer::AlreadyThere);
    assert_eq!(rig.metrics.requests(Kind::Put, "exists"), 1);
}

#[tokio::test]
async fn a_store_that_cannot_refuse_what_is_there_is_written_over() {
    let mut rig = Rig::new();
    rig.store.faults().cannot_create = true;
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
    assert_eq!(rig.write(2).await, WriteAnswer::Durable);
    assert_eq!(rig.store.faults().puts, 3, "it was asked once whether it can");
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}

#[tokio::test(start_paused = true)]
async fn two_writes_of_one_chunk_at_a_time_upload_it_once() {
    let mut rig = Rig::new();
    rig.store.faults().delay = Duration::from_millis(100);
    let orders = [(); 2].map(|()| rig.slots.write_order(single(1)));
    let [first, second] = orders.map(|order| rig.client.write(order, deadline()));
    let answers = tokio::join!(first, second);
    assert_eq!(answers, (WriteAnswer::Durable, WriteAnswer::AlreadyThere));
    assert_eq!(rig.store.faults().puts, 1);
}

#[tokio::test]
async fn some_blocks_of_a_chunk_can_be_read_and_others_are_told_apart() {
    let mut rig = Rig::new();
    let chunk = (0..).map(TestChunk).find(|&chunk| rig.slots.destinations(chunk).len() == 3).unwrap();
    assert_eq!(rig.write_chunk(chunk).await, WriteAnswer::Durable);
    assert_eq!(rig.store.faults().puts, 3, "an object each");
    let all = rig.slots.destinations(chunk);
    let ask = async |destinations| {
        let order = ReadOrder::new(chunk.key().fingerprint, chunk.chunk_ref(), destinations).unwrap();
        rig.client.read(order, deadline()).await
    };
    let some = ask(vec![all[2].clone(), all[0].clone()]).await;
    assert!(matches!(some, ReadAnswer::Here { checksums, .. } if checksums.len() == 2));
    let larger = BlockPlace { bytes: all[0].bytes + 1, ..all[0].clone() };
    assert_eq!(ask(vec![all[1].clone(), larger]).await, ReadAnswer::OtherBlocks);
}

#[tokio::test]
async fn a_pool_that_is_not_there_is_told_apart_and_a_slice_that_is_not_makes_its_pool_incomplete() {
    let mut rig = Rig::new();
    let chunk = (0..).map(TestChunk).find(|&chunk| rig.slots.destinations(chunk).len() == 3).unwrap();
    rig.write_chunk(chunk).await;
    let all = rig.slots.destinations(chunk);
    let [zero, one, two] = [0, 1, 2].map(|at: usize| BlockId { slice: all[at].slice, pool: all[at].pool });
    assert_eq!((zero.pool, one.pool, two.pool), (0, 1, 0));
    let key = chunk.key();
    assert!(rig.client.remove(key, &[one], deadline()).await);
    let answer = rig.client.read(rig.slots.read_order(chunk), deadline()).await;
    let ReadAnswer::Here { pools, checksums, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((pools, checksums.len()), (PoolSet::first(1), 2));
    let chunks = [chunk.chunk_ref()];
    assert_eq!(rig.client.find(key.fingerprint, &chunks, &[zero, two], deadline()).await, [Some(true)]);
    assert_eq!(rig.client.find(key.fingerprint, &chunks, &[zero, one, two], deadline()).await, [Some(false)]);
    // Another node writes the pool: blocks that are there already are not sent again.
    let mut other = Rig::over(rig.store.clone());
    assert_eq!(other.write_chunk(chunk).await, WriteAnswer::Durable);
    assert_eq!(rig.store.faults().puts, 4);
    assert!(rig.client.remove(key, &[two], deadline()).await);
    let third = Rig::over(rig.store.clone());
    let order = third.slots.read_order(chunk);
    let answer = third.client.read(order, deadline()).await;
    let ReadAnswer::Here { pools, checksums, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((pools, checksums.len()), (PoolSet::default().with(1), 1));
    third.client.remove(key, &[one], deadline()).await;
    assert_eq!(third.client.read(third.slots.read_order(chunk), deadline()).await, ReadAnswer::NotHeld);
}

#[tokio::test]
async fn another_blocks_record_under_a_name_is_damage() {
    let mut rig = Rig::new();
    rig.write(1).await;
    let (chunk, at) = (single(1), Path::from(PREFIX));
    let other = BlockPlace { slice: 5, ..rig.slots.destinations(chunk)[0].clone() };
    let name = record::name(&at, &ObjectKey { chunk: chunk.key(), block: BlockId { slice: 5, pool: 0 } });
    rig.store.inner.copy(&object_name(chunk), &name).await.unwrap();
    let order = ReadOrder::new(chunk.key().fingerprint, chunk.chunk_ref(), vec![other]).unwrap();
    assert_eq!(rig.client.read(order, deadline()).await, ReadAnswer::Damaged);
}

#[tokio::test]
async fn a_removed_chunk_is_gone_for_every_node_and_can_be_written_again() {
    let mut rig = Rig::new();
    rig.write(1).await;
    assert!(rig.remove(1).await);
    assert_eq!(rig.read(1).await, ReadAnswer::NotHeld);
    assert_eq!(Rig::over(rig.store.clone()).read(1).await, ReadAnswer::NotHeld);
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
}

#[tokio::test(start_paused = true)]
async fn no_more_requests_and_bytes_are_under_way_than_may_be() {
    let mut rig = Rig::new();
    for number in 0..16 {
        rig.write(number).await;
    }
    rig.store.faults().delay = Duration::from_millis(10);
    rig.store.faults().most_at_once = 0;
    let orders: Vec<_> = (0..16).map(|number| rig.slots.read_order(single(number))).collect();
    let reads = orders.into_iter().map(|order| rig.client.read(order, deadline()));
    let answers = join_all(reads).await;
    assert!(answers.iter().all(|answer| !matches!(answer, ReadAnswer::Closed)));
    assert_eq!(rig.store.faults().most_at_once, options("").max_in_flight * 3 / 4, "questions have the rest");
    assert_eq!(rig.metrics.in_flight.get(), 0);
}

#[test]
fn more_orders_than_the_queue_holds_are_busy_and_the_others_are_answered() {
    let store = Faulty::default();
    let opened = (Arc::new(store.clone()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let options = ObjectOptions { queue_orders: 2, max_in_flight: 1, ..options("memory:///") };
    let tier = ObjectTier::start(opened, &options, metrics()).unwrap();
    let gate = store.gate.blocking_write();
    let (mut slots, mut taken, mut busy) = (Slots::new(), Vec::new(), 0);
    for number in 0..8 {
        match tier.write(slots.write_order(single(number))) {
            Ok(answer) => taken.push(answer),
            Err(Refused::Busy) => busy += 1,
            Err(Refused::Closed | Refused::Silent) => panic!("the store answers"),
        }
    }
    assert!(busy >= 5, "one is carried out, two wait");
    drop(gate);
    drop(tier);
    for answer in taken {
        assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable), "dropping the tier waits for them");
    }
}
