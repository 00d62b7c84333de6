//! Tests of chunks on disk: which chunks are written, come back and leave; also random histories of all this.

use std::collections::{HashMap, HashSet};

use larder_protocol::session::{Span, Tier};
use larder_protocol::{ChunkRef, Fingerprint, PoolSet};

use super::super::index::OnDisk;
use super::super::journal::is_held;
use super::super::{
    Came, ChunkWrite, DiskStoreLimits, FetchId, Granted, LookupOptions, PeerStoreLimits, Source, StoreLimits,
    WritePolicy,
};
use super::*;
use crate::store::ChangeKind;
use crate::store::ids::{Below, ChunkKey};

fn with_disk(slots: u32, capacity_chunks: u64, write: WritePolicy) -> StoreLimits {
    let disk = DiskStoreLimits {
        write,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let peers = Some(PeerStoreLimits {
        passing_bytes: 4 * BLOCK,
        max_granted_chunks: 2,
        placement: crate::placement::PlacementRule::Reads,
    });
    StoreLimits { disk: Some(disk), peers, ..limits(slots, capacity_chunks) }
}

fn came() -> Option<Came> {
    Some(Came {
        checksums: vec![Checksums::default()],
        pools: PoolSet::ANY,
        reads: 1,
        is_on_disk_elsewhere: false,
        is_stored: false,
        is_copy: false,
    })
}

impl Fixture {
    fn key(&self, word: &str) -> ChunkKey {
        ChunkKey { fingerprint: spec().fingerprint("a"), hash: name(word) }
    }

    /// Carries out every write that waits.
    pub(super) fn write_all(&mut self) -> Vec<ChunkHash> {
        let mut written = Vec::new();
        while let Some(ChunkWrite { write, chunk, .. }) = self.store.next_write(Below::Disk) {
            self.store.written(write, true);
            written.push(chunk.hash);
        }
        written
    }

    fn spans(&mut self, word: &str) -> Vec<Span> {
        let chain = self.chain(word);
        let options = LookupOptions {
            elsewhere: &[],
            prompt_tokens: u64::MAX,
            skip_read: false,
            tiers: &[],
            pin_ms: None,
        };
        self.store.lookup(self.session, self.namespace, &chain, options, NOW).unwrap().spans
    }

    /// Leases a prompt whose chunks may be on disk, and returns the number of leased chunks. Every read from disk succeeds.
    fn read(&mut self, word: &str) -> u32 {
        let chain = self.chain(word);
        let gathered = self.store.gather(self.session, self.namespace, &chain, &[]).unwrap();
        for wanted in &gathered.wanted {
            assert_eq!(wanted.from, Source::Disk);
            self.store.fetched(wanted.fetch, came(), Some(ChangeKind::Gained));
        }
        let leased = self.store.finish_gather(gathered.gather).unwrap();
        if leased.chunks > 0 {
            self.store.release(self.session, leased.lease).unwrap();
        }
        leased.chunks
    }
}

fn span(from: u32, to: u32, tier: Tier) -> Span {
    Span { from, to, tier }
}

#[test]
fn what_is_written_through_is_on_disk_when_it_leaves_memory_and_comes_back_when_it_is_leased() {
    let mut f = Fixture::new(with_disk(16, 3, WritePolicy::WriteThrough));
    f.put("abc");
    assert_eq!(f.write_all().len(), 3);
    f.put("xyz");
    assert_eq!(f.write_all().len(), 3);
    assert_eq!(f.spans("abc"), [span(0, 3, Tier::Disk)]);
    assert_eq!(f.store.usage().disk.unwrap().chunks, 6);
    assert_eq!(f.read("abc"), 3);
    assert_eq!(f.spans("abc"), [span(0, 3, Tier::Host)]);
    assert_eq!(f.spans("xyz"), [span(0, 3, Tier::Disk)]);
    assert!(f.write_all().is_empty(), "what is on disk is not written again");
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_waits_to_be_written_is_not_evicted() {
    let mut f = Fixture::new(with_disk(16, 2, WritePolicy::WriteThrough));
    f.put("ab");
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (2, 2), "all four wait");
    f.write_all();
    assert_eq!(f.store.usage().cached_chunks, 2);
    f.store.assert_consistent();
}

#[test]
fn selective_writing_waits_for_the_second_use() {
    let mut f = Fixture::new(with_disk(16, 8, WritePolicy::WriteThroughSelective));
    f.put("abc");
    assert!(f.write_all().is_empty());
    let lease = f.lease("ab").lease;
    f.store.release(f.session, lease).unwrap();
    assert_eq!(f.write_all().len(), 2);
}

#[test]
fn written_back_is_what_is_evicted_and_its_memory_is_free_when_it_is_on_disk() {
    let mut f = Fixture::new(with_disk(16, 3, WritePolicy::WriteBack));
    f.put("abc");
    assert!(f.write_all().is_empty());
    f.put("xyz");
    assert_eq!(f.spans("abc"), [span(0, 3, Tier::Host)], "they can be read while they leave");
    let usage = f.store.usage();
    assert_eq!((usage.cached_chunks, usage.passing_bytes), (3, 3 * BLOCK));
    assert_eq!(f.write_all().len(), 3);
    assert_eq!(f.spans("abc"), [span(0, 3, Tier::Disk)]);
    assert_eq!(f.store.usage().passing_bytes, 0);
    f.store.assert_consistent();
}

#[test]
fn what_cannot_wait_to_be_written_is_let_go_and_counted() {
    // The only tenant may fill the whole line.
    let limits = with_disk(32, 6, WritePolicy::WriteBack);
    let mut f = Fixture::new(StoreLimits { tenant_bytes: vec![u64::MAX], ..limits });
    f.put("abcdef");
    f.put("uvwxyz");
    assert_eq!(f.store.usage().disk.unwrap().shed, 2, "four may wait");
    f.write_all();
    assert_eq!(f.spans("abcdef"), []);
    assert_eq!(f.store.usage().disk.unwrap().chunks, 4, "without their parents, which were evicted last");
    f.store.assert_consistent();
}

#[test]
fn others_hear_of_a_chunk_once_however_it_moves_between_memory_and_disk() {
    let mut f = Fixture::new(with_disk(16, 1, WritePolicy::WriteThrough));
    let mut heard = Vec::new();
    f.put("a");
    f.write_all();
    f.put("x");
    f.write_all();
    f.read("a");
    f.read("x");
    heard.extend(f.store.take_changes().into_iter().map(|change| (change.chunk.hash, change.kind)));
    assert_eq!(heard, [(name("a"), ChangeKind::Gained), (name("x"), ChangeKind::Gained)]);
    f.store.left_disk(&[f.key("a"), f.key("x")]);
    let lost: Vec<_> =
        f.store.take_changes().into_iter().map(|change| (change.chunk.hash, change.kind)).collect();
    assert_eq!(lost, [(name("a"), ChangeKind::Lost)], "the other one is in memory");
}

#[test]
fn a_restarted_store_tells_what_it_finds_on_disk_and_serves_it() {
    let mut f = Fixture::new(with_disk(16, 4, WritePolicy::WriteThrough));
    let (chain, fingerprint) = (f.chain("abc"), spec().fingerprint("a"));
    let unknown = Fingerprint([7; 32]);
    assert!(
        !f.store.recovered(&unknown, chain.chunk(0), PoolSet::first(1)),
        "nobody knows what its blocks are"
    );
    for position in [1, 0, 2, 1] {
        assert!(f.store.recovered(&fingerprint, chain.chunk(position), PoolSet::first(1)));
    }
    assert_eq!(f.store.take_changes().len(), 3);
    assert_eq!(f.spans("abc"), [span(0, 3, Tier::Disk)]);
    assert_eq!(f.read("abc"), 3);
    f.store.assert_consistent();
}

#[test]
fn a_namespace_is_known_from_its_description_before_a_session_names_it() {
    let mut store = Store::new(with_disk(16, 4, WritePolicy::WriteThrough));
    let number = store.know(TenantId(0), "a", &spec()).unwrap();
    let fingerprint = spec().fingerprint("a");
    let chain = Chain::from_root(fingerprint.root(), vec![name("a")]);
    assert!(store.recovered(&fingerprint, chain.chunk(0), PoolSet::first(1)));
    let Granted::OnDisk = store.grant(&fingerprint, &name("a"), &[BLOCK]) else { panic!("it is on disk") };
    let session = store.open_session(TenantId(0), ProcessId(0), 1 << 20);
    assert_eq!(store.register(session, "a", &spec(), &[0], &[BLOCK]).unwrap().namespace, number);
}

#[test]
fn a_peer_gets_a_chunk_from_disk_which_then_leaves_memory_again() {
    let mut f = Fixture::new(with_disk(16, 4, WritePolicy::WriteThrough));
    let (chain, fingerprint) = (f.chain("a"), spec().fingerprint("a"));
    f.store.recovered(&fingerprint, chain.chunk(0), PoolSet::first(1));
    let recall = f.store.recall(&fingerprint, &name("a")).unwrap();
    let second = f.store.recall(&fingerprint, &name("a")).unwrap();
    assert_eq!((second.fetch, second.wanted), (recall.fetch, None), "it is read once");
    assert!(!f.store.is_leased_soon(recall.fetch));
    f.store.fetched(recall.fetch, came(), None);
    let Granted::Held { grant, is_on_disk: true, .. } = f.store.grant(&fingerprint, &name("a"), &[BLOCK])
    else {
        panic!("it came")
    };
    f.store.end_recall(recall.fetch);
    f.store.end_recall(second.fetch);
    assert!(f.store.usage().bytes.used > 0);
    f.store.end_grant(grant);
    assert_eq!(f.store.usage().bytes.used, 0);
    assert_eq!(f.spans("a"), [span(0, 1, Tier::Disk)]);
}

#[test]
fn a_chunk_that_is_not_there_after_all_ends_the_prefix_and_is_forgotten() {
    let mut f = Fixture::new(with_disk(16, 4, WritePolicy::WriteThrough));
    let (chain, fingerprint) = (f.chain("abc"), spec().fingerprint("a"));
    (0..3).for_each(|position| _ = f.store.recovered(&fingerprint, chain.chunk(position), PoolSet::first(1)));
    let gathered = f.store.gather(f.session, f.namespace, &chain, &[]).unwrap();
    let [a, b, c] = &gathered.wanted[..] else { panic!("three are read") };
    f.store.fetched(a.fetch, came(), Some(ChangeKind::Gained));
    f.store.left_disk(&[f.key("ab")]);
    f.store.fetched(b.fetch, None, None);
    f.store.fetched(c.fetch, came(), Some(ChangeKind::Gained));
    assert_eq!(f.store.finish_gather(gathered.gather).unwrap().chunks, 1);
    assert_eq!(f.spans("abc"), [span(0, 1, Tier::Host)]);
    f.store.assert_consistent();
}

#[test]
fn when_the_disk_closes_only_what_is_in_memory_is_left() {
    let mut f = Fixture::new(with_disk(16, 3, WritePolicy::WriteThrough));
    f.put("abc");
    f.write_all();
    f.put("xyz");
    let under_way = f.store.next_write(Below::Disk).unwrap();
    f.store.disk_closed();
    f.store.written(under_way.write, false);
    assert_eq!((f.found("abc"), f.found("xyz")), (0, 3));
    f.put("u");
    assert!(f.store.next_write(Below::Disk).is_none() && f.store.usage().disk.is_none());
    f.store.assert_consistent();
}

/// A store, its simulated disk, and everything that is under way.
struct World {
    f: Fixture,
    rng: fastrand::Rng,
    disk: HashMap<ChunkHash, ChunkRef>,
    writes: Vec<ChunkWrite>,
    reads: Vec<(FetchId, ChunkHash)>,
    gathers: Vec<u64>,
    leases: Vec<u64>,
    recalls: Vec<(FetchId, ChunkHash)>,
    grants: Vec<u64>,
    held: HashSet<ChunkHash>,
}

impl World {
    fn new(seed: u64, write: WritePolicy) -> Self {
        let (f, rng) = (Fixture::new(with_disk(24, 6, write)), fastrand::Rng::with_seed(seed));
        let (writes, reads, gathers, leases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (recalls, grants) = (Vec::new(), Vec::new());
        Self {
            f,
            rng,
            disk: HashMap::new(),
            writes,
            reads,
            gathers,
            leases,
            recalls,
            grants,
            held: HashSet::new(),
        }
    }

    fn word(&mut self) -> String {
        (0..self.rng.usize(1..5)).map(|_| self.rng.choice(['a', 'b', 'c']).unwrap()).collect()
    }

    fn step(&mut self) {
        let word = self.word();
        let (chain, fingerprint) = (self.f.chain(&word), spec().fingerprint("a"));
        match self.rng.u8(..11) {
            0 | 1 => self.try_put(&chain),
            2 => self.writes.extend(self.f.store.next_write(Below::Disk)),
            3 => self.finish_write(),
            4 | 5 => {
                if let Ok(gathered) = self.f.store.gather(self.f.session, self.f.namespace, &chain, &[]) {
                    self.reads.extend(gathered.wanted.iter().map(|wanted| (wanted.fetch, wanted.chunk.hash)));
                    self.gathers.push(gathered.gather);
                }
            }
            6 => self.finish_read(),
            7 => {
                if let Some(gather) = self.take(|world| &mut world.gathers)
                    && let Ok(leased) = self.f.store.finish_gather(gather)
                    && leased.lease > 0
                {
                    self.leases.push(leased.lease);
                }
            }
            8 => {
                if let Some(lease) = self.take(|world| &mut world.leases) {
                    self.f.store.release(self.f.session, lease).unwrap();
                }
                if let Some(grant) = self.take(|world| &mut world.grants) {
                    self.f.store.end_grant(grant);
                }
            }
            9 => match self.f.store.grant(&fingerprint, &name(&word), &[BLOCK]) {
                Granted::Held { grant, .. } => self.grants.push(grant),
                Granted::OnDisk => {
                    if let Some(recall) = self.f.store.recall(&fingerprint, &name(&word)) {
                        self.reads.extend(recall.wanted.map(|wanted| (wanted.fetch, wanted.chunk.hash)));
                        self.recalls.push((recall.fetch, name(&word)));
                    }
                }
                Granted::NotHeld | Granted::Busy => {}
            },
            _ => {
                let gone: Vec<ChunkHash> =
                    self.disk.keys().copied().filter(|_| self.rng.u8(..4) == 0).collect();
                let key = |&hash: &ChunkHash| ChunkKey { fingerprint, hash };
                gone.iter().for_each(|hash| _ = self.disk.remove(hash));
                self.f.store.left_disk(&gone.iter().map(key).collect::<Vec<_>>());
            }
        }
    }

    fn take<T>(&mut self, of: impl Fn(&mut Self) -> &mut Vec<T>) -> Option<T> {
        let len = of(self).len();
        (len > 0).then(|| {
            let at = self.rng.usize(..len);
            of(self).swap_remove(at)
        })
    }

    fn try_put(&mut self, chain: &Chain) {
        let Ok(reserved) = self.f.store.reserve(self.f.session, self.f.namespace, chain, 0, NOW) else {
            return;
        };
        if reserved.chunks.is_empty() {
            return;
        }
        if self.rng.u8(..4) == 0 {
            return self.f.store.abort(self.f.session, reserved.reservation).unwrap();
        }
        let sources = vec![0; reserved.chunks.len()];
        let order = self
            .f
            .store
            .begin_commit(self.f.session, reserved.reservation, &reserved.chunks, &sources)
            .unwrap();
        self.f.store.finish_commit(order.order, Some(sums(&order)));
    }

    fn finish_write(&mut self) {
        let Some(ChunkWrite { write, chunk, .. }) = self.take(|world| &mut world.writes) else { return };
        let ok = self.rng.u8(..4) > 0;
        if ok {
            self.disk.insert(chunk.hash, chunk);
        }
        self.f.store.written(write, ok);
    }

    fn finish_read(&mut self) {
        let Some((fetch, hash)) = self.take(|world| &mut world.reads) else { return };
        let there = self.disk.contains_key(&hash);
        let kept = self.f.store.is_leased_soon(fetch).then_some(ChangeKind::Gained);
        self.f.store.fetched(fetch, if there { came() } else { None }, kept);
        let (ended, rest) =
            std::mem::take(&mut self.recalls).into_iter().partition(|recall| recall.0 == fetch);
        self.recalls = rest;
        let ended: Vec<(FetchId, ChunkHash)> = ended;
        for (fetch, hash) in ended {
            if let Granted::Held { grant, .. } = self.f.store.grant(&spec().fingerprint("a"), &hash, &[BLOCK])
            {
                self.grants.push(grant);
            }
            self.f.store.end_recall(fetch);
        }
    }

    /// Checks that others were told exactly the chunks that are here, and that the chunks that the store takes to be on disk are
    /// there.
    fn check(&mut self) {
        self.f.store.assert_consistent();
        for change in self.f.store.take_changes() {
            match change.kind {
                ChangeKind::Lost => assert!(self.held.remove(&change.chunk.hash), "it was told before"),
                _ => assert!(self.held.insert(change.chunk.hash), "it was not told before"),
            }
        }
        let store = &self.f.store;
        let chunks = || store.index.iter_from(0).map(|(_, _, chunk)| chunk);
        let held: HashSet<ChunkHash> =
            chunks().filter(|chunk| is_held(chunk)).map(|chunk| chunk.hash).collect();
        assert_eq!(held, self.held);
        let on_disk = chunks().filter(|chunk| chunk.disk == OnDisk::Here);
        let on_disk: HashSet<ChunkHash> = on_disk.map(|chunk| chunk.hash).collect();
        assert_eq!(on_disk, self.disk.keys().copied().collect::<HashSet<_>>());
        assert_eq!(store.usage().disk.unwrap().chunks, on_disk.len() as u64);
    }

    /// Ends everything that is under way, and checks that nothing is left.
    fn end(mut self) {
        while !self.reads.is_empty() {
            self.finish_read();
        }
        while let Some(gather) = self.gathers.pop() {
            self.leases.extend(self.f.store.finish_gather(gather).map(|leased| leased.lease).ok());
        }
        self.leases
            .iter()
            .filter(|&&lease| lease > 0)
            .for_each(|&lease| self.f.store.release(self.f.session, lease).unwrap());
        self.grants.iter().for_each(|&grant| self.f.store.end_grant(grant));
        self.writes.extend(std::iter::from_fn(|| self.f.store.next_write(Below::Disk)));
        while !self.writes.is_empty() {
            self.finish_write();
            self.writes.extend(std::iter::from_fn(|| self.f.store.next_write(Below::Disk)));
        }
        self.check();
        let usage = self.f.store.usage();
        assert_eq!((usage.passing_bytes, usage.fetches, usage.grants, usage.leases), (0, 0, 0, 0));
        assert_eq!(usage.disk.unwrap().waiting_bytes, 0);
        assert_eq!(usage.bytes.used, usage.cached_bytes, "every slot is cached or free");
        assert!(usage.cached_chunks <= 6);
    }
}

#[test]
fn random_histories_with_a_disk_keep_every_invariant_and_leave_nothing_behind() {
    let policies = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];
    for (seed, write) in (0..300).zip(policies.into_iter().cycle()) {
        println!("seed {seed}, {write:?}");
        let mut world = World::new(seed, write);
        for _ in 0..300 {
            world.step();
            world.check();
        }
        world.end();
    }
}

/// Opens tickets for chunks in memory, on disk and at peers, until the session closes. Chunks come or fail; tickets are collected
/// early or late, or canceled. Nothing is left of any ticket.
#[test]
fn ten_thousand_random_tickets_with_cancels_and_failures_end_with_nothing_held() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut f = Fixture::new(with_disk(64, 16, WritePolicy::WriteThrough));
    let fingerprint = spec().fingerprint("a");
    let (mut tickets, mut coming, mut collected) = (Vec::<u64>::new(), Vec::<FetchId>::new(), 0);
    for number in 0..10_000_u32 {
        let word: String = (0..rng.usize(1..7)).map(|_| rng.choice(['a', 'b', 'c']).unwrap()).collect();
        let chain = f.chain(&word);
        match rng.u8(..8) {
            0 => f.put(&word),
            1 => (0..chain.len()).for_each(|position| {
                _ = f.store.recovered(&fingerprint, chain.chunk(position), PoolSet::first(1))
            }),
            _ => {}
        }
        f.write_all();
        let peers: Vec<_> = (0..chain.len()).map(|_| rng.bool().then_some(Source::Peer)).collect();
        if let Ok(gathered) = f.store.gather(f.session, f.namespace, &chain, &peers) {
            coming.extend(gathered.wanted.iter().map(|wanted| wanted.fetch));
            tickets.push(gathered.gather);
        }
        while rng.u8(..3) > 0 && !coming.is_empty() {
            let fetch = coming.swap_remove(rng.usize(..coming.len()));
            let came = if rng.u8(..4) > 0 { came() } else { None };
            f.store.fetched(fetch, came, rng.bool().then_some(ChangeKind::Gained));
        }
        while rng.bool() && !tickets.is_empty() {
            let ticket = tickets.swap_remove(rng.usize(..tickets.len()));
            let progress = f.store.progress(f.session, ticket).unwrap();
            assert!(progress.tokens_in_place <= progress.tokens_expected);
            if rng.bool() {
                f.store.cancel_gather(f.session, ticket);
                assert!(f.store.progress(f.session, ticket).is_err());
                continue;
            }
            let leased = f.store.finish_gather(ticket).unwrap();
            assert_eq!(
                u64::from(leased.chunks) * 16,
                progress.tokens_in_place,
                "it leases what it said is there"
            );
            if leased.lease > 0 {
                f.store.release(f.session, leased.lease).unwrap();
            }
            collected += 1;
        }
        // Fetches that nobody waits for are stopped: for the store, they failed.
        for fetch in f.store.take_abandoned() {
            assert!(!f.store.is_awaited(fetch));
            coming.retain(|&other| other != fetch);
            f.store.fetched(fetch, None, None);
        }
        if number % 100 == 0 {
            f.store.assert_consistent();
        }
    }
    f.store.close_session(f.session);
    for fetch in f.store.take_abandoned() {
        coming.retain(|&other| other != fetch);
        f.store.fetched(fetch, None, None);
    }
    assert!(coming.is_empty(), "all that was under way was told to be given up");
    f.write_all();
    f.store.assert_consistent();
    let usage = f.store.usage();
    assert_eq!((usage.leases, usage.fetches, usage.passing_bytes, usage.grants), (0, 0, 0, 0));
    assert_eq!(usage.bytes.used, usage.cached_bytes);
    println!("{collected} of 10,000 tickets were collected");
    assert!(collected > 2_000);
}

