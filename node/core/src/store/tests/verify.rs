//! Tests of chunks that are reported as damaged: they are kept while they are summed, and nobody finds a chunk that was wrong.

use larder_protocol::PoolSet;
use larder_protocol::session::Checked;

use super::super::{
    Came, DiskStoreLimits, Granted, PeerStoreLimits, Source, StoreLimits, VerifyOrder, WritePolicy,
};
use super::*;
use crate::store::ChangeKind;
use crate::store::ids::{Below, ChunkKey};

const RIGHT: &[u64] = &[0];
const WRONG: &[u64] = &[1];

impl Fixture {
    fn verify(&mut self, word: &str) -> Option<VerifyOrder> {
        self.store.begin_verify(&self.fingerprint(), &name(word))
    }

    fn verified(&mut self, word: &str, sums: &[u64]) -> Checked {
        let order = self.verify(word).expect("it is here");
        self.store.finish_verify(order.verify, Some(sums))
    }

    /// The chunks that others were told are lost, since the last call.
    fn lost(&mut self) -> Vec<ChunkHash> {
        let changes = self.store.take_changes().into_iter();
        changes.filter(|change| change.kind == ChangeKind::Lost).map(|change| change.chunk.hash).collect()
    }
}

fn on_disk(write: WritePolicy) -> StoreLimits {
    let disk = DiskStoreLimits {
        write,
        write_after_uses: 2,
        max_waiting_bytes: 8 * BLOCK,
        max_reading_bytes: 8 * BLOCK,
    };
    let peers = Some(PeerStoreLimits {
        passing_bytes: 4 * BLOCK,
        max_granted_chunks: 4,
        placement: crate::placement::PlacementRule::Reads,
    });
    StoreLimits { disk: Some(disk), peers, ..limits(8, 100) }
}

#[test]
fn a_chunk_that_is_wrong_is_lost_for_all_and_can_be_written_again() {
    let mut f = Fixture::new(limits(8, 100));
    f.put("abc");
    assert_eq!(f.verified("ab", WRONG), Checked::Damaged);
    assert_eq!(f.lost(), [name("ab")]);
    assert_eq!((f.found("abc"), f.lease("abc").chunks), (1, 1));
    f.put("abc");
    assert_eq!(f.lease("abc").chunks, 3);
    assert_eq!(f.verified("ab", RIGHT), Checked::Right);
    assert_eq!((f.found("abc"), f.store.usage().damaged), (3, 1));
    f.store.assert_consistent();
}

#[test]
fn a_chunk_is_summed_where_it_stands_under_its_own_name() {
    let mut f = Fixture::new(limits(8, 100));
    f.put("ab");
    let place = f.lease("ab").places[1];
    let order = f.verify("ab").unwrap();
    let [block] = order.blocks.as_slice() else { panic!("{order:?}") };
    assert_eq!((block.place, block.bytes, order.bytes), (place, BLOCK, BLOCK));
    assert!(block.is_in_place && block.key.hash == name("ab") && block.key.fingerprint == f.fingerprint());
}

#[test]
fn what_is_being_verified_is_not_evicted_nor_verified_twice() {
    let mut f = Fixture::new(limits(4, 4));
    f.put("abcd");
    let order = f.verify("abcd").unwrap();
    assert_eq!(f.verify("abcd"), None);
    let other = f.chain("wxyz");
    let reserved = f.store.reserve(f.session, f.namespace, &other, 0, NOW);
    assert!(reserved.is_err(), "its slot is not to be had: {reserved:?}");
    assert_eq!(f.found("abcd"), 4);
    assert_eq!(f.store.finish_verify(order.verify, Some(RIGHT)), Checked::Right);
    f.put("wxyz");
    assert_eq!(f.found("abcd"), 0, "it may go again");
    assert_eq!(f.store.finish_verify(order.verify, Some(WRONG)), Checked::Nothing, "once is enough");
    f.store.assert_consistent();
}

#[test]
fn who_reads_a_damaged_chunk_keeps_its_slot_until_it_has_let_go() {
    let mut f = Fixture::new(limits(4, 100));
    f.put("ab");
    let lease = f.lease("ab");
    assert_eq!(f.verified("ab", WRONG), Checked::Damaged);
    assert_eq!(f.store.usage().bytes.used, 2 * BLOCK);
    assert_eq!(f.lease("ab").chunks, 1, "nobody else gets it");
    f.put("ab");
    assert_eq!(f.found("ab"), 1, "and its name is not free yet");
    let load = f.store.begin_load(f.session, lease.lease, (f.namespace, 0), 0..2);
    assert!(load.is_err(), "nor is it copied to a device: {load:?}");
    f.store.release(f.session, lease.lease).unwrap();
    assert_eq!(f.store.usage().bytes.used, BLOCK);
    f.put("ab");
    assert_eq!(f.found("ab"), 2);
    f.store.assert_consistent();
}

