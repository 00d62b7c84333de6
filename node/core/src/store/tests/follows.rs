//! Tests of chunks that are read layer by layer while they are being written.

use larder_protocol::handoff::HandOver;
use larder_protocol::limits::{MAX_FRAME_DESCRIPTORS, MAX_SESSION_FOLLOWS};
use larder_protocol::purge::PurgeScope;
use larder_protocol::session::Scarce;

use super::*;
use crate::store::ChangeKind;
use crate::store::{
    Came, DiskStoreLimits, FollowNews, FollowProgress, FollowRequest, FollowStarted, Granted, News,
    PeerStoreLimits, Ranges, Refused, Reserved, Source, WritePolicy,
};

mod elsewhere;
mod peers;

/// Layers of a block of [`BLOCK`] bytes.
pub(super) const LAYERS: u32 = 4;

/// The time without news after which a follow gives up, in milliseconds.
const PATIENCE: u64 = 500;

pub(super) fn layered() -> NamespaceSpec {
    let pool = PoolSpec {
        name: "kv".into(),
        layers: LAYERS,
        layer_bytes: BLOCK / u64::from(LAYERS),
        hit: HitPolicy::All,
    };
    NamespaceSpec { pools: vec![pool], ..spec() }
}

pub(super) fn shared_limits(slots: u32) -> StoreLimits {
    StoreLimits {
        peers: Some(PeerStoreLimits {
            passing_bytes: u64::MAX,
            max_granted_chunks: 8,
            placement: crate::placement::PlacementRule::Reads,
        }),
        ..limits(slots, 100)
    }
}

/// A store with a writer, and with a reader of another process.
struct World {
    f: Fixture,
    reader: SessionId,
}

impl World {
    fn new() -> Self {
        Self::with(shared_limits(8))
    }

    fn with(limits: StoreLimits) -> Self {
        let mut f = Fixture::with_spec(limits, &layered());
        let reader = join(&mut f, 1, &layered());
        Self { f, reader }
    }

    fn reserve(&mut self, word: &str) -> Reserved {
        self.reserve_attempt(self.f.session, word, 0).unwrap()
    }

    fn reserve_attempt(&mut self, session: SessionId, word: &str, attempt: u64) -> Result<Reserved, Refused> {
        let chain = self.f.chain(word);
        self.f.store.reserve_attempt(session, self.f.namespace, &chain, &[], 0, attempt, NOW)
    }

    fn begin(&mut self, of: &Reserved, from_layer: u32, to_layer: u32) -> Result<CommitOrder, Refused> {
        let ask = layers_of(of, from_layer, to_layer);
        self.f.store.begin_layers(self.f.session, &ask)
    }

