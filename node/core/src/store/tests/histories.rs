//! Random histories: after every step the store agrees with the model and keeps its invariants.

use proptest::prelude::*;

use super::model::{Model, prefixes};
use super::*;
use crate::store::ids::{NamespaceId, OrderId};

const WORDS: [&str; 12] =
    ["abcd", "abce", "abx", "aby", "ac", "acdefg", "bcd", "bce", "c", "cdefghi", "cdxyz", "dddddd"];
const SLOTS: usize = 12;
const PROCESSES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Lease { session: usize, word: usize },
    Release { which: usize },
    Reserve { session: usize, word: usize },
    Commit { which: usize, mask: u8 },
    Finish { which: usize, ok: bool },
    Abort { which: usize },
    Pin { word: usize, duration_ms: u64 },
    Unpin { which: usize },
    Close { session: usize },
    Gone { session: usize },
    Wait { ms: u64 },
    SwitchPolicy { to: PolicyName },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..PROCESSES;
    let word = 0..WORDS.len();
    let which = 0..8_usize;
    prop_oneof![
        6 => (session.clone(), word.clone()).prop_map(|(session, word)| Step::Lease { session, word }),
        5 => which.clone().prop_map(|which| Step::Release { which }),
        8 => (session.clone(), word.clone()).prop_map(|(session, word)| Step::Reserve { session, word }),
        8 => (which.clone(), any::<u8>()).prop_map(|(which, mask)| Step::Commit { which, mask }),
        8 => (which.clone(), prop::bool::weighted(0.9)).prop_map(|(which, ok)| Step::Finish { which, ok }),
        1 => which.clone().prop_map(|which| Step::Abort { which }),
        2 => (word, 1..500_u64).prop_map(|(word, duration_ms)| Step::Pin { word, duration_ms }),
        2 => which.prop_map(|which| Step::Unpin { which }),
        1 => session.clone().prop_map(|session| Step::Close { session }),
        1 => session.prop_map(|session| Step::Gone { session }),
        2 => (1..400_u64).prop_map(|ms| Step::Wait { ms }),
        1 => policy().prop_map(|to| Step::SwitchPolicy { to }),
    ]
}

fn policy() -> impl Strategy<Value = PolicyName> {
    prop::sample::select(PolicyName::ALL.to_vec())
}

/// A store, its model, and the claims that the test made, so that the model can follow.
struct World {
    f: Fixture,
    model: Model,
    trusted: bool,
    now: Millis,
    sessions: Vec<(SessionId, ProcessId)>,
    next_process: u32,
    leases: Vec<(SessionId, u64, Vec<String>)>,
    /// The reservations, each with its words that are still reserved, by position.
    reservations: Vec<Held>,
    orders: Vec<Order>,
    pins: Vec<(u64, Millis, Vec<String>)>,
    /// Leases of sessions that closed while their process lives.
    orphans: Vec<(ProcessId, Vec<String>)>,
    quarantined: Vec<(ProcessId, usize)>,
}

/// A reservation: its session, its number, its deadline, and its words that are not committed, by position.
type Held = (SessionId, u64, Millis, Vec<(u32, String)>);

struct Order {
    id: OrderId,
    session: SessionId,
    process: ProcessId,
    reservation: u64,
    words: Vec<String>,
    lapsed: bool,
}

impl World {
    fn new(trusted: bool, capacity: usize, policy: PolicyName) -> Self {
        // The model knows no part that is kept for another tenant.
        let tenant_bytes = vec![u64::MAX];
        let limits = StoreLimits {
            trust_engines: trusted,
            policy,
            tenant_bytes,
            ..limits(SLOTS as u32, capacity as u64)
        };
        let mut f = Fixture::new(limits);
        f.store.close_session(f.session);
        let mut world = Self {
            model: Model::new(SLOTS, capacity, policy),
            f,
            trusted,
            now: NOW,
            sessions: Vec::new(),
            next_process: 1,
            leases: Vec::new(),
            reservations: Vec::new(),
            orders: Vec::new(),
            pins: Vec::new(),
            orphans: Vec::new(),
            quarantined: Vec::new(),
        };
        (0..PROCESSES).for_each(|_| world.open());
        world
    }

