//! A traced session tells the node its trace; an untraced session tells none.

use larder_client::Session;
use larder_protocol::TraceContext;
use larder_protocol::session::Request;

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, found, node, options, spec};

fn context() -> TraceContext {
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap()
}

#[test]
fn a_trace_stands_before_the_request_whose_number_it_bears_and_nowhere_else() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let (number, request) = node.next().unwrap();
        assert_eq!(request, Request::Trace(context()));
        let (lookup, request) = node.next().unwrap();
        assert!(matches!(request, Request::Lookup(_)) && lookup == number);
        node.answer(lookup, &found(16, None), Vec::new());
        let (lookup, request) = node.next().unwrap();
        assert!(matches!(request, Request::Lookup(_)), "nothing is said of a request without a trace");
        node.answer(lookup, &found(16, None), Vec::new());
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let traced = session.traced(context());
    assert_eq!(traced.lookup(&namespace, &chain(1), Default::default()).wait().unwrap().tokens, 16);
    assert_eq!(session.lookup(&namespace, &chain(1), Default::default()).wait().unwrap().tokens, 16);
    node.join().unwrap();
}

#[tokio::test]
async fn a_node_hears_that_its_caller_records_nothing() {
    let unrecorded = TraceContext { flags: 0, ..context() };
    let (socket, node) = node(move |mut node| {
        node.open(0);
        assert_eq!(node.next().unwrap().1, Request::Trace(unrecorded));
        let (lookup, _) = node.next().unwrap();
        node.answer(lookup, &found(16, None), Vec::new());
    });
    let session = Session::open(socket, options()).await.unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let traced = session.traced(unrecorded);
    assert_eq!(traced.lookup(&namespace, &chain(1), Default::default()).await.unwrap().tokens, 16);
    node.join().unwrap();
}

#[test]
fn a_name_stands_before_a_lookup_and_before_no_request_that_nobody_looks_for() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let (number, request) = node.next().unwrap();
        let cut = format!("{}…", "x".repeat(253));
        assert_eq!(request, Request::Name(cut), "no name is longer than a node takes");
        let (lookup, request) = node.next().unwrap();
        assert!(matches!(request, Request::Lookup(_)) && lookup == number);
        node.answer(lookup, &found(16, None), Vec::new());
        let (unpin, request) = node.next().unwrap();
        assert_eq!(request, Request::Unpin(1));
        node.answer(unpin, &larder_protocol::session::Response::Unpinned, Vec::new());
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let named = session.named(&format!("{}……", "x".repeat(253)));
    assert_eq!(named.lookup(&namespace, &chain(1), Default::default()).wait().unwrap().tokens, 16);
    named.unpin(1).wait().unwrap();
    node.join().unwrap();
}
