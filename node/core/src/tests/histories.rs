//! Random histories of all requests and events of a core, checked against a model of memory. Two tenants have two namespaces
//! each, and leave and come again. Blocks have two sizes and two layers; memory has room for a tenth of them. Effects are
//! answered in any order, late, twice or never. There are purges, engines that lie, sessions that end, processes that outlive
//! their sessions, and faults after which the core begins anew.
//!
//! Engines ask (`engines`), effects are answered (`answers`), and the model (`memory`) records the name of the bytes in every
//! place. While a reader may read a place, the place must hold the bytes that the reader was told, and nothing may be written to
//! it. No two effects may write to one place. Every request is answered once, by its deadline. In the end the core keeps nothing
//! for any request.

mod answers;
mod device;
mod engines;
mod memory;

use std::collections::{BTreeSet, HashMap};

use larder_protocol::ChunkRef;
use larder_protocol::handoff::{AskInPlace, Follow, HandOver, InPlace, Writer};
use larder_protocol::peer::Class;
use larder_protocol::purge::{NamespaceName, PurgeMode, PurgeScope};
use larder_protocol::session::{Collect, Commit, Pin, ReportDamage, Reserve, Wait};

use super::*;
use crate::reports::Reporter;
use crate::store::ids::ChunkKey;
use crate::store::{BlockMove, ChunkWrite, Granted, News, Place};
use crate::{
    CopyAnswer, CopyNumber, Description, FollowOrder, LayersArrived, PurgeStep, SegmentVisit, Visited,
    WriteNumber, Written,
};
use device::DeviceCopy;
use memory::{Memory, Name, PIECE, Range, Reading, meet, range, reading};

const WORDS: [&str; 10] =
    ["abcdefgh", "abcdexyz", "abq", "aqrs", "bcdefghi", "bq", "cdefgh", "cxyz", "dddddddd", "efghij"];

#[derive(Clone)]
struct Space {
    tenant: u16,
    fingerprint: Fingerprint,
    root: ChunkHash,
    block_bytes: u64,
    /// The namespace's number in the session of its tenant.
    namespace: u32,
}

struct Live {
    session: SessionId,
    process: ProcessId,
    /// Prefetches, each with the chunks that it brings.
    tickets: Vec<(u64, Vec<ChunkHash>, Fingerprint)>,
    reservations: Vec<Reservation>,
    leases: HashMap<u64, Vec<Reading>>,
    follows: HashMap<u64, Followed>,
    pins: Vec<u64>,
    /// The tensors that the device knows, by namespace.
    tensors: Vec<(Fingerprint, u32)>,
    copies: Vec<u64>,
}

struct Reservation {
    number: u64,
    chunks: Vec<u32>,
    /// The chunks' names.
    names: Vec<Name>,
    /// Layers that were handed over.
    given: u32,
}

struct Followed {
    space: Space,
    hashes: Vec<ChunkHash>,
    /// The chunks' places, once the core has told them.
    places: Vec<Place>,
    /// The parts that the session may read.
    readings: Vec<Reading>,
}

/// A request that waits for its answer.
struct AskedFor {
    session: SessionId,
    ask: Request,
    hashes: Vec<ChunkHash>,
    fingerprint: Fingerprint,
    /// Whether the request's session has ended: then it need not be answered.
    is_over: bool,
}

/// An effect that is to be answered.
enum Open {
    Siblings(QuestionId, usize),
    Directory(QuestionId, usize),
    Objects(QuestionId, usize),
    Order(OrderNumber, Vec<Vec<(Range, Name)>>),
    Follow(OrderNumber, Vec<Vec<(Range, Name)>>),
    Read(ReadId, Vec<(Range, Name)>),
    Copy(CopyNumber, Vec<BlockMove>),
    Write(WriteNumber, Vec<Range>),
    Describe(Fingerprint),
    Forget(Vec<Fingerprint>),
    Visit(SegmentVisit, u64),
    Device(DeviceCopy),
    /// A lost device may still touch memory.
    DeviceGone,
    /// A tier's thread failed: it may write to these places for ever.
    Lost(Vec<(Range, Name)>),
}

