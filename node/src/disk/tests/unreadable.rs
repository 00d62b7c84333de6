//! Drives that cannot read some of their contents.

use larder_core::store::PurgedKeys;
use larder_protocol::purge::PurgeMode;

use super::behaviour::{GEOMETRY, Rig, STORAGE};
use super::*;
use crate::disk::log::RecordPlace;
use crate::disk::metrics::FoundBy;
use crate::disk::volume::{DiskJob, Volume};

impl Rig {
    fn place(&self, number: u64) -> RecordPlace {
        self.volume.find(&TestChunk(number).key()).unwrap()
    }

    /// Makes the first page of a chunk's payload unreadable.
    fn lose(&self, number: u64) {
        let RecordPlace { segment, page, .. } = self.place(number);
        self.platter.lose_page(GEOMETRY.offset(segment, page + 1));
    }

    fn settle(&mut self) {
        while self.volume.wants_eviction() {
            self.volume.evict_ahead();
        }
    }

    fn reopen(&mut self) {
        self.volume.settle();
        let (on_gone, gone) = gone();
        let device = self.platter.device();
        self.volume = Volume::over(device, GEOMETRY, STORAGE, self.metrics.clone(), on_gone).unwrap();
        self.gone = gone;
    }

    /// Purges a chunk's namespace.
    fn purge(&mut self, number: u64, mode: PurgeMode) {
        let mut keys = PurgedKeys::default();
        keys.add(TestChunk(number).key().fingerprint);
        let (keys, mut after) = (Arc::new(keys), Some(0));
        while let Some(at) = after {
            let (done, answer) = oneshot::channel();
            let purge = DiskPurge { keys: Arc::clone(&keys), mode };
            self.volume.perform(vec![DiskJob::Purge(purge, at, done)], &mut || None);
            let purged = now(answer).unwrap();
            assert_eq!(purged.unreadable, 0);
            after = purged.next;
        }
    }

    fn is_read(&mut self, number: u64) -> bool {
        let answer = self.read(number);
        let is_read = matches!(answer, ReadAnswer::Here { .. });
        if is_read {
            self.slots.assert_right(TestChunk(number), &answer);
        }
        is_read
    }
}

#[test]
fn a_sector_that_cannot_be_read_costs_its_chunk_alone_and_the_tier_goes_on() {
    let mut rig = Rig::new();
    (0..4).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    rig.lose(2);
    assert_eq!((rig.read(2), rig.read(2)), (ReadAnswer::Damaged, ReadAnswer::NotHeld));
    assert_eq!((rig.metrics.read_errors.get(), rig.metrics.closed.get()), (1, 0));
    assert_eq!(rig.metrics.damaged(FoundBy::Read), 0, "no wrong bytes were seen");
    assert!(
        rig.volume
            .found()
            .trouble()
            .unwrap()
            .contains("0 records or descriptions of namespaces had wrong bytes and 1 could not")
    );
    let gone: Vec<Gone> = rig.gone.try_iter().collect();
    assert_eq!(gone, [Gone { chunks: vec![TestChunk(2).key()], why: Why::Damaged }]);
    assert!([0, 1, 3].into_iter().all(|number| rig.is_read(number)));
    assert_eq!(rig.write(2), WriteAnswer::Durable, "it can be written again");
    assert!(rig.is_read(2));
}

#[test]
fn what_is_good_in_a_segment_that_fails_moves_away_and_its_place_is_used_again() {
    let mut rig = Rig::new();
    let mut last = 0;
    // Writes until the first segment is sealed.
    while rig.volume.find(&TestChunk(last).key()).is_none_or(|place| place.segment == rig.place(0).segment) {
        last += 1;
        rig.write(last - 1);
        if rig.volume.find(&TestChunk(last).key()).is_none() && last > 1 && rig.place(last - 1).segment != 0 {
            break;
        }
    }
    let failing = rig.place(0).segment;
    let good: Vec<u64> = (0..last).filter(|&n| n != 1 && rig.place(n).segment == failing).collect();
    rig.lose(1);
    assert_eq!(rig.read(1), ReadAnswer::Damaged);
    rig.settle();
    assert!(good.len() > 1 && good.iter().all(|&number| rig.place(number).segment != failing));
    assert!(good.into_iter().all(|number| rig.is_read(number)));
    let evicted = rig.metrics.evicted.get();
    assert_eq!(evicted, 0, "nothing was lost but what could not be read");
    // The segment's turn comes again, and records that are written there can be read.
    for number in 100..200 {
        assert_eq!(rig.write(number), WriteAnswer::Durable);
        assert!(rig.is_read(number));
    }
    assert!(rig.platter.state().unreadable.is_empty(), "the drive replaced it when it was written");
}

