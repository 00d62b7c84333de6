//! Answers of a tier, each behavior by itself.

use std::sync::mpsc::channel;

use larder_core::store::PurgedKeys;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{HitPolicy, PoolSpec};

use super::faults::Platter;
use super::*;
use crate::disk::format::StorageId;
use crate::disk::metrics::FoundBy;
use crate::disk::volume::{DiskJob, Volume};

/// A volume on a platter.
pub(super) struct Rig {
    pub(super) platter: Platter,
    pub(super) volume: Volume,
    pub(super) slots: Slots,
    pub(super) metrics: DiskMetrics,
    pub(super) gone: Receiver<Gone>,
}

impl Rig {
    pub(super) fn new() -> Self {
        let (platter, metrics, (on_gone, gone)) = (Platter::new(GEOMETRY.file_bytes(), 1), metrics(), gone());
        let volume = Volume::over(platter.device(), GEOMETRY, STORAGE, metrics.clone(), on_gone).unwrap();
        Self { platter, volume, slots: Slots::new(), metrics, gone }
    }

    pub(super) fn write(&mut self, number: u64) -> WriteAnswer {
        let (done, answer) = oneshot::channel();
        let order = self.slots.write_order(TestChunk(number));
        self.volume.perform(vec![DiskJob::Write((order, done))], &mut || None);
        while self.volume.wants_eviction() {
            self.volume.evict_ahead();
        }
        now(answer)
    }

    pub(super) fn read(&mut self, number: u64) -> ReadAnswer {
        let (done, answer) = oneshot::channel();
        let order = self.slots.read_order(TestChunk(number));
        self.volume.perform(vec![DiskJob::Read((order, done))], &mut || None);
        now(answer)
    }

    /// Flips a bit in the middle of a chunk's record.
    fn damage(&self, number: u64) {
        let place = self.volume.find(&TestChunk(number).key()).unwrap();
        // The first byte of the payload.
        self.platter.flip(GEOMETRY.offset(place.segment, place.page + 1), 3);
    }

    pub(super) fn fail_from_now_on(&self, error: i32) {
        let state = &mut *self.platter.state();
        state.fails = Some((state.operations, error));
    }
}

#[test]
fn a_chunk_comes_back_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    for lane in [None, Some(IoMethod::Plain)] {
        let options = DiskOptions { lane, ..options(&folder.path().join(format!("{lane:?}"))) };
        let tier = DiskTier::open(&options, metrics(), gone().0).unwrap();
        let mut slots = Slots::new();
        for number in 0..20 {
            let answer = tier.write(slots.write_order(TestChunk(number))).unwrap();
            assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
        }
        for number in 0..20 {
            let answer = tier.read(slots.read_order(TestChunk(number))).unwrap().blocking_recv().unwrap();
            slots.assert_right(TestChunk(number), &answer);
        }
        let missing = tier.read(slots.read_order(TestChunk(99))).unwrap();
        assert_eq!(missing.blocking_recv(), Ok(ReadAnswer::NotHeld));
    }
}

#[test]
fn a_tier_that_was_closed_and_opened_again_holds_what_it_held() {
    let folder = tempfile::tempdir().unwrap();
    let mut slots = Slots::new();
    for round in 0..5_u64 {
        let tier = open(folder.path());
        for number in 0..round * 4 {
            let answer = tier.read(slots.read_order(TestChunk(number))).unwrap().blocking_recv().unwrap();
            slots.assert_right(TestChunk(number), &answer);
        }
        for number in round * 4..round * 4 + 4 {
            let answer = tier.write(slots.write_order(TestChunk(number))).unwrap();
            assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
        }
    }
}

#[test]
fn a_chunk_that_is_there_is_not_written_again() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(1), WriteAnswer::Durable);
    let written = rig.metrics.written_bytes.get();
    assert_eq!(rig.write(1), WriteAnswer::AlreadyThere);
    assert_eq!(rig.metrics.written_bytes.get(), written);
}

