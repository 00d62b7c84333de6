//! The CUDA device over a driver of host memory that does things in any order that streams and events allow.

mod fake;

use super::*;
use crate::layout::{Shape, VllmOrder, vllm};
use crate::order::{BlockMove, PageCopy, Work};
use crate::testing::{CHUNKS, Paged, layouts};
use crate::thread::{DeviceReport, DeviceThread};

fn open(form: Option<Form>, half_bytes: u64) -> CudaDevice {
    open_with(CudaOptions { half_bytes, form, ..CudaOptions::default() })
}

fn open_with(options: CudaOptions) -> CudaDevice {
    fake::library();
    CudaDevice::open(options).unwrap()
}

/// An engine's memory is host memory here, mapped by a descriptor.
fn import(device: &mut dyn Device, memory: HostMemory) -> RegionId {
    device.attach(memory).unwrap()
}

fn paged(device: &mut CudaDevice, layout: usize, random: &mut fastrand::Rng) -> Paged {
    let (_, layout, regions) = layouts().swap_remove(layout);
    Paged::new(device, layout, &regions, random, import)
}

fn until_done(
    device: &mut CudaDevice,
    number: OrderNumber,
) -> Result<(Vec<u32>, Result<(), CopyError>), DeviceError> {
    let (mut events, mut layers) = (Vec::new(), Vec::new());
    loop {
        device.poll(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Layers { number: of, done } if of == number => layers.push(done),
                Event::Done { number: of, result } if of == number => return Ok((layers, result)),
                _ => {}
            }
        }
    }
}

fn close(device: CudaDevice) {
    Box::new(device).close().unwrap();
    assert_eq!(fake::held(), [0, 0, 0], "contexts, device memory, pinned memory");
}

#[test]
fn every_layout_is_copied_both_ways_by_all_forms_as_the_reference_copies_it() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for (name, layout, regions) in layouts() {
        // So small that an order goes through the staging buffer in many pieces.
        let half_bytes = layout.plane_bytes() * random.u64(1..12);
        for form in Form::ALL {
            fake::seed(random.u64(..));
            let mut device = open(Some(form), half_bytes);
            let paged = Paged::new(&mut device, layout.clone(), &regions, &mut random, import);
            for number in 0..6 {
                let direction = if random.bool() { Direction::Load } else { Direction::Save };
                let order = paged.order(direction, random.bool(), &paged.pages(&mut random));
                let expected = paged.image().after(&paged, &order, layout.layers());
                device.start(OrderNumber(number), order).unwrap();
                let (_, result) = until_done(&mut device, OrderNumber(number)).unwrap();
                assert_eq!(result, Ok(()));
                assert!(paged.image() == expected, "{name}, {direction:?}, {form:?}");
            }
            close(device);
        }
    }
}

#[test]
fn orders_under_way_together_do_not_mix_in_the_staging_buffer() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..20 {
        fake::seed(random.u64(..));
        let (_, layout, regions) = layouts().swap_remove(random.usize(0..14));
        let mut device = open(Some(Form::Staged), layout.plane_bytes() * random.u64(1..8));
        let paged = Paged::new(&mut device, layout.clone(), &regions, &mut random, import);
        let pages = paged.pages(&mut random);
        let mut expected = paged.image();
        let per_chunk = layout.spec().pages_per_chunk as usize;
        for chunk in 0..CHUNKS as usize {
            // Chunks are apart, so that the order in which they end does not matter.
            let mut order = paged.order(Direction::Save, random.bool(), &pages);
            let Work::Pages { pages, .. } = &mut order.work else { unreachable!() };
            *pages = pages.split_off(chunk * per_chunk);
            pages.truncate(per_chunk);
            expected = expected.after(&paged, &order, layout.layers());
            device.start(OrderNumber(chunk as u64), order).unwrap();
        }
        let (mut events, mut ended) = (Vec::new(), 0);
        while ended < CHUNKS {
            device.poll(&mut events).unwrap();
            ended += events.drain(..).filter(|event| matches!(event, Event::Done { .. })).count() as u64;
        }
        assert!(paged.image() == expected);
        close(device);
    }
}