#[test]
fn the_open_segment_that_fails_is_given_up_too() {
    let mut rig = Rig::new();
    (0..3).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    let failing = rig.place(0).segment;
    rig.lose(1);
    assert_eq!(rig.read(1), ReadAnswer::Damaged);
    rig.settle();
    assert!([0, 2].into_iter().all(|number| rig.place(number).segment != failing && rig.is_read(number)));
}

#[test]
fn the_scrubber_and_moves_find_what_cannot_be_read_before_anybody_needs_it() {
    let mut rig = Rig::new();
    (0..5).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    rig.lose(3);
    rig.lose(4);
    (0..4).for_each(|_| assert!(rig.volume.scrub().is_some()));
    assert_eq!(rig.metrics.read_errors.get(), 1);
    rig.settle();
    assert_eq!(rig.metrics.read_errors.get(), 2);
    assert!([3, 4].into_iter().all(|number| rig.read(number) == ReadAnswer::NotHeld));
    assert!((0..3).all(|number| rig.is_read(number)));
}

#[test]
fn a_drive_that_cannot_be_read_closes_the_tier_and_every_read_is_answered() {
    let mut rig = Rig::new();
    let mut written = 0;
    while rig.metrics.records.get() < 20 {
        rig.write(written);
        written += 1;
    }
    let held: Vec<u64> = (0..written).filter(|&n| rig.volume.find(&TestChunk(n).key()).is_some()).collect();
    let pages = GEOMETRY.file_bytes() / PAGE_BYTES;
    (0..pages).for_each(|page| rig.platter.lose_page(page * PAGE_BYTES));
    let (jobs, answers): (Vec<_>, Vec<_>) = (0..200)
        .map(|at| {
            let (done, answer) = oneshot::channel();
            let number = held[at % held.len()];
            (DiskJob::Read((rig.slots.read_order(TestChunk(number)), done)), answer)
        })
        .unzip();
    rig.volume.perform(jobs, &mut || None);
    let answers: Vec<_> = answers.into_iter().map(now).collect();
    assert!(answers.iter().all(|answer| !matches!(answer, ReadAnswer::Here { .. })));
    // Each record fails once; then come the pages of a start.
    assert_eq!(rig.metrics.read_errors.get(), held.len() as u64);
    let device = rig.platter.device();
    let opened = Volume::over(device, GEOMETRY, STORAGE, rig.metrics.clone(), gone().0);
    assert!(
        opened.is_ok_and(|volume| !volume.is_closed()),
        "six segments are too few to call a drive broken"
    );
}

#[test]
fn a_drive_that_fails_many_reads_logs_each_cause_once_and_counts_the_others() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = tracing_subscriber::fmt().with_writer(file.reopen().unwrap()).finish();
    let mut rig = Rig::new();
    (0..20).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    let held: Vec<u64> = (0..20).filter(|&n| rig.volume.find(&TestChunk(n).key()).is_some()).collect();
    held.iter().for_each(|&number| rig.lose(number));
    tracing::subscriber::with_default(log, || held.iter().for_each(|&number| _ = rig.read(number)));
    let lines = std::fs::read_to_string(file.path()).unwrap();
    assert!(held.len() > 5 && rig.metrics.read_errors.get() == held.len() as u64);
    assert_eq!(lines.lines().count(), 2, "one line of the piece, one of the segment: {lines}");
}

