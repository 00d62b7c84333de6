//! Tests which chunk each policy evicts first, seen through the store, and the hits of the policies on real traces.

use serde::Deserialize;

use super::*;
use crate::store::replay::{TraceRequest, replay};

/// Puts `a`, `b` and `c` in this order, makes these uses, and puts `d`. Returns which of `a`, `b` and `c` are left.
fn left(policy: PolicyName, uses: &str) -> String {
    let mut f = Fixture::new(StoreLimits { policy, ..limits(8, 3) });
    "abc".chars().for_each(|letter| f.put(&letter.to_string()));
    for letter in uses.chars() {
        let lease = f.lease(&letter.to_string()).lease;
        f.store.release(f.session, lease).unwrap();
    }
    f.put("d");
    assert_eq!(f.found("d"), 1);
    f.store.assert_consistent();
    "abc".chars().filter(|letter| f.found(&letter.to_string()) == 1).collect()
}

#[test]
fn fifo_and_filo_look_at_insertions_only() {
    assert_eq!((left(PolicyName::Fifo, "aab"), left(PolicyName::Filo, "aab")), ("bc".into(), "ab".into()));
}

#[test]
fn lru_and_mru_look_at_the_last_use() {
    assert_eq!((left(PolicyName::Lru, "acb"), left(PolicyName::Mru, "acb")), ("bc".into(), "ac".into()));
}

#[test]
fn lfu_lets_the_fewest_hits_go_and_among_equals_the_least_recent() {
    assert_eq!(left(PolicyName::Lfu, "aacb"), "ab");
    assert_eq!(left(PolicyName::Lfu, "aabcb"), "ab");
}

#[test]
fn slru_lets_go_what_was_not_used_twice_and_then_the_least_recent() {
    assert_eq!(left(PolicyName::Slru, "ab"), "ab", "storing is the first use");
    assert_eq!(left(PolicyName::Slru, "bca"), "ac");
}

#[test]
fn priority_lets_the_lowest_go() {
    let mut f = Fixture::new(StoreLimits { policy: PolicyName::Priority, ..limits(8, 3) });
    for (word, priority) in [("a", 1), ("b", -1), ("c", 0), ("d", 0)] {
        let chain = f.chain(word);
        let reserved = f.store.reserve(f.session, f.namespace, &chain, priority, NOW).unwrap();
        let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0]).unwrap();
        f.store.finish_commit(order.order, Some(sums(&order)));
    }
    assert_eq!(["a", "b", "c", "d"].map(|word| f.found(word)), [1, 0, 1, 1]);
}

#[test]
fn sieve_spares_what_was_used_since_its_hand_passed() {
    assert_eq!((left(PolicyName::Sieve, "a"), left(PolicyName::Sieve, "abc")), ("ac".into(), "bc".into()));
}

#[test]
fn arc_lets_go_what_was_used_once_before_what_was_used_again() {
    assert_eq!(left(PolicyName::Arc, "ab"), "ab");
}

/// Whether a chunk that was used often survives a scan of chunks that are used once.
fn survives_a_scan(policy: PolicyName) -> bool {
    let mut f = Fixture::new(StoreLimits { policy, ..limits(64, 20) });
    f.put("k");
    for n in 0..30 {
        let lease = f.lease("k").lease;
        f.store.release(f.session, lease).unwrap();
        f.put(&format!("{n}")[..1]);
    }
    ('A'..='Z').chain('l'..='z').for_each(|letter| f.put(&letter.to_string()));
    f.found("k") == 1
}

#[test]
fn the_policies_that_resist_scans_do() {
    use PolicyName::{Arc, Fifo, Lfu, Lru, S3Fifo, Sieve, Slru, WTinyLfu};
    assert_eq!([Arc, S3Fifo, Sieve, Slru, Lfu, WTinyLfu].map(survives_a_scan), [true; 6]);
    assert_eq!([Fifo, Lru].map(survives_a_scan), [false; 2]);
}

/// Requests that ask for `prompts` prompts of five chunks in turn. Each request also has a chunk of its own.
fn cycle(prompts: u64, requests: u64) -> Vec<TraceRequest> {
    let request = |n: u64| {
        let mut blocks: Vec<u64> = (0..5).map(|block| n % prompts * 5 + block).collect();
        blocks.push(1_000_000 + n);
        TraceRequest { at_ms: n * 100, tokens: 6 * 16, blocks }
    };
    (0..requests).map(request).collect()
}

