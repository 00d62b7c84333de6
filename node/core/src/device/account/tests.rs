//! Tests of the account of copies: each caller hears of the end once, in time, and resources come back when the device has let go
//! of them.

mod slots;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const ENGINE: SessionId = SessionId(1);
const OTHER: SessionId = SessionId(2);

fn account() -> Account<u32> {
    Account::new(AccountLimits { copies: 4, of_session: 3, deadline_ms: 100 })
}

fn ask(copy: DeviceCopyNumber, layers: u32, wait_ms: u64) -> AskCopy {
    AskCopy { copy: copy.0, layers, wait_ms }
}

fn by(session: SessionId, number: u64) -> RequestId {
    RequestId { session, number }
}

fn told(layers: u32, end: Option<CopyEnd>) -> CopyProgress {
    CopyProgress { layers, end }
}

#[test]
fn an_asker_hears_when_as_many_layers_are_done_as_it_wants_and_once_of_the_end() {
    let mut account = account();
    let copy = account.begin(0, ENGINE, 4, vec![], 7).unwrap();
    assert!(account.ask(0, ask(copy, 2, 50), by(ENGINE, 100)));
    account.layers(copy, 1);
    assert_eq!(account.take_news(), []);
    account.layers(copy, 2);
    assert_eq!(account.take_news(), [(by(ENGINE, 100), told(2, None))]);
    assert!(account.ask(0, ask(copy, u32::MAX, 50), by(ENGINE, 101)));
    assert_eq!(account.ended(copy, Ok(())), Some(Ended { held: 7, is_whole: true }));
    assert_eq!(account.take_news(), [], "what it brought is yet to be looked at");
    account.finish(copy, CopyEnd::Done);
    assert_eq!(account.take_news(), [(by(ENGINE, 101), told(4, Some(CopyEnd::Done)))]);
    assert!(!account.ask(0, ask(copy, 1, 0), by(ENGINE, 102)));
}

#[test]
fn an_asker_waits_no_longer_than_it_wants_and_beside_others() {
    let mut account = account();
    let copy = account.begin(0, ENGINE, 4, vec![], 7).unwrap();
    assert!(account.ask(5, ask(copy, 2, 10), by(ENGINE, 100)));
    account.answer_late(14);
    assert_eq!(account.take_news(), []);
    account.answer_late(15);
    assert_eq!(account.take_news(), [(by(ENGINE, 100), told(0, None))]);
    assert!(account.ask(15, ask(copy, 2, 10), by(ENGINE, 101)));
    assert!(account.ask(15, ask(copy, 3, 10), by(ENGINE, 102)));
    assert_eq!(account.take_news(), []);
    account.layers(copy, 2);
    assert_eq!(account.take_news(), [(by(ENGINE, 101), told(2, None))]);
    assert!(account.ask(20, ask(copy, 4, 10), by(ENGINE, 103)));
    account.finish(copy, CopyEnd::Done);
    let end = told(4, Some(CopyEnd::Done));
    assert_eq!(account.take_news(), [(by(ENGINE, 102), end), (by(ENGINE, 103), end)], "both hear of the end");
    assert!(!account.ask(15, ask(copy, 2, 0), by(OTHER, 103)), "it is another session's");
}

#[test]
fn what_comes_after_the_deadline_is_no_hit_and_is_held_until_then() {
    let mut account = account();
    let copy = account.begin(0, ENGINE, 4, vec![], 7).unwrap();
    assert_eq!(account.overdue(99), []);
    assert_eq!(account.overdue(100), [copy]);
    assert!(account.ask(100, ask(copy, u32::MAX, 50), by(ENGINE, 100)));
    assert_eq!(account.take_news(), [(by(ENGINE, 100), told(0, Some(CopyEnd::Stalled)))]);
    assert_eq!(account.held(copy), Some(&7));
    assert_eq!(account.ended(copy, Ok(())), Some(Ended { held: 7, is_whole: false }));
    assert_eq!(account.under_way(), 0);
}

#[test]
fn what_a_lost_device_may_touch_comes_back_when_it_is_gone() {
    let mut account = account();
    let copy = account.begin(0, ENGINE, 4, vec![], 7).unwrap();
    assert!(account.ask(0, ask(copy, 1, 50), by(ENGINE, 100)));
    assert_eq!(account.ended(copy, Err(DeviceFailure::Lost)), None);
    assert_eq!(account.take_news(), [(by(ENGINE, 100), told(0, Some(CopyEnd::Lost)))]);
    assert_eq!((account.under_way(), account.gone(), account.under_way()), (1, vec![7], 0));
}

