//! The device of host memory: it copies as the reference does, and goes wrong as it is told to.

use super::*;
use crate::order::{Flag, RegionOffset};
use crate::testing::{Paged, layouts};

fn import(control: &HostControl) -> impl Fn(&mut dyn Device, HostMemory) -> RegionId {
    let control = control.clone();
    move |device, memory| {
        control.share(memory.clone());
        device.import(EngineMemory::Own { address: 0, bytes: memory.bytes() }).unwrap()
    }
}

fn until_done(device: &mut HostDevice, number: OrderNumber) -> (Vec<u32>, Result<(), CopyError>) {
    let (mut events, mut layers) = (Vec::new(), Vec::new());
    loop {
        device.poll(&mut events).unwrap();
        for event in events.drain(..) {
            match event {
                Event::Layers { number: of, done } if of == number => layers.push(done),
                Event::Done { number: of, result } if of == number => return (layers, result),
                _ => {}
            }
        }
    }
}

fn one(seed: u64) -> (HostDevice, HostControl, Paged, fastrand::Rng) {
    let control = HostControl::default();
    let mut device = HostDevice::new(seed, control.clone());
    let mut random = fastrand::Rng::with_seed(seed);
    let (_, layout, regions) = layouts().swap_remove(4);
    let paged = Paged::new(&mut device, layout, &regions, &mut random, import(&control));
    (device, control, paged, random)
}

#[test]
fn every_layout_is_copied_both_ways_as_the_reference_copies_it() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for (name, layout, regions) in layouts() {
        for (direction, by_layer) in [
            (Direction::Save, false),
            (Direction::Load, false),
            (Direction::Save, true),
            (Direction::Load, true),
        ] {
            let control = HostControl::default();
            let mut device = HostDevice::new(random.u64(..), control.clone());
            let paged = Paged::new(&mut device, layout.clone(), &regions, &mut random, import(&control));
            let order = paged.order(direction, by_layer, &paged.pages(&mut random));
            let expected = paged.image().after(&paged, &order, layout.layers());
            device.start(OrderNumber(1), order).unwrap();
            let (layers, result) = until_done(&mut device, OrderNumber(1));
            assert_eq!(result, Ok(()));
            assert!(paged.image() == expected, "{name}, {direction:?}");
            assert_eq!(layers.last().copied(), by_layer.then_some(layout.layers()));
        }
    }
}

#[test]
fn a_layer_that_is_told_is_whole_while_the_others_are_under_way() {
    let (mut device, _, paged, mut random) = one(7);
    let mut order = paged.order(Direction::Load, true, &paged.pages(&mut random));
    order.then = Some(Flag { word: paged.word(), value: u32::MAX - 1 });
    paged.arena.set_word(paged.word().offset, u32::MAX - 1);
    let start = paged.image();
    device.start(OrderNumber(1), order.clone()).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        device.poll(&mut events).unwrap();
    }
    let Some(&Event::Layers { done, .. }) = events.first() else { panic!("{events:?}") };
    let expected = start.after(&paged, &order, done);
    for plane in paged.layout.planes_of(&(0..done)) {
        for page in 0..paged.layout.spec().pages {
            for run in paged.layout.runs(plane, page) {
                let range = run.range.start as usize..run.range.end as usize;
                assert_eq!(paged.image().engine[0][range.clone()], expected.engine[0][range]);
            }
        }
    }
    assert_eq!(paged.arena.word(paged.word().offset), (u32::MAX - 1).wrapping_add(done));
}

#[test]
fn a_copy_begins_when_its_flag_is_reached_and_keeps_no_other_from_going() {
    let (mut device, _, paged, mut random) = one(8);
    let pages = paged.pages(&mut random);
    let mut waiting = paged.order(Direction::Save, false, &pages);
    waiting.after = Some(Flag { word: paged.word(), value: 3 });
    paged.arena.set_word(paged.word().offset, 2);
    device.start(OrderNumber(1), waiting).unwrap();
    device.start(OrderNumber(2), paged.order(Direction::Load, false, &pages)).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(2)).1, Ok(()));
    let before = paged.image();
    let mut events = Vec::new();
    (0..100).for_each(|_| device.poll(&mut events).unwrap());
    assert!(events.is_empty() && paged.image() == before);
    paged.arena.set_word(paged.word().offset, 4);
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Ok(()));
}

