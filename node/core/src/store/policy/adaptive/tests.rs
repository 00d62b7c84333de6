//! Tests that the policy learns, and that it keeps its rules whatever happens.

use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::store::policy::PolicyName;
use crate::store::replay::{TraceRequest, replay_after};

fn facts(place: usize, index: u32) -> Facts {
    Facts {
        short_hash: 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(place as u64 + 1),
        index,
        priority: 0,
        parent: None,
    }
}

/// Returns which of two chunks is evicted first. Both are used equally often, in turn; `DEAR` costs more to recompute.
fn first_to_go(recompute_doubles_at: Option<NonZeroU32>, uses: usize) -> usize {
    let mut policy = Adaptive::policy(recompute_doubles_at);
    for (chunk, index) in [(ChunkNumber::at(DEAR), 1_000), (ChunkNumber::at(CHEAP), 0)] {
        policy.insert(chunk, facts(chunk.position(), index));
    }
    for _ in 0..uses {
        [DEAR, CHEAP].into_iter().for_each(|chunk| policy.touch(ChunkNumber::at(chunk)));
    }
    policy.victim(&mut |_| Verdict::Take).unwrap().position()
}

#[test]
fn of_two_equally_likely_chunks_the_one_that_costs_less_to_recompute_goes_first_where_asked() {
    for uses in [0, 1, 5, 300] {
        assert_eq!(first_to_go(None, uses), DEAR, "by age alone");
        assert_eq!(first_to_go(NonZeroU32::new(128), uses), CHEAP);
    }
}

#[test]
fn a_chunk_that_comes_from_another_node_keeps_its_age() {
    let mut policy = Adaptive::policy(None);
    policy.insert(ChunkNumber::at(2), facts(2, 0));
    for step in 0..3_000 {
        policy.is_now(step * 100);
        policy.touch(ChunkNumber::at(2));
    }
    for (chunk, facts) in [(ChunkNumber::at(0), facts(0, 0)), (ChunkNumber::at(1), facts(1, 0))] {
        policy.insert(chunk, facts);
    }
    policy.was_idle(ChunkNumber::at(1), 60_000);
    policy.block(ChunkNumber::at(2));
    assert_eq!(policy.victim(&mut |_| Verdict::Take), Some(ChunkNumber::at(1)), "though it came last");
}

const DEAR: usize = 0;
const CHEAP: usize = 1;