    fn hand_over(&mut self, of: &Reserved, from_layer: u32, to_layer: u32) {
        let order = self.begin(of, from_layer, to_layer).unwrap();
        assert!(self.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    }

    fn commit(&mut self, of: &Reserved) {
        let order = self.f.store.begin_commit(self.f.session, of.reservation, &of.chunks, &[]).unwrap();
        assert!(order.moves.iter().all(|block| block.is_in_place));
        assert_eq!(
            self.f.store.finish_commit(order.order, Some(layer_sums(&order))) as usize,
            of.chunks.len()
        );
    }

    fn follow(&mut self, word: &str) -> u64 {
        self.start(self.reader, word, false, 0).unwrap().follow
    }

    fn start(
        &mut self,
        session: SessionId,
        word: &str,
        from_peer: bool,
        attempt: u64,
    ) -> Result<FollowStarted, Refused> {
        let chain = self.f.chain(word);
        let ask = FollowRequest {
            namespace: self.f.namespace,
            chain: &chain,
            writer: from_peer.then_some(&ELSEWHERE),
            attempt,
            patience_ms: PATIENCE,
        };
        self.f.store.follow(session, ask, NOW)
    }

    /// The number of chunks, the number of layers in place in each, and whether all is committed.
    fn progress(&self, follow: u64) -> (u32, u32, bool) {
        let FollowProgress { chunks, layers, is_whole } = self.f.store.followed(self.reader, follow).unwrap();
        (chunks, layers, is_whole)
    }

    fn assert_nothing_is_held(&mut self) {
        self.f.store.close_session(self.reader);
        self.f.store.close_session(self.f.session);
        self.f.store.process_gone(ProcessId(0));
        self.f.store.process_gone(ProcessId(1));
        assert_nothing_is_held(&self.f.store);
    }
}

pub(super) fn join(f: &mut Fixture, process: u32, spec: &NamespaceSpec) -> SessionId {
    let session = f.store.open_session(TenantId(0), ProcessId(process), 1 << 20);
    let block_bytes: Vec<u64> = spec.pools.iter().map(PoolSpec::block_bytes).collect();
    f.store.register(session, "a", spec, &[0], &block_bytes).unwrap();
    session
}

pub(super) fn layers_of(of: &Reserved, from_layer: u32, to_layer: u32) -> HandOver {
    let sources = vec![0; of.chunks.len()];
    HandOver {
        reservation: of.reservation,
        chunks: of.chunks.clone(),
        pool: 0,
        from_layer,
        to_layer,
        sources,
    }
}

/// Makes a checksum for each piece that says where the piece stands.
pub(super) fn layer_sums(order: &CommitOrder) -> Vec<Checksums> {
    let sum =
        |block: &crate::store::BlockMove| Checksums { whole: 0, ranges: Ranges::One(block.place.offset + 1) };
    order.moves.iter().map(sum).collect()
}

/// Asserts that every used slot belongs to a cached block, and that nothing is claimed or awaited.
pub(super) fn assert_nothing_is_held(store: &Store) {
    store.assert_consistent();
    let usage = store.usage();
    assert_eq!(usage.bytes.used, usage.cached_bytes, "slots that no cached block has are free");
    assert_eq!(usage.bytes.quarantined, 0);
    assert_eq!((usage.follows, usage.leases, usage.grants, usage.fetches), (0, 0, 0, 0));
    store.assert_follows_are_forgotten();
    for (_, _, chunk) in store.index.iter_from(0) {
        assert_eq!((chunk.claims, chunk.orphaned_leases), (0, 0), "{chunk:?}");
    }
}

#[test]
fn a_follow_of_more_blocks_than_may_be_leased_follows_as_many_as_fit() {
    let mut w = World::with(StoreLimits { max_leased_blocks: 2, ..shared_limits(8) });
    let reserved = w.reserve("abc");
    let FollowStarted { follow, wanted } = w.start(w.reader, "abc", true, 0).unwrap();
    assert_eq!((wanted.len(), w.progress(follow)), (0, (2, 0, false)));
    w.hand_over(&reserved, 0, LAYERS);
    w.commit(&reserved);
    assert_eq!(w.progress(follow), (2, LAYERS, true));
    let busy = w.start(w.reader, "a", false, 0);
    assert!(matches!(busy, Err(Refused::Busy { .. })), "the session holds as much as it may: {busy:?}");
    w.f.store.release(w.reader, follow).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn a_session_has_a_bounded_number_of_follows_even_of_nothing() {
    let mut w = World::new();
    let follows: Vec<u64> = (0..MAX_SESSION_FOLLOWS).map(|_| w.follow("")).collect();
    let busy = w.start(w.reader, "", false, 0);
    assert!(matches!(busy, Err(Refused::Busy { what: Scarce::Claims, .. })), "{busy:?}");
    assert!(w.start(w.f.session, "", false, 0).is_ok(), "another session has its own");
    w.f.store.release(w.reader, follows[0]).unwrap();
    w.follow("");
    w.assert_nothing_is_held();
}

#[test]
fn a_reader_sees_each_layer_when_it_is_handed_over_and_others_only_the_commit() {
    let mut w = World::new();
    let written = w.reserve("ab");
    let follow = w.follow("ab");
    assert_eq!(w.progress(follow), (2, 0, false));
    for layer in 0..LAYERS {
        w.hand_over(&written, layer, layer + 1);
        assert_eq!(w.progress(follow), (2, layer + 1, false));
        assert_eq!(w.f.found("ab"), 0, "nobody else sees it");
        assert_eq!(w.f.store.take_progressed(), [follow]);
    }
    w.commit(&written);
    assert_eq!(w.progress(follow), (2, LAYERS, true));
    assert_eq!(w.f.found("ab"), 2);
    w.assert_nothing_is_held();
}

#[test]
fn layers_that_changed_after_they_were_handed_over_are_not_committed() {
    for pieces in [&[(0, 1), (1, LAYERS)][..], &[(0, LAYERS)]] {
        let mut w = World::new();
        let reserved = w.reserve("ab");
        let follow = w.follow("ab");
        pieces.iter().for_each(|&(from, to)| w.hand_over(&reserved, from, to));
        let order = w.f.store.begin_commit(w.f.session, reserved.reservation, &reserved.chunks, &[]).unwrap();
        let mut sums = layer_sums(&order);
        sums.last_mut().unwrap().ranges = Ranges::One(0);
        assert_eq!(w.f.store.finish_commit(order.order, Some(sums)), 0);
        assert_eq!(w.f.store.usage().damaged, 1);
        assert_eq!(w.f.found("ab"), 0, "nobody finds it");
        assert_eq!(w.progress(follow).0, 0, "its follower does not take it for whole");
        w.reserve("ab");
        w.assert_nothing_is_held();
    }
}

#[test]
fn layers_count_from_the_first_on_whatever_order_they_come_in() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    for (from, to, in_place) in [(2, 3, 0), (0, 1, 1), (3, 4, 1), (1, 2, 4)] {
        w.hand_over(&written, from, to);
        assert_eq!(w.progress(follow), (1, in_place, false));
    }
    w.commit(&written);
    w.assert_nothing_is_held();
}

#[test]
fn a_follower_is_told_the_places_of_the_writers_own_slots_once() {
    let mut w = World::new();
    let follow = w.follow("a");
    assert_eq!(w.f.store.show_followed(w.reader, follow).unwrap(), None, "nobody writes it yet");
    let written = w.reserve("a");
    let shown = w.f.store.show_followed(w.reader, follow).unwrap().unwrap();
    assert_eq!((shown.lease, shown.chunks, shown.places), (follow, 1, written.places.clone()));
    assert_eq!(w.f.store.show_followed(w.reader, follow).unwrap(), None, "told once");
    w.f.store.release(w.reader, follow).unwrap();
    w.f.store.abort(w.f.session, written.reservation).unwrap();
    w.assert_nothing_is_held();
}

#[test]
fn layers_that_are_in_place_or_that_there_are_none_of_are_refused() {
    let mut w = World::new();
    let written = w.reserve("a");
    w.hand_over(&written, 1, 3);
    for (from, to) in [(0, 2), (2, 3), (1, 3), (3, LAYERS + 1), (2, 2), (3, 2)] {
        assert!(
            matches!(w.begin(&written, from, to), Err(Refused::Layers { position: 0, .. })),
            "{from}..{to}"
        );
    }
    let wrong_pool = HandOver { pool: 1, ..layers_of(&written, 0, 1) };
    assert!(matches!(w.f.store.begin_layers(w.f.session, &wrong_pool), Err(Refused::Layers { .. })));
    let far = HandOver { sources: vec![u64::MAX], ..layers_of(&written, 0, 1) };
    assert!(matches!(w.f.store.begin_layers(w.f.session, &far), Err(Refused::OutsideWindow { .. })));
    w.hand_over(&written, 0, 1);
    w.assert_nothing_is_held();
}

#[test]
fn a_chunk_that_was_handed_over_in_part_cannot_be_committed() {
    let mut w = World::new();
    let written = w.reserve("a");
    w.hand_over(&written, 0, 3);
    let early = w.f.store.begin_commit(w.f.session, written.reservation, &[0], &[]);
    assert_eq!(early, Err(Refused::LayersMissing { reservation: written.reservation, position: 0 }));
    w.hand_over(&written, 3, 4);
    w.commit(&written);
    assert_eq!(w.f.found("a"), 1);
    w.assert_nothing_is_held();
}

#[test]
fn while_layers_are_copied_a_chunk_takes_neither_others_nor_a_commit() {
    let mut w = World::new();
    let written = w.reserve("a");
    let order = w.begin(&written, 0, 1).unwrap();
    assert!(matches!(w.begin(&written, 1, 2), Err(Refused::NotOpen { .. })));
    let commit = w.f.store.begin_commit(w.f.session, written.reservation, &[0], &[0]);
    assert!(matches!(commit, Err(Refused::NotOpen { .. })));
    assert!(w.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    w.hand_over(&written, 1, 2);
    w.assert_nothing_is_held();
}

#[test]
fn a_copy_that_fails_loses_the_chunk_for_its_followers() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    let order = w.begin(&written, 0, 1).unwrap();
    assert!(!w.f.store.finish_layers(order.order, None));
    assert_eq!(w.progress(follow), (0, 0, true));
    w.assert_nothing_is_held();
}

#[test]
fn a_writer_that_aborts_at_any_layer_ends_its_followers_whose_slots_wait_for_them() {
    for layers in 0..=LAYERS {
        let mut w = World::new();
        let written = w.reserve("ab");
        let follow = w.follow("ab");
        (0..layers).for_each(|layer| w.hand_over(&written, layer, layer + 1));
        w.f.store.show_followed(w.reader, follow).unwrap();
        w.f.store.abort(w.f.session, written.reservation).unwrap();
        assert_eq!(w.progress(follow), (0, 0, true), "after {layers} layers");
        assert_eq!(w.f.store.usage().bytes.quarantined, 2 * BLOCK, "the follower may still read them");
        assert_eq!(w.f.store.usage().follows_lost, 2);
        let again = w.reserve("ab");
        assert!(again.places.iter().all(|place| !written.places.contains(place)), "other slots");
        w.f.store.release(w.reader, follow).unwrap();
        assert_eq!(w.f.store.usage().bytes.quarantined, 0);
        w.f.store.abort(w.f.session, again.reservation).unwrap();
        w.assert_nothing_is_held();
    }
}

#[test]
fn a_writer_whose_session_or_reservation_ends_ends_its_followers() {
    for by_deadline in [false, true] {
        let mut w = World::new();
        let written = w.reserve("a");
        let follow = w.follow("a");
        w.hand_over(&written, 0, 2);
        w.f.store.take_progressed();
        if by_deadline {
            w.f.store.tick(written.deadline)
        } else {
            w.f.store.close_session(w.f.session)
        }
        assert_eq!(w.progress(follow), (0, 0, true));
        assert_eq!(w.f.store.take_progressed(), [follow]);
        w.assert_nothing_is_held();
    }
}

#[test]
fn a_copy_under_way_when_the_writer_ends_keeps_the_slot_until_it_is_done() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    let order = w.begin(&written, 0, 1).unwrap();
    w.f.store.close_session(w.f.session);
    assert_eq!(w.f.store.usage().bytes.used, BLOCK);
    assert!(!w.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    assert_eq!(w.progress(follow), (0, 0, true));
    w.assert_nothing_is_held();
}

#[test]
fn slots_that_a_vanished_reader_was_shown_wait_for_its_process() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    w.hand_over(&written, 0, 1);
    w.f.store.show_followed(w.reader, follow).unwrap();
    w.f.store.close_session(w.reader);
    w.f.store.abort(w.f.session, written.reservation).unwrap();
    assert_eq!(w.f.store.usage().bytes.quarantined, BLOCK);
    w.f.store.process_gone(ProcessId(1));
    assert_eq!(w.f.store.usage().bytes.quarantined, 0);
    w.assert_nothing_is_held();
}

