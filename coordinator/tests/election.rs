//! Elections: over a register that answers at once, and over one that loses, delays and stops.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use larder_coordinator::election::{
    Candidate, Election, Record, RegisterAnswer, RegisterOp, Reign, Timing, Version,
};
use larder_coordinator::membership::Millis;

const TIMING: Timing = Timing { lease_ms: 6_000, renew_within_ms: 4_000, retry_ms: 1_000, silence_ms: 1_500 };

fn candidate(life: u64) -> Candidate {
    Candidate { life, peer: format!("c-{life}:7601"), http: format!("c-{life}:7600") }
}

fn election(life: u64) -> Election {
    Election::new(candidate(life), TIMING, 0)
}

/// A register that answers at once.
#[derive(Default)]
struct Register {
    record: Option<Record>,
    version: u64,
}

impl Register {
    fn answer(&mut self, ask: RegisterOp) -> RegisterAnswer {
        let version = Version(self.version.to_string());
        match ask {
            RegisterOp::Read => RegisterAnswer::Found(self.record.clone().map(|record| (version, record))),
            RegisterOp::Write(record, over) => {
                if over != self.record.is_some().then_some(version) {
                    return RegisterAnswer::Conflict;
                }
                self.version += 1;
                self.record = Some(record);
                RegisterAnswer::Written(Version(self.version.to_string()))
            }
        }
    }

    /// Lets a coordinator ask for as long as it has questions.
    fn serve(&mut self, election: &mut Election, now: Millis) {
        while let Some(ask) = election.poll(now) {
            let answer = self.answer(ask);
            election.answer(answer, now);
        }
    }
}

/// When a leader that gets no answers from now on stops leading.
fn lasts(leader: &mut Election, from: Millis) -> Millis {
    (from..)
        .find(|&now| {
            if leader.poll(now).is_some() {
                leader.answer(RegisterAnswer::Failed, now);
            }
            leader.reign(now).is_none()
        })
        .unwrap()
}

/// Lets a follower look at the register and ask the leader. The leader answers until it dies at `dies`. Returns when the
/// follower leads.
fn takes_over(
    register: &mut Register,
    follower: &mut Election,
    from: Millis,
    dies: Millis,
) -> Option<Millis> {
    (from..from + 30_000).find(|&now| {
        if let Some(leader) = follower.poll_leader(now)
            && now < dies
        {
            follower.hear_leader(leader.life);
        }
        register.serve(follower, now);
        follower.reign(now).is_some()
    })
}

#[test]
fn a_leader_that_answers_no_more_and_renews_no_more_is_followed_soon() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    let led = takes_over(&mut register, &mut second, 300, 900);
    // The follower asks each half second: at 801 with success, and at 1301 in vain.
    assert_eq!((led, second.reign(2_801).map(|reign| reign.term)), (Some(2_801), Some(2)));
    // The first one wakes up: its right is over, and the register says who leads.
    assert_eq!(first.reign(2_801), None);
    register.serve(&mut first, 2_900);
    assert_eq!((first.reign(2_900), first.leader(2_900)), (None, Some(&candidate(2))));
}

#[test]
fn a_leader_that_renews_is_never_replaced_whoever_cannot_reach_it() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    for now in 0..60_000 {
        register.serve(&mut first, now);
        if let Some(leader) = second.poll_leader(now)
            && now < 5_000
        {
            second.hear_leader(leader.life);
        }
        register.serve(&mut second, now);
        assert_eq!(first.reign(now).map(|reign| reign.term), Some(1));
    }
}

#[test]
fn a_leader_that_answers_keeps_its_lease_while_it_cannot_renew_it() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    assert_eq!(takes_over(&mut register, &mut second, 500, Millis::MAX), Some(6_500));
}

#[test]
fn only_the_lease_counts_of_a_leader_that_never_answered() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    assert_eq!(takes_over(&mut register, &mut second, 500, 0), Some(6_500));
}

