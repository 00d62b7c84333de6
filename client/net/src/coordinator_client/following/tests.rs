//! A follower in virtual time: whom it obeys, what it says, when it gives up.

use larder_protocol::membership::Joined;
use larder_protocol::table::{Epoch, Member, MemberState, PARTITIONS};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn node() -> Following {
    let address = ([10, 0, 0, 1], 7601).into();
    let candidate = Candidate { incarnation: 7, peer: address, http: address, devices: 1, weight: 1 };
    Following::node(candidate, Known::default())
}

fn standing(term: u64, leads: bool) -> CoordinatorMessage {
    let leader = (!leads).then(|| "10.0.0.2:7602".to_owned());
    CoordinatorMessage::Standing(Standing { term, life: 1, leads, leader })
}

fn joined() -> CoordinatorMessage {
    CoordinatorMessage::Joined(Joined { number: NodeNumber(3), heartbeat_ms: 400 })
}

fn table(term: u64) -> Vec<CoordinatorMessage> {
    let table = Table { epoch: Epoch { term, number: 1 }, ..Table::default() };
    pages(&Table::default(), &table).into_iter().map(CoordinatorMessage::Table).collect()
}

fn said(following: &mut Following) -> Vec<FollowerMessage> {
    std::iter::from_fn(|| following.poll_message()).collect()
}

/// A node that has joined, in a term.
fn member(term: u64) -> Following {
    let mut following = node();
    following.begin(SECOND, Version::LATEST);
    assert!(matches!(said(&mut following)[..], [FollowerMessage::Join(_)]));
    following.hear(SECOND, standing(term, true)).unwrap();
    following.hear(SECOND, joined()).unwrap();
    table(term).into_iter().for_each(|page| following.hear(SECOND, page).unwrap());
    following
}

#[test]
fn a_node_obeys_only_who_says_first_that_it_leads() {
    let mut following = node();
    following.begin(SECOND, Version::LATEST);
    assert!(matches!(following.hear(SECOND, joined()), Err(Ended::Unsaid)));
    following.begin(SECOND, Version::LATEST);
    assert!(matches!(following.hear(SECOND, standing(1, false)), Err(Ended::NotLeading)));
    assert!(!following.is_taken());
    assert_eq!(following.dial(SECOND).as_deref(), Some("10.0.0.2:7602"), "it dials the leader next");
}

#[test]
fn a_watcher_follows_whoever_answers() {
    let mut following = Following::watcher(Known::default());
    following.begin(SECOND, Version::LATEST);
    assert_eq!(said(&mut following), [FollowerMessage::Watch]);
    following.hear(SECOND, standing(1, false)).unwrap();
    table(1).into_iter().for_each(|page| following.hear(SECOND, page).unwrap());
    assert_eq!(following.take_news().map(|known| known.table.epoch.term), Some(1));
    assert_eq!(following.next_deadline(), None);
}

#[test]
fn a_watcher_of_one_coordinator_follows_no_other_that_answers_at_its_address() {
    let watcher = |life| {
        let mut watcher = Following::watcher_of(life, Known::default());
        watcher.begin(SECOND, Version::LATEST);
        watcher
    };
    assert!(matches!(watcher(2).hear(SECOND, standing(1, false)), Err(Ended::Another)));
    let mut right = watcher(1);
    right.hear(SECOND, standing(1, true)).unwrap();
    assert!(right.is_taken());
}

#[test]
fn a_leader_that_does_not_answer_is_not_dialled_at_once_again_and_again() {
    let mut following = node();
    let mut pauses = Vec::new();
    for attempt in 0..8 {
        following.dial(SECOND * attempt);
        following.begin(SECOND * attempt, Version::LATEST);
        assert!(following.hear(SECOND * attempt, standing(1, false)).is_err());
        pauses.push(following.pause(SECOND * attempt));
    }
    assert_eq!(pauses[0], FIRST_PAUSE, "the named leader is dialled at once");
    assert_eq!(pauses[7], LAST_PAUSE, "{pauses:?}");
    // Another leader is named.
    following.dial(SECOND * 8);
    following.begin(SECOND * 8, Version::LATEST);
    let leader = Some("10.0.0.3:7602".to_owned());
    let other = Standing { term: 1, life: 1, leads: false, leader };
    assert!(following.hear(SECOND * 8, CoordinatorMessage::Standing(other)).is_err());
    assert_eq!(following.pause(SECOND * 8), FIRST_PAUSE);
}

#[test]
fn a_coordinator_of_an_earlier_term_is_not_obeyed() {
    let mut following = member(2);
    following.begin(SECOND, Version::LATEST);
    let ended = following.hear(SECOND, standing(1, true));
    assert!(matches!(ended, Err(Ended::EarlierTerm { term: 1, known: 2 })), "{ended:?}");
    assert!(table(1).into_iter().all(|page| following.hear(SECOND, page).is_err()));
    assert_eq!(following.known().table.epoch.term, 2);
}

#[test]
fn heartbeats_go_out_at_the_interval_that_the_coordinator_names() {
    let mut following = member(1);
    said(&mut following);
    let beat = SECOND + Duration::from_millis(400);
    assert_eq!(following.next_deadline(), Some(beat));
    following.tick(beat, || vec![NodeNumber(9)]).unwrap();
    let said = said(&mut following);
    assert!(
        matches!(&said[..], [FollowerMessage::Heartbeat(beat)] if beat.silent == [NodeNumber(9)]),
        "{said:?}"
    );
}

