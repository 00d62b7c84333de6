//! Random histories of everything that a core is asked and told, against a model of what may be read: two tenants with two
//! namespaces each, blocks of two sizes, memory for a tenth, every effect answered in any order, late, twice or never.
//!
//! The model writes down what every place in memory holds, by name. A place that is leased must hold what it was leased for,
//! and nothing may be written to it, as long as the lease lives; no two effects may write to one place; every request is
//! answered once, by its deadline; and at the end nothing is kept for anything.

use std::collections::HashMap;

use larder_protocol::session::{Collect, Wait};

use super::*;
use crate::store::{BlockMove, ChunkWrite, Place};
use crate::{Description, WriteNumber, Written};

const WORDS: [&str; 10] =
    ["abcdefgh", "abcdexyz", "abq", "aqrs", "bcdefghi", "bq", "cdefgh", "cxyz", "dddddddd", "efghij"];

/// Where bytes are: extent, first byte, end.
type Range = (u32, u64, u64);

/// What a block is called.
type Name = (Fingerprint, ChunkHash);

#[derive(Clone)]
struct Space {
    tenant: u16,
    fingerprint: Fingerprint,
    root: ChunkHash,
    /// Its number in the session of its tenant.
    namespace: u32,
}

struct Live {
    session: SessionId,
    process: ProcessId,
    /// Prefetches, and what they bring.
    tickets: Vec<(u64, Vec<ChunkHash>, Fingerprint)>,
    leases: HashMap<u64, Vec<(Range, Name)>>,
}

/// An effect that is to be answered.
enum Open {
    Siblings(QuestionId, usize),
    Directory(QuestionId, usize),
    Objects(QuestionId, usize),
    Order(OrderNumber, Vec<FetchId>, Vec<Vec<(Range, Name)>>),
    Read(ReadId, Vec<(Range, Name)>),
    Write(WriteNumber, Vec<Range>),
    Describe(Fingerprint),
    Forget(Vec<Fingerprint>),
}

struct History {
    seed: u64,
    random: fastrand::Rng,
    core: Core,
    now: Duration,
    spaces: Vec<Space>,
    sessions: Vec<Live>,
    open: Vec<Open>,
    /// Questions, orders and reads that were answered, to be answered again.
    answered: Vec<Event>,
    /// What stands in memory, by first byte.
    memory: HashMap<(u32, u64), (u64, Name)>,
    /// Who asked for what, until it is answered.
    requests: HashMap<RequestId, (SessionId, Vec<ChunkHash>, Fingerprint, Duration)>,
    last_request: u64,
    processes: u32,
}

fn range(block: &BlockMove) -> Range {
    (block.place.extent, block.place.offset, block.place.offset + block.bytes)
}

fn meet(one: &Range, other: &Range) -> bool {
    one.0 == other.0 && one.1 < other.2 && other.1 < one.2
}

impl History {
    fn new(seed: u64) -> Self {
        let every = Some(DEADLINE);
        let sources = Sources { siblings: every, peers: every, disk: every, object: every, known_chunks: 20 };
        let limits = StoreLimits {
            extents: 6,
            capacity_chunks: Some(8),
            tenant_bytes: vec![16 * BLOCK, 16 * BLOCK],
            peers: Some(PeerStoreLimits { passing_bytes: 8 * BLOCK, max_granted_chunks: 4 }),
            ..limits()
        };
        let mut history = Self {
            seed,
            random: fastrand::Rng::with_seed(seed),
            core: Core::new(limits, sources, TENANTS.map(str::to_owned).into()),
            now: Duration::ZERO,
            spaces: Vec::new(),
            sessions: Vec::new(),
            open: Vec::new(),
            answered: Vec::new(),
            memory: HashMap::new(),
            requests: HashMap::new(),
            last_request: 0,
            processes: 0,
        };
        for tenant in 0..2 {
            let live = history.begin_session(tenant);
            history.sessions.push(live);
        }
        history
    }

