//! Tests of the outbox: what homes are told, when they are told, and the effects of their answers.

use super::super::Shard;
use super::super::stream::FLUSH_MS;
use super::super::tests::{SPACE, changes, chunk, holder, key, table, table_of_one_home};
use super::*;

/// The outbox of node 2; node 1 is the home of all partitions.
fn outbox() -> Outbox {
    let mut outbox = Outbox::default();
    outbox.new_table(&table_of_one_home(1, &[(1, 10), (2, 20)]), NodeNumber(2), Millis(0));
    outbox
}

/// One batch of a message.
#[derive(Debug, Clone, PartialEq)]
struct Single {
    home: NodeNumber,
    announce: Announce,
}

impl Single {
    fn id(&self) -> BatchId {
        BatchId::new(self.home, &self.announce)
    }
}

fn singles(outgoing: Vec<Outgoing>) -> Vec<Single> {
    let singles = outgoing.into_iter().map(|Outgoing { home, mut announces }| {
        assert_eq!(announces.len(), 1, "there is one actor");
        Single { home, announce: announces.remove(0) }
    });
    singles.collect()
}

/// The only batch that is due.
fn take(outbox: &mut Outbox, now: Millis) -> Single {
    let mut due = singles(outbox.due(now, |_| true));
    assert_eq!(due.len(), 1, "{due:?}");
    due.remove(0)
}

fn known(outgoing: &Single) -> Option<Announced> {
    Some(Announced::Known(outgoing.announce.sequence))
}

fn told(outgoing: &Single) -> Vec<(u64, bool)> {
    let number = |row| (0..5_000).find(|&number| key(number) == row).expect("one of the test's chunks");
    let mut told: Vec<_> =
        outgoing.announce.changes.iter().map(|change| (number(change.row), change.is_held)).collect();
    told.sort_unstable();
    told
}

/// An outbox whose home knows these chunks of an actor.
fn settled(chunks: std::ops::Range<u64>) -> (Outbox, Millis) {
    let mut outbox = outbox();
    outbox.changed(0, &changes(ChangeKind::Gained, chunks), Millis(0));
    let now = Millis(100);
    let first = take(&mut outbox, now);
    assert!(matches!(outbox.answered(&first.id(), known(&first), now), Answered::Known { .. }));
    (outbox, now)
}

#[test]
fn changes_wait_a_moment_for_others_and_go_as_one_batch() {
    let (mut outbox, now) = settled(0..3);
    outbox.changed(0, &changes(ChangeKind::Gained, 3..5), now);
    outbox.changed(0, &changes(ChangeKind::Lost, [0]), now);
    assert_eq!(outbox.due(now, |_| true), []);
    let batch = take(&mut outbox, now + FLUSH_MS);
    assert_eq!(told(&batch), [(0, false), (3, true), (4, true)]);
    assert_eq!(batch.announce.sequence, 1);
    assert_eq!(outbox.due(now + FLUSH_MS, |_| true), [], "one batch at a time");
    let answered = outbox.answered(&batch.id(), known(&batch), now + 7);
    assert_eq!(answered, Answered::Known { changes: 3, lag_ms: 7, moved: Vec::new() });
}

#[test]
fn many_changes_wait_for_nothing_and_fill_several_batches() {
    let (mut outbox, now) = settled(0..3);
    let many = 100 + MAX_ANNOUNCE_CHANGES as u64;
    outbox.changed(0, &changes(ChangeKind::Gained, 10..10 + many), now);
    let first = take(&mut outbox, now);
    assert_eq!(first.announce.changes.len(), MAX_ANNOUNCE_CHANGES);
    assert_eq!(first.announce.digest, None, "the home does not know all with this one");
    outbox.answered(&first.id(), known(&first), now);
    let second = take(&mut outbox, now + FLUSH_MS);
    assert_eq!(second.announce.changes.len(), 100);
    assert!(second.announce.digest.is_some());
}

#[test]
fn what_was_gained_and_lost_in_between_is_not_told() {
    let (mut outbox, now) = settled(0..3);
    outbox.changed(0, &changes(ChangeKind::Gained, [7]), now);
    outbox.changed(0, &changes(ChangeKind::Lost, [7]), now);
    assert_eq!(outbox.waiting(), 0);
    outbox.changed(0, &changes(ChangeKind::Gained, [8]), now);
    assert_eq!(told(&take(&mut outbox, now + FLUSH_MS)), [(8, true)]);
}

