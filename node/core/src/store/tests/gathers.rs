//! Tests of leases with chunks of other nodes, and of grants to other nodes.

use larder_protocol::session::{Span, Tier};
use larder_protocol::{Chain, Fingerprint, PoolSet};

use super::super::{Came, Granted, LookupOptions, PeerStoreLimits, Refused, Source, StoreLimits};
use super::*;
use crate::store::ChangeKind;

pub(super) fn shared(slots: u32, capacity_chunks: u64, passing: u64) -> Fixture {
    let peers = Some(PeerStoreLimits {
        passing_bytes: passing * BLOCK,
        max_granted_chunks: 2,
        placement: crate::placement::PlacementRule::Reads,
    });
    // The only tenant may use all of the passing bytes.
    Fixture::new(StoreLimits { peers, tenant_bytes: vec![u64::MAX], ..limits(slots, capacity_chunks) })
}

impl Fixture {
    pub(super) fn fingerprint(&self) -> Fingerprint {
        spec().fingerprint("a")
    }

    pub(super) fn gather(&mut self, word: &str, elsewhere: &[Option<Source>]) -> super::super::Gathered {
        let chain = self.chain(word);
        self.store.gather(self.session, self.namespace, &chain, elsewhere).unwrap()
    }

    /// Ends every fetch with success. With `kept` the chunks stay.
    pub(super) fn come(&mut self, gathered: &super::super::Gathered, kept: Option<ChangeKind>) -> Vec<u64> {
        let came = |_| Came {
            checksums: vec![Checksums::default()],
            pools: PoolSet::ANY,
            reads: 1,
            is_on_disk_elsewhere: false,
            is_stored: false,
            is_copy: false,
        };
        gathered
            .wanted
            .iter()
            .flat_map(|wanted| self.store.fetched(wanted.fetch, Some(came(())), kept))
            .collect()
    }

    fn grant(&mut self, word: &str) -> Granted {
        self.store.grant(&self.fingerprint(), &name(word), &[BLOCK])
    }

    fn changes(&mut self) -> Vec<(ChunkHash, ChangeKind)> {
        self.store.take_changes().into_iter().map(|change| (change.chunk.hash, change.kind)).collect()
    }

    pub(super) fn lookup_with(
        &mut self,
        chain: &Chain,
        tiers: &[Tier],
        elsewhere: &[Option<Source>],
    ) -> Vec<Span> {
        let options =
            LookupOptions { elsewhere, prompt_tokens: 1_000, skip_read: false, tiers, pin_ms: None };
        self.store.lookup(self.session, self.namespace, chain, options, NOW).unwrap().spans
    }
}

#[test]
fn a_lookup_answers_what_is_here_and_what_peers_have_as_spans() {
    let mut f = shared(8, 8, 8);
    f.put("ab");
    let chain = f.chain("abcd");
    assert_eq!(f.store.find(f.session, f.namespace, &chain).unwrap().absent(3), [2]);
    let span = |from, to, tier| Span { from, to, tier };
    let peers = [PEER, None, PEER, None];
    assert_eq!(f.lookup_with(&chain, &[], &peers), [span(0, 2, Tier::Host), span(2, 3, Tier::Peer)]);
    assert_eq!(f.lookup_with(&chain, &[Tier::Host], &peers), [span(0, 2, Tier::Host)]);
    assert_eq!(f.lookup_with(&chain, &[Tier::Peer], &peers), [span(0, 1, Tier::Peer)]);
}

#[test]
fn what_is_fetched_to_pass_goes_when_its_lease_ends() {
    let mut f = shared(8, 8, 8);
    f.put("a");
    let gathered = f.gather("abc", &[None, PEER, PEER]);
    assert_eq!(gathered.wanted.iter().map(|wanted| wanted.position).collect::<Vec<_>>(), [1, 2]);
    assert!(!gathered.is_ready);
    assert_eq!(f.found("abc"), 1, "nobody sees what is on its way");
    assert_eq!(f.come(&gathered, None), [gathered.gather]);
    assert_eq!(f.found("abc"), 3);
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    assert_eq!((leased.chunks, leased.places.len()), (3, 3));
    assert_eq!((f.store.usage().cached_chunks, f.store.usage().passing_bytes), (1, 2 * BLOCK));
    f.store.assert_consistent();
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!((f.found("abc"), f.store.usage().passing_bytes, f.store.usage().bytes.used), (1, 0, BLOCK));
    assert_eq!(f.changes(), [(name("a"), ChangeKind::Gained)], "what passes is announced to nobody");
    f.store.assert_consistent();
}