#[test]
fn a_copy_that_is_given_up_while_it_waits_moves_nothing_and_raises_its_flag() {
    let (mut device, _, paged, mut random) = one(12);
    let pages = paged.pages(&mut random);
    let mut waiting = paged.order(Direction::Load, true, &pages);
    waiting.after = Some(Flag { word: paged.word(), value: 3 });
    let word = RegionOffset { offset: paged.word().offset + 4, ..paged.word() };
    waiting.then = Some(Flag { word, value: 7 });
    paged.arena.set_word(paged.word().offset, 2);
    device.start(OrderNumber(1), waiting).unwrap();
    device.start(OrderNumber(2), paged.order(Direction::Load, false, &pages)).unwrap();
    let before = paged.image().engine;
    device.cancel(OrderNumber(1));
    device.cancel(OrderNumber(2));
    device.cancel(OrderNumber(3));
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Err(CopyError::Refused));
    assert_eq!(paged.arena.word(word.offset), 7 + paged.layout.layers());
    assert_eq!(until_done(&mut device, OrderNumber(2)).1, Ok(()), "one that may begin goes on");
    assert!(paged.image().engine != before);
    device.unregister(paged.tensors).unwrap();
}

#[test]
fn an_engines_memory_is_mapped_by_its_descriptor_no_further_than_it_reaches() {
    let (mut device, ..) = one(13);
    let file = rustix::fs::memfd_create("engine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8_192).unwrap();
    let memory = |bytes| EngineMemory::Descriptor { descriptor: file.try_clone().unwrap(), bytes };
    let region = device.import(memory(8_192)).unwrap();
    device.registry.region_of(region).memory.write(4_096, b"seen by both");
    let mut seen = [0; 12];
    rustix::io::pread(&file, &mut seen, 4_096).unwrap();
    assert_eq!(&seen, b"seen by both");
    assert!(matches!(device.import(memory(12_288)), Err(DeviceError::Refused { .. })));
}

#[test]
fn orders_end_in_another_order_than_they_began_in() {
    let (mut device, _, paged, _) = one(9);
    let single = |page| paged.order(Direction::Save, false, &[page, page + 1]);
    let numbers: Vec<u64> = (0..5).collect();
    for &number in &numbers {
        device.start(OrderNumber(number), single(number as u32 * 2)).unwrap();
    }
    let (mut events, mut ended) = (Vec::new(), Vec::new());
    while ended.len() < numbers.len() {
        device.poll(&mut events).unwrap();
        ended.extend(events.drain(..).map(|event| match event {
            Event::Done { number, .. } | Event::Layers { number, .. } => number.0,
        }));
    }
    assert_ne!(ended, numbers);
}

#[test]
fn the_end_of_a_copy_can_be_reported_late() {
    let (mut device, control, paged, mut random) = one(10);
    control.be_late(1_000);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    let mut events = Vec::new();
    for _ in 0..1_000 {
        device.poll(&mut events).unwrap();
        assert_eq!(events, []);
    }
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Ok(()));
}

#[test]
fn a_failed_copy_raises_its_flag_so_that_nobody_waits_for_ever() {
    let (mut device, control, paged, mut random) = one(11);
    let mut order = paged.order(Direction::Load, true, &paged.pages(&mut random));
    order.then = Some(Flag { word: paged.word(), value: 10 });
    control.fail_next(Fault::Fail { after: 3 });
    device.start(OrderNumber(1), order).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Err(CopyError::Failed));
    assert_eq!(paged.arena.word(paged.word().offset), 10 + paged.layout.layers());
}