#[test]
fn a_layer_that_is_told_is_whole_and_its_flag_is_raised_by_the_stream() {
    for form in Form::ALL {
        let mut random = fastrand::Rng::with_seed(21);
        let mut device = open(Some(form), 64 << 10);
        let paged = paged(&mut device, 4, &mut random);
        let mut order = paged.order(Direction::Load, true, &paged.pages(&mut random));
        order.then = Some(Flag { word: paged.word(), value: 100 });
        paged.arena.set_word(paged.word().offset, 100);
        let start = paged.image();
        device.start(OrderNumber(1), order.clone()).unwrap();
        let (mut events, mut told, mut result) = (Vec::new(), 0, None);
        while result.is_none() {
            let raised = paged.arena.word(paged.word().offset) - 100;
            device.poll(&mut events).unwrap();
            for event in events.drain(..) {
                match event {
                    Event::Layers { done, .. } => {
                        assert_eq!(done, told + 1);
                        told = done;
                    }
                    Event::Done { result: of, .. } => result = Some(of),
                }
            }
            let expected = start.clone().after(&paged, &order, raised.max(told));
            for plane in 0..raised.max(told) {
                for run in (0..paged.layout.spec().pages).flat_map(|page| paged.layout.runs(plane, page)) {
                    let range = run.range.start as usize..run.range.end as usize;
                    assert_eq!(paged.image().engine[0][range.clone()], expected.engine[0][range]);
                }
            }
        }
        assert_eq!((told, result), (paged.layout.layers(), Some(Ok(()))));
        close(device);
    }
}

#[test]
fn a_copy_waits_for_its_flag_and_keeps_no_other_from_going() {
    let mut random = fastrand::Rng::with_seed(22);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    let pages = paged.pages(&mut random);
    let mut waiting = paged.order(Direction::Save, false, &pages);
    waiting.after = Some(Flag { word: paged.word(), value: 3 });
    paged.arena.set_word(paged.word().offset, 2);
    device.start(OrderNumber(1), waiting).unwrap();
    device.start(OrderNumber(2), paged.order(Direction::Save, false, &pages)).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(2)).unwrap().1, Ok(()));
    let mut events = Vec::new();
    (0..100).for_each(|_| device.poll(&mut events).unwrap());
    assert_eq!(events, []);
    paged.arena.set_word(paged.word().offset, 3);
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
    close(device);
}

#[test]
fn blocks_of_the_devices_pool_are_loaded_from_there() {
    let mut random = fastrand::Rng::with_seed(23);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 2, &mut random);
    let bytes = paged.layout.block_bytes();
    let pool = device.allocate(CHUNKS * bytes).unwrap();
    let up =
        |n| BlockMove { from: paged.block(n), to: RegionOffset { region: pool, offset: n * bytes }, bytes };
    let work = Work::Blocks((0..CHUNKS).map(up).collect());
    device
        .start(OrderNumber(1), Order { direction: Direction::Load, work, after: None, then: None })
        .unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
    let mut order = paged.order(Direction::Load, false, &paged.pages(&mut random));
    let expected = paged.image().after(&paged, &order, paged.layout.layers()).engine;
    let Work::Pages { pages, .. } = &mut order.work else { unreachable!() };
    pages.iter_mut().for_each(|copy| copy.block.region = pool);
    paged.arena.write(0, &vec![0; (CHUNKS * bytes) as usize]);
    device.start(OrderNumber(2), order).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(2)).unwrap().1, Ok(()));
    assert!(paged.image().engine == expected);
    close(device);
}

/// Calls that a copy is made of.
const CALLS: [&str; 9] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync_v2",
    "cuLaunchKernel",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuMemAlloc_v2",
    "cuMemHostRegister_v2",
];

