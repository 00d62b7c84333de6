//! Tests of chunks with several pools on disk and at other nodes: which pools of each chunk are known, and which come back.

use larder_protocol::PoolSet;
use larder_protocol::session::{Span, Tier};

use super::super::{
    Came, DiskStoreLimits, Granted, GrantedBlock, Leaving, ObjectStoreLimits, PeerStoreLimits, StoreLimits,
    WritePolicy,
};
use super::pools::hybrid;
use super::*;
use crate::store::ChangeKind;
use crate::store::ids::Below;

fn with_disk(capacity_chunks: u64, write: WritePolicy) -> StoreLimits {
    let disk = DiskStoreLimits {
        write,
        write_after_uses: 2,
        max_waiting_bytes: 100 * BLOCK,
        max_reading_bytes: 100 * BLOCK,
    };
    let peers = Some(PeerStoreLimits {
        passing_bytes: 100 * BLOCK,
        max_granted_chunks: 8,
        placement: crate::placement::PlacementRule::Reads,
    });
    StoreLimits { disk: Some(disk), peers, ..limits(64, capacity_chunks) }
}

impl Fixture {
    /// Carries out every write that waits, and returns for each its chunk, its number of blocks, and whether it replaces a
    /// record.
    fn write_hybrid(&mut self) -> Vec<(ChunkHash, usize, bool)> {
        let mut written = Vec::new();
        while let Some(write) = self.store.next_write(Below::Disk) {
            self.store.written(write.write, true);
            written.push((write.chunk.hash, write.blocks.len(), write.replaces));
        }
        written
    }

    /// Leases a prompt; every read from disk succeeds. Returns the numbers of blocks read, of chunks and of places.
    fn read_hybrid(&mut self, word: &str) -> (usize, u32, usize) {
        let chain = self.chain(word);
        let gathered = self.store.gather(self.session, self.namespace, &chain, &[]).unwrap();
        let mut read = 0;
        for wanted in &gathered.wanted {
            read += wanted.blocks.len();
            let checksums = vec![Checksums::default(); wanted.blocks.len()];
            let came = Came {
                checksums,
                pools: PoolSet::ANY,
                reads: 1,
                is_on_disk_elsewhere: false,
                is_stored: false,
                is_copy: false,
            };
            self.store.fetched(wanted.fetch, Some(came), Some(ChangeKind::Gained));
        }
        let leased = self.store.finish_gather(gathered.gather).unwrap();
        if leased.lease > 0 {
            self.store.release(self.session, leased.lease).unwrap();
        }
        (read, leased.chunks, leased.places.len())
    }
}

#[test]
fn what_a_record_has_of_each_chunk_is_known_and_comes_back() {
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let mut f = Fixture::with_spec(with_disk(3, write), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
        f.put_pools("abc", &[0, 2, 0]);
        f.write_hybrid();
        f.put_pools("xyz", &[0, 0, 0]);
        f.write_hybrid();
        let chain = f.chain("abc");
        let spans = f.lookup_with(&chain, &[], &[]);
        assert_eq!(spans, [Span { from: 0, to: 2, tier: Tier::Disk }], "{write:?}");
        assert_eq!(f.read_hybrid("abc"), (3, 2, 3), "what lies behind the boundary is not read");
        assert_eq!(f.found("abc"), 2);
        f.write_hybrid();
        f.store.assert_consistent();
    }
}

#[test]
fn a_chunk_on_disk_that_gets_another_pool_is_written_again() {
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let mut f = Fixture::with_spec(with_disk(3, write), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
        f.put_pools("abc", &[0, 0, 0]);
        f.write_hybrid();
        if write == WritePolicy::WriteBack {
            f.put_pools("xyz", &[0, 0, 0]);
            assert_eq!(f.write_hybrid().len(), 3);
            let chain = f.chain("abc");
            f.try_reserve("abc", &[0, 0, 0]).map(|reserved| f.commit(&reserved)).unwrap();
            assert_eq!(f.lookup_with(&chain, &[], &[]), []);
        }
        f.put_pools("abc", &[0, 0, 2]);
        assert_eq!(f.found("abc"), 3);
        if write == WritePolicy::WriteThrough {
            assert_eq!(f.write_hybrid(), [(name("abc"), 2, true)]);
        }
        f.put_pools("uvw", &[0, 0, 0]);
        let written = f.write_hybrid();
        assert_eq!(written.contains(&(name("abc"), 2, true)), write == WritePolicy::WriteBack);
        let chain = f.chain("abc");
        assert_eq!(f.lookup_with(&chain, &[], &[]), [Span { from: 0, to: 3, tier: Tier::Disk }], "{write:?}");
        f.store.assert_consistent();
    }
}

