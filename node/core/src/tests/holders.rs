//! Tests of which holders are asked for a chunk, in which order, and of the effects of their answers.

use super::*;
use crate::directory::cache::HOLDERS_MS;
use crate::placement::Placement;
use crate::store::{Change, ChangeKind};

#[test]
fn a_lease_is_answered_when_what_the_directory_knows_of_has_come() {
    let mut w = World::new(PEERS);
    w.put("a");
    let request = w.lease("abc");
    assert_eq!(w.directory_says(&[&[2], &[2]]), 2, "what is here is not asked for");
    let asked = w.fetch();
    assert_eq!((asked.holder, asked.chunks.len()), (node(2), 2), "one order asks for both");
    assert!(w.is_idle());
    w.ended(asked.order, vec![here(1), here(1)]);
    let leased = w.leased(request);
    assert_eq!((leased.chunks, leased.places.len()), (3, 3));
    w.core.store.release(w.session, leased.lease).unwrap();
    assert!(w.is_at_rest());
}

#[test]
fn consecutive_chunks_are_asked_of_one_holder_if_it_has_them() {
    let mut w = World::new(PEERS);
    w.lease("abc");
    w.directory_says(&[&[2, 3], &[3, 2], &[4]]);
    let (first, second) = (w.fetch(), w.fetch());
    assert_eq!((first.holder, first.chunks.len(), first.has_others), (node(2), 2, true));
    assert_eq!((second.holder, second.chunks.len(), second.has_others), (node(4), 1, false));
    assert!(w.is_idle());
}

#[test]
fn a_stale_row_is_told_of_and_the_next_holder_is_asked() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::NotHeld]);
    let Effect::Stale { holder, chunks, .. } = w.next() else { panic!("the row") };
    assert_eq!((holder, chunks), (node(2), vec![w.chain("a").chunk(0)]));
    let asked = w.fetch();
    assert_eq!(asked.holder, node(3));
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn a_lease_after_its_lookup_asks_the_holder_at_once() {
    let mut w = World::new(PEERS);
    w.lookup("ab");
    w.directory_says(&[&[2], &[2]]);
    let Effect::Found { found, .. } = w.next() else { panic!("the lookup") };
    assert_eq!(found.tokens, 32);
    let request = w.lease("abc");
    assert_eq!(w.directory_says(&[&[3]]), 1, "the lookup found the others");
    let (first, second) = (w.fetch(), w.fetch());
    assert_eq!((first.holder, first.chunks.len()), (node(2), 2));
    assert_eq!((second.holder, second.chunks.len()), (node(3), 1));
    w.ended(first.order, vec![here(1), here(1)]);
    w.ended(second.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 3);
}

#[test]
fn what_a_lookup_found_is_forgotten_after_a_moment_and_when_its_holder_has_it_no_more() {
    let mut w = World::new(PEERS);
    w.lookup("a");
    w.directory_says(&[&[2]]);
    w.next();
    let request = w.lease("a");
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::NotHeld]);
    assert!(matches!(w.next(), Effect::Stale { .. }));
    assert_eq!(w.directory_says(&[&[]]), 1, "it may have moved");
    assert_eq!(w.leased(request).chunks, 0);
    w.lease("a");
    assert_eq!(w.directory_says(&[&[2]]), 1, "the holder did not have it");
    w.fetch();

    w.lookup("b");
    w.directory_says(&[&[2]]);
    w.next();
    w.pass(Duration::from_millis(HOLDERS_MS));
    w.lease("b");
    assert_eq!(w.directory_says(&[&[2]]), 1, "it may be elsewhere by now");
}

#[test]
fn a_lookup_asks_the_directory_whatever_the_one_before_found() {
    let mut w = World::new(PEERS);
    for holders in [&[2], &[3]] {
        w.lookup("a");
        assert_eq!(w.directory_says(&[holders]), 1);
        w.next();
    }
}

