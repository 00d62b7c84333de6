//! Tests of chunks in the object store: chunks that are written there, and chunks that come from there.

use larder_protocol::PoolSet;
use larder_protocol::session::{Span, Tier};

use super::super::{Came, ChunkWrite, DiskStoreLimits, ObjectStoreLimits, StoreLimits, WritePolicy};
use super::*;
use crate::store::ChangeKind;
use crate::store::ids::Below;

pub(super) fn with_objects(slots: u32, capacity_chunks: u64, write: Option<WritePolicy>) -> StoreLimits {
    let object = ObjectStoreLimits {
        write,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    // The only tenant may use all of the bytes for reading.
    StoreLimits { object: Some(object), tenant_bytes: vec![u64::MAX], ..limits(slots, capacity_chunks) }
}

impl Fixture {
    /// Carries out every upload that waits.
    pub(super) fn upload_all(&mut self) -> Vec<ChunkHash> {
        let mut uploaded = Vec::new();
        while let Some(ChunkWrite { write, chunk, .. }) = self.store.next_write(Below::Object) {
            self.store.written(write, true);
            uploaded.push(chunk.hash);
        }
        uploaded
    }

    fn lookup_stored(&mut self, word: &str, stored: &[Option<Source>]) -> Vec<Span> {
        let chain = self.chain(word);
        self.lookup_with(&chain, &[], stored)
    }

    /// Leases a prompt whose chunks are in the object store, and returns the number of leased chunks. The object store gives the
    /// chunks at the positions in `come`.
    fn download(&mut self, word: &str, come: &[usize]) -> u32 {
        self.fetch(word, come, true)
    }

    /// As [`Self::download`]. `is_stored` says whether the chunks came from the object store; else they came from another node.
    fn fetch(&mut self, word: &str, come: &[usize], is_stored: bool) -> u32 {
        let chain = self.chain(word);
        let stored = vec![STORED; word.len()];
        let gathered = self.store.gather(self.session, self.namespace, &chain, &stored).unwrap();
        for wanted in &gathered.wanted {
            assert_eq!(wanted.from, Source::Object);
            let came = come.contains(&(wanted.position as usize)).then(|| Came {
                checksums: vec![Checksums::default()],
                pools: PoolSet::first(1),
                reads: 1,
                is_on_disk_elsewhere: false,
                is_stored,
                is_copy: false,
            });
            self.store.fetched(wanted.fetch, came, Some(ChangeKind::Gained));
        }
        let leased = self.store.finish_gather(gathered.gather).unwrap();
        if leased.chunks > 0 {
            self.store.release(self.session, leased.lease).unwrap();
        }
        leased.chunks
    }
}

const STORED: Option<Source> = Some(Source::Object);

fn span(from: u32, to: u32, tier: Tier) -> Span {
    Span { from, to, tier }
}

#[test]
fn what_is_committed_is_uploaded_once_and_stays_in_memory_until_it_is() {
    let mut f = Fixture::new(with_objects(16, 2, Some(WritePolicy::WriteThrough)));
    f.put("ab");
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (2, 2), "all four wait");
    assert_eq!(f.upload_all().len(), 4);
    assert_eq!(f.store.usage().cached_chunks, 2);
    assert!(f.upload_all().is_empty());
    f.store.assert_consistent();
}

#[test]
fn what_is_in_the_object_store_alone_is_in_no_index_and_nobody_is_told_of_it() {
    let mut f = Fixture::new(with_objects(16, 2, Some(WritePolicy::WriteThrough)));
    f.put("ab");
    f.upload_all();
    f.store.take_changes();
    f.put("xy");
    f.upload_all();
    assert_eq!(f.found("ab"), 0);
    let lost: Vec<_> =
        f.store.take_changes().into_iter().filter(|change| change.kind == ChangeKind::Lost).collect();
    assert_eq!(lost.len(), 2, "others hear that they left");
    assert_eq!(f.store.held().count(), 2);
    f.store.assert_consistent();
}