#[test]
fn a_pool_that_comes_while_the_chunk_is_being_written_is_written_after_it() {
    let mut f = Fixture::with_spec(
        with_disk(8, WritePolicy::WriteThrough),
        &hybrid(&[HitPolicy::All, HitPolicy::Last], 1),
    );
    f.put_pools("a", &[0]);
    let first = f.store.next_write(Below::Disk).unwrap();
    f.put_pools("a", &[2]);
    assert!(f.store.next_write(Below::Disk).is_none());
    f.store.written(first.write, true);
    assert_eq!(f.write_hybrid(), [(name("a"), 2, true)]);
    assert_eq!(f.store.usage().disk.unwrap().waiting_bytes, 0);
    // If the write of a second record fails, the first record stays.
    f.put_pools("b", &[0]);
    f.write_hybrid();
    f.put_pools("b", &[2]);
    let again = f.store.next_write(Below::Disk).unwrap();
    f.store.written(again.write, false);
    assert_eq!(f.store.usage().disk.unwrap().chunks, 2);
    f.store.assert_consistent();
}

#[test]
fn a_restarted_store_knows_which_pools_each_record_has() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(with_disk(8, WritePolicy::WriteThrough), &spec);
    let (chain, fingerprint) = (f.chain("abc"), spec.fingerprint("a"));
    for (position, pools) in [(0, 1), (1, 3), (2, 0)] {
        f.store.recovered(&fingerprint, chain.chunk(position), PoolSet(pools));
    }
    assert_eq!(f.lookup_with(&chain, &[], &[]), [Span { from: 0, to: 2, tier: Tier::Disk }]);
    assert_eq!(f.read_hybrid("abc"), (3, 2, 3));
}

#[test]
fn a_holder_sends_the_pools_that_it_has_and_the_lease_ends_where_they_can_be_restored() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut holder = Fixture::with_spec(with_disk(8, WritePolicy::WriteThroughSelective), &spec);
    let mut reader = Fixture::with_spec(with_disk(8, WritePolicy::WriteThroughSelective), &spec);
    holder.put_pools("abc", &[0, 2, 0]);
    let (chain, fingerprint) = (reader.chain("abc"), spec.fingerprint("a"));
    let gathered = reader.store.gather(reader.session, reader.namespace, &chain, &[PEER; 3]).unwrap();
    assert_eq!(gathered.wanted.len(), 3, "what the holder has of them is not known");
    for wanted in &gathered.wanted {
        let Granted::Held { grant, pools, blocks, .. } =
            holder.store.grant(&fingerprint, &wanted.chunk.hash, &[BLOCK; 2])
        else {
            panic!("it is there")
        };
        let bytes: u64 = blocks.iter().map(|GrantedBlock { bytes, .. }| bytes).sum();
        assert_eq!(bytes, pools.len() as u64 * BLOCK);
        holder.store.end_grant(grant);
        let checksums = vec![Checksums::default(); blocks.len()];
        let came = Came {
            checksums,
            pools,
            reads: 1,
            is_on_disk_elsewhere: false,
            is_stored: false,
            is_copy: false,
        };
        let kept = (wanted.position == 0).then_some(ChangeKind::Gained);
        reader.store.fetched(wanted.fetch, Some(came), kept);
    }
    assert_eq!(reader.store.usage().passing_bytes, 3 * BLOCK, "slots of what did not come are free");
    let leased = reader.store.finish_gather(gathered.gather).unwrap();
    assert_eq!((leased.chunks, leased.places.len()), (2, 3));
    // A writer that computed the state after the first chunk adds it. The second chunk lacks nothing, only passes, and does not
    // stay.
    reader.put_pools("ab", &[2, 2]);
    reader.put_pools("a", &[2]);
    reader.store.assert_consistent();
    reader.store.release(reader.session, leased.lease).unwrap();
    let usage = reader.store.usage();
    assert_eq!((usage.passing_bytes, usage.bytes.used, usage.cached_bytes), (0, 2 * BLOCK, 2 * BLOCK));
    reader.store.assert_consistent();
}

#[test]
fn a_pool_that_a_passing_chunk_gets_makes_it_stay() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(with_disk(8, WritePolicy::WriteThroughSelective), &spec);
    let chain = f.chain("a");
    for end in ["commit", "abort"] {
        let gathered = f.store.gather(f.session, f.namespace, &chain, &[PEER]).unwrap();
        let checksums = vec![Checksums::default()];
        let came = Came {
            checksums,
            pools: PoolSet::first(1),
            reads: 1,
            is_on_disk_elsewhere: false,
            is_stored: false,
            is_copy: false,
        };
        f.store.fetched(gathered.wanted[0].fetch, Some(came), None);
        let reserved = f.try_reserve("a", &[2]);
        let leased = f.store.finish_gather(gathered.gather).unwrap();
        assert_eq!(leased.chunks, 0, "no state, no prefix");
        match (end, reserved) {
            ("commit", Ok(reserved)) => {
                assert_eq!(reserved.pools, [PoolSet(2)]);
                f.commit(&reserved);
                assert_eq!((f.found("a"), f.store.usage().cached_chunks), (1, 1));
                let fingerprint = spec.fingerprint("a");
                f.store.give_up(&fingerprint, &[name("a")]);
            }
            (_, Ok(reserved)) => f.store.abort(f.session, reserved.reservation).unwrap(),
            (_, Err(refused)) => panic!("{refused}"),
        }
        f.store.assert_consistent();
        let usage = f.store.usage();
        assert_eq!((usage.passing_bytes, usage.bytes.used, usage.cached_bytes), (0, 0, 0), "{end}");
    }
}