#[test]
fn the_directory_is_asked_a_second_time_and_no_more() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![FAILED]);
    assert_eq!(w.directory_says(&[&[3]]), 1, "it may have moved to its reader");
    let asked = w.fetch();
    assert_eq!(asked.holder, node(3));
    w.ended(asked.order, vec![FAILED]);
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_chunk_that_nobody_wants_any_more_is_not_ordered_by_a_late_answer_of_the_directory() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![FAILED]);
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    w.pass(DEADLINE);
    assert_eq!(w.leased(request).chunks, 0);
    w.tell(Event::HoldersFound { question, holders: vec![of(&[3])] });
    assert!(w.is_at_rest());
}

#[test]
fn a_busy_peer_is_passed_for_another_and_a_busy_sibling_is_asked_again_when_it_said() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), ..PEERS });
    let request = w.lease("a");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(1)] });
    let asked = w.fetch();
    assert_eq!(asked.holder, sibling(1), "the directory is not asked for what a sibling has");
    w.ended(asked.order, vec![Arrival::Busy { retry_after_ms: 5 }]);
    assert!(w.is_idle());
    assert_eq!(w.core.next_deadline(), Some(Duration::from_millis(5)));
    w.pass(Duration::from_millis(4));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    let asked = w.fetch();
    assert_eq!((asked.holder, w.core.next_deadline()), (sibling(1), None));
    w.ended(asked.order, vec![here(1)]);
    let Effect::TellMoved { device: 1, .. } = w.next() else { panic!("it moved") };
    assert_eq!(w.leased(request).chunks, 1);

    w.lease("b");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: Vec::new() });
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::Busy { retry_after_ms: 5 }]);
    assert_eq!(w.fetch().holder, node(3));
}

#[test]
fn the_pauses_before_a_busy_sibling_is_asked_again_grow_up_to_a_bound() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), ..PEERS });
    w.lease("a");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(1)] });
    for pause_ms in [5, 10, 20, 40, 80, 100, 100] {
        let asked = w.fetch();
        w.ended(asked.order, vec![Arrival::Busy { retry_after_ms: 5 }]);
        w.pass(Duration::from_millis(pause_ms - 1));
        assert!(w.is_idle(), "before {pause_ms} ms");
        w.pass(Duration::from_millis(1));
    }
    assert_eq!(w.fetch().holder, sibling(1));
}

#[test]
fn a_sibling_that_is_busy_while_others_have_the_chunk_is_asked_after_them() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), ..PEERS });
    w.lease("a");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![smallvec![sibling(1), sibling(2)]] });
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::Busy { retry_after_ms: 5 }]);
    w.pass(Duration::from_millis(5));
    assert_eq!((asked.holder, w.fetch().holder), (sibling(1), sibling(2)));
}

#[test]
fn what_a_peer_had_sent_before_it_was_lost_counts_and_the_rest_comes_from_another() {
    let mut w = World::new(PEERS);
    let request = w.lease("abc");
    w.directory_says(&[&[2, 3], &[2, 3], &[2]]);
    let asked = w.fetch();
    assert_eq!(asked.chunks.len(), 3);
    w.ended(asked.order, vec![here(1)]);
    let again = w.fetch();
    assert_eq!((again.holder, &again.chunks[..]), (node(3), &asked.chunks[1..2]));
    assert_eq!(w.directory_says(&[&[]]), 1, "nobody else is known to have the third");
    assert!(w.is_idle());
    w.ended(again.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 2);
}

#[test]
fn an_order_that_was_not_taken_is_not_given_to_another() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.tell(Event::OrderRefused(asked.order));
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_sibling_whose_chunk_is_damaged_is_told() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), peers: None, ..PEERS });
    let request = w.lease("a");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(7)] });
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::Damaged]);
    let Effect::TellDamaged { device: 7, hashes, .. } = w.next() else { panic!("it is told") };
    assert_eq!(hashes, [name("a")]);
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

