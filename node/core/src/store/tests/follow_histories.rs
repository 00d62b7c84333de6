//! Random histories of hand-overs: whatever fails at any time, no reader sees a slot that was used again, and nothing leaks.

use std::collections::HashMap;

use proptest::prelude::*;

use larder_protocol::PoolSet;
use larder_protocol::handoff::HandOver;

use super::follows::{LAYERS, assert_nothing_is_held, join, layer_sums, layered, layers_of, shared_limits};
use super::*;
use crate::store::ChangeKind;
use crate::store::ids::OrderId;
use crate::store::{Came, FollowRequest, News, Reserved, Wanted};

const WORDS: [&str; 5] = ["abc", "abx", "ab", "x", "xy"];
const SLOTS: u32 = 9;

#[derive(Debug, Clone)]
enum Step {
    Reserve { session: usize, word: usize, attempt: u64, states: u8 },
    Layers { which: usize, layer: u32, pool: u8 },
    Finish { which: usize, is_right: bool },
    Commit { which: usize },
    Abort { which: usize },
    Follow { session: usize, word: usize, from_peer: bool, attempt: u64 },
    Show { which: usize },
    Release { which: usize },
    Peer { word: usize },
    PeerEnds { which: usize },
    Came { which: usize, layer: u64, block: usize },
    Fetched { which: usize, is_right: bool },
    Close { session: usize },
    Gone { session: usize },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let (session, word, which) = (0..3_usize, 0..WORDS.len(), 0..8_usize);
    let attempt = 0..3_u64;
    prop_oneof![
        6 => (session.clone(), word.clone(), attempt.clone(), 0..3_u8)
            .prop_map(|(session, word, attempt, states)| Step::Reserve { session, word, attempt, states }),
        10 => (which.clone(), 0..LAYERS, 0..2_u8).prop_map(|(which, layer, pool)| Step::Layers { which, layer, pool }),
        10 => (which.clone(), prop::bool::weighted(0.9)).prop_map(|(which, is_right)| Step::Finish { which, is_right }),
        4 => which.clone().prop_map(|which| Step::Commit { which }),
        1 => which.clone().prop_map(|which| Step::Abort { which }),
        8 => (session.clone(), word.clone(), any::<bool>(), attempt)
            .prop_map(|(session, word, from_peer, attempt)| Step::Follow { session, word, from_peer, attempt }),
        6 => which.clone().prop_map(|which| Step::Show { which }),
        3 => which.clone().prop_map(|which| Step::Release { which }),
        3 => word.prop_map(|word| Step::Peer { word }),
        2 => which.clone().prop_map(|which| Step::PeerEnds { which }),
        6 => (which.clone(), 0..u64::from(LAYERS), 0..2_usize)
            .prop_map(|(which, layer, block)| Step::Came { which, layer, block }),
        4 => (which, prop::bool::weighted(0.8)).prop_map(|(which, is_right)| Step::Fetched { which, is_right }),
        1 => session.clone().prop_map(|session| Step::Close { session }),
        1 => session.prop_map(|session| Step::Gone { session }),
        2 => (1..400_u64).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// A namespace with an attention pool of several layers and a state pool.
fn with_states() -> NamespaceSpec {
    let state = PoolSpec { name: "state".into(), layers: 1, layer_bytes: BLOCK, hit: HitPolicy::Last };
    let mut spec = layered();
    spec.pools.push(state);
    spec
}

struct World {
    f: Fixture,
    spec: NamespaceSpec,
    now: Millis,
    sessions: Vec<(SessionId, ProcessId)>,
    closed: Vec<ProcessId>,
    next_process: u32,
    reservations: Vec<(SessionId, Reserved)>,
    orders: Vec<(OrderId, Vec<Checksums>, bool)>,
    follows: Vec<(SessionId, u64)>,
    peers: Vec<u64>,
    fetches: Vec<Wanted>,
    /// Places that were shown to a reader and may still be read, by follow. The keys of ended sessions count down from
    /// `u64::MAX`.
    shown: HashMap<u64, Vec<super::super::Place>>,
}

impl World {
    fn new(trusted: bool, spec: NamespaceSpec) -> Self {
        let limits = StoreLimits { trust_engines: trusted, ..shared_limits(SLOTS) };
        let mut f = Fixture::with_spec(limits, &spec);
        f.store.close_session(f.session);
        f.store.process_gone(ProcessId(0));
        let mut world = Self {
            f,
            spec,
            now: NOW,
            sessions: Vec::new(),
            closed: Vec::new(),
            next_process: 1,
            reservations: Vec::new(),
            orders: Vec::new(),
            follows: Vec::new(),
            peers: Vec::new(),
            fetches: Vec::new(),
            shown: HashMap::new(),
        };
        (0..3).for_each(|_| world.open());
        world
    }

    fn open(&mut self) {
        let process = ProcessId(self.next_process);
        self.next_process += 1;
        let session = join(&mut self.f, process.0, &self.spec);
        self.sessions.push((session, process));
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Reserve { session, word, attempt, states } => {
                self.reserve(session, WORDS[word], attempt, states);
            }
            Step::Layers { which, layer, pool } => self.layers(which, layer, pool),
            Step::Finish { which, is_right } if !self.orders.is_empty() => self.finish(which, is_right),
            Step::Commit { which } => self.commit(which),
            Step::Abort { which } if !self.reservations.is_empty() => {
                let (session, of) = &self.reservations[which % self.reservations.len()];
                _ = self.f.store.abort(*session, of.reservation);
            }
            Step::Follow { session, word, from_peer, attempt } => {
                self.follow(session, word, from_peer, attempt)
            }
            Step::Show { which } if !self.follows.is_empty() => {
                let (session, follow) = self.follows[which % self.follows.len()];
                if let Ok(Some(leased)) = self.f.store.show_followed(session, follow) {
                    self.shown.insert(follow, leased.places);
                }
            }
            Step::Release { which } if !self.follows.is_empty() => {
                let (session, follow) = self.follows.swap_remove(which % self.follows.len());
                self.f.store.release(session, follow).unwrap();
                self.shown.remove(&follow);
            }
            Step::Peer { word } => {
                let fingerprint = self.f.store.fingerprint(self.f.namespace).unwrap();
                let hashes = self.f.chain(WORDS[word]).hashes;
                let last = PoolSet::first(self.spec.pools.len());
                let pools = (1..=hashes.len()).map(|at| if at == hashes.len() { last } else { PoolSet(1) });
                let (pools, now): (Vec<PoolSet>, Millis) = (pools.collect(), self.now);
                self.peers.extend(self.f.store.follow_for_peer(&fingerprint, (&hashes, &pools), 0, 300, now));
            }
            Step::PeerEnds { which } if !self.peers.is_empty() => {
                let follow = self.peers.swap_remove(which % self.peers.len());
                self.f.store.end_grant(follow);
            }
            Step::Came { which, layer, block } if !self.fetches.is_empty() => {
                let wanted = &self.fetches[which % self.fetches.len()];
                let bytes = BLOCK / u64::from(LAYERS);
                self.f.store.layers_came(wanted.fetch, wanted.number, block, layer * bytes, bytes, 1);
            }
            Step::Fetched { which, is_right } if !self.fetches.is_empty() => {
                let wanted = self.fetches.swap_remove(which % self.fetches.len());
                let came = Came {
                    checksums: vec![Checksums::default(); wanted.blocks.len()],
                    pools: wanted.pools(),
                    reads: 1,
                    is_on_disk_elsewhere: false,
                    is_stored: false,
                    is_copy: false,
                };
                let came = is_right.then_some(came);
                self.f.store.fetched(wanted.fetch, came, Some(ChangeKind::Gained));
            }
            Step::Close { session } => self.close(session),
            Step::Gone { session } => {
                let process = self.sessions[session].1;
                self.close(session);
                self.gone(process);
            }
            Step::Wait { ms } => {
                self.now = self.now + ms;
                self.f.store.tick(self.now);
            }
            _ => {}
        }
    }

    fn reserve(&mut self, session: usize, word: &str, attempt: u64, states: u8) {
        let (session, chain) = (self.sessions[session].0, self.f.chain(word));
        // Writes all pools of all chunks (`states` 0), or attention and only the last chunk's state (1), or attention alone.
        let pools = (1..=chain.len()).map(|at| PoolSet(if states == 1 && at == chain.len() { 3 } else { 1 }));
        let pools: Vec<PoolSet> =
            if states == 0 || self.spec.pools.len() == 1 { Vec::new() } else { pools.collect() };
        let reserved =
            self.f.store.reserve_attempt(session, self.f.namespace, &chain, &pools, 0, attempt, self.now);
        if let Ok(reserved) = reserved
            && reserved.reservation != 0
        {
            let shown = self.shown.values().flatten();
            assert!(
                shown.into_iter().all(|place| !reserved.places.contains(place)),
                "a shown slot is used again"
            );
            self.reservations.push((session, reserved));
        }
    }

    fn layers(&mut self, which: usize, layer: u32, pool: u8) {
        if self.reservations.is_empty() {
            return;
        }
        let (session, of) = &self.reservations[which % self.reservations.len()];
        let writes_pool =
            |&(at, _): &(usize, &u32)| of.pools.get(at).is_none_or(|pools| pools.has(pool.into()));
        let of_pool = of.chunks.iter().enumerate().filter(writes_pool).map(|(_, &chunk)| chunk).collect();
        let of = Reserved { chunks: of_pool, ..of.clone() };
        let mut ask = HandOver { pool, ..layers_of(&of, layer, layer + 1) };
        if self.f.store.trusts_engines() {
            ask.sources.clear();
        }
        if let Ok(order) = self.f.store.begin_layers(*session, &ask) {
            let sums = layer_sums(&order);
            self.orders.push((order.order, sums, true));
        }
    }

    fn commit(&mut self, which: usize) {
        if self.reservations.is_empty() {
            return;
        }
        let (session, of) = &self.reservations[which % self.reservations.len()];
        for sources in [vec![], vec![0; of.places.len()]] {
            if let Ok(order) = self.f.store.begin_commit(*session, of.reservation, &of.chunks, &sources) {
                let sums = sums(&order);
                self.orders.push((order.order, sums, false));
                return;
            }
        }
    }

    fn finish(&mut self, which: usize, is_right: bool) {
        let (order, sums, is_layers) = self.orders.swap_remove(which % self.orders.len());
        let sums = is_right.then_some(sums);
        if is_layers {
            self.f.store.finish_layers(order, sums);
        } else {
            self.f.store.finish_commit(order, sums);
        }
    }

    fn follow(&mut self, session: usize, word: usize, from_peer: bool, attempt: u64) {
        let (session, chain) = (self.sessions[session].0, self.f.chain(WORDS[word]));
        let ask = FollowRequest {
            namespace: self.f.namespace,
            chain: &chain,
            writer: from_peer.then_some(&ELSEWHERE),
            attempt,
            patience_ms: 300,
        };
        let fetches = self.f.store.usage().fetches;
        match self.f.store.follow(session, ask, self.now) {
            Ok(started) => {
                self.follows.push((session, started.follow));
                self.fetches.extend(started.wanted);
            }
            Err(_) => assert_eq!(self.f.store.usage().fetches, fetches, "all or nothing"),
        }
    }

    fn close(&mut self, which: usize) {
        let (session, process) = self.sessions.remove(which);
        self.f.store.close_session(session);
        self.closed.push(process);
        // A process may read the places that it was shown until it is gone. They move to keys of this process, one for each
        // follow.
        self.follows.retain(|&(of, follow)| {
            let stays = of != session;
            if !stays && let Some(places) = self.shown.remove(&follow) {
                self.shown.insert(u64::MAX - u64::from(process.0) * 1_000 - follow, places);
            }
            stays
        });
        self.open();
    }

    fn gone(&mut self, process: ProcessId) {
        self.f.store.process_gone(process);
        self.closed.retain(|&other| other != process);
        let own = u64::MAX - u64::from(process.0) * 1_000;
        self.shown.retain(|&key, _| key > own || own - key >= 1_000);
    }

    fn check(&mut self) {
        self.f.store.assert_consistent();
        for told in self.f.store.take_told() {
            assert!(self.peers.contains(&told.follow) || matches!(told.what, News::Lost));
        }
        self.f.store.take_progressed();
        self.f.store.take_abandoned();
    }

    /// Ends everything that is under way, and checks that nothing is left.
    fn end(mut self) {
        for (order, sums, is_layers) in self.orders.drain(..) {
            if is_layers {
                self.f.store.finish_layers(order, Some(sums));
            } else {
                self.f.store.finish_commit(order, Some(sums));
            }
        }
        self.fetches.drain(..).for_each(|wanted| drop(self.f.store.fetched(wanted.fetch, None, None)));
        self.peers.drain(..).for_each(|follow| self.f.store.end_grant(follow));
        while let Some(&(session, process)) = self.sessions.first() {
            self.f.store.close_session(session);
            self.f.store.process_gone(process);
            self.sessions.remove(0);
        }
        self.closed.drain(..).for_each(|process| self.f.store.process_gone(process));
        assert_nothing_is_held(&self.f.store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_leaks_whatever_fails_when(
        steps in prop::collection::vec(step(), 1..80),
        trusted in any::<bool>(),
        has_states in any::<bool>(),
    ) {
        let mut world = World::new(trusted, if has_states { with_states() } else { layered() });
        for step in &steps {
            world.run(step);
            world.check();
        }
        world.end();
    }
}
