//! Tests of why a chunk was a miss: each outcome is produced, and must be named rightly.

use larder_protocol::namespace::EngineHash;
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::session::{Collect, Reserve, Tier, Wait};

use super::*;
use crate::event::PurgeStep;
use crate::lookups::{ChunkOutcome, LookupFilter, LookupKind, LookupRecord, NotDelivered, Origin};
use crate::store::{EvictionRule, Keeper, Stay};

const ALONE: Sources = Sources { siblings: None, peers: None, disk: None, object: None, known_chunks: 100 };

impl World {
    /// Sends a request that the engine has named.
    fn says(&mut self, origin: Origin, ask: Request) {
        let request = RequestId { session: self.session, number: self.requests + 1 };
        self.core.request_is(request, &ask, origin);
        self.asks(self.session, ask);
    }

    /// The last lookup in the log.
    fn last_lookup(&self) -> LookupRecord {
        let last = self.core.lookups.last(&LookupFilter { most: 1, ..LookupFilter::default() });
        last.into_iter().next().expect("a lookup")
    }

    /// The outcome of each chunk of the last lookup.
    fn outcomes(&self) -> Vec<ChunkOutcome> {
        let last = self.last_lookup();
        last.runs().flat_map(|(from, run)| (from..run.to).map(move |_| run.outcome)).collect()
    }

    /// Looks a prompt up without a question to others; returns the outcomes of its chunks.
    fn why(&mut self, word: &str) -> Vec<ChunkOutcome> {
        self.lookup(word);
        assert!(matches!(self.next(), Effect::Found { .. }));
        self.outcomes()
    }

    /// The rules by which the chunks of the last lookup were evicted before it.
    fn rules(&self) -> Vec<Option<EvictionRule>> {
        let last = self.last_lookup();
        let evictions = self.core.store.remembered_evictions();
        let evicted = evictions.last(&last.fingerprint, &last.hashes, last.evictions_before, u32::MAX);
        evicted.into_iter().map(|one| one.map(|one| one.rule)).collect()
    }
}

fn alone(capacity_chunks: u64) -> World {
    World::with(StoreLimits { disk: None, capacity_chunks: Some(capacity_chunks), ..limits() }, ALONE)
}

const HERE: ChunkOutcome = ChunkOutcome::Found(Tier::Host);
const THERE: ChunkOutcome = ChunkOutcome::Found(Tier::Peer);

#[test]
fn a_chunk_that_was_never_stored_is_absent_and_no_eviction_is_remembered() {
    let mut w = alone(16);
    w.put("a");
    assert_eq!(w.why("abc"), [HERE, ChunkOutcome::Absent, ChunkOutcome::Absent]);
    assert_eq!(w.rules(), [None, None, None]);
    assert!(!w.core.store.remembered_evictions().is_cut(), "so it was never stored in this life");
}

#[test]
fn an_evicted_chunk_names_when_by_which_rule_and_what_it_was_worth() {
    let mut w = alone(2);
    w.pass(Duration::from_secs(5));
    w.put("a");
    w.put("x");
    w.pass(Duration::from_secs(10));
    w.put("y");
    assert_eq!(w.why("a"), [ChunkOutcome::Absent]);
    assert_eq!(w.rules(), [Some(EvictionRule::Watermark)]);
    let last = w.last_lookup();
    let evictions = w.core.store.remembered_evictions();
    let evicted =
        evictions.last(&last.fingerprint, &last.hashes, last.evictions_before, u32::MAX)[0].unwrap();
    assert_eq!(evicted.at_tenths, 150);
    // 16 tokens in 4 KiB, unused for 10 s.
    let worth = 16.0 * (1 << 30) as f64 / 4_096.0 * 1e9 / 10_000.0;
    assert!((evicted.worth.0 as f64 / worth - 1.0).abs() < 1e-3, "{} {worth}", evicted.worth.0);
}

#[test]
fn an_eviction_after_a_lookup_does_not_explain_it() {
    let mut w = alone(1);
    assert_eq!(w.why("a"), [ChunkOutcome::Absent]);
    w.put("a");
    w.put("b");
    assert_eq!(w.rules(), [None]);
    w.why("a");
    assert_eq!(w.rules(), [Some(EvictionRule::Watermark)]);
}