#[test]
fn the_only_copy_moves_here_and_of_two_copies_none() {
    let mut w = World::new(PEERS);
    w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    let moved = w.core.store.take_changes();
    assert_eq!(
        moved.iter().map(|&Change { kind, .. }| kind).collect::<Vec<_>>(),
        [ChangeKind::MovedFrom(node(2))]
    );
    assert!(matches!(w.core.poll_effect(), Some(Effect::Count(Counted::Placed(Some(Placement::Migrate))))));
    assert!(matches!(w.next(), Effect::Leased { .. }));
    w.lease("b");
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.core.store.take_changes(), []);
    assert!(matches!(w.core.poll_effect(), Some(Effect::Count(Counted::Placed(Some(Placement::Pass))))));
}

#[test]
fn two_leases_of_one_chunk_fetch_it_once() {
    let mut w = World::new(PEERS);
    let one = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    let other = w.lease("a");
    w.directory_says(&[&[2]]);
    assert!(w.is_idle());
    w.ended(asked.order, vec![here(1)]);
    assert_eq!((w.leased(one).chunks, w.leased(other).chunks), (1, 1));
}

#[test]
fn an_answer_that_comes_twice_or_that_nobody_waits_for_changes_nothing() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(1)] });
    w.tell(Event::StoredFound { question, found: vec![Some(true)] });
    assert!(w.is_idle());
    for _ in 0..2 {
        w.tell(Event::HoldersFound { question, holders: vec![of(&[2])] });
    }
    let asked = w.fetch();
    assert!(w.is_idle());
    for _ in 0..2 {
        w.ended(asked.order, vec![here(1)]);
    }
    assert_eq!(w.leased(request).chunks, 1);
    w.tell(Event::OrderRefused(asked.order));
    w.tell(Event::ReadEnded { read: ReadId(1), answer: read_here() });
    assert!(w.is_idle());
}

#[test]
fn a_lease_has_waited_long_enough_at_its_deadline_and_is_answered_once() {
    let mut w = World::new(PEERS);
    w.put("a");
    let request = w.lease("ab");
    w.directory_says(&[&[2, 3]]);
    let asked = w.fetch();
    w.pass(DEADLINE - Duration::from_millis(1));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    assert_eq!(w.leased(request).chunks, 1);
    assert!(matches!(w.next(), Effect::CancelOrder(order) if order == asked.order), "nobody waits for it");
    w.ended(asked.order, vec![FAILED]);
    assert!(w.is_at_rest(), "no other holder is asked, and the session hears nothing more");
}

#[test]
fn a_lookup_counts_what_others_have_and_brings_nothing() {
    let mut w = World::new(PEERS);
    w.put("a");
    let request = w.lookup("abc");
    w.directory_says(&[&[2], &[]]);
    let Effect::Found { request: answered, found, .. } = w.next() else { panic!("it is answered") };
    assert_eq!((answered, found.tokens), (request, 32));
    assert!(w.is_at_rest());
}

#[test]
fn after_a_fault_answers_to_the_life_before_mean_nothing() {
    let mut w = World::new(PEERS);
    w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.core.begin_anew();
    w.session = w.core.store.open_session(TenantId(0), ProcessId(1), 1 << 20);
    w.core.store.register(w.session, "a", &spec(1), &[0], &[BLOCK]).unwrap();
    w.ended(asked.order, vec![here(1)]);
    assert!(w.is_at_rest());
    w.lease("a");
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    assert!(question.0 > asked.order.0, "numbers go on");
}

#[test]
fn a_directory_that_never_answers_keeps_nobody_waiting_and_one_that_is_late_means_nothing() {
    let mut w = World::new(PEERS);
    w.put("a");
    let (lookup, lease) = (w.lookup("ab"), w.lease("ab"));
    let ask = |w: &mut World| match w.next() {
        Effect::FindHolders { question, .. } => question,
        other => panic!("{other:?}"),
    };
    let questions = [ask(&mut w), ask(&mut w)];
    w.pass(DEADLINE - Duration::from_millis(1));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    let Effect::Found { request, found, .. } = w.next() else { panic!("it has waited long enough") };
    assert_eq!((request, found.tokens), (lookup, 16));
    assert_eq!(w.leased(lease).chunks, 1);
    for question in questions {
        w.tell(Event::HoldersFound { question, holders: vec![of(&[2])] });
    }
    assert!(w.is_at_rest());
}