/// Steps of any kind on a few chunks.
#[derive(Debug, Clone, Copy)]
enum Step {
    Insert { parent: bool },
    Touch,
    Remove { evicted: bool },
    Block,
    Unblock,
    Victim { skip: bool },
    Later { ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<(Step, usize)>> {
    let step = prop_oneof![
        6 => any::<bool>().prop_map(|parent| Step::Insert { parent }),
        6 => Just(Step::Touch),
        2 => any::<bool>().prop_map(|evicted| Step::Remove { evicted }),
        3 => Just(Step::Block),
        3 => Just(Step::Unblock),
        6 => any::<bool>().prop_map(|skip| Step::Victim { skip }),
        2 => (0..100_000_u64).prop_map(|ms| Step::Later { ms }),
    ];
    prop::collection::vec((step, 0..120_usize), 1..3_000)
}

/// Plays steps, and returns the victims. Checks that each victim may be evicted and was not refused, and that a victim is found
/// whenever a chunk may be evicted.
fn played(steps: &[(Step, usize)]) -> Vec<Option<usize>> {
    let mut policy = Adaptive::policy(NonZeroU32::new(3));
    let mut model: Vec<Option<bool>> = vec![None; 120];
    let (mut now_ms, mut victims) = (0, Vec::new());
    for &(step, place) in steps {
        let chunk = ChunkNumber::at(place);
        match (step, model[place]) {
            (Step::Insert { parent }, None) => {
                let parent = parent.then(|| ChunkNumber::at((place + 1) % 200));
                policy.insert(chunk, Facts { parent, ..facts(place, place as u32 % 7) });
                model[place] = Some(true);
            }
            (Step::Touch, Some(_)) => policy.touch(chunk),
            (Step::Remove { evicted }, Some(_)) => {
                policy.remove(chunk, if evicted { Removal::Evicted } else { Removal::Dropped });
                model[place] = None;
            }
            (Step::Block, Some(true)) => {
                policy.block(chunk);
                model[place] = Some(false);
            }
            (Step::Unblock, Some(false)) => {
                policy.unblock(chunk);
                model[place] = Some(true);
            }
            (Step::Later { ms }, _) => {
                now_ms += ms;
                policy.is_now(now_ms);
            }
            (Step::Victim { skip }, _) => {
                let is_odd = |place: usize| skip && place % 2 == 1;
                let judge = &mut |chunk: ChunkNumber| match is_odd(chunk.position()) {
                    true => Verdict::Skip,
                    false => Verdict::Take,
                };
                let victim = policy.victim(judge).map(ChunkNumber::position);
                let may_go = |place: usize| model[place] == Some(true) && !is_odd(place);
                assert_eq!(victim.is_some(), (0..model.len()).any(may_go));
                assert!(victim.is_none_or(may_go), "{victim:?}");
                victims.push(victim);
            }
            _ => {}
        }
    }
    let mut order: Vec<usize> = policy.order().into_iter().map(ChunkNumber::position).collect();
    order.sort_unstable();
    let present: Vec<usize> = (0..model.len()).filter(|&place| model[place].is_some()).collect();
    assert_eq!(order, present);
    victims
}

proptest! {
    /// Victims may be evicted, a victim is found whenever a chunk may be evicted, and the same steps have the same victims.
    #[test]
    fn victims_may_go_and_histories_repeat(steps in steps()) {
        prop_assert_eq!(played(&steps), played(&steps));
    }
}

#[test]
fn a_search_that_is_stopped_finds_nothing() {
    let mut policy = Adaptive::policy(None);
    for place in 0..100 {
        policy.insert(ChunkNumber::at(place), facts(place, 0));
    }
    let mut seen = 0;
    let victim = policy.victim(&mut |_| {
        seen += 1;
        if seen < 80 { Verdict::Skip } else { Verdict::Stop }
    });
    assert_eq!((victim, seen), (None, 80));
}

/// Ten sessions, each with a prompt of ten chunks that comes back every 20 seconds, among prompts of strangers that never come
/// back.
fn sessions_among_strangers() -> Vec<TraceRequest> {
    let mut requests = Vec::new();
    for round in 0..60_u64 {
        for place in 0..50_u64 {
            let at_ms = round * 20_000 + place * 400;
            let first = if place % 5 == 0 { place * 1_000 } else { 1_000_000 + (round * 50 + place) * 1_000 };
            requests.push(TraceRequest { at_ms, tokens: 161, blocks: (first..first + 10).collect() });
        }
    }
    requests
}

#[test]
fn sessions_that_come_back_by_the_clock_are_kept_where_strangers_push_them_out_of_lru() {
    let requests = sessions_among_strangers();
    // Ten sessions have 100 chunks; in 20 seconds strangers bring 400.
    let hits = |policy| replay_after(&requests, 1_000, 16, 250, policy, false).tokens_hit;
    assert_eq!(hits(PolicyName::Lru), 0);
    let all = 2_000 / 5 * 160;
    assert!(hits(PolicyName::Adaptive) > all * 8 / 10, "{} of {all} tokens", hits(PolicyName::Adaptive));
}

/// Half an hour of chats. Each turn comes 40 seconds after the turn before, on average, and adds chunks to the prompt.
fn chats(seed: u64) -> Vec<TraceRequest> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut requests, mut names, mut starts_at) = (Vec::new(), 0..u64::MAX, 0.0);
    while starts_at < 1_800_000.0 {
        let mut some = |mean: f64| -mean * rng.f64().max(1e-9).ln();
        starts_at += some(2_500.0);
        let (mut at_ms, turns) = (starts_at, some(5.0) as usize + 1);
        let mut blocks: Vec<u64> = names.by_ref().take(some(6.0) as usize + 2).collect();
        for _ in 0..turns {
            let tokens = 16 * blocks.len() as u64 + 1;
            requests.push(TraceRequest { at_ms: at_ms as u64, tokens, blocks: blocks.clone() });
            blocks.extend(names.by_ref().take(some(2.0) as usize + 1));
            at_ms += some(40_000.0);
        }
    }
    requests.sort_by_key(|request| request.at_ms);
    requests
}

#[test]
fn where_only_recency_tells_little_is_lost_to_lru() {
    for seed in 1..=3 {
        let requests = chats(seed);
        let rate = |policy| {
            let replayed = replay_after(&requests, 0, 16, 800, policy, false);
            replayed.tokens_hit as f64 / replayed.tokens_asked as f64
        };
        let lead = rate(PolicyName::Adaptive) - rate(PolicyName::Lru);
        assert!(lead > -0.003, "seed {seed}: {lead}");
    }
}