#[test]
fn the_chunks_of_a_quiet_tenant_stay_when_another_writes_more_than_the_disk_holds() {
    let mut rig = Rig::new();
    let owners = Arc::clone(rig.volume.owners());
    let is_quiet = |number: &u64| number.is_multiple_of(3);
    for (number, tenant) in [(0, "quiet"), (1, "busy"), (2, "busy")] {
        owners.own(tenant, TestChunk(number).key().fingerprint);
    }
    let quiet: Vec<u64> = (0..18).filter(is_quiet).collect();
    let held = |rig: &Rig| quiet.iter().filter(|&&n| rig.volume.find(&TestChunk(n).key()).is_some()).count();
    let write_others = |rig: &mut Rig, numbers: std::ops::Range<u64>| {
        numbers.filter(|number| !is_quiet(number)).for_each(|number| _ = rig.write(number));
    };
    quiet.iter().for_each(|&number| _ = rig.write(number));
    write_others(&mut rig, 100..400);
    assert_eq!(held(&rig), quiet.len());
    for &number in &quiet {
        assert!(matches!(rig.read(number), ReadAnswer::Here { .. }), "{number}");
    }
    // A tenant that the node no longer serves keeps nothing.
    owners.serves("quiet", false);
    write_others(&mut rig, 400..1_000);
    assert_eq!(held(&rig), 0);
    owners.serves("quiet", true);
    assert_eq!(owners.of(&TestChunk(0).key().fingerprint).as_deref(), Some("quiet"));
    owners.forget(&TestChunk(0).key().fingerprint);
    assert_eq!(owners.of(&TestChunk(0).key().fingerprint), None);
}

#[test]
fn a_record_with_more_blocks_takes_the_place_of_the_one_before_it_for_good() {
    let mut rig = Rig::new();
    let chunk = (0..).map(TestChunk).find(|chunk| chunk.blocks().len() == 3).unwrap();
    let whole = rig.slots.write_order(chunk);
    let part = WriteOrder::new(whole.fingerprint, whole.chunk, whole.sources[..1].to_vec()).unwrap();
    let write = |rig: &mut Rig, order| {
        let (done, answer) = oneshot::channel();
        rig.volume.perform(vec![DiskJob::Write((order, done))], &mut || None);
        now(answer)
    };
    assert_eq!(write(&mut rig, part), WriteAnswer::Durable);
    assert_eq!(write(&mut rig, whole), WriteAnswer::AlreadyThere);
    assert_eq!(rig.read(chunk.0), ReadAnswer::OtherBlocks);
    let again = rig.slots.write_order(chunk).replacing();
    assert_eq!(write(&mut rig, again), WriteAnswer::Durable);
    for _ in ["before a restart", "after it"] {
        let answer = rig.read(chunk.0);
        rig.slots.assert_right(chunk, &answer);
        let (done, answer) = oneshot::channel();
        rig.volume.perform(vec![DiskJob::Snapshot(0, done)], &mut || None);
        assert_eq!(now(answer).unwrap().held, [(chunk.key().fingerprint, chunk.chunk_ref(), chunk.pools())]);
        let device = rig.platter.device();
        rig.volume = Volume::over(device, GEOMETRY, STORAGE, rig.metrics.clone(), gone().0).unwrap();
    }
}

