//! Device threads over host memory: whatever a device does wrong, callers hear of it, and others are not affected.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::device::EngineMemory;
use crate::host::{Fault, HostControl, HostDevice};
use crate::order::Direction;
use crate::testing::{CHUNKS, Image, Paged, layouts};

/// A device's thread with paged memory.
struct Lane {
    thread: DeviceThread,
    reports: Receiver<DeviceReport>,
    control: HostControl,
    paged: Paged,
    last_number: u64,
    random: fastrand::Rng,
}

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
                let import = |device: &mut dyn Device, memory: HostMemory| {
                    own.share(memory.clone());
                    device.import(EngineMemory::Own { address: 0, bytes: memory.bytes() }).unwrap()
                };
                answer.send(Paged::new(device, layout, &regions, &mut of_call, import)).unwrap();
            })
            .unwrap();
        let paged = paged.recv().unwrap();
        Self { thread, reports, control, paged, last_number: 0, random }
    }

    /// Begins an order over the block of one chunk.
    fn begin(&mut self, direction: Direction, chunk: u64) -> (OrderNumber, Order) {
        let all = self.paged.pages(&mut self.random);
        let per_chunk = self.paged.layout.spec().pages_per_chunk as usize;
        let mut order = self.paged.order(direction, self.random.bool(), &all[..per_chunk]);
        if let crate::Work::Pages { pages, .. } = &mut order.work {
            pages.iter_mut().for_each(|copy| copy.block = self.paged.block(chunk));
        }
        self.last_number += 1;
        let number = OrderNumber(self.last_number);
        self.thread.submit(number, order.clone(), None).unwrap();
        (number, order)
    }

    fn until_done(&mut self, number: OrderNumber) -> Result<(), CopyError> {
        let done = |report| match report {
            DeviceReport::Done { number: of, result, .. } if of == number => Some(result),
            _ => None,
        };
        self.reports.iter().find_map(done).unwrap()
    }

    /// The results of two orders, whichever ends first.
    fn until_both_done(&mut self, one: OrderNumber, other: OrderNumber) -> [Result<(), CopyError>; 2] {
        let done = |report| match report {
            DeviceReport::Done { number, result, .. } => Some((number, result)),
            _ => None,
        };
        let ended: HashMap<_, _> = self.reports.iter().filter_map(done).take(2).collect();
        [ended[&one], ended[&other]]
    }

    fn until_gone(&mut self) {
        while !matches!(self.reports.recv().unwrap(), DeviceReport::Gone) {}
    }

    /// Saves a chunk.
    fn save(&mut self, chunk: u64) {
        let (number, _) = self.begin(Direction::Save, chunk);
        assert_eq!(self.until_done(number), Ok(()));
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
        let start = lane.paged.image();
        let (number, order) = lane.begin(Direction::Save, 0);
        assert_eq!(lane.until_done(number), Ok(()));
        let saved = lane.expected(start, &order);
        assert!(lane.paged.image() == saved);
        let (number, order) = lane.begin(Direction::Load, 0);
        assert_eq!(lane.until_done(number), Ok(()));
        assert!(lane.paged.image() == lane.expected(saved, &order));
        lane.thread.join();
    }
}

#[test]
fn a_copy_that_fails_at_any_point_is_told_so_and_the_next_goes_well() {
    for seed in seeds() {
        let mut lane = Lane::start(seed);
        for after in 0..=lane.pieces() {
            lane.control.fail_next(Fault::Fail { after });
            let (number, _) = lane.begin(Direction::Save, 0);
            assert_eq!(lane.until_done(number), Err(CopyError::Failed));
        }
        lane.control.fail_next(Fault::Refuse);
        let (number, _) = lane.begin(Direction::Save, 0);
        assert_eq!(lane.until_done(number), Err(CopyError::Refused));
        lane.save(0);
        lane.thread.join();
    }
}

#[test]
fn a_copy_that_stalls_at_any_point_keeps_its_place_and_nobody_else() {
    let mut lane = Lane::start(seeds().next().unwrap());
    for (chunk, after) in [0, 1, lane.pieces() / 2, lane.pieces()].into_iter().enumerate() {
        lane.control.fail_next(Fault::Stall { after });
        lane.begin(Direction::Save, chunk as u64);
        lane.save(CHUNKS - 1);
    }
    assert_eq!(lane.thread.outstanding(), 4);
}

#[test]
fn a_device_lost_at_any_point_says_so_of_each_copy_and_when_it_is_gone() {
    for (number, seed) in seeds().enumerate() {
        let mut lane = Lane::start(seed);
        lane.save(0);
        lane.control.fail_next(Fault::Stall { after: 1 });
        lane.control.fail_next(Fault::Lose { after: number as u32 });
        let (reading, _) = lane.begin(Direction::Load, 0);
        let (number, _) = lane.begin(Direction::Save, 1);
        assert_eq!(lane.until_done(reading), Err(CopyError::Lost));
        assert_eq!(lane.until_done(number), Err(CopyError::Lost));
        lane.until_gone();
        assert_eq!(lane.control.gone(), 1);
        let (number, _) = lane.begin(Direction::Load, 0);
        assert_eq!(lane.until_done(number), Err(CopyError::Refused));
    }
}

#[test]
fn a_device_that_cannot_be_given_up_is_never_said_to_be_gone() {
    let mut lane = Lane::start(6);
    lane.control.fail_next(Fault::Lose { after: 1 });
    lane.control.cling();
    let (number, _) = lane.begin(Direction::Save, 0);
    assert_eq!(lane.until_done(number), Err(CopyError::Lost));
    lane.thread.join();
    assert!(lane.reports.iter().all(|report| !matches!(report, DeviceReport::Gone)));
}

