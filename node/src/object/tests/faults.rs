//! A tier whose store fails, or has wrong objects.

use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::{TcpListener, TcpStream};

use larder_core::store::PurgedKeys;
use larder_core::tiers::presence::DAMAGED_FOR;
use larder_protocol::ChunkRef;
use larder_protocol::purge::PurgeMode;

use super::*;
use crate::disk::ReadOrder;
use crate::disk::volume::Damage;
use crate::object::breaker::{MOST_FAILURES, RETRY_EVERY};
use crate::object::metrics::Side;
use crate::object::record::Arriving;
use crate::object::tier::{ObjectPurge, StoreNews};

#[tokio::test]
async fn a_damaged_object_is_a_miss_is_counted_deleted_and_can_be_written_again() {
    let flipped = |bytes: &mut Vec<u8>| bytes[5_000] ^= 4;
    let headless = |bytes: &mut Vec<u8>| bytes[100] ^= 1;
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let odd = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1);
    let changes: [fn(&mut Vec<u8>); 5] = [flipped, headless, cut, odd, Vec::clear];
    for change in changes {
        let mut rig = Rig::new();
        // A chunk whose blocks fill their pages.
        assert_eq!(rig.write(3).await, WriteAnswer::Durable);
        rig.store.change(single(3), change).await;
        assert_eq!(rig.read(3).await, ReadAnswer::Damaged);
        assert_eq!((rig.metrics.damaged.get(), rig.store.has(single(3)).await), (1, false));
        assert_eq!(rig.read(3).await, ReadAnswer::NotHeld);
        assert_eq!(rig.write(3).await, WriteAnswer::Durable);
        assert!(matches!(rig.read(3).await, ReadAnswer::Here { .. }));
        assert!(!rig.client.is_open(Side::Reading), "the store did nothing wrong");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_to_which_all_objects_seem_damaged_deletes_few_of_them() {
    let mut rig = Rig::new();
    for chunk in 0..20 {
        assert_eq!(rig.write(chunk).await, WriteAnswer::Durable);
        rig.store.change(single(chunk), |bytes| bytes[4_096] ^= 1).await;
        assert_eq!(rig.read(chunk).await, ReadAnswer::Damaged);
    }
    let mut left = 0;
    for chunk in 0..20 {
        left += u32::from(rig.store.has(single(chunk)).await);
    }
    assert_eq!(left, 4);
    assert_eq!(rig.metrics.damaged.get(), 20);
}

#[tokio::test]
async fn the_rest_of_an_object_that_is_too_long_is_not_read() {
    let mut rig = Rig::new();
    rig.write(3).await;
    let right = rig.store.inner.get(&object_name(single(3))).await.unwrap().bytes().await.unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&right).unwrap();
    let bytes = 1 << 30;
    file.set_len(bytes).unwrap();
    file.rewind().unwrap();
    let to = &rig.slots.destinations(single(3))[0];
    let mut arriving = Arriving::new(single(3).key(), to, bytes);
    arriving.feed_file(file, deadline()).unwrap();
    assert!(arriving.bytes <= 1 << 20, "{} bytes were read", arriving.bytes);
    assert_eq!(arriving.finish().unwrap_err(), Damage::Key);
}

#[tokio::test]
async fn another_chunks_record_under_a_name_is_damage() {
    let mut rig = Rig::new();
    rig.write(3).await;
    let other = object_name(single(6));
    let name = object_name(single(3));
    rig.store.inner.copy(&name, &other).await.unwrap();
    assert_eq!(rig.read(6).await, ReadAnswer::Damaged);
}

#[tokio::test]
async fn a_record_with_another_place_in_its_prompt_is_a_counted_miss_and_stays_for_those_who_know_it() {
    let mut rig = Rig::new();
    rig.write(3).await;
    let right = single(3).chunk_ref();
    let others = [
        ChunkRef { parent: single(9).chunk_ref().hash, ..right },
        ChunkRef { index: right.index + 1, ..right },
    ];
    for (count, other) in (1..).zip(others) {
        let order = ReadOrder::new(single(3).key().fingerprint, other, rig.slots.destinations(single(3)));
        assert_eq!(rig.client.read(order.unwrap(), deadline()).await, ReadAnswer::Disagrees);
        assert_eq!(rig.metrics.answers("disagrees"), count);
        assert!(matches!(rig.read(3).await, ReadAnswer::Here { .. }));
    }
}