#[test]
fn a_lookup_names_the_object_store_behind_memory_and_peers() {
    let mut f = Fixture::new(with_objects(16, 8, None));
    f.put("a");
    let elsewhere = [STORED, PEER, STORED, None, STORED];
    let spans = f.lookup_stored("abcde", &elsewhere);
    assert_eq!(spans, [span(0, 1, Tier::Host), span(1, 2, Tier::Peer), span(2, 3, Tier::Object)]);
    let chain = f.chain("abcde");
    assert_eq!(
        f.lookup_with(&chain, &[Tier::Host, Tier::Peer], &elsewhere).last(),
        Some(&span(1, 2, Tier::Peer))
    );
    assert_eq!(f.lookup_with(&chain, &[Tier::Object], &elsewhere), [span(0, 1, Tier::Object)]);
}

#[test]
fn what_comes_stays_in_memory_is_told_and_is_not_uploaded_again() {
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
        let mut f = Fixture::new(with_objects(16, 3, Some(write)));
        assert_eq!(f.download("abc", &[0, 1, 2]), 3);
        assert_eq!((f.found("abc"), f.store.take_changes().len()), (3, 3));
        assert_eq!(f.download("abc", &[]), 3, "from memory");
        f.put("x");
        assert!(f.upload_all().iter().all(|hash| *hash == name("x")), "{write:?}");
        f.store.assert_consistent();
    }
}

#[test]
fn a_chunk_that_does_not_come_cuts_the_prefix_and_leaves_nothing_behind() {
    let mut f = Fixture::new(with_objects(16, 8, None));
    assert_eq!(f.download("abcd", &[0, 1, 3]), 2);
    let usage = f.store.usage();
    assert_eq!((usage.cached_chunks, usage.passing_bytes, usage.fetches, usage.leases), (3, 0, 0, 0));
    f.store.assert_consistent();
}

#[test]
fn written_back_is_what_is_evicted_and_its_memory_is_free_when_it_is_uploaded() {
    let mut f = Fixture::new(with_objects(16, 3, Some(WritePolicy::WriteBack)));
    f.put("abc");
    assert!(f.upload_all().is_empty());
    f.put("xyz");
    assert_eq!(f.found("abc"), 3, "they can be read while they leave");
    let usage = f.store.usage();
    assert_eq!((usage.cached_chunks, usage.passing_bytes), (3, 3 * BLOCK));
    assert_eq!(f.upload_all().len(), 3);
    assert_eq!((f.found("abc"), f.store.usage().passing_bytes), (0, 0));
    f.store.assert_consistent();
}

#[test]
fn selective_uploads_wait_for_the_second_use_and_off_means_never() {
    let mut f = Fixture::new(with_objects(16, 8, Some(WritePolicy::WriteThroughSelective)));
    f.put("abc");
    assert!(f.upload_all().is_empty());
    let lease = f.lease("ab").lease;
    f.store.release(f.session, lease).unwrap();
    assert_eq!(f.upload_all().len(), 2);
    let mut f = Fixture::new(with_objects(16, 2, None));
    f.put("abc");
    f.put("xyz");
    assert!(f.upload_all().is_empty());
}

#[test]
fn what_is_shed_is_counted_and_has_another_chance_when_it_is_evicted() {
    let mut f = Fixture::new(with_objects(32, 6, Some(WritePolicy::WriteThrough)));
    f.put("abcdef");
    assert_eq!(f.store.usage().object.unwrap().shed, 2);
    assert_eq!(f.upload_all().len(), 4);
    f.put("xy");
    let uploaded = f.upload_all();
    assert!(uploaded.contains(&name("abcdef")), "the leaf goes first, and by way of the object store");
    f.store.assert_consistent();
}

#[test]
fn what_its_writer_shed_is_uploaded_when_the_node_that_it_moved_to_evicts_it() {
    let mut f = Fixture::new(with_objects(16, 3, Some(WritePolicy::WriteThrough)));
    assert_eq!(f.fetch("abc", &[0, 1, 2], false), 3);
    assert!(f.upload_all().is_empty(), "whoever wrote it has mostly uploaded it");
    f.put("x");
    assert!(f.upload_all().contains(&name("abc")), "it is asked for then, and sent where it is not there");
    f.store.assert_consistent();
}