#[test]
fn what_is_fetched_to_stay_counts_against_the_capacity_and_is_announced() {
    let mut f = shared(8, 2, 8);
    f.put("xy");
    f.changes();
    let gathered = f.gather("ab", &[PEER, PEER]);
    let moved = ChangeKind::MovedFrom(larder_protocol::table::Holder {
        node: larder_protocol::table::NodeNumber(7),
        device: 0,
    });
    f.come(&gathered, Some(moved));
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!((f.found("ab"), f.found("xy"), f.store.usage().passing_bytes), (2, 0, 0));
    let lost = |word| (name(word), ChangeKind::Lost);
    assert_eq!(f.changes(), [lost("xy"), (name("a"), moved), lost("x"), (name("ab"), moved)]);
    f.store.assert_consistent();
}

#[test]
fn a_change_says_why_a_chunk_was_evicted() {
    let mut f = shared(8, 2, 8);
    f.put("xy");
    f.put("ab");
    let lost = f.store.take_changes().into_iter().filter(|change| change.kind == ChangeKind::Lost);
    let why: Vec<_> = lost.map(|change| change.evicted).collect();
    assert_eq!(why, [Some(crate::store::EvictionReason::Watermark); 2]);
}

#[test]
fn a_chunk_is_fetched_once_for_all_who_wait() {
    let mut f = shared(8, 8, 8);
    let first = f.gather("ab", &[PEER, PEER]);
    let second = f.gather("abc", &[PEER, PEER, None]);
    assert_eq!((first.wanted.len(), second.wanted.len(), second.is_ready), (2, 0, false));
    assert_eq!(f.come(&first, None), [first.gather, second.gather]);
    let leases = [first.gather, second.gather].map(|gather| f.store.finish_gather(gather).unwrap());
    assert_eq!(leases.each_ref().map(|leased| leased.chunks), [2, 2]);
    for leased in leases {
        assert_eq!(f.found("ab"), 2);
        f.store.release(f.session, leased.lease).unwrap();
    }
    assert_eq!((f.found("ab"), f.store.usage().bytes.used), (0, 0));
}

#[test]
fn a_chunk_that_does_not_come_ends_the_lease_before_it() {
    let mut f = shared(8, 8, 8);
    let gathered = f.gather("abc", &[PEER; 3]);
    let [a, b, c] = [0, 1, 2].map(|i| gathered.wanted[i].fetch);
    let came = || {
        Some(Came {
            checksums: vec![Checksums::default()],
            pools: PoolSet::ANY,
            reads: 1,
            is_on_disk_elsewhere: false,
            is_stored: false,
            is_copy: false,
        })
    };
    assert!(f.store.fetched(c, came(), None).is_empty());
    assert!(f.store.fetched(b, None, None).is_empty());
    assert_eq!(f.store.fetched(a, came(), None), [gathered.gather]);
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    assert_eq!((leased.chunks, f.store.usage().passing_bytes), (1, BLOCK), "the third passed on at once");
    f.put("abc");
    assert_eq!(f.found("abc"), 3, "who computed the rest may save it");
    f.store.release(f.session, leased.lease).unwrap();
    f.store.assert_consistent();
}

#[test]
fn a_session_that_ends_leaves_nothing_of_its_gather() {
    let mut f = shared(8, 8, 8);
    f.put("a");
    let gathered = f.gather("ab", &[None, PEER]);
    f.store.close_session(f.session);
    f.come(&gathered, None);
    assert!(matches!(f.store.finish_gather(gathered.gather), Err(Refused::Unknown { .. })));
    let usage = f.store.usage();
    assert_eq!((usage.passing_bytes, usage.fetches, usage.bytes.used), (0, 0, BLOCK));
    f.store.assert_consistent();
}