#[tokio::test]
async fn a_damaged_object_that_cannot_be_deleted_is_replaced_by_the_next_write() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.change(single(1), |bytes| bytes[4_100] ^= 1).await;
    rig.store.faults().refuses_deletes = true;
    assert_eq!(rig.read(1).await, ReadAnswer::Damaged);
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}

#[tokio::test]
async fn an_object_of_another_version_is_a_miss_and_stays() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.change(single(1), |bytes| bytes[8] += 1).await;
    assert_eq!(rig.read(1).await, ReadAnswer::NotHeld);
    assert_eq!((rig.metrics.damaged.get(), rig.store.has(single(1)).await), (0, true));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_left_alone_and_used_again_when_it_does_not() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.faults().refuses_reads = true;
    rig.store.faults().gets = 0;
    for _ in 0..50 {
        assert_eq!(rig.read(1).await, ReadAnswer::Closed);
    }
    assert_eq!(rig.store.faults().gets, MOST_FAILURES as usize);
    assert_eq!(rig.metrics.closings(Side::Reading), 1);
    assert_eq!(rig.metrics.requests(Kind::Get, "denied"), u64::from(MOST_FAILURES));
    rig.client.try_again(Side::Reading, deadline()).await;
    assert!(rig.client.is_open(Side::Reading));
    let start = Instant::now();
    rig.client.trial(Side::Reading).await;
    assert_eq!(start.elapsed(), RETRY_EVERY);
    rig.store.faults().refuses_reads = false;
    rig.client.try_again(Side::Reading, deadline()).await;
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}

#[tokio::test(start_paused = true)]
async fn objects_that_the_store_alone_refuses_are_missed_until_written_again_and_the_others_are_read() {
    let mut rig = Rig::new();
    let archived = 0..2 * u64::from(MOST_FAILURES);
    for number in 0..10 {
        assert_eq!(rig.write(number).await, WriteAnswer::Durable);
    }
    rig.store.faults().archived = archived.clone().map(|number| object_name(single(number))).collect();
    // All of them are under way at the same time.
    rig.store.faults().delay = Duration::from_millis(1);
    let orders: Vec<_> = archived.clone().map(|number| rig.slots.read_order(single(number))).collect();
    let answers = join_all(orders.into_iter().map(|order| rig.client.read(order, deadline()))).await;
    assert!(answers.iter().all(|answer| *answer == ReadAnswer::Closed));
    assert!(rig.client.is_open(Side::Reading));
    let start = Instant::now();
    rig.client.trial(Side::Reading).await;
    assert_eq!(start.elapsed(), Duration::ZERO, "reads of the other objects wait for no pause");
    rig.client.try_again(Side::Reading, deadline()).await;
    for number in archived.clone() {
        let chunk = single(number).key();
        let chunks = [single(number).chunk_ref()];
        assert_eq!(rig.client.find(chunk.fingerprint, &chunks, &BLOCKS, deadline()).await, [Some(false)]);
        assert_eq!(rig.read(number).await, ReadAnswer::NotHeld);
    }
    assert!(matches!(rig.read(9).await, ReadAnswer::Here { .. }));
    assert_eq!(rig.metrics.closings(Side::Reading), 1);
    for number in archived {
        assert_eq!(rig.write(number).await, WriteAnswer::Durable);
        assert!(matches!(rig.read(number).await, ReadAnswer::Here { .. }));
    }
}

