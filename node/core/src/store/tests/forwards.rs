//! Tests that copies are evicted first, and that an evicted only copy moves to another node.

use larder_protocol::PoolSet;
use larder_protocol::peer::Room;
use larder_protocol::table::{Holder, NodeNumber};

use super::super::{
    Came, DiskStoreLimits, Granted, PeerStoreLimits, Source, StoreLimits, Wanted, WritePolicy,
};
use super::*;
use crate::placement::{FORWARD_READS, PlacementRule, Saves, Stake, Worth};
use crate::store::ChangeKind;
use crate::store::ids::Below;

const OTHER: NodeNumber = NodeNumber(2);

fn store(capacity_chunks: u64, passing: u64, placement: PlacementRule) -> Fixture {
    let peers = PeerStoreLimits { passing_bytes: passing * BLOCK, max_granted_chunks: 4, placement };
    let limits = limits(capacity_chunks as u32 + 32, capacity_chunks);
    Fixture::new(StoreLimits { peers: Some(peers), tenant_bytes: vec![u64::MAX], ..limits })
}

fn by_worth(capacity_chunks: u64) -> Fixture {
    store(capacity_chunks, 16, PlacementRule::Worth)
}

impl Fixture {
    fn passes(&mut self, milliseconds: u64) {
        let now = self.store.now + milliseconds;
        self.store.tick(now);
    }

    /// Computes the chunks of a word, and reads them as often as a chunk must be read to be forwarded.
    fn put_and_use(&mut self, word: &str) {
        self.put(word);
        for _ in 0..FORWARD_READS {
            let leased = self.lease(word);
            self.store.release(self.session, leased.lease).unwrap();
        }
    }

    /// Notes that the other node has free room.
    fn other_has_free_room(&mut self) {
        let now = std::time::Duration::from_millis(self.store.now.0);
        self.store.neighbours().heard(OTHER, Room::default(), now);
    }

    /// Brings a chunk from another node and keeps it, as a copy or as the only copy.
    fn comes(&mut self, word: &str, is_copy: bool) {
        let chain = self.chain(word);
        let mut elsewhere = vec![None; word.len()];
        *elsewhere.last_mut().unwrap() = PEER;
        let gathered = self.store.gather(self.session, self.namespace, &chain, &elsewhere).unwrap();
        let came = Came { is_copy, ..came() };
        for Wanted { fetch, .. } in &gathered.wanted {
            self.store.fetched(*fetch, Some(came.clone()), Some(ChangeKind::Gained));
        }
        let leased = self.store.finish_gather(gathered.gather).unwrap();
        self.store.release(self.session, leased.lease).unwrap();
    }

    fn is_read_elsewhere(&mut self, word: &str) {
        let hash = *self.chain(word).hashes.last().unwrap();
        let fingerprint = self.store.fingerprint(self.namespace).unwrap();
        let granted = self.store.grant(&fingerprint, &hash, &[BLOCK]);
        let Granted::Held { grant, .. } = granted else { panic!("{granted:?}") };
        self.store.end_grant(grant);
    }

    fn forwards(&mut self) -> Vec<ChunkHash> {
        self.store
            .next_offer()
            .map_or(Vec::new(), |offered| offered.chunks.iter().map(|chunk| chunk.hash).collect())
    }
}

fn came() -> Came {
    Came {
        checksums: vec![Checksums::default()],
        pools: PoolSet::ANY,
        reads: 1,
        is_on_disk_elsewhere: false,
        is_stored: false,
        is_copy: false,
    }
}

#[test]
fn a_copy_goes_before_an_older_only_copy() {
    let mut f = by_worth(3);
    f.put("a");
    f.passes(1_000);
    f.comes("b", true);
    f.put("c");
    f.passes(1_000);
    f.put("d");
    assert_eq!(["a", "b", "c", "d"].map(|word| f.found(word)), [1, 0, 1, 1]);
    f.store.assert_consistent();
}

#[test]
fn a_copy_that_is_read_all_the_time_stays_while_only_copies_go() {
    let mut f = by_worth(3);
    ["a", "b", "c"].iter().for_each(|word| f.put(word));
    f.passes(10_000);
    f.put("d");
    f.comes("e", true);
    f.passes(100);
    let leased = f.lease("e");
    f.store.release(f.session, leased.lease).unwrap();
    f.passes(100);
    f.put("f");
    assert_eq!(f.found("e"), 1, "it was read a hundredth of the time ago for which an only copy stays");
    f.passes(9_000);
    f.put("g");
    assert_eq!((f.found("e"), f.found("d")), (0, 1));
    f.store.assert_consistent();
}

