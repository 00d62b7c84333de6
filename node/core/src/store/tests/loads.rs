//! Tests of copies by devices: nobody is given a slot that a device may touch before the device has let go of it, even if the
//! session that asked for the copy has ended.

use std::collections::BTreeMap;

use larder_protocol::handoff::HandOver;
use larder_protocol::session::Place;

use super::*;
use crate::store::ids::OrderId;
use crate::store::{Refused, Reserved};

fn save_of(reserved: &Reserved) -> HandOver {
    let (reservation, chunks) = (reserved.reservation, reserved.chunks.clone());
    HandOver { reservation, chunks, pool: 0, from_layer: 0, to_layer: 2, sources: Vec::new() }
}

#[test]
fn what_a_device_saved_is_seen_when_it_is_committed_and_needs_no_source() {
    let mut f = Fixture::new(limits(8, 100));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_save(f.session, &save_of(&reserved)).unwrap();
    assert!(order.moves.iter().all(|block| block.is_in_place && block.source.is_none()));
    let places: Vec<Place> = order.moves.iter().map(|block| block.place).collect();
    assert_eq!(places, reserved.places);
    assert!(f.store.finish_layers(order.order, Some(sums(&order))));
    assert_eq!(f.found("ab"), 0);
    let commit = f.store.begin_commit(f.session, reserved.reservation, &reserved.chunks, &[]).unwrap();
    assert_eq!(f.store.finish_commit(commit.order, Some(sums(&commit))), 2);
    assert_eq!(f.found("ab"), 2);
    f.store.assert_consistent();
}

#[test]
fn a_save_that_failed_cannot_be_committed() {
    let mut f = Fixture::new(limits(8, 100));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_save(f.session, &save_of(&reserved)).unwrap();
    assert!(!f.store.finish_layers(order.order, None));
    let refused = f.store.begin_commit(f.session, reserved.reservation, &reserved.chunks, &[]).unwrap_err();
    assert!(matches!(refused, Refused::Unknown { .. }), "{refused:?}");
    assert_eq!(f.store.usage().bytes.used, 0);
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_a_device_reads_outlives_its_lease_its_session_and_its_process() {
    let mut f = Fixture::new(limits(4, 100));
    f.put("abcd");
    let engine = f.join(0, 1);
    let chain = f.chain("abcd");
    let leased = f.store.lease(engine, f.namespace, &chain).unwrap();
    let load = f.store.begin_load(engine, leased.lease, (f.namespace, 0), 0..4).unwrap();
    let places: Vec<Place> = load.blocks.iter().map(|block| block.place).collect();
    assert_eq!(places, leased.places);
    f.store.release(engine, leased.lease).unwrap();
    f.store.close_session(engine);
    assert_eq!(f.store.usage().bytes.quarantined, 4 * BLOCK);
    f.store.process_gone(ProcessId(1));
    assert_eq!(f.store.usage().bytes.quarantined, 4 * BLOCK, "the device does not end with the process");
    let other = f.chain("wxyz");
    let busy = f.store.reserve(f.session, f.namespace, &other, 0, NOW);
    assert!(matches!(busy, Err(Refused::Busy { .. })), "{busy:?}");
    assert_eq!(f.lease("abcd").chunks, 4, "others read it still");
    f.store.end_load(load.load);
    assert_eq!(f.store.usage().bytes.quarantined, 0);
    f.store.assert_consistent();
}

#[test]
fn a_load_of_what_is_not_leased_is_refused() {
    let mut f = Fixture::new(limits(8, 100));
    f.put("abc");
    let lease = f.lease("ab").lease;
    let mut load =
        |lease, block, range| f.store.begin_load(f.session, lease, (f.namespace, block), range).unwrap_err();
    assert!(matches!(load(lease, 0, 0..3), Refused::NotLeased { .. }));
    assert!(matches!(load(lease, 1, 0..1), Refused::NotLeased { .. }));
    assert!(matches!(load(lease + 1, 0, 0..1), Refused::Unknown { .. }));
    let other = f.store.begin_load(f.session, lease, (f.namespace + 1, 0), 0..1);
    assert!(matches!(other, Err(Refused::NotLeased { .. })), "another namespace");
}

/// A copy that a device is making.
#[derive(Debug)]
enum Copy {
    Load(u64),
    Save(OrderId, usize),
}

#[test]
fn in_random_histories_no_slot_is_given_out_that_a_device_may_touch() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..200 {
        let mut world = World::new();
        for number in 0..120 {
            world.step(number, &mut random);
            world.f.store.assert_consistent();
        }
        world.end();
    }
}

