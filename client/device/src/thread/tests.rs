//! Device threads over host memory: whatever a device does wrong, callers hear of it, and nobody else is touched.

use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::device::EngineMemory;
use crate::host::{Fault, HostControl, HostDevice};
use crate::ledger::{CopyFailure, Ledger, LedgerLimits};
use crate::order::Direction;
use crate::slots::{Context, Life, SlotId, Slots};
use crate::testing::{CHUNKS, Image, Paged, layouts};

/// A device's thread with paged memory, and the account of its arena's slots.
struct Lane {
    thread: DeviceThread,
    reports: Receiver<Report>,
    control: HostControl,
    paged: Paged,
    ledger: Ledger,
    random: fastrand::Rng,
}

const NODE: Context = Context(0);

impl Lane {
    fn start(seed: u64) -> Self {
        let (hear, reports) = channel();
        let control = HostControl::default();
        let of_device = control.clone();
        let open = move || Ok(Box::new(HostDevice::new(seed, of_device)) as Box<dyn Device>);
        let hear = move |report| drop(hear.send(report));
        let thread = DeviceThread::start("device-test", ORDERS, open, hear).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let (answer, paged) = channel();
        let (own, mut of_call) = (control.clone(), random.fork());
        thread
            .call(move |device| {
                let all = layouts();
                let (_, layout, regions) = all[of_call.usize(0..all.len())].clone();
                let import = |device: &mut dyn Device, memory: crate::HostMemory| {
                    own.share(memory.clone());
                    device.import(EngineMemory::Own { address: 0, bytes: memory.bytes() }).unwrap()
                };
                answer.send(Paged::new(device, layout, &regions, &mut of_call, import)).unwrap();
            })
            .unwrap();
        let paged = paged.recv().unwrap();
        let limits = LedgerLimits { orders: ORDERS, timeout_ms: 1_000 };
        let ledger = Ledger::new(Slots::new(CHUNKS as u32), limits);
        Self { thread, reports, control, paged, ledger, random }
    }

    /// Begins an order over one chunk: a save fills the slot, a load reads it.
    fn begin(&mut self, direction: Direction, slot: SlotId) -> (Ticket, Order) {
        let all = self.paged.pages(&mut self.random);
        let per_chunk = self.paged.layout.spec().pages_per_chunk as usize;
        let mut order = self.paged.order(direction, self.random.bool(), &all[..per_chunk]);
        if let crate::Work::Pages { pages, .. } = &mut order.work {
            pages.iter_mut().for_each(|copy| copy.block = self.paged.block(slot.0.into()));
        }
        let (fills, reads) = match direction {
            Direction::Save => (vec![slot], vec![]),
            Direction::Load => (vec![], vec![slot]),
        };
        let ticket = self.ledger.begin(0, NODE, fills, reads).unwrap();
        self.thread.submit(ticket, order.clone()).unwrap();
        (ticket, order)
    }

    fn until_done(&mut self, ticket: Ticket) -> Result<(), CopyFailure> {
        loop {
            match self.reports.recv().unwrap() {
                Report::Done { ticket: of, result, .. } => {
                    let outcome = self.ledger.ended(of, result);
                    if of == ticket {
                        return outcome.unwrap().result;
                    }
                }
                Report::Gone => drop(self.ledger.context_gone(NODE)),
                Report::Layers { .. } | Report::Lost(_) => {}
            }
        }
    }

    fn until_gone(&mut self) {
        while !matches!(self.reports.recv().unwrap(), Report::Gone) {}
        assert_eq!(self.ledger.context_gone(NODE), []);
    }

    /// A chunk saved into a slot of its own.
    fn saved(&mut self) -> SlotId {
        let slot = self.ledger.reserve().unwrap();
        let (ticket, _) = self.begin(Direction::Save, slot);
        assert_eq!(self.until_done(ticket), Ok(()));
        slot
    }

