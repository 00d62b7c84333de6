//! Random hybrid namespaces: compares lookups, leases and pins with the definition of a restorable prefix.

use std::collections::BTreeMap;

use larder_protocol::PoolSet;

use super::super::ids::NamespaceId;
use super::super::index::Block;
use super::model::prefixes;
use super::pools::hybrid;
use super::*;

/// The definition in its simplest and slowest form: the greatest length at which every pool has the chunks that it needs.
fn longest(hits: &[HitPolicy], held: &[PoolSet]) -> usize {
    let can_be_restored = |length: &usize| {
        hits.iter().enumerate().all(|(pool, hit)| {
            let from = match *hit {
                HitPolicy::All => 0,
                HitPolicy::Window(chunks) => length.saturating_sub(chunks as usize),
                HitPolicy::Last => length - 1,
            };
            (from..*length).all(|position| held[position].has(pool))
        })
    };
    (1..=held.len()).filter(can_be_restored).max().unwrap_or(0)
}

#[test]
fn random_hybrid_prefixes_restore_at_the_longest_legal_boundary_and_at_no_other() {
    let words = ["abcdef", "abcxyz", "abq", "pqrstu", "pqzzz", "mnopqrst", "a"];
    for seed in 0..400 {
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut hits = vec![HitPolicy::All];
        for _ in 0..rng.usize(..4) {
            let window = HitPolicy::Window(rng.u32(1..5));
            hits.push([HitPolicy::All, HitPolicy::Last, window, window][rng.usize(..4)]);
        }
        let mut f = Fixture::with_spec(limits(96, rng.u64(4..20)), &hybrid(&hits, 1));
        let every = PoolSet::first(hits.len());
        let mut pinned = Vec::new();
        for _ in 0..60 {
            let word = words[rng.usize(..words.len())];
            let word = &word[..rng.usize(1..=word.len())];
            let pools: Vec<u8> = word.chars().map(|_| rng.u8(..) & rng.u8(..) & every.0).collect();
            match rng.u8(..8) {
                0..5 => drop(f.try_reserve(word, &pools).map(|reserved| f.commit(&reserved))),
                5 => drop(f.try_reserve(word, &pools).map(|r| f.store.abort(f.session, r.reservation))),
                6 => {
                    let leased = f.lease(word);
                    pinned.extend((leased.lease > 0).then_some(leased.lease));
                }
                _ => drop(pinned.pop().map(|lease| f.store.release(f.session, lease).unwrap())),
            }
            f.store.assert_consistent();
            assert_agrees(&mut f, &hits, &words);
        }
        pinned.into_iter().for_each(|lease| f.store.release(f.session, lease).unwrap());
        f.store.assert_consistent();
        let usage = f.store.usage();
        assert_eq!((usage.bytes.used, usage.leases, usage.reservations), (usage.cached_bytes, 0, 0));
    }
}

/// Asserts that lookups, leases and their places follow from the definition and the blocks in the index.
fn assert_agrees(f: &mut Fixture, hits: &[HitPolicy], words: &[&str]) {
    let number = NamespaceId::of(f.namespace);
    let mut held = BTreeMap::new();
    for word in words.iter().flat_map(|word| prefixes(word)) {
        let blocks = f.store.index.find(number, &name(&word)).map(|id| &f.store.index.get(id).blocks);
        let is_ready = |pool: &usize| blocks.is_some_and(|blocks| matches!(blocks[*pool], Block::Ready(..)));
        held.insert(word, (0..hits.len()).filter(is_ready).fold(PoolSet::default(), PoolSet::with));
    }
    for word in words {
        let of_word: Vec<PoolSet> = prefixes(word).iter().map(|prefix| held[prefix]).collect();
        let expected = longest(hits, &of_word);
        assert_eq!(f.found(word), expected as u64, "{word} of {hits:?} with {of_word:?}");
        let needed: usize = hits
            .iter()
            .map(|hit| match *hit {
                HitPolicy::All => expected,
                HitPolicy::Window(chunks) => expected.min(chunks as usize),
                HitPolicy::Last => expected.min(1),
            })
            .sum();
        let chain = f.chain(word);
        let peek = f.store.pin(f.session, f.namespace, &chain, 1, NOW).unwrap();
        assert_eq!(peek.chunks as usize, expected);
        if peek.pin > 0 {
            f.store.unpin(f.session, peek.pin).unwrap();
        }
        assert_eq!(f.leased(word), (expected as u32, needed));
    }
}
