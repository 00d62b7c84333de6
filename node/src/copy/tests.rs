//! Tests of the copy pool.

use std::sync::atomic::AtomicBool;

use larder_protocol::checksum::{BlockKey, range_checksum};
use larder_protocol::{ChunkHash, Fingerprint};

use super::*;
use crate::arena::Arena;
use crate::arena::mapping::{Access, Mapping};
use crate::arena::tests::{arena, trusted_arena};
use crate::threads::pinned_to;

const KEY: BlockKey =
    BlockKey { fingerprint: Fingerprint([1; 32]), hash: ChunkHash([2; 32]), slice: 0, pool: 0 };

fn lane(queue_orders: usize) -> CopyPool {
    let limits = CopyLimits { threads: 2, cpus: pinned_to().unwrap(), queue_orders };
    CopyPool::start("larder-copy", &limits).unwrap()
}

/// A window filled with bytes that differ everywhere, and these bytes.
fn filled_window(bytes: usize) -> (Arc<Window>, Vec<u8>) {
    let window = Window::create(bytes as u64, None, None).unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut content = vec![0; bytes];
    fastrand::Rng::with_seed(seed).fill(&mut content);
    Mapping::new(window.descriptor(), window.bytes(), Access::Write).unwrap().write(0, &content).unwrap();
    (Arc::new(window), content)
}

fn block(arena: &Arena, source: u64, offset: u64, bytes: u64, range_bytes: u64) -> Move {
    let memory = Arc::clone(arena.extent(1));
    Move { source, is_in_place: false, to: Destination { memory, offset, bytes, range_bytes, key: KEY } }
}

fn checksums_of(content: &[u8], range_bytes: usize) -> Checksums {
    Checksums::of(&KEY, content.chunks(range_bytes).map(range_checksum))
}

fn in_arena(block: &Destination) -> Vec<u8> {
    let mut bytes = vec![0; block.bytes as usize];
    block.memory.copy_out(block.offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn blocks_arrive_byte_for_byte_with_the_checksums_of_what_arrived() {
    let arena = arena(2);
    let (window, content) = filled_window(1 << 20);
    let shapes =
        [(0, 0, 300_000, 100_000), (1001, 300_001, 4096, 4096), (500_000, 400_000, 500_003, 500_003)];
    let moves: Vec<Move> = shapes.iter().map(|&(s, o, b, r)| block(&arena, s, o, b, r)).collect();
    let order = CopyOrder::new(Some(window), moves.clone()).unwrap();
    assert!(!order.is_small());
    let done = lane(4).submit(order).unwrap().blocking_recv().unwrap();
    for (Move { source, to, .. }, checksums) in moves.iter().zip(done) {
        let expected = &content[*source as usize..][..to.bytes as usize];
        assert!(in_arena(to) == expected, "block at {source}");
        assert_eq!(checksums, checksums_of(expected, to.range_bytes as usize));
    }
    let untouched = Destination { offset: 304_097, bytes: 95_903, ..moves[0].to.clone() };
    assert!(in_arena(&untouched).iter().all(|&byte| byte == 0), "nothing is written beside the blocks");
}

#[test]
fn a_copy_by_many_threads_at_once_is_whole_and_told_once() {
    let arena = arena(2);
    let (window, content) = filled_window(1 << 20);
    let shapes = [(5, 0, 300_000, 7_000), (300_005, 300_032, 1, 1), (400_000, 400_000, 600_000, 65_536)];
    let moves: Vec<Move> = shapes.iter().map(|&(s, o, b, r)| block(&arena, s, o, b, r)).collect();
    for _ in 0..50 {
        let order = CopyOrder::new(Some(Arc::clone(&window)), moves.clone()).unwrap();
        let (copy, done) = SharedCopy::new(order);
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| while !copy.help(200_000) {}))));
        for (Move { source, to, .. }, checksums) in moves.iter().zip(done.blocking_recv().unwrap()) {
            let expected = &content[*source as usize..][..to.bytes as usize];
            assert!(in_arena(to) == expected, "block at {source}");
            assert_eq!(checksums, checksums_of(expected, to.range_bytes as usize));
        }
    }
}