#[test]
fn a_failed_upload_leaves_the_chunk_in_memory_alone() {
    let mut f = Fixture::new(with_objects(16, 2, Some(WritePolicy::WriteThrough)));
    f.put("ab");
    while let Some(ChunkWrite { write, .. }) = f.store.next_write(Below::Object) {
        f.store.written(write, false);
    }
    assert_eq!((f.found("ab"), f.store.usage().object.unwrap().waiting_bytes), (2, 0));
    f.store.assert_consistent();
}

#[test]
fn disk_and_object_store_take_an_evicted_chunk_together_and_its_memory_is_free_after_both() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteBack,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    for disk_first in [true, false] {
        let with_objects = with_objects(16, 1, Some(WritePolicy::WriteBack));
        let mut f = Fixture::new(StoreLimits { disk: Some(disk.clone()), ..with_objects });
        f.put("a");
        f.put("x");
        let (to_disk, to_objects) =
            (f.store.next_write(Below::Disk).unwrap(), f.store.next_write(Below::Object).unwrap());
        assert_eq!(to_disk.chunk, to_objects.chunk);
        if disk_first {
            f.store.written(to_disk.write, true);
            assert_eq!((f.found("a"), f.store.usage().passing_bytes), (1, BLOCK));
            f.store.written(to_objects.write, true);
        } else {
            f.store.written(to_objects.write, true);
            assert_eq!((f.found("a"), f.store.usage().passing_bytes), (1, BLOCK));
            f.store.written(to_disk.write, true);
        }
        assert_eq!(f.store.usage().passing_bytes, 0);
        assert_eq!(f.lookup_stored("a", &[]), [span(0, 1, Tier::Disk)]);
        f.store.assert_consistent();
    }
}

/// Opens tickets for chunks in memory, at peers and in the object store, until the session closes. Chunks come or fail; tickets
/// are collected or canceled. Nothing is left of any ticket.
#[test]
fn random_tickets_with_cancels_and_failures_end_with_nothing_held() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut f = Fixture::new(with_objects(128, 16, Some(WritePolicy::WriteBack)));
    let (mut tickets, mut coming) = (Vec::<u64>::new(), Vec::new());
    for _ in 0..3_000 {
        let word: String = (0..rng.usize(1..7)).map(|_| rng.choice(['a', 'b', 'c']).unwrap()).collect();
        if rng.u8(..6) == 0 {
            f.put(&word);
        }
        if rng.bool() {
            f.upload_all();
        }
        let chain = f.chain(&word);
        let sources: Vec<_> = (0..chain.len()).map(|_| rng.choice([None, STORED, STORED]).unwrap()).collect();
        if let Ok(gathered) = f.store.gather(f.session, f.namespace, &chain, &sources) {
            coming.extend(gathered.wanted.iter().map(|wanted| wanted.fetch));
            tickets.push(gathered.gather);
        }
        while rng.u8(..3) > 0 && !coming.is_empty() {
            let fetch = coming.swap_remove(rng.usize(..coming.len()));
            let came = rng.bool().then(|| Came {
                checksums: vec![Checksums::default()],
                pools: PoolSet::first(1),
                reads: 1,
                is_on_disk_elsewhere: false,
                is_stored: true,
                is_copy: false,
            });
            f.store.fetched(fetch, came, rng.bool().then_some(ChangeKind::Gained));
        }
        while rng.bool() && !tickets.is_empty() {
            let ticket = tickets.swap_remove(rng.usize(..tickets.len()));
            if rng.bool() {
                f.store.cancel_gather(f.session, ticket);
                continue;
            }
            let leased = f.store.finish_gather(ticket).unwrap();
            if leased.lease > 0 {
                f.store.release(f.session, leased.lease).unwrap();
            }
        }
        for fetch in f.store.take_abandoned() {
            coming.retain(|&other| other != fetch);
            f.store.fetched(fetch, None, None);
        }
        f.store.assert_consistent();
    }
    f.store.close_session(f.session);
    coming.extend(f.store.take_abandoned());
    coming.into_iter().for_each(|fetch| _ = f.store.fetched(fetch, None, None));
    f.upload_all();
    let usage = f.store.usage();
    assert_eq!((usage.fetches, usage.passing_bytes, usage.leases), (0, 0, 0));
    assert_eq!(usage.object.unwrap().waiting_bytes, 0);
    f.store.assert_consistent();
}
