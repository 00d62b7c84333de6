//! Chunks that lack some pools: the state of a recurrent layer exists only at some boundaries.

use std::panic::{AssertUnwindSafe, catch_unwind};

use larder_client::{ProtocolError, Session, SessionError};
use larder_protocol::session::{Commit, Extent, Leased, Place, Registered, Request, Reserved, Response};
use larder_protocol::{HitPolicy, NamespaceSpec, PoolSet};

use crate::fake_node::{
    BLOCK_BYTES, FINGERPRINT, FakeNode, SLICES, chain, checksum, node, options, pattern, sealed, spec,
};

/// Attention, and a state that is needed after the last chunk.
fn hybrid() -> NamespaceSpec {
    let mut hybrid = spec();
    hybrid.pools[1].hit = HitPolicy::Last;
    hybrid
}

fn open(node: &mut FakeNode, window_bytes: usize) -> Option<larder_ipc::Mapping> {
    let window = node.welcome(window_bytes, false);
    let (fingerprint, root) = (FINGERPRINT, FINGERPRINT.root());
    node.answer_next(&Response::Registered(Registered { namespace: 7, fingerprint, root }), Vec::new());
    window
}

/// The places of these blocks, one after the other in extent 1, and the extent's memory: block `i` has `pattern(i, _)`.
fn arena(blocks: &[usize]) -> (Vec<Place>, Vec<u8>) {
    let (mut places, mut memory) = (Vec::new(), Vec::new());
    for &i in blocks {
        places.push(Place { extent: 1, offset: memory.len() as u64 });
        memory.extend(pattern(i, BLOCK_BYTES[i % 2]));
    }
    (places, memory)
}

/// The blocks that are needed to restore three chunks: attention of all, the state of the last.
const NEEDED: [usize; 8] = [0, 2, 4, 6, 8, 9, 10, 11];

fn lease_of(blocks: &'static [usize]) -> impl FnOnce(FakeNode) + Send {
    move |mut node| {
        open(&mut node, 0);
        let (places, memory) = arena(blocks);
        let extents = vec![Extent { extent: 1, bytes: memory.len() as u64 }];
        let checksums = blocks.iter().copied().map(checksum).collect();
        let leased = Leased { lease: 5, chunks: 3, places, checksums, extents };
        node.answer_next(&Response::Leased(leased), vec![sealed(&memory)]);
        node.next();
    }
}

#[test]
fn a_lease_has_the_blocks_that_restoring_needs_and_no_other_can_be_read() {
    let (socket, node) = node(lease_of(&NEEDED));
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&hybrid(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lease = session.lease(&namespace, &chain(4)).wait().unwrap();
    for i in 0..12 {
        let (position, block) = (i / 4, i % 4);
        let mut out = vec![0; BLOCK_BYTES[block % 2] as usize];
        assert_eq!(lease.has_block(position, block), NEEDED.contains(&i));
        let read = catch_unwind(AssertUnwindSafe(|| lease.copy_block(position, block, &mut out)));
        let pointed = catch_unwind(AssertUnwindSafe(|| lease.block_ptr(position, block)));
        assert_eq!((read.is_ok(), pointed.is_ok()), (NEEDED.contains(&i), NEEDED.contains(&i)));
        if let Ok(read) = read {
            read.unwrap();
            assert_eq!(out, pattern(i, out.len() as u64), "block {i}");
        }
    }
    drop(lease);
    node.join().unwrap();
}

#[test]
fn an_answer_with_other_blocks_than_restoring_needs_ends_the_session() {
    let (socket, node) = node(lease_of(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]));
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&hybrid(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lease = session.lease(&namespace, &chain(4)).wait();
    assert!(matches!(lease, Err(SessionError::Protocol(ProtocolError::WrongAnswer { .. }))));
    node.join().unwrap();
}

#[test]
fn only_the_blocks_of_reserved_pools_are_staged_and_committed() {
    let asked = [PoolSet(0), PoolSet(2), PoolSet(2)];
    let (socket, node) = node(move |mut node| {
        let window = open(&mut node, 4_000).unwrap();
        let (chunks, pools) = (vec![0, 1, 2], vec![PoolSet(1), PoolSet(3), PoolSet(2)]);
        let (places, extents) = (Vec::new(), Vec::new());
        let reserved = Reserved { reservation: 21, chunks, pools, places, deadline_ms: 5_000, extents };
        let request = node.answer_next(&Response::Reserved(reserved), Vec::new());
        assert!(matches!(request, Request::Reserve(reserve) if reserve.pools == asked));
        let (number, request) = node.next().unwrap();
        let Request::Commit(Commit { reservation: 21, chunks, sources }) = request else {
            panic!("{request:?}")
        };
        assert_eq!(chunks, [0, 1, 2]);
        let blocks = [0, 2, 4, 5, 6, 7, 9, 11];
        assert_eq!(sources.len(), blocks.len());
        for (source, i) in sources.into_iter().zip(blocks) {
            let mut copy = vec![0; BLOCK_BYTES[i % 2] as usize];
            window.copy_to(source, &mut copy);
            assert_eq!((copy, source % 64), (pattern(i, BLOCK_BYTES[i % 2]), 0));
        }
        node.answer(number, &Response::Committed(3), Vec::new());
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&hybrid(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let reservation = session.reserve_pools(&namespace, &chain(3), &asked, 0).wait().unwrap();
    let staged = (0..3_usize).map(|position| {
        let mut chunk = session.stage(&reservation, position as u32).wait().unwrap();
        let blocks: Vec<usize> = chunk.blocks().collect();
        assert_eq!(blocks, [vec![0, 2], vec![0, 1, 2, 3], vec![1, 3]][position]);
        for block in 0..4 {
            let bytes = pattern(position * 4 + block, BLOCK_BYTES[block % 2]);
            let written = catch_unwind(AssertUnwindSafe(|| chunk.copy_from(block, 0, &bytes)));
            assert_eq!(written.is_ok(), blocks.contains(&block));
        }
        chunk
    });
    let staged = staged.collect();
    assert_eq!(session.commit(&reservation, staged).wait().unwrap(), 3);
    drop((session, reservation));
    node.join().unwrap();
}