    fn begin_session(&mut self, tenant: u16) -> Live {
        self.processes += 1;
        let process = ProcessId(self.processes);
        let session = self.core.store.open_session(TenantId(tenant), process, 1 << 20);
        for pages in [1, 2] {
            let known = self.core.register(session, &spec(pages), &[0], &[pages * BLOCK]).unwrap();
            if self.spaces.iter().all(|space| space.fingerprint != known.fingerprint) {
                let (fingerprint, root, namespace) = (known.fingerprint, known.root, known.namespace);
                self.spaces.push(Space { tenant, fingerprint, root, namespace });
            }
        }
        Live { session, process, tickets: Vec::new(), leases: HashMap::new() }
    }

    fn tell(&mut self, event: Event) {
        self.core.handle(self.now, event);
        self.perform();
    }

    /// Does what the core wants as far as that is done at once, and notes the rest.
    fn perform(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Found { request, found, .. } => {
                    let (_, hashes, ..) = self.answer(request);
                    assert!(
                        found.spans.iter().all(|span| span.to as usize <= hashes.len()),
                        "seed {}",
                        self.seed
                    );
                }
                Effect::Prefetching { request, started, .. } => {
                    let (session, hashes, fingerprint, _) = self.answer(request);
                    if let Ok(started) = started
                        && started.ticket != 0
                        && let Some(live) = self.live(session)
                    {
                        live.tickets.push((started.ticket, hashes, fingerprint));
                    }
                }
                Effect::Leased { request, leased } => self.leased(request, &leased),
                Effect::Refused { request, .. } | Effect::Done { request } => _ = self.answer(request),
                Effect::Renew(extent) => {
                    self.memory.retain(|&(of, _), _| of != extent);
                    self.core.handle(self.now, Event::ExtentRenewed(extent));
                }
                Effect::FindSiblings { question, chunks, .. } => {
                    self.open.push(Open::Siblings(question, chunks.len()));
                }
                Effect::FindHolders { question, chunks, .. } => {
                    self.open.push(Open::Directory(question, chunks.len()));
                }
                Effect::FindStored { question, chunks, .. } => {
                    self.open.push(Open::Objects(question, chunks.len()));
                }
                Effect::Fetch(FetchOrder { order, chunks, .. }) => {
                    let places: Vec<_> = chunks.iter().map(|&id| self.destination(id)).collect();
                    places.iter().flatten().for_each(|(to, _)| self.check_free(to));
                    self.open.push(Open::Order(order, chunks, places));
                }
                Effect::Read { read, chunk, .. } => {
                    let places = self.destination(chunk);
                    places.iter().for_each(|(to, _)| self.check_free(to));
                    self.open.push(Open::Read(read, places));
                }
                Effect::Write { number, write } => self.write(number, &write),
                Effect::Describe { fingerprint, .. } => self.open.push(Open::Describe(fingerprint)),
                Effect::ForgetDescriptions(unused) => self.open.push(Open::Forget(unused)),
                Effect::Granted { granted: crate::store::Granted::Held { grant, .. }, .. } => {
                    self.core.store.end_grant(grant);
                }
                _ => {}
            }
        }
    }

    /// Takes what is to be written to disk or object store, which must be what it says.
    fn write(&mut self, number: WriteNumber, write: &ChunkWrite) {
        let name = (write.fingerprint, write.chunk.hash);
        let from: Vec<Range> = write.blocks.iter().map(|(block, _)| range(block)).collect();
        for &(extent, first, end) in &from {
            let holds = self.memory.get(&(extent, first));
            assert_eq!(holds, Some(&(end, name)), "seed {}: what is written is another chunk", self.seed);
        }
        self.open.push(Open::Write(number, from));
    }

    fn destination(&self, id: FetchId) -> Vec<(Range, Name)> {
        let (fingerprint, wanted) = self.core.wanted(id).expect("what is ordered is being fetched");
        wanted.blocks.iter().map(|block| (range(block), (fingerprint, wanted.chunk.hash))).collect()
    }

    /// Nobody reads or writes where something is to be written.
    fn check_free(&self, to: &Range) {
        let leased = self.sessions.iter().flat_map(|live| live.leases.values().flatten());
        assert!(
            leased.into_iter().all(|(at, _)| !meet(at, to)),
            "seed {}: a leased place is written to",
            self.seed
        );
        for open in &self.open {
            let is_free = match open {
                Open::Order(.., places) => places.iter().flatten().all(|(at, _)| !meet(at, to)),
                Open::Read(_, places) => places.iter().all(|(at, _)| !meet(at, to)),
                Open::Write(_, from) => from.iter().all(|at| !meet(at, to)),
                _ => true,
            };
            assert!(is_free, "seed {}: a place is written to that an effect uses", self.seed);
        }
    }

    fn put_in(&mut self, (extent, from, to): Range, name: Option<Name>) {
        self.memory.retain(|&(of, first), (end, _)| of != extent || first >= to || *end <= from);
        if let Some(name) = name {
            self.memory.insert((extent, from), (to, name));
        }
    }

    fn live(&mut self, session: SessionId) -> Option<&mut Live> {
        self.sessions.iter_mut().find(|live| live.session == session)
    }

    fn answer(&mut self, request: RequestId) -> (SessionId, Vec<ChunkHash>, Fingerprint, Duration) {
        self.requests.remove(&request).unwrap_or_else(|| panic!("seed {}: {request:?} twice", self.seed))
    }

    fn leased(&mut self, request: RequestId, leased: &Leased) {
        let (session, hashes, fingerprint, _) = self.answer(request);
        let mut held = Vec::new();
        for (at, &Place { extent, offset, .. }) in leased.places.iter().enumerate() {
            let known = self.memory.get(&(extent, offset));
            let Some(&(end, name)) = known else { panic!("seed {}: nothing stands there", self.seed) };
            let wanted = (fingerprint, hashes[at]);
            assert_eq!(name, wanted, "seed {}: another chunk is leased", self.seed);
            held.push(((extent, offset, end), name));
        }
        if leased.lease != 0
            && let Some(live) = self.live(session)
        {
            live.leases.insert(leased.lease, held);
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.random.u64(0..20));
        let at = self.random.usize(..self.sessions.len());
        let (session, tenant) = (self.sessions[at].session, at as u16);
        match self.random.u8(..100) {
            0..14 => self.put(session, tenant),
            14..44 => self.ask(session, tenant),
            44..52 => self.collect_or_cancel(at),
            52..60 => {
                let leases = &self.sessions[at].leases;
                if let Some(lease) = leases.keys().copied().min() {
                    self.sessions[at].leases.remove(&lease);
                    self.core.store.release(session, lease).unwrap();
                }
            }
            60..90 if !self.open.is_empty() => {
                let at = self.random.usize(..self.open.len());
                self.answer_effect(at, false);
            }
            90..93 => self.answer_again(),
            93..95 => self.offer(),
            95 => self.replace_session(at),
            _ => self.tell(Event::Tick),
        }
        self.perform();
        self.core.store.take_changes();
        self.core.store.assert_tree_is_whole();
        self.check_leases();
    }

    /// Every leased place holds what it was leased for.
    fn check_leases(&self) {
        for ((extent, from, _), name) in self.sessions.iter().flat_map(|live| live.leases.values().flatten())
        {
            let held = self.memory.get(&(*extent, *from)).map(|&(_, name)| name);
            assert_eq!(held, Some(*name), "seed {}: a leased place changed", self.seed);
        }
    }

    fn prompt(&mut self, tenant: u16) -> (Space, Chain) {
        let spaces: Vec<&Space> = self.spaces.iter().filter(|space| space.tenant == tenant).collect();
        let space = spaces[self.random.usize(..spaces.len())].clone();
        let word = WORDS[self.random.usize(..WORDS.len())];
        let word = &word[..self.random.usize(1..=word.len())];
        let hashes = (1..=word.len()).map(|end| name(&word[..end])).collect();
        let chain = Chain::from_root(space.root, hashes);
        (space, chain)
    }

    fn put(&mut self, session: SessionId, tenant: u16) {
        let (space, chain) = self.prompt(tenant);
        let now = crate::Millis(self.now.as_millis() as u64);
        let store = &mut self.core.store;
        let Ok(reserved) = store.reserve(session, space.namespace, &chain, 0, now) else { return };
        let sources = vec![0; reserved.chunks.len()];
        let Ok(order) = store.begin_commit(session, reserved.reservation, &reserved.chunks, &sources) else {
            return;
        };
        for block in &order.moves {
            self.check_free(&range(block));
            self.put_in(range(block), Some((block.key.fingerprint, block.key.hash)));
        }
        let sums = order.moves.iter().map(|_| Checksums::default()).collect();
        self.core.store.finish_commit(order.order, Some(sums));
    }

    fn ask(&mut self, session: SessionId, tenant: u16) {
        let (space, chain) = self.prompt(tenant);
        let hashes = chain.hashes.clone();
        let lookup = |chain| Lookup {
            namespace: space.namespace,
            chain,
            prompt_tokens: 1 << 20,
            skip_read: false,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: None,
            prefill_tokens_per_second: None,
        };
        let ask = match self.random.u8(..3) {
            0 => Request::Lookup(lookup(chain)),
            1 => Request::Prefetch(lookup(chain)),
            _ => Request::Lease(Lease { namespace: space.namespace, chain }),
        };
        self.asks(session, hashes, space.fingerprint, ask);
    }

    fn asks(&mut self, session: SessionId, hashes: Vec<ChunkHash>, fingerprint: Fingerprint, ask: Request) {
        self.last_request += 1;
        let (request, cause) = (RequestId(self.last_request), Cause::default());
        self.requests.insert(request, (session, hashes, fingerprint, self.now));
        self.tell(Event::Asked { request, session, ask, cause });
    }

    fn collect_or_cancel(&mut self, at: usize) {
        let live = &mut self.sessions[at];
        if live.tickets.is_empty() {
            return;
        }
        let (ticket, hashes, fingerprint) = live.tickets.swap_remove(self.random.usize(..live.tickets.len()));
        let session = live.session;
        if self.random.u8(..3) == 0 {
            return self.asks(session, Vec::new(), fingerprint, Request::Cancel(ticket));
        }
        let wait = [Wait::BestEffort, Wait::Complete, Wait::TimeoutMs(30)][self.random.usize(..3)];
        self.asks(session, hashes, fingerprint, Request::Collect(Collect { ticket, wait }));
    }

    /// Answers an effect, whichever; always well where that is wanted.
    fn answer_effect(&mut self, at: usize, always_well: bool) {
        let open = self.open.swap_remove(at);
        let fails = !always_well && self.random.u8(..4) == 0;
        match open {
            Open::Siblings(question, chunks) => {
                let holders =
                    (0..chunks).map(|_| if self.random.u8(..4) == 0 { of_sibling(1) } else { of(&[]) });
                let event = Event::SiblingsFound { question, holders: holders.collect() };
                self.tell(event);
            }
            Open::Directory(question, chunks) => {
                let some: [&[u16]; 4] = [&[], &[2], &[3, 2], &[4]];
                let chunks = if fails { 0 } else { chunks };
                let holders = (0..chunks).map(|_| of(some[self.random.usize(..4)])).collect();
                self.answered.push(Event::HoldersFound { question, holders: Vec::new() });
                self.tell(Event::HoldersFound { question, holders });
            }
            Open::Objects(question, chunks) => {
                let found = (0..chunks).map(|_| self.random.bool()).collect();
                self.answered.push(Event::StoredFound { question, found: vec![true] });
                self.tell(Event::StoredFound { question, found });
            }
            Open::Order(order, chunks, places) => self.order_ended(order, &chunks, places, fails),
            Open::Read(read, places) => {
                let failures =
                    [ReadAnswer::Missing, ReadAnswer::Busy, ReadAnswer::Impossible, ReadAnswer::Missing];
                let answer = if fails { failures[self.random.usize(..4)].clone() } else { read_here() };
                for (to, name) in places {
                    self.put_in(to, (!fails).then_some(name));
                }
                self.answered.push(Event::ReadEnded { read, answer: answer.clone() });
                self.tell(Event::ReadEnded { read, answer });
            }
            Open::Write(number, _) => {
                let answer = match self.random.u8(..8) {
                    _ if !fails => Written::There,
                    0..4 => Written::Busy,
                    4..7 => Written::Failed,
                    _ => Written::Closed,
                };
                self.answered.push(Event::WriteEnded { number, answer: Written::There });
                self.tell(Event::WriteEnded { number, answer });
            }
            Open::Describe(fingerprint) => {
                let description = if fails { Description::Failed } else { Description::There };
                self.tell(Event::Described { fingerprint, description });
            }
            Open::Forget(unused) => {
                for fingerprint in unused {
                    self.tell(Event::Described { fingerprint, description: Description::Gone });
                }
            }
        }
    }

    fn order_ended(
        &mut self,
        order: OrderNumber,
        chunks: &[FetchId],
        places: Vec<Vec<(Range, Name)>>,
        fails: bool,
    ) {
        if fails && self.random.u8(..4) == 0 {
            return self.tell(Event::OrderRefused(order));
        }
        let mut came = Vec::new();
        for places in
            places.into_iter().take(if fails { self.random.usize(..=chunks.len()) } else { chunks.len() })
        {
            let failures =
                [Arrival::NotHeld, Arrival::Busy { retry_after_ms: 5 }, Arrival::Damaged, Arrival::Failed];
            let is_here = !fails || self.random.bool();
            for (to, name) in places {
                self.put_in(to, is_here.then_some(name));
            }
            came.push(if is_here {
                here(self.random.u32(1..10))
            } else {
                failures[self.random.usize(..4)].clone()
            });
        }
        self.answered.push(Event::OrderEnded { order, came: vec![here(1); chunks.len()] });
        self.tell(Event::OrderEnded { order, came });
    }

    /// Something that was answered is answered once more.
    fn answer_again(&mut self) {
        if !self.answered.is_empty() {
            let event = self.answered.swap_remove(self.random.usize(..self.answered.len()));
            self.tell(event);
        }
    }

    fn offer(&mut self) {
        let tenant = self.random.u16(..2);
        let (space, chain) = self.prompt(tenant);
        let hash = chain.hashes[chain.len() - 1];
        let pages = 1 + self
            .spaces
            .iter()
            .filter(|other| other.tenant == tenant)
            .position(|other| other.fingerprint == space.fingerprint)
            .unwrap() as u64;
        let sizes: std::sync::Arc<[u64]> = [pages * BLOCK].into();
        let class = larder_protocol::peer::Class::Decode;
        let offer = self.core.offer(self.now, (space.fingerprint, hash), &sizes, class, &Cause::default());
        if let crate::Offer::Now(crate::store::Granted::Held { grant, .. }) = offer {
            self.core.store.end_grant(grant);
        }
    }

    /// A session ends, and its process is known to be gone; another begins.
    fn replace_session(&mut self, at: usize) {
        let session = self.sessions[at].session;
        self.tell(Event::Closed(session));
        self.requests.retain(|_, (of, ..)| *of != session);
        let process = self.sessions[at].process;
        self.core.store.process_gone(process);
        self.sessions[at] = self.begin_session(at as u16);
    }

    /// Answers all questions, and the rest where that is wanted; time passes, and what that brought is answered too.
    fn end(&mut self, answers_all: bool) {
        self.answer_open(answers_all);
        // Siblings, directory, object store, and what they hold: each may take as long as it may.
        for _ in 0..5 {
            self.now += DEADLINE + Duration::from_millis(1);
            self.tell(Event::Tick);
        }
        assert!(self.requests.is_empty(), "seed {}: {:?} are not answered", self.seed, self.requests.keys());
        self.answer_open(answers_all);
    }

    fn answer_open(&mut self, answers_all: bool) {
        for _ in 0..1_000 {
            // A lease holds its write's memory; nobody waits for it.
            let is_write = |open: &Open| matches!(open, Open::Write(..));
            match self.open.iter().position(|open| answers_all || is_write(open)) {
                Some(at) => self.answer_effect(at, true),
                None => break,
            }
            self.perform();
        }
    }
}

fn run(seed: u64) {
    let mut history = History::new(seed);
    for _ in 0..60 {
        history.step();
    }
    // First some effects are never answered: whoever waits is answered all the same.
    history.end(false);
    history.end(true);
    for at in 0..history.sessions.len() {
        history.replace_session(at);
    }
    history.end(true);
    let usage = history.core.store.usage();
    let held = (usage.fetches, usage.passing_bytes, usage.leases, usage.grants);
    assert_eq!(held, (0, 0, 0, 0), "seed {seed}: something is kept for nobody");
}

#[test]
fn whatever_happens_places_hold_what_they_are_leased_for_and_requests_are_answered_once() {
    let first = fastrand::u64(..u64::MAX / 2);
    for seed in first..first + HISTORIES {
        run(seed);
    }
}

/// So many histories each time.
const HISTORIES: u64 = 10_000;