#[test]
fn a_ticket_tells_of_legal_boundaries_alone() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(with_disk(8, WritePolicy::WriteThrough), &spec);
    let (chain, fingerprint) = (f.chain("abcde"), spec.fingerprint("a"));
    for (position, pools) in [(0, 1), (1, 3), (2, 1), (3, 3), (4, 1)] {
        f.store.recovered(&fingerprint, chain.chunk(position), PoolSet(pools));
    }
    let gathered = f.store.gather(f.session, f.namespace, &chain, &[]).unwrap();
    assert!(
        gathered
            .wanted
            .iter()
            .map(|wanted| f.store.takes_all_pools(wanted.fetch))
            .eq([false, true, false, true])
    );
    let mut told = Vec::new();
    for wanted in &gathered.wanted {
        let progress = f.store.progress(f.session, gathered.gather).unwrap();
        told.push((progress.tokens_in_place / 16, progress.tokens_expected / 16));
        let checksums = vec![Checksums::default(); wanted.blocks.len()];
        let came = Came {
            checksums,
            pools: PoolSet::ANY,
            reads: 1,
            is_on_disk_elsewhere: false,
            is_stored: false,
            is_copy: false,
        };
        f.store.fetched(wanted.fetch, (wanted.position < 3).then_some(came), Some(ChangeKind::Gained));
    }
    assert_eq!(told, [(0, 4), (0, 4), (2, 4), (2, 4)]);
    assert_eq!(
        f.store.progress(f.session, gathered.gather).unwrap().tokens_expected,
        32,
        "the last one failed"
    );
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    assert_eq!((leased.chunks, leased.places.len()), (2, 3));
    f.store.assert_consistent();
}

#[test]
fn a_pool_that_is_added_here_makes_a_chunk_of_another_node_a_chunk_of_this_one() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(with_disk(8, WritePolicy::WriteThrough), &spec);
    let chain = f.chain("a");
    let gathered = f.store.gather(f.session, f.namespace, &chain, &[PEER]).unwrap();
    let came = Came {
        checksums: vec![Checksums::default()],
        pools: PoolSet::first(1),
        reads: 1,
        is_on_disk_elsewhere: true,
        is_stored: false,
        is_copy: true,
    };
    f.store.fetched(gathered.wanted[0].fetch, Some(came), Some(ChangeKind::Gained));
    assert_eq!(f.store.finish_gather(gathered.gather).unwrap().chunks, 0, "it has no state");
    let is_copy = |f: &Fixture| f.store.index.iter_from(0).any(|(_, _, chunk)| chunk.is_copy());
    assert!(is_copy(&f) && f.write_hybrid().is_empty(), "the other node has it on disk");
    f.put_pools("a", &[2]);
    assert!(!is_copy(&f));
    assert_eq!(f.write_hybrid(), [(name("a"), 2, true)]);
}

#[test]
fn an_object_that_lacks_a_pool_is_replaced() {
    let object = ObjectStoreLimits {
        write: Some(WritePolicy::WriteThrough),
        write_after_uses: 2,
        max_waiting_bytes: 100 * BLOCK,
        max_reading_bytes: 100 * BLOCK,
    };
    let limits = StoreLimits { object: Some(object), ..limits(64, 8) };
    let mut f = Fixture::with_spec(limits, &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    let upload = |f: &mut Fixture| {
        let write = f.store.next_write(Below::Object)?;
        f.store.written(write.write, true);
        Some(write.blocks.len())
    };
    f.put_pools("a", &[0]);
    let first = f.store.next_write(Below::Object).unwrap();
    f.put_pools("a", &[2]);
    f.store.written(first.write, true);
    assert_eq!(upload(&mut f), Some(2), "the state came while the chunk was being uploaded");
    f.put_pools("b", &[0]);
    assert_eq!(upload(&mut f), Some(1));
    f.put_pools("b", &[2]);
    assert_eq!(upload(&mut f), Some(2), "the state came afterwards");
    assert_eq!(upload(&mut f), None);
}

#[test]
fn a_chunk_whose_record_lacks_a_pool_moves_when_its_node_leaves() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(with_disk(8, WritePolicy::WriteThrough), &spec);
    f.put_pools("a", &[0]);
    f.write_hybrid();
    let id = f.store.by_worth()[0];
    assert_eq!(f.store.leaving(id, true), Leaving::KeptBelow);
    f.put_pools("a", &[2]);
    assert!(matches!(f.store.leaving(id, true), Leaving::Moves { .. }));
    f.write_hybrid();
    assert_eq!(f.store.leaving(id, true), Leaving::KeptBelow);
}
