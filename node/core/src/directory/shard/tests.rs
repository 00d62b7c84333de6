//! Tests of a home: the changes that it takes and refuses, and the rows that it shows.

use larder_protocol::peer::RowChange;
use larder_protocol::table::Epoch;

use super::super::tests::{holder, key, table, table_of_one_home};
use super::*;

const NOW: Millis = Millis(1_000);

/// A home of all partitions, with two holders.
fn home(max_rows: u64) -> Shard {
    let mut shard = Shard::new(max_rows);
    shard.new_table(&table_of_one_home(1, &[(1, 10), (2, 20), (3, 30)]), NodeNumber(1));
    shard
}

/// A batch of node 2.
fn batch(stream: u64, sequence: u64, gained: &[u64], lost: &[u64]) -> Announce {
    let change = |is_held| move |&number: &u64| RowChange { row: key(number), is_held };
    Announce {
        holder: holder(2),
        incarnation: 20,
        epoch: Epoch { term: 1, number: 1 },
        stream,
        sequence,
        digest: None,
        changes: gained.iter().map(change(true)).chain(lost.iter().map(change(false))).collect(),
    }
}

/// The holders of the first eight chunks, as spans.
fn shown(shard: &Shard, now: Millis) -> Vec<(u32, u32, u16)> {
    let find = Find { epoch: Epoch::default(), rows: (0..8).map(key).collect() };
    let spans = shard.find(&find, now).spans;
    // The spans of one chunk come in no order.
    let mut spans: Vec<_> = spans.into_iter().map(|span| (span.from, span.to, span.holder.node.0)).collect();
    spans.sort_unstable();
    spans
}

#[test]
fn what_holders_announce_is_shown_as_spans() {
    let mut shard = home(100);
    assert_eq!(shard.announce(&batch(1, 0, &[0, 1, 2, 5], &[])), Announced::Known(0));
    assert_eq!(shard.announce(&batch(1, 1, &[6], &[1])), Announced::Known(1));
    let other = Announce { holder: holder(3), incarnation: 30, ..batch(1, 0, &[2, 3], &[]) };
    assert_eq!(shard.announce(&other), Announced::Known(0));
    assert_eq!(shown(&shard, NOW), [(0, 1, 2), (2, 3, 2), (2, 4, 3), (5, 7, 2)]);
    assert_eq!((shard.len(), shard.holders()), (6, 2));
}

#[test]
fn a_batch_that_comes_twice_changes_nothing_and_one_that_is_missing_starts_anew() {
    let mut shard = home(100);
    shard.announce(&batch(1, 0, &[0, 1], &[]));
    shard.announce(&batch(1, 1, &[], &[0]));
    assert_eq!(shard.announce(&batch(1, 0, &[0, 1], &[])), Announced::Known(1));
    assert_eq!(shown(&shard, NOW), [(1, 2, 2)]);
    assert_eq!(shard.announce(&batch(1, 3, &[7], &[])), Announced::StartAnew);
    assert_eq!(shown(&shard, NOW), [(1, 2, 2)]);
    assert_eq!(shard.announce(&batch(2, 0, &[4], &[])), Announced::Known(0));
    assert_eq!(shown(&shard, NOW), [(4, 5, 2)], "a new stream voids what was known");
    assert_eq!(shard.announce(&batch(1, 2, &[3], &[])), Announced::StartAnew, "an old stream is over");
    assert_eq!(shown(&shard, NOW), [(4, 5, 2)]);
}

#[test]
fn another_life_or_a_stranger_is_not_heard_and_a_later_table_is_waited_for() {
    let mut shard = home(100);
    let epoch = Epoch { term: 1, number: 1 };
    let old = Announce { incarnation: 19, ..batch(1, 0, &[0], &[]) };
    assert_eq!(shard.announce(&old), Announced::OtherIncarnation(epoch));
    let stranger = Announce { holder: holder(9), ..batch(1, 0, &[0], &[]) };
    assert_eq!(shard.announce(&stranger), Announced::OtherIncarnation(epoch));
    let early = Announce { epoch: Epoch { term: 1, number: 2 }, ..batch(1, 0, &[0], &[]) };
    assert_eq!(shard.announce(&early), Announced::Later);
    assert!(shard.is_empty());
}

#[test]
fn rows_go_with_their_holders_life_and_with_their_partition() {
    let mut shard = home(100);
    shard.announce(&batch(1, 0, &[0, 1], &[]));
    shard.announce(&Announce { holder: holder(3), incarnation: 30, ..batch(1, 0, &[2], &[]) });
    shard.new_table(&table_of_one_home(2, &[(1, 10), (2, 21), (3, 30)]), NodeNumber(1));
    assert_eq!(shown(&shard, NOW), [(2, 3, 3)], "node 2 has started again");
    // Half of the partitions move away, perhaps with the only row that is left.
    let halves = table(3, &[(1, 10), (3, 30)].into());
    shard.new_table(&halves, NodeNumber(1));
    let stays = halves.home(key(2).run.partition()) == Some(NodeNumber(1));
    assert_eq!(shard.len(), u64::from(stays));
    shard.new_table(&Arc::default(), NodeNumber(1));
    assert_eq!((shard.len(), shard.holders()), (0, 0));
}

