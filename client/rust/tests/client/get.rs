//! Reading what a node has.

use larder_client::{LeaseGuard, LookupOptions, ProtocolError, Session, SessionError};
use larder_protocol::session::{Lease, Leased, Request, Response};

use crate::fake_node::{
    BLOCK_BYTES, FakeNode, SLICES, arena, chain, checksum, found, leased, node, options, pattern, spec,
};

fn script(mut node: FakeNode) {
    node.open(0);
    assert!(matches!(node.answer_next(&found(48, None), Vec::new()), Request::Lookup(_)));
    let (response, descriptors) = leased(11, 1, 3);
    let request = node.answer_next(&response, descriptors);
    assert_eq!(request, Request::Lease(Lease { namespace: 7, chain: chain(4) }));
    assert_eq!(node.expect(&Request::Release(11)), 0);
    // The extent is known by now.
    let places = arena(1, 1).0;
    let checksums = (0..4).map(checksum).collect();
    let again = Response::Leased(Leased { lease: 12, chunks: 1, places, checksums, extents: Vec::new() });
    node.answer_next(&again, Vec::new());
    node.expect(&Request::Release(12));
    assert_eq!(node.next(), None);
}

/// Reads all blocks.
fn check(lease: &LeaseGuard, chunks: usize) {
    assert_eq!((lease.chunks(), lease.blocks_per_chunk()), (chunks, 4));
    for position in 0..chunks {
        for block in 0..4 {
            let mut out = vec![0; BLOCK_BYTES[block % 2] as usize];
            lease.copy_block(position, block, &mut out).unwrap();
            assert_eq!(out, pattern(position * 4 + block, out.len() as u64));
        }
    }
}

#[tokio::test]
async fn a_leased_chunk_is_read_byte_for_byte() {
    let (socket, node) = node(script);
    let session = Session::open(socket, options()).await.unwrap();
    assert_eq!((session.node(), session.tenant(), session.device()), ("node-1", "acme", 3));
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).await.unwrap();
    let lookup = LookupOptions { prompt_tokens: 70, ..LookupOptions::default() };
    assert_eq!(session.lookup(&namespace, &chain(4), lookup).await.unwrap().tokens, 48);
    let lease = session.lease(&namespace, &chain(4)).await.unwrap();
    check(&lease, 3);
    lease.release();
    check(&session.lease(&namespace, &chain(1)).await.unwrap(), 1);
    assert_eq!(session.counters().bytes_read, 4 * 800);
    drop(session);
    node.join().unwrap();
}

#[test]
fn a_thread_reads_a_leased_chunk_byte_for_byte() {
    let (socket, node) = node(script);
    let session = Session::open(socket, options()).wait().unwrap();
    assert_eq!((session.node(), session.tenant(), session.device()), ("node-1", "acme", 3));
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lookup = LookupOptions { prompt_tokens: 70, ..LookupOptions::default() };
    assert_eq!(session.lookup(&namespace, &chain(4), lookup).wait().unwrap().tokens, 48);
    let lease = session.lease(&namespace, &chain(4)).wait().unwrap();
    check(&lease, 3);
    lease.release();
    check(&session.lease(&namespace, &chain(1)).wait().unwrap(), 1);
    assert_eq!(session.counters().bytes_read, 4 * 800);
    drop(session);
    node.join().unwrap();
}

#[test]
fn a_miss_is_a_lease_of_nothing_and_needs_no_release() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let (places, checksums, extents) = (Vec::new(), Vec::new(), Vec::new());
        let miss = Leased { lease: 0, chunks: 0, places, checksums, extents };
        node.answer_next(&Response::Leased(miss), Vec::new());
        let number = node.expect(&Request::Unpin(1));
        node.answer(number, &Response::Unpinned, Vec::new());
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    assert_eq!(session.lease(&namespace, &chain(4)).wait().unwrap().chunks(), 0);
    session.unpin(1).wait().unwrap();
    node.join().unwrap();
}

#[test]
fn a_lease_outlives_the_renewal_of_its_extent() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        for (lease, chunks) in [(1, 1), (2, 2)] {
            let (response, descriptors) = leased(lease, 1, chunks);
            node.answer_next(&response, descriptors);
        }
        node.expect(&Request::Release(2));
        node.expect(&Request::Release(1));
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let old = session.lease(&namespace, &chain(1)).wait().unwrap();
    check(&session.lease(&namespace, &chain(2)).wait().unwrap(), 2);
    check(&old, 1);
    drop(old);
    node.join().unwrap();
}

#[test]
fn a_place_outside_of_its_extent_ends_the_session() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        let (Response::Leased(mut leased), descriptors) = leased(1, 1, 1) else { unreachable!() };
        leased.places[3].offset += 1;
        node.answer_next(&Response::Leased(leased), descriptors);
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lease = session.lease(&namespace, &chain(1)).wait();
    assert!(matches!(lease, Err(SessionError::Protocol(ProtocolError::WrongAnswer { .. }))));
    assert!(matches!(session.unpin(1).wait(), Err(SessionError::Closed { .. })));
    node.join().unwrap();
}
