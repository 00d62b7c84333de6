//! Tests of the log: random histories against a plain model.

use std::collections::{BTreeMap, BTreeSet};

use larder_protocol::ChunkHash;
use proptest::prelude::*;

use super::*;

const GEOMETRY: Geometry = Geometry { segments: 5, segment_pages: 20 };

fn key(number: u64) -> ChunkKey {
    let mut hash = [0; 32];
    hash[24..].copy_from_slice(&number.to_le_bytes());
    ChunkKey { fingerprint: Fingerprint([(number % 4) as u8; 32]), hash: ChunkHash(hash) }
}

fn entry(number: u64, page: u32, pages: u32, sequence: u64) -> FooterEntry {
    let ChunkKey { fingerprint, hash } = key(number);
    let chunk = ChunkRef { hash, parent: hash, index: 0, anchor: hash };
    FooterEntry { fingerprint, chunk, page, pages, pools: PoolSet::first(1), sequence }
}

/// A log, the contents that its disk would have, and the records that it must know.
struct Modelled {
    log: Log,
    /// The tenant of a namespace, if tenants share the log.
    owner: fn(&Fingerprint) -> Option<u8>,
    /// For each segment: its header, its footer if it is sealed, and all records that were synced there.
    disk: BTreeMap<u32, (SegmentHeader, Option<Footer>, Vec<FooterEntry>)>,
    held: BTreeMap<ChunkKey, RecordPlace>,
    hot: BTreeSet<ChunkKey>,
}

impl Modelled {
    fn new() -> Self {
        let (disk, held, hot) = Default::default();
        Self { log: Log::new(GEOMETRY), owner: |_| None, disk, held, hot }
    }

    fn room(&mut self, pages: u32, purpose: RoomPurpose) -> bool {
        for _ in 0..1_000 {
            match self.log.room_for(pages.into(), purpose) {
                LogRoom::Here => return true,
                LogRoom::None => return false,
                LogRoom::Seal => {
                    let footer = self.log.footer();
                    let segment = self.disk.get_mut(&footer.segment.segment).unwrap();
                    assert_eq!(footer.entries, segment.2);
                    assert!(
                        footer.end_page + Footer::pages_for(footer.entries.len()) <= GEOMETRY.segment_pages
                    );
                    segment.1 = Some(footer);
                    self.log.sealed();
                }
                LogRoom::Open(header) => {
                    assert!(self.held.values().all(|place| place.segment != header.segment), "it is free");
                    self.disk.insert(header.segment, (header, None, Vec::new()));
                    self.log.opened(header);
                }
                LogRoom::Evict => self.evict(),
            }
        }
        panic!("there is no end of making room");
    }

    fn evict(&mut self) {
        match self.log.evict_next(self.owner) {
            Evict::Move(key, place) => {
                assert_eq!(self.held.get(&key), Some(&place));
                let is_owned = (self.owner)(&key.fingerprint).is_some();
                assert!(is_owned || self.hot.contains(&key), "only what was used is moved");
                if self.room(place.pages, RoomPurpose::Move) {
                    self.put_for(&key, place.pages, RoomPurpose::Move);
                }
            }
            Evict::Finish => {
                for key in self.log.evicted() {
                    assert!(self.held.remove(&key).is_some());
                    self.hot.remove(&key);
                }
            }
            Evict::Nothing => {}
        }
    }

    fn put(&mut self, key: &ChunkKey, pages: u32) {
        self.put_for(key, pages, RoomPurpose::Write);
    }

    fn put_for(&mut self, key: &ChunkKey, pages: u32, purpose: RoomPurpose) {
        let Placed { segment, page, sequence } = self.log.place(pages.into(), purpose);
        let place = RecordPlace { segment: segment.segment, page, pages };
        let overlaps = |other: &&RecordPlace| {
            other.segment == place.segment && other.page < page + pages && page < other.page + other.pages
        };
        assert_eq!(self.held.values().find(overlaps), None);
        let number = u64::from_le_bytes(key.hash.0[24..].try_into().unwrap());
        let entry = entry(number, page, pages, sequence);
        self.disk.get_mut(&segment.segment).unwrap().2.push(entry);
        self.log.commit(entry);
        self.held.insert(*key, place);
        self.hot.remove(key);
    }