#[test]
fn what_orders_or_tensors_use_is_not_given_up() {
    let (mut device, _, paged, mut random) = one(12);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    assert_eq!(device.detach(paged.arena_region), Err(DeviceError::InUse));
    assert_eq!(device.unregister(paged.tensors), Err(DeviceError::InUse));
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Ok(()));
    assert_eq!(device.detach(paged.arena_region), Ok(()));
    assert_eq!(device.unregister(paged.tensors), Ok(()));
    assert_eq!(device.unregister(paged.tensors), Err(DeviceError::Unknown));
}

#[test]
fn blocks_move_between_the_devices_pool_and_the_host() {
    let (mut device, _, paged, _) = one(13);
    let pool = device.allocate(1 << 20).unwrap();
    let bytes = paged.layout.block_bytes();
    let start = paged.image();
    let places: Vec<_> =
        (0..3).map(|n| (paged.block(n), RegionOffset { region: pool, offset: n * bytes })).collect();
    let order = |direction, moves| Order { direction, work: Work::Blocks(moves), after: None, then: None };
    let up = places.iter().map(|&(from, to)| BlockMove { from, to, bytes }).collect();
    device.start(OrderNumber(1), order(Direction::Load, up)).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(1)).1, Ok(()));
    paged.arena.write(0, &vec![0xAB; 3 * bytes as usize]);
    let down = places.iter().map(|&(to, from)| BlockMove { from, to, bytes }).collect();
    device.start(OrderNumber(2), order(Direction::Save, down)).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(2)).1, Ok(()));
    assert!(paged.image() == start);
}

#[test]
fn orders_that_would_touch_what_they_may_not_are_refused() {
    use crate::order::OrderError;
    let (mut device, _, paged, mut random) = one(14);
    let read_only = {
        let memory = HostMemory::allocate(1 << 20).unwrap();
        let start = std::ptr::NonNull::new(memory.as_ptr()).unwrap();
        device.attach(crate::memory::read_only(start, memory)).unwrap()
    };
    type Spoil = Box<dyn Fn(&mut Order)>;
    fn pages(order: &mut Order) -> &mut Vec<PageCopy> {
        let Work::Pages { pages, .. } = &mut order.work else { unreachable!() };
        pages
    }
    let end = paged.arena.bytes();
    let word = paged.word();
    let cases: Vec<Spoil> = vec![
        Box::new(|order| pages(order).clear()),
        Box::new(|order| pages(order)[0].page = 12),
        Box::new(|order| pages(order)[0].in_chunk = 2),
        Box::new(move |order| pages(order)[0].block.offset = end),
        Box::new(|order| pages(order)[0].block.offset = u64::MAX - 15),
        Box::new(|order| pages(order)[0].block.offset += 8),
        Box::new(|order| pages(order)[0].block.region = RegionId(99)),
        Box::new(move |order| pages(order)[0].block.region = read_only),
        Box::new(|order| pages(order)[1] = pages(order)[0]),
        Box::new(|order| pages(order)[9].block.offset -= 16),
        Box::new(|order| {
            let Work::Pages { layers, .. } = &mut order.work else { unreachable!() };
            *layers = 3..5;
        }),
        Box::new(|order| {
            let Work::Pages { tensors, .. } = &mut order.work else { unreachable!() };
            *tensors = TensorsId(99);
        }),
        Box::new(move |order| {
            order.after = Some(Flag { word: RegionOffset { offset: word.offset + 2, ..word }, value: 0 });
        }),
        Box::new(move |order| {
            order.then = Some(Flag { word: RegionOffset { region: read_only, ..word }, value: 0 })
        }),
    ];
    for (number, spoil) in cases.iter().enumerate() {
        let mut order = paged.order(Direction::Save, false, &paged.pages(&mut random));
        spoil(&mut order);
        let refused = device.start(OrderNumber(number as u64), order);
        assert!(matches!(refused, Err(DeviceError::Order(_))), "case {number}: {refused:?}");
    }
    let mut twice = paged.order(Direction::Load, false, &paged.pages(&mut random));
    pages(&mut twice)[0].page = pages(&mut twice)[1].page;
    assert_eq!(device.start(OrderNumber(99), twice), Err(DeviceError::Order(OrderError::Overlap)));
    device.unregister(paged.tensors).unwrap();
}