#[test]
fn a_large_copy_gives_way_to_the_orders_behind_it() {
    let arena = arena(2);
    let (window, _) = filled_window(1 << 20);
    let queue = Queue::new(2);
    let send = |blocks: u64| {
        let moves = (0..blocks).map(|_| block(&arena, 0, 0, 1 << 20, 64 << 10)).collect();
        let (copy, done) = SharedCopy::new(CopyOrder::new(Some(Arc::clone(&window)), moves).unwrap());
        assert!(queue.send(CopyJob::Copy(Arc::new(copy))).is_ok());
        done
    };
    let (mut large, mut small) = (send(20), send(1));
    let perform = || queue.take().unwrap().perform();
    queue.put_back(perform().expect("it has more than one turn"));
    assert!(perform().is_none() && small.try_recv().is_ok());
    assert!(large.try_recv().is_err());
    assert!(perform().is_none() && large.try_recv().is_ok());
}

#[test]
fn an_order_of_nothing_is_done_at_once() {
    let order = CopyOrder::new(None, Vec::new()).unwrap();
    assert_eq!(lane(1).submit(order).unwrap().blocking_recv(), Ok(Vec::new()));
}

#[test]
fn the_sums_are_those_of_the_arena_though_the_engine_writes_its_window_meanwhile() {
    let arena = arena(2);
    let (window, _) = filled_window(512 << 10);
    let engine = Mapping::new(window.descriptor(), window.bytes(), Access::Write).unwrap();
    let (is_over, lane) = (AtomicBool::new(false), lane(4));
    let mut torn = 0;
    std::thread::scope(|scope| {
        let _end = End(&is_over);
        scope.spawn(|| {
            for value in (0..=u8::MAX).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                engine.write(0, &vec![value; 512 << 10]).unwrap();
            }
        });
        for _ in 0..200 {
            let moves = vec![
                block(&arena, 0, 0, 256 << 10, 64 << 10),
                block(&arena, 300_001, 300_000, 99_999, 1_000),
            ];
            let order = CopyOrder::new(Some(Arc::clone(&window)), moves.clone()).unwrap();
            let done = lane.submit(order).unwrap().blocking_recv().unwrap();
            for (Move { to, .. }, checksums) in moves.iter().zip(done) {
                let arrived = in_arena(to);
                assert_eq!(checksums, checksums_of(&arrived, to.range_bytes as usize));
                torn += usize::from(arrived.iter().any(|&byte| byte != arrived[0]));
            }
        }
    });
    assert!(torn > 0, "the engine changed nothing while it was copied: this test showed nothing");
}

/// Ends a thread, even if the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_small_order_does_the_same_on_the_callers_thread() {
    let arena = arena(2);
    let (window, content) = filled_window(8192);
    let moves = vec![block(&arena, 100, 200, 4000, 1000)];
    let order = CopyOrder::new(Some(window), moves).unwrap();
    assert!(order.is_small());
    assert_eq!(order.perform(), [checksums_of(&content[100..4100], 1000)]);
    assert!(in_arena(&order.moves[0].to) == content[100..4100]);
}

#[test]
fn what_a_trusted_engine_wrote_into_the_arena_is_read_once_for_its_checksums() {
    let arena = trusted_arena(2);
    let content: Vec<u8> = (0..400_000_u32).map(|i| (i / 3) as u8).collect();
    Mapping::new(arena.extent(1).descriptor(), arena.extent(1).bytes(), Access::Write)
        .unwrap()
        .write(77, &content)
        .unwrap();
    let order = CopyOrder::new(None, vec![block(&arena, 0, 77, 400_000, 300_000)]).unwrap();
    let done = lane(1).submit(order).unwrap().blocking_recv().unwrap();
    assert_eq!(done, [checksums_of(&content, 300_000)]);
}