#[test]
fn a_chunk_used_often_enough_that_found_the_line_full_is_written_when_it_is_evicted() {
    let limits = with_disk(64, 12, WritePolicy::WriteThroughSelective);
    let mut f = Fixture::new(StoreLimits { tenant_bytes: vec![u64::MAX], ..limits });
    f.put("abcdefgh");
    let leased = f.lease("abcdefgh");
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.store.usage().disk.unwrap().shed, 4, "four of eight may wait");
    f.write_all();
    f.put("uvwx");
    for word in ["z", "y", "q", "r", "s", "t", "1", "2"] {
        f.put(word);
        f.write_all();
    }
    assert_eq!(f.store.usage().disk.unwrap().chunks, 8, "and none of those that were used once");
    f.store.assert_consistent();
}

#[test]
fn only_chunks_that_were_read_in_memory_are_used_on_disk_when_they_leave() {
    let mut f = Fixture::new(with_disk(16, 1, WritePolicy::WriteThrough));
    f.put("a");
    f.write_all();
    f.put("b");
    f.write_all();
    assert_eq!(f.store.take_touched(), []);
    let leased = f.lease("b");
    f.store.release(f.session, leased.lease).unwrap();
    f.put("c");
    assert_eq!(f.store.take_touched(), [f.key("b")]);
}

#[test]
fn a_peer_is_told_at_once_that_a_chunk_on_disk_is_being_written_anew() {
    let mut f = Fixture::new(with_disk(16, 1, WritePolicy::WriteThrough));
    f.put("a");
    f.write_all();
    f.put("b");
    let (fingerprint, hash) = (f.key("a").fingerprint, name("a"));
    assert_eq!(f.store.grant(&fingerprint, &hash, &[BLOCK]), Granted::OnDisk);
    let chain = f.chain("a");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    assert_eq!(f.store.grant(&fingerprint, &hash, &[BLOCK]), Granted::NotHeld);
    f.store.abort(f.session, reserved.reservation).unwrap();
    assert_eq!(f.store.grant(&fingerprint, &hash, &[BLOCK]), Granted::OnDisk);
}