#[test]
fn slots_that_a_vanished_reader_was_shown_several_times_wait_for_its_process_and_for_others() {
    let mut w = World::new();
    let other = join(&mut w.f, 2, &layered());
    let written = w.reserve("a");
    let shown = [w.reader, w.reader, other].map(|session| {
        let follow = w.start(session, "a", false, 0).unwrap().follow;
        w.f.store.show_followed(session, follow).unwrap();
        follow
    });
    w.f.store.abort(w.f.session, written.reservation).unwrap();
    w.f.store.close_session(w.reader);
    w.f.store.process_gone(ProcessId(1));
    assert_eq!(w.f.store.usage().bytes.quarantined, BLOCK);
    w.f.store.release(other, shown[2]).unwrap();
    assert_eq!(w.f.store.usage().bytes.quarantined, 0);
    w.f.store.close_session(other);
    w.f.store.close_session(w.f.session);
    assert_nothing_is_held(&w.f.store);
}

#[test]
fn a_chunk_that_a_vanished_reader_was_shown_is_quarantined_when_it_is_committed() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    w.hand_over(&written, 0, LAYERS);
    w.f.store.show_followed(w.reader, follow).unwrap();
    w.f.store.close_session(w.reader);
    w.commit(&written);
    assert_eq!(w.f.store.usage().bytes.quarantined, BLOCK);
    w.f.store.process_gone(ProcessId(1));
    assert_eq!(w.f.store.usage().bytes.quarantined, 0);
    w.assert_nothing_is_held();
}