#[tokio::test(start_paused = true)]
async fn a_single_object_that_the_store_refuses_among_others_is_missed_and_replaced() {
    for keeps_archived in [false, true] {
        let mut rig = Rig::new();
        for number in [0, 1, 9] {
            rig.write(number).await;
        }
        rig.store.faults().archived = [0, 1].map(|number| object_name(single(number))).into();
        rig.store.faults().keeps_archived = keeps_archived;
        assert_eq!((rig.read(0).await, rig.read(0).await), (ReadAnswer::Closed, ReadAnswer::Closed));
        for _ in 0..4 {
            assert!(matches!(rig.read(9).await, ReadAnswer::Here { .. }));
            rig.read(0).await;
        }
        assert_eq!(rig.read(1).await, ReadAnswer::Closed);
        for (number, is_there) in [(0, false), (1, true)] {
            let chunks = [single(number).chunk_ref()];
            let found = rig.client.find(single(number).key().fingerprint, &chunks, &BLOCKS, deadline()).await;
            assert_eq!(found, [Some(is_there)], "one refusal may have passed");
        }
        assert_eq!(rig.metrics.closings(Side::Reading), 0);
        assert_eq!(rig.write(0).await, WriteAnswer::Durable);
        assert!(matches!(rig.read(0).await, ReadAnswer::Here { .. }));
        assert_eq!(rig.metrics.requests(Kind::Delete, "ok"), u64::from(keeps_archived));
    }
}

#[tokio::test]
async fn a_store_that_refuses_an_upload_because_of_another_request_does_not_have_it() {
    let mut rig = Rig::new();
    for code in ["ConditionalRequestConflict", "ContainerBeingDeleted"] {
        rig.store.faults().conflict = Some(code);
        assert_eq!(rig.write(1).await, WriteAnswer::Closed);
    }
    rig.store.faults().conflict = Some("BlobAlreadyExists");
    assert_eq!(rig.write(2).await, WriteAnswer::AlreadyThere);
    rig.store.faults().conflict = None;
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_all_uploads_as_existing_is_tried_with_pauses() {
    let rig = Rig::new();
    rig.store.faults().refuses_deletes = true;
    rig.client.leave_alone(&Trouble::new(TroubleKind::Other, "answer", "500"));
    for code in ["ContainerBeingDeleted", "BlobAlreadyExists"] {
        rig.store.faults().conflict = Some(code);
        let (start, before) = (Instant::now(), rig.store.faults().puts);
        while start.elapsed() < Duration::from_secs(60) && rig.store.faults().puts < 1_000 {
            rig.client.trial(Side::Writing).await;
            rig.client.try_again(Side::Writing, deadline()).await;
        }
        let puts = rig.store.faults().puts - before;
        assert!((12..=39).contains(&puts), "{puts} in a minute");
    }
}

#[tokio::test]
async fn a_file_that_opens_and_cannot_be_read_is_a_counted_miss_and_replaced() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.faults().unreadable = vec![object_name(single(1))];
    assert_eq!((rig.read(1).await, rig.metrics.damaged.get()), (ReadAnswer::Damaged, 1));
    assert!(rig.store.has(single(1)).await, "other machines may be able to read it");
    let chunks = [single(1).chunk_ref()];
    let found = rig.client.find(single(1).key().fingerprint, &chunks, &BLOCKS, deadline()).await;
    assert_eq!(found, [Some(false)]);
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}

#[tokio::test(start_paused = true)]
async fn objects_that_the_store_hands_out_again_are_read_after_a_while() {
    let mut rig = Rig::new();
    let refused = 0..u64::from(MOST_FAILURES);
    for number in refused.clone() {
        rig.write(number).await;
    }
    // As if the right to decrypt were lost for a time.
    rig.store.faults().archived = refused.clone().map(|number| object_name(single(number))).collect();
    for number in refused.clone() {
        assert_eq!(rig.read(number).await, ReadAnswer::Closed);
    }
    rig.client.try_again(Side::Reading, deadline()).await;
    rig.store.faults().archived.clear();
    for (pause, is_there) in [(Duration::ZERO, false), (DAMAGED_FOR, true)] {
        tokio::time::advance(pause).await;
        for number in refused.clone() {
            let chunks = [single(number).chunk_ref()];
            let found = rig.client.find(single(number).key().fingerprint, &chunks, &BLOCKS, deadline()).await;
            assert_eq!(found, [Some(is_there)]);
        }
    }
    assert!(matches!(rig.read(0).await, ReadAnswer::Here { .. }));
}