#[test]
fn a_batch_without_an_answer_is_sent_again_as_it_was_and_later_each_time() {
    let (mut outbox, now) = settled(0..3);
    outbox.changed(0, &changes(ChangeKind::Gained, [3]), now);
    let batch = take(&mut outbox, now + FLUSH_MS);
    outbox.changed(0, &changes(ChangeKind::Gained, [4]), now + FLUSH_MS);
    let (mut at, mut pauses) = (now + FLUSH_MS, Vec::new());
    for _ in 0..4 {
        assert_eq!(outbox.answered(&batch.id(), None, at), Answered::Again);
        let failed = at;
        let again = loop {
            match singles(outbox.due(at, |_| true)).pop() {
                Some(again) => break again,
                None => at = at + 1,
            }
        };
        assert_eq!(again, batch);
        pauses.push(at.since(failed));
    }
    assert!(pauses.is_sorted() && pauses[3] > pauses[0], "{pauses:?}");
    outbox.answered(&batch.id(), known(&batch), at);
    assert_eq!(told(&take(&mut outbox, at + FLUSH_MS)), [(4, true)]);
}

#[test]
fn a_home_that_is_in_doubt_hears_all_in_a_new_stream() {
    let (mut outbox, now) = settled(0..3);
    outbox.changed(0, &changes(ChangeKind::Lost, [1]), now);
    let batch = take(&mut outbox, now + FLUSH_MS);
    assert_eq!(outbox.answered(&batch.id(), Some(Announced::StartAnew), now + FLUSH_MS), Answered::Restarted);
    assert_eq!(outbox.answered(&batch.id(), known(&batch), now + FLUSH_MS), Answered::Late);
    let anew = take(&mut outbox, now + 1_000);
    assert!(anew.announce.stream > batch.announce.stream && anew.announce.sequence == 0);
    assert_eq!(told(&anew), [(0, true), (2, true)]);
}

#[test]
fn a_new_home_hears_what_is_held_of_its_partitions_and_one_that_started_again_everything() {
    let (mut outbox, now) = settled(0..40);
    let both = table(2, &[(1, 10), (2, 20), (3, 30)].into());
    outbox.new_table(&both, NodeNumber(2), now);
    let mut shard = Shard::new(100);
    shard.new_table(&both, NodeNumber(3));
    let at = now + FLUSH_MS;
    let batches = singles(outbox.due(at, |_| true));
    let for_new = batches.iter().find(|batch| batch.home == NodeNumber(3)).expect("it has partitions");
    shard.announce(&for_new.announce);
    let expected = (0..40).filter(|&number| both.home(key(number).run.partition()) == Some(NodeNumber(3)));
    assert_eq!(shard.len(), expected.count() as u64);
    outbox.answered(&for_new.id(), known(for_new), at);

    outbox.new_table(&table(3, &[(1, 10), (2, 20), (3, 31)].into()), NodeNumber(2), at);
    let again = singles(outbox.due(at + FLUSH_MS, |_| true));
    let again = again.iter().find(|batch| batch.home == NodeNumber(3)).expect("it knows nothing now");
    assert_eq!((again.announce.sequence, told(again)), (0, told(for_new)));
}

#[test]
fn a_holder_gives_up_its_copy_when_the_home_knows_of_the_new_one() {
    let (mut outbox, now) = settled(0..3);
    let from = Holder { node: NodeNumber(1), device: 3 };
    outbox.changed(0, &changes(ChangeKind::MovedFrom(from), [9]), now);
    let batch = take(&mut outbox, now + FLUSH_MS);
    let Answered::Known { moved, .. } = outbox.answered(&batch.id(), known(&batch), now + FLUSH_MS) else {
        panic!("the home knows");
    };
    assert_eq!((moved.len(), moved[0].holder, moved[0].hashes.len()), (1, from, 1));
}

