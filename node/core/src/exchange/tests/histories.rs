//! Random histories of a node and its peers. The peers work, hang, stop, and come back in other lives.
//!
//! Whatever happens, no peer is asked for more than its bound, no fetch waits in vain, and a peer that answers is heard again.

use super::*;
use crate::store::ids::TenantId;

#[test]
fn nobody_is_asked_for_too_much_nor_waits_in_vain_nor_is_silent_for_ever() {
    let first: u64 = std::env::var("LARDER_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + HISTORIES {
        // The output is shown if the history fails.
        println!("LARDER_SEED={seed}");
        World::new(seed).live();
    }
}

struct World {
    random: fastrand::Rng,
    node: Node,
    outgoing: Outgoing,
    /// Every other node, and its life; a life of 0 is no member.
    peers: BTreeMap<u16, (u64, Does)>,
    /// Peers that failed at some time in this life. A peer that always worked has no reason to be silent.
    ever_failed: BTreeSet<PeerId>,
    silent: BTreeSet<PeerId>,
    requests: BTreeMap<RequestId, Model>,
    probes: Vec<(PeerId, u64, Duration)>,
    /// Bytes that are being sent, each with their peer.
    sends: Vec<(String, u64)>,
    turns: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Does {
    Works,
    /// The peer is heard, but sends no blocks.
    Hangs,
    /// The peer sends nothing at all.
    Stops,
}

#[derive(Debug)]
struct Model {
    peer: PeerId,
    bytes: u64,
    stage: Stage,
}

#[derive(Debug, PartialEq)]
enum Stage {
    Waits,
    Asked { until: Duration },
    Follows,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: fastrand::Rng::with_seed(seed),
            node: Node { exchange: Exchange::new(LIMITS, seed), now: Duration::ZERO },
            outgoing: Outgoing::new(&LIMITS),
            peers: (2..=5).map(|number| (number, (10, Does::Works))).collect(),
            ever_failed: BTreeSet::new(),
            silent: BTreeSet::new(),
            requests: BTreeMap::new(),
            probes: Vec::new(),
            sends: Vec::new(),
            turns: 0,
        };
        world.publish();
        world
    }

    fn live(&mut self) {
        for _ in 0..self.random.usize(50..400) {
            self.step();
            self.pass(200);
        }
        self.peers.values_mut().for_each(|(_, does)| *does = Does::Works);
        // Longer than any deadline and pause.
        for _ in 0..60 {
            self.pass(200);
            self.all_come();
        }
        assert_eq!(self.silent, BTreeSet::new(), "who answers is heard again");
        self.requests.retain(|_, model| model.stage == Stage::Follows);
        let follows: Vec<_> = self.requests.keys().copied().collect();
        follows.into_iter().for_each(|request| self.leave(request));
        assert!(
            self.node.exchange.requests.is_empty() && self.turns > 10,
            "{:?}",
            self.node.exchange.requests
        );
        for number in self.members() {
            let peer = self.node.peer(number);
            assert_eq!(self.node.exchange.bytes_under_way(peer), 0);
            let all = [3, 5].map(|credits| self.node.fetch(peer, credits, Class::Prefetch));
            assert_eq!(self.node.turns(), all, "all streams and credits are there again");
        }
        std::mem::take(&mut self.sends)
            .iter()
            .for_each(|(peer, bytes)| self.outgoing.sending.give_back(peer, *bytes));
        assert_eq!(self.outgoing.sending.take("anybody", 1_000, Class::Prefetch), Some(1_000));
    }

    fn step(&mut self) {
        let number = self.random.u16(2..=5);
        let (incarnation, does) = self.peers[&number];
        let id = PeerId { node: NodeNumber(number), incarnation };
        let retry = RetryAfter { retry_after_ms: self.random.u64(0..200) };
        match self.random.u32(0..100) {
            0..40 => self.fetch(number),
            40..50 => {
                let Some(request) = self.any(|_| true) else { return };
                let class = self.class();
                self.node.exchange.change_class(self.node.now, request, class);
            }
            50..54 => self.any(|_| true).into_iter().for_each(|request| self.leave(request)),
            54..64 => {
                let Some(request) = self.any(|stage| matches!(stage, Stage::Asked { .. })) else { return };
                let model = self.requests.get_mut(&request).unwrap();
                (model.bytes, model.stage) = (self.random.u64(0..=model.bytes), Stage::Waits);
                if !self.node.exchange.is_busy(self.node.now, request, model.bytes, retry) {
                    self.leave(request);
                }
            }
            64..72 => {
                let all = [Does::Works, Does::Works, Does::Hangs, Does::Stops];
                let does = self.random.choice(all).unwrap();
                self.peers.insert(number, (incarnation, does));
                if does != Does::Works {
                    self.ever_failed.insert(id);
                }
            }
            72..80 => {
                // On a busy machine, a working peer may not be heard for a moment.
                let was_heard = does != Does::Stops && self.random.bool();
                let waited_ms = self.random.u64(0..if was_heard { 5_000 } else { 499 });
                let asked = self.node.now.saturating_sub(ms(waited_ms));
                self.node.exchange.is_late(self.node.now, id, asked, was_heard);
            }
            80..84 if does == Does::Stops => self.node.exchange.falls_silent(self.node.now, id),
            84..87 => {
                let life = if self.random.bool() { 0 } else { self.random.u64(10..1_000) };
                self.peers.insert(number, (life, does));
                let id = PeerId { incarnation: life, ..id };
                if does != Does::Works {
                    self.ever_failed.insert(id);
                }
                self.publish();
            }
            87..88 => self.node.exchange.forget(id),
            88..92 => {
                let Ok(peer) = self.node.exchange.peer(id.node) else { return };
                let tenant = TenantId(self.requests.len() as u16 % 3);
                let Some(request) = self.node.exchange.follow(peer, tenant) else {
                    return;
                };
                self.requests.insert(request, Model { peer, bytes: 0, stage: Stage::Follows });
            }
            92..98 => {
                let (peer, bytes, class) = (number.to_string(), self.random.u64(1..1_500), self.class());
                self.sends.extend(self.outgoing.sending.take(&peer, bytes, class).map(|taken| (peer, taken)));
                assert!(self.sends.iter().map(|(_, bytes)| bytes).sum::<u64>() <= LIMITS.sending_bytes);
            }
            _ if !self.sends.is_empty() => {
                let (peer, bytes) = self.sends.swap_remove(self.random.usize(..self.sends.len()));
                self.outgoing.sending.give_back(&peer, bytes);
            }
            _ => {}
        }
        self.settle();
    }

    fn fetch(&mut self, number: u16) {
        let Ok(peer) = self.node.exchange.peer(NodeNumber(number)) else { return };
        let (bytes, class) = (self.random.u64(0..12 * UNIT), self.class());
        let deadline = ms(self.random.u64(100..2_000));
        let tenant = TenantId(self.requests.len() as u16 % 3);
        let wanted = Wanted { tenant, bytes, class, deadline, has_others: self.random.bool() };
        let request = self.node.exchange.fetch(self.node.now, peer, wanted);
        self.requests.insert(request, Model { peer, bytes, stage: Stage::Waits });
        self.settle();
    }

    /// Lets at most so many milliseconds pass. Fetches from working peers may end in this time. Fetches that have not ended by
    /// their deadline are late.
    fn pass(&mut self, most_ms: u64) {
        let end = self.node.now + ms(self.random.u64(0..most_ms));
        while self.node.now < end {
            let step = ms(self.random.u64(1..20));
            self.node.pass(step.min(end - self.node.now));
            self.settle();
            for request in self.requests.keys().copied().collect::<Vec<_>>() {
                let Some(&Model { peer, stage: Stage::Asked { until }, .. }) = self.requests.get(&request)
                else {
                    continue;
                };
                let does = self.does(peer);
                if until <= self.node.now {
                    let was_heard = does.is_some_and(|does| does != Does::Stops);
                    self.ever_failed.insert(peer);
                    self.node.exchange.fetch_is_late(self.node.now, request, was_heard);
                    self.leave(request);
                } else if does == Some(Does::Works) && self.random.u8(0..4) == 0 {
                    self.node.exchange.heard(peer);
                    self.leave(request);
                }
            }
            for (peer, probe, until) in std::mem::take(&mut self.probes) {
                let answers = self.does(peer).is_some_and(|does| does != Does::Stops);
                if until > self.node.now && !(answers && self.random.bool()) {
                    self.probes.push((peer, probe, until));
                    continue;
                }
                for _ in 0..self.random.choice([1, 1, 2]).unwrap() {
                    self.node.exchange.probed(self.node.now, peer, probe, answers, answers);
                }
                self.settle();
            }
        }
    }

    /// Ends all fetches that were asked for: their blocks come.
    fn all_come(&mut self) {
        for (&request, model) in &self.requests {
            if let Stage::Asked { .. } = model.stage {
                self.node.exchange.leave(self.node.now, request);
            }
        }
        self.requests.retain(|_, model| !matches!(model.stage, Stage::Asked { .. }));
        self.settle();
    }

    fn leave(&mut self, request: RequestId) {
        self.requests.remove(&request);
        self.node.exchange.leave(self.node.now, request);
        self.settle();
    }

    /// Takes all effects, and checks what must never happen.
    fn settle(&mut self) {
        for effect in self.node.effects() {
            match effect {
                Effect::Turn(request, Turn { until: Some(until), .. }) => {
                    self.turns += 1;
                    let model = self.requests.get_mut(&request).expect("one that waits");
                    assert_eq!(model.stage, Stage::Waits, "it has no turn");
                    assert!(!self.silent.contains(&model.peer), "a silent peer is not asked");
                    model.stage = Stage::Asked { until };
                }
                Effect::Turn(request, _) => {
                    let model = self.requests.remove(&request).expect("one that waits");
                    assert_eq!(model.stage, Stage::Waits, "it has no turn");
                    let is_known = self.node.exchange.peers.contains_key(&model.peer);
                    assert!(!is_known || self.silent.contains(&model.peer), "its peer can be asked");
                    self.node.exchange.leave(self.node.now, request);
                }
                Effect::Probe { peer, probe, deadline } => {
                    self.probes.push((peer, probe, self.node.now + deadline));
                }
                Effect::Silent(peer) => {
                    assert!(self.silent.insert(peer), "it is silent already");
                    assert!(self.ever_failed.contains(&peer), "it has always answered");
                }
                Effect::Answers(peer) => assert!(self.silent.remove(&peer), "it was not silent"),
                Effect::Gone(peer) => {
                    self.silent.remove(&peer);
                    // The peer's connection is closed: nothing else comes. Waiting requests were told before.
                    self.requests.retain(|&request, model| {
                        let stays = model.peer != peer;
                        assert!(stays || model.stage != Stage::Waits, "it would wait for ever");
                        if !stays {
                            self.node.exchange.leave(self.node.now, request);
                        }
                        stays
                    });
                }
            }
        }
        if self.node.exchange.effects.is_empty() { self.check() } else { self.settle() }
    }

    fn check(&mut self) {
        for number in self.members() {
            let id = PeerId { node: NodeNumber(number), incarnation: self.peers[&number].0 };
            let mut asked = (0, 0);
            for model in self.requests.values().filter(|model| model.peer == id) {
                if let Stage::Asked { .. } = model.stage {
                    asked = (asked.0 + 1, asked.1 + model.bytes.div_ceil(UNIT).clamp(1, 8));
                }
            }
            assert!(asked.0 <= LIMITS.streams_per_peer && asked.1 <= 8, "{asked:?} of {id:?}");
            assert_eq!(self.node.exchange.bytes_under_way(id), asked.1 * UNIT);
            let next = self.node.exchange.peers.get(&id).and_then(|peer| peer.gate.turns.next());
            let needs = next.map_or(9, |request| self.requests[&request].bytes.div_ceil(UNIT).clamp(1, 8));
            assert!(asked.0 == LIMITS.streams_per_peer || asked.1 + needs > 8, "the next one could go");
            assert_eq!(self.node.is_left_out(id), self.silent.contains(&id));
        }
    }

    fn publish(&mut self) {
        let lives = self.peers.iter().map(|(&number, &(life, _))| (number, life));
        let lives = [(1, 1)].into_iter().chain(lives.filter(|&(_, life)| life > 0));
        self.node.exchange.set_table(table(lives), NodeNumber(1));
    }

    fn members(&self) -> Vec<u16> {
        self.peers.iter().filter(|(_, (life, _))| *life > 0).map(|(&number, _)| number).collect()
    }

    /// How a peer behaves in this life.
    fn does(&self, peer: PeerId) -> Option<Does> {
        let &(life, does) = self.peers.get(&peer.node.0)?;
        (life == peer.incarnation).then_some(does)
    }

    fn class(&mut self) -> Class {
        if self.random.bool() { Class::Decode } else { Class::Prefetch }
    }

    fn any(&mut self, is_meant: impl Fn(&Stage) -> bool) -> Option<RequestId> {
        let requests = self.requests.iter().filter(|(_, model)| is_meant(&model.stage));
        self.random.choice(requests.map(|(&request, _)| request).collect::<Vec<_>>())
    }
}

const HISTORIES: u64 = 1_000;