#[tokio::test(start_paused = true)]
async fn reads_go_on_where_writes_are_refused() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.faults().refuses_writes = true;
    for number in 10..30 {
        assert_eq!(rig.write(number).await, WriteAnswer::Closed);
        assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
    }
    assert!(rig.client.is_open(Side::Writing) && !rig.client.is_open(Side::Reading));
    assert_eq!(rig.store.faults().puts, 1 + MOST_FAILURES as usize);
    rig.store.faults().refuses_writes = false;
    rig.client.try_again(Side::Writing, deadline()).await;
    assert_eq!(rig.write(10).await, WriteAnswer::Durable);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_create_objects_is_not_tried_by_replacing_one() {
    let mut rig = Rig::new();
    rig.client.probe(deadline()).await.unwrap();
    for refuses_deletes in [false, true] {
        rig.store.faults().fails_to_create = true;
        while !rig.client.is_open(Side::Writing) {
            assert_eq!(rig.write(1).await, WriteAnswer::Closed);
        }
        rig.client.try_again(Side::Writing, deadline()).await;
        assert!(rig.client.is_open(Side::Writing), "blocks would fail again");
        rig.store.faults().fails_to_create = false;
        rig.store.faults().refuses_deletes = refuses_deletes;
        // The second trial finds the object of the first.
        rig.client.try_again(Side::Writing, deadline()).await;
        assert!(!rig.client.is_open(Side::Writing));
    }
    assert_eq!(rig.write(1).await, WriteAnswer::Durable);
}