#[test]
fn what_several_actors_have_for_a_home_goes_in_one_message() {
    let mut outbox = outbox();
    for device in 0..3 {
        outbox.changed(device, &changes(ChangeKind::Gained, [u64::from(device)]), Millis(0));
    }
    let [message] = &outbox.due(Millis(FLUSH_MS), |_| true)[..] else { panic!("one home, one message") };
    let devices: Vec<u16> = message.announces.iter().map(|announce| announce.holder.device).collect();
    assert_eq!(devices, [0, 1, 2]);
    for announce in &message.announces {
        let batch = BatchId::new(message.home, announce);
        outbox.answered(&batch, Some(Announced::Known(0)), Millis(FLUSH_MS));
    }
    // Sums are compared in one message too, one interval after the message of the changes compared them.
    let probes: Vec<Outgoing> =
        (0..2 * PROBE_MS + 1_000).flat_map(|ms| outbox.due(Millis(100 + ms), |_| true)).collect();
    assert_eq!(probes.iter().map(|probe| probe.announces.len()).collect::<Vec<_>>(), [3]);
}

#[test]
fn changes_of_all_actors_share_the_room_of_a_message() {
    let (many, mut outbox) = (MAX_ANNOUNCE_CHANGES as u64 - 10, outbox());
    for device in 0..3 {
        outbox.changed(device, &changes(ChangeKind::Gained, 0..many), Millis(0));
    }
    let sizes: Vec<usize> = outbox
        .due(Millis(FLUSH_MS), |_| true)
        .iter()
        .map(|message| message.announces.iter().map(|announce| announce.changes.len()).sum())
        .collect();
    // The second actor's batch is in flight with the few changes that fitted. The third actor's batch goes in a message of its
    // own.
    assert_eq!(sizes, [MAX_ANNOUNCE_CHANGES, MAX_ANNOUNCE_CHANGES - 10]);
}

/// A table of so many members, with equally many partitions each.
fn large_table(number: u64, members: u16) -> Arc<Table> {
    let mut large = Table::clone(&table(number, &(1..=members).map(|member| (member, 1)).collect()));
    large.homes = (0..PARTITIONS).map(|partition| NodeNumber(partition % members + 1)).collect();
    Arc::new(large)
}

#[test]
fn in_a_large_cluster_a_node_speaks_to_few_at_a_time() {
    let members = 1_000;
    let mut outbox = Outbox::default();
    outbox.new_table(&large_table(1, members), NodeNumber(2), Millis(0));
    outbox.changed(0, &changes(ChangeKind::Gained, []), Millis(0));
    let probe_ms = probe_ms(usize::from(members));
    let (mut asked, mut most) = (std::collections::BTreeSet::new(), 0);
    for ms in (0..probe_ms + PROBE_SOON_MS).step_by(10) {
        let due = outbox.due(Millis(ms), |_| true);
        most = most.max(due.len());
        for Outgoing { home, announces } in due {
            asked.insert(home);
            for announce in &announces {
                let known = Some(Announced::Known(announce.sequence));
                outbox.answered(&BatchId::new(home, announce), known, Millis(ms));
            }
        }
    }
    assert_eq!(asked.len(), usize::from(members), "everybody's turn comes");
    assert!(most <= 5, "{most} homes within 10 ms");
}

#[test]
fn a_new_table_asks_nothing_of_homes_that_it_does_not_change() {
    let mut outbox = Outbox::default();
    let before = large_table(1, 100);
    outbox.new_table(&before, NodeNumber(2), Millis(0));
    outbox.changed(0, &changes(ChangeKind::Gained, 0..3_000), Millis(0));
    // The homes that are told anything between these times.
    let run = |outbox: &mut Outbox, from: u64, until: u64| {
        let mut asked = std::collections::BTreeSet::new();
        for now in (from..until).step_by(5).map(Millis) {
            for Outgoing { home, announces } in outbox.due(now, |_| true) {
                asked.insert(home.0);
                for announce in &announces {
                    let known = Some(Announced::Known(announce.sequence));
                    outbox.answered(&BatchId::new(home, announce), known, now);
                }
            }
        }
        asked
    };
    assert_eq!(run(&mut outbox, 0, 10_000).len(), 100);
    // One member is suspect, and nine partitions get another home. Each of the nine had a different home before.
    let mut after = Table::clone(&before);
    after.epoch.number = 2;
    after.members[40].state = larder_protocol::table::MemberState::Suspect;
    (0..9).for_each(|partition| after.homes[partition] = NodeNumber(50));
    outbox.new_table(&Arc::new(after), NodeNumber(2), Millis(10_000));
    let asked = run(&mut outbox, 10_000, 10_000 + PROBE_SOON_MS + 100);
    let changed: std::collections::BTreeSet<u16> = (1..=9).chain([50]).collect();
    assert!(asked.is_superset(&changed), "{asked:?}");
    // A tenth of the other homes have their planned comparison in this time anyway.
    assert!(asked.len() < 10 + 30, "{asked:?}");
}