#[test]
fn a_record_that_was_replaced_in_one_segment_moves_once_and_stays_away_after_its_purge() {
    let mut rig = Rig::new();
    let chunk = (0..).map(TestChunk).find(|chunk| chunk.blocks().len() == 3).unwrap();
    let write = |rig: &mut Rig, order| {
        let (done, answer) = oneshot::channel();
        rig.volume.perform(vec![DiskJob::Write((order, done))], &mut || None);
        now(answer)
    };
    for _ in 0..2 {
        let again = rig.slots.write_order(chunk).replacing();
        assert_eq!(write(&mut rig, again), WriteAnswer::Durable);
    }
    let first = rig.volume.find(&chunk.key()).unwrap();
    let answer = rig.read(chunk.0);
    rig.slots.assert_right(chunk, &answer);
    // Others of other namespaces, until the first segment's turn comes.
    let mut others =
        (chunk.0 + 1..).filter(|&number| TestChunk(number).key().fingerprint != chunk.key().fingerprint);
    let has_moved = |rig: &mut Rig, number| {
        assert_eq!(rig.write(number), WriteAnswer::Durable);
        rig.volume.find(&chunk.key()).unwrap().segment != first.segment
    };
    assert!(others.any(|number| has_moved(&mut rig, number)));
    assert_eq!(rig.metrics.moved_bytes.get(), u64::from(first.pages) * PAGE_BYTES, "once");
    let mut keys = PurgedKeys::default();
    keys.add(chunk.key().fingerprint);
    let (keys, mut after) = (Arc::new(keys), Some(0));
    while let Some(at) = after {
        let (done, answer) = oneshot::channel();
        let purge = DiskPurge { keys: Arc::clone(&keys), mode: PurgeMode::Remove };
        rig.volume.perform(vec![DiskJob::Purge(purge, at, done)], &mut || None);
        after = now(answer).unwrap().next;
    }
    let device = rig.platter.device();
    rig.volume = Volume::over(device, GEOMETRY, STORAGE, rig.metrics.clone(), gone().0).unwrap();
    assert_eq!(rig.read(chunk.0), ReadAnswer::NotHeld);
}

#[test]
fn a_purge_counts_a_chunk_once_however_many_records_it_has() {
    let mut rig = Rig::new();
    assert_eq!(rig.write(1), WriteAnswer::Durable);
    let first = rig.volume.find(&TestChunk(1).key()).unwrap();
    // Chunks of other namespaces, until another segment is open.
    let mut others = (2..).filter(|number| number % 3 != 1);
    let is_elsewhere = |rig: &mut Rig, number| {
        assert_eq!(rig.write(number), WriteAnswer::Durable);
        rig.volume.find(&TestChunk(number).key()).unwrap().segment != first.segment
    };
    assert!(others.any(|number| is_elsewhere(&mut rig, number)));
    let (done, answer) = oneshot::channel();
    let again = rig.slots.write_order(TestChunk(1)).replacing();
    rig.volume.perform(vec![DiskJob::Write((again, done))], &mut || None);
    assert_eq!(now(answer), WriteAnswer::Durable);
    for mode in [PurgeMode::Count, PurgeMode::Remove] {
        let mut keys = PurgedKeys::default();
        keys.add(TestChunk(1).key().fingerprint);
        let (keys, mut records, mut after) = (Arc::new(keys), 0, Some(0));
        while let Some(at) = after {
            let (done, answer) = oneshot::channel();
            let purge = DiskPurge { keys: Arc::clone(&keys), mode };
            rig.volume.perform(vec![DiskJob::Purge(purge, at, done)], &mut || None);
            let purged = now(answer).unwrap();
            (records, after) = (records + purged.records, purged.next);
        }
        assert_eq!(records, 1, "{mode:?}");
    }
    assert_eq!(rig.read(1), ReadAnswer::NotHeld);
    let device = rig.platter.device();
    rig.volume = Volume::over(device, GEOMETRY, STORAGE, rig.metrics.clone(), gone().0).unwrap();
    assert_eq!(rig.read(1), ReadAnswer::NotHeld, "nor after a restart");
}

#[test]
fn reads_that_come_while_others_are_carried_out_join_them() {
    let mut rig = Rig::new();
    (0..6).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    let read = |number| {
        let (done, answer) = oneshot::channel();
        ((rig.slots.read_order(TestChunk(number)), done), answer)
    };
    let (first, mut answers) = (read(0), Vec::new());
    answers.push((0, first.1));
    let mut later = std::collections::VecDeque::new();
    // Chunk 77, in the middle, is not there.
    for number in [1, 2, 77, 3, 4, 5] {
        let (reading, answer) = read(number);
        later.push_back(reading);
        answers.push((number, answer));
    }
    rig.volume.perform(vec![DiskJob::Read(first.0)], &mut || later.pop_front());
    for (number, answer) in answers {
        match now(answer) {
            // All chunks go to the same slots, so only the checksums summed on the way tell that each was right.
            ReadAnswer::Here { checksums, .. } => {
                let right = TestChunk(number).blocks().into_iter().map(|block| block.checksums);
                assert_eq!(checksums, right.collect::<Vec<_>>());
            }
            answer => assert_eq!((number, answer), (77, ReadAnswer::NotHeld)),
        }
    }
}