#[test]
fn two_that_cannot_reach_each_other_do_not_take_the_lease_from_each_other() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    // The first one lives, but is cut off for a moment. Later it reaches the register, but the two coordinators still do not
    // reach each other.
    assert_eq!(takes_over(&mut register, &mut second, 300, 900), Some(2_801));
    for now in 2_801..60_000 {
        for election in [&mut second, &mut first] {
            // The leader does not answer.
            let _ = election.poll_leader(now);
            register.serve(election, now);
        }
        assert_eq!((first.reign(now), second.reign(now).map(|reign| reign.term)), (None, Some(2)));
    }
}

#[test]
fn a_follower_that_stood_still_waits_for_answers_before_it_misses_the_leader() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    assert_eq!(takes_over(&mut register, &mut second, 0, Millis::MAX).filter(|&led| led < 6_000), None);
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    for now in 0..1_200 {
        if let Some(leader) = second.poll_leader(now)
            && now < 1_000
        {
            second.hear_leader(leader.life);
        }
        register.serve(&mut second, now);
    }
    // The second one asked at 1000, and stands still from 1200 to 4000.
    register.serve(&mut second, 4_000);
    assert!(second.reign(4_000).is_none() && !second.misses_leader(5_499));
    assert!(second.misses_leader(5_500));
}

#[test]
fn a_leader_that_stood_still_leads_on_once_the_register_has_confirmed_it() {
    let (mut register, mut first) = (Register::default(), election(1));
    register.serve(&mut first, 0);
    assert_eq!(first.reign(1_499).map(|reign| reign.term), Some(1));
    assert_eq!(first.reign(1_500), None, "another one may lead by now");
    assert_eq!(first.poll(1_600), Some(RegisterOp::Read));
    assert_eq!(first.reign(1_600), None);
    let answer = register.answer(RegisterOp::Read);
    first.answer(answer, 1_600);
    assert_eq!(first.reign(1_600), None);
    register.serve(&mut first, 1_600);
    assert_eq!(
        first.reign(1_600).map(|reign| reign.term),
        Some(1),
        "in its term: nobody else took the record"
    );
}

#[test]
fn a_renewal_from_before_a_leader_stood_still_does_not_let_it_lead() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    let ask = first.poll(1_000).unwrap();
    let answer = register.answer(ask);
    assert_eq!(takes_over(&mut register, &mut second, 1_000, 1_002), Some(3_001));
    // The answer has waited for the leader that stood still.
    first.answer(answer, 3_500);
    assert_eq!(first.reign(3_500), None);
    register.serve(&mut first, 3_500);
    assert_eq!((first.reign(3_500), first.leader(3_500)), (None, Some(&candidate(2))));
}

#[test]
fn the_first_leads_at_once_and_for_as_long_as_it_renews() {
    let (mut register, mut first) = (Register::default(), election(1));
    for now in 0..20_000 {
        register.serve(&mut first, now);
        assert_eq!(first.reign(now).map(|reign| reign.term), Some(1));
    }
    assert_eq!(register.record.unwrap().renewals, 19);
}

#[test]
fn another_takes_over_when_it_saw_no_change_for_a_lease_and_opens_a_later_term() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    register.serve(&mut second, 500);
    assert_eq!(second.leader(500), Some(&candidate(1)));
    let led = (500..).find(|&now| {
        register.serve(&mut second, now);
        second.reign(now).is_some()
    });
    assert_eq!(led, Some(6_500));
    assert_eq!(second.reign(6_500).unwrap().term, 2);
    // The first one wakes up: it finds another leader.
    assert_eq!(first.reign(4_000), None);
    register.serve(&mut first, 6_600);
    assert_eq!((first.reign(6_600), first.leader(6_600)), (None, Some(&candidate(2))));
}

