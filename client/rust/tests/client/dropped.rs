//! Grants that callers give up are given back.

use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use larder_client::{Call, FollowOptions, LookupOptions, Session, SessionError};
use larder_protocol::handoff::InPlace;
use larder_protocol::session::{Leased, Pinned, Request, Response};

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, found, leased, node, options, reserved, spec};

/// Starts a request, so that it is sent, and drops it.
fn give_up<T: Send + 'static>(call: Call<T>) {
    let polled = call.into_future().as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
}

#[tokio::test]
async fn what_a_late_answer_grants_is_given_back() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let numbers = [(); 5].map(|()| node.next().unwrap().0);
        let (response, descriptors) = leased(31, 1, 1);
        node.answer(numbers[0], &response, descriptors);
        node.answer(numbers[1], &reserved(32, [0]), Vec::new());
        let pinned = Pinned { pin: 33, chunks: 1, duration_ms: 9 };
        node.answer(numbers[2], &Response::Pinned(pinned), Vec::new());
        node.answer(numbers[3], &found(16, Some(34)), Vec::new());
        node.expect(&Request::Release(31));
        for given_back in [Request::Abort(32), Request::Unpin(33), Request::Unpin(34)] {
            let number = node.expect(&given_back);
            node.answer(number, &Response::Unpinned, Vec::new());
        }
        // A caller that waits keeps its pin.
        node.answer(numbers[4], &found(16, Some(35)), Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let chain = chain(1);
    let minute = Duration::from_secs(60);
    let pinning = LookupOptions { pin: Some(minute), ..LookupOptions::default() };
    give_up(session.lease(&namespace, &chain));
    give_up(session.reserve(&namespace, &chain, 0));
    give_up(session.pin(&namespace, &chain, minute));
    give_up(session.lookup(&namespace, &chain, pinning.clone()));
    assert_eq!(session.lookup(&namespace, &chain, pinning).await.unwrap().pin, Some(35));
    drop(session);
    node.join().unwrap();
}

#[test]
fn a_late_answer_to_a_thread_is_given_back() {
    let (timed_out, resume) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        let number = node.next().unwrap().0;
        resume.recv().unwrap();
        let (response, descriptors) = leased(31, 1, 1);
        node.answer(number, &response, descriptors);
        let number = node.next().unwrap().0;
        node.expect(&Request::Release(31));
        node.answer(number, &Response::Unpinned, Vec::new());
        assert_eq!(node.next(), None);
    });
    let options = larder_client::SessionOptions { timeout: Duration::from_secs(1), ..options() };
    let session = Session::open(socket, options).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    assert!(matches!(session.lease(&namespace, &chain(1)).wait(), Err(SessionError::Timeout)));
    timed_out.send(()).unwrap();
    session.unpin(1).wait().unwrap();
    drop(session);
    node.join().unwrap();
}

#[tokio::test]
async fn extents_of_a_dropped_follow_are_known_to_later_leases() {
    let (dropped, resume) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        node.answer_next(&Response::Following(31), Vec::new());
        let number = node.next().unwrap().0;
        resume.recv().unwrap();
        let (Response::Leased(first), descriptors) = leased(31, 1, 1) else {
            unreachable!("leased is leased")
        };
        let later = Response::Leased(Leased { lease: 32, extents: Vec::new(), ..first.clone() });
        let shown = Leased { checksums: Vec::new(), ..first };
        let (sums, checksums) = (Vec::new(), Vec::new());
        let in_place =
            InPlace { chunks: 1, layers: 1, is_whole: false, leased: Some(shown), sums, checksums };
        node.answer(number, &Response::InPlace(in_place), descriptors);
        node.expect(&Request::Release(31));
        node.answer_next(&later, Vec::new());
        node.expect(&Request::Release(32));
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let patience = Duration::from_secs(9);
    let following = FollowOptions { writer: None, attempt: 0, patience };
    let follow = session.follow(&namespace, &chain(1), following).await.unwrap();
    give_up(session.wait_for_layers(&follow, 1, patience));
    drop(follow);
    dropped.send(()).unwrap();
    assert_eq!(session.lease(&namespace, &chain(1)).await.unwrap().chunks(), 1);
    node.join().unwrap();
}