#[test]
fn a_sum_that_differs_starts_anew() {
    let mut shard = home(100);
    let right = key(0).digest().wrapping_add(key(1).digest());
    let sum = |digest| Announce { digest: Some(digest), ..batch(1, 0, &[0, 1], &[]) };
    assert_eq!(shard.announce(&sum(right)), Announced::Known(0));
    let wrong = Announce { digest: Some(right), ..batch(1, 1, &[2], &[]) };
    assert_eq!(shard.announce(&wrong), Announced::StartAnew);
    assert_eq!(shard.counts().differing, 1);
    assert_eq!(shard.announce(&batch(1, 2, &[3], &[])), Announced::StartAnew, "the stream is not taken on");
}

#[test]
fn there_is_a_bound_on_rows_and_on_holders_of_one_chunk() {
    let mut shard = home(3);
    assert_eq!(shard.announce(&batch(1, 0, &[0, 1, 2, 3, 4], &[])), Announced::Known(0));
    assert_eq!((shard.len(), shard.counts().dropped, shard.missing()), (3, 2, 2));

    let members: Vec<(u16, u64)> = (1..=40).map(|number| (number, 1)).collect();
    let mut shard = Shard::new(100);
    shard.new_table(&table_of_one_home(1, &members), NodeNumber(1));
    for number in 1..=40 {
        shard.announce(&Announce { holder: holder(number), incarnation: 1, ..batch(1, 0, &[0], &[]) });
    }
    assert_eq!((shard.len(), shard.counts().crowded), (MAX_ROW_HOLDERS as u64, 8));
    assert_eq!(shown(&shard, NOW).len(), MAX_FOUND_HOLDERS);
    let named: std::collections::BTreeSet<_> =
        (0..64).flat_map(|later| shown(&shard, NOW + later)).map(|(_, _, node)| node).collect();
    assert_eq!(named.len(), MAX_ROW_HOLDERS, "each of them serves at some moment");
}

#[test]
fn a_lost_row_that_was_left_out_as_one_holder_too_many_is_not_taken_for_one_without_room() {
    let members: Vec<(u16, u64)> = (1..=40).map(|number| (number, 1)).collect();
    let mut shard = Shard::new(MAX_ROW_HOLDERS as u64);
    shard.new_table(&table_of_one_home(1, &members), NodeNumber(1));
    let of = |number, batch| Announce { holder: holder(number), incarnation: 1, ..batch };
    for number in 1..=40 {
        shard.announce(&of(number, batch(1, 0, &[0], &[])));
    }
    shard.announce(&of(40, batch(1, 1, &[1], &[])));
    assert_eq!((shard.counts().crowded, shard.missing()), (8, 1));
    shard.announce(&of(40, batch(1, 2, &[], &[0])));
    assert_eq!(shard.missing(), 1);
    shard.announce(&of(40, batch(1, 3, &[], &[1])));
    assert_eq!(shard.missing(), 0);
}

#[test]
fn a_row_found_wrong_is_kept_back_until_it_is_announced_again_or_some_seconds_have_passed() {
    let mut shard = home(100);
    shard.announce(&batch(1, 0, &[0, 1], &[]));
    shard.not_held(holder(2), &[key(0), key(1), key(7)], NOW);
    assert_eq!((shown(&shard, NOW), shard.counts().repaired), (Vec::new(), 2));
    shard.announce(&batch(1, 1, &[0], &[]));
    assert_eq!(shown(&shard, NOW), [(0, 1, 2)]);
    assert_eq!(shown(&shard, NOW + DOUBT_MS), [(0, 2, 2)]);
}

#[test]
fn rows_left_out_for_want_of_room_are_asked_for_again_once_there_is_some() {
    let mut shard = home(32);
    let other = |sequence, gained: &[u64], lost: &[u64]| Announce {
        holder: holder(3),
        incarnation: 30,
        ..batch(1, sequence, gained, lost)
    };
    let all = |numbers: &[u64]| numbers.iter().fold(0, |sum: u64, &row| sum.wrapping_add(key(row).digest()));
    let others: Vec<u64> = (100..130).collect();
    assert_eq!(shard.announce(&other(0, &others, &[])), Announced::Known(0));
    let told = Announce { digest: Some(all(&[0, 1, 2, 3])), ..batch(1, 0, &[0, 1, 2, 3], &[]) };
    assert_eq!(shard.announce(&told), Announced::Known(0));
    assert_eq!((shard.len(), shard.missing()), (32, 2));
    let probe = |sequence| Announce { digest: told.digest, ..batch(1, sequence, &[], &[]) };
    assert_eq!(shard.announce(&probe(1)), Announced::Known(1), "there is no room yet");
    shard.announce(&other(1, &[], &others[..2]));
    assert_eq!(shard.announce(&probe(2)), Announced::Known(2), "there is just enough");
    shard.announce(&other(2, &[], &others[2..10]));
    assert_eq!(shard.announce(&probe(3)), Announced::StartAnew);
    assert_eq!(shard.announce(&Announce { stream: 2, ..told }), Announced::Known(0));
    assert_eq!((shard.missing(), shown(&shard, NOW)), (0, vec![(0, 4, 2)]));
    assert_eq!(shard.announce(&Announce { stream: 2, ..probe(1) }), Announced::Known(1), "and that was that");
    assert_eq!(shard.counts().refilled, 1);
}