#[test]
fn a_session_has_no_more_copies_than_it_may_though_it_forgets_them() {
    let mut account = account();
    let copies: Vec<DeviceCopyNumber> =
        (0..3).map(|held| account.begin(0, ENGINE, 1, vec![], held).unwrap()).collect();
    assert_eq!(account.begin(0, ENGINE, 1, vec![], 9), Err(9));
    copies.iter().for_each(|&copy| assert!(account.forget(ENGINE, copy)));
    assert_eq!(account.begin(0, ENGINE, 1, vec![], 9), Err(9), "the device has them still");
    assert!(account.begin(0, OTHER, 1, vec![], 4).is_ok());
    assert_eq!(account.begin(0, OTHER, 1, vec![], 5), Err(5), "all that the device may have");
    assert!(account.ended(copies[0], Ok(())).is_some());
    assert!(account.begin(0, ENGINE, 1, vec![], 9).is_ok());
}

#[derive(Debug, Clone)]
enum Step {
    Begin(u32),
    End(usize, Result<(), DeviceFailure>),
    Ask(usize, u32, u64),
    Layers(usize, u32),
    Forget(usize),
    Close(u32),
    Pass(u64),
    Gone,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let result = prop_oneof![
        3 => Just(Ok(())),
        1 => Just(Err(DeviceFailure::Failed)),
        1 => Just(Err(DeviceFailure::Lost)),
    ];
    let step = prop_oneof![
        4 => (1u32..3).prop_map(Step::Begin),
        4 => (any::<usize>(), result).prop_map(|(n, r)| Step::End(n, r)),
        4 => (any::<usize>(), 0u32..6, 0u64..40).prop_map(|(n, l, w)| Step::Ask(n, l, w)),
        2 => (any::<usize>(), 1u32..5).prop_map(|(n, l)| Step::Layers(n, l)),
        1 => any::<usize>().prop_map(Step::Forget),
        1 => (1u32..3).prop_map(Step::Close),
        2 => (0u64..60).prop_map(Step::Pass),
        1 => Just(Step::Gone),
    ];
    proptest::collection::vec(step, 0..120)
}

proptest! {
    #[test]
    fn all_that_is_held_comes_back_once_and_all_who_ask_are_answered_once(steps in steps()) {
        let mut account = account();
        let (mut now, mut next, mut asked) = (0, 0u32, 0u64);
        // Copies that the device is working on, and copies of a lost device.
        let mut at: BTreeMap<DeviceCopyNumber, u32> = BTreeMap::new();
        let mut all: Vec<(DeviceCopyNumber, SessionId)> = Vec::new();
        let (mut open, mut ended) = (BTreeSet::new(), BTreeSet::new());
        let pick = |all: &[(DeviceCopyNumber, SessionId)], n: usize| all.get(n % all.len().max(1)).copied();
        for step in steps {
            match step {
                Step::Begin(session) => {
                    next += 1;
                    if let Ok(number) = account.begin(now, SessionId(session), 4, vec![], next) {
                        at.insert(number, next);
                        all.push((number, SessionId(session)));
                    }
                }
                Step::End(n, result) => if let Some((&number, &held)) = at.iter().nth(n % at.len().max(1)) {
                    match account.ended(number, result) {
                        Some(Ended { held: back, is_whole }) => {
                            prop_assert_eq!(back, held);
                            prop_assert!(result.is_ok() || !is_whole);
                            at.remove(&number);
                            if is_whole {
                                account.finish(number, CopyEnd::Done);
                            }
                        }
                        None => prop_assert_eq!(result, Err(DeviceFailure::Lost)),
                    }
                }
                Step::Ask(n, layers, wait) => if let Some((number, session)) = pick(&all, n) {
                    asked += 1;
                    if account.ask(now, ask(number, layers, wait), by(session, asked)) {
                        open.insert(by(session, asked));
                    }
                }
                Step::Layers(n, layers) => if let Some((number, _)) = pick(&all, n) {
                    account.layers(number, layers);
                }
                Step::Forget(n) => if let Some((number, session)) = pick(&all, n) {
                    account.forget(session, number);
                }
                Step::Close(session) => drop(account.close(SessionId(session))),
                Step::Pass(milliseconds) => {
                    now += milliseconds;
                    account.overdue(now);
                    account.answer_late(now);
                }
                Step::Gone => {
                    let mut back = account.gone();
                    back.sort_unstable();
                    let mut held: Vec<u32> = std::mem::take(&mut at).into_values().collect();
                    held.sort_unstable();
                    prop_assert_eq!(back, held);
                }
            }
            for (asker, _) in account.take_news() {
                prop_assert!(open.contains(&asker) && ended.insert(asker), "{:?} is answered twice", asker);
            }
            prop_assert_eq!(account.under_way(), at.len());
        }
    }
}