impl Open {
    /// The ranges that the effect reads or writes.
    fn ranges(&self) -> Vec<Range> {
        let of = |places: &[(Range, Name)]| places.iter().map(|&(at, _)| at).collect::<Vec<_>>();
        match self {
            Self::Order(_, places) | Self::Follow(_, places) => of(&places.concat()),
            Self::Read(_, places) | Self::Lost(places) => of(places),
            Self::Copy(_, moves) => moves.iter().map(range).collect(),
            Self::Write(_, from) => from.clone(),
            Self::Device(copy) => copy.ranges(),
            _ => Vec::new(),
        }
    }
}

struct History {
    seed: u64,
    random: fastrand::Rng,
    core: Core,
    now: Duration,
    spaces: Vec<Space>,
    sessions: Vec<Live>,
    open: Vec<Open>,
    /// Answers that were given, kept to be given again.
    answered: Vec<Event>,
    memory: Memory,
    requests: HashMap<RequestId, AskedFor>,
    /// The grants of peers, with the parts that the peers may read.
    grants: Vec<(u64, Vec<Reading>)>,
    /// The follows of peers.
    peer_follows: Vec<u64>,
    last_request: u64,
    processes: u32,
    /// All tenants so far, by number. `numbers` has the number of each session's tenant.
    tenants: Vec<(String, u64)>,
    numbers: [u16; 2],
    purges: Vec<u64>,
    last_tensors: u32,
    /// The names of the chunks that the device is asked to copy.
    copied_names: Vec<Name>,
}

/// The limits of a history's store at its start.
fn history_limits() -> StoreLimits {
    StoreLimits {
        extents: 8,
        capacity_chunks: Some(12),
        reservation_ttl_ms: 300,
        tenant_bytes: vec![20 * BLOCK, 20 * BLOCK],
        peers: Some(PeerStoreLimits {
            passing_bytes: 8 * BLOCK,
            max_granted_chunks: 4,
            placement: crate::placement::PlacementRule::Reads,
        }),
        ..limits()
    }
}

impl History {
    fn new(seed: u64) -> Self {
        let every = Some(DEADLINE);
        let sources = Sources { siblings: every, peers: every, disk: every, object: every, known_chunks: 20 };
        let limits = history_limits();
        let mut history = Self {
            seed,
            random: fastrand::Rng::with_seed(seed),
            core: Core::new(limits, sources, DEVICE, TENANTS.map(str::to_owned).into()),
            now: Duration::ZERO,
            spaces: Vec::new(),
            sessions: Vec::new(),
            open: Vec::new(),
            answered: Vec::new(),
            memory: Memory::default(),
            requests: HashMap::new(),
            grants: Vec::new(),
            peer_follows: Vec::new(),
            last_request: 0,
            processes: 0,
            tenants: TENANTS.map(|name| (name.to_owned(), 20 * BLOCK)).to_vec(),
            numbers: [0, 1],
            purges: Vec::new(),
            last_tensors: 0,
            copied_names: Vec::new(),
        };
        for tenant in 0..2 {
            let live = history.begin_session(tenant);
            history.sessions.push(live);
        }
        history.recover();
        history
    }

    fn begin_session(&mut self, tenant: u16) -> Live {
        self.processes += 1;
        let process = ProcessId(self.processes);
        let session = self.core.open_session(TenantId(self.numbers[usize::from(tenant)]), process, 1 << 20);
        for pages in [1, 2] {
            let mut spec = spec(pages);
            (spec.pools[0].layers, spec.pools[0].layer_bytes) = (2, pages * PIECE);
            let block_bytes = pages * BLOCK;
            let known = self.core.register(session, &spec, &[0], &[block_bytes]).unwrap();
            match self.spaces.iter_mut().find(|space| space.fingerprint == known.fingerprint) {
                Some(space) => space.namespace = known.namespace,
                None => {
                    let (fingerprint, root, namespace) = (known.fingerprint, known.root, known.namespace);
                    self.spaces.push(Space { tenant, fingerprint, root, block_bytes, namespace });
                }
            }
        }
        let (leases, follows) = (HashMap::new(), HashMap::new());
        let (tickets, reservations, pins, copies) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let is_lost = self.open.iter().any(|open| matches!(open, Open::DeviceGone));
        let tensors = if is_lost { Vec::new() } else { self.know_tensors(tenant, session) };
        Live { session, process, tickets, reservations, leases, follows, pins, tensors, copies }
    }