    fn pieces(&self) -> u32 {
        self.paged.layout.spec().planes.len() as u32 * self.paged.layout.spec().pages_per_chunk
    }

    fn expected(&self, start: Image, order: &Order) -> Image {
        start.after(&self.paged, order, self.paged.layout.layers())
    }
}

const ORDERS: usize = 6;

fn seeds() -> impl Iterator<Item = u64> {
    let first = fastrand::u64(..);
    println!("seeds from {first} on");
    (0..8).map(move |number| first.wrapping_add(number))
}

#[test]
fn what_was_saved_is_loaded_into_other_pages() {
    for seed in seeds() {
        let mut lane = Lane::start(seed);
        let slot = lane.ledger.reserve().unwrap();
        let start = lane.paged.image();
        let (ticket, order) = lane.begin(Direction::Save, slot);
        assert_eq!(lane.until_done(ticket), Ok(()));
        let saved = lane.expected(start, &order);
        assert!(lane.paged.image() == saved);
        let (ticket, order) = lane.begin(Direction::Load, slot);
        assert_eq!(lane.until_done(ticket), Ok(()));
        assert!(lane.paged.image() == lane.expected(saved, &order));
        lane.thread.join();
    }
}

#[test]
fn a_copy_that_fails_at_any_point_is_never_a_hit() {
    for seed in seeds() {
        let mut lane = Lane::start(seed);
        for after in 0..=lane.pieces() {
            let slot = lane.ledger.reserve().unwrap();
            lane.control.fail_next(Fault::Fail { after });
            let (ticket, _) = lane.begin(Direction::Save, slot);
            assert_eq!(lane.until_done(ticket), Err(CopyFailure::Copy(CopyError::Failed)));
            assert_eq!(lane.ledger.slots().life(slot), Life::Free);
        }
        lane.control.fail_next(Fault::Refuse);
        let slot = lane.ledger.reserve().unwrap();
        let (ticket, _) = lane.begin(Direction::Save, slot);
        assert_eq!(lane.until_done(ticket), Err(CopyFailure::Copy(CopyError::Refused)));
        lane.saved();
        lane.thread.join();
    }
}

#[test]
fn a_copy_that_stalls_at_any_point_keeps_its_slot_and_nobody_else() {
    let mut lane = Lane::start(seeds().next().unwrap());
    for after in [0, 1, lane.pieces() / 2, lane.pieces()] {
        let slot = lane.ledger.reserve().unwrap();
        lane.control.fail_next(Fault::Stall { after });
        let (ticket, _) = lane.begin(Direction::Save, slot);
        let other = lane.saved();
        let told = lane.ledger.overdue(1_000);
        assert_eq!((told[0].ticket, told[0].result), (ticket, Err(CopyFailure::Stalled)));
        assert_eq!(lane.ledger.slots().life(slot), Life::Quarantined);
        lane.ledger.give_up(other);
    }
    assert_eq!(lane.ledger.slots().counts().quarantined, 4);
    assert_eq!(lane.thread.outstanding(), 4);
}

#[test]
fn a_device_lost_at_any_point_leaves_slots_quarantined_until_it_is_gone() {
    for (number, seed) in seeds().enumerate() {
        let mut lane = Lane::start(seed);
        let read = lane.saved();
        let slot = lane.ledger.reserve().unwrap();
        lane.control.fail_next(Fault::Stall { after: 1 });
        lane.control.fail_next(Fault::Lose { after: number as u32 });
        let (reading, _) = lane.begin(Direction::Load, read);
        let (ticket, _) = lane.begin(Direction::Save, slot);
        let lost = Err(CopyFailure::Copy(CopyError::Lost));
        assert_eq!(lane.until_done(reading), lost);
        assert_eq!(lane.until_done(ticket), lost);
        assert_eq!(lane.ledger.slots().life(slot), Life::Quarantined);
        lane.until_gone();
        assert_eq!((lane.control.gone(), lane.ledger.slots().life(slot)), (1, Life::Free));
        assert_eq!(lane.ledger.slots().life(read), Life::Filled, "what was only read is whole");
        let (ticket, _) = lane.begin(Direction::Load, read);
        assert_eq!(lane.until_done(ticket), Err(CopyFailure::Copy(CopyError::Refused)));
    }
}

