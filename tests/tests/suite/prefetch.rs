//! Prefetches: chunks from memory, disk and a peer come at once while the engine does something else.

use std::time::Duration;

use larder_client::LookupOptions;
use larder_protocol::ChunkHash;
use larder_protocol::session::{Tier, Wait};
use larder_protocol::table::RowKey;
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, block, prompt};
use larder_tests::impostor::{Impostor, Manners, THROTTLED_BLOCKS_PER_SECOND};
use larder_tests::wait;

use super::{Engine, LARDER};

const DISK: &str = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"16MiB\"\nsegment_bytes = \"1MiB\"\n";

/// Two nodes. The first has the beginning of a prompt of 30 chunks in memory and the middle on disk; the second has the end.
struct Spread {
    cluster: Cluster,
    hashes: Vec<ChunkHash>,
}

fn tokens(chunks: u64) -> u64 {
    chunks * u64::from(CHUNK_TOKENS)
}

impl Spread {
    fn new() -> Self {
        let mut cluster = Cluster::start_with(LARDER, 2, 60, DISK).unwrap();
        let hashes = prompt(b'p', 30);
        Engine::connect(&cluster.socket(1)).put(&hashes);
        Engine::connect(&cluster.socket(0)).put(&hashes[..20]);
        let on_disk = || cluster.node(0).metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}");
        wait::until("the first node has its part on disk", || (on_disk() >= 20.0).then_some(()));
        // After its restart the node has only the middle, on disk. Then the beginning is read into memory.
        cluster.restart_node(0).unwrap();
        let engine = Engine::connect(&cluster.socket(0));
        wait::until("it finds all of the prompt", || {
            (engine.find(&hashes, 10_000) == tokens(30)).then_some(())
        });
        assert_eq!(engine.get(&hashes[..10]), 10);
        drop(engine);
        Self { cluster, hashes }
    }

    fn engine(&self) -> Engine {
        Engine::connect(&self.cluster.socket(0))
    }

    fn held(&self, what: &str) -> f64 {
        // The status brings the gauges up to date.
        self.cluster.node(0).get("/status").unwrap();
        self.cluster.node(0).metric(&format!("larder_held{{device=\"0\",what=\"{what}\"}}"))
    }
}

fn options() -> LookupOptions {
    LookupOptions { prompt_tokens: 10_000, ..LookupOptions::default() }
}

/// As [`options`], for an engine that computes this many tokens a second.
fn computing(tokens_per_second: f64) -> LookupOptions {
    LookupOptions { prefill_tokens_per_second: Some(tokens_per_second), ..options() }
}

/// Checks that every byte of the leased chunks is right. Returns the number of chunks.
fn check(lease: &larder_client::LeaseGuard, hashes: &[ChunkHash]) -> usize {
    for (position, hash) in hashes.iter().enumerate().take(lease.chunks()) {
        let mut bytes = vec![0; BLOCK_BYTES];
        lease.copy_block(position, 0, &mut bytes).unwrap();
        assert!(bytes == block(hash), "wrong bytes under {hash}");
    }
    lease.chunks()
}

#[test]
fn a_prefetch_brings_a_prompt_from_memory_disk_and_a_peer_and_tells_how_far_it_is() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    let tiers: Vec<Tier> = ticket.found().spans.iter().map(|span| span.tier).collect();
    assert_eq!(tiers, [Tier::Host, Tier::Disk, Tier::Peer]);
    assert_eq!((ticket.tokens(), ticket.tokens_to_recompute()), (tokens(30), 0));
    wait::until("all has come", || {
        let progress = engine.session.progress(&ticket).wait().unwrap();
        assert!(progress.tokens_in_place >= tokens(10) && progress.tokens_expected == tokens(30));
        progress.is_done.then_some(())
    });
    let lease = engine.session.collect(ticket, Wait::BestEffort).wait().unwrap();
    assert_eq!(check(&lease, &spread.hashes), 30);
    assert_eq!(spread.held("leases"), 1.0);
    drop(lease);
    wait::until("the lease is given back", || (spread.held("leases") == 0.0).then_some(()));
}

#[test]
fn an_engine_waits_as_long_as_it_says() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    let at_once = engine.session.collect(ticket, Wait::BestEffort).wait().unwrap();
    assert!(check(&at_once, &spread.hashes) >= 10, "what was in memory is there at once");
    drop(at_once);
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    let complete = engine.session.collect(ticket, Wait::Complete).wait().unwrap();
    assert_eq!(check(&complete, &spread.hashes), 30);
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    let in_time = engine.session.collect(ticket, Wait::TimeoutMs(5_000)).wait().unwrap();
    assert_eq!(check(&in_time, &spread.hashes), 30);
}