#[test]
fn evictions_for_need_and_for_clearing_are_named_so() {
    let mut w = World::with(StoreLimits { disk: None, capacity_chunks: None, extents: 1, ..limits() }, ALONE);
    "abcd".chars().for_each(|letter| w.put(&letter.to_string()));
    w.put("e");
    w.why("a");
    assert_eq!(w.rules(), [Some(EvictionRule::Need)]);
    let large = w.core.register(w.session, &spec(2), &[0], &[2 * BLOCK]).unwrap();
    let chain = Chain::from_root(large.root, vec![name("z")]);
    w.core.store.reserve(w.session, large.namespace, &chain, 0, crate::Millis(0)).unwrap();
    w.why("e");
    assert_eq!(w.rules(), [Some(EvictionRule::Clearing)]);
}

#[test]
fn a_chunk_that_the_disk_dropped_says_so_and_one_that_is_still_there_is_found() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..ALONE });
    w.on_disk("ab");
    assert_eq!(w.why("ab"), [ChunkOutcome::Found(Tier::Disk); 2]);
    let key = crate::store::ids::ChunkKey { fingerprint: w.fingerprint, hash: w.chain("ab").hashes[0] };
    w.tell(Event::LeftDisk(vec![key]));
    assert_eq!(w.why("ab"), [ChunkOutcome::Absent, ChunkOutcome::BehindGap(Tier::Disk)]);
    assert_eq!(w.rules(), [Some(EvictionRule::Disk), None]);
}

#[test]
fn purged_moved_and_damaged_chunks_are_named_so() {
    let mut w = alone(16);
    w.put("a");
    let scope = PurgeScope::Tenant(TENANTS[0].to_owned());
    w.tell(Event::Purge(PurgeStep::Begin(1, scope.clone())));
    w.tell(Event::Purge(PurgeStep::Page { purge: 1, scope, mode: PurgeMode::Remove, from: 0 }));
    assert!(matches!(w.next(), Effect::Purged { .. }));
    w.tell(Event::Purge(PurgeStep::End(1)));
    w.why("a");
    assert_eq!(w.rules(), [Some(EvictionRule::Purged)]);
    w.put("b");
    let (fingerprint, hash) = (w.fingerprint, name("b"));
    assert!(w.core.store.give_up(&fingerprint, &[hash]).is_empty());
    w.why("b");
    assert_eq!(w.rules(), [Some(EvictionRule::Moved)]);
    w.put("c");
    let order = w.core.store.begin_verify(&fingerprint, &name("c")).expect("it is here");
    w.core.store.finish_verify(order.verify, Some(&[1]));
    w.why("c");
    assert_eq!(w.rules(), [Some(EvictionRule::Damaged)]);
}

#[test]
fn what_is_older_than_the_memory_is_unknown() {
    let limits = StoreLimits { remembered_evictions: 4, disk: None, capacity_chunks: Some(1), ..limits() };
    let mut w = World::with(limits, ALONE);
    "abcdefghij".chars().for_each(|letter| w.put(&letter.to_string()));
    w.why("a");
    assert_eq!(w.rules(), [None]);
    assert!(w.core.store.remembered_evictions().is_cut(), "so nobody can say that it was never stored");
    w.why("i");
    assert_eq!(w.rules(), [Some(EvictionRule::Watermark)]);
}

#[test]
fn after_a_fault_nobody_says_that_a_chunk_was_never_stored() {
    let mut w = alone(16);
    w.put("a");
    w.core.begin_anew();
    assert!(w.core.store.remembered_evictions().is_cut());
}

#[test]
fn a_chunk_that_is_being_written_is_named_so() {
    let mut w = alone(16);
    let chain = w.chain("a");
    w.core.store.reserve(w.session, w.namespace, &chain, 0, crate::Millis(0)).unwrap();
    assert_eq!(w.why("ab"), [ChunkOutcome::BeingWritten, ChunkOutcome::Absent]);
}

#[test]
fn nobody_looks_for_the_last_token_nor_for_whoever_cannot_use_a_hit() {
    let mut w = alone(16);
    w.put("a");
    let ask = Lookup { prompt_tokens: 32, ..w.ask("ab") };
    w.asks(w.session, Request::Lookup(ask));
    w.next();
    assert_eq!(w.outcomes(), [HERE, ChunkOutcome::NotAsked]);
    let ask = Lookup { skip_read: true, ..w.ask("ab") };
    w.asks(w.session, Request::Lookup(ask));
    w.next();
    assert_eq!(w.outcomes(), [ChunkOutcome::NotAsked; 2]);
    assert!(!w.last_lookup().has_miss());
}