#[test]
fn a_driver_that_hangs_keeps_neither_its_callers_nor_other_devices() {
    let mut hung = Lane::start(1);
    let mut other = Lane::start(2);
    hung.control.hold_calls();
    let numbers: Vec<_> = (0..CHUNKS).map(|chunk| hung.begin(Direction::Save, chunk).0).collect();
    hung.control.wait_until_held();
    other.save(0);
    assert_eq!(hung.thread.outstanding(), CHUNKS as usize);
    hung.control.release_calls();
    for _ in &numbers {
        let done = hung.reports.iter().find(|report| matches!(report, DeviceReport::Done { .. }));
        assert!(matches!(done, Some(DeviceReport::Done { result: Ok(()), .. })));
    }
}

#[test]
fn an_order_given_up_while_the_driver_hangs_never_begins() {
    let mut lane = Lane::start(7);
    lane.control.hold_calls();
    let (busy, _) = lane.begin(Direction::Load, 0);
    lane.control.wait_until_held();
    let (given_up, _) = lane.begin(Direction::Load, 1);
    lane.thread.cancel(given_up).unwrap();
    lane.control.release_calls();
    assert_eq!(lane.until_both_done(busy, given_up), [Ok(()), Err(CopyError::Refused)]);
    let start = lane.paged.image();
    let (next, order) = lane.begin(Direction::Save, 2);
    assert_eq!(lane.until_done(next), Ok(()));
    assert!(lane.paged.image() == lane.expected(start, &order));
    lane.thread.join();
}

#[test]
fn an_order_given_up_before_it_begins_raises_its_flag() {
    let mut lane = Lane::start(8);
    lane.control.hold_calls();
    let (busy, mut order) = lane.begin(Direction::Load, 0);
    lane.control.wait_until_held();
    order.then = Some(crate::Flag { word: lane.paged.word(), value: 0 });
    let given_up = OrderNumber(9);
    lane.paged.arena.set_word(lane.paged.word().offset, 0);
    lane.thread.submit(given_up, order.clone(), None).unwrap();
    lane.thread.cancel(given_up).unwrap();
    lane.control.release_calls();
    assert_eq!(lane.until_both_done(busy, given_up), [Ok(()), Err(CopyError::Refused)]);
    assert_eq!(lane.paged.arena.word(lane.paged.word().offset), order.work.layers());
}

#[test]
fn an_order_that_no_device_ends_raises_its_flag() {
    let mut lane = Lane::start(10);
    let flags = HostMemory::allocate(4_096).unwrap();
    let mut words = (0..).map(|number| number * 4);
    let mut submit = |lane: &mut Lane, make: Result<Order, DeviceError>, end: Result<(), CopyError>| {
        let (number, offset) = (OrderNumber(100 + lane.last_number), words.next().unwrap());
        lane.last_number += 1;
        flags.set_word(offset, 7);
        let then = EndWord::new(flags.clone(), offset, 9);
        lane.thread.submit_made(number, then, move |_| make).unwrap();
        assert_eq!(lane.until_done(number), end);
        assert_eq!(flags.word(offset), 9, "somebody waits for ever");
    };
    submit(&mut lane, Err(DeviceError::Unknown), Err(CopyError::Refused));
    let order = lane.paged.order(Direction::Save, false, &[0, 0]);
    let unknown = Order { work: crate::Work::Blocks(Vec::new()), ..order.clone() };
    submit(&mut lane, Ok(unknown), Err(CopyError::Refused));
    lane.control.fail_next(Fault::Lose { after: 0 });
    submit(&mut lane, Ok(order.clone()), Err(CopyError::Lost));
    submit(&mut lane, Ok(order), Err(CopyError::Refused));
    lane.thread.join();
    let missing = [(4_096, &flags), (2, &flags)];
    assert!(missing.iter().all(|&(at, memory)| EndWord::new(memory.clone(), at, 0).is_none()));
}

#[test]
fn orders_are_refused_when_all_places_are_taken() {
    let lane = Lane::start(3);
    lane.control.hold_calls();
    let order = lane.paged.order(Direction::Save, false, &[0, 1]);
    for number in 0..ORDERS as u64 {
        assert_eq!(lane.thread.submit(OrderNumber(number), order.clone(), None), Ok(()));
    }
    assert_eq!(lane.thread.submit(OrderNumber(99), order.clone(), None), Err(Busy));
    assert_eq!(lane.thread.outstanding(), ORDERS);
    lane.control.release_calls();
    let first = lane.reports.iter().find(|report| matches!(report, DeviceReport::Done { .. })).unwrap();
    drop(first);
    assert_eq!(lane.thread.submit(OrderNumber(100), order, None), Ok(()));
    lane.thread.join();
}

#[test]
fn a_device_that_cannot_be_opened_is_told_and_refuses_all() {
    let (hear, reports) = channel();
    let open = || Err(DeviceError::Absent("no driver".into()));
    let thread = DeviceThread::start("device-test", 1, open, move |report| drop(hear.send(report))).unwrap();
    assert!(matches!(reports.recv().unwrap(), DeviceReport::Lost(DeviceError::Absent(_))));
    let lane = Lane::start(4);
    thread.submit(OrderNumber(1), lane.paged.order(Direction::Save, false, &[0, 1]), None).unwrap();
    let refused = reports.recv().unwrap();
    assert!(matches!(
        refused,
        DeviceReport::Done { number: OrderNumber(1), result: Err(CopyError::Refused), .. }
    ));
}

#[test]
fn a_device_that_panics_is_lost() {
    let mut lane = Lane::start(5);
    lane.thread.call(|_| panic!("a bug in a device")).unwrap();
    assert!(matches!(lane.reports.recv().unwrap(), DeviceReport::Lost(_)));
    lane.until_gone();
}