#[test]
fn whichever_call_fails_the_copy_fails_and_the_next_goes_well() {
    let cases = CALLS.iter().flat_map(|call| (0..12).map(move |after| (call, after)));
    let cases = cases.flat_map(|case| [Form::Staged, Form::Batched].map(|form| (case, form)));
    for ((call, after), form) in cases {
        let mut random = fastrand::Rng::with_seed(24);
        let (_, layout, regions) = layouts().swap_remove(0);
        let mut device = open(Some(form), layout.plane_bytes() * 3);
        let paged = Paged::new(&mut device, layout, &regions, &mut random, import);
        let mut order = paged.order(Direction::Load, true, &paged.pages(&mut random));
        order.then = Some(Flag { word: paged.word(), value: 0 });
        paged.arena.set_word(paged.word().offset, 0);
        fake::fail(call, after, OUT_OF_MEMORY);
        match device.start(OrderNumber(1), order.clone()) {
            Ok(()) => {
                let (_, result) = until_done(&mut device, OrderNumber(1)).unwrap();
                assert!(matches!(result, Ok(()) | Err(CopyError::Failed)));
                let reached = paged.arena.word(paged.word().offset);
                assert_eq!(reached, paged.layout.layers(), "{call} {after}: somebody waits for ever");
                fake::fail("", 0, 0);
                let expected = paged.image().after(&paged, &order, paged.layout.layers()).engine;
                device.start(OrderNumber(2), order).unwrap();
                assert_eq!(until_done(&mut device, OrderNumber(2)).unwrap().1, Ok(()), "{call} {after}");
                assert!(paged.image().engine == expected);
            }
            // Not even the end could be marked: what was begun cannot be known to have ended.
            Err(error) => assert!(matches!(error, DeviceError::Lost(_)), "{call} {after}: {error}"),
        }
        fake::fail("", 0, 0);
        Box::new(device).close().unwrap();
    }
}

#[test]
fn a_context_that_breaks_at_any_point_is_lost_and_nobody_waits_for_ever() {
    for after in 0..60 {
        let mut random = fastrand::Rng::with_seed(25);
        fake::seed(after);
        let options = CudaOptions { only_copies: true, form: Some(Form::Staged), ..CudaOptions::default() };
        let mut device = open_with(CudaOptions { half_bytes: 64 << 10, ..options });
        let paged = paged(&mut device, 0, &mut random);
        let mut order = paged.order(Direction::Load, true, &paged.pages(&mut random));
        order.then = Some(Flag { word: paged.word(), value: 0 });
        paged.arena.set_word(paged.word().offset, 0);
        fake::break_after(after as i32);
        let lost = device
            .start(OrderNumber(1), order.clone())
            .and_then(|()| until_done(&mut device, OrderNumber(1)));
        let is_over = lost.is_ok();
        assert!(is_over || matches!(lost, Err(DeviceError::Lost(_))), "{lost:?}");
        assert_eq!(paged.arena.word(paged.word().offset), paged.layout.layers());
        if !is_over {
            assert!(matches!(device.start(OrderNumber(2), order), Err(DeviceError::Lost(_))));
            Box::new(device).close().unwrap();
            assert_eq!(fake::held()[0], 0, "the context is gone");
            assert_eq!(paged.arena.holders(), 1, "and holds no memory of the host");
        }
        fake::break_after(-1);
    }
}

#[test]
fn the_context_of_an_engine_is_never_ended_under_it() {
    let mut random = fastrand::Rng::with_seed(34);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    let started = fake::held();
    fake::break_after(0);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    let lost = until_done(&mut device, OrderNumber(1));
    assert!(matches!(lost, Err(DeviceError::Lost(_))), "{lost:?}");
    let closed = Box::new(device).close();
    assert!(matches!(closed, Err(DeviceError::Lost(_))), "{closed:?}");
    assert_eq!(fake::held()[0], started[0], "the engine's context is there");
    assert!(paged.arena.holders() > 1, "and memory that the GPU may touch is kept");
}

#[test]
fn two_devices_of_a_process_pin_one_piece_of_memory() {
    let mut devices = [open(None, 1 << 20), open(None, 1 << 20)];
    let memory = HostMemory::allocate(4_096).unwrap();
    let before = fake::held()[2];
    for device in &mut devices {
        device.attach(memory.clone()).unwrap();
    }
    assert_eq!(fake::held()[2], before + 1);
    let [first, second] = devices;
    Box::new(first).close().unwrap();
    assert_eq!(fake::held()[2], before + 1, "the other needs it");
    close(second);
    let mut third = open(None, 1 << 20);
    third.attach(memory).unwrap();
    close(third);
}