#[test]
fn a_refused_request_says_why() {
    let mut w = alone(16);
    let mut chain = w.chain("ab");
    chain.hashes[1] = chain.hashes[0];
    let ask = Lookup { chain, ..w.ask("ab") };
    w.asks(w.session, Request::Lookup(ask));
    assert!(matches!(w.next(), Effect::Refused { .. }));
    assert_eq!(w.outcomes(), [ChunkOutcome::Refused; 2]);
    assert!(w.last_lookup().refused.is_some_and(|why| !why.is_empty()));
}

#[test]
fn a_home_that_does_not_answer_is_no_proof_that_nobody_has_the_chunk() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.lookup("abc");
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    w.core.homes_are_silent(question, &[1]);
    w.tell(Event::HoldersFound { question, holders: vec![of(&[2]), of(&[])] });
    w.next();
    assert_eq!(w.outcomes(), [HERE, THERE, ChunkOutcome::HomeSilent]);
    w.lookup("ad");
    assert!(matches!(w.next(), Effect::FindHolders { .. }));
    w.pass(DEADLINE);
    w.next();
    assert_eq!(w.outcomes(), [HERE, ChunkOutcome::HomeSilent], "nobody answers in time");
}

#[test]
fn a_home_that_does_not_answer_says_nothing_of_the_chunks_that_were_asked_of_others() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), ..PEERS });
    w.lookup("abc");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(1)] });
    let Effect::FindHolders { question, chunks, .. } = w.next() else { panic!("the directory") };
    assert_eq!(chunks.len(), 2);
    w.core.homes_are_silent(question, &[1]);
    w.tell(Event::HoldersFound { question, holders: vec![of(&[]), of(&[])] });
    w.next();
    assert_eq!(w.outcomes(), [HERE, ChunkOutcome::Absent, ChunkOutcome::HomeSilent]);
}

#[test]
fn the_last_place_that_was_asked_says_why_though_time_is_up_before_the_next() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.now += DEADLINE;
    w.ended(asked.order, vec![Arrival::Damaged]);
    assert_eq!(w.leased(request).chunks, 0);
    assert_eq!(w.outcomes(), [ChunkOutcome::NotDelivered(NotDelivered::Damaged)]);
}

#[test]
fn a_place_that_does_not_deliver_says_why() {
    let failed = |failure| Arrival::Failed(failure);
    for (arrival, why) in [
        (failed(FetchFailure::Unreachable), NotDelivered::Silent),
        (failed(FetchFailure::Deadline), NotDelivered::Deadline),
        (failed(FetchFailure::Broken), NotDelivered::Broken),
        (failed(FetchFailure::Full), NotDelivered::Busy),
        (Arrival::Busy { retry_after_ms: 1 }, NotDelivered::Busy),
        (Arrival::NotHeld, NotDelivered::NotHeld),
        (Arrival::Damaged, NotDelivered::Damaged),
    ] {
        let mut w = World::new(PEERS);
        w.put("a");
        let request = w.lease("abc");
        w.directory_says(&[&[2], &[2]]);
        let asked = w.fetch();
        w.ended(asked.order, vec![arrival, here(1)]);
        while let Some(effect) = w.poll() {
            if let Effect::FindHolders { question, .. } = effect {
                w.tell(Event::HoldersFound { question, holders: vec![of(&[])] });
            } else if let Effect::Leased { leased, .. } = effect {
                assert_eq!(leased.chunks, 1);
            }
        }
        let gap = ChunkOutcome::BehindGap(Tier::Peer);
        assert_eq!(w.outcomes(), [HERE, ChunkOutcome::NotDelivered(why), gap], "{why:?} {request:?}");
    }
}

#[test]
fn an_unreadable_record_is_named_so() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..ALONE });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.leased(request).chunks, 0);
    assert_eq!(w.outcomes(), [ChunkOutcome::NotDelivered(NotDelivered::Unreadable)]);
}

#[test]
fn a_prefetch_that_is_collected_too_early_missed_its_deadline() {
    let mut w = World::new(PEERS);
    w.asks(w.session, Request::Prefetch(w.ask("a")));
    w.directory_says(&[&[2]]);
    w.fetch();
    let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
    assert_eq!(w.outcomes(), [THERE], "so far all is well");
    let collect = Collect { ticket: started.ticket, wait: Wait::BestEffort };
    let request = w.asks(w.session, Request::Collect(collect));
    assert_eq!(w.leased(request).chunks, 0);
    assert_eq!(w.outcomes(), [ChunkOutcome::NotDelivered(NotDelivered::Deadline)]);
    assert_eq!(w.last_lookup().kind, LookupKind::Prefetch);
}

