//! Tests of follows of chunks that are fetched: from other nodes, or from disk.

use super::*;

#[test]
fn what_comes_from_another_node_is_followed_too_and_room_is_taken_whole_or_not_at_all() {
    let mut w = World::with(shared_limits(3));
    let FollowStarted { follow, wanted } = w.start(w.reader, "abc", true, 0).unwrap();
    assert_eq!(wanted.len(), 3);
    assert!(
        matches!(w.start(w.reader, "xy", true, 0), Err(Refused::Busy { .. })),
        "there is no room for any more"
    );
    assert_eq!(w.f.store.usage().bytes.used, 3 * BLOCK);
    let layer = BLOCK / u64::from(LAYERS);
    for wanted in &wanted {
        w.f.store.layers_came(wanted.fetch, wanted.number, 0, 0, layer, 7);
    }
    assert_eq!(w.progress(follow), (3, 1, false));
    assert!(w.f.store.show_followed(w.reader, follow).unwrap().is_some());
    assert_eq!(w.f.found("abc"), 0, "nobody else sees it");
    for wanted in &wanted {
        w.f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::Gained));
    }
    assert_eq!(w.progress(follow), (3, LAYERS, true));
    assert_eq!(w.f.found("abc"), 3);
    w.assert_nothing_is_held();
}

#[test]
fn a_late_layer_of_an_earlier_fetch_of_the_chunk_is_refused() {
    let mut w = World::new();
    let first = w.start(w.reader, "a", true, 0).unwrap();
    w.f.store.fetched(first.wanted[0].fetch, None, None);
    w.f.store.release(w.reader, first.follow).unwrap();
    let second = w.start(w.reader, "a", true, 0).unwrap();
    let layer = BLOCK / u64::from(LAYERS);
    w.f.store.layers_came(first.wanted[0].fetch, first.wanted[0].number, 0, 0, layer, 7);
    assert_eq!(w.progress(second.follow), (1, 0, false));
    w.f.store.layers_came(second.wanted[0].fetch, second.wanted[0].number, 0, 0, layer, 7);
    assert_eq!(w.progress(second.follow), (1, 1, false));
    w.f.store.fetched(second.wanted[0].fetch, None, None);
    w.assert_nothing_is_held();
}

#[test]
fn a_fetch_that_fails_at_any_layer_loses_its_chunk_alone_and_those_behind_it() {
    for layers in 0..=u64::from(LAYERS) {
        let mut w = World::new();
        let FollowStarted { follow, wanted } = w.start(w.reader, "abc", true, 0).unwrap();
        let bytes = layers * BLOCK / u64::from(LAYERS);
        if bytes > 0 {
            wanted
                .iter()
                .for_each(|wanted| w.f.store.layers_came(wanted.fetch, wanted.number, 0, 0, bytes, 7));
        }
        w.f.store.show_followed(w.reader, follow).unwrap();
        w.f.store.fetched(wanted[1].fetch, None, None);
        assert_eq!(w.progress(follow), (1, layers as u32, false));
        w.f.store.fetched(wanted[0].fetch, Some(came()), Some(ChangeKind::Gained));
        assert_eq!(w.progress(follow), (1, LAYERS, true));
        w.f.store.fetched(wanted[2].fetch, None, None);
        w.assert_nothing_is_held();
    }
}

#[test]
fn a_fetched_chunk_that_was_purged_on_its_way_is_lost_to_its_followers() {
    let mut w = World::new();
    let FollowStarted { follow, wanted } = w.start(w.reader, "ab", true, 0).unwrap();
    w.f.purge(&PurgeScope::Tenant("a".to_owned()));
    for wanted in &wanted {
        w.f.store.fetched(wanted.fetch, Some(came()), Some(ChangeKind::Gained));
    }
    assert_eq!(w.progress(follow), (0, 0, true), "nothing more comes");
    w.assert_nothing_is_held();
}

#[test]
fn a_follower_whose_writer_has_not_begun_waits_on_when_the_fetch_of_another_fails() {
    let mut w = World::new();
    let waits = w.follow("a");
    let other = w.start(w.f.session, "a", true, 0).unwrap();
    w.f.store.fetched(other.wanted[0].fetch, None, None);
    assert_eq!(w.progress(waits), (1, 0, false));
    let reserved = w.reserve("a");
    w.hand_over(&reserved, 0, LAYERS);
    w.commit(&reserved);
    assert_eq!(w.progress(waits), (1, LAYERS, true));
    w.assert_nothing_is_held();
}

#[test]
fn a_followed_chunk_that_cannot_be_read_from_disk_is_lost_at_once() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteThrough,
        write_after_uses: 2,
        max_waiting_bytes: 4 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let limits = StoreLimits { disk: Some(disk), capacity_chunks: Some(1), ..shared_limits(8) };
    let mut w = World::with(limits);
    for word in ["a", "b"] {
        w.f.put(word);
        w.f.write_all();
    }
    let FollowStarted { follow, wanted } = w.start(w.reader, "a", false, 0).unwrap();
    assert_eq!(wanted[0].from, Source::Disk);
    w.f.store.fetched(wanted[0].fetch, None, None);
    assert_eq!(w.progress(follow), (0, 0, true));
}

#[test]
fn a_follow_that_ends_stops_the_fetches_that_nobody_else_waits_for() {
    let mut w = World::new();
    let first = w.start(w.reader, "ab", true, 0).unwrap();
    let second = w.start(w.f.session, "a", true, 0).unwrap();
    assert!(second.wanted.is_empty(), "it comes once");
    w.f.store.release(w.reader, first.follow).unwrap();
    assert_eq!(w.f.store.take_abandoned(), [first.wanted[1].fetch]);
    w.f.store.release(w.f.session, second.follow).unwrap();
    assert_eq!(w.f.store.take_abandoned(), [first.wanted[0].fetch]);
    first.wanted.iter().for_each(|wanted| drop(w.f.store.fetched(wanted.fetch, None, None)));
    w.assert_nothing_is_held();
}

#[test]
fn a_fetched_chunk_that_a_vanished_reader_was_shown_is_quarantined_when_it_comes() {
    let mut w = World::new();
    let FollowStarted { follow, wanted } = w.start(w.reader, "a", true, 0).unwrap();
    w.f.store.layers_came(wanted[0].fetch, wanted[0].number, 0, 0, BLOCK, 7);
    assert!(w.f.store.show_followed(w.reader, follow).unwrap().is_some());
    w.f.store.close_session(w.reader);
    w.f.store.fetched(wanted[0].fetch, Some(came()), Some(ChangeKind::Gained));
    assert_eq!(w.f.store.usage().bytes.quarantined, BLOCK);
    w.f.store.process_gone(ProcessId(1));
    assert_eq!(w.f.store.usage().bytes.quarantined, 0);
    w.assert_nothing_is_held();
}