#[test]
fn tables_of_orders_that_ended_are_not_freed_beside_the_engines_work() {
    let mut random = fastrand::Rng::with_seed(35);
    let mut device = open(Some(Form::Direct), 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    let pages = paged.pages(&mut random);
    for number in 0..20 {
        device.start(OrderNumber(number), paged.order(Direction::Save, false, &pages)).unwrap();
    }
    let held = fake::held();
    let mut events = Vec::new();
    while events.len() < 20 {
        device.poll(&mut events).unwrap();
    }
    assert_eq!(fake::held(), held);
    close(device);
}

#[test]
fn an_error_that_leaves_the_context_whole_does_not_end_it_for_others_of_the_process() {
    let mut random = fastrand::Rng::with_seed(30);
    let of_another = open(None, 1 << 20);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    fake::fail("cuEventQuery", 0, CAPTURE_UNSUPPORTED);
    let lost = until_done(&mut device, OrderNumber(1));
    assert!(matches!(lost, Err(DeviceError::Lost(_))), "{lost:?}");
    Box::new(device).close().unwrap();
    assert_eq!(fake::held()[0], 1, "the context of the other is there");
    close(of_another);
}

#[test]
fn a_copy_whose_time_cannot_be_measured_goes_well() {
    let mut random = fastrand::Rng::with_seed(31);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    fake::fail("cuEventElapsedTime_v2", 0, CAPTURE_UNSUPPORTED);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
    close(device);
}

#[test]
fn a_graph_that_another_thread_captures_disturbs_no_copy() {
    let mut random = fastrand::Rng::with_seed(32);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    fake::capture(true);
    device.start(OrderNumber(1), paged.order(Direction::Save, false, &paged.pages(&mut random))).unwrap();
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
    fake::capture(false);
    close(device);
}

#[test]
fn a_long_order_of_many_layers_takes_no_more_memory_than_a_long_order_of_one() {
    let mut random = fastrand::Rng::with_seed(33);
    let shape =
        Shape { layers: 17, pages: 65_536, heads: 1, tokens: 1, content_bytes: 32, pages_per_chunk: 2 };
    let (spec, regions) = vllm(VllmOrder::Lhbnc, &shape);
    let layout = PagedLayout::new(spec, &regions).unwrap();
    // The smaller staging buffer has room for one plane at a time.
    for (half_bytes, by_layer, pages, kept) in [
        (1 << 20, true, 8_192, vec![4 << 20]),
        (1 << 20, true, 65_536, vec![1 << 20]),
        (64, false, 65_536, vec![1 << 20]),
    ] {
        let mut device = open(Some(Form::Staged), half_bytes);
        let paged = Paged::new(&mut device, layout.clone(), &regions, &mut random, import);
        let mut order = paged.order(Direction::Load, by_layer, &[0, 1]);
        let Work::Pages { pages: copies, .. } = &mut order.work else { unreachable!() };
        let chunk = copies.iter().copied().cycle();
        *copies = (0..pages).zip(chunk).map(|(page, copy)| PageCopy { page, ..copy }).collect();
        device.start(OrderNumber(1), order).unwrap();
        assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
        assert_eq!(device.tables.iter().map(KernelTable::bytes).collect::<Vec<_>>(), kept);
        close(device);
    }
}

#[test]
fn a_device_that_stands_still_tells_nothing() {
    let mut random = fastrand::Rng::with_seed(26);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    fake::stall(true);
    device.start(OrderNumber(1), paged.order(Direction::Save, true, &paged.pages(&mut random))).unwrap();
    let mut events = Vec::new();
    (0..1_000).for_each(|_| device.poll(&mut events).unwrap());
    assert_eq!(events, []);
    assert_eq!(device.detach(paged.arena_region), Err(DeviceError::InUse));
    fake::stall(false);
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap().1, Ok(()));
    close(device);
}

#[test]
fn a_copy_that_is_given_up_while_it_waits_moves_nothing_and_raises_its_flag() {
    let mut random = fastrand::Rng::with_seed(29);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 4, &mut random);
    let mut waiting = paged.order(Direction::Load, true, &paged.pages(&mut random));
    waiting.after = Some(Flag { word: paged.word(), value: 3 });
    let word = RegionOffset { offset: paged.word().offset + 4, ..paged.word() };
    waiting.then = Some(Flag { word, value: 7 });
    paged.arena.set_word(paged.word().offset, 2);
    let before = paged.image().engine;
    device.start(OrderNumber(1), waiting).unwrap();
    device.cancel(OrderNumber(1));
    device.cancel(OrderNumber(2));
    assert_eq!(until_done(&mut device, OrderNumber(1)).unwrap(), (vec![], Err(CopyError::Refused)));
    assert_eq!(paged.arena.word(word.offset), 7 + paged.layout.layers());
    assert!(paged.image().engine == before);
    device.unregister(paged.tensors).unwrap();
    close(device);
}