#[tokio::test]
async fn objects_are_written_over_in_a_folder_whose_file_system_has_no_hard_links() {
    for is_probed in [false, true] {
        let mut rig = Rig::new();
        rig.store.faults().has_no_links = true;
        if is_probed {
            rig.client.probe(deadline()).await.unwrap();
        }
        for number in 0..10 {
            assert_eq!(rig.write(number).await, WriteAnswer::Durable);
            assert!(matches!(rig.read(number).await, ReadAnswer::Here { .. }));
        }
        assert_eq!(rig.metrics.closings(Side::Writing), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_ends_at_its_deadline_however_slow_the_store_is() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.faults().delay = Duration::from_secs(3_600);
    let (start, soon) = (Instant::now(), Duration::from_secs(1));
    let order = rig.slots.read_order(single(1));
    assert_eq!(rig.client.read(order, start + soon).await, ReadAnswer::Closed);
    let order = rig.slots.write_order(single(2));
    assert_eq!(rig.client.write(order, start + 2 * soon).await, WriteAnswer::Closed);
    assert_eq!(start.elapsed(), 2 * soon);
    assert_eq!(rig.metrics.in_flight.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_is_waited_for_once_by_all_who_read() {
    let mut rig = Rig::new();
    for number in 0..6 {
        rig.write(number).await;
    }
    rig.store.faults().delay = Duration::from_secs(3_600);
    let start = Instant::now();
    let orders: Vec<_> = (0..6).map(|number| rig.slots.read_order(single(number))).collect();
    let client = &rig.client;
    let reads = (0..).zip(orders).map(|(late, order)| async move {
        // Reads begin one after the other, as engines ask.
        sleep(Duration::from_millis(980 * late)).await;
        client.read(order, deadline()).await
    });
    let answers = join_all(reads).await;
    assert!(answers.iter().all(|answer| *answer == ReadAnswer::Closed));
    assert_eq!(start.elapsed(), options("").timeout, "the last had waited for a tenth of a second");
    assert_eq!((rig.read(1).await, start.elapsed()), (ReadAnswer::Closed, options("").timeout));
    assert!(rig.client.is_open(Side::Reading) && !rig.client.is_open(Side::Writing));
    assert_eq!(rig.metrics.closings(Side::Reading), 1);
}

#[tokio::test(start_paused = true)]
async fn reads_that_wait_for_a_turn_or_for_room_do_not_wait_for_a_silent_store_themselves() {
    let small = ObjectOptions { bytes_in_flight: 4 << 16, ..options("") };
    for options in [options(""), small] {
        let mut rig = Rig::with(Faulty::default(), &options);
        for number in 0..20 {
            rig.write(number).await;
        }
        rig.store.faults().delay = Duration::from_secs(3_600);
        let start = Instant::now();
        let orders: Vec<_> = (0..20).map(|number| rig.slots.read_order(single(number))).collect();
        let answers = join_all(orders.into_iter().map(|order| rig.client.read(order, deadline()))).await;
        assert!(answers.iter().all(|answer| *answer == ReadAnswer::Closed));
        assert_eq!(start.elapsed(), options.timeout);
        assert_eq!(rig.metrics.closings(Side::Reading), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_slow_and_answers_is_not_taken_for_a_silent_one() {
    let mut rig = Rig::new();
    for number in 0..20 {
        rig.write(number).await;
    }
    // Each request takes nearly as long as it may, and the last waits for its turn until long after that.
    rig.store.faults().delay = options("").timeout - Duration::from_millis(1);
    let orders: Vec<_> = (0..20).map(|number| rig.slots.read_order(single(number))).collect();
    let reads = orders.into_iter().map(|order| rig.client.read(order, deadline()));
    let answers = join_all(reads).await;
    assert!(answers.iter().all(|answer| matches!(answer, ReadAnswer::Here { .. })));
}

#[tokio::test(start_paused = true)]
async fn questions_get_a_turn_beside_slow_writes_and_the_stores_silence_is_not_the_queues() {
    let mut rig = Rig::new();
    let most = options("").max_in_flight;
    let find = async |rig: &Rig, number| {
        let chunks = [single(number).chunk_ref()];
        rig.client.find(single(number).key().fingerprint, &chunks, &BLOCKS, deadline()).await
    };
    let written = 0..2 * most as u64;
    for number in written.clone() {
        // The store is not asked again before the write.
        assert_eq!(find(&rig, number).await, [Some(false)]);
    }
    rig.store.faults().delay = 2 * FIND_DEADLINE;
    rig.store.faults().most_at_once = 0;
    let orders: Vec<_> = written.map(|number| rig.slots.write_order(single(number))).collect();
    let writes = join_all(orders.into_iter().map(|order| rig.client.write(order, deadline()))).await;
    assert!(writes.iter().all(|answer| *answer == WriteAnswer::Durable));
    assert_eq!(rig.store.faults().most_at_once, most / 2);
    let turns = rig.client.all_turns().await;
    assert_eq!((find(&rig, 1_000).await, rig.client.is_open(Side::Reading)), (vec![], false));
    drop(turns);
    assert_eq!((find(&rig, 1_000).await, rig.client.is_open(Side::Reading)), (vec![], true), "it is silent");
}

#[tokio::test(start_paused = true)]
async fn a_write_is_answered_only_when_nothing_reads_its_places_any_more() {
    let mut rig = Rig::new();
    rig.store.faults().holds = 3 * DEADLINE;
    for refuses in [false, true] {
        rig.store.faults().refuses_writes = refuses;
        let start = Instant::now();
        let answer = rig.write(u64::from(refuses)).await;
        assert_eq!(answer == WriteAnswer::Closed, refuses);
        assert_eq!(start.elapsed(), 3 * DEADLINE, "the client held on to the bytes");
    }
}

#[test]
fn a_tier_whose_store_begins_to_refuse_stays_up_and_says_so_at_once() {
    let store = Faulty::default();
    let opened = (Arc::new(store.clone()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let tier = ObjectTier::start(opened, &options("memory:///"), metrics()).unwrap();
    let mut slots = Slots::new();
    store.faults().refuses_writes = true;
    store.faults().refuses_reads = true;
    let mut tries = 0;
    while let Ok(answer) = tier.write(slots.write_order(single(1))) {
        assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Closed));
        tries += 1;
    }
    assert!(tries <= MOST_FAILURES);
    while let Ok(answer) = tier.read(slots.read_order(single(1))) {
        assert_eq!(answer.blocking_recv(), Ok(ReadAnswer::Closed));
    }
    assert!(tier.is_closed(Side::Reading) && tier.is_closed(Side::Writing));
    assert!(tier.find(single(1).key().fingerprint, vec![single(1).chunk_ref()], BLOCKS.into()).is_err());
}

#[test]
fn a_purge_waits_for_a_write_that_was_ordered_before_and_that_nobody_waits_for() {
    let store = Faulty::default();
    let opened = (Arc::new(store.clone()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let tier = ObjectTier::start(opened, &options("memory:///"), metrics()).unwrap();
    let mut slots = Slots::new();
    let order = slots.write_order(single(1));
    store.faults().uplink = Some(order.bytes() as f64 * 4.0);
    drop(tier.write(order).unwrap());
    let mut keys = PurgedKeys::default();
    keys.add(single(1).key().fingerprint);
    let purge = ObjectPurge { keys, mode: PurgeMode::Remove, progress: Box::new(|_| ()) };
    assert!(tier.purge(purge).unwrap().blocking_recv().unwrap().is_ok());
    assert_eq!(store.faults().puts, 2, "one is the probe of the start");
    let find = tier.find(single(1).key().fingerprint, vec![single(1).chunk_ref()], BLOCKS.into()).unwrap();
    assert_eq!(find.blocking_recv().unwrap(), [Some(false)]);
}

/// A server that has no objects, and never answers a put.
fn stuck_server() -> std::io::Result<std::net::SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let serve = |stream: TcpStream| {
        let mut lines = BufReader::new(&stream).lines().map_while(std::io::Result::ok);
        while let Some(request) = lines.next() {
            if !request.starts_with("HEAD") {
                break;
            }
            lines.find(String::is_empty);
            let absent = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
            (&stream).write_all(absent).unwrap();
        }
        // Reads until the client gives up.
        while (&stream).read(&mut [0; 4_096]).is_ok_and(|bytes| bytes > 0) {}
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream));
        }
    });
    Ok(address)
}

#[tokio::test(start_paused = true)]
async fn a_store_that_asks_for_a_pause_is_not_tried_before_its_end() {
    let (said, options) = (Arc::<StoreNews>::default(), options("memory:///"));
    let store = (Arc::new(InMemory::new()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let client = Client::new(store, &options, metrics(), Arc::clone(&said));
    let (start, pause) = (Instant::now(), 9 * RETRY_EVERY);
    said.pause.ask(pause);
    client.leave_alone(&Trouble::new(TroubleKind::Other, "answer", "503"));
    client.trial(Side::Reading).await;
    assert!(start.elapsed() >= pause, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_write_to_a_server_that_never_answers_ends_and_lets_go_of_its_places() {
    let endpoint = format!("http://{}", stuck_server().unwrap());
    let settings = [("endpoint", endpoint.as_str()), ("access_key_id", "id"), ("secret_access_key", "key")];
    let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let timeout = Duration::from_millis(500);
    let options = ObjectOptions { settings, timeout, ..options("s3://bucket/prefix") };
    let metrics = metrics();
    let client = Client::new(
        store::open(&options, &AskedPause::default()).unwrap(),
        &options,
        metrics.clone(),
        Arc::default(),
    );
    let deadline = Instant::now() + timeout;
    let order = Slots::new().write_order(single(1));
    assert_eq!(client.write(order, deadline).await, WriteAnswer::Closed);
    assert_eq!(metrics.requests(Kind::Head, "absent"), 1);
    assert_eq!(metrics.requests(Kind::Put, "timed_out"), 1, "it was under way");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_says_what_it_has_and_hands_out_none_costs_one_wait_until_it_does_again() {
    let mut rig = Rig::new();
    rig.write(1).await;
    rig.store.faults().hangs_in_reads = true;
    let start = Instant::now();
    for _ in 0..20 {
        // Successful finds do not mean that reads work.
        let found =
            rig.client.ask_for(&ObjectKey { chunk: single(1).key(), block: BLOCKS[0] }, deadline()).await;
        assert!(found.is_ok() || rig.client.is_open(Side::Reading));
        assert_eq!(rig.read(1).await, ReadAnswer::Closed);
    }
    assert!(start.elapsed() <= options("memory:///").timeout, "{:?}", start.elapsed());
    rig.client.try_again(Side::Reading, deadline()).await;
    assert!(rig.client.is_open(Side::Reading), "it is tried by what could not be read");
    rig.store.faults().hangs_in_reads = false;
    rig.client.try_again(Side::Reading, deadline()).await;
    assert!(matches!(rig.read(1).await, ReadAnswer::Here { .. }));
}