#[test]
fn one_sync_serves_all_writes_that_were_waiting() {
    let mut rig = Rig::new();
    rig.write(100);
    let syncs = rig.metrics.sync_seconds.get_sample_count();
    let (jobs, answers): (Vec<_>, Vec<_>) = (0..3)
        .map(|number| {
            let (done, answer) = oneshot::channel();
            (DiskJob::Write((rig.slots.write_order(TestChunk(number)), done)), answer)
        })
        .unzip();
    rig.volume.perform(jobs, &mut || None);
    assert!(answers.into_iter().all(|answer| now(answer) == WriteAnswer::Durable));
    assert_eq!(rig.metrics.sync_seconds.get_sample_count(), syncs + 1);
}

#[test]
fn some_blocks_of_a_chunk_can_be_read_and_others_are_told_apart() {
    let mut rig = Rig::new();
    let chunk = (0..).map(TestChunk).find(|chunk| chunk.blocks().len() == 3).unwrap();
    rig.write(chunk.0);
    let mut ask = |destinations| {
        let (done, answer) = oneshot::channel();
        let order = ReadOrder::new(chunk.key().fingerprint, chunk.chunk_ref(), destinations).unwrap();
        rig.volume.perform(vec![DiskJob::Read((order, done))], &mut || None);
        now(answer)
    };
    let all = Slots::new().destinations(chunk);
    let ReadAnswer::Here { checksums, .. } = ask(vec![all[2].clone(), all[0].clone()]) else {
        panic!("two of three blocks")
    };
    assert_eq!(checksums, [chunk.blocks()[2].checksums.clone(), chunk.blocks()[0].checksums.clone()]);
    let unknown = BlockPlace { slice: 77, ..all[0].clone() };
    assert_eq!(ask(vec![all[1].clone(), unknown]), ReadAnswer::OtherBlocks);
    let shorter = BlockPlace { bytes: all[0].bytes - 1, ..all[0].clone() };
    assert_eq!(ask(vec![shorter]), ReadAnswer::OtherBlocks);
}

#[test]
fn a_damaged_chunk_is_a_miss_is_counted_and_can_be_written_again() {
    let mut rig = Rig::new();
    rig.write(1);
    rig.damage(1);
    assert_eq!(rig.volume.found().trouble(), None);
    assert_eq!(rig.read(1), ReadAnswer::Damaged);
    assert_eq!(rig.read(1), ReadAnswer::NotHeld);
    assert_eq!(rig.metrics.damaged(FoundBy::Read), 1);
    assert!(
        rig.volume
            .found()
            .trouble()
            .unwrap()
            .contains("1 records or descriptions of namespaces had wrong bytes and 0")
    );
    assert_eq!(
        rig.gone.try_iter().collect::<Vec<_>>(),
        [Gone { chunks: vec![TestChunk(1).key()], why: Why::Damaged }]
    );
    assert_eq!(rig.write(1), WriteAnswer::Durable);
    let answer = rig.read(1);
    rig.slots.assert_right(TestChunk(1), &answer);
}

#[test]
fn the_scrubber_finds_a_flipped_bit_that_nobody_read() {
    let mut rig = Rig::new();
    (0..5).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    rig.damage(3);
    (0..5).for_each(|_| assert!(rig.volume.scrub().is_some()));
    assert_eq!((rig.metrics.damaged(FoundBy::Scrub), rig.metrics.damaged(FoundBy::Read)), (1, 0));
    assert_eq!(rig.read(3), ReadAnswer::NotHeld);
    assert_eq!(rig.metrics.records.get(), 4);
}