#[test]
fn others_are_asked_for_as_long_as_they_may_take_though_the_lease_waits_for_its_disk() {
    let disk = Some(5 * DEADLINE);
    let mut w = World::new(Sources { disk, ..PEERS });
    let deadline_of = |w: &mut World| match w.next() {
        Effect::Fetch(FetchOrder { order, deadline, .. }) => (order, deadline),
        other => panic!("{other:?}"),
    };
    let request = w.lease("a");
    w.directory_says(&[&[2, 3, 4]]);
    let (order, deadline) = deadline_of(&mut w);
    assert_eq!(deadline, DEADLINE);
    w.pass(DEADLINE / 4);
    w.ended(order, vec![FAILED]);
    let (order, deadline) = deadline_of(&mut w);
    assert_eq!(deadline, DEADLINE * 3 / 4, "the next one has what is left");
    w.pass(DEADLINE);
    w.ended(order, vec![FAILED]);
    assert_eq!(w.leased(request).chunks, 0, "the third is not asked any more");
    assert!(w.is_at_rest());
}

#[test]
fn an_order_is_as_urgent_as_the_most_urgent_of_its_chunks() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), peers: None, ..PEERS });
    let siblings_say = |w: &mut World, holders| {
        let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
        w.tell(Event::SiblingsFound { question, holders });
    };
    let (ask, session) = (w.ask("ab"), w.session);
    w.asks(session, Request::Prefetch(ask));
    siblings_say(&mut w, vec![of_sibling(1), of_sibling(1)]);
    let asked = w.fetch();
    assert!(matches!(w.next(), Effect::Prefetching { .. }));
    w.ended(asked.order, vec![Arrival::Busy { retry_after_ms: 5 }, Arrival::Busy { retry_after_ms: 5 }]);
    w.lease("a");
    siblings_say(&mut w, vec![of_sibling(1)]);
    w.pass(Duration::from_millis(5));
    let again = w.fetch();
    assert_eq!((again.chunks.len(), again.class), (2, larder_protocol::peer::Class::Decode));
}