#[test]
fn what_a_device_touches_that_cannot_be_given_up_stays_quarantined() {
    let mut lane = Lane::start(6);
    let slot = lane.ledger.reserve().unwrap();
    lane.control.fail_next(Fault::Lose { after: 1 });
    lane.control.cling();
    let (ticket, _) = lane.begin(Direction::Save, slot);
    assert_eq!(lane.until_done(ticket), Err(CopyFailure::Copy(CopyError::Lost)));
    lane.thread.join();
    assert!(lane.reports.iter().all(|report| !matches!(report, Report::Gone)));
    assert_eq!(lane.ledger.slots().life(slot), Life::Quarantined);
}

#[test]
fn a_driver_that_hangs_keeps_neither_its_callers_nor_other_devices() {
    let mut hung = Lane::start(1);
    let mut other = Lane::start(2);
    hung.control.hold_calls();
    let slots: Vec<_> = (0..CHUNKS).map(|_| hung.ledger.reserve().unwrap()).collect();
    let tickets: Vec<_> = slots.iter().map(|&slot| hung.begin(Direction::Save, slot).0).collect();
    hung.control.wait_until_held();
    other.saved();
    let told: Vec<_> = hung.ledger.overdue(1_000).iter().map(|outcome| outcome.ticket).collect();
    assert_eq!(told, tickets);
    assert_eq!(hung.ledger.reserve(), None);
    hung.control.release_calls();
    for _ in &tickets {
        let Report::Done { ticket, result, .. } =
            hung.reports.iter().find(|report| matches!(report, Report::Done { .. })).unwrap()
        else {
            unreachable!()
        };
        assert_eq!(hung.ledger.ended(ticket, result), None);
    }
    assert_eq!(hung.ledger.slots().counts().free, CHUNKS as u32);
}

#[test]
fn orders_are_refused_when_all_places_are_taken() {
    let lane = Lane::start(3);
    lane.control.hold_calls();
    let order = lane.paged.order(Direction::Save, false, &[0, 1]);
    for ticket in 0..ORDERS as u64 {
        assert_eq!(lane.thread.submit(Ticket(ticket), order.clone()), Ok(()));
    }
    assert_eq!(lane.thread.submit(Ticket(99), order.clone()), Err(Busy));
    assert_eq!(lane.thread.outstanding(), ORDERS);
    lane.control.release_calls();
    let first = lane.reports.iter().find(|report| matches!(report, Report::Done { .. })).unwrap();
    drop(first);
    assert_eq!(lane.thread.submit(Ticket(100), order), Ok(()));
    lane.thread.join();
}

#[test]
fn a_device_that_cannot_be_opened_is_told_and_refuses_all() {
    let (hear, reports) = channel();
    let open = || Err(DeviceError::Absent("no driver".into()));
    let thread = DeviceThread::start("device-test", 1, open, move |report| drop(hear.send(report))).unwrap();
    assert!(matches!(reports.recv().unwrap(), Report::Lost(DeviceError::Absent(_))));
    let lane = Lane::start(4);
    thread.submit(Ticket(1), lane.paged.order(Direction::Save, false, &[0, 1])).unwrap();
    let refused = reports.recv().unwrap();
    assert!(matches!(refused, Report::Done { ticket: Ticket(1), result: Err(CopyError::Refused), .. }));
}

#[test]
fn a_device_that_panics_is_lost() {
    let mut lane = Lane::start(5);
    lane.thread.call(|_| panic!("a bug in a device")).unwrap();
    assert!(matches!(lane.reports.recv().unwrap(), Report::Lost(_)));
    lane.until_gone();
}