    /// Restores the log from the disk, and the model with it: forgotten records come back.
    fn restart(&mut self) {
        let open = self.log.open.as_ref().map(|open| (open.segment.segment, open.page));
        let found = self.disk.values().map(|(segment, footer, records)| {
            let open_at = open.filter(|(open, _)| *open == segment.segment).map(|(_, page)| page);
            let entries = footer.as_ref().map_or_else(|| records.clone(), |footer| footer.entries.clone());
            Recovered { segment: *segment, entries, open_at }
        });
        let mut found: Vec<Recovered> = found.collect();
        self.log = Log::restore(GEOMETRY, found.clone());
        found.sort_by_key(|found| found.segment.sequence);
        self.held.clear();
        self.hot.clear();
        for Recovered { segment, entries, .. } in found {
            for entry in entries {
                let place = RecordPlace { segment: segment.segment, page: entry.page, pages: entry.pages };
                self.held.insert(entry.key(), place);
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.log.records(), self.held.len());
        for (key, place) in &self.held {
            assert_eq!(self.log.find(key), Some(*place));
        }
        let SegmentCounts { free, open, sealed } = self.log.counts();
        assert_eq!(free + open + sealed, GEOMETRY.segments as usize);
        let held: u64 = self.held.values().map(|place| u64::from(place.pages) * PAGE_BYTES).sum();
        assert!((held..GEOMETRY.file_bytes()).contains(&self.log.used_bytes()), "{held} bytes are held");
    }
}

#[test]
fn an_id_that_is_listed_twice_in_a_segment_moves_once() {
    let mut modelled = Modelled::new();
    let again = |modelled: &mut Modelled, number| {
        assert!(modelled.room(2, RoomPurpose::Write));
        modelled.held.remove(&key(number));
        modelled.put(&key(number), 2);
    };
    // Chunk 1 is replaced; chunk 3 gets the id of chunk 2.
    (0..2).for_each(|_| again(&mut modelled, 1));
    again(&mut modelled, 2);
    modelled.log.forget(&key(2));
    again(&mut modelled, 3);
    [1, 3].into_iter().for_each(|number| modelled.log.touch(&key(number)));
    let first = modelled.log.find(&key(1)).unwrap().segment;
    let mut others = 10..;
    while modelled.log.find(&key(1)).is_some_and(|place| place.segment == first)
        && !modelled.log.wants_eviction()
    {
        again(&mut modelled, others.next().unwrap());
    }
    let mut moved = Vec::new();
    while let Evict::Move(key, _) = modelled.log.evict_next(|_| None::<u8>) {
        moved.push(key);
    }
    assert_eq!(moved, [key(1), key(3)]);
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u32),
    Touch(u64),
    Forget(u64),
    Evict,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..40_u64, prop_oneof![3 => 1..9_u32, 1 => 9..17_u32]).prop_map(|(number, pages)| Step::Write(number, pages)),
        6 => (0..40_u64).prop_map(Step::Touch),
        1 => (0..40_u64).prop_map(Step::Forget),
        2 => Just(Step::Evict),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn the_log_says_what_a_plain_model_says(steps in prop::collection::vec(step(), 1..200), tenants in 0..3_u8) {
        let mut modelled = Modelled::new();
        modelled.owner = match tenants {
            0 => |_| None,
            1 => |name| Some(name.0[0] % 2),
            _ => |name| Some(name.0[0]),
        };
        for step in steps {
            match step {
                Step::Write(number, pages) => {
                    let key = key(number);
                    if modelled.log.find(&key).is_none() {
                        prop_assert!(modelled.room(pages, RoomPurpose::Write), "there is always room to be made");
                        modelled.put(&key, pages);
                    }
                }
                Step::Touch(number) => {
                    modelled.log.touch(&key(number));
                    if modelled.held.contains_key(&key(number)) {
                        modelled.hot.insert(key(number));
                    }
                }
                Step::Forget(number) => {
                    let was_held = modelled.held.remove(&key(number)).is_some();
                    prop_assert_eq!(modelled.log.forget(&key(number)), was_held);
                    modelled.hot.remove(&key(number));
                }
                Step::Evict if modelled.log.wants_eviction() => modelled.evict(),
                Step::Evict => {}
                Step::Restart => modelled.restart(),
            }
            modelled.check();
        }
    }
}

