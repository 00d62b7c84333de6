//! The account of orders: against a device that does anything, no slot is reused that a copy may touch.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::slots::Life;

const NODE: Context = Context(0);
const ENGINE: Context = Context(1);

fn ledger(slots: u32) -> Ledger {
    Ledger::new(Slots::new(slots), LedgerLimits { orders: 4, timeout_ms: 100 })
}

fn filled(ledger: &mut Ledger) -> SlotId {
    let slot = ledger.reserve().unwrap();
    let ticket = ledger.begin(0, NODE, vec![slot], vec![]).unwrap();
    assert_eq!(ledger.ended(ticket, Ok(())), Some(Outcome { ticket, result: Ok(()) }));
    slot
}

#[test]
fn a_slot_is_filled_when_its_copy_went_well_and_free_when_it_failed() {
    let mut ledger = ledger(2);
    let slot = filled(&mut ledger);
    assert_eq!(ledger.slots().life(slot), Life::Filled);
    let slot = ledger.reserve().unwrap();
    let ticket = ledger.begin(0, NODE, vec![slot], vec![]).unwrap();
    let failure = CopyFailure::Copy(CopyError::Failed);
    assert_eq!(ledger.ended(ticket, Err(CopyError::Failed)), Some(Outcome { ticket, result: Err(failure) }));
    assert_eq!(ledger.slots().life(slot), Life::Free);
}

#[test]
fn what_a_stalled_device_brings_late_is_no_hit_and_its_slot_is_free_only_then() {
    let mut ledger = ledger(1);
    let slot = ledger.reserve().unwrap();
    let ticket = ledger.begin(5, NODE, vec![slot], vec![]).unwrap();
    assert_eq!(ledger.overdue(104), []);
    assert_eq!(ledger.next_deadline_ms(), Some(105));
    assert_eq!(ledger.overdue(105), [Outcome { ticket, result: Err(CopyFailure::Stalled) }]);
    assert_eq!(ledger.overdue(1_000), [], "a caller is told once");
    assert_eq!((ledger.slots().life(slot), ledger.reserve()), (Life::Quarantined, None));
    assert_eq!(ledger.ended(ticket, Ok(())), None);
    assert_eq!(ledger.reserve(), Some(slot));
}

#[test]
fn slots_under_the_copies_of_a_lost_device_stay_quarantined_until_it_is_gone() {
    let mut ledger = ledger(3);
    let read = filled(&mut ledger);
    let slot = ledger.reserve().unwrap();
    let ticket = ledger.begin(0, NODE, vec![slot], vec![]).unwrap();
    let reading = ledger.begin(0, NODE, vec![], vec![read]).unwrap();
    for lost in [ticket, reading] {
        let failure = CopyFailure::Copy(CopyError::Lost);
        let outcome = Outcome { ticket: lost, result: Err(failure) };
        assert_eq!(ledger.ended(lost, Err(CopyError::Lost)), Some(outcome));
    }
    ledger.give_up(read);
    assert_eq!(ledger.slots().counts().quarantined, 2);
    assert_eq!(ledger.context_gone(NODE), []);
    assert_eq!(ledger.slots().counts().free, 3);
}

#[test]
fn a_process_that_dies_under_its_copies_leaves_what_others_use_alone() {
    let mut ledger = ledger(2);
    let slot = filled(&mut ledger);
    let dying = ledger.begin(0, ENGINE, vec![], vec![slot]).unwrap();
    let other = ledger.begin(0, NODE, vec![], vec![slot]).unwrap();
    ledger.give_up(slot);
    assert_eq!(ledger.ended(other, Ok(())), Some(Outcome { ticket: other, result: Ok(()) }));
    assert_eq!(ledger.slots().life(slot), Life::Quarantined);
    let failure = CopyFailure::Copy(CopyError::Lost);
    assert_eq!(ledger.context_gone(ENGINE), [Outcome { ticket: dying, result: Err(failure) }]);
    assert_eq!(ledger.slots().life(slot), Life::Free);
}

#[test]
fn slots_that_come_later_are_given_out_when_the_first_ones_are_taken() {
    let mut ledger = ledger(1);
    let first = filled(&mut ledger);
    assert_eq!(ledger.reserve(), None);
    ledger.add_slots(2);
    let added: BTreeSet<SlotId> = (0..2).map(|_| ledger.reserve().unwrap()).collect();
    assert_eq!(added, BTreeSet::from([SlotId(1), SlotId(2)]));
    assert_eq!((ledger.reserve(), ledger.slots().life(first)), (None, Life::Filled));
}

#[test]
fn orders_under_way_are_bounded() {
    let mut ledger = ledger(5);
    let slot = filled(&mut ledger);
    for _ in 0..4 {
        assert!(ledger.begin(0, NODE, vec![], vec![slot]).is_some());
    }
    assert_eq!(ledger.begin(0, NODE, vec![], vec![slot]), None);
}

