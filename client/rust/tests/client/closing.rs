//! Sessions that cannot go on.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use larder_client::{LookupOptions, ProtocolError, Session, SessionError, SessionOptions};
use larder_protocol::session::{Busy, Refusal, RefusalCode, Response, Scarce};
use rustix::fs::fstat;

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, found, leased, memory_file, node, options, spec};

#[tokio::test]
async fn a_node_that_closes_mid_request_closes_every_request() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.next();
        node.next();
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    assert!(session.is_open());
    let asked = chain(1);
    let (lease, unpinned) = tokio::join!(session.lease(&namespace, &asked), session.unpin(1));
    assert!(!session.is_open());
    assert!(matches!(lease, Err(SessionError::Closed { .. })));
    assert!(matches!(unpinned, Err(SessionError::Closed { .. })));
    assert!(matches!(session.unpin(1).await, Err(SessionError::Closed { .. })));
    node.join().unwrap();
}

#[test]
fn a_session_whose_runtime_nobody_drives_notices_that_its_node_is_gone() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (socket, node) = node(|mut node| node.open(0));
    let session = runtime.block_on(async { Session::open(socket, options()).await }).unwrap();
    runtime.block_on(async { session.register(&spec(), &SLICES, &BLOCK_BYTES).await }).unwrap();
    node.join().unwrap();
    assert!(!session.is_open());
    assert!(matches!(session.unpin(1).wait(), Err(SessionError::Closed { .. })));
}

#[test]
fn a_node_that_closes_mid_request_closes_a_threads_request() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.next();
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    assert!(matches!(session.lease(&namespace, &chain(1)).wait(), Err(SessionError::Closed { .. })));
    assert!(matches!(session.unpin(1).wait(), Err(SessionError::Closed { .. })));
    node.join().unwrap();
}

#[test]
fn an_ended_session_that_nobody_uses_keeps_only_the_memory_that_its_leases_read() {
    let (tell, told) = mpsc::channel();
    let (socket, node) = node(move |mut node| {
        node.open(0);
        let (answer, descriptors) = leased(31, 1, 1);
        tell.send(fstat(&descriptors[0]).unwrap().st_ino).unwrap();
        node.answer_next(&answer, descriptors);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lease = session.lease(&namespace, &chain(1)).wait().unwrap();
    let memory = told.recv().unwrap();
    node.join().unwrap();
    assert!(is_mapped(memory), "the session does not know that its node is gone");
    assert!(!session.is_open());
    assert!(is_mapped(memory), "the lease reads it");
    drop(lease);
    assert!(!is_mapped(memory));
}

/// Whether this process maps the file of this inode.
pub(crate) fn is_mapped(inode: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|map| map.split_whitespace().nth(4) == Some(&inode.to_string()))
}

#[tokio::test]
async fn bytes_that_are_no_frame_close_the_session() {
    let (socket, node) = node(|mut node| {
        node.welcome(0, false);
        node.next();
        node.socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).await.unwrap();
    assert!(matches!(session.unpin(1).await, Err(SessionError::Closed { .. })));
    node.join().unwrap();
}

#[test]
fn busy_and_refused_leave_the_session_usable() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.answer_next(&Response::Busy(Busy { what: Scarce::Claims, retry_after_ms: 20 }), Vec::new());
        let message = "there is no such pin".into();
        node.answer_next(&Response::Refused(Refusal { code: RefusalCode::Unknown, message }), Vec::new());
        node.answer_next(&Response::Unpinned, Vec::new());
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let busy = session.lease(&namespace, &chain(1)).wait();
    let later = Duration::from_millis(20);
    assert!(
        matches!(busy, Err(SessionError::Busy { what: Scarce::Claims, retry_after }) if retry_after == later)
    );
    let refused = session.unpin(1).wait().unwrap_err();
    assert_eq!(refused.to_string(), "the node refused: there is no such pin");
    session.unpin(2).wait().unwrap();
    node.join().unwrap();
}

#[test]
fn memory_that_its_owner_may_shrink_ends_the_session() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let response = leased(1, 1, 1).0;
        let unsealed = memory_file(&[0; 800], rustix::fs::SealFlags::GROW);
        node.answer_next(&response, vec![unsealed]);
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    assert!(matches!(session.lease(&namespace, &chain(1)).wait(), Err(SessionError::Descriptor(_))));
    node.join().unwrap();
}

#[tokio::test]
async fn an_answer_of_the_wrong_kind_ends_the_session() {
    let (socket, node) = node(|mut node| {
        node.welcome(0, false);
        node.answer_next(&Response::Aborted, Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).await.unwrap();
    let unpinned = session.unpin(1).await;
    assert!(matches!(unpinned, Err(SessionError::Protocol(ProtocolError::WrongAnswer { .. }))));
    node.join().unwrap();
}

#[test]
fn a_lookup_that_finds_more_than_was_asked_ends_the_session() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.answer_next(&found(17, None), Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let found = session.lookup(&namespace, &chain(1), LookupOptions::default()).wait();
    assert!(matches!(found, Err(SessionError::Protocol(ProtocolError::WrongAnswer { .. }))));
    node.join().unwrap();
}

#[tokio::test]
async fn a_path_without_a_node_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node.sock");
    let blocking = Session::connect(&path, SessionOptions::default()).wait().err().unwrap();
    let error = Session::connect(&path, SessionOptions::default()).await.err().unwrap();
    assert_eq!(error.to_string(), blocking.to_string());
    assert!(error.to_string().contains("Is the node running"), "{error}");
}