#[test]
fn what_passes_is_bounded_and_the_lease_ends_where_the_room_does() {
    let mut f = shared(8, 8, 2);
    let gathered = f.gather("abc", &[PEER; 3]);
    assert_eq!(gathered.wanted.len(), 2);
    f.come(&gathered, None);
    assert_eq!(f.store.finish_gather(gathered.gather).unwrap().chunks, 2);
}

#[test]
fn a_pin_keeps_what_only_passed() {
    let mut f = shared(8, 8, 8);
    let gathered = f.gather("a", &[PEER]);
    f.come(&gathered, None);
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    let chain = f.chain("a");
    f.store.pin(f.session, f.namespace, &chain, 5, NOW).unwrap();
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.found("a"), 1);
    assert_eq!(f.changes(), [(name("a"), ChangeKind::Gained)]);
    f.store.assert_consistent();
}

#[test]
fn what_a_peer_is_being_sent_is_not_evicted_and_counts_as_read() {
    let mut f = shared(8, 1, 8);
    f.put("a");
    let Granted::Held { grant, reads, blocks, .. } = f.grant("a") else { panic!("it is here") };
    assert_eq!((reads, blocks.len()), (1, 1));
    f.put("b");
    assert_eq!(f.found("a"), 1);
    f.store.end_grant(grant);
    assert_eq!(f.found("a") + f.found("b"), 1);
    assert_eq!(f.grant("nowhere"), Granted::NotHeld);
    f.store.assert_consistent();
}

#[test]
fn of_a_prompt_that_a_peer_or_a_lease_with_fetched_chunks_read_the_last_chunk_goes_first() {
    for is_peer in [true, false] {
        let mut f = shared(16, 3, 8);
        f.put("abc");
        let fingerprint = f.fingerprint();
        // Without the chunk between them, the first and the last are not bound to each other.
        f.store.give_up(&fingerprint, &[name("ab")]);
        if is_peer {
            for granted in f.store.grant_all(&fingerprint, &[name("a"), name("abc")], &[BLOCK]) {
                let Granted::Held { grant, reads: 1, .. } = granted else { panic!("{granted:?}") };
                f.store.end_grant(grant);
            }
        } else {
            let gathered = f.gather("abc", &[None, PEER, None]);
            f.come(&gathered, None);
            let leased = f.store.finish_gather(gathered.gather).unwrap();
            f.store.release(f.session, leased.lease).unwrap();
        }
        ["x", "y"].iter().for_each(|word| f.put(word));
        assert_eq!((f.found("a"), f.grant("abc")), (1, Granted::NotHeld));
    }
}

#[test]
fn a_peer_with_other_block_sizes_gets_nothing_and_too_many_are_told_to_wait() {
    let mut f = shared(8, 8, 8);
    f.put("abc");
    let fingerprint = f.fingerprint();
    assert_eq!(f.store.grant(&fingerprint, &name("a"), &[BLOCK - 1]), Granted::NotHeld);
    assert!(matches!([f.grant("a"), f.grant("ab")], [Granted::Held { .. }, Granted::Held { .. }]));
    assert_eq!(f.grant("abc"), Granted::Busy);
}

#[test]
fn what_moved_to_another_node_is_given_up_unless_it_is_used() {
    let mut f = shared(8, 8, 8);
    f.put("abc");
    f.changes();
    let leased = f.lease("a");
    let fingerprint = f.fingerprint();
    f.store.give_up(&fingerprint, &[name("a"), name("ab"), name("never")]);
    assert_eq!(f.changes(), [(name("ab"), ChangeKind::Lost)]);
    assert_eq!((f.found("abc"), f.store.usage().given_up), (1, 1), "its child is a root of its own now");
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.store.usage().cached_chunks, 2);
    f.store.assert_consistent();
}

#[test]
fn the_journal_adds_up_to_what_is_held() {
    let mut f = shared(16, 3, 8);
    let mut held = std::collections::BTreeSet::new();
    for word in ["abc", "abz", "xyz", "a", "xq"] {
        f.put(word);
        for (hash, kind) in f.changes() {
            let is_news = if kind == ChangeKind::Lost { held.remove(&hash) } else { held.insert(hash) };
            assert!(is_news, "{kind:?} twice");
        }
        let all: std::collections::BTreeSet<_> = f.store.held().map(|(_, chunk)| chunk.hash).collect();
        assert_eq!(all, held);
    }
}