#[derive(Debug, Clone)]
enum Step {
    Reserve,
    Fill(usize, u32),
    Read(usize, u32),
    End(usize, Result<(), CopyError>),
    GiveUp(usize),
    Pass(u64),
    Gone(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let result = prop_oneof![
        3 => Just(Ok(())),
        1 => Just(Err(CopyError::Failed)),
        1 => Just(Err(CopyError::Refused)),
        1 => Just(Err(CopyError::Lost)),
    ];
    let step = prop_oneof![
        3 => Just(Step::Reserve),
        3 => (any::<usize>(), 0u32..2).prop_map(|(n, c)| Step::Fill(n, c)),
        3 => (any::<usize>(), 0u32..2).prop_map(|(n, c)| Step::Read(n, c)),
        4 => (any::<usize>(), result).prop_map(|(n, r)| Step::End(n, r)),
        3 => any::<usize>().prop_map(Step::GiveUp),
        1 => (0u64..60).prop_map(Step::Pass),
        1 => (0u32..2).prop_map(Step::Gone),
    ];
    proptest::collection::vec(step, 0..120)
}

/// What is true, as somebody would know who sees into the devices.
#[derive(Default)]
struct Truth {
    /// Copies that really go on.
    touching: BTreeMap<Ticket, (u32, Vec<SlotId>)>,
    reserved: BTreeSet<SlotId>,
    filled: BTreeSet<SlotId>,
    /// Fills whose callers wait.
    filling: BTreeMap<Ticket, SlotId>,
    told: BTreeSet<Ticket>,
}

impl Truth {
    fn tell(&mut self, outcome: Outcome) -> Result<(), TestCaseError> {
        prop_assert!(self.told.insert(outcome.ticket), "told twice of {:?}", outcome.ticket);
        if let Some(slot) = self.filling.remove(&outcome.ticket)
            && outcome.result.is_ok()
        {
            self.filled.insert(slot);
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn no_slot_is_given_out_that_a_copy_may_touch(steps in steps()) {
        let mut ledger = ledger(6);
        let mut truth = Truth::default();
        let mut now = 0;
        let pick = |set: &BTreeSet<SlotId>, n: usize| set.iter().nth(n % set.len().max(1)).copied();
        for step in steps {
            match step {
                Step::Reserve => if let Some(slot) = ledger.reserve() {
                    prop_assert!(truth.touching.values().all(|(_, slots)| !slots.contains(&slot)), "{slot:?} is touched");
                    prop_assert!(!truth.filled.contains(&slot), "{slot:?} has a block");
                    prop_assert!(truth.reserved.insert(slot));
                }
                Step::Fill(n, context) => if let Some(slot) = pick(&truth.reserved, n)
                    && let Some(ticket) = ledger.begin(now, Context(context), vec![slot], vec![])
                {
                    truth.reserved.remove(&slot);
                    truth.filling.insert(ticket, slot);
                    truth.touching.insert(ticket, (context, vec![slot]));
                }
                Step::Read(n, context) => if let Some(slot) = pick(&truth.filled, n)
                    && let Some(ticket) = ledger.begin(now, Context(context), vec![], vec![slot])
                {
                    truth.touching.insert(ticket, (context, vec![slot]));
                }
                Step::End(n, result) => {
                    let number = n % truth.touching.len().max(1);
                    if let Some((&ticket, _)) = truth.touching.iter().nth(number) {
                        if result != Err(CopyError::Lost) {
                            truth.touching.remove(&ticket);
                        }
                        if let Some(outcome) = ledger.ended(ticket, result) {
                            truth.tell(outcome)?;
                        }
                    }
                }
                Step::GiveUp(n) => {
                    let all: BTreeSet<_> = truth.reserved.union(&truth.filled).copied().collect();
                    if let Some(slot) = pick(&all, n) {
                        truth.reserved.remove(&slot);
                        truth.filled.remove(&slot);
                        ledger.give_up(slot);
                    }
                }
                Step::Pass(milliseconds) => {
                    now += milliseconds;
                    for outcome in ledger.overdue(now) {
                        truth.tell(outcome)?;
                    }
                }
                Step::Gone(context) => {
                    truth.touching.retain(|_, copy| copy.0 != context);
                    for outcome in ledger.context_gone(Context(context)) {
                        truth.tell(outcome)?;
                    }
                }
            }
            let counts = ledger.slots().counts();
            prop_assert_eq!(
                counts.free + counts.reserved + counts.filling + counts.filled + counts.quarantined, 6
            );
            for &slot in &truth.filled {
                prop_assert_eq!(ledger.slots().life(slot), Life::Filled);
            }
            prop_assert_eq!(counts.filled as usize, truth.filled.len(), "a failed copy is never a hit");
        }
        // In the end all devices are gone: nothing stays quarantined, and everybody was told.
        for context in [NODE, ENGINE] {
            for outcome in ledger.context_gone(context) {
                truth.tell(outcome)?;
            }
        }
        prop_assert_eq!((ledger.under_way(), ledger.slots().counts().quarantined), (0, 0));
        prop_assert!(truth.filling.is_empty());
    }
}
