//! Calls as values: when they are sent, and who receives their answers.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use larder_client::{LookupOptions, Session, SessionError, SessionOptions};
use larder_protocol::session::{Request, Response, Wait};

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, found, leased, node, options, prefetching, spec};

const TIMEOUT: Duration = Duration::from_millis(400);

#[test]
fn a_connect_to_a_node_that_accepts_nobody_ends_at_the_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node.sock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waits = UnixStream::connect(&path).unwrap();
    let options = SessionOptions { timeout: TIMEOUT, ..options() };
    assert!(matches!(Session::connect(&path, options).wait(), Err(SessionError::Timeout)));
}

#[tokio::test]
async fn a_call_that_is_neither_awaited_nor_waited_for_asks_for_nothing() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.answer_next(&Response::Unpinned, Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    drop(session.lease(&namespace, &chain(1)));
    drop(session.pin(&namespace, &chain(1), Duration::from_secs(1)).into_future());
    session.unpin(1).await.unwrap();
    drop((session, namespace));
    node.join().unwrap();
}

#[tokio::test]
async fn a_session_that_a_thread_opened_may_be_awaited_and_one_that_a_task_opened_waited_for() {
    for opened_by_a_thread in [true, false] {
        let (socket, node) = node(|mut node| {
            node.welcome(0, false);
            (0..4).for_each(|_| _ = node.answer_next(&Response::Unpinned, Vec::new()));
        });
        let opening = Session::open(socket, options());
        let session = if opened_by_a_thread { opening.wait() } else { opening.await }.unwrap();
        session.unpin(1).wait().unwrap();
        session.unpin(2).await.unwrap();
        session.unpin(3).wait().unwrap();
        session.unpin(4).await.unwrap();
        node.join().unwrap();
    }
}

#[test]
fn a_session_without_a_time_limit_gets_its_answers() {
    let (socket, node) = node(|mut node| {
        node.welcome(0, false);
        node.answer_next(&Response::Unpinned, Vec::new());
    });
    let options = SessionOptions { timeout: Duration::MAX, ..options() };
    let session = Session::open(socket, options).wait().unwrap();
    session.unpin(1).wait().unwrap();
    node.join().unwrap();
}

#[tokio::test]
async fn a_ticket_may_be_collected_for_longer_than_requests_may_take() {
    let (socket, node) = node(move |mut node| {
        node.open(0);
        for ticket in 1..=4 {
            node.answer_next(&prefetching(ticket), Vec::new());
            let number = node.next().unwrap().0;
            // Longer than a request may take, and shorter than a request and the wait.
            thread::sleep(TIMEOUT * 3 / 2);
            let (response, descriptors) = leased(ticket, ticket as u32, 1);
            node.answer(number, &response, descriptors);
            node.expect(&Request::Release(ticket));
        }
    });
    let session = Session::open(socket, SessionOptions { timeout: TIMEOUT, ..options() }).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    for wait in [Wait::TimeoutMs(10_000), Wait::Complete] {
        for by_thread in [true, false] {
            let ticket = session.prefetch(&namespace, &chain(1), LookupOptions::default()).await.unwrap();
            let call = session.collect(ticket, wait);
            let lease = if by_thread { call.wait() } else { call.await };
            assert_eq!(lease.unwrap().chunks(), 1);
        }
    }
    node.join().unwrap();
}

#[tokio::test]
async fn the_timeout_of_a_request_that_waits_for_others_starts_when_it_is_sent() {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let (socket, node) = node(move |mut node| {
        node.welcome(0, false);
        // As many as may be outstanding at a time.
        let numbers: Vec<u64> = (0..56).map(|_| node.next().unwrap().0).collect();
        thread::sleep(TIMEOUT * 7 / 10);
        numbers.into_iter().for_each(|number| node.answer(number, &Response::Unpinned, Vec::new()));
        let last = node.next().unwrap().0;
        thread::sleep(TIMEOUT * 7 / 10);
        node.answer(last, &Response::Unpinned, Vec::new());
    });
    let session = Session::open(socket, SessionOptions { timeout: TIMEOUT, ..options() }).await.unwrap();
    let calls: Vec<_> = (0..57).map(|pin| tokio::spawn(session.unpin(pin).into_future())).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    tokio::task::spawn_blocking(|| node.join().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_thread_that_waits_receives_for_tasks_and_leaves_the_rest_to_them() {
    let (all_asked, asked) = mpsc::channel::<()>();
    let (is_left, left) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        let number_of = |wanted: u64, requests: &[(u64, Request)]| {
            let is_it = |(_, request): &&(u64, Request)| matches!(request, Request::Lookup(lookup) if lookup.prompt_tokens == wanted);
            requests.iter().find(is_it).unwrap().0
        };
        let mut requests = vec![node.next().unwrap(), node.next().unwrap()];
        asked.recv().unwrap();
        requests.push(node.next().unwrap());
        // The task's answer comes first: the thread finds it while it waits for its own, which comes second.
        for wanted in [1, 3] {
            node.answer(number_of(wanted, &requests), &found(wanted, None), Vec::new());
        }
        left.recv().unwrap();
        node.answer(number_of(2, &requests), &found(2, None), Vec::new());
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let ask = |prompt_tokens| {
        let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
        session.lookup(&namespace, &chain(1), options)
    };
    let tasks = [1, 2].map(|wanted| tokio::spawn(ask(wanted).into_future()));
    // The runtime has one thread: after the yield both tasks have asked.
    tokio::task::yield_now().await;
    let of_thread = ask(3);
    let waiting = thread::spawn(|| of_thread.wait().unwrap().tokens);
    all_asked.send(()).unwrap();
    // The runtime's only thread waits: nobody but the other thread receives.
    assert_eq!(waiting.join().unwrap(), 3);
    is_left.send(()).unwrap();
    for (task, wanted) in tasks.into_iter().zip([1, 2]) {
        assert_eq!(task.await.unwrap().unwrap().tokens, wanted);
    }
    node.join().unwrap();
}

#[tokio::test]
async fn a_late_answer_to_a_thread_is_given_back_by_a_task() {
    let (timed_out, resume) = mpsc::channel::<()>();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        node.answer_next(&Response::Unpinned, Vec::new());
        let number = node.next().unwrap().0;
        resume.recv().unwrap();
        let (response, descriptors) = leased(31, 1, 1);
        node.answer(number, &response, descriptors);
        node.expect(&Request::Release(31));
    });
    let options = SessionOptions { timeout: Duration::from_millis(300), ..options() };
    let session = Session::open(socket, options).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    session.unpin(1).await.unwrap();
    let lease = session.lease(&namespace, &chain(1));
    assert!(matches!(lease.wait(), Err(SessionError::Timeout)));
    timed_out.send(()).unwrap();
    tokio::task::spawn_blocking(|| node.join().unwrap()).await.unwrap();
}

#[test]
fn a_session_ends_with_the_runtime_that_first_awaited_a_call() {
    let (socket, node) = node(|mut node| {
        node.welcome(0, false);
        node.answer_next(&Response::Unpinned, Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(session.unpin(1).into_future()).unwrap();
    drop(runtime);
    assert!(matches!(session.unpin(2).wait(), Err(SessionError::Closed { .. })));
    node.join().unwrap();
}
