//! Verifying what is read.

use std::time::Duration;

use larder_client::{BlockPart, Damaged, FollowOptions, Session, SessionOptions, Verify};
use larder_protocol::ChunkHash;
use larder_protocol::handoff::{InPlace, LayersSum};
use larder_protocol::session::{Leased, ReportDamage, Request, Response};

use crate::fake_node::{BLOCK_BYTES, FakeNode, SLICES, chain, leased, node, options, pattern, spec};

fn verifying(verify: Verify) -> SessionOptions {
    SessionOptions { verify, copy_threads: 4, ..options() }
}

/// Leases three chunks and passes the lease to `read`. `spoil` changes the node's answer; `reports` are the chunks that the node
/// is told are damaged.
fn with_lease(
    verify: Verify,
    spoil: impl FnOnce(&mut Leased) + Send + 'static,
    reports: Vec<u8>,
    read: impl FnOnce(&larder_client::LeaseGuard),
) {
    let (socket, node) = node(move |mut node: FakeNode| {
        node.open(0);
        let (Response::Leased(mut leased), memory) = leased(11, 1, 3) else { unreachable!() };
        spoil(&mut leased);
        node.answer_next(&Response::Leased(leased), memory);
        for chunk in reports {
            let report = ReportDamage { namespace: 7, hash: ChunkHash([chunk; 32]) };
            assert_ne!(node.expect(&Request::ReportDamage(report)), 0);
        }
        assert_eq!(node.expect(&Request::Release(11)), 0);
        assert_eq!(node.next(), None);
    });
    let session = Session::open(socket, verifying(verify)).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let lease = session.lease(&namespace, &chain(4)).wait().unwrap();
    read(&lease);
    drop((lease, session));
    node.join().unwrap();
}

fn read(lease: &larder_client::LeaseGuard, position: usize, block: usize) -> Result<Vec<u8>, Damaged> {
    let mut out = vec![0; BLOCK_BYTES[block % 2] as usize];
    lease.copy_block(position, block, &mut out).map(|()| out)
}

/// The place of block 5 is that of block 9: right bytes of another chunk.
fn another_chunks_place(leased: &mut Leased) {
    leased.places[5] = leased.places[9];
}

#[test]
fn the_right_bytes_of_another_chunk_are_damage_and_the_node_is_told_once() {
    with_lease(Verify::Always, another_chunks_place, vec![1], |lease| {
        let damaged = Damaged { position: 1, block: 1, hash: ChunkHash([1; 32]), has_come: true };
        assert_eq!(read(lease, 1, 1), Err(damaged));
        assert_eq!(lease.copy_range(1, 1, 10, &mut [0; 10]), Err(damaged));
        assert_eq!(lease.block_ptr(1, 1), Err(damaged));
        for i in (0..12).filter(|&i| i != 5) {
            assert_eq!(read(lease, i / 4, i % 4), Ok(pattern(i, BLOCK_BYTES[i % 2])), "block {i}");
        }
    });
}

#[test]
fn another_chunk_is_damage_even_with_its_own_checksum_since_a_checksum_covers_the_name() {
    let another = |leased: &mut Leased| {
        leased.places[5] = leased.places[9];
        leased.checksums[5] = leased.checksums[9];
    };
    with_lease(Verify::Always, another, vec![1], |lease| assert!(read(lease, 1, 1).is_err()));
}

#[test]
fn a_block_of_another_slice_or_pool_is_damage() {
    let another = |leased: &mut Leased| {
        // Slices 0 and 1 of one chunk and pool.
        leased.places.swap(0, 2);
        leased.checksums.swap(0, 2);
    };
    with_lease(Verify::Always, another, vec![0, 0], |lease| {
        assert!(read(lease, 0, 0).is_err() && read(lease, 0, 2).is_err());
    });
}

#[test]
fn a_part_of_a_block_is_verified_with_all_of_it_before_a_byte_is_copied() {
    with_lease(Verify::Always, another_chunks_place, vec![1], |lease| {
        let mut out = [9; 10];
        assert!(lease.copy_range(1, 1, 0, &mut out).is_err());
        assert_eq!(out, [9; 10]);
        assert!(lease.copy_range(1, 0, 0, &mut out).is_ok());
    });
}

/// Parts of all blocks of three chunks, in order, again and again: enough for several threads.
fn many_parts(memory: &mut [u8]) -> Vec<BlockPart<'_>> {
    let blocks = (0..12_usize).cycle().flat_map(|i| {
        let bytes = BLOCK_BYTES[i % 2];
        [(i, 0, bytes / 3), (i, bytes / 3, bytes - bytes / 3), (i, 0, bytes)]
    });
    let (mut left, mut parts) = (memory, Vec::new());
    for (i, offset, bytes) in blocks {
        let Some((out, rest)) = left.split_at_mut_checked(bytes as usize) else { break };
        parts.push(BlockPart { position: i / 4, block: i % 4, offset, out });
        left = rest;
    }
    parts
}

fn is_right(part: &BlockPart<'_>) -> bool {
    let i = part.position * 4 + part.block;
    let (start, end) = (part.offset as usize, part.offset as usize + part.out.len());
    *part.out == pattern(i, BLOCK_BYTES[i % 2])[start..end]
}

#[test]
fn several_threads_copy_many_parts_each_to_its_own_memory() {
    for verify in [Verify::Off, Verify::Sample, Verify::Always] {
        with_lease(
            verify,
            |_| {},
            vec![],
            |lease| {
                let mut memory = vec![0; 12 << 20];
                lease.copy_parts(many_parts(&mut memory)).unwrap();
                assert!(many_parts(&mut memory).iter().all(is_right));
            },
        );
    }
}

