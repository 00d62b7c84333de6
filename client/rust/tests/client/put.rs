//! Writing what a node lacks.

use std::os::fd::AsFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use larder_client::{Counters, Session, SessionError, SessionOptions, StagedChunk};
use larder_ipc::Mapping;
use larder_protocol::session::{Busy, Commit, Extent, Request, Reserved, Response, Scarce};
use tokio::time::timeout;

use crate::fake_node::{
    BLOCK_BYTES, FakeNode, ROOM_BYTES, SLICES, arena, chain, node, options, pattern, reserved, sealed, spec,
};

/// Fills a chunk so that block `i` of the chunk at `p` has `pattern(p * 4 + i, _)`. Writes each block in two pieces.
fn fill(staged: &mut StagedChunk) {
    for block in 0..4 {
        let bytes = pattern(staged.position() as usize * 4 + block, BLOCK_BYTES[block % 2]);
        staged.copy_from(block, 0, &bytes[..50]);
        staged.copy_from(block, 50, &bytes[50..]);
    }
}

fn expect_commit(node: &mut FakeNode, window: &Mapping, chunks: &[u32]) {
    let (number, request) = node.next().unwrap();
    let Request::Commit(Commit { reservation: 21, chunks: committed, sources }) = request else {
        panic!("{request:?} is no commit of reservation 21");
    };
    assert_eq!(committed, chunks);
    assert_eq!(sources.len(), chunks.len() * 4);
    for (i, source) in sources.into_iter().enumerate() {
        let mut copy = vec![0; BLOCK_BYTES[i % 2] as usize];
        window.copy_to(source, &mut copy);
        assert_eq!(copy, pattern(chunks[i / 4] as usize * 4 + i % 4, copy.len() as u64));
        assert_eq!(source % 64, 0);
    }
    node.answer(number, &Response::Committed(chunks.len() as u32), Vec::new());
}

/// The window has room for two chunks; three chunks are reserved.
fn script(mut node: FakeNode) {
    let window = node.open(2_000).unwrap();
    node.answer_next(&reserved(21, [1, 2, 4]), Vec::new());
    expect_commit(&mut node, &window, &[1, 2]);
    expect_commit(&mut node, &window, &[4]);
    // Nothing is left to abort.
    assert_eq!(node.next(), None);
}

#[tokio::test]
async fn staged_chunks_arrive_byte_for_byte() {
    let (socket, node) = node(script);
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(5), 0).await.unwrap();
    assert_eq!(reservation.chunks(), [1, 2, 4]);
    for positions in [&[1, 2][..], &[4]] {
        let mut staged = Vec::new();
        for &position in positions {
            let mut chunk = session.stage(&reservation, position).await.unwrap();
            fill(&mut chunk);
            staged.push(chunk);
        }
        assert_eq!(session.commit(&reservation, staged).await.unwrap(), positions.len() as u32);
    }
    assert_eq!(session.counters(), Counters { bytes_written: 3 * 800, ..Counters::default() });
    drop((session, reservation));
    node.join().unwrap();
}

#[test]
fn a_threads_staged_chunks_arrive_byte_for_byte() {
    let (socket, node) = node(script);
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve(&namespace, &chain(5), 0).wait().unwrap();
    for positions in [&[1, 2][..], &[4]] {
        let staged = positions.iter().map(|&position| {
            let mut chunk = session.stage(&reservation, position).wait().unwrap();
            fill(&mut chunk);
            chunk
        });
        let staged = staged.collect();
        assert_eq!(session.commit(&reservation, staged).wait().unwrap(), positions.len() as u32);
    }
    drop((session, reservation));
    node.join().unwrap();
}