#[test]
fn a_follower_that_goes_away_leaves_the_writer_alone() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("a");
    w.hand_over(&written, 0, 1);
    w.f.store.release(w.reader, follow).unwrap();
    w.hand_over(&written, 1, LAYERS);
    w.commit(&written);
    assert_eq!(w.f.found("a"), 1);
    w.assert_nothing_is_held();
}

#[test]
fn a_silent_writer_loses_its_followers_and_one_that_goes_on_does_not() {
    let mut w = World::new();
    let written = w.reserve("a");
    let follow = w.follow("ab");
    w.f.store.tick(Millis(PATIENCE - 1));
    w.hand_over(&written, 0, 1);
    w.f.store.tick(Millis(PATIENCE));
    assert_eq!(w.progress(follow), (2, 0, false), "the second chunk is not being written yet");
    w.f.store.tick(Millis(2 * PATIENCE - 1));
    assert_eq!(w.progress(follow).0, 2);
    w.f.store.tick(Millis(2 * PATIENCE));
    assert_eq!(w.progress(follow), (0, 0, true));
    w.assert_nothing_is_held();
}

#[test]
fn a_later_attempt_ends_the_earlier_one_whose_late_layers_are_refused() {
    let mut w = World::new();
    let first = w.reserve_attempt(w.f.session, "ab", 1).unwrap();
    let second_writer = join(&mut w.f, 2, &layered());
    let follow = w.start(w.reader, "ab", false, 2).unwrap().follow;
    w.hand_over(&first, 0, 1);
    assert_eq!(w.progress(follow), (2, 0, false), "the reader wants the second attempt");
    let second = w.reserve_attempt(second_writer, "ab", 2).unwrap();
    assert_eq!(second.chunks, [0, 1]);
    let late = w.begin(&first, 1, 2);
    assert!(matches!(late, Err(Refused::Unknown { what: "reservation", .. })), "{late:?}");
    let late = w.f.store.begin_commit(w.f.session, first.reservation, &[0], &[0]);
    assert!(matches!(late, Err(Refused::Unknown { what: "reservation", .. })));
    let order = w.f.store.begin_layers(second_writer, &layers_of(&second, 0, 1)).unwrap();
    assert!(w.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    assert_eq!(w.progress(follow), (2, 1, false));
    let stale = w.reserve_attempt(w.f.session, "ab", 1).unwrap();
    assert!(stale.chunks.is_empty(), "an earlier attempt takes nothing from a later one");
    w.f.store.close_session(second_writer);
    w.assert_nothing_is_held();
}

#[test]
fn a_later_attempt_waits_for_a_copy_of_the_earlier_one() {
    let mut w = World::new();
    let first = w.reserve_attempt(w.f.session, "a", 1).unwrap();
    let order = w.begin(&first, 0, 1).unwrap();
    let again = w.reserve_attempt(w.reader, "a", 2);
    assert!(matches!(again, Err(Refused::Busy { .. })));
    assert!(!w.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    assert_eq!(w.reserve_attempt(w.reader, "a", 2).unwrap().chunks, [0]);
    w.assert_nothing_is_held();
}

pub(super) fn came() -> Came {
    Came {
        checksums: vec![Checksums::default()],
        pools: larder_protocol::PoolSet::first(1),
        reads: 1,
        is_on_disk_elsewhere: false,
        is_stored: false,
        is_copy: false,
    }
}

#[test]
fn a_follow_that_waits_for_a_later_attempt_waits_on_while_an_earlier_one_writes() {
    let mut w = World::new();
    let follow = w.start(w.reader, "ab", false, 2).unwrap().follow;
    let first = w.reserve_attempt(w.f.session, "ab", 1).unwrap();
    w.hand_over(&first, 0, 1);
    assert_eq!(w.progress(follow), (2, 0, false));
    let second_writer = join(&mut w.f, 2, &layered());
    let second = w.reserve_attempt(second_writer, "ab", 2).unwrap();
    let order = w.f.store.begin_layers(second_writer, &layers_of(&second, 0, 1)).unwrap();
    assert!(w.f.store.finish_layers(order.order, Some(layer_sums(&order))));
    assert_eq!(w.progress(follow), (2, 1, false));
    w.f.store.close_session(second_writer);
    w.assert_nothing_is_held();
}

#[test]
fn an_attempt_ends_no_writing_that_is_no_attempt() {
    let mut w = World::new();
    let first = w.reserve("a");
    assert!(w.reserve_attempt(w.reader, "a", 1).unwrap().chunks.is_empty());
    w.hand_over(&first, 0, LAYERS);
    w.commit(&first);
    w.assert_nothing_is_held();
}

#[test]
fn a_follow_that_ended_counts_no_more_for_its_session() {
    let mut w = World::with(StoreLimits { max_leased_blocks: 2, ..shared_limits(8) });
    for _ in 0..3 {
        let follow = w.follow("ab");
        assert!(w.start(w.reader, "x", false, 0).is_err(), "the session may lease no more");
        w.f.store.release(w.reader, follow).unwrap();
    }
    w.assert_nothing_is_held();
}

#[test]
fn a_follow_loses_the_chunks_whose_extents_do_not_fit_into_an_answer() {
    let extents = 2 * MAX_FRAME_DESCRIPTORS as u32;
    let mut w = World::with(StoreLimits {
        extent_bytes: BLOCK,
        extents,
        capacity_chunks: Some(1_000),
        ..shared_limits(0)
    });
    let hashes = (0..140_u8).map(|n| ChunkHash([n; 32])).collect();
    let chain = Chain::from_root(w.f.root, hashes);
    let (session, namespace) = (w.f.session, w.f.namespace);
    w.f.store.reserve(session, namespace, &chain, 0, NOW).unwrap();
    let ask = FollowRequest { namespace, chain: &chain, writer: None, attempt: 0, patience_ms: PATIENCE };
    let follow = w.f.store.follow(w.reader, ask, NOW).unwrap().follow;
    assert_eq!(w.progress(follow), (140, 0, false));
    let shown = w.f.store.show_followed(w.reader, follow).unwrap().expect("all have slots");
    assert_eq!((shown.chunks as usize, shown.places.len()), (MAX_FRAME_DESCRIPTORS, MAX_FRAME_DESCRIPTORS));
    assert_eq!(w.progress(follow), (shown.chunks, 0, false));
}