#[test]
fn a_gpu_is_found_by_its_place_on_the_bus() {
    fake::library();
    assert_eq!(ordinal_at(Some(PciPlace { domain: 1, bus: 1, device: 1 })), Ok(0));
    assert_eq!(ordinal_at(None), Ok(0), "the first one");
    let missing = ordinal_at(Some(PciPlace { domain: 0, bus: 0x65, device: 0 }));
    assert!(matches!(&missing, Err(DeviceError::Absent(why)) if why.contains("0000:65:00")), "{missing:?}");
}

#[test]
fn an_engines_memory_is_mapped_no_further_than_it_reaches() {
    let mut device = open(None, 1 << 20);
    let engine = device.allocate(4_096).unwrap();
    let address = device.registry.region_of(engine).address();
    let ipc = |offset, bytes| EngineMemory::Ipc { handle: fake::ipc_handle(address), offset, bytes };
    let region = device.import(ipc(1_024, 3_072)).unwrap();
    assert_eq!(device.registry.region_of(region).address(), address + 1_024);
    for (offset, bytes) in [(1_024, 3_073), (0, u64::MAX), (u64::MAX, 16)] {
        let refused = device.import(ipc(offset, bytes));
        assert!(matches!(refused, Err(DeviceError::Refused { .. })), "{refused:?}");
    }
    let refused = device.import(EngineMemory::Ipc { handle: [7; 64], offset: 0, bytes: 16 });
    assert!(matches!(refused, Err(DeviceError::Refused { .. })), "{refused:?}");
    assert!(device.import(EngineMemory::Own { address, bytes: 4_096 }).is_ok());
    assert!(device.import(EngineMemory::Own { address, bytes: 4_097 }).is_err());
    let descriptor = || {
        let file = rustix::fs::memfd_create("engine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8_192).unwrap();
        file
    };
    device.import(EngineMemory::Descriptor { descriptor: descriptor(), bytes: 8_192 }).unwrap();
    let too_long = device.import(EngineMemory::Descriptor { descriptor: descriptor(), bytes: 12_288 });
    assert!(matches!(too_long, Err(DeviceError::Refused { .. })), "{too_long:?}");
    close(device);
}

#[test]
fn forms_are_chosen_by_measurement_and_can_be_seen() {
    let mut random = fastrand::Rng::with_seed(27);
    let mut device = open(None, 1 << 20);
    let paged = paged(&mut device, 0, &mut random);
    let pages = paged.pages(&mut random);
    for number in 0..8 {
        device.start(OrderNumber(number), paged.order(Direction::Save, false, &pages)).unwrap();
        assert_eq!(until_done(&mut device, OrderNumber(number)).unwrap().1, Ok(()));
    }
    let [line] = &device.choices()[..] else { panic!("{:?}", device.choices()) };
    assert!(line.starts_with("save merged, runs from 512 B") && !line.contains(" 0.0 GB/s"), "{line}");
    close(device);
}

#[test]
fn a_thread_opens_its_gpu_and_gives_it_up_at_its_end() {
    fake::library();
    let (hear, reports) = std::sync::mpsc::channel();
    let open = || Ok(Box::new(CudaDevice::open(CudaOptions::default())?) as Box<dyn Device>);
    let thread = DeviceThread::start("gpu-test", 4, open, move |report| drop(hear.send(report))).unwrap();
    let (answer, paged) = std::sync::mpsc::channel();
    let of_call = move |device: &mut dyn Device| {
        let (_, layout, regions) = layouts().swap_remove(0);
        let mut random = fastrand::Rng::with_seed(28);
        answer.send(Paged::new(device, layout, &regions, &mut random, import)).unwrap();
    };
    thread.call(of_call).unwrap();
    let paged = paged.recv().unwrap();
    let order = paged.order(Direction::Save, false, &[3, 4]);
    let expected = paged.image().after(&paged, &order, paged.layout.layers());
    thread.submit(OrderNumber(1), order, None).unwrap();
    thread.join();
    let told: Vec<_> = reports.iter().collect();
    assert!(
        matches!(
            told[..],
            [DeviceReport::Done { number: OrderNumber(1), result: Ok(()), .. }, DeviceReport::Gone]
        ),
        "{told:?}"
    );
    assert!(paged.image() == expected);
}

const OUT_OF_MEMORY: i32 = 2;

const CAPTURE_UNSUPPORTED: i32 = 900;