#[test]
fn a_coordinator_that_answers_no_heartbeat_is_given_up() {
    let mut following = member(1);
    let late = SECOND + Duration::from_millis(999);
    following.tick(late, Vec::new).unwrap();
    assert!(matches!(following.tick(late + Duration::from_millis(1), Vec::new), Err(Ended::Silent)));
}

#[test]
fn pauses_between_attempts_double_up_to_a_second_and_begin_anew_after_a_long_one() {
    let mut following = node();
    let pauses: Vec<u128> = (0..6)
        .map(|_| {
            following.dial(SECOND);
            following.pause(SECOND).as_millis()
        })
        .collect();
    assert_eq!(pauses, [50, 100, 200, 400, 800, 1_000]);
    following.dial(SECOND);
    assert_eq!(following.pause(SECOND * 3).as_millis(), 50);
}

#[test]
fn a_refused_node_says_why_and_asks_when_it_is_told_to() {
    let mut following = node();
    following.dial(SECOND);
    following.begin(SECOND, Version::LATEST);
    following.hear(SECOND, standing(1, true)).unwrap();
    let in_use = InUse { address: ([10, 0, 0, 9], 1).into(), retry_after_ms: 60_000 };
    let ended = following.hear(SECOND, CoordinatorMessage::InUse(in_use)).unwrap_err();
    assert!(ended.to_string().contains("10.0.0.9:1"), "{ended}");
    assert_eq!(following.take_news().and_then(|known| known.refused), Some(ended.to_string()));
    following.failed(&ended.to_string());
    assert!(following.take_news().is_none(), "a coordinator leads");
    assert_eq!(following.pause(SECOND), LONGEST_WAIT);

    following.dial(SECOND * 7);
    following.failed("nobody answers");
    let known = following.take_news().unwrap();
    assert_eq!((known.refused, known.leaderless), (None, Some("nobody answers".to_owned())));
}

#[test]
fn a_node_says_why_no_coordinator_leads_until_one_does() {
    let mut following = node();
    following.dial(SECOND);
    following.failed("nobody answers");
    assert_eq!(following.take_news().and_then(|known| known.leaderless), Some("nobody answers".to_owned()));
    following.failed("nobody answers");
    assert!(following.take_news().is_none(), "the same reason is no news");

    following.begin(SECOND, Version::LATEST);
    following.hear(SECOND, standing(1, true)).unwrap();
    following.hear(SECOND, joined()).unwrap();
    assert_eq!(following.take_news().and_then(|known| known.leaderless), None);

    let mut watcher = Following::watcher(Known::default());
    watcher.failed("nobody answers");
    assert!(watcher.take_news().is_none(), "a watcher is no member anyway");
}

#[test]
fn a_node_was_a_member_from_the_first_table_that_lists_this_life_of_it() {
    let table = |number, incarnation: Option<u64>| {
        let address = ([10, 0, 0, 1], 7601).into();
        let member = |incarnation| Member {
            number: NodeNumber(3),
            name: "node-3".into(),
            incarnation,
            peer: address,
            http: address,
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        let members: Vec<_> = incarnation.map(member).into_iter().collect();
        let homes = members.iter().flat_map(|member| [member.number; PARTITIONS as usize]).collect();
        Table { epoch: Epoch { term: 1, number }, members, homes }
    };
    let mut following = member(1);
    let mut last = table(1, None);
    let mut was_member_after = |next: Table| {
        for page in pages(&last, &next) {
            following.hear(SECOND, CoordinatorMessage::Table(page)).unwrap();
        }
        last = next;
        following.take_news().unwrap().was_member
    };
    assert!(!was_member_after(table(2, Some(6))), "an earlier life of it is listed");
    assert!(was_member_after(table(3, Some(7))));
    assert!(was_member_after(table(4, None)), "it was removed, and joins again");
}

#[test]
fn a_node_whose_clock_was_set_back_joins_as_a_later_incarnation() {
    let mut following = node();
    following.begin(SECOND, Version::LATEST);
    following.hear(SECOND, standing(1, true)).unwrap();
    assert!(following.hear(SECOND, CoordinatorMessage::Outdated(100)).is_err());
    following.begin(SECOND, Version::LATEST);
    let said = said(&mut following);
    assert!(matches!(&said[..], [FollowerMessage::Join(join)] if join.incarnation == 100), "{said:?}");
}

#[test]
fn a_new_leader_hears_of_a_drain_and_of_its_end_and_is_brought_the_table() {
    let mut following = member(1);
    said(&mut following);
    following.drains(true);
    assert_eq!(said(&mut following), [FollowerMessage::Drains(true)]);
    following.drains(true);
    assert_eq!(said(&mut following), []);
    following.begin(SECOND, Version::LATEST);
    following.drains(false);
    said(&mut following);
    following.hear(SECOND, standing(2, true)).unwrap();
    following.hear(SECOND, joined()).unwrap();
    assert_eq!(said(&mut following), [FollowerMessage::Drains(false)]);
    following.hear(SECOND, CoordinatorMessage::Bring).unwrap();
    assert!(matches!(said(&mut following)[..], [FollowerMessage::Brings(_)]));
}

#[test]
fn a_coordinator_of_the_release_before_leads_without_a_word_and_hears_of_no_drain() {
    let mut following = node();
    following.begin(SECOND, Version::FIRST);
    assert!(following.is_taken());
    assert!(following.take_news().is_some_and(|known| known.lacks_drains));
    following.hear(SECOND, joined()).unwrap();
    following.drains(true);
    assert!(matches!(said(&mut following)[..], [FollowerMessage::Join(_)]));
}