#[test]
fn a_process_that_may_still_read_a_damaged_chunk_keeps_it_in_quarantine() {
    let mut f = Fixture::new(limits(4, 100));
    f.put("a");
    let engine = f.join(0, 1);
    let chain = f.chain("a");
    f.store.lease(engine, f.namespace, &chain).unwrap();
    f.store.close_session(engine);
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    assert_eq!(f.store.usage().bytes.quarantined, BLOCK);
    f.store.process_gone(ProcessId(1));
    let bytes = f.store.usage().bytes;
    assert_eq!((bytes.quarantined, bytes.used), (0, 0));
    f.store.assert_consistent();
}

#[test]
fn pins_do_not_keep_a_damaged_chunk() {
    let mut f = Fixture::new(limits(4, 100));
    f.put("ab");
    let chain = f.chain("ab");
    let pin = f.store.pin(f.session, f.namespace, &chain, 5_000, NOW).unwrap();
    assert_eq!(f.verified("ab", WRONG), Checked::Damaged);
    assert_eq!(f.store.usage().bytes.used, BLOCK);
    f.put("ab");
    f.store.unpin(f.session, pin.pin).unwrap();
    assert_eq!(f.found("ab"), 2);
    f.store.assert_consistent();
}

#[test]
fn a_damaged_chunk_leaves_the_disk_too() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteThrough));
    f.put("a");
    let write = f.store.next_write(Below::Disk).unwrap();
    f.store.written(write.write, true);
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    let key = ChunkKey { fingerprint: f.fingerprint(), hash: name("a") };
    assert_eq!(f.store.take_given_up(), [key]);
    assert_eq!((f.found("a"), f.lost()), (0, vec![name("a")]));
    assert_eq!(f.store.usage().disk.unwrap().chunks, 0);
    f.store.assert_consistent();
}

#[test]
fn a_damaged_chunk_that_waits_to_be_written_is_not_written() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteThrough));
    f.put("ab");
    assert_eq!(f.verified("ab", WRONG), Checked::Damaged);
    assert_eq!(f.store.next_write(Below::Disk).unwrap().chunk.hash, name("a"));
    assert_eq!(f.store.next_write(Below::Disk), None);
    assert_eq!(f.store.usage().disk.unwrap().waiting_bytes, BLOCK);
    f.put("ab");
    assert_eq!(f.store.next_write(Below::Disk).unwrap().chunk.hash, name("ab"));
}

#[test]
fn a_damaged_chunk_whose_record_comes_to_be_on_disk_later_is_given_up_there() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteThrough));
    f.put("a");
    let write = f.store.next_write(Below::Disk).unwrap();
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    assert_eq!((f.found("a"), f.store.take_given_up()), (0, vec![]));
    f.store.written(write.write, true);
    let key = ChunkKey { fingerprint: f.fingerprint(), hash: name("a") };
    assert_eq!(f.store.take_given_up(), [key]);
    assert_eq!((f.found("a"), f.store.usage().bytes.used), (0, 0));
    f.put("a");
    assert_eq!(f.found("a"), 1);
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_is_evicted_to_disk_while_it_is_said_to_be_damaged_goes_from_both() {
    let mut f = Fixture::new(StoreLimits { capacity_chunks: Some(1), ..on_disk(WritePolicy::WriteBack) });
    f.put("a");
    f.put("x");
    let write = f.store.next_write(Below::Disk).unwrap();
    assert_eq!(write.chunk.hash, name("a"), "it is on its way out of memory");
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    f.store.written(write.write, true);
    assert_eq!((f.found("a"), f.store.take_given_up().len()), (0, 1));
    assert_eq!(f.store.usage().passing_bytes, 0);
    f.store.assert_consistent();
}

#[test]
fn what_is_on_disk_alone_or_nowhere_is_not_verified() {
    let mut f = Fixture::new(StoreLimits { capacity_chunks: Some(1), ..on_disk(WritePolicy::WriteBack) });
    f.put("a");
    f.put("x");
    let write = f.store.next_write(Below::Disk).unwrap();
    f.store.written(write.write, true);
    assert_eq!((f.verify("a"), f.verify("never")), (None, None));
    assert_eq!(f.found("a"), 1, "the disk verifies what it reads");
}

#[test]
fn a_chunk_that_is_being_written_is_not_verified() {
    let mut f = Fixture::new(limits(8, 100));
    let chain = f.chain("a");
    f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    assert_eq!(f.verify("a"), None);
}