#[tokio::test]
async fn what_a_reservation_did_not_commit_is_aborted_after_its_last_staged_chunk() {
    let (socket, node) = node(|mut node| {
        node.open(2_000);
        node.answer_next(&reserved(21, [0, 1]), Vec::new());
        let number = node.expect(&Request::Unpin(1));
        node.answer(number, &Response::Unpinned, Vec::new());
        node.expect(&Request::Abort(21));
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).await.unwrap();
    let staged = session.stage(&reservation, 1).await.unwrap();
    reservation.abort();
    session.unpin(1).await.unwrap();
    drop(staged);
    node.join().unwrap();
}

#[tokio::test]
async fn a_commit_that_was_sent_counts_though_nobody_waits_for_it_and_the_rest_is_given_back_after_it() {
    let (resume, resumed) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(2_000);
        node.answer_next(&reserved(21, [0, 1]), Vec::new());
        let (number, commit) = node.next().unwrap();
        assert!(matches!(commit, Request::Commit(_)));
        resumed.recv().unwrap();
        let unpin = node.expect(&Request::Unpin(1));
        node.answer(number, &Response::Committed(1), Vec::new());
        node.answer(unpin, &Response::Unpinned, Vec::new());
        node.expect(&Request::Abort(21));
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).await.unwrap();
    let staged = session.stage(&reservation, 0).await.unwrap();
    give_up(session.commit(&reservation, vec![staged]));
    drop(reservation);
    resume.send(()).unwrap();
    session.unpin(1).await.unwrap();
    node.join().unwrap();
}

#[tokio::test]
async fn room_in_the_window_is_free_only_when_the_node_has_answered() {
    let (resume, resumed) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(1_000);
        node.answer_next(&reserved(21, [0, 1]), Vec::new());
        let number = node.next().unwrap().0;
        resumed.recv().unwrap();
        node.answer(number, &Response::Committed(1), Vec::new());
        while node.next().is_some() {}
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).await.unwrap();
    let staged = session.stage(&reservation, 0).await.unwrap();
    give_up(session.commit(&reservation, vec![staged]));
    let mut second = session.stage(&reservation, 1).into_future();
    let polled = second.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "the node may still copy from the window");
    resume.send(()).unwrap();
    assert_eq!(second.await.unwrap().position(), 1);
    drop((session, reservation));
    node.join().unwrap();
}

/// Commits under way still count when the node ends a session.
#[test]
fn room_in_the_window_is_not_used_again_after_a_session_that_ended_in_a_commit() {
    let (socket, node) = node(|mut node| {
        let window = node.open(1_000).unwrap();
        node.answer_next(&reserved(21, [0, 1]), Vec::new());
        let Some((_, Request::Commit(commit))) = node.next() else { panic!("a chunk is committed") };
        (window, commit.sources[0])
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).wait().unwrap();
    let mut staged = session.stage(&reservation, 0).wait().unwrap();
    staged.copy_from(0, 0, &[1; 300]);
    let committed = session.commit(&reservation, vec![staged]).wait();
    assert!(matches!(committed, Err(SessionError::Closed { .. })));
    let next = session.stage(&reservation, 1).wait().map(|mut next| next.copy_from(0, 0, &[2; 300]));
    let (window, source) = node.join().unwrap();
    let mut copied = [0; 300];
    window.copy_to(source, &mut copied);
    assert_eq!(copied, [1; 300], "the node copies other bytes than were committed");
    assert!(matches!(next, Err(SessionError::Closed { .. })));
}

#[tokio::test]
async fn a_caller_that_waits_for_room_in_the_window_hears_at_once_that_the_session_is_over() {
    let (end, ends) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(1_000);
        node.answer_next(&reserved(21, [0, 1]), Vec::new());
        node.next();
        ends.recv().unwrap();
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let reservation = session.reserve(&namespace, &chain(2), 0).await.unwrap();
    let staged = session.stage(&reservation, 0).await.unwrap();
    give_up(session.commit(&reservation, vec![staged]));
    let mut waiting = session.stage(&reservation, 1).into_future();
    assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    end.send(()).unwrap();
    assert!(matches!(waiting.await, Err(SessionError::Closed { .. })));
    node.join().unwrap();
}

#[tokio::test]
async fn many_reservations_given_up_at_once_stay_within_the_limit_of_outstanding_requests() {
    let (dropped, resume) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        for number in 1..=30 {
            node.answer_next(&reserved(number, [0]), Vec::new());
        }
        resume.recv().unwrap();
        let first = node.next().unwrap().0;
        let outstanding = 1 + node.count_now() as u64;
        for number in first..first + outstanding {
            node.answer(number, &Response::Aborted, Vec::new());
        }
        for _ in outstanding..30 {
            assert!(matches!(node.answer_next(&Response::Aborted, Vec::new()), Request::Abort(_)));
        }
        outstanding
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let mut reservations = Vec::new();
    for _ in 0..30 {
        reservations.push(session.reserve(&namespace, &chain(1), 0).await.unwrap());
    }
    drop(reservations);
    dropped.send(()).unwrap();
    let outstanding = tokio::task::spawn_blocking(|| node.join().unwrap()).await.unwrap();
    assert!(outstanding <= 8, "{outstanding} aborts were outstanding");
}