#[test]
fn a_start_finds_all_that_can_be_read() {
    let mut rig = Rig::new();
    (0..30).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    let held: Vec<u64> = (0..30).filter(|&n| rig.volume.find(&TestChunk(n).key()).is_some()).collect();
    let place = rig.place(held[0]);
    let newest = rig.place(29).segment;
    // Loses the footer of the oldest segment, and the header and last record of the newest.
    rig.platter.lose_page(GEOMETRY.offset(place.segment + 1, 0) - PAGE_BYTES);
    rig.platter.lose_page(GEOMETRY.offset(newest, 0));
    rig.lose(29);
    rig.reopen();
    let lost = held.iter().filter(|&&number| !rig.is_read(number)).count();
    assert_eq!((lost, rig.metrics.read_errors.get()), (1, 3));
    rig.settle();
    assert!(held.iter().filter(|&&number| number != 29).all(|&number| rig.is_read(number)));
    rig.reopen();
    assert_eq!(rig.metrics.read_errors.get(), 3, "what was searched is whole again");
}

#[test]
fn what_is_written_after_a_start_at_which_nothing_could_be_read_is_there_at_the_next() {
    let mut rig = Rig::new();
    (0..30).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    // A drive that is away for a moment.
    (0..GEOMETRY.segments).for_each(|segment| rig.platter.lose_page(GEOMETRY.offset(segment, 0)));
    let lost: Vec<u64> = (0..GEOMETRY.segments)
        .flat_map(|segment| (1..8).map(move |page| GEOMETRY.offset(segment, page)))
        .collect();
    lost.iter().for_each(|&page| rig.platter.lose_page(page));
    rig.reopen();
    rig.platter.state().unreadable.clear();
    assert_eq!(rig.write(100), WriteAnswer::Durable);
    rig.volume.settle();
    rig.reopen();
    assert!(rig.is_read(100), "no footer of an earlier use hides it");
}

#[test]
fn purged_chunks_of_free_segments_stay_away_though_a_page_is_lost_or_damaged() {
    for is_lost in [true, false] {
        let mut rig = Rig::new();
        let mut written = 0;
        while written == 0 || rig.volume.find(&TestChunk(0).key()).is_some() {
            assert_eq!(rig.write(written), WriteAnswer::Durable);
            written += 1;
        }
        rig.purge(0, PurgeMode::Remove);
        let is_purged = |number: u64| number.is_multiple_of(3);
        let kept: Vec<u64> = (0..written)
            .filter(|&number| !is_purged(number) && rig.volume.find(&TestChunk(number).key()).is_some())
            .collect();
        for segment in 0..GEOMETRY.segments {
            let head = GEOMETRY.offset(segment, 0);
            if is_lost { rig.platter.lose_page(head) } else { rig.platter.flip(head + 9, 3) }
        }
        rig.reopen();
        let back: Vec<u64> = (0..written)
            .filter(|&number| is_purged(number) && rig.volume.find(&TestChunk(number).key()).is_some())
            .collect();
        assert_eq!((back, kept.is_empty()), (Vec::new(), false));
        assert!(
            kept.into_iter().all(|number| rig.is_read(number)),
            "segments in use are not taken for empty"
        );
        for number in 100..200 {
            assert_eq!(rig.write(number), WriteAnswer::Durable);
            assert!(rig.is_read(number));
        }
    }
}

#[test]
fn a_segment_that_a_purge_wiped_keeps_what_is_written_there_though_its_header_is_lost() {
    let mut rig = Rig::new();
    (0..60).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    rig.purge(0, PurgeMode::Remove);
    // Long enough that each wiped segment is opened.
    for number in 100..160 {
        assert_eq!(rig.write(number), WriteAnswer::Durable);
        let segment = rig.place(number).segment;
        rig.platter.lose_page(GEOMETRY.offset(segment, 0));
        rig.reopen();
        assert!(rig.is_read(number));
        rig.settle();
    }
}

#[test]
fn a_purge_wipes_each_free_segment_once() {
    let mut rig = Rig::new();
    (0..60).for_each(|number| assert_eq!(rig.write(number), WriteAnswer::Durable));
    rig.purge(0, PurgeMode::Remove);
    let [counted, removed] = [PurgeMode::Count, PurgeMode::Remove].map(|mode| {
        let before = rig.platter.state().operations;
        rig.purge(0, mode);
        rig.platter.state().operations - before
    });
    assert_eq!(removed, counted + 1, "the last sync");
}