#[test]
fn a_copy_that_outlived_its_original_counts_as_an_only_copy() {
    let mut f = by_worth(2);
    f.put("a");
    f.passes(50);
    f.put("b");
    f.put("c");
    f.comes("d", true);
    let is_copy =
        |f: &Fixture| f.store.index.get(f.store.named(&f.fingerprint(), &name("d")).unwrap()).is_copy();
    assert!(is_copy(&f));
    for word in ["e", "f"] {
        f.passes(1_000);
        let leased = f.lease("d");
        f.store.release(f.session, leased.lease).unwrap();
        f.put(word);
    }
    assert!(!is_copy(&f), "a node keeps what nobody uses for a shorter time");
    f.other_has_free_room();
    f.passes(1);
    ["g", "h"].iter().for_each(|word| f.put(word));
    assert!(f.forwards().contains(&name("d")), "it may be the only one");
}

#[test]
fn a_chunk_behind_a_hole_moves_here_when_it_is_computed_again() {
    let other = Holder { node: OTHER, device: 3 };
    let mut f = by_worth(2);
    let notes_hole = |f: &mut Fixture, word: &str| {
        let (fingerprint, hash) = (f.fingerprint(), *f.chain(word).hashes.last().unwrap());
        f.store.is_behind_hole(&fingerprint, &hash, other);
    };
    notes_hole(&mut f, "ab");
    f.put("ab");
    let gained = |f: &mut Fixture| -> Vec<ChangeKind> {
        f.store
            .take_changes()
            .into_iter()
            .map(|change| change.kind)
            .filter(|&kind| kind != ChangeKind::Lost)
            .collect()
    };
    assert_eq!(gained(&mut f), [ChangeKind::MovedFrom(other), ChangeKind::Gained], "the last comes first");
    f.put("cd");
    f.put("ab");
    assert!(gained(&mut f).iter().all(|&kind| kind == ChangeKind::Gained), "its holder was told once");
    let mut f = store(2, 16, PlacementRule::Reads);
    notes_hole(&mut f, "a");
    f.put("a");
    assert_eq!(
        gained(&mut f),
        [ChangeKind::Gained],
        "by this rule, other nodes would lose a chunk that they read"
    );
}