#[test]
fn places_outside_of_their_memory_are_refused_before_anything_is_done() {
    let arena = arena(2);
    let window = Some(Arc::new(Window::create(4096, None, None).unwrap()));
    let order = |block| CopyOrder::new(window.clone(), vec![block]).map(|_| ()).unwrap_err();
    assert_eq!(
        order(block(&arena, 4000, 0, 97, 97)),
        OutOfBounds { offset: 4000, bytes: 97, size: 4096 },
        "the engine named a place outside of its window"
    );
    let size = arena.extent(0).bytes();
    assert_eq!(order(block(&arena, 0, size, 1, 1)), OutOfBounds { offset: size, bytes: 1, size });
    assert_eq!(
        order(block(&arena, u64::MAX, 0, 2, 2)),
        OutOfBounds { offset: u64::MAX, bytes: 2, size: 4096 }
    );
}

#[test]
fn a_full_queue_refuses_the_order_instead_of_blocking() {
    let queue = Arc::new(Queue::new(1));
    let lane = CopyPool { queue: Arc::clone(&queue), threads: Vec::new(), idle: Arc::default() };
    let arena = &mut arena(2);
    let window = Arc::new(Window::create(4096, None, None).unwrap());
    let order =
        |bytes| CopyOrder::new(Some(Arc::clone(&window)), vec![block(arena, 0, 0, bytes, 4096)]).unwrap();
    let mut first = lane.submit(order(1)).unwrap();
    assert!(lane.submit(order(2)).is_none());
    assert_eq!(lane.renew(arena.vacate(0)).unwrap_err().extent, 0);
    assert!(first.try_recv().is_err(), "nothing is done yet");
    assert!(queue.take().unwrap().perform().is_none());
    assert_eq!(first.blocking_recv().unwrap().len(), 1);
}

#[test]
fn dropping_the_lane_finishes_what_was_ordered() {
    let arena = arena(2);
    let (window, content) = filled_window(1 << 20);
    let lane = lane(16);
    let orders: Vec<CopyDone> = (0..16)
        .map(|i| {
            let moves = vec![block(&arena, i << 16, i << 16, 1 << 16, 1 << 16)];
            lane.submit(CopyOrder::new(Some(Arc::clone(&window)), moves).unwrap()).unwrap()
        })
        .collect();
    drop(lane);
    assert!(in_arena(&block(&arena, 0, 0, 1 << 20, 1).to) == content);
    assert!(orders.into_iter().all(|mut done| done.try_recv().is_ok()));
}

#[test]
fn an_extent_is_renewed_while_others_are_copied_to() {
    let mut arena = arena(2);
    let lane = lane(4);
    let (window, _) = filled_window(4096);
    let before = Arc::downgrade(arena.extent(0));
    let renewed = lane.renew(arena.vacate(0)).unwrap();
    let order = CopyOrder::new(Some(window), vec![block(&arena, 0, 0, 4096, 4096)]).unwrap();
    let copied = lane.submit(order).unwrap();
    arena.occupy(0, renewed.blocking_recv().unwrap().unwrap());
    assert_eq!(copied.blocking_recv().unwrap().len(), 1);
    assert_eq!(before.strong_count(), 0, "the old memory is given back");
    assert_eq!(arena.extent(0).bytes(), arena.extent(1).bytes());
}

#[test]
fn after_a_panic_in_an_order_the_lane_goes_on() {
    let arena = arena(2);
    let lane = lane(4);
    // Made without the checks of `CopyOrder::new`: a bug of ours.
    let broken = CopyOrder { window: None, moves: vec![block(&arena, 0, u64::MAX, 1, 1)] };
    assert!(lane.submit(broken).unwrap().blocking_recv().is_err());
    let (window, _) = filled_window(4096);
    for _ in 0..4 {
        let order = CopyOrder::new(Some(Arc::clone(&window)), vec![block(&arena, 0, 0, 9, 9)]).unwrap();
        assert!(lane.submit(order).unwrap().blocking_recv().is_ok());
    }
}
