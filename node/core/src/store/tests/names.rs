//! Tests of names: positions at which a chunk may stand, and ids that outlived their chunks.

use larder_protocol::chain::{Links, Start};
use larder_protocol::{ChunkRef, PoolSet};

use super::super::ids::NamespaceId;
use super::super::journal::{Change, ChangeKind};
use super::super::{PeerStoreLimits, Refused};
use super::*;

fn shared(slots: u32, capacity: u64) -> Fixture {
    let peers = Some(PeerStoreLimits {
        passing_bytes: 8 * BLOCK,
        max_granted_chunks: 2,
        placement: crate::placement::PlacementRule::Reads,
    });
    Fixture::new(StoreLimits { peers, ..limits(slots, capacity) })
}

fn tail(index: u32, parent: &str, anchor: &str, hashes: &[&str]) -> Chain {
    let start = Start { index, parent: name(parent), anchor: name(anchor) };
    let hashes = hashes.iter().map(|hash| name(hash)).collect();
    Chain { links: Links::Linked(start), hashes, anchor_before: None }
}

impl Fixture {
    fn refuses(&mut self, chain: &Chain) {
        let before = self.store.usage();
        let refused = self.store.reserve(self.session, self.namespace, chain, 0, NOW);
        assert!(matches!(refused, Err(Refused::Chain(_))), "{refused:?}");
        let gathered = self.store.gather(self.session, self.namespace, chain, &vec![PEER; chain.len()]);
        if let Ok(gathered) = gathered {
            assert!(gathered.wanted.len() < chain.len());
            gathered.wanted.iter().for_each(|wanted| _ = self.store.fetched(wanted.fetch, None, None));
            self.store.finish_gather(gathered.gather).unwrap();
        }
        assert_eq!(self.store.usage().bytes.used, before.bytes.used, "a refusal leaves nothing behind");
        self.store.assert_tree_is_whole();
    }
}

#[test]
fn a_chunk_whose_parent_is_known_elsewhere_is_refused_and_counted() {
    let mut f = shared(8, 8);
    f.put("abc");
    // The chunk is known at index 2. These chains name it as the parent of index 5 and of index 2.
    for index in [5, 2] {
        f.refuses(&tail(index, "abc", "a", &["z"]));
    }
    assert!(f.store.usage().refused_names >= 4);
    f.put("abcz");
    assert_eq!(f.found("abcz"), 4, "the right chain is taken as before");
}

#[test]
fn a_chunk_whose_children_are_known_elsewhere_is_refused() {
    let mut f = shared(8, 8);
    let lone = tail(9, "p", "abcdefgh", &["z"]);
    let reserved = f.store.reserve(f.session, f.namespace, &lone, 0, NOW).unwrap();
    assert_eq!(reserved.chunks.len(), 1);
    f.refuses(&tail(3, "abc", "ab", &["p"]));
    // A sibling at another index under the same absent parent.
    f.refuses(&tail(12, "p", "abcdefgh", &["y"]));
}

#[test]
fn a_chunk_that_is_its_own_parent_or_comes_before_its_parent_in_one_list_is_refused() {
    let mut f = shared(8, 8);
    f.refuses(&tail(5, "z", "abcd", &["z"]));
    f.refuses(&tail(5, "x", "abcd", &["z", "x"]));
}

#[test]
fn the_tree_knows_a_chunks_anchor_better_than_its_name() {
    let mut f = shared(16, 16);
    f.put("abcdefghij");
    let wrong = tail(10, "abcdefghij", "abcd", &["abcdefghijk"]);
    assert_eq!(f.store.reserve(f.session, f.namespace, &wrong, 0, NOW).unwrap().chunks.len(), 1);
    let anchor = |chunk: &str| {
        let id = f.store.index.find(NamespaceId::of(f.namespace), &name(chunk)).unwrap();
        f.store.index.name(id).anchor
    };
    assert_eq!(anchor("abcdefghijk"), name("abcdefghi"));
}