#[test]
fn a_lookup_asks_only_where_its_tiers_are() {
    use larder_protocol::session::Tier;
    let every = Some(DEADLINE);
    let sources = Sources { siblings: every, peers: every, disk: None, object: every, known_chunks: 0 };
    let cases = [(Tier::Host, "siblings"), (Tier::Peer, "directory"), (Tier::Object, "object store")];
    for (tier, whom) in cases {
        let mut w = World::new(sources);
        let ask = Lookup { tiers: vec![tier], ..w.ask("ab") };
        let request = w.asks(w.session, Request::Lookup(ask));
        let asked = match w.next() {
            Effect::FindSiblings { question, .. } => {
                w.tell(Event::SiblingsFound { question, holders: Vec::new() });
                "siblings"
            }
            Effect::FindHolders { question, .. } => {
                w.tell(Event::HoldersFound { question, holders: Vec::new() });
                "directory"
            }
            Effect::FindStored { question, .. } => {
                w.tell(Event::StoredFound { question, found: Vec::new() });
                "object store"
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(asked, whom);
        assert!(
            matches!(w.next(), Effect::Found { request: of, .. } if of == request),
            "nobody else is asked"
        );
    }
}

#[test]
fn what_the_directory_says_the_second_time_decides_whether_a_chunk_stays() {
    let mut w = World::new(PEERS);
    w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![Arrival::NotHeld]);
    assert!(matches!(w.next(), Effect::Stale { .. }));
    w.directory_says(&[&[3, 4]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    assert!(matches!(w.core.poll_effect(), Some(Effect::Count(Counted::Placed(Some(Placement::Pass))))));
}

impl World {
    /// A world in which four chunks of a tenant may be on their way from peers.
    fn with_little_staging() -> Self {
        let peers = limits().peers.map(|peers| PeerStoreLimits { passing_bytes: 8 * BLOCK, ..peers });
        Self::with(StoreLimits { peers, disk: None, ..limits() }, PEERS)
    }

    /// Answers the orders to the holder until none is left; returns the number of chunks of each.
    fn delivers(&mut self) -> Vec<usize> {
        let mut parts = Vec::new();
        while let Some(effect) = self.poll() {
            match effect {
                Effect::Fetch(order) => {
                    parts.push(order.chunks.len());
                    self.ended(order.order, order.chunks.iter().map(|_| here(1)).collect());
                }
                Effect::Leased { leased, .. } => {
                    parts.push(leased.chunks as usize);
                    return parts;
                }
                other => panic!("{other:?}"),
            }
        }
        parts
    }
}

#[test]
fn a_prompt_larger_than_the_room_of_chunks_on_their_way_comes_in_parts() {
    let mut w = World::with_little_staging();
    w.lease("abcdefghij");
    let all: Vec<&[u16]> = vec![&[2]; 10];
    assert_eq!(w.directory_says(&all), 10);
    let parts = w.delivers();
    assert_eq!(parts.last(), Some(&10), "all are leased: {parts:?}");
    assert!(parts.len() > 2, "{parts:?}");
    assert_eq!(w.core.store.usage().passing_bytes, 0);
}

#[test]
fn a_prompt_that_comes_in_parts_ends_where_a_chunk_did_not_come_or_time_is_up() {
    let mut w = World::with_little_staging();
    let request = w.lease("abcdefghij");
    w.directory_says(&[&[2][..]; 10]);
    let asked = w.fetch();
    let came = asked.chunks.len();
    let mut answers: Vec<Arrival> = asked.chunks.iter().map(|_| here(1)).collect();
    answers[came - 1] = FAILED;
    w.ended(asked.order, answers);
    while let Some(effect) = w.poll() {
        match effect {
            Effect::FindHolders { question, chunks, .. } => {
                let holders = chunks.iter().map(|_| of(&[])).collect();
                w.tell(Event::HoldersFound { question, holders });
            }
            Effect::Leased { request: of, leased } => {
                assert_eq!((of, leased.chunks as usize), (request, came - 1));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    let request = w.lease("klmnopqrst");
    w.directory_says(&[&[2][..]; 10]);
    let asked = w.fetch();
    w.pass(DEADLINE + Duration::from_secs(1));
    let late = std::iter::from_fn(|| w.poll()).find_map(|effect| match effect {
        Effect::Leased { request, leased } => Some((request, leased.chunks)),
        _ => None,
    });
    assert_eq!(late, Some((request, 0)));
    w.ended(asked.order, Vec::new());
}

#[test]
fn a_prompt_that_finds_no_room_beside_others_on_their_way_waits_for_them() {
    let mut w = World::with_little_staging();
    let first = w.lease("abcdefg");
    w.directory_says(&[&[2][..]; 7]);
    let asked = w.fetch();
    let room = asked.chunks.len();
    assert!(room < 7, "they take the room");
    let second = w.lease("klmn");
    w.directory_says(&[&[2][..]; 4]);
    let third = w.lease("opq");
    w.directory_says(&[&[2][..]; 3]);
    assert!(w.poll().is_none(), "neither is answered without its chunks");
    w.ended(asked.order, vec![here(1); room]);
    let mut leased = Vec::new();
    while let Some(effect) = w.poll() {
        match effect {
            Effect::Fetch(order) => w.ended(order.order, vec![here(1); order.chunks.len()]),
            Effect::Leased { request, leased: got } => leased.push((request, got.chunks)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(leased, [(first, 7), (second, 4), (third, 3)]);
}

#[test]
fn a_prompt_that_finds_no_room_is_answered_when_nobody_will_leave_any() {
    let mut w = World::with_little_staging();
    let first = w.lease("abcdefg");
    w.directory_says(&[&[2][..]; 7]);
    let asked = w.fetch();
    let second = w.lease("klmn");
    w.directory_says(&[&[2][..]; 4]);
    let gone = w.lease("opq");
    w.directory_says(&[&[2][..]; 3]);
    w.ended(asked.order, vec![FAILED; asked.chunks.len()]);
    let mut leased = Vec::new();
    while let Some(effect) = w.poll() {
        match effect {
            Effect::FindHolders { question, chunks, .. } => {
                let holders = chunks.iter().map(|_| of(&[])).collect();
                w.tell(Event::HoldersFound { question, holders });
            }
            Effect::Fetch(order) => w.ended(order.order, vec![FAILED; order.chunks.len()]),
            Effect::Leased { request, leased: got } => leased.push((request, got.chunks)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(leased, [(first, 0), (second, 0), (gone, 0)], "room came, but no chunk did");
    assert!(w.is_at_rest());
}

#[test]
fn prompts_that_still_find_no_room_keep_their_order() {
    let mut w = World::with_little_staging();
    w.lease("abcdefg");
    w.directory_says(&[&[2][..]; 7]);
    let first = w.fetch();
    for word in ["klmnopqrs", "tuvw", "xyz"] {
        w.lease(word);
        w.directory_says(&vec![&[2][..]; word.len()]);
    }
    w.ended(first.order, vec![here(1); first.chunks.len()]);
    let (last_of_first, of_second) = (w.fetch(), w.fetch());
    assert!(w.is_idle(), "the second takes all the room that is left");
    w.ended(last_of_first.order, vec![here(1)]);
    assert!(matches!(w.next(), Effect::Leased { .. }));
    let next = w.fetch().chunks[0];
    assert_eq!(
        w.core.wanted(next).unwrap().1.chunk.hash,
        name("t"),
        "the third waited longer than the fourth"
    );
    assert!(of_second.chunks.len() > 1);
}

#[test]
fn two_holders_of_chunks_are_asked_in_turn() {
    let mut w = World::new(PEERS);
    let asked = ["a", "b", "c"].map(|word| {
        w.lease(word);
        w.directory_says(&[&[2, 3]]);
        w.fetch().holder
    });
    assert_eq!(asked, [node(2), node(3), node(2)]);
}

#[test]
fn a_busy_holder_is_waited_for_if_it_alone_has_one_of_the_ordered_chunks() {
    let mut w = World::new(PEERS);
    w.lease("ab");
    w.directory_says(&[&[2, 3], &[2]]);
    let asked = w.fetch();
    assert_eq!((asked.chunks.len(), asked.has_others), (2, false));
}

#[test]
fn a_busy_sibling_is_asked_again_when_the_last_of_its_chunks_may_be_free() {
    let mut w = World::new(Sources { siblings: Some(DEADLINE), ..PEERS });
    w.lease("ab");
    let Effect::FindSiblings { question, .. } = w.next() else { panic!("the siblings") };
    w.tell(Event::SiblingsFound { question, holders: vec![of_sibling(1), of_sibling(1)] });
    let asked = w.fetch();
    let busy = |retry_after_ms| Arrival::Busy { retry_after_ms };
    w.ended(asked.order, vec![busy(20), busy(5)]);
    assert_eq!(w.core.next_deadline(), Some(Duration::from_millis(20)));
}

#[test]
fn a_prompt_that_comes_in_parts_may_be_as_long_as_a_session_may_lease() {
    let peers = limits().peers.map(|peers| PeerStoreLimits { passing_bytes: 8 * BLOCK, ..peers });
    let limits = StoreLimits { peers, disk: None, max_leased_blocks: 10, ..limits() };
    let mut w = World::with(limits, PEERS);
    w.lease("abcdefghij");
    w.directory_says(&[&[2][..]; 10]);
    assert_eq!(w.delivers().last(), Some(&10));
}

#[test]
fn a_prompt_whose_own_chunks_take_the_room_waits_for_no_others() {
    let mut w = World::with_little_staging();
    let other = w.lease("z");
    w.directory_says(&[&[2]]);
    let others = w.fetch();
    let request = w.lease("abcdefg");
    w.directory_says(&[&[2, 3][..]; 7]);
    let asked = w.fetch();
    let room = asked.chunks.len();
    assert!(room < 7, "there is room for no more");
    w.ended(asked.order, vec![here(1); room]);
    assert_eq!(w.leased(request).chunks as usize, room, "of two copies none moves, so these only pass");
    w.ended(others.order, vec![here(1)]);
    assert_eq!(w.leased(other).chunks, 1);
}