#[test]
fn a_leader_whose_renewals_fail_stops_before_the_others_may_take_over() {
    let (mut register, mut first) = (Register::default(), election(1));
    register.serve(&mut first, 0);
    let mut last = 0;
    for now in 1..6_000 {
        if first.poll(now).is_some() {
            first.answer(RegisterAnswer::Failed, now);
        }
        if first.reign(now).is_some() {
            last = now;
        }
    }
    assert_eq!(last, TIMING.renew_within_ms - 1);
}

#[test]
fn a_renewal_whose_answer_was_lost_is_found_and_the_leader_goes_on() {
    let (mut register, mut first) = (Register::default(), election(1));
    register.serve(&mut first, 0);
    let ask = first.poll(1_000).unwrap();
    register.answer(ask);
    first.answer(RegisterAnswer::Failed, 1_500);
    register.serve(&mut first, 2_500);
    assert_eq!(first.reign(2_500), Some(Reign { term: 1, until: 4_000 }), "as long as it is polled");
    assert_eq!(lasts(&mut first, 2_500), 6_500);
}

#[test]
fn a_leader_that_waited_long_for_nothing_asks_again_at_once_and_goes_on() {
    let (mut register, mut first) = (Register::default(), election(1));
    register.serve(&mut first, 0);
    assert!(matches!(first.poll(1_000), Some(RegisterOp::Write(..))));
    first.answer(RegisterAnswer::Failed, 3_000);
    register.serve(&mut first, 3_000);
    assert_eq!(lasts(&mut first, 3_000), 7_000);
}

#[test]
fn a_leader_that_resigns_is_followed_at_once() {
    let (mut register, mut first, mut second) = (Register::default(), election(1), election(2));
    register.serve(&mut first, 0);
    register.serve(&mut second, 0);
    let freed = first.resign().unwrap();
    assert!(matches!(register.answer(freed), RegisterAnswer::Written(_)));
    assert_eq!(first.reign(0), None);
    register.serve(&mut second, 1_000);
    assert_eq!(second.reign(1_000).unwrap().term, 2);
}

#[test]
fn a_record_that_somebody_deleted_or_set_back_lowers_no_term() {
    let (mut register, mut first) = (Register::default(), election(1));
    register.serve(&mut first, 0);
    first.heard_of(41, 10);
    assert_eq!(first.reign(10), None);
    register.serve(&mut first, 10);
    assert_eq!(first.reign(10).unwrap().term, 42);
    register.record = None;
    register.serve(&mut first, 1_010);
    assert_eq!(first.reign(1_010).unwrap().term, 43);
}

/// A coordinator with a clock of its own, which may stand still for a while, and a register that is far away.
struct Remote {
    life: u64,
    election: Election,
    rate: f64,
    stopped_until: u64,
    /// A question on its way, and when it arrives; `None` if it never does.
    asked: Option<(RegisterOp, Option<u64>)>,
    /// The answer on its way.
    answered: Option<(RegisterAnswer, u64)>,
    gives_up: u64,
    /// Until this time, it and the other coordinators do not reach each other.
    alone_until: u64,
}

fn remotes(random: &mut fastrand::Rng) -> Vec<Remote> {
    (1..=random.u64(2..=4))
        .map(|life| Remote {
            life,
            election: election(life),
            rate: 0.9 + 0.2 * random.f64(),
            stopped_until: 0,
            asked: None,
            answered: None,
            gives_up: 0,
            alone_until: 0,
        })
        .collect()
}

/// Lets all followers ask the leader, and hear it if the two reach each other.
fn ask_leaders(all: &mut [Remote], at: u64) {
    for from in 0..all.len() {
        let now = (at as f64 * all[from].rate) as Millis;
        if at < all[from].stopped_until {
            continue;
        }
        let Some(leader) = all[from].election.poll_leader(now) else { continue };
        let to = all.iter().find(|remote| remote.life == leader.life).unwrap();
        let is_lost = to.stopped_until > at || to.alone_until > at || all[from].alone_until > at;
        let leads = to.election.reign((at as f64 * to.rate) as Millis).is_some();
        if !is_lost && leads {
            all[from].election.hear_leader(leader.life);
        }
    }
}