#[test]
fn a_chunk_that_is_computed_sooner_than_it_comes_is_named_so() {
    let mut w = World::new(PEERS);
    // A first transfer shows that this peer needs a second for a chunk.
    let request = w.lease("x");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.now += Duration::from_secs(1);
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
    let ask = Lookup { prefill_tokens_per_second: Some(1e9), ..w.ask("a") };
    w.asks(w.session, Request::Prefetch(ask));
    w.directory_says(&[&[2]]);
    assert!(matches!(w.next(), Effect::Prefetching { .. }));
    assert_eq!(w.outcomes(), [ChunkOutcome::ComputedFaster(Tier::Peer)]);
}

#[test]
fn a_lookup_is_found_by_the_engines_name_and_by_its_trace_even_if_others_answer_first() {
    let mut w = World::new(PEERS);
    let origin = Origin { request: Some("req-7".into()), trace_id: Some([7; 16]) };
    w.says(origin, Request::Lookup(w.ask("a")));
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    let other = World::ask(&w, "b");
    w.asks(w.session, Request::Lookup(Lookup { tiers: vec![Tier::Host], ..other }));
    w.next();
    w.tell(Event::HoldersFound { question, holders: vec![of(&[])] });
    w.next();
    let by = |filter: LookupFilter| w.core.lookups.last(&LookupFilter { most: 9, ..filter });
    let named = by(LookupFilter { request: Some("req-7".into()), ..LookupFilter::default() });
    assert_eq!((named.len(), &named[0].hashes[0]), (1, &name("a")));
    assert_eq!(by(LookupFilter { trace_id: Some([7; 16]), ..LookupFilter::default() }), named);
    assert!(by(LookupFilter { request: Some("req-8".into()), ..LookupFilter::default() }).is_empty());
    assert!(w.core.origins.is_empty(), "nothing is kept of requests that were answered");
}

#[test]
fn origins_of_a_session_that_ended_are_forgotten() {
    let mut w = World::new(PEERS);
    let origin = Origin { request: Some("gone".into()), trace_id: None };
    w.says(origin, Request::Lookup(w.ask("a")));
    assert_eq!(w.core.origins.len(), 1);
    w.tell(Event::Closed(w.session));
    assert!(w.core.origins.is_empty());
}

#[test]
fn nothing_is_kept_of_requests_that_are_refused() {
    let mut w = World::new(PEERS);
    let origin = Origin { request: Some("req-7".into()), trace_id: None };
    let unknown = Lookup { namespace: 999, ..w.ask("a") };
    w.says(origin.clone(), Request::Lookup(unknown.clone()));
    w.says(origin, Request::Prefetch(unknown));
    assert!(w.core.origins.is_empty());
}

#[test]
fn only_lookups_prefetches_and_leases_keep_their_origin() {
    let mut w = World::new(PEERS);
    let origin = Origin { request: Some("req-7".into()), trace_id: None };
    w.says(origin, Request::Progress(1));
    w.says(Origin::default(), Request::Lookup(w.ask("a")));
    assert!(w.core.origins.is_empty());
}

#[test]
fn the_same_tokens_in_another_namespace_are_named_with_the_fields_that_differ() {
    let hash = HashAlgorithm::Engine(EngineHash { name: "sha256_cbor".into(), seed: "0".into() });
    let asked = NamespaceSpec { hash, ..spec(1) };
    let other = NamespaceSpec { kv_dtype: "fp8_e4m3".into(), ..asked.clone() };
    let mut w = alone(16);
    let [asked, other] =
        [asked, other].map(|spec| w.core.register(w.session, &spec, &[0], &[BLOCK]).unwrap());
    w.namespace = other.namespace;
    w.root = other.root;
    w.put("a");
    let others = w.core.store.others_like(&asked.fingerprint, &name("a"));
    assert_eq!(others.len(), 1);
    assert_eq!((others[0].fingerprint, others[0].has_chunk), (other.fingerprint, Some(true)));
    assert_eq!(others[0].differing, ["kv_dtype"]);
    assert_eq!(w.core.store.others_like(&asked.fingerprint, &name("b"))[0].has_chunk, Some(false));
    assert!(w.core.store.others_like(&w.fingerprint, &name("a"))[0].has_chunk.is_none(), "hashed otherwise");
    let foreign = w.core.open_session(TenantId(1), ProcessId(9), 1 << 20);
    let foreign = w.core.register(foreign, &spec(1), &[0], &[BLOCK]).unwrap();
    assert!(w.core.store.others_like(&foreign.fingerprint, &name("a")).is_empty(), "another tenant's");
}

