//! Tests of follows of chunks with several pools: which pools are wanted of each chunk, and which news are told.

use larder_protocol::PoolSet;
use larder_protocol::handoff::HandOver;

use super::follows::{join, layer_sums, layers_of, shared_limits};
use super::pools::hybrid;
use super::*;
use crate::store::{
    Came, ChangeKind, FollowProgress, FollowRequest, FollowStarted, News, Refused, Reserved, Wanted,
};

const PATIENCE: u64 = 500;

/// A namespace with attention and a recurrent state; each block is one layer.
fn with_states() -> NamespaceSpec {
    hybrid(&[HitPolicy::All, HitPolicy::Last], 1)
}

/// A store with a writer, and with a reader of another process.
struct World {
    f: Fixture,
    reader: SessionId,
}

impl World {
    fn new(slots: u32, spec: &NamespaceSpec) -> Self {
        let mut f = Fixture::with_spec(shared_limits(slots), spec);
        let reader = join(&mut f, 1, spec);
        Self { f, reader }
    }

    /// Reserves a prompt: for each position attention and these pools.
    fn reserve(&mut self, word: &str, pools: &[u8]) -> Reserved {
        self.f.try_reserve(word, pools).unwrap()
    }

    /// Hands over a pool of all reserved chunks that are to be written in this pool.
    fn hand_over(&mut self, of: &Reserved, pool: u8) {
        let writes = |&(at, _): &(usize, &u32)| of.pools.get(at).is_none_or(|pools| pools.has(pool.into()));
        let chunks = of.chunks.iter().enumerate().filter(writes).map(|(_, &chunk)| chunk).collect();
        let ask = HandOver { pool, ..layers_of(&Reserved { chunks, ..of.clone() }, 0, 1) };
        let order = self.f.store.begin_layers(self.f.session, &ask).unwrap();
        assert!(self.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    }

    fn commit_handed_over(&mut self, of: &Reserved) {
        let order = self.f.store.begin_commit(self.f.session, of.reservation, &of.chunks, &[]).unwrap();
        let kept = self.f.store.finish_commit(order.order, Some(layer_sums(&order)));
        assert_eq!(kept as usize, of.chunks.len());
    }

    fn start(&mut self, word: &str, from_peer: bool) -> FollowStarted {
        let chain = self.f.chain(word);
        let (namespace, attempt, patience_ms) = (self.f.namespace, 0, PATIENCE);
        let ask = FollowRequest {
            namespace,
            chain: &chain,
            writer: from_peer.then_some(&ELSEWHERE),
            attempt,
            patience_ms,
        };
        self.f.store.follow(self.reader, ask, NOW).unwrap()
    }

    /// The number of chunks, the number of layers in place in each, and whether all is committed.
    fn progress(&self, follow: u64) -> (u32, u32, bool) {
        let FollowProgress { chunks, layers, is_whole } = self.f.store.followed(self.reader, follow).unwrap();
        (chunks, layers, is_whole)
    }

    fn shown(&mut self, follow: u64) -> Option<(u32, usize)> {
        let shown = self.f.store.show_followed(self.reader, follow).unwrap();
        shown.map(|leased| (leased.chunks, leased.places.len()))
    }

    fn assert_nothing_is_held(&mut self) {
        self.f.store.close_session(self.reader);
        self.f.store.close_session(self.f.session);
        self.f.store.process_gone(ProcessId(0));
        self.f.store.process_gone(ProcessId(1));
        follows::assert_nothing_is_held(&self.f.store);
    }
}

fn came(wanted: &Wanted) -> Came {
    let checksums = vec![Checksums::default(); wanted.blocks.len()];
    let (is_on_disk_elsewhere, is_stored, is_copy) = (false, false, false);
    Came { checksums, pools: wanted.pools(), reads: 1, is_on_disk_elsewhere, is_stored, is_copy }
}

#[test]
fn the_last_state_alone_is_followed_and_shown_and_nothing_is_in_place_before_it() {
    let mut w = World::new(16, &with_states());
    let FollowStarted { follow, wanted } = w.start("abc", false);
    assert!(wanted.is_empty());
    // The writer also writes a state that the follow does not need.
    let written = w.reserve("abc", &[2, 0, 2]);
    w.hand_over(&written, 0);
    assert_eq!(
        (w.progress(follow), w.shown(follow)),
        ((3, 0, false), Some((3, 4))),
        "three blocks and a state"
    );
    w.hand_over(&written, 1);
    assert_eq!((w.progress(follow), w.shown(follow)), ((3, 1, false), None), "places are told once");
    assert_eq!(w.f.store.prove_followed(w.reader, follow, 0).unwrap().sums.len(), 4);
    w.commit_handed_over(&written);
    assert_eq!(w.progress(follow), (3, 1, true));
    assert_eq!(w.f.store.prove_followed(w.reader, follow, 1).unwrap().checksums.len(), 4);
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn a_state_that_is_added_to_a_chunk_is_followed_and_a_chunk_without_it_is_lost_when_nobody_adds_it() {
    let mut w = World::new(16, &with_states());
    w.f.put_pools("ab", &[0, 0]);
    let FollowStarted { follow, .. } = w.start("ab", false);
    assert_eq!(w.progress(follow), (0, 0, true), "nobody adds the state");
    w.f.store.release(w.reader, follow).unwrap();
    let state = w.reserve("ab", &[0, 2]);
    let FollowStarted { follow, .. } = w.start("ab", false);
    assert_eq!(w.progress(follow), (2, 0, false));
    w.hand_over(&state, 1);
    assert_eq!(w.progress(follow), (2, 1, false));
    w.commit_handed_over(&state);
    assert_eq!((w.progress(follow), w.shown(follow)), ((2, 1, true), Some((2, 3))));
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn who_waits_for_a_state_hears_when_the_chunk_is_committed_without_it() {
    let mut w = World::new(16, &with_states());
    let FollowStarted { follow, .. } = w.start("ab", false);
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let hashes = w.f.chain("ab").hashes;
    let peer =
        w.f.store.follow_for_peer(&fingerprint, (&hashes, &[PoolSet(1), PoolSet(3)]), 0, PATIENCE, NOW);
    let without = w.reserve("ab", &[0, 0]);
    assert_eq!(w.progress(follow), (2, 0, false));
    w.f.commit(&without);
    assert_eq!(w.progress(follow), (0, 0, true));
    let told: Vec<(u32, News)> =
        w.f.store.take_told().into_iter().map(|told| (told.position, told.what)).collect();
    assert!(matches!(told[..], [(0, News::Layers(_)), (0, News::Whole(_)), (1, News::Lost)]), "{told:?}");
    w.f.store.release(w.reader, follow).unwrap();
    w.f.store.end_grant(peer.unwrap());
    w.assert_nothing_is_held();
}

#[test]
fn one_chunk_that_does_not_come_loses_all_where_the_last_needs_more_than_the_others() {
    let mut w = World::new(16, &with_states());
    let written = w.reserve("ab", &[0, 0]);
    let FollowStarted { follow, .. } = w.start("abc", false);
    w.f.commit(&written);
    let state = w.reserve("abc", &[0, 0, 2]);
    w.hand_over(&state, 0);
    assert_eq!(w.progress(follow), (3, 0, false));
    w.f.store.abort(w.f.session, state.reservation).unwrap();
    assert_eq!(w.progress(follow), (0, 0, true), "a and b are no prefix without their states");
    assert_eq!(w.shown(follow), None);
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn room_is_taken_for_what_is_wanted_from_another_node_and_nothing_else() {
    let mut w = World::new(4, &with_states());
    let FollowStarted { follow, wanted } = w.start("abc", true);
    assert_eq!(wanted.iter().map(Wanted::pools).collect::<Vec<_>>(), [1, 1, 3].map(PoolSet));
    for (at, wanted) in wanted.iter().enumerate() {
        w.f.store.layers_came(wanted.fetch, wanted.number, 0, 0, BLOCK, 1);
        w.f.store.layers_came(wanted.fetch, wanted.number, 1, 0, BLOCK, 1);
        assert_eq!(w.progress(follow).1, u32::from(at == 2));
    }
    assert_eq!(w.shown(follow), Some((3, 4)));
    for wanted in &wanted {
        w.f.store.fetched(wanted.fetch, Some(came(wanted)), Some(ChangeKind::Gained));
    }
    assert_eq!((w.progress(follow), w.f.found("abc"), w.f.found("ab")), ((3, 1, true), 3, 0));
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn a_chunk_here_that_lacks_a_state_is_lost_where_another_node_writes_it() {
    let mut w = World::new(16, &with_states());
    w.f.put_pools("ab", &[0, 0]);
    let FollowStarted { follow, wanted } = w.start("ab", true);
    assert_eq!((wanted.len(), w.progress(follow)), (0, (0, 0, true)));
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn a_peer_is_told_of_the_pools_that_it_wants_by_their_numbers_among_these() {
    let mut w = World::new(16, &hybrid(&[HitPolicy::All, HitPolicy::Last, HitPolicy::Window(2)], 1));
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let hashes = w.f.chain("ab").hashes;
    let follow =
        w.f.store.follow_for_peer(&fingerprint, (&hashes, &[PoolSet(5), PoolSet(4)]), 0, PATIENCE, NOW);
    let follow = follow.unwrap();
    let written = w.reserve("ab", &[7, 7]);
    let told = |w: &mut World| -> Vec<(u32, Option<usize>)> {
        let of = |what| match what {
            News::Layers(layers) => Some(layers.block),
            News::Whole(checksums) => {
                assert_eq!(checksums.len() % 3, 1 + usize::from(checksums.len() == 2));
                None
            }
            News::Lost => Some(usize::MAX),
        };
        w.f.store.take_told().into_iter().map(|told| (told.position, of(told.what))).collect()
    };
    w.hand_over(&written, 1);
    assert_eq!(told(&mut w), [], "nobody wants it");
    w.hand_over(&written, 2);
    assert_eq!(told(&mut w), [(0, Some(1)), (1, Some(0))]);
    w.hand_over(&written, 0);
    assert_eq!(told(&mut w), [(0, Some(0))]);
    w.commit_handed_over(&written);
    assert_eq!(told(&mut w), [(0, None), (1, None)]);
    w.f.store.end_grant(follow);
    // All chunks are here, so all news are told at once.
    let again =
        w.f.store.follow_for_peer(&fingerprint, (&hashes, &[PoolSet(1), PoolSet(6)]), 0, PATIENCE, NOW);
    assert_eq!(told(&mut w), [(0, Some(0)), (0, None), (1, Some(0)), (1, Some(1)), (1, None)]);
    w.f.store.end_grant(again.unwrap());
    w.assert_nothing_is_held();
}

#[test]
fn a_follow_of_a_state_is_refused_if_its_blocks_are_more_than_may_be_leased() {
    let limits = StoreLimits { max_leased_blocks: 4, ..shared_limits(8) };
    let mut f = Fixture::with_spec(limits, &with_states());
    let reader = join(&mut f, 1, &with_states());
    let mut w = World { f, reader };
    let chain = w.f.chain("abcd");
    let (namespace, attempt, patience_ms) = (w.f.namespace, 0, PATIENCE);
    let ask = FollowRequest { namespace, chain: &chain, writer: Some(&ELSEWHERE), attempt, patience_ms };
    let refused = w.f.store.follow(w.reader, ask, NOW);
    assert_eq!(refused, Err(Refused::FollowTooLarge { blocks: 5, most: 4 }));
    w.assert_nothing_is_held();
}

#[test]
fn a_follow_without_room_takes_none() {
    let mut w = World::new(4, &with_states());
    let chain = w.f.chain("abcd");
    let (namespace, attempt, patience_ms) = (w.f.namespace, 0, PATIENCE);
    let ask = FollowRequest { namespace, chain: &chain, writer: Some(&ELSEWHERE), attempt, patience_ms };
    assert!(matches!(w.f.store.follow(w.reader, ask, NOW), Err(Refused::Busy { .. })));
    assert_eq!(w.f.store.usage().bytes.used, 0);
    w.assert_nothing_is_held();
}

#[test]
fn a_chunk_without_its_state_may_go_to_make_room_for_those_before_it() {
    let mut w = World::new(4, &with_states());
    let reserved = w.reserve("ab", &[0, 0]);
    let order = w.f.store.begin_commit(w.f.session, reserved.reservation, &[1], &[0]).unwrap();
    assert_eq!(w.f.store.finish_commit(order.order, Some(sums(&order))), 1);
    w.f.store.abort(w.f.session, reserved.reservation).unwrap();
    let others = w.reserve("xyz", &[0, 0, 0]);
    assert_eq!((others.places.len(), w.f.store.usage().bytes.used), (3, 4 * BLOCK), "b alone may go");
    // The slot of b is taken for a. Nobody is asked for the state that b lacks.
    let FollowStarted { follow, wanted } = w.start("ab", true);
    assert_eq!((wanted.len(), w.progress(follow)), (1, (0, 0, true)));
    w.f.store.release(w.reader, follow).unwrap();
    w.f.store.fetched(wanted[0].fetch, None, None);
    w.assert_nothing_is_held();
}