#[test]
fn a_tier_without_orders_is_scrubbed_by_its_own_thread() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { scrub_bytes_per_second: 1 << 40, ..options(folder.path()) };
    let metrics = metrics();
    let tier = DiskTier::open(&options, metrics.clone(), gone().0).unwrap();
    let answer = tier.write(Slots::new().write_order(TestChunk(1))).unwrap();
    answer.blocking_recv().unwrap();
    while metrics.scrubbed_bytes.get() == 0 {
        std::thread::yield_now();
    }
    assert_eq!(metrics.damaged(FoundBy::Scrub), 0);
}

#[test]
fn what_was_read_survives_when_its_segment_is_given_up_and_the_rest_is_told() {
    let mut rig = Rig::new();
    rig.write(0);
    rig.write(1);
    let mut number = 2;
    while rig.metrics.moved_bytes.get() == 0 {
        assert!(matches!(rig.read(0), ReadAnswer::Here { .. }));
        assert_eq!(rig.write(number), WriteAnswer::Durable);
        number += 1;
    }
    let gone: Vec<Gone> = rig.gone.try_iter().collect();
    assert!(gone.iter().all(|gone| gone.why == Why::Evicted && !gone.chunks.contains(&TestChunk(0).key())));
    assert!(gone.iter().any(|gone| gone.chunks.contains(&TestChunk(1).key())));
    let answer = rig.read(0);
    rig.slots.assert_right(TestChunk(0), &answer);
    assert_eq!(rig.read(1), ReadAnswer::NotHeld);
}

#[test]
fn a_touched_chunk_survives_like_one_that_was_read() {
    let mut rig = Rig::new();
    rig.write(0);
    let mut number = 1;
    while rig.metrics.evicted.get() == 0 {
        rig.volume.perform(vec![DiskJob::Touch(vec![TestChunk(0).key()])], &mut || None);
        rig.write(number);
        number += 1;
    }
    assert!(matches!(rig.read(0), ReadAnswer::Here { .. }));
}

#[test]
fn a_damaged_chunk_is_not_moved() {
    let mut rig = Rig::new();
    rig.write(0);
    rig.read(0);
    rig.damage(0);
    let mut number = 1;
    while rig.metrics.evicted.get() == 0 {
        rig.write(number);
        number += 1;
    }
    assert_eq!((rig.metrics.damaged(FoundBy::Move), rig.read(0)), (1, ReadAnswer::NotHeld));
}

#[test]
fn a_record_with_another_place_in_its_prompt_is_a_miss_is_counted_and_can_be_written_again() {
    let mut rig = Rig::new();
    let right = TestChunk(1).chunk_ref();
    let others =
        [ChunkRef { parent: TestChunk(9).key().hash, ..right }, ChunkRef { index: right.index + 1, ..right }];
    for (count, other) in (1..).zip(others) {
        assert_eq!(rig.write(1), WriteAnswer::Durable);
        let (done, answer) = oneshot::channel();
        let places = rig.slots.destinations(TestChunk(1));
        let order = ReadOrder::new(TestChunk(1).key().fingerprint, other, places).unwrap();
        rig.volume.perform(vec![DiskJob::Read((order, done))], &mut || None);
        assert_eq!((now(answer), rig.metrics.answers("disagrees")), (ReadAnswer::Disagrees, count));
        assert_eq!(rig.read(1), ReadAnswer::NotHeld);
    }
}

#[test]
fn a_chunk_with_the_bytes_of_another_is_not_written() {
    let (mut slots, other) = (Slots::new(), TestChunk(2));
    let order = slots.write_order(TestChunk(1));
    let refused = |fingerprint, chunk, sources: &[Source]| {
        WriteOrder::new(fingerprint, chunk, sources.to_vec()).unwrap_err()
    };
    let (fingerprint, chunk) = (order.fingerprint, order.chunk);
    let misnamed = |error| matches!(error, order::OrderError::Misnamed { slice: 0, pool: 0 });
    assert!(misnamed(refused(fingerprint, ChunkRef { hash: other.key().hash, ..chunk }, &order.sources)));
    assert!(misnamed(refused(other.key().fingerprint, chunk, &order.sources)));
    let mut sources = order.sources.clone();
    sources[0].place.slice = 7;
    assert!(matches!(
        refused(fingerprint, chunk, &sources),
        order::OrderError::Misnamed { slice: 7, pool: 0 }
    ));
}