#[test]
fn what_an_earlier_version_anchored_otherwise_moves_to_its_run_when_its_parent_comes() {
    let mut f = Fixture::new(limits(8, 8));
    f.store.keep_journal();
    let fingerprint = spec().fingerprint("a");
    // Indices 5, 6 and 7 of the run 1-7, which earlier versions split into 1, 2-3 and 4-7. Index 8 begins another run.
    let record = |index: u32, hash: &str, parent: &str, anchor: &str| ChunkRef {
        hash: name(hash),
        parent: name(parent),
        index,
        anchor: name(anchor),
    };
    let children = [
        record(6, "g", "f", "e"),
        record(7, "h", "g", "e"),
        record(7, "i", "g", "e"),
        record(8, "j", "h", "j"),
    ];
    children.iter().for_each(|chunk| assert!(f.store.recovered(&fingerprint, *chunk, PoolSet::ANY)));
    let changes = f.store.take_changes();
    assert!(changes.iter().all(|change| change.kind == ChangeKind::Gained) && changes.len() == 4);
    let parent = record(5, "f", "e", "b");
    assert!(f.store.recovered(&fingerprint, parent, PoolSet::ANY));
    let mut rows: Vec<(ChunkRef, bool)> = f
        .store
        .take_changes()
        .into_iter()
        .map(|Change { chunk, kind, .. }| (chunk, kind == ChangeKind::Gained))
        .collect();
    rows.sort_by_key(|(chunk, gained)| (chunk.hash, *gained));
    let at_home = |chunk: ChunkRef| ChunkRef { anchor: name("b"), ..chunk };
    let mut wanted = vec![(parent, true)];
    for chunk in &children[..3] {
        wanted.extend([(*chunk, false), (at_home(*chunk), true)]);
    }
    wanted.sort_by_key(|(chunk, gained)| (chunk.hash, *gained));
    assert_eq!(rows, wanted);
    assert_eq!(f.store.usage().refused_names, 0);
}

#[test]
fn a_record_on_disk_with_another_parent_is_not_taken_over() {
    let mut f = Fixture::new(limits(8, 8));
    f.put("abc");
    let fingerprint = spec().fingerprint("a");
    let record = ChunkRef { hash: name("q"), parent: name("abc"), index: 7, anchor: name("abcd") };
    assert!(!f.store.recovered(&fingerprint, record, PoolSet::ANY));
    let root = ChunkRef { hash: name("q"), parent: name("abc"), index: 0, anchor: name("q") };
    assert!(
        !f.store.recovered(&fingerprint, root, PoolSet::ANY),
        "only the namespace's root is above number 0"
    );
    assert_eq!(f.store.usage().refused_names, 2);
}

#[test]
fn an_id_that_outlived_its_chunk_names_no_other() {
    let mut f = shared(4, 1);
    f.put("a");
    let number = NamespaceId::of(f.namespace);
    let id = f.store.index.find(number, &name("a")).unwrap();
    f.put("b");
    let next = f.store.index.find(number, &name("b")).unwrap();
    f.put("c");
    let third = f.store.index.find(number, &name("c")).unwrap();
    assert!(f.store.index.known(id).is_none() && f.store.index.known(next).is_none());
    assert!([id, next].iter().any(|old| old.number() == third.number() && *old != third));
    assert_eq!(f.store.named_prefix(number, &[name("a")], &[id]), 0);
    assert_eq!(f.store.named_prefix(number, &[name("b")], &[third]), 0, "another chunk's name");
    assert_eq!(f.store.usage().misnamed, 2);
}

#[test]
fn making_room_for_one_chunk_of_a_prefix_evicts_none_of_the_others() {
    let mut f = shared(4, 4);
    let flat = NamespaceSpec { flat: true, layout: "flat".into(), ..spec() };
    let registered = f.store.register(f.session, "a", &flat, &[0], &[BLOCK]).unwrap();
    let keys = Chain::flat(registered.root, ["z", "a", "b", "c", "d"].map(name).into());
    let reserved = f.store.reserve(f.session, registered.namespace, &keys.tail(1), 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &reserved.chunks, &[0; 4]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 4);
    let elsewhere = [PEER, None, None, None, None];
    // Only another chunk of the request could give its slot to the first chunk.
    let gathered = f.store.gather(f.session, registered.namespace, &keys, &elsewhere).unwrap();
    assert_eq!((gathered.wanted.len(), gathered.is_ready), (0, true));
    assert_eq!(f.store.usage().cached_chunks, 4);
    f.store.finish_gather(gathered.gather).unwrap();
    f.store.assert_consistent();
}