#[test]
fn an_evicted_only_copy_is_offered_and_stays_until_the_other_node_has_it() {
    let mut f = by_worth(2);
    f.put_and_use("a");
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("b");
    f.put_and_use("c");
    let offered = f.store.next_offer().unwrap();
    assert_eq!((offered.to, offered.chunks.len(), offered.chunks[0].hash), (OTHER, 1, name("a")));
    assert_eq!(f.store.next_offer(), None, "it is offered once");
    assert_eq!((f.store.usage().cached_chunks, f.store.usage().passing_bytes), (2, BLOCK));
    f.store.take_changes();
    f.store.offer_ended(offered.number, &[true]);
    assert_eq!(f.found("a"), 1, "it can be read until it is gone");
    assert_eq!(f.store.give_up(&f.fingerprint(), &[name("a")]), []);
    let lost: Vec<_> = f.store.take_changes().iter().map(|change| (change.chunk.hash, change.kind)).collect();
    assert_eq!((f.found("a"), lost), (0, vec![(name("a"), ChangeKind::Lost)]));
    assert_eq!((f.store.forwards().taken, f.store.forwards().taken_bytes), (1, BLOCK));
    assert_eq!((f.store.usage().passing_bytes, f.store.departing_chunks()), (0, 0));
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_was_read_once_since_it_was_computed_is_not_offered() {
    let mut f = by_worth(1);
    f.put("a");
    let leased = f.lease("a");
    f.store.release(f.session, leased.lease).unwrap();
    f.passes(1_000);
    f.other_has_free_room();
    f.put("b");
    assert_eq!((f.forwards(), f.found("a")), (vec![], 0));
}

#[test]
fn a_chunk_that_the_other_node_refuses_or_does_not_fetch_in_time_is_gone() {
    for wanted in [&[][..], &[false], &[true]] {
        let mut f = by_worth(1);
        f.put_and_use("a");
        f.passes(1_000);
        f.other_has_free_room();
        f.put_and_use("b");
        let offered = f.store.next_offer().unwrap();
        f.store.offer_ended(offered.number, wanted);
        let is_refused = !wanted.contains(&true);
        assert_eq!(f.found("a"), u64::from(!is_refused));
        f.passes(999);
        assert_eq!(f.found("a"), u64::from(!is_refused));
        f.passes(1);
        assert_eq!((f.found("a"), f.store.usage().bytes.used, f.store.departing_chunks()), (0, BLOCK, 0));
        f.store.assert_consistent();
    }
}

#[test]
fn chunks_that_a_node_did_not_take_with_others_are_offered_to_it_again_when_it_has_the_others() {
    let mut f = by_worth(3);
    ["a", "b", "c"].iter().for_each(|word| f.put_and_use(word));
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("xyz");
    let offered = f.store.next_offer().unwrap();
    assert_eq!(offered.chunks.len(), 3);
    f.store.offer_ended(offered.number, &[true, false, false]);
    assert_eq!(f.store.next_offer(), None, "it may lack room until it has the first");
    f.store.give_up(&f.fingerprint(), &[offered.chunks[0].hash]);
    let again = f.store.next_offer().unwrap();
    assert_eq!((again.to, &again.chunks[..]), (OTHER, &offered.chunks[1..]));
    f.store.offer_ended(again.number, &[true, true]);
    f.store.give_up(&f.fingerprint(), &[again.chunks[0].hash, again.chunks[1].hash]);
    assert_eq!((f.store.forwards().taken, f.store.departing_chunks(), f.forwards()), (3, 0, vec![]));
    f.store.assert_consistent();
}

#[test]
fn nothing_is_offered_where_the_neighbours_are_as_pressed_as_this_node_or_are_not_known() {
    let mut f = by_worth(2);
    f.put_and_use("a");
    f.passes(1_000);
    f.put_and_use("b");
    f.put_and_use("c");
    assert_eq!(f.forwards(), [], "nobody is known");
    let Worth(least) = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 1_400);
    let now = std::time::Duration::from_millis(f.store.now.0);
    f.store.neighbours().heard(OTHER, Room { least, served: 0 }, now);
    f.put_and_use("d");
    assert_eq!(f.forwards(), [], "it would stay there a little longer, which does not pay");
    f.other_has_free_room();
    f.put_and_use("e");
    assert_eq!(f.forwards(), [name("c")]);
}

#[test]
fn by_reads_nothing_is_offered_and_no_copy_goes_first() {
    let mut f = store(2, 16, PlacementRule::Reads);
    f.put_and_use("a");
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("b");
    f.put_and_use("c");
    assert_eq!((f.forwards(), f.found("a")), (vec![], 0));
    let wanted = f.store.take_in(&f.fingerprint(), f.chain("x").chunk(0), Worth(u64::MAX));
    assert_eq!(wanted, None);
}