#[test]
fn a_removed_chunk_is_gone() {
    let mut rig = Rig::new();
    rig.write(1);
    for was_there in [true, false] {
        let (done, answer) = oneshot::channel();
        rig.volume.perform(vec![DiskJob::Forget(TestChunk(1).key(), done)], &mut || None);
        assert_eq!(now(answer), was_there);
    }
    assert_eq!(rig.read(1), ReadAnswer::NotHeld);
}

#[test]
fn a_snapshot_names_every_chunk_that_is_held_in_sealed_segments_and_in_the_open_one() {
    let mut rig = Rig::new();
    (0..30).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    let expected: std::collections::BTreeSet<TestChunk> =
        (0..30).map(TestChunk).filter(|chunk| rig.volume.find(&chunk.key()).is_some()).collect();
    let (mut after, mut held, mut pages) = (Some(0), Vec::new(), 0);
    while let Some(from) = after {
        let (done, answer) = oneshot::channel();
        rig.volume.perform(vec![DiskJob::Snapshot(from, done)], &mut || None);
        let page = now(answer).unwrap();
        held.extend(page.held);
        after = page.next;
        pages += 1;
    }
    held.sort_by_key(|(_, chunk, _)| u64::from_le_bytes(chunk.hash.0[8..16].try_into().unwrap()));
    let right = expected.iter().map(|chunk| (chunk.key().fingerprint, chunk.chunk_ref(), chunk.pools()));
    assert!(held.into_iter().eq(right));
    assert!(pages > 3 && expected.len() > 5);
}

#[test]
fn a_drive_that_fails_or_is_full_closes_the_tier_and_every_order_is_answered() {
    for error in [libc::EIO, libc::ENOSPC] {
        let mut rig = Rig::new();
        rig.write(1);
        rig.fail_from_now_on(error);
        let (jobs, answers): (Vec<_>, Vec<_>) = (2..5)
            .map(|number| {
                let (done, answer) = oneshot::channel();
                (DiskJob::Write((rig.slots.write_order(TestChunk(number)), done)), answer)
            })
            .unzip();
        rig.volume.perform(jobs, &mut || None);
        assert!(answers.into_iter().all(|answer| now(answer) == WriteAnswer::Closed));
        rig.platter.state().fails = None;
        let operations = rig.platter.state().operations;
        assert_eq!((rig.read(1), rig.write(9)), (ReadAnswer::Closed, WriteAnswer::Closed));
        rig.volume.settle();
        assert_eq!(rig.platter.state().operations, operations, "nothing is written after a failed write");
        assert_eq!(rig.metrics.closed.get(), 1);
        assert_eq!(rig.metrics.answers("closed"), 5);
        let gone: Vec<Why> = rig.gone.try_iter().map(|gone| gone.why).collect();
        assert_eq!(gone, [Why::Closed]);
    }
}