    fn open(&mut self) {
        let process = ProcessId(self.next_process);
        self.next_process += 1;
        let session = self.f.join(0, process.0);
        self.sessions.push((session, process));
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Lease { session, word } => self.lease(session, WORDS[word]),
            Step::Release { which } if !self.leases.is_empty() => {
                let (session, lease, words) = self.leases.swap_remove(which % self.leases.len());
                self.f.store.release(session, lease).unwrap();
                self.tell();
                self.model.unclaim(&words);
            }
            Step::Reserve { session, word } => self.reserve(session, WORDS[word]),
            Step::Commit { which, mask } if !self.reservations.is_empty() => {
                self.commit(which % self.reservations.len(), mask);
            }
            Step::Finish { which, ok } if !self.orders.is_empty() => {
                self.finish(which % self.orders.len(), ok)
            }
            Step::Abort { which } if !self.reservations.is_empty() => {
                let (session, number, ..) = self.reservations[which % self.reservations.len()];
                self.f.store.abort(session, number).unwrap();
                self.tell();
                self.lapse(which % self.reservations.len());
            }
            Step::Pin { word, duration_ms } => {
                let chain = self.f.chain(WORDS[word]);
                let session = self.sessions[0].0;
                let pinned =
                    self.f.store.pin(session, self.f.namespace, &chain, duration_ms, self.now).unwrap();
                let words = self.model.prefix(WORDS[word]);
                assert_eq!(pinned.chunks as usize, words.len());
                if pinned.pin != 0 {
                    words.iter().for_each(|word| self.model.chunk(word).pins += 1);
                    self.pins.push((pinned.pin, self.now + duration_ms, words));
                }
            }
            Step::Unpin { which } if !self.pins.is_empty() => {
                let which = which % self.pins.len();
                self.f.store.unpin(self.sessions[0].0, self.pins[which].0).unwrap();
                self.tell();
                self.end_pin(which);
            }
            Step::Close { session } => self.close(session),
            Step::Gone { session } => {
                let process = self.sessions[session].1;
                self.close(session);
                self.gone(process);
            }
            Step::Wait { ms } => self.wait(ms),
            Step::SwitchPolicy { to } => self.switch(to),
            _ => {}
        }
    }

    fn switch(&mut self, to: PolicyName) {
        let before = self.order();
        if matches!(self.model.policy, PolicyName::Fifo | PolicyName::Lru) {
            assert_eq!(before, self.model.order());
        }
        self.f.store.set_policy(to);
        let mut after = self.order();
        self.model.switch(to, &after);
        after.sort_unstable();
        assert!(before.iter().all(|word| after.binary_search(word).is_ok()), "nothing is lost");
    }

    /// Cached words in the order of the store's policy.
    fn order(&self) -> Vec<String> {
        let word = |&number| {
            let hash = self.f.store.index.at(number).hash.0;
            String::from_utf8_lossy(&hash).trim_end_matches('\0').to_owned()
        };
        self.f.store.tenants.order(TenantId(0)).iter().map(word).collect()
    }

    /// Tells the model which words the store still has.
    fn tell(&mut self) {
        let number = NamespaceId::of(self.f.namespace);
        let is_here = |word: &String| self.f.store.index.find(number, &name(word)).is_some();
        self.model.present = WORDS.into_iter().flat_map(prefixes).filter(is_here).collect();
    }

    fn lease(&mut self, session: usize, word: &str) {
        let session = self.sessions[session].0;
        let chain = self.f.chain(word);
        let leased = self.f.store.lease(session, self.f.namespace, &chain).unwrap();
        let words = self.model.lease(word);
        assert_eq!(leased.chunks as usize, words.len());
        assert_eq!(leased.places.len(), words.len());
        if leased.lease != 0 {
            self.leases.push((session, leased.lease, words));
        }
    }

    fn reserve(&mut self, session: usize, word: &str) {
        let session = self.sessions[session].0;
        let chain = self.f.chain(word);
        let reserved = self.f.store.reserve(session, self.f.namespace, &chain, 0, self.now);
        self.tell();
        let wanted = self.model.reserve(word);
        assert_eq!(reserved.is_ok(), wanted.is_some(), "{reserved:?} {wanted:?}");
        let (Ok(reserved), Some(wanted)) = (reserved, wanted) else { return };
        let words: Vec<String> = prefixes(word);
        let named: Vec<(u32, String)> =
            reserved.chunks.iter().map(|&position| (position, words[position as usize].clone())).collect();
        assert!(named.iter().map(|(_, word)| word).eq(&wanted));
        if reserved.reservation != 0 {
            self.reservations.push((session, reserved.reservation, reserved.deadline, named));
        }
    }

    fn commit(&mut self, which: usize, mask: u8) {
        let (session, number, _, words) = &mut self.reservations[which];
        let (session, number) = (*session, *number);
        let (now, later): (Vec<_>, Vec<_>) =
            words.drain(..).partition(|(position, _)| mask >> position & 1 == 1);
        *words = later;
        let positions: Vec<u32> = now.iter().map(|(position, _)| *position).collect();
        let sources = vec![0; if self.trusted { 0 } else { positions.len() }];
        let order = self.f.store.begin_commit(session, number, &positions, &sources).unwrap();
        let process = self.sessions.iter().find(|open| open.0 == session).unwrap().1;
        self.orders.push(Order {
            id: order.order,
            session,
            process,
            reservation: number,
            words: now.into_iter().map(|(_, word)| word).collect(),
            lapsed: false,
        });
    }

    fn finish(&mut self, which: usize, ok: bool) {
        let order = self.orders.swap_remove(which);
        let checksums = ok.then(|| vec![Checksums::default(); order.words.len()]);
        let kept = self.f.store.finish_commit(order.id, checksums);
        self.tell();
        if ok && !order.lapsed {
            assert_eq!(kept as usize, order.words.len());
            self.model.keep(&order.words);
        } else {
            assert_eq!(kept, 0);
            self.discard(order.process, &order.words);
        }
        let of_same = |other: &&Order| other.reservation == order.reservation;
        let in_flight = self.orders.iter().filter(of_same).any(|other| !other.words.is_empty());
        if !in_flight {
            self.reservations.retain(|(session, number, _, words)| {
                (*session, *number) != (order.session, order.reservation) || !words.is_empty()
            });
        }
    }

    /// In the model, frees the slots of words that an engine can no longer commit, or quarantines them if the engine could still
    /// write to them.
    fn discard(&mut self, process: ProcessId, words: &[String]) {
        let is_alive = self.sessions.iter().any(|open| open.1 == process)
            || self.orphans.iter().any(|orphan| orphan.0 == process);
        if self.trusted && is_alive && !words.is_empty() {
            self.model.quarantined_slots += words.len();
            self.quarantined.push((process, words.len()));
        }
        self.model.discard(words);
    }

    fn lapse(&mut self, which: usize) {
        let (session, number, _, words) = self.reservations.swap_remove(which);
        let words: Vec<String> = words.into_iter().map(|(_, word)| word).collect();
        let process = self.sessions.iter().find(|open| open.0 == session).unwrap().1;
        self.orders
            .iter_mut()
            .filter(|order| order.reservation == number)
            .for_each(|order| order.lapsed = true);
        self.discard(process, &words);
    }

    fn end_pin(&mut self, which: usize) {
        let (_, _, words) = self.pins.swap_remove(which);
        words.iter().for_each(|word| self.model.chunk(word).pins -= 1);
        self.model.evict_above_capacity();
    }

    fn close(&mut self, session: usize) {
        let (session, process) = self.sessions[session];
        self.f.store.close_session(session);
        self.tell();
        let of_session = |world: &Self| {
            let held = world.reservations.iter().enumerate().filter(|(_, held)| held.0 == session);
            held.min_by_key(|(_, held)| held.1).map(|(which, _)| which)
        };
        while let Some(which) = of_session(self) {
            self.lapse(which);
        }
        // A marker: the process lives on, whether or not it left leases behind.
        self.orphans.push((process, Vec::new()));
        let (left, kept) = self.leases.drain(..).partition(|lease| lease.0 == session);
        self.leases = kept;
        let left: Vec<(SessionId, u64, Vec<String>)> = left;
        self.orphans.extend(left.into_iter().map(|(_, _, words)| (process, words)));
        self.model.evict_above_capacity();
        self.sessions.retain(|open| open.0 != session);
        self.open();
    }

    fn gone(&mut self, process: ProcessId) {
        self.f.store.process_gone(process);
        self.tell();
        let (left, kept) = self.orphans.drain(..).partition(|orphan| orphan.0 == process);
        self.orphans = kept;
        let left: Vec<(ProcessId, Vec<String>)> = left;
        for (_, words) in left {
            words.iter().for_each(|word| self.model.chunk(word).claims -= 1);
        }
        self.model.quarantined_slots -=
            self.quarantined.iter().filter(|held| held.0 == process).map(|held| held.1).sum::<usize>();
        self.quarantined.retain(|held| held.0 != process);
        self.model.evict_above_capacity();
    }

    fn wait(&mut self, ms: u64) {
        self.now = self.now + ms;
        self.f.store.tick(self.now);
        self.tell();
        let mut lapsed: Vec<u64> =
            self.reservations.iter().filter(|held| held.2 <= self.now).map(|held| held.1).collect();
        lapsed.sort_unstable();
        for number in lapsed {
            let which = self.reservations.iter().position(|held| held.1 == number).unwrap();
            self.lapse(which);
        }
        while let Some(which) = self.pins.iter().position(|pin| pin.1 <= self.now) {
            let (_, _, words) = self.pins.swap_remove(which);
            words.iter().for_each(|word| self.model.chunk(word).pins -= 1);
            if !self.pins.iter().any(|pin| pin.1 <= self.now) {
                self.model.evict_above_capacity();
            }
        }
    }

    fn check(&mut self) {
        self.f.store.assert_consistent();
        self.f.session = self.sessions[0].0;
        for word in WORDS {
            assert_eq!(self.f.found(word), self.model.prefix(word).len() as u64, "{word}");
        }
        let usage = self.f.store.usage();
        assert_eq!(usage.cached_chunks as usize, self.model.cached());
        assert_eq!(self.f.store.index.len(), self.model.chunks.len());
        let taken = (self.model.chunks.len() + self.model.quarantined_slots) as u64;
        assert_eq!(usage.bytes.used + usage.bytes.quarantined, taken * BLOCK);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn every_history_agrees_with_the_model(
        steps in prop::collection::vec(step(), 1..60),
        trusted in any::<bool>(),
        capacity in 3..=SLOTS,
        policy in policy(),
    ) {
        let mut world = World::new(trusted, capacity, policy);
        for step in &steps {
            world.run(step);
            world.check();
        }
    }
}