#[test]
fn of_many_parts_those_before_the_first_damaged_one_are_right() {
    with_lease(Verify::Always, another_chunks_place, vec![1], |lease| {
        let mut memory = vec![0; 12 << 20];
        let damaged = Damaged { position: 1, block: 1, hash: ChunkHash([1; 32]), has_come: true };
        assert_eq!(lease.copy_parts(many_parts(&mut memory)), Err(damaged));
        let parts = many_parts(&mut memory);
        let before = parts.iter().position(|part| (part.position, part.block) == (1, 1)).unwrap();
        assert!(parts[..before].iter().all(is_right));
    });
}

#[test]
fn nothing_is_verified_where_that_is_off() {
    with_lease(Verify::Off, another_chunks_place, vec![], |lease| {
        assert_eq!(read(lease, 1, 1), Ok(pattern(9, BLOCK_BYTES[1])));
    });
}

/// The number of blocks, of 12, that are verified in each of `leases` leases.
fn verified(seed: u64, leases: u64) -> Vec<u64> {
    let (socket, node) = node(move |mut node: FakeNode| {
        node.open(0);
        for number in 1..=leases {
            let (response, memory) = leased(number, 1, 3);
            node.answer_next(&response, memory);
            node.expect(&Request::Release(number));
        }
    });
    let options = SessionOptions { verify: Verify::Sample, verify_seed: Some(seed), ..options() };
    let session = Session::open(socket, options).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let counted = (0..leases).map(|_| {
        let lease = session.lease(&namespace, &chain(4)).wait().unwrap();
        let before = session.counters().bytes_verified;
        (0..12).for_each(|i| drop(read(&lease, i / 4, i % 4).unwrap()));
        session.counters().bytes_verified - before
    });
    let counted = counted.collect();
    drop(session);
    node.join().unwrap();
    counted
}

#[test]
fn a_sample_is_chosen_by_the_seed_and_is_about_one_block_in_sixty_four() {
    let first = verified(5, 200);
    assert_eq!(first, verified(5, 200));
    assert_ne!(first, verified(6, 200));
    let share = first.iter().sum::<u64>() as f64 / (200.0 * 6.0 * 400.0);
    assert!((0.25 / 64.0..4.0 / 64.0).contains(&share), "{share}");
}

#[test]
fn a_sampled_block_that_is_wrong_is_damage() {
    // Each wrong block is sampled in at least one of these leases.
    let (socket, node) = node(|mut node: FakeNode| {
        node.open(0);
        for number in 1..=400 {
            let (Response::Leased(mut leased), memory) = leased(number, 1, 3) else { unreachable!() };
            another_chunks_place(&mut leased);
            node.answer_next(&Response::Leased(leased), memory);
            // A report comes before the end of its lease.
            while !matches!(node.next(), Some((_, Request::Release(_)))) {}
        }
    });
    let options = SessionOptions { verify: Verify::Sample, verify_seed: Some(1), ..options() };
    let session = Session::open(socket, options).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let damaged = (0..400).filter(|_| {
        let lease = session.lease(&namespace, &chain(4)).wait().unwrap();
        read(&lease, 1, 1).is_err()
    });
    let damaged = damaged.count();
    assert!((1..40).contains(&damaged), "{damaged} of 400");
    assert_eq!(session.counters().blocks_damaged, damaged as u64);
    drop(session);
    node.join().unwrap();
}

#[test]
fn a_lease_without_a_checksum_for_each_block_ends_the_session() {
    let (socket, node) = node(|mut node: FakeNode| {
        node.open(0);
        let (Response::Leased(mut leased), memory) = leased(1, 1, 3) else { unreachable!() };
        leased.checksums.pop();
        node.answer_next(&Response::Leased(leased), memory);
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    assert!(session.lease(&namespace, &chain(4)).wait().is_err());
    node.join().unwrap();
}

#[test]
fn a_wrong_layer_of_a_followed_chunk_that_did_not_come_is_damage() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.answer_next(&Response::Following(31), Vec::new());
        let (Response::Leased(shown), descriptors) = leased(31, 1, 2) else {
            unreachable!("leased is leased")
        };
        let whole: Vec<u64> = shown.checksums[..4].to_vec();
        let wrong =
            |at: u32| LayersSum { chunk: at / 4, block: at % 4, from_layer: 0, to_layer: 1, checksum: 7 };
        let layers = InPlace {
            chunks: 2,
            layers: 1,
            is_whole: false,
            leased: Some(Leased { checksums: Vec::new(), ..shown }),
            sums: (0..8).map(wrong).collect(),
            checksums: Vec::new(),
        };
        node.answer_next(&Response::InPlace(layers), descriptors);
        // The second chunk does not come: its writer ended.
        let end = InPlace {
            chunks: 1,
            layers: 1,
            is_whole: true,
            leased: None,
            sums: Vec::new(),
            checksums: whole,
        };
        node.answer_next(&Response::InPlace(end), Vec::new());
        while node.next().is_some() {}
    });
    let session = Session::open(socket, verifying(Verify::Always)).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let patience = Duration::from_secs(9);
    let following = FollowOptions { writer: None, attempt: 0, patience };
    let follow = session.follow(&namespace, &chain(2), following).wait().unwrap();
    assert!(!session.wait_for_layers(&follow, 1, patience).wait().unwrap().is_whole);
    assert!(session.wait_for_layers(&follow, 2, patience).wait().unwrap().is_whole);
    let lease = follow.lease().unwrap();
    let mut block = [0; BLOCK_BYTES[0] as usize];
    lease.copy_block(0, 0, &mut block).unwrap();
    assert_eq!(lease.copy_block(1, 0, &mut block).unwrap_err().position, 1);
    drop((session, follow, lease));
    node.join().unwrap();
}