/// A node of a cluster with so many members tells the homes of 3,000 chunks at the start. Returns when it tells each home
/// something after that; `near` says when a connection with a home is open.
fn comparisons(
    members: u16,
    until_ms: u64,
    near: impl Fn(u64, NodeNumber) -> bool,
) -> Vec<(u64, NodeNumber)> {
    let mut outbox = Outbox::default();
    outbox.new_table(&large_table(1, members), NodeNumber(2), Millis(0));
    outbox.changed(0, &changes(ChangeKind::Gained, 0..3_000), Millis(0));
    let mut all = Vec::new();
    for ms in (0..until_ms).step_by(50) {
        for Outgoing { home, announces } in outbox.due(Millis(ms), |home| near(ms, home)) {
            let compares = announces.iter().all(|announce| announce.changes.is_empty());
            all.extend((compares && home != NodeNumber(2)).then_some((ms, home)));
            for announce in &announces {
                let known = Some(Announced::Known(announce.sequence));
                outbox.answered(&BatchId::new(home, announce), known, Millis(ms));
            }
        }
    }
    all
}

#[test]
fn homes_with_which_no_connection_is_open_compare_sums_seldom_and_each_within_the_bound() {
    let (members, settled_ms) = (40, 20_000);
    let all = comparisons(members, settled_ms + 2 * FAR_MS, |_, _| false);
    for home in (1..=members).filter(|&home| home != 2).map(NodeNumber) {
        let of_home = all.iter().filter(|(at, of)| *of == home && *at >= settled_ms);
        let at: Vec<u64> = of_home.map(|(at, _)| *at).collect();
        let last = at.iter().copied().chain([settled_ms + 2 * FAR_MS]);
        let pauses: Vec<u64> = std::iter::once(settled_ms)
            .chain(at.iter().copied())
            .zip(last)
            .map(|(from, to)| to - from)
            .collect();
        assert!(pauses.iter().all(|&pause| pause <= FAR_MS + 2 * PROBE_MS), "{home}: {pauses:?}");
        assert!(at.len() <= 3, "{home}: {at:?}");
    }
}

#[test]
fn a_comparison_waits_for_a_connection_and_takes_the_first() {
    let opens = |ms: u64, home: NodeNumber| ms >= 100_000 && home == NodeNumber(7);
    let all = comparisons(40, 200_000, opens);
    let at: Vec<u64> =
        all.iter().filter(|(at, home)| *at > 20_000 && home.0 == 7).map(|(at, _)| *at).collect();
    assert!(at[0] >= 100_000 && at[0] <= 100_000 + LOOK_MS, "{at:?}");
    assert!(at.windows(2).all(|pair| pair[1] - pair[0] <= 2 * PROBE_MS), "{at:?}");
    assert!(all.iter().filter(|(at, home)| *at > 20_000 && home.0 != 7).count() < 10, "{all:?}");
}

#[test]
fn a_batch_after_which_a_home_knows_all_replaces_a_comparison() {
    let (mut outbox, mut empty) = (outbox(), 0);
    outbox.changed(0, &changes(ChangeKind::Gained, 0..3), Millis(0));
    for ms in (0..60_000).step_by(100) {
        let kind = if ms % 2_000 == 0 { ChangeKind::Gained } else { ChangeKind::Lost };
        if ms % 1_000 == 0 {
            outbox.changed(0, &changes(kind, [9]), Millis(ms));
        }
        for batch in singles(outbox.due(Millis(ms), |_| true)) {
            empty += usize::from(batch.announce.changes.is_empty());
            outbox.answered(&batch.id(), known(&batch), Millis(ms));
        }
    }
    assert_eq!(empty, 0, "the home hears a sum each second as it is");
}