#[test]
fn chunks_that_are_about_to_move_take_no_room_of_fetches_and_make_way_for_whoever_needs_their_slots() {
    let mut f = by_worth(4);
    ["a", "b", "c", "d"].iter().for_each(|word| f.put_and_use(word));
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("efgh");
    assert_eq!(f.store.departing_chunks(), 4);
    let elsewhere = vec![PEER; 14];
    let chain = f.chain("stuvwxyzqrstuv");
    let gathered = f.store.gather(f.session, f.namespace, &chain, &elsewhere).unwrap();
    assert_eq!((gathered.wanted.len(), f.store.departing_chunks()), (14, 4));
    f.store.cancel_gather(f.session, gathered.gather);
    gathered.wanted.iter().for_each(|wanted| _ = f.store.fetched(wanted.fetch, None, None));
    f.passes(1_000);
    assert_eq!((f.store.usage().passing_bytes, f.store.claimed_chunks()), (0, 0));
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_an_engine_reads_while_it_is_about_to_move_stays_until_it_lets_go() {
    let mut f = by_worth(1);
    f.put_and_use("a");
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("b");
    let leased = f.lease("a");
    assert_eq!(leased.chunks, 1);
    let offered = f.store.next_offer().unwrap();
    f.store.offer_ended(offered.number, &[true]);
    assert_eq!(f.store.give_up(&f.fingerprint(), &[name("a")]), []);
    assert_eq!(f.found("a"), 1);
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!((f.found("a"), f.store.usage().bytes.used), (0, BLOCK));
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_is_pinned_or_written_again_while_it_is_about_to_move_stays_and_is_not_offered() {
    let pins = |f: &mut Fixture, word: &str| {
        let chain = f.chain(word);
        assert_eq!(f.store.pin(f.session, f.namespace, &chain, 5_000, f.store.now).unwrap().chunks, 1);
    };
    let mut f = by_worth(3);
    ["a", "b", "c"].iter().for_each(|word| f.put_and_use(word));
    f.passes(1_000);
    f.other_has_free_room();
    f.put_and_use("xyz");
    pins(&mut f, "a");
    let offered = f.store.next_offer().unwrap();
    assert!(offered.chunks.iter().all(|chunk| chunk.hash != name("a")), "it stays");
    pins(&mut f, "c");
    let wants: Vec<bool> = offered.chunks.iter().map(|chunk| chunk.hash == name("b")).collect();
    assert!(wants.contains(&false), "the node took {wants:?}");
    f.store.offer_ended(offered.number, &wants);
    f.store.give_up(&f.fingerprint(), &[name("b")]);
    assert!(!f.forwards().contains(&name("c")), "it was pinned before it could be offered again");
    assert_eq!(["a", "b", "c"].map(|word| f.found(word)), [1, 0, 1]);
    f.store.assert_consistent();
}

#[test]
fn an_offered_chunk_is_taken_where_it_is_worth_its_place_and_is_not_forwarded_again_before_it_is_used() {
    let mut f = by_worth(2);
    let worth = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 1_000);
    let (fingerprint, chunk) = (f.fingerprint(), f.chain("a").chunk(0));
    let wanted = f.store.take_in(&fingerprint, chunk, worth).unwrap();
    assert_eq!((wanted.from, f.store.take_in(&fingerprint, chunk, worth)), (Source::Peer, None));
    assert!(f.store.is_awaited(wanted.fetch), "the node itself waits for it");
    let from = Holder { node: OTHER, device: 0 };
    f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::MovedFrom(from)));
    assert_eq!((f.found("a"), f.store.forwards().taken_in), (1, 1));
    f.passes(1_000);
    f.other_has_free_room();
    f.put("b");
    f.put("c");
    assert_eq!((f.found("a"), f.forwards()), (0, vec![]), "once is enough");
    let unknown = spec().fingerprint("nobody");
    assert_eq!(
        f.store.take_in(&unknown, f.chain("x").chunk(0), worth),
        None,
        "a namespace that nobody uses here"
    );
    assert_eq!(f.store.take_in(&fingerprint, f.chain("b").chunk(0), worth), None, "it is here");
    let little = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 3_000);
    assert_eq!(
        f.store.take_in(&fingerprint, f.chain("x").chunk(0), little),
        None,
        "what goes for it is worth more"
    );
    f.store.assert_consistent();
}

#[test]
fn a_forwarded_chunk_keeps_its_age() {
    let mut f = by_worth(1);
    f.passes(5_000);
    let worth = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 1_000);
    let wanted = f.store.take_in(&f.fingerprint(), f.chain("a").chunk(0), worth).unwrap();
    f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::Gained));
    f.passes(1_000);
    f.put("b");
    assert_eq!((f.found("a"), f.store.keeps_ms()), (0, 2_000));
    f.store.assert_consistent();
}

#[test]
fn a_chunk_that_came_by_a_forward_and_was_used_is_forwarded_again() {
    let mut f = by_worth(1);
    let wanted = f.store.take_in(&f.fingerprint(), f.chain("a").chunk(0), Worth(u64::MAX / 8)).unwrap();
    f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::Gained));
    let leased = f.lease("a");
    f.store.release(f.session, leased.lease).unwrap();
    f.passes(1_000);
    f.other_has_free_room();
    f.put("b");
    assert_eq!(f.forwards(), [name("a")]);
}

#[test]
fn a_chunk_that_another_node_has_read_stays_for_twice_as_long_as_one_that_only_this_node_uses() {
    let mut f = by_worth(2);
    f.put("a");
    f.is_read_elsewhere("a");
    f.passes(1_000);
    f.put("b");
    f.passes(1_000);
    f.put("c");
    assert_eq!(["a", "b", "c"].map(|word| f.found(word)), [1, 0, 1], "b was idle for half as long as a");
    f.passes(500);
    f.put("d");
    assert_eq!(["a", "c", "d"].map(|word| f.found(word)), [0, 1, 1], "c was idle for a fifth of that time");
    f.store.assert_consistent();
}

