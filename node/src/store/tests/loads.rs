//! Copies by devices: what they touch is given to nobody before the device let go of it, whatever becomes of who asked.

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
    assert_eq!(load.places, leased.places);
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

/// What devices are at, as somebody would know who sees into them.
#[derive(Debug, Clone)]
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
        history(&mut random);
    }
}

fn history(random: &mut fastrand::Rng) {
    let mut f = Fixture::new(limits(8, 6));
    let mut engine = f.join(0, 1);
    let mut process = 1;
    let mut now = 0;
    let mut reserved: Vec<Reserved> = Vec::new();
    let mut touched: BTreeMap<u64, (Copy, Vec<Place>)> = BTreeMap::new();
    for number in 0..120 {
        let word: String = (0..random.usize(1..4)).map(|_| random.char('a'..'d')).collect();
        let chain = f.chain(&word);
        match random.u32(0..9) {
            0 | 1 => {
                if let Ok(room) = f.store.reserve(engine, f.namespace, &chain, 0, Millis(now)) {
                    let is_touched = |place: &Place| touched.values().any(|(_, places)| places.contains(place));
                    assert!(!room.places.iter().any(is_touched), "a place is given out that is touched");
                    reserved.push(room);
                }
            }
            2 | 3 => {
                let Some(room) = reserved.pop() else { continue };
                if let Ok(order) = f.store.begin_save(engine, &save_of(&room)) {
                    let copy = Copy::Save(order.order, order.moves.len());
                    touched.insert(number, (copy, room.places.clone()));
                    reserved.push(room);
                }
            }
            4 => {
                let Ok(leased) = f.store.lease(engine, f.namespace, &chain) else { continue };
                let range = 0..leased.chunks as usize;
                if leased.chunks > 0 {
                    let load = f.store.begin_load(engine, leased.lease, (f.namespace, 0), range).unwrap();
                    touched.insert(number, (Copy::Load(load.load), load.places));
                    f.store.release(engine, leased.lease).unwrap();
                }
            }
            5 | 6 => {
                let Some(&ended) = touched.keys().nth(random.usize(0..=touched.len())) else { continue };
                match touched.remove(&ended).unwrap().0 {
                    Copy::Load(load) => f.store.end_load(load),
                    Copy::Save(order, moves) => {
                        let sums = random.bool().then(|| vec![Checksums::default(); moves]);
                        f.store.finish_layers(order, sums);
                    }
                }
            }
            7 => {
                let Some(room) = reserved.pop() else { continue };
                if let Ok(order) = f.store.begin_commit(engine, room.reservation, &room.chunks, &[]) {
                    f.store.finish_commit(order.order, Some(sums(&order)));
                }
            }
            _ => match random.u32(0..4) {
                0 => {
                    f.store.close_session(engine);
                    if random.bool() {
                        f.store.process_gone(ProcessId(process));
                    }
                    process += 1;
                    engine = f.join(0, process);
                    reserved.clear();
                }
                1 => {
                    now += 600;
                    f.store.tick(Millis(now));
                }
                _ => match touched.values().next().map(|(copy, _)| copy.clone()) {
                    Some(Copy::Load(load)) => f.store.quarantine_load(load),
                    Some(Copy::Save(order, _)) => f.store.quarantine_save(order),
                    None => {}
                },
            },
        }
        f.store.assert_consistent();
    }
    f.store.close_session(engine);
    for (copy, _) in touched.into_values() {
        match copy {
            Copy::Load(load) => f.store.end_load(load),
            Copy::Save(order, _) => _ = f.store.finish_layers(order, None),
        }
    }
    (0..=process).for_each(|process| f.store.process_gone(ProcessId(process)));
    assert_eq!(f.store.usage().bytes.quarantined, 0, "in the end nothing is held");
    f.store.assert_consistent();
}