    /// Tells the core which chunks were on disk before.
    fn recover(&mut self) {
        let result = Visited::Done { held: self.some_on_disk(), next: None };
        self.tell(Event::SegmentVisited { visit: SegmentVisit::List, after: 0, result });
    }

    fn some_on_disk(&mut self) -> Vec<(Fingerprint, ChunkRef, PoolSet)> {
        let mut held = Vec::new();
        for _ in 0..self.random.usize(..4) {
            let tenant = self.random.u16(..2);
            let (space, chain) = self.prompt(tenant);
            held.extend((0..chain.len()).map(|at| (space.fingerprint, chain.chunk(at), PoolSet::ANY)));
        }
        held
    }

    fn tell(&mut self, event: Event) {
        self.core.handle(self.now, event);
        self.perform();
    }

    /// Performs the effects that are done at once, and notes the others to be answered later.
    fn perform(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Answer { request, response, .. } => self.answer(request, response),
                Effect::Found { request, found, .. } => {
                    let AskedFor { hashes, .. } = self.take(request);
                    assert!(found.spans.iter().all(|span| span.to as usize <= hashes.len()));
                }
                Effect::Prefetching { request, started, .. } => {
                    let started = started.map_or(0, |started| started.ticket);
                    self.prefetching(request, started);
                }
                Effect::Leased { request, leased } => self.leased(request, &leased),
                Effect::Refused { request, .. } | Effect::Done { request } => _ = self.take(request),
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
                    let places = self.destinations(&chunks);
                    self.open.push(Open::Order(order, places));
                }
                Effect::Follow(FollowOrder { order, chunks, .. }) => {
                    let places = self.destinations(&chunks);
                    self.open.push(Open::Follow(order, places));
                }
                Effect::Read { read, chunk, .. } => {
                    let places = self.destinations(&[chunk]).concat();
                    self.open.push(Open::Read(read, places));
                }
                Effect::Copy { copy, moves, .. } => {
                    for block in &moves {
                        match block.is_in_place {
                            true => self.must_hold(range(block), (block.key.fingerprint, block.key.hash)),
                            false => self.check_free(&range(block)),
                        }
                    }
                    self.open.push(Open::Copy(copy, moves));
                }
                Effect::Write { number, write } => self.write(number, &write),
                Effect::Describe { fingerprint, .. } => self.open.push(Open::Describe(fingerprint)),
                Effect::ForgetDescriptions(unused) => self.open.push(Open::Forget(unused)),
                Effect::VisitSegment { visit, after } => self.open.push(Open::Visit(visit, after)),
                Effect::DeviceCopy(order) => self.device_copy(order),
                Effect::CancelDeviceCopy(number) => self.cancel_device_copy(number),
                Effect::Granted { granted, .. } => self.granted(granted),
                Effect::TellFollower(told) => {
                    if let News::Layers(layers) = told.what {
                        let place = &layers.place;
                        let from = place.offset + layers.offset;
                        assert!(self.is_known((place.extent, from, from + layers.bytes)));
                    }
                }
                Effect::Renew(extent) => {
                    let uses = |open: &Open| open.ranges().iter().any(|at| at.0 == extent);
                    assert!(!self.open.iter().any(uses), "seed {}: an effect uses that memory", self.seed);
                    self.memory.renew(extent);
                    self.core.handle(self.now, Event::ExtentRenewed(extent));
                }
                _ => {}
            }
        }
    }

    /// Notes the ticket of a prefetch that has begun; 0 for none.
    fn prefetching(&mut self, request: RequestId, ticket: u64) {
        let AskedFor { session, hashes, fingerprint, .. } = self.take(request);
        if ticket != 0
            && let Some(live) = self.live(session)
        {
            live.tickets.push((ticket, hashes, fingerprint));
        }
    }

    fn is_known(&self, at: Range) -> bool {
        let hashes = WORDS.iter().flat_map(|word| (1..=word.len()).map(|end| name(&word[..end])));
        let mut names = hashes.flat_map(|hash| self.spaces.iter().map(move |space| (space, hash)));
        names.any(|(space, hash)| {
            let reading = Reading { at, name: (space.fingerprint, hash) };
            self.memory.holds(&reading, space.block_bytes)
        })
    }

    fn block_bytes(&self, fingerprint: Fingerprint) -> u64 {
        self.spaces.iter().find(|space| space.fingerprint == fingerprint).unwrap().block_bytes
    }

    fn must_hold(&self, at: Range, name: Name) {
        let is_right = self.memory.holds(&Reading { at, name }, self.block_bytes(name.0));
        assert!(is_right, "seed {}: {at:?} does not hold {name:?}", self.seed);
    }

    fn put_in(&mut self, to: Range, name: Name, is_right: bool) {
        self.memory.put(to, self.block_bytes(name.0), is_right.then_some(name));
    }

    /// Takes a write to disk or object store. The places must hold the chunk that the write names.
    fn write(&mut self, number: WriteNumber, write: &ChunkWrite) {
        let from: Vec<Range> = write.blocks.iter().map(|(block, _)| range(block)).collect();
        for &at in &from {
            self.must_hold(at, (write.fingerprint, write.chunk.hash));
            assert!(!self.memory.is_condemned(at), "seed {}: what is written is damaged", self.seed);
        }
        self.open.push(Open::Write(number, from));
    }

    /// The places for each chunk of an order. Nobody may use these places.
    fn destinations(&self, chunks: &[FetchId]) -> Vec<Vec<(Range, Name)>> {
        let destination = |&id: &FetchId| {
            let (fingerprint, wanted) = self.core.wanted(id).expect("what is ordered is being fetched");
            let places = wanted.blocks.iter().map(|block| (range(block), (fingerprint, wanted.chunk.hash)));
            places.inspect(|(to, _)| self.check_free(to)).collect()
        };
        chunks.iter().map(destination).collect()
    }

    /// All parts that anybody may read.
    fn readings(&self) -> impl Iterator<Item = &Reading> {
        let leases = self.sessions.iter().flat_map(|live| live.leases.values().flatten());
        let follows = self.sessions.iter().flat_map(|live| live.follows.values());
        let grants = self.grants.iter().flat_map(|(_, held)| held);
        let ghosts = self.memory.ghosts.iter().flat_map(|(_, held)| held);
        leases.chain(follows.flat_map(|follow| &follow.readings)).chain(grants).chain(ghosts)
    }

    /// Checks that nobody reads or writes a range that is to be written.
    fn check_free(&self, to: &Range) {
        let is_read = self.readings().any(|reading| meet(&reading.at, to));
        assert!(!is_read, "seed {}: a place is written to that somebody reads", self.seed);
        let is_used = |open: &Open| open.ranges().iter().any(|at| meet(at, to));
        assert!(!self.open.iter().any(is_used), "seed {}: an effect uses that place", self.seed);
    }

    fn live(&mut self, session: SessionId) -> Option<&mut Live> {
        self.sessions.iter_mut().find(|live| live.session == session)
    }

    fn take(&mut self, request: RequestId) -> AskedFor {
        self.requests.remove(&request).unwrap_or_else(|| panic!("seed {}: {request:?} twice", self.seed))
    }

    fn answer(&mut self, request: RequestId, response: Response) {
        let AskedFor { session, ask, hashes, fingerprint, .. } = self.take(request);
        let Some(space) = self.spaces.iter().find(|space| space.fingerprint == fingerprint).cloned() else {
            return;
        };
        let Some(live) = self.sessions.iter_mut().find(|live| live.session == session) else { return };
        match response {
            Response::Reserved(reserved) => {
                let (number, chunks) = (reserved.reservation, reserved.chunks);
                if !chunks.is_empty() {
                    let names = chunks.iter().map(|&at| (fingerprint, hashes[at as usize])).collect();
                    live.reservations.push(Reservation { number, chunks, names, given: 0 });
                }
            }
            Response::Copying(copy) => live.copies.push(copy),
            Response::Pinned(pinned) if pinned.pin != 0 => live.pins.push(pinned.pin),
            Response::Following(follow) => {
                let (places, readings) = (Vec::new(), Vec::new());
                live.follows.insert(follow, Followed { space, hashes, places, readings });
            }
            Response::InPlace(in_place) => {
                let Request::AskInPlace(AskInPlace { follow, .. }) = ask else { panic!("it asked that") };
                if let Some(followed) = live.follows.get_mut(&follow) {
                    let added = followed.may_read(in_place);
                    added.iter().for_each(|reading| self.must_hold(reading.at, reading.name));
                }
            }
            _ => {}
        }
    }

    fn leased(&mut self, request: RequestId, leased: &Leased) {
        let AskedFor { session, hashes, fingerprint, .. } = self.take(request);
        let bytes = self.block_bytes(fingerprint);
        let mut held = Vec::new();
        for (place, &hash) in leased.places.iter().zip(&hashes) {
            let reading = reading(place, bytes, (fingerprint, hash));
            self.must_hold(reading.at, reading.name);
            assert!(!self.memory.is_condemned(reading.at), "seed {}: it is damaged", self.seed);
            held.push(reading);
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
        match self.random.u32(..1_000) {
            0..70 => self.reserve(at),
            70..210 => self.write_reserved(at),
            210..370 => self.look_for(at),
            370..410 => self.collect_or_cancel(at),
            410..470 => self.let_go(at),
            470..500 => self.follow(at),
            500..560 => self.ask_in_place(at),
            560..575 => self.pin_or_unpin(at),
            575..590 => self.report(at),
            590..640 => self.copy_pages(at),
            640..880 if !self.open.is_empty() => {
                let at = self.random.usize(..self.open.len());
                self.answer_effect(at, false);
            }
            880..910 => self.answer_again(),
            910..930 => self.offer(),
            930..940 => self.follow_for_peer(),
            940..955 => self.end_grant(),
            955..960 => self.process_gone(),
            960..966 => self.replace_session(at),
            966..974 => self.something_leaves(),
            974 => self.begin_anew(),
            984 => self.device_is_lost(),
            975..982 => self.purge(),
            982..984 => self.tenant_goes_and_comes(at),
            985..990 => {
                let is_silent = self.random.bool();
                self.tell(Event::DiskSilent(is_silent));
            }
            _ => self.tell(Event::Tick),
        }
        self.perform();
        self.core.store.assert_tree_is_whole();
        // Every part that anybody may read holds the bytes that the reader was told.
        self.readings().for_each(|reading| self.must_hold(reading.at, reading.name));
    }

    fn prompt(&mut self, tenant: u16) -> (Space, Chain) {
        let spaces: Vec<&Space> = self.spaces.iter().filter(|space| space.tenant == tenant).collect();
        let space = spaces[self.random.usize(..spaces.len())].clone();
        let word = WORDS[self.random.usize(..WORDS.len())];
        let most = if self.random.u8(..4) == 0 { word.len() } else { 3.min(word.len()) };
        let word = &word[..self.random.usize(1..=most)];
        let hashes = (1..=word.len()).map(|end| name(&word[..end])).collect();
        let chain = Chain::from_root(space.root, hashes);
        (space, chain)
    }

    fn offer(&mut self) {
        let tenant = self.random.u16(..2);
        let (space, chain) = self.prompt(tenant);
        let hash = chain.hashes[chain.len() - 1];
        let (names, sizes) = ((space.fingerprint, &[hash][..]), [space.block_bytes].into());
        for offer in self.core.offer(self.now, names, &sizes, Class::Decode, &Cause::default()) {
            if let crate::Offer::Now(granted) = offer {
                self.granted(granted);
            }
        }
        self.perform();
    }

    fn granted(&mut self, granted: Granted) {
        let Granted::Held { grant, blocks, .. } = granted else { return };
        let held = blocks.iter().map(|block| {
            let (extent, from, to) =
                (block.place.extent, block.place.offset, block.place.offset + block.bytes);
            assert!(!self.memory.is_condemned((extent, from, to)), "seed {}: it is damaged", self.seed);
            let names = self.spaces.iter().flat_map(|space| {
                let words = WORDS.iter().flat_map(|word| (1..=word.len()).map(|end| name(&word[..end])));
                words.map(move |hash| (space, hash))
            });
            let reading = |(space, hash): (&Space, ChunkHash)| {
                let reading = Reading { at: (extent, from, to), name: (space.fingerprint, hash) };
                self.memory.holds(&reading, space.block_bytes).then_some(reading)
            };
            names.filter_map(reading).next().expect("a peer gets what it can name")
        });
        let held = held.collect();
        self.grants.push((grant, held));
    }

    fn follow_for_peer(&mut self) {
        let tenant = self.random.u16(..2);
        let (space, chain) = self.prompt(tenant);
        let patience = (self.random.u64(..3), self.random.u64(100..2_000));
        let chunks = (&*chain.hashes, &[][..]);
        let follow = self.core.follow_for_peer(self.now, &space.fingerprint, chunks, patience);
        self.peer_follows.extend(follow);
        self.core.handle(self.now, Event::Alarm);
        self.perform();
    }

    fn end_grant(&mut self) {
        let grant = match self.random.bool() {
            true => self.grants.pop().map(|(grant, _)| grant),
            false => self.peer_follows.pop(),
        };
        if let Some(grant) = grant {
            self.tell(Event::GrantEnded(grant));
        }
    }

    /// Ends a session. Its process may go on reading the places that it was told.
    fn close(&mut self, at: usize) {
        let (session, process) = (self.sessions[at].session, self.sessions[at].process);
        let Live { leases, follows, .. } = &mut self.sessions[at];
        let leases = std::mem::take(leases).into_values().flatten();
        let follows = std::mem::take(follows).into_values().flat_map(|follow| follow.readings);
        let held: Vec<Reading> = leases.chain(follows).collect();
        self.memory.ghosts.push((process, held));
        self.requests
            .values_mut()
            .filter(|asked| asked.session == session)
            .for_each(|asked| asked.is_over = true);
    }

    fn replace_session(&mut self, at: usize) {
        let session = self.sessions[at].session;
        self.close(at);
        self.tell(Event::Closed(session));
        self.sessions[at] = self.begin_session(at as u16);
    }

    fn process_gone(&mut self) {
        if !self.memory.ghosts.is_empty() {
            let at = self.random.usize(..self.memory.ghosts.len());
            let (process, _) = self.memory.ghosts.swap_remove(at);
            self.tell(Event::ProcessGone(process));
        }
    }

    /// Makes chunks leave the disk, or move to another actor, or changes the policy.
    fn something_leaves(&mut self) {
        let tenant = self.random.u16(..2);
        let (space, chain) = self.prompt(tenant);
        let (fingerprint, hashes) = (space.fingerprint, chain.hashes);
        let key = |&hash: &ChunkHash| ChunkKey { fingerprint, hash };
        let event = match self.random.u8(..20) {
            0 => Event::DiskClosed,
            1..5 => Event::PolicyIs([PolicyName::Lru, PolicyName::S3Fifo][self.random.usize(..2)]),
            5..8 => Event::LimitsAre(Box::new(StoreLimits {
                capacity_chunks: Some(self.random.u64(3..16)),
                tenant_bytes: vec![self.random.u64(4..=20) * BLOCK, 20 * BLOCK],
                ..history_limits()
            })),
            8..13 => Event::LeftDisk(hashes.iter().map(key).collect()),
            _ => Event::Moved { fingerprint, hashes },
        };
        self.tell(event);
    }

    /// Begins, continues or ends a purge. Nobody finds the removed chunks, and no other chunks are touched.
    fn purge(&mut self) {
        let tenant = self.random.u16(..2);
        let (space, chain) = self.prompt(tenant);
        let of_space = NamespaceName(std::array::from_fn(|at| space.fingerprint.0[at]));
        let scope = match self.random.u8(..3) {
            0 => PurgeScope::Tenant(TENANTS[usize::from(tenant)].to_owned()),
            1 => PurgeScope::Namespace(of_space),
            _ => PurgeScope::Chunks(of_space, vec![chain.hashes[chain.len() - 1]]),
        };
        let purge = self.random.u64(1..4);
        match self.random.u8(..4) {
            0 => {
                self.purges.push(purge);
                return self.tell(Event::Purge(PurgeStep::Begin(purge, scope)));
            }
            1 => {
                self.purges.retain(|open| *open != purge);
                return self.tell(Event::Purge(PurgeStep::End(purge)));
            }
            _ => {}
        }
        let (held, keys) = (self.held(), self.core.store.purged_keys(&scope));
        self.tell(Event::Purge(PurgeStep::Page { purge, scope, mode: PurgeMode::Remove, from: 0 }));
        for key in self.held() {
            assert!(!keys.has(&key), "seed {}: {key:?} is purged", self.seed);
            assert!(held.contains(&key), "seed {}: {key:?} came by a purge", self.seed);
        }
    }

    fn held(&self) -> BTreeSet<ChunkKey> {
        let held = self.core.store.held();
        held.map(|(fingerprint, chunk)| ChunkKey { fingerprint, hash: chunk.hash }).collect()
    }

    /// Makes a tenant leave while its engine saves and reads, and a tenant of the same name come.
    fn tenant_goes_and_comes(&mut self, at: usize) {
        let (session, before) = (self.sessions[at].session, usize::from(self.numbers[at]));
        let has_closed = self.random.bool();
        if has_closed {
            self.close(at);
            self.tell(Event::Closed(session));
        }
        self.tenants[before].1 = 0;
        if self.random.bool() {
            self.tell(Event::TenantsAre(self.tenants.clone()));
            (0..self.random.u8(..3)).for_each(|_| self.tell(Event::Tick));
        }
        self.tenants.push((TENANTS[at].to_owned(), 20 * BLOCK));
        self.numbers[at] = self.tenants.len() as u16 - 1;
        self.tell(Event::TenantsAre(self.tenants.clone()));
        for key in self.held() {
            let space = self.spaces.iter().find(|space| space.fingerprint == key.fingerprint);
            assert!(space.is_none_or(|space| usize::from(space.tenant) != at), "seed {}", self.seed);
        }
        if !has_closed {
            self.close(at);
            self.tell(Event::Closed(session));
        }
        self.sessions[at] = self.begin_session(at as u16);
    }

    /// Plays a fault: the core begins anew, and all sessions end.
    fn begin_anew(&mut self) {
        (0..self.sessions.len()).for_each(|at| self.close(at));
        self.core.begin_anew();
        self.requests.clear();
        self.perform();
        for tenant in 0..2 {
            self.sessions[tenant] = self.begin_session(tenant as u16);
        }
        self.recover();
        self.extents_left();
    }

    /// Tells the core which extents of an earlier life this node no longer touches.
    fn extents_left(&mut self) {
        for extent in self.core.store.secluded() {
            let is_used = |open: &Open| open.ranges().iter().any(|at| at.0 == extent);
            let is_granted = |(_, held): &(u64, Vec<Reading>)| held.iter().any(|held| held.at.0 == extent);
            if !self.open.iter().any(is_used) && !self.grants.iter().any(is_granted) {
                let may_renew = self.random.bool();
                self.tell(Event::ExtentLeft { extent, may_renew });
            }
        }
    }

    /// Lets time pass until every waiting request is answered. Copies and writes of this node always end; other effects are
    /// answered only if `answers_all` says so.
    fn end(&mut self, answers_all: bool) {
        self.answer_open(answers_all);
        // Siblings, directory, object store and fetches may each take their longest time, one after the other.
        for _ in 0..5 {
            self.now += DEADLINE + Duration::from_millis(1);
            self.tell(Event::Tick);
        }
        let mut unanswered = self.requests.iter().filter(|(_, asked)| !asked.is_over);
        let first = unanswered.next().map(|(number, asked)| (number, &asked.ask));
        assert!(first.is_none(), "seed {}: {first:?} is not answered", self.seed);
        self.answer_open(answers_all);
    }

    fn answer_open(&mut self, answers_all: bool) {
        for _ in 0..1_000 {
            let is_answered = |open: &Open| match open {
                Open::Write(..) | Open::Copy(..) => true,
                Open::Lost(_) => false,
                // The copy's end was told. The device lets go of the memory only when the device is gone.
                Open::Device(copy) if copy.is_told() => false,
                _ => answers_all,
            };
            match self.open.iter().position(is_answered) {
                Some(at) => self.answer_effect(at, true),
                None => break,
            }
        }
    }
}