#[test]
fn the_first_of_several_chunks_goes_if_other_nodes_have_read_them_all() {
    let mut f = by_worth(2);
    for word in ["a", "b", "c"] {
        f.put(word);
        f.is_read_elsewhere(word);
        f.passes(1_000);
    }
    assert_eq!(["a", "b", "c"].map(|word| f.found(word)), [0, 1, 1]);
}

#[test]
fn by_reads_it_does_not_matter_who_has_read_a_chunk() {
    let mut f = store(2, 16, PlacementRule::Reads);
    f.put("a");
    f.is_read_elsewhere("a");
    f.passes(1_000);
    f.put("b");
    f.passes(1_000);
    f.put("c");
    assert_eq!(["a", "b", "c"].map(|word| f.found(word)), [0, 1, 1]);
}

#[test]
fn copies_that_go_without_a_search_for_copies_are_forgotten() {
    let mut f = Fixture::new(limits(16, 16));
    let fingerprint = f.store.fingerprint(f.namespace).unwrap();
    for number in 0..4_000 {
        let word = format!("{number:04}");
        f.put(&word);
        let id = f.store.named(&fingerprint, &name(&word)).unwrap();
        f.store.is_copy(id);
    }
    let remembered = f.store.tenants.of(TenantId(0)).copies.remembered();
    assert!(remembered <= 1_025, "{remembered}");
}

#[test]
fn a_copy_that_was_used_goes_after_one_that_was_not() {
    let mut f = by_worth(3);
    f.comes("a", true);
    f.passes(10);
    f.comes("b", true);
    f.put("c");
    f.passes(1_000);
    let leased = f.lease("a");
    f.store.release(f.session, leased.lease).unwrap();
    f.put("d");
    assert_eq!(["a", "b", "c", "d"].map(|word| f.found(word)), [1, 0, 1, 1]);
}

#[test]
fn how_long_an_evicted_copy_stayed_says_nothing_of_how_long_only_copies_stay() {
    let mut f = by_worth(1);
    f.comes("a", true);
    f.passes(1_000);
    f.put("b");
    assert_eq!((f.found("a"), f.store.keeps_ms()), (0, u64::MAX));
    f.passes(1_000);
    f.put("c");
    assert_eq!((f.found("b"), f.store.keeps_ms()), (0, 1_000));
}

#[test]
fn a_chunk_that_waited_for_a_disk_that_closed_is_an_only_copy() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteThrough,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let mut f = Fixture::new(StoreLimits { disk: Some(disk), ..by_worth(1).store.limits.clone() });
    f.put("a");
    f.store.disk_closed();
    f.put_and_use("a");
    f.passes(1_000);
    f.other_has_free_room();
    f.put("b");
    assert_eq!(f.forwards(), [name("a")]);
}

#[test]
fn a_copy_is_not_written_to_disk_since_its_holder_decides_that() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteThrough,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let mut f = Fixture::new(StoreLimits { disk: Some(disk), ..by_worth(4).store.limits.clone() });
    f.comes("a", true);
    assert!(f.store.next_write(Below::Disk).is_none());
    f.comes("b", false);
    assert!(f.store.next_write(Below::Disk).is_some());
}

#[test]
fn an_offered_chunk_that_a_session_asked_for_on_its_way_is_as_new_as_any_that_is_read() {
    let mut f = by_worth(2);
    let worth = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 1_000);
    f.passes(5_000);
    let wanted = f.store.take_in(&f.fingerprint(), f.chain("a").chunk(0), worth).unwrap();
    let chain = f.chain("a");
    let gathered = f.store.gather(f.session, f.namespace, &chain, &[PEER]).unwrap();
    assert!(gathered.wanted.is_empty(), "it is on its way already");
    f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::Gained));
    let leased = f.store.finish_gather(gathered.gather).unwrap();
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!((leased.chunks, f.store.forwards().taken_in), (1, 0));
    let stays = f.store.stays(&f.fingerprint(), &chain.hashes);
    assert_eq!(stays[0].idle_ms, 0);
}