/// Plays one history. Returns the number of takeovers, and the number of takeovers before the lease was over.
fn live(seed: u64) -> (usize, usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut register = Register::default();
    // Clocks differ by a fifth at most: the lease allows a half.
    let mut all = remotes(&mut random);
    let mut terms = BTreeMap::new();
    let (mut last_term, mut soon) = (0, 0);
    for at in (0..120_000_u64).step_by(10) {
        let is_calm = at > 90_000;
        for remote in &mut all {
            // A question on its way arrives, whether or not anybody is awake.
            if let Some((ask, arrives)) = remote.asked.clone()
                && arrives == Some(at)
            {
                let answer = register.answer(ask);
                let record = register.record.as_ref().unwrap_or(const { &EMPTY });
                assert!(record.term >= last_term, "seed {seed}: term {} after {last_term}", record.term);
                last_term = record.term;
                let is_lost = !is_calm && random.u8(..10) == 0;
                remote.answered = (!is_lost).then(|| (answer, at + delay(&mut random, is_calm)));
                remote.asked = Some((RegisterOp::Read, None));
            }
            if at < remote.stopped_until {
                continue;
            }
            if !is_calm && random.u32(..2_000) == 0 {
                remote.stopped_until = at + random.u64(..15_000);
                continue;
            }
            if !is_calm && random.u32(..2_000) == 0 {
                remote.alone_until = at + random.u64(..15_000);
            }
            let now = (at as f64 * remote.rate) as Millis;
            if let Some((answer, _)) = remote.answered.take_if(|(_, arrives)| *arrives <= at) {
                remote.asked = None;
                remote.election.answer(answer, now);
            } else if remote.asked.is_some() && at >= remote.gives_up {
                (remote.asked, remote.answered) = (None, None);
                remote.election.answer(RegisterAnswer::Failed, now);
            }
            if let Some(ask) = remote.election.poll(now) {
                soon +=
                    usize::from(matches!(ask, RegisterOp::Write(..)) && remote.election.misses_leader(now));
                let is_lost = !is_calm && random.u8(..10) == 0;
                let arrives = (!is_lost).then(|| at + delay(&mut random, is_calm));
                (remote.asked, remote.gives_up) = (Some((ask, arrives)), at + 2_000);
            }
        }
        ask_leaders(&mut all, at);
        let leads = |remote: &&Remote| remote.election.reign((at as f64 * remote.rate) as Millis).is_some();
        let leaders: Vec<&Remote> = all.iter().filter(leads).collect();
        for leader in leaders {
            let reign = leader.election.reign((at as f64 * leader.rate) as Millis).unwrap();
            assert_eq!(
                *terms.entry(reign.term).or_insert(leader.life),
                leader.life,
                "seed {seed}: a term has one leader"
            );
        }
        if at > 115_000 {
            assert_eq!(all.iter().filter(leads).count(), 1, "seed {seed}: somebody leads once all is calm");
        }
    }
    (terms.len(), soon)
}

fn delay(random: &mut fastrand::Rng, is_calm: bool) -> u64 {
    10 * if is_calm { random.u64(1..5) } else { random.u64(1..250) }
}

static EMPTY: Record = Record {
    holder: Candidate { life: 0, peer: String::new(), http: String::new() },
    term: 0,
    renewals: 0,
    lease_ms: 0,
};

#[test]
fn whatever_is_lost_late_or_stopped_a_term_has_one_leader_and_terms_only_grow() {
    let (mut changes, mut soon) = (0, 0);
    for seed in 0..1_000 {
        let (taken, sooner) = live(seed);
        (changes, soon) = (changes + taken, soon + sooner);
    }
    println!("{changes} terms, {soon} attempts to take over from a leader that was silent");
    assert!(changes > 3_000, "{changes} terms: the histories were too calm to show anything");
    assert!(soon > 200, "{soon} attempts to take over soon: leaders were hardly silent");
}