#[tokio::test]
async fn chunks_and_layers_that_a_busy_node_did_not_take_stay_staged() {
    let busy = || Response::Busy(Busy { what: Scarce::Memory, retry_after_ms: 5 });
    let (socket, node) = node(move |mut node| {
        let window = node.open(2_000).unwrap();
        node.answer_next(&reserved(21, [1, 2]), Vec::new());
        assert!(matches!(node.answer_next(&busy(), Vec::new()), Request::Commit(_)));
        expect_commit(&mut node, &window, &[1]);
        let first = node.answer_next(&busy(), Vec::new());
        assert!(matches!(first, Request::HandOver(_)));
        assert_eq!(node.answer_next(&Response::HandedOver, Vec::new()), first);
        assert_eq!(node.next().unwrap().1, Request::Abort(21));
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(5), 0).await.unwrap();
    let mut staged = session.stage_chunks(&reservation, &[1]).await.unwrap();
    fill(&mut staged[0]);
    let refused = session.commit_staged(&reservation, &staged).await;
    assert!(matches!(refused, Err(SessionError::Busy { .. })));
    assert_eq!(session.commit_staged(&reservation, &staged).await.unwrap(), 1);
    drop(staged);
    let layers = session.stage_layers(&reservation, &[2], 0, 0..1).await.unwrap();
    assert!(matches!(session.hand_over_staged(&layers).await, Err(SessionError::Busy { .. })));
    session.hand_over_staged(&layers).await.unwrap();
    drop(layers);
    // All room is free again.
    assert_eq!(session.stage_chunks(&reservation, &[1, 2]).await.unwrap().len(), 2);
    drop((session, reservation));
    node.join().unwrap();
}

#[tokio::test]
async fn two_callers_that_each_need_most_of_the_window_do_not_wait_for_each_other() {
    let (socket, node) = node(|mut node| {
        node.open(2_000).unwrap();
        node.answer_next(&reserved(21, [1, 2, 4]), Vec::new());
        while node.next().is_some() {}
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(5), 0).await.unwrap();
    let one = session.stage(&reservation, 4).await.unwrap();
    // Half of the window is free: two chunks wait, and take nothing from a chunk that fits.
    let mut both = session.stage_chunks(&reservation, &[1, 2]).into_future();
    assert!(timeout(Duration::ZERO, &mut both).await.is_err());
    let other = session.stage(&reservation, 4).wait().unwrap();
    drop((one, other));
    let staged = both.await.unwrap();
    assert_eq!(staged.iter().map(StagedChunk::position).collect::<Vec<_>>(), [1, 2]);
    assert!(matches!(
        session.stage_chunks(&reservation, &[1, 2, 4]).await,
        Err(SessionError::WindowTooSmall { chunk_bytes, window_bytes: 2_000 }) if chunk_bytes == 3 * ROOM_BYTES
    ));
    drop((session, reservation, staged));
    node.join().unwrap();
}

#[test]
fn a_thread_that_waits_for_room_takes_the_late_answer_that_frees_it() {
    let (has_timed_out, client) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(2_000).unwrap();
        node.answer_next(&reserved(21, [1, 2, 4]), Vec::new());
        let (number, commit) = node.next().unwrap();
        assert!(matches!(commit, Request::Commit(_)));
        client.recv().unwrap();
        // By then the thread waits for room.
        assert_eq!(client.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout));
        node.answer(number, &Response::Committed(2), Vec::new());
        while node.next().is_some() {}
    });
    let options = SessionOptions { timeout: Duration::from_secs(1), ..options() };
    let session = Session::open(socket, options).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve(&namespace, &chain(5), 0).wait().unwrap();
    let staged = session.stage_chunks(&reservation, &[1, 2]).wait().unwrap();
    assert!(matches!(session.commit(&reservation, staged).wait(), Err(SessionError::Timeout)));
    has_timed_out.send(()).unwrap();
    assert_eq!(session.stage(&reservation, 4).wait().unwrap().position(), 4);
    drop((session, reservation));
    node.join().unwrap();
}

#[test]
fn a_trusted_engine_writes_straight_into_the_arena() {
    let (socket, node) = node(|mut node| {
        node.welcome(0, true);
        node.register();
        let (places, expected) = arena(9, 2);
        let bytes = expected.len() as u64;
        let memory = sealed(&vec![0; expected.len()]);
        let view = Mapping::read_only(memory.as_fd(), bytes).unwrap();
        let extents = vec![Extent { extent: 9, bytes }];
        let chunks = vec![0, 1];
        let reserved =
            Reserved { reservation: 21, chunks, pools: Vec::new(), places, deadline_ms: 5_000, extents };
        node.answer_next(&Response::Reserved(reserved), vec![memory]);
        let commit = Commit { reservation: 21, chunks: vec![1, 0], sources: Vec::new() };
        let number = node.expect(&Request::Commit(commit));
        let mut copy = vec![0; expected.len()];
        view.copy_to(0, &mut copy);
        assert_eq!(copy, expected);
        node.answer(number, &Response::Committed(2), Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).wait().unwrap();
    let mut staged = [1, 0].map(|position| session.stage(&reservation, position).wait().unwrap());
    staged.iter_mut().for_each(fill);
    assert_eq!(session.commit(&reservation, staged.into()).wait().unwrap(), 2);
    drop((session, reservation));
    node.join().unwrap();
}

#[test]
fn a_chunk_larger_than_the_window_is_refused() {
    let (socket, node) = node(|mut node| {
        node.open(ROOM_BYTES as usize - 1);
        node.answer_next(&reserved(21, [0]), Vec::new());
        node.expect(&Request::Abort(21));
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve(&namespace, &chain(1), 0).wait().unwrap();
    let staged = session.stage(&reservation, 0).wait();
    assert!(matches!(
        staged,
        Err(SessionError::WindowTooSmall { chunk_bytes: ROOM_BYTES, window_bytes: 895 })
    ));
    drop(reservation);
    node.join().unwrap();
}