/// A store, and the copies that devices are making, with the places that they may touch.
struct World {
    f: Fixture,
    engine: SessionId,
    process: u32,
    now: u64,
    reserved: Vec<Reserved>,
    touched: BTreeMap<u64, (Copy, Vec<Place>)>,
}

impl World {
    fn new() -> Self {
        let mut f = Fixture::new(limits(8, 6));
        let engine = f.join(0, 1);
        Self { f, engine, process: 1, now: 0, reserved: Vec::new(), touched: BTreeMap::new() }
    }

    fn step(&mut self, number: u64, random: &mut fastrand::Rng) {
        let word: String = (0..random.usize(1..4)).map(|_| random.char('a'..'d')).collect();
        let chain = self.f.chain(&word);
        match random.u32(0..9) {
            0 | 1 => self.reserve(&chain),
            2 | 3 => self.save(number),
            4 => self.load(number, &chain),
            5 | 6 => {
                let nth = random.usize(0..=self.touched.len());
                if let Some(&ended) = self.touched.keys().nth(nth) {
                    self.copy_ends(ended, random.bool());
                }
            }
            7 => self.commit(),
            _ => self.something_else(random),
        }
    }

    fn reserve(&mut self, chain: &Chain) {
        let now = Millis(self.now);
        let Ok(room) = self.f.store.reserve(self.engine, self.f.namespace, chain, 0, now) else { return };
        let is_touched = |place: &Place| self.touched.values().any(|(_, places)| places.contains(place));
        assert!(!room.places.iter().any(is_touched), "a place is given out that is touched");
        self.reserved.push(room);
    }

    fn save(&mut self, number: u64) {
        let Some(room) = self.reserved.pop() else { return };
        if let Ok(order) = self.f.store.begin_save(self.engine, &save_of(&room)) {
            let copy = Copy::Save(order.order, order.moves.len());
            self.touched.insert(number, (copy, room.places.clone()));
            self.reserved.push(room);
        }
    }

    fn load(&mut self, number: u64, chain: &Chain) {
        let (store, namespace) = (&mut self.f.store, self.f.namespace);
        let Ok(leased) = store.lease(self.engine, namespace, chain) else { return };
        if leased.chunks > 0 {
            let range = 0..leased.chunks as usize;
            let load = store.begin_load(self.engine, leased.lease, (namespace, 0), range).unwrap();
            let places = load.blocks.iter().map(|block| block.place).collect();
            self.touched.insert(number, (Copy::Load(load.load), places));
            store.release(self.engine, leased.lease).unwrap();
        }
    }

    fn copy_ends(&mut self, number: u64, is_well: bool) {
        match self.touched.remove(&number).unwrap().0 {
            Copy::Load(load) => self.f.store.end_load(load),
            Copy::Save(order, moves) => {
                let sums = is_well.then(|| vec![Checksums::default(); moves]);
                self.f.store.finish_layers(order, sums);
            }
        }
    }

    fn commit(&mut self) {
        let Some(room) = self.reserved.pop() else { return };
        let store = &mut self.f.store;
        if let Ok(order) = store.begin_commit(self.engine, room.reservation, &room.chunks, &[]) {
            store.finish_commit(order.order, Some(sums(&order)));
        }
    }

    /// Ends a session, lets time pass, or ends the wait for a copy.
    fn something_else(&mut self, random: &mut fastrand::Rng) {
        match random.u32(0..4) {
            0 => {
                self.f.store.close_session(self.engine);
                if random.bool() {
                    self.f.store.process_gone(ProcessId(self.process));
                }
                self.process += 1;
                self.engine = self.f.join(0, self.process);
                self.reserved.clear();
            }
            1 => {
                self.now += 600;
                self.f.store.tick(Millis(self.now));
            }
            _ => match self.touched.values().next().map(|(copy, _)| copy) {
                Some(&Copy::Load(load)) => self.f.store.quarantine_load(load),
                Some(&Copy::Save(order, _)) => self.f.store.quarantine_save(order),
                None => {}
            },
        }
    }

    fn end(mut self) {
        self.f.store.close_session(self.engine);
        let numbers: Vec<u64> = self.touched.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.copy_ends(number, false));
        (0..=self.process).for_each(|process| self.f.store.process_gone(ProcessId(process)));
        assert_eq!(self.f.store.usage().bytes.quarantined, 0, "in the end nothing is held");
        self.f.store.assert_consistent();
    }
}
