//! Nodes of other releases.

use std::os::unix::net::UnixListener;
use std::thread;

use larder_client::Session;
use larder_protocol::ChunkHash;
use larder_protocol::chain::{Links, Start};
use larder_protocol::limits::{EARLIEST_SESSION_VERSION, NAMES_SINCE_SESSION_VERSION, SESSION_VERSION};
use larder_protocol::session::{Refusal, RefusalCode, Request, Response};

use super::fake_node::{BLOCK_BYTES, FakeNode, SLICES, chain, found, leased, options, spec};

/// A node that refuses every hello of another version than `version`, for this many connections.
fn serve(listener: &UnixListener, version: u16, connections: usize) -> Option<FakeNode> {
    for _ in 0..connections {
        let mut node = FakeNode::on(listener.accept().unwrap().0);
        let (number, hello) = node.next().unwrap();
        let Request::Hello(hello) = hello else { panic!("{hello:?}") };
        if hello.version == version {
            node.welcome_to(number, version);
            return Some(node);
        }
        let message = format!("this node speaks {version}, the engine {}", hello.version);
        let refused = Response::Refused(Refusal { code: RefusalCode::Version, message });
        node.answer(number, &refused, Vec::new());
    }
    None
}

#[test]
fn a_node_of_the_release_before_gets_sessions_and_anchors_as_it_knows_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let node = thread::spawn(move || {
        let mut node = serve(&listener, EARLIEST_SESSION_VERSION, 2).unwrap();
        node.register();
        let (lease, memory) = leased(1, 0, 0);
        let Request::Lease(asked) = node.answer_next(&lease, memory) else { panic!("not a lease") };
        asked.chain.links
    });
    let session = Session::connect(&path, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    drop(session.lease(&namespace, &chain(12).tail(7)).wait());
    let hash = |byte| ChunkHash([byte; 32]);
    let start = Start { index: 7, parent: hash(6), anchor: hash(4) };
    assert_eq!(node.join().unwrap(), Links::Linked(start));
}

#[test]
fn a_node_of_the_release_before_hears_no_name_and_serves_a_named_request_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let node = thread::spawn(move || {
        let mut node = serve(&listener, NAMES_SINCE_SESSION_VERSION - 1, 2).unwrap();
        node.register();
        node.answer_next(&found(16, None), Vec::new())
    });
    let session = Session::connect(&path, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let named = session.named("chatcmpl-5f2a");
    assert_eq!(named.lookup(&namespace, &chain(1), Default::default()).wait().unwrap().tokens, 16);
    let first = node.join().unwrap();
    assert!(matches!(first, Request::Lookup(_)), "a name would be no request that it knows: {first:?}");
}

#[test]
fn a_node_of_another_release_than_these_two_says_why_there_is_no_session() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let node = thread::spawn(move || serve(&listener, SESSION_VERSION + 2, 2).is_none());
    let Err(error) = Session::connect(&path, options()).wait() else { panic!("there is a session") };
    let error = error.to_string();
    let versions = format!("speaks {}, the engine {SESSION_VERSION}", SESSION_VERSION + 2);
    assert!(error.contains(&versions), "{error}");
    assert!(node.join().unwrap());
}