#[test]
fn a_full_queue_answers_busy_and_a_closed_tier_closed() {
    let (platter, metrics) = (Platter::new(GEOMETRY.file_bytes(), 1), metrics());
    let volume = Volume::over(platter.device(), GEOMETRY, STORAGE, metrics.clone(), gone().0).unwrap();
    let (hold, gate) = channel();
    platter.state().gate = Some(gate);
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { queue_orders: 2, ..options(folder.path()) };
    let tier = DiskTier::start(volume, &options, metrics.clone()).unwrap();
    let mut slots = Slots::new();
    let mut answers = Vec::new();
    // While it waits for the drive, the thread has taken at most two batches from the queue.
    let refused = loop {
        match tier.write(slots.write_order(TestChunk(answers.len() as u64))) {
            Ok(answer) => answers.push(answer),
            Err(refused) => break refused,
        }
        assert!(answers.len() < 16, "a queue of two takes everything");
    };
    assert_eq!(refused, Refused::Busy);
    assert_eq!(metrics.answers("busy"), 1);
    drop(hold);
    for answer in answers {
        assert_eq!(answer.blocking_recv(), Ok(WriteAnswer::Durable));
    }
    platter.state().fails = Some((0, libc::EIO));
    let failing = tier.write(slots.write_order(TestChunk(50))).unwrap();
    assert_eq!(failing.blocking_recv(), Ok(WriteAnswer::Closed));
    while !tier.is_closed() {
        std::thread::yield_now();
    }
    assert!(matches!(tier.read(slots.read_order(TestChunk(0))), Err(Refused::Closed)));
}

#[test]
fn a_chunk_larger_than_a_segment_is_refused() {
    let mut rig = Rig::new();
    let memory = arena(2).extent(0).clone();
    let bytes = GEOMETRY.most_pages() * PAGE_BYTES;
    let place = BlockPlace { slice: 0, pool: 0, memory, offset: 0, bytes, range_bytes: bytes };
    let (fingerprint, chunk) = (Fingerprint([1; 32]), TestChunk(1).chunk_ref());
    let key = BlockKey { fingerprint, hash: chunk.hash, slice: 0, pool: 0 };
    let checksums = Checksums::of(&key, [0]);
    let order = WriteOrder::new(fingerprint, chunk, vec![Source { place, checksums }]);
    let (done, answer) = oneshot::channel();
    rig.volume.perform(vec![DiskJob::Write((order.unwrap(), done))], &mut || None);
    assert_eq!(now(answer), WriteAnswer::TooLarge);
    let has_room = |bytes: u64, slices: u16| {
        let pools = vec![PoolSpec { name: "kv".into(), layers: 1, layer_bytes: bytes, hit: HitPolicy::All }];
        GEOMETRY.has_room_for(slices, &pools)
    };
    assert!(!has_room(bytes, 1) && has_room(bytes - PAGE_BYTES, 1) && !has_room(bytes - PAGE_BYTES, 2));
}

#[test]
fn impossible_orders_are_refused_where_they_are_made() {
    let slots = Slots::new();
    let place = slots.destinations(TestChunk(1)).remove(0);
    let (key, chunk) = (TestChunk(1).key(), TestChunk(1).chunk_ref());
    let read = |place: BlockPlace| ReadOrder::new(key.fingerprint, chunk, vec![place]).unwrap_err();
    assert!(matches!(
        read(BlockPlace { offset: u64::MAX, ..place.clone() }),
        order::OrderError::OutOfBounds(_)
    ));
    assert_eq!(read(BlockPlace { bytes: 0, ..place.clone() }), order::OrderError::Blocks);
    assert_eq!(ReadOrder::new(key.fingerprint, chunk, Vec::new()).unwrap_err(), order::OrderError::Blocks);
    let checksums = Checksums { whole: 0, ranges: [].into_iter().collect() };
    let source = Source { place: place.clone(), checksums };
    let write = WriteOrder::new(key.fingerprint, TestChunk(1).chunk_ref(), vec![source]).unwrap_err();
    assert_eq!(write, order::OrderError::Blocks);
    let place = BlockPlace { bytes: 1 << 20, range_bytes: 1, ..place };
    let block =
        BlockKey { fingerprint: key.fingerprint, hash: key.hash, slice: place.slice, pool: place.pool };
    let checksums = Checksums::of(&block, std::iter::repeat_n(0, 1 << 20));
    let write = WriteOrder::new(key.fingerprint, TestChunk(1).chunk_ref(), vec![Source { place, checksums }]);
    assert!(matches!(write.unwrap_err(), order::OrderError::Header { .. }));
}

pub(super) const GEOMETRY: Geometry = Geometry { segments: 6, segment_pages: 40 };
pub(super) const STORAGE: StorageId = StorageId([9; 16]);
