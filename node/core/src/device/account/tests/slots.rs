//! Tests of the slots of copies: whatever a device does, no slot is reused that a copy may touch.

use super::*;
use crate::device::slots::SlotState;

fn account(slots: u32) -> Account<()> {
    let mut account = Account::new(AccountLimits { copies: 4, of_session: 4, deadline_ms: 100 });
    account.slots = Slots::of(slots);
    account
}

fn whole(is_whole: bool) -> Option<Ended<()>> {
    Some(Ended { held: (), is_whole })
}

fn filled(account: &mut Account<()>) -> SlotId {
    let slot = account.slots.reserve().unwrap();
    let number = account.begin_own(0, vec![slot], ()).unwrap();
    assert_eq!(account.ended(number, Ok(())), whole(true));
    slot
}

fn count(account: &Account<()>, life: SlotState) -> usize {
    account.slots.lives().filter(|&of| of == life).count()
}

#[test]
fn a_slot_is_filled_when_its_copy_went_well_and_free_when_it_failed() {
    let mut account = account(2);
    let slot = filled(&mut account);
    assert_eq!(account.slots.life(slot), SlotState::Filled);
    let slot = account.slots.reserve().unwrap();
    let number = account.begin_own(0, vec![slot], ()).unwrap();
    assert_eq!(account.ended(number, Err(DeviceFailure::Failed)), whole(false));
    assert_eq!(account.slots.life(slot), SlotState::Free);
}

#[test]
fn what_a_stalled_device_brings_late_is_no_hit_and_its_slot_is_free_only_then() {
    let mut account = account(1);
    let slot = account.slots.reserve().unwrap();
    let number = account.begin_own(5, vec![slot], ()).unwrap();
    assert_eq!(account.overdue(104), []);
    assert_eq!(account.overdue(105), [number]);
    assert_eq!(account.overdue(1_000), [], "a caller is told once");
    assert_eq!((account.slots.life(slot), account.slots.reserve()), (SlotState::Quarantined, None));
    assert_eq!(account.ended(number, Ok(())), whole(false));
    assert_eq!(account.slots.reserve(), Some(slot));
}

#[test]
fn slots_under_the_copies_of_a_lost_device_stay_quarantined_until_it_is_gone() {
    let mut account = account(3);
    let read = filled(&mut account);
    let slot = account.slots.reserve().unwrap();
    let number = account.begin_own(0, vec![slot], ()).unwrap();
    let reading = account.begin(0, ENGINE, 1, vec![read], ()).unwrap();
    for lost in [number, reading] {
        assert_eq!(account.ended(lost, Err(DeviceFailure::Lost)), None);
    }
    account.slots.give_up(read);
    assert_eq!(count(&account, SlotState::Quarantined), 2);
    assert_eq!(account.gone(), [(), ()]);
    assert_eq!(count(&account, SlotState::Free), 3);
}

#[test]
fn copies_under_way_are_bounded() {
    let mut account = account(5);
    let slot = filled(&mut account);
    for _ in 0..4 {
        assert!(account.begin(0, ENGINE, 1, vec![slot], ()).is_ok());
    }
    assert!(account.begin(0, OTHER, 1, vec![slot], ()).is_err());
}

#[derive(Debug, Clone)]
enum Step {
    Reserve,
    Fill(usize),
    Read(usize),
    End(usize, Result<(), DeviceFailure>),
    GiveUp(usize),
    Pass(u64),
    Gone,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let result = prop_oneof![
        3 => Just(Ok(())),
        1 => Just(Err(DeviceFailure::Failed)),
        1 => Just(Err(DeviceFailure::Refused)),
        1 => Just(Err(DeviceFailure::Lost)),
    ];
    let step = prop_oneof![
        3 => Just(Step::Reserve),
        3 => any::<usize>().prop_map(Step::Fill),
        3 => any::<usize>().prop_map(Step::Read),
        4 => (any::<usize>(), result).prop_map(|(n, r)| Step::End(n, r)),
        3 => any::<usize>().prop_map(Step::GiveUp),
        1 => (0u64..60).prop_map(Step::Pass),
        1 => Just(Step::Gone),
    ];
    proptest::collection::vec(step, 0..120)
}

/// The true state, as an observer inside the device would know it.
#[derive(Default)]
struct Truth {
    /// Copies that the device really still makes.
    touching: BTreeMap<DeviceCopyNumber, SlotId>,
    reserved: BTreeSet<SlotId>,
    filled: BTreeSet<SlotId>,
    /// Fills that have not failed for their caller.
    filling: BTreeMap<DeviceCopyNumber, SlotId>,
}

proptest! {
    #[test]
    fn no_slot_is_given_out_that_a_copy_may_touch(steps in steps()) {
        let mut account = account(6);
        let mut truth = Truth::default();
        let mut now = 0;
        let pick = |set: &BTreeSet<SlotId>, n: usize| set.iter().nth(n % set.len().max(1)).copied();
        for step in steps {
            match step {
                Step::Reserve => if let Some(slot) = account.slots.reserve() {
                    prop_assert!(truth.touching.values().all(|&touched| touched != slot), "{slot:?} is touched");
                    prop_assert!(!truth.filled.contains(&slot), "{slot:?} has a block");
                    prop_assert!(truth.reserved.insert(slot));
                }
                Step::Fill(n) => if let Some(slot) = pick(&truth.reserved, n)
                    && let Ok(number) = account.begin_own(now, vec![slot], ())
                {
                    truth.reserved.remove(&slot);
                    truth.filling.insert(number, slot);
                    truth.touching.insert(number, slot);
                }
                Step::Read(n) => if let Some(slot) = pick(&truth.filled, n)
                    && let Ok(number) = account.begin(now, ENGINE, 1, vec![slot], ())
                {
                    truth.touching.insert(number, slot);
                }
                Step::End(n, result) => {
                    let number = n % truth.touching.len().max(1);
                    if let Some((&number, _)) = truth.touching.iter().nth(number) {
                        let ended = account.ended(number, result);
                        prop_assert_eq!(ended.is_none(), result == Err(DeviceFailure::Lost));
                        let filled = truth.filling.remove(&number);
                        if ended.is_some() {
                            truth.touching.remove(&number);
                        }
                        truth.filled.extend(filled.filter(|_| result.is_ok()));
                    }
                }
                Step::GiveUp(n) => {
                    let all: BTreeSet<_> = truth.reserved.union(&truth.filled).copied().collect();
                    if let Some(slot) = pick(&all, n) {
                        truth.reserved.remove(&slot);
                        truth.filled.remove(&slot);
                        account.slots.give_up(slot);
                    }
                }
                Step::Pass(milliseconds) => {
                    now += milliseconds;
                    for number in account.overdue(now) {
                        truth.filling.remove(&number);
                    }
                }
                Step::Gone => {
                    prop_assert_eq!(account.gone().len(), truth.touching.len());
                    truth.touching.clear();
                    truth.filling.clear();
                }
            }
            prop_assert_eq!(account.under_way(), truth.touching.len());
            for &slot in &truth.filled {
                prop_assert_eq!(account.slots.life(slot), SlotState::Filled);
            }
            prop_assert_eq!(count(&account, SlotState::Filled), truth.filled.len(), "a failed copy is never a hit");
        }
        // In the end the device is gone: nothing stays quarantined.
        account.gone();
        prop_assert_eq!((account.under_way(), count(&account, SlotState::Quarantined)), (0, 0));
    }
}