#[test]
fn segments_go_in_the_order_of_their_age() {
    let mut modelled = Modelled::new();
    for number in 0..100 {
        assert!(modelled.room(4, RoomPurpose::Write));
        modelled.put(&key(number), 4);
    }
    let oldest = (0..100).find(|&number| modelled.held.contains_key(&key(number))).unwrap();
    assert!((oldest..100).all(|number| modelled.held.contains_key(&key(number))));
    assert!(oldest >= 80 && modelled.log.counts().free >= 1);
}

/// A log of 40 segments whose chunks belong to the tenants `name(number)`. Each record has 4 pages.
struct Shared {
    log: Log,
    name: fn(u64) -> &'static str,
    moved: u64,
}

impl Shared {
    fn new(name: fn(u64) -> &'static str) -> Self {
        Self { log: Log::new(Geometry { segments: 40, segment_pages: 35 }), name, moved: 0 }
    }

    fn key(&self, number: u64) -> ChunkKey {
        let mut fingerprint = [0; 32];
        fingerprint[..1].copy_from_slice(&(self.name)(number).as_bytes()[..1]);
        ChunkKey { fingerprint: Fingerprint(fingerprint), ..key(number) }
    }

    fn put(&mut self, key: &ChunkKey, purpose: RoomPurpose) {
        loop {
            match self.log.room_for(4, purpose) {
                LogRoom::Here => break,
                LogRoom::None => panic!("each move has room"),
                LogRoom::Seal => self.log.sealed(),
                LogRoom::Open(header) => self.log.opened(header),
                LogRoom::Evict => self.evict(),
            }
        }
        let Placed { page, sequence, .. } = self.log.place(4, purpose);
        let chunk = ChunkRef { hash: key.hash, parent: key.hash, index: 0, anchor: key.hash };
        let (fingerprint, pools) = (key.fingerprint, PoolSet::first(1));
        self.log.commit(FooterEntry { fingerprint, chunk, page, pages: 4, pools, sequence });
    }

    fn evict(&mut self) {
        let owner = |namespace: &Fingerprint| (namespace.0[0] != b'?').then_some(namespace.0[0]);
        match self.log.evict_next(owner) {
            Evict::Move(key, _) => {
                self.moved += 1;
                self.put(&key, RoomPurpose::Move);
            }
            Evict::Finish => drop(self.log.evicted()),
            Evict::Nothing => {}
        }
    }

    fn write(&mut self, numbers: std::ops::Range<u64>) {
        for number in numbers {
            self.put(&self.key(number), RoomPurpose::Write);
        }
    }

    fn held(&self, mut numbers: std::ops::Range<u64>) -> usize {
        numbers.by_ref().filter(|&number| self.log.find(&self.key(number)).is_some()).count()
    }
}

#[test]
fn a_tenant_that_writes_much_does_not_push_out_one_that_has_less_than_its_part() {
    // Eight records a segment, some 300 in all. The quiet tenant writes 100 at once, and never reads them.
    let mut shared = Shared::new(|number| if number < 100 { "quiet" } else { "busy" });
    shared.write(0..100);
    shared.write(1_000..11_000);
    assert_eq!(shared.held(0..100), 100);
    assert!(shared.held(1_000..11_000) > 150, "the busy tenant has the rest");
    assert!(shared.moved < 500, "{} moves for 10,000 writes", shared.moved);
}

