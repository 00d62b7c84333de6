//! Tests of follows for other nodes.

use super::*;

#[test]
fn a_peer_is_told_each_layer_then_the_commit_and_what_was_there_when_it_came() {
    let mut w = World::new();
    w.f.put("x");
    let written = w.reserve("a");
    w.hand_over(&written, 0, 1);
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let hashes = [name("a"), name("x"), name("y")];
    let follow = w.f.store.follow_for_peer(&fingerprint, (&hashes, &[]), 0, PATIENCE, NOW).unwrap();
    let told = tell(&mut w.f.store, follow);
    assert_eq!(told, [(0, "layers", 0), (1, "layers", 0), (1, "whole", 0)]);
    w.hand_over(&written, 1, LAYERS);
    let layer = BLOCK / u64::from(LAYERS);
    assert_eq!(tell(&mut w.f.store, follow), [(0, "layers", layer)]);
    w.commit(&written);
    assert_eq!(tell(&mut w.f.store, follow), [(0, "whole", 0)]);
    w.f.store.tick(Millis(1));
    w.f.store.tick(Millis(2 * PATIENCE));
    assert_eq!(tell(&mut w.f.store, follow), [(2, "lost", 0)]);
    w.f.store.end_grant(follow);
    w.assert_nothing_is_held();
}

#[test]
fn a_peer_hears_of_a_chunk_that_is_committed_from_the_window_all_at_once() {
    let mut w = World::new();
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let follow = w.f.store.follow_for_peer(&fingerprint, (&[name("a")], &[]), 0, PATIENCE, NOW).unwrap();
    assert_eq!(tell(&mut w.f.store, follow), []);
    w.f.put("a");
    assert_eq!(tell(&mut w.f.store, follow), [(0, "layers", 0), (0, "whole", 0)]);
    w.f.store.end_grant(follow);
    w.assert_nothing_is_held();
}

#[test]
fn a_peer_that_names_a_chunk_twice_hears_of_it_at_both_positions() {
    let mut w = World::new();
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let hashes = [name("a"); 2];
    let follow = w.f.store.follow_for_peer(&fingerprint, (&hashes, &[]), 0, PATIENCE, NOW).unwrap();
    let written = w.reserve("a");
    w.hand_over(&written, 0, LAYERS);
    assert_eq!(tell(&mut w.f.store, follow), [(0, "layers", 0), (1, "layers", 0)]);
    w.commit(&written);
    assert_eq!(tell(&mut w.f.store, follow), [(0, "whole", 0), (1, "whole", 0)]);
    w.f.store.end_grant(follow);
    w.assert_nothing_is_held();
}

#[test]
fn a_peer_keeps_the_slots_that_are_sent_to_it_when_the_writer_ends() {
    let mut w = World::new();
    let written = w.reserve("a");
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let follow = w.f.store.follow_for_peer(&fingerprint, (&[name("a")], &[]), 0, PATIENCE, NOW).unwrap();
    w.hand_over(&written, 0, 1);
    w.f.store.abort(w.f.session, written.reservation).unwrap();
    assert_eq!(tell(&mut w.f.store, follow), [(0, "layers", 0), (0, "lost", 0)]);
    assert_eq!(w.f.store.usage().bytes.quarantined, BLOCK);
    w.f.store.end_grant(follow);
    assert_eq!(w.f.store.usage().bytes.quarantined, 0);
    w.assert_nothing_is_held();
}

#[test]
fn what_peers_follow_is_bounded() {
    let mut w = World::new();
    let fingerprint = w.f.store.fingerprint(w.f.namespace).unwrap();
    let hashes: Vec<ChunkHash> = (0..16).map(|byte| ChunkHash([byte; 32])).collect();
    let first = w.f.store.follow_for_peer(&fingerprint, (&hashes, &[]), 0, PATIENCE, NOW).unwrap();
    assert_eq!(w.f.store.follow_for_peer(&fingerprint, (&hashes[..1], &[]), 0, PATIENCE, NOW), None);
    let other = larder_protocol::Fingerprint([9; 32]);
    let full = w.f.store.follow_for_peer(&other, (&hashes[..8], &[]), 0, PATIENCE, NOW).unwrap();
    w.f.put("x");
    let granted = w.f.store.grant(&fingerprint, &name("x"), &[BLOCK]);
    let Granted::Held { grant, .. } = granted else {
        panic!("follows keep no chunk from being lent: {granted:?}")
    };
    w.f.store.end_grant(grant);
    w.f.store.end_grant(full);
    w.f.store.end_grant(first);
    assert!(w.f.store.follow_for_peer(&fingerprint, (&hashes, &[]), 0, PATIENCE, NOW).is_some());
}

#[test]
fn a_tenant_with_many_namespaces_leaves_room_for_what_peers_follow_of_another_tenant() {
    let mut w = World::new();
    let hashes: Vec<ChunkHash> = (0..8).map(|byte| ChunkHash([byte; 32])).collect();
    let mut follow = |tenant: u16, model: String| {
        let spec = NamespaceSpec { model, ..spec() };
        let name = ["a", "b"][usize::from(tenant)];
        let session = w.f.store.open_session(TenantId(tenant), ProcessId(9), 1 << 20);
        w.f.store.register(session, name, &spec, &[0], &[BLOCK]).unwrap();
        w.f.store.follow_for_peer(&spec.fingerprint(name), (&hashes, &[]), 0, PATIENCE, NOW)
    };
    let follows: Vec<_> = (0..4).map_while(|number| follow(0, format!("m{number}"))).collect();
    assert_eq!(follows.len(), 2, "half of the places");
    let of_other = follow(1, "m0".to_owned());
    assert!(of_other.is_some());
    follows.into_iter().chain(of_other).for_each(|follow| w.f.store.end_grant(follow));
    w.assert_nothing_is_held();
}

/// The news for a peer: position, kind of news, and offset of the layers.
fn tell(store: &mut Store, follow: u64) -> Vec<(u32, &'static str, u64)> {
    let what = |told: FollowNews| {
        assert_eq!(told.follow, follow);
        match told.what {
            News::Layers(layers) => (told.position, "layers", layers.offset),
            News::Whole(_) => (told.position, "whole", 0),
            News::Lost => (told.position, "lost", 0),
        }
    };
    store.take_told().into_iter().map(what).collect()
}