#[test]
fn what_the_store_has_of_a_prompt_now_is_said_without_a_lookup() {
    let mut w = alone(16);
    w.put("ab");
    let chain = w.chain("abcd");
    let reserve =
        Reserve { namespace: w.namespace, chain: chain.clone(), pools: Vec::new(), priority: 0, attempt: 0 };
    w.asks(w.session, Request::Reserve(Reserve { chain: w.chain("abc"), ..reserve }));
    w.next();
    let runs = w.core.store.has_of(&w.fingerprint, &chain.hashes).unwrap();
    let outcomes: Vec<_> = runs.iter().map(|run| (run.to, run.outcome)).collect();
    assert_eq!(outcomes, [(2, HERE), (3, ChunkOutcome::BeingWritten), (4, ChunkOutcome::Absent)]);
    assert!(w.core.store.has_of(&Fingerprint([0; 32]), &chain.hashes).is_none());
}

#[test]
fn a_prompt_says_what_keeps_its_chunks_in_memory_and_when_chunks_were_evicted_lately() {
    let mut w = alone(4);
    w.put("abc");
    w.put("x");
    let stays = |w: &World, word: &str| w.core.store.stays(&w.fingerprint, &w.chain(word).hashes);
    w.pass(Duration::from_secs(30));
    let stay = |from, to, keeper| Stay { from, to, keeper, idle_ms: 30_000 };
    let behind = stay(0, 2, Keeper::Continuation);
    assert_eq!(stays(&w, "abcd"), [behind, stay(2, 3, Keeper::Nothing)], "d is nowhere");
    assert_eq!(w.core.store.evicted_after_ms(), None);
    let (fingerprint, chain) = (w.fingerprint, w.chain("ab"));
    let now = crate::Millis(w.now.as_millis() as u64);
    let pinned = w.core.store.pin_for_admin(&fingerprint, &chain, 10_000, now).unwrap();
    w.pass(Duration::from_secs(4));
    let kept: Vec<_> = stays(&w, "abc").iter().map(|stay| stay.keeper).collect();
    assert_eq!(kept, [Keeper::Pin(6_000), Keeper::Nothing]);
    w.core.store.unpin_for_admin(pinned.pin).unwrap();
    w.put("y");
    w.put("z");
    assert_eq!(w.core.store.evicted_after_ms(), Some(34_000), "c and x had as long been idle");
}

#[test]
fn extents_are_used_as_their_memory_comes_and_a_miss_before_is_no_secret() {
    let mut w = alone(16);
    w.core.wait_for_memory();
    let reserve = |w: &mut World| {
        let chain = w.chain("a");
        w.core.store.reserve(w.session, w.namespace, &chain, 0, crate::Millis(0)).map(drop)
    };
    assert!(matches!(reserve(&mut w), Err(Refused::Busy { .. })), "there is no memory yet");
    assert_eq!(w.why("a"), [ChunkOutcome::Absent]);
    assert!(!w.core.store.remembered_evictions().is_cut(), "so it was never stored");
    let bytes = w.core.store.usage().bytes;
    assert_eq!((bytes.free, bytes.quarantined), (0, bytes.total));
    // A fault happens meanwhile: extents without memory stay out of use.
    w.core.begin_anew();
    w.tell(Event::ExtentRenewed(0));
    let bytes = w.core.store.usage().bytes;
    assert_eq!((bytes.free, bytes.free + bytes.quarantined), (limits().extent_bytes, bytes.total));
}

#[test]
fn the_first_extent_that_has_memory_takes_chunks() {
    let mut w = alone(16);
    w.core.wait_for_memory();
    w.tell(Event::ExtentRenewed(1));
    w.put("a");
    assert_eq!(w.why("a"), [HERE]);
    let bytes = w.core.store.usage().bytes;
    assert_eq!((bytes.used, bytes.free), (BLOCK, limits().extent_bytes - BLOCK));
}