#[test]
fn a_former_holder_keeps_its_copy_of_a_chunk_that_is_lost_again_before_its_home_knows_of_it() {
    let page = |chunks: std::ops::Range<u64>| {
        let chunks = chunks.map(|number| (SPACE, chunk(number))).collect();
        Changes::Page(Page { is_first: true, chunks, is_last: true })
    };
    let kept = (changes(ChangeKind::Gained, []), 1);
    for (later, moves) in [kept, (changes(ChangeKind::Lost, [5]), 0), (page(0..3), 0)] {
        let (mut outbox, now) = settled(0..3);
        outbox.changed(0, &changes(ChangeKind::MovedFrom(holder(3)), [5]), now);
        let batch = take(&mut outbox, now + FLUSH_MS);
        outbox.changed(0, &later, now + FLUSH_MS);
        let answered = outbox.answered(&batch.id(), known(&batch), now + FLUSH_MS);
        let Answered::Known { moved, .. } = answered else { panic!("{answered:?}") };
        assert_eq!(moved.len(), moves, "{later:?}");
    }
}

#[test]
fn what_changes_between_two_pages_is_held_as_it_is_after_the_last() {
    let (mut outbox, now) = settled(0..3);
    let page = |number, is_first, is_last| {
        Changes::Page(Page { is_first, chunks: vec![(SPACE, chunk(number))], is_last })
    };
    outbox.changed(0, &page(0, true, false), now);
    outbox.changed(0, &changes(ChangeKind::Gained, [7]), now);
    outbox.changed(0, &changes(ChangeKind::Lost, [0]), now);
    outbox.changed(0, &page(2, false, true), now);
    let mut held: Vec<RowKey> = outbox.keys(0).collect();
    let mut expected = [2, 7].map(key);
    held.sort_unstable();
    expected.sort_unstable();
    assert_eq!(held, expected);
}

#[test]
fn a_new_stream_tells_no_loss_of_what_it_never_told() {
    let (mut outbox, now) = settled(0..3);
    outbox.changed(0, &changes(ChangeKind::Gained, [3]), now);
    let batch = take(&mut outbox, now + FLUSH_MS);
    outbox.changed(0, &changes(ChangeKind::Lost, [1]), now + FLUSH_MS);
    assert_eq!(outbox.answered(&batch.id(), Some(Announced::StartAnew), now + FLUSH_MS), Answered::Restarted);
    assert_eq!(told(&take(&mut outbox, now + 1_000)), [(0, true), (2, true), (3, true)]);
}

#[test]
fn a_stream_that_begins_anew_again_and_again_slows_down_though_its_first_batches_are_taken() {
    let mut outbox = outbox();
    outbox.changed(0, &changes(ChangeKind::Gained, 0..100 + MAX_ANNOUNCE_CHANGES as u64), Millis(0));
    let next = |outbox: &mut Outbox, now: &mut Millis| {
        loop {
            match singles(outbox.due(*now, |_| true)).pop() {
                Some(batch) => return batch,
                None => *now = *now + 1,
            }
        }
    };
    let (mut now, mut pauses) = (Millis(100), Vec::new());
    let mut first = next(&mut outbox, &mut now);
    for _ in 0..4 {
        assert!(matches!(outbox.answered(&first.id(), known(&first), now), Answered::Known { .. }));
        let second = next(&mut outbox, &mut now);
        let doubted = now;
        assert_eq!(outbox.answered(&second.id(), Some(Announced::StartAnew), now), Answered::Restarted);
        first = next(&mut outbox, &mut now);
        pauses.push(now.since(doubted));
    }
    assert!(pauses.is_sorted() && pauses[3] >= 4 * pauses[0], "{pauses:?}");
}

#[test]
fn in_another_life_a_node_tells_its_homes_everything_in_new_streams() {
    let (mut outbox, now) = settled(0..3);
    outbox.new_table(&table_of_one_home(2, &[(1, 10), (2, 21)]), NodeNumber(2), now);
    let anew = take(&mut outbox, now + 1_000);
    assert_eq!((anew.announce.incarnation, anew.announce.sequence), (21, 0));
    assert_eq!(told(&anew), [(0, true), (1, true), (2, true)]);
}