#[test]
fn a_damaged_chunk_that_only_passes_is_forgotten() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteBack));
    let chain = f.chain("a");
    let gathered = f.store.gather(f.session, f.namespace, &chain, &[Some(Source::Peer)]).unwrap();
    let came = Came {
        checksums: vec![Checksums::default()],
        pools: PoolSet::ANY,
        reads: 1,
        is_on_disk_elsewhere: false,
        is_stored: false,
        is_copy: false,
    };
    f.store.fetched(gathered.wanted[0].fetch, Some(came), None);
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    assert_eq!(f.found("a"), 0);
    f.store.release(f.session, leased.lease).unwrap();
    let usage = f.store.usage();
    assert_eq!((usage.passing_bytes, usage.bytes.used), (0, 0));
}

#[test]
fn a_gather_that_waits_ends_before_a_chunk_that_turns_out_damaged() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteBack));
    f.put("ab");
    let chain = f.chain("abc");
    let elsewhere = [None, None, Some(Source::Peer)];
    let gathered = f.store.gather(f.session, f.namespace, &chain, &elsewhere).unwrap();
    assert_eq!(f.verified("ab", WRONG), Checked::Damaged);
    f.store.fetched(gathered.wanted[0].fetch, None, None);
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    assert_eq!(leased.chunks, 1);
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.store.usage().bytes.used, BLOCK);
    f.store.assert_consistent();
}

#[test]
fn peers_are_not_granted_a_damaged_chunk() {
    let mut f = Fixture::new(on_disk(WritePolicy::WriteBack));
    f.put("a");
    let Granted::Held { grant, .. } = f.store.grant(&f.fingerprint(), &name("a"), &[BLOCK]) else {
        panic!("it is here")
    };
    assert_eq!(f.verified("a", WRONG), Checked::Damaged);
    assert_eq!(f.store.grant(&f.fingerprint(), &name("a"), &[BLOCK]), Granted::NotHeld);
    f.store.end_grant(grant);
    assert_eq!(f.store.usage().bytes.used, 0);
}

#[test]
fn sums_that_could_not_be_made_change_nothing() {
    let mut f = Fixture::new(limits(8, 100));
    f.put("a");
    let order = f.verify("a").unwrap();
    assert_eq!(f.store.finish_verify(order.verify, None), Checked::Nothing);
    assert_eq!(f.verified("a", RIGHT), Checked::Right);
    assert_eq!(f.found("a"), 1);
}

/// Mixes true and false reports with everything else: nothing is held at the end, and no damaged chunk is found.
#[test]
fn in_random_histories_damaged_chunks_leave_nothing_behind() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..200 {
        let write = [WritePolicy::WriteThrough, WritePolicy::WriteBack][random.usize(..2)];
        let mut f = Fixture::new(StoreLimits { capacity_chunks: Some(4), ..on_disk(write) });
        let (mut leases, mut verifications, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        let words = ["abcd", "abxy", "mnop", "mnq"];
        let take = |random: &mut fastrand::Rng, from: &mut Vec<u64>| {
            (!from.is_empty()).then(|| from.swap_remove(random.usize(..from.len())))
        };
        for _ in 0..150 {
            let word = words[random.usize(..words.len())];
            let part = &word[..random.usize(1..=word.len())];
            match random.u8(..7) {
                0 | 1 => f.try_put(part),
                2 => leases.extend(Some(f.lease(part).lease).filter(|&lease| lease > 0)),
                3 => _ = take(&mut random, &mut leases).map(|lease| f.store.release(f.session, lease)),
                4 => verifications.extend(f.verify(part).map(|order| order.verify)),
                5 => {
                    if let Some(verify) = take(&mut random, &mut verifications) {
                        f.store.finish_verify(verify, Some([RIGHT, WRONG][random.usize(..2)]));
                    }
                }
                _ => {
                    writes.extend(f.store.next_write(Below::Disk).map(|write| write.write));
                    if random.bool() && !writes.is_empty() {
                        f.store.written(writes.remove(0), random.bool());
                    }
                }
            }
            f.store.assert_consistent();
        }
        verifications.into_iter().for_each(|verify| _ = f.store.finish_verify(verify, Some(WRONG)));
        leases.into_iter().for_each(|lease| f.store.release(f.session, lease).unwrap());
        writes.into_iter().for_each(|write| f.store.written(write, true));
        // Chunks that were evicted meanwhile are written too.
        f.write_all();
        f.store.assert_consistent();
        let usage = f.store.usage();
        assert_eq!((usage.passing_bytes, usage.bytes.used), (0, usage.cached_bytes), "seed {seed}");
        assert_eq!(usage.disk.unwrap().waiting_bytes, 0, "seed {seed}");
    }
}

impl Fixture {
    /// Writes the missing chunks of a prompt, if there is room.
    fn try_put(&mut self, word: &str) {
        let chain = self.chain(word);
        let Ok(reserved) = self.store.reserve(self.session, self.namespace, &chain, 0, NOW) else { return };
        if reserved.chunks.is_empty() {
            return;
        }
        let sources = vec![0; reserved.chunks.len()];
        let order =
            self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources).unwrap();
        self.store.finish_commit(order.order, Some(sums(&order)));
    }
}