#[test]
fn a_quiet_tenants_records_between_those_of_a_busy_one_stay_too() {
    let mut shared = Shared::new(|number| if number % 10 < 3 && number < 400 { "quiet" } else { "busy" });
    shared.write(0..400);
    let quiet = |shared: &Shared| (0..400).filter(|n| n % 10 < 3 && shared.held(*n..n + 1) == 1).count();
    let before = quiet(&shared);
    shared.write(1_000..11_000);
    assert!(before > 80 && quiet(&shared) == before, "{} of {before} stay", quiet(&shared));
    // A third of each segment is the quiet tenant's, so half as much moves as is written.
    assert!(shared.moved < 6_000, "{} moves for 10,000 writes", shared.moved);
}

#[test]
fn tenants_that_all_write_much_have_equal_parts() {
    // A writes four times as much as B, and B is first.
    let mut shared = Shared::new(|number| if number % 5 == 0 { "b" } else { "a" });
    shared.write(0..20_000);
    let b = (0..4_000).filter(|n| shared.held(n * 5..n * 5 + 1) == 1).count();
    let all = shared.held(0..20_000);
    assert!((0.4..0.6).contains(&(b as f64 / all as f64)), "{b} of {all}");
    assert!(shared.moved < 20_000, "{} moves for 20,000 writes", shared.moved);
}

#[test]
fn of_several_tenants_that_write_alike_none_keeps_old_records_for_new_ones() {
    for name in [|n| ["a", "b", "c"][n as usize % 3], |n| ["a", "b", "c", "d", "e"][n as usize * 7 % 5]] {
        let mut shared = Shared::new(name);
        shared.write(0..10_000);
        // Some 300 records fit. The last 200 are there, and few were copied.
        assert!(shared.held(9_800..10_000) > 190, "{} of 200", shared.held(9_800..10_000));
        assert!(shared.moved < 2_000, "{} moves for 10,000 writes", shared.moved);
    }
}

#[test]
fn records_of_nobody_and_of_a_single_tenant_go_by_age() {
    let mut shared = Shared::new(|number| if number < 100 { "?" } else { "busy" });
    shared.write(0..100);
    shared.write(1_000..2_000);
    assert_eq!((shared.held(0..100), shared.moved), (0, 0));
}

#[test]
fn the_last_sequence_number_is_marked_where_no_segment_in_use_has_it() {
    let mut log = Log::restore(GEOMETRY, Vec::new());
    assert_eq!(log.mark_sequence(), None, "none was given");
    log.skip_sequences(Duration::ZERO);
    let mark = log.mark_sequence().unwrap();
    let LogRoom::Open(header) = log.room_for(1, RoomPurpose::Write) else { panic!("a segment is free") };
    assert!(header.sequence > mark.sequence && header.segment == mark.segment);
    log.opened(header);
    assert_eq!(log.mark_sequence(), None, "the open segment's header has it");
}

#[test]
fn a_record_that_fits_nowhere_has_no_room() {
    let log = Log::new(GEOMETRY);
    assert_eq!(log.room_for(GEOMETRY.most_pages() + 1, RoomPurpose::Write), LogRoom::None);
    assert_eq!(log.room_for(u64::MAX, RoomPurpose::Write), LogRoom::None);
    assert!(matches!(log.room_for(GEOMETRY.most_pages(), RoomPurpose::Write), LogRoom::Open(_)));
}

#[test]
fn a_million_records_take_sixty_four_bytes_each() {
    let geometry = Geometry { segments: 8_000, segment_pages: 256 };
    let found = (0..7_900_u32).map(|segment| {
        let first = u64::from(segment) * 127;
        let entries = (0..127).map(|at| entry(first + u64::from(at), 1 + at, 1, first + u64::from(at)));
        let segment = SegmentHeader { segment, sequence: u64::from(segment) + 1 };
        Recovered { segment, entries: entries.collect(), open_at: None }
    });
    let log = Log::restore(geometry, found.collect());
    let each = log.memory_bytes() as f64 / log.records() as f64;
    println!("{} records, {each:.1} bytes each", log.records());
    assert!(log.records() > 1_000_000 && each < 70.0);
}