#[test]
fn only_named_tiers_are_searched_and_a_request_that_cannot_use_a_hit_brings_nothing() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    let near = LookupOptions { tiers: vec![Tier::Host, Tier::Disk], ..options() };
    let ticket = engine.session.prefetch(&engine.namespace, &chain, near).wait().unwrap();
    assert_eq!(ticket.tokens(), tokens(20));
    drop(ticket);
    let unusable = LookupOptions { skip_read: true, ..options() };
    let ticket = engine.session.prefetch(&engine.namespace, &chain, unusable).wait().unwrap();
    assert_eq!((ticket.found().tokens, ticket.tokens()), (0, 0));
    assert_eq!(engine.session.collect(ticket, Wait::Complete).wait().unwrap().chunks(), 0);
    assert!(spread.cluster.node(0).metric("larder_tokens_skipped_total") >= 10_000.0);
}

#[test]
fn what_is_pinned_on_a_prefetch_stays() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    let pinning = LookupOptions { pin: Some(Duration::from_secs(60)), ..options() };
    let ticket = engine.session.prefetch(&engine.namespace, &chain, pinning).wait().unwrap();
    assert!(ticket.found().pin.is_some());
    drop(ticket);
    assert_eq!(spread.held("pins"), 1.0);
}

#[test]
fn a_cancelled_prefetch_leaves_nothing_and_so_does_a_session_that_ends() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    for _ in 0..20 {
        drop(engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap());
    }
    let kept = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    drop(engine);
    drop(kept);
    let nothing = || {
        let arena = |state: &str| {
            spread.cluster.node(0).metric(&format!("larder_arena_bytes{{device=\"0\",state=\"{state}\"}}"))
        };
        let held = ["leases", "fetches", "grants"].map(|what| spread.held(what));
        (held == [0.0; 3] && arena("passing") == 0.0 && arena("quarantined") == 0.0).then_some(())
    };
    wait::until("nothing is held", nothing);
    assert_eq!(spread.engine().get(&spread.hashes), 30, "all of it can still be had");
}

#[test]
fn where_computing_is_faster_nothing_is_brought_and_the_answer_says_so() {
    let spread = Spread::new();
    let engine = spread.engine();
    let chain = engine.namespace.chain(spread.hashes.clone());
    // This prefetch measures disk and peer.
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    assert_eq!(ticket.tokens(), tokens(30));
    engine.session.collect(ticket, Wait::Complete).wait().unwrap().release();
    // Memory holds 60 chunks: this pushes the prompt out, to disk and to the peer.
    engine.put(&prompt(b'x', 60));
    wait::until("the prompt is on disk alone", || {
        let found = engine.session.lookup(&engine.namespace, &chain, options()).wait().unwrap();
        found.spans.first().is_some_and(|span| span.tier == Tier::Disk).then_some(())
    });
    let fast = engine.session.prefetch(&engine.namespace, &chain, computing(1e12)).wait().unwrap();
    assert_eq!(fast.tokens(), 0, "an engine that computes as fast as this waits for nothing");
    assert_eq!(fast.tokens_to_recompute(), fast.found().tokens);
    let slow = engine.session.prefetch(&engine.namespace, &chain, computing(1.0)).wait().unwrap();
    assert_eq!((slow.tokens(), slow.tokens_to_recompute()), (slow.found().tokens, 0));
    // Only loaded chunks need not be computed; the fast engine loads nothing.
    let avoided = spread.cluster.node(0).metric("larder_recompute_avoided_seconds_total");
    assert_eq!(avoided, slow.tokens() as f64);
}

#[test]
fn with_a_throttled_peer_the_choice_flips_where_the_arithmetic_says() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let engine = Engine::connect(&cluster.socket(0));
    let prompts = [b'a', b'b', b'c'].map(|name| engine.namespace.chain(prompt(name, 30)));
    let fingerprint = engine.namespace.fingerprint();
    let rows_of = |chain: &larder_protocol::Chain| -> Vec<RowKey> {
        (0..30).map(|position| RowKey::new(&fingerprint, &chain.chunk(position))).collect()
    };
    let rows = prompts.iter().flat_map(rows_of).collect();
    let _peer = Impostor::join(&cluster, "throttled", rows, Manners::IsThrottled).unwrap();
    let [measured, slower, faster] = &prompts;
    wait::until("the peer is believed", || {
        let found = engine.session.lookup(&engine.namespace, measured, options()).wait().unwrap();
        (found.tokens == tokens(30)).then_some(())
    });
    let ticket = engine.session.prefetch(&engine.namespace, measured, options()).wait().unwrap();
    assert_eq!(engine.session.collect(ticket, Wait::Complete).wait().unwrap().chunks(), 30);

    // One block for each chunk: at this speed the engine computes chunks as fast as they come.
    let even = f64::from(THROTTLED_BLOCKS_PER_SECOND * CHUNK_TOKENS);
    let ticket = engine.session.prefetch(&engine.namespace, slower, computing(even / 4.0)).wait().unwrap();
    assert_eq!((ticket.tokens(), ticket.tokens_to_recompute()), (tokens(30), 0));
    let lease = engine.session.collect(ticket, Wait::Complete).wait().unwrap();
    assert_eq!(check(&lease, &prompt(b'b', 30)), 30);
    let ticket = engine.session.prefetch(&engine.namespace, faster, computing(even * 4.0)).wait().unwrap();
    assert_eq!((ticket.tokens(), ticket.tokens_to_recompute()), (0, tokens(30)));
}