#[test]
fn adaptive_keeps_a_part_where_lru_keeps_nothing_in_time() {
    let requests = cycle(200, 4_000);
    let hits = |policy| replay(&requests, 16, 600, policy, true).blocks_hit;
    let (lru, adaptive) = (hits(PolicyName::Lru), hits(PolicyName::Adaptive));
    assert_eq!(lru, 0);
    assert!(adaptive > 4_000, "{adaptive} of 19,000 that could be");
}

#[test]
fn the_replay_counts_what_partial_blocks_and_the_last_token_say() {
    let request = |tokens, blocks: &[u64]| TraceRequest { at_ms: 0, tokens, blocks: blocks.to_vec() };
    let requests = [request(40, &[1, 2, 3]), request(40, &[1, 2, 3]), request(32, &[1, 2])];
    let partial = replay(&requests, 16, 10, PolicyName::Lru, true);
    assert_eq!((partial.blocks_asked, partial.blocks_hit, partial.tokens_hit), (8, 5, 72));
    let full = replay(&requests, 16, 10, PolicyName::Lru, false);
    assert_eq!((full.blocks_asked, full.blocks_hit, full.tokens_asked, full.tokens_hit), (6, 3, 112, 48));
}

#[test]
fn real_traces_give_what_they_must() {
    let expected = [
        (
            "conversation",
            [(1_000, 4.45), (3_000, 6.53), (10_000, 21.16), (30_000, 32.57)],
            [7.5, 13.2, 23.2, 33.3],
        ),
        (
            "synthetic",
            [(1_000, 8.41), (3_000, 19.06), (10_000, 42.39), (30_000, 62.42)],
            [9.2, 19.9, 45.1, 62.35],
        ),
        (
            "agents",
            [(300, 20.71), (1_000, 45.89), (3_000, 82.82), (10_000, 95.95)],
            [21.1, 50.6, 83.3, 95.85],
        ),
    ];
    for (name, lru, adaptive) in expected {
        let Some(requests) = trace(name) else { continue };
        for ((capacity, lru), adaptive) in lru.into_iter().zip(adaptive) {
            let rate = |policy| {
                let replayed = replay(&requests, 512, capacity, policy, true);
                100.0 * replayed.blocks_hit as f64 / replayed.blocks_asked as f64
            };
            assert!((rate(PolicyName::Lru) - lru).abs() < 0.005_1, "{name} {capacity}");
            assert!(
                rate(PolicyName::Adaptive) >= adaptive,
                "{name} {capacity}: {}",
                rate(PolicyName::Adaptive)
            );
        }
    }
}

#[test]
fn adaptive_is_never_a_tenth_of_a_point_below_lru_at_any_capacity() {
    let published =
        ["conversation", "synthetic", "agents"].into_iter().filter_map(|name| Some((name, trace(name)?)));
    let cycles =
        [("20 in turn", 20), ("500 in turn", 500)].map(|(name, prompts)| (name, cycle(prompts, 4_000)));
    for (name, requests) in published.chain(cycles) {
        for capacity in [300, 2_000, 6_000, 15_000, 50_000] {
            let [lru, adaptive] = [PolicyName::Lru, PolicyName::Adaptive].map(|policy| {
                let replayed = replay(&requests, 512, capacity, policy, true);
                100.0 * replayed.blocks_hit as f64 / replayed.blocks_asked as f64
            });
            println!("{name} {capacity}: lru {lru:.2}, adaptive {adaptive:.2}");
            assert!(adaptive >= lru - 0.1, "{name} {capacity}: lru {lru:.2}, adaptive {adaptive:.2}");
        }
    }
}

/// A published trace, where this machine has it.
fn trace(name: &str) -> Option<Vec<TraceRequest>> {
    #[derive(Deserialize)]
    struct Line {
        timestamp: u64,
        input_length: u64,
        hash_ids: Vec<u64>,
    }
    let text = std::fs::read_to_string(larder_skips::published_trace(name)?).unwrap();
    let request = |line| {
        let Line { timestamp, input_length, hash_ids } = serde_json::from_str(line).unwrap();
        TraceRequest { at_ms: timestamp, tokens: input_length, blocks: hash_ids }
    };
    Some(text.lines().map(request).collect())
}
