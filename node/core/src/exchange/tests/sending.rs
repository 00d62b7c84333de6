//! Tests of how many bytes may be in flight to each peer, and of the rate at which they go.

use super::super::pace::Pace;
use super::*;

/// Takes room in steps of 1 byte for a peer until it gets no more; returns the bytes.
fn fill(outgoing: &mut Outgoing, peer: &str) -> u64 {
    std::iter::from_fn(|| outgoing.sending.take(peer, 1, Class::Decode)).sum()
}

#[test]
fn peers_that_stop_reading_leave_room_for_the_next() {
    let mut outgoing = Outgoing::new(&LIMITS);
    let has = ["a", "b", "c", "d"].map(|peer| fill(&mut outgoing, peer));
    assert_eq!(has, [500, 250, 125, 62]);
    assert_eq!(fill(&mut outgoing, "e"), 31, "the next one still gets half of the rest");
    for (peer, bytes) in ["a", "b", "c", "d"].into_iter().zip(has) {
        outgoing.sending.give_back(peer, bytes);
    }
    assert_eq!(fill(&mut outgoing, "e"), 500 - 31, "half of all, with what it has");
}

#[test]
fn a_chunk_of_any_size_goes_to_a_peer_that_has_nothing() {
    let mut outgoing = Outgoing::new(&LIMITS);
    assert_eq!(outgoing.sending.take("a", 5_000, Class::Prefetch), Some(1_000), "it goes alone");
    assert_eq!(outgoing.sending.take("b", 1, Class::Decode), None);
    outgoing.sending.give_back("a", 1_000);
    assert_eq!(outgoing.sending.take("a", 800, Class::Decode), Some(800));
    assert_eq!(outgoing.sending.take("a", 1, Class::Decode), None, "it has more than is left");
    assert_eq!(outgoing.sending.take("b", 200, Class::Decode), Some(200));
}

#[test]
fn what_is_only_prefetched_leaves_some_free() {
    let mut outgoing = Outgoing::new(&LIMITS);
    assert_eq!(outgoing.sending.take("a", 400, Class::Decode), Some(400));
    assert_eq!(outgoing.sending.take("b", 400, Class::Prefetch), None);
    assert_eq!(outgoing.sending.take("b", 350, Class::Prefetch), Some(350));
}

#[test]
fn nothing_is_kept_of_peers_that_have_nothing_under_way() {
    let mut outgoing = Outgoing::new(&LIMITS);
    for peer in 0..100 {
        assert_eq!(outgoing.sending.take(&peer.to_string(), 10, Class::Decode), Some(10));
        outgoing.sending.give_back(&peer.to_string(), 10);
    }
    assert_eq!(format!("{:?}", outgoing.sending), format!("{:?}", Sending::new(LIMITS.sending_bytes)));
}

const RATE: NonZeroU64 = NonZeroU64::new(1_000_000).unwrap();

#[test]
fn pieces_follow_each_other_at_the_rate_and_a_pause_is_made_up_for_by_a_few_milliseconds_alone() {
    let mut outgoing = Outgoing::new(&ExchangeLimits { send_bytes_per_second: Some(RATE), ..LIMITS });
    assert_eq!(outgoing.pace.pause(ms(0), 500_000), ms(0));
    assert_eq!(outgoing.pace.pause(ms(1), 250_000), ms(499));
    assert_eq!(outgoing.pace.pause(ms(752), 1_000), ms(0), "a timer was late");
    assert_eq!(outgoing.pace.pause(ms(752), 5_000), ms(0), "it is made up for: this goes 2 ms after 750");
    assert_eq!(outgoing.pace.pause(ms(752), 1_000), ms(4));
    assert_eq!(outgoing.pace.pause(ms(60_000), 6_000), ms(0), "nothing went for a minute");
    assert_eq!(outgoing.pace.pause(ms(60_000), 1_000), ms(1), "5 ms of it are made up for");
    assert_eq!(Outgoing::new(&LIMITS).pace.pause(ms(7), u64::MAX), ms(0), "as fast as the network is");
}

#[test]
fn after_a_change_of_the_limit_the_next_piece_does_not_wait_for_turns_at_the_old_rate() {
    let mut pace = Pace::new(Some(NonZeroU64::MIN));
    pace.pause(ms(0), 500_000);
    assert_eq!(pace.pause(ms(0), 1_000), ms(500_000_000), "500,000 bytes take six days");
    pace.set(Some(RATE));
    assert_eq!(pace.pause(ms(10), 500_000), ms(0));
    assert_eq!(pace.pause(ms(10), 1_000), ms(495), "the new rate counts");
}

#[test]
fn no_number_of_bytes_overflows() {
    let mut pace = Pace::new(Some(NonZeroU64::MIN));
    pace.pause(ms(1), u64::MAX);
    assert!(pace.pause(ms(1), u64::MAX) > ms(1));
}

proptest::proptest! {
    #[test]
    fn in_no_stretch_of_time_goes_more_than_the_rate_and_what_is_made_up(
        asks in proptest::collection::vec((0_u64..20_000, 1_u64..300_000), 1..200)
    ) {
        let (mut now, mut pace) = (Duration::ZERO, Pace::new(Some(RATE)));
        let mut went: Vec<(Duration, u64)> = Vec::new();
        for (pause_us, bytes) in asks {
            now += Duration::from_micros(pause_us);
            now += pace.pause(now, bytes);
            went.push((now, bytes));
        }
        for first in 0..went.len() {
            let mut bytes = 0;
            for &(at, piece) in &went[first..] {
                // The last piece of a stretch goes at once, and its time counts after the stretch.
                let allowed = (at - went[first].0 + ms(5)).as_micros() as u64 + 1;
                proptest::prop_assert!(bytes <= allowed, "{bytes} bytes in {allowed} us");
                bytes += piece;
            }
        }
    }
}