impl Followed {
    /// The parts that may be read from now on, but not before.
    fn may_read(&mut self, in_place: InPlace) -> Vec<Reading> {
        let InPlace { chunks, layers, leased, .. } = in_place;
        if let Some(leased) = leased {
            self.places = leased.places;
        }
        let layer_bytes = self.space.block_bytes / 2;
        let shown = self.places.iter().zip(&self.hashes).take(chunks as usize);
        let readings = shown.map(|(place, &hash)| {
            let name = (self.space.fingerprint, hash);
            reading(place, layer_bytes * u64::from(layers), name)
        });
        let added: Vec<Reading> = readings.filter(|reading| !self.readings.contains(reading)).collect();
        self.readings.extend(&added);
        added
    }
}

fn run(seed: u64) {
    let mut history = History::new(seed);
    for _ in 0..200 {
        history.step();
    }
    // First some effects are never answered. Every waiting request must be answered all the same.
    history.end(false);
    history.end(true);
    for at in 0..2 {
        history.replace_session(at);
    }
    while !history.memory.ghosts.is_empty() {
        history.process_gone();
    }
    while !history.grants.is_empty() || !history.peer_follows.is_empty() {
        history.end_grant();
    }
    history.end(true);
    history.extents_left();
    for purge in std::mem::take(&mut history.purges) {
        history.tell(Event::Purge(PurgeStep::End(purge)));
    }
    history.end(true);
    let usage = history.core.store.usage();
    let held = (usage.leases, usage.grants, usage.follows, usage.reservations, usage.commits_in_flight);
    assert_eq!(held, (0, 0, 0, 0, 0), "seed {seed}: something is kept for nobody");
    if !history.open.iter().any(|open| matches!(open, Open::Lost(_))) {
        let held = (usage.fetches, usage.passing_bytes, usage.bytes.quarantined);
        assert_eq!(held, (0, 0, 0), "seed {seed}: something is kept for nobody");
        history.core.bring.assert_is_at_rest();
        assert_eq!(usage.bytes.used, usage.cached_bytes, "seed {seed}: a slot is kept for nothing");
    }
}

#[test]
fn whatever_happens_places_hold_what_they_are_shown_as_and_requests_are_answered_once() {
    let first = fastrand::u64(..u64::MAX / 2);
    for seed in first..first + HISTORIES {
        run(seed);
    }
}

/// The number of histories in each run.
const HISTORIES: u64 = 10_000;
