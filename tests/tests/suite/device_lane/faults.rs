//! The results of copies that fail, stall or lose their device, and of processes that die during copies.

use super::*;

#[test]
fn a_save_that_fails_commits_nothing_and_gives_its_room_back() {
    let node = Node::start();
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 3);
    // Far more copies than the arena has room for at a time.
    for after in 0..800 {
        node.controls[0].fail_next(Fault::Fail { after: after % 24 });
        assert_eq!(gpu.put(&hashes), CopyEnd::Failed);
    }
    node.controls[0].fail_next(Fault::Refuse);
    assert_eq!(gpu.put(&hashes), CopyEnd::Refused);
    assert_eq!(gpu.get_from_arena(&hashes), 0);
    assert_eq!(gpu.put(&hashes), CopyEnd::Done);
    assert_eq!(gpu.get_from_arena(&hashes), 3);
}

#[test]
fn a_save_that_stalls_is_no_hit_though_it_ends_well_at_last() {
    let node = Node::patient(Duration::from_millis(100));
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 3);
    // The report of the copy comes long after its end.
    node.controls[0].be_late(1_000);
    assert_eq!(gpu.put(&hashes), CopyEnd::Stalled);
    node.controls[0].be_late(0);
    node.wait_for("device_copies", 0);
    node.wait_for("quarantined_bytes", 0);
    assert_eq!(gpu.get_from_arena(&hashes), 0);
    node.wait_for("used_bytes", 0);
}

#[test]
fn a_gpu_that_hangs_keeps_nobody_but_its_own_copies() {
    let node = Node::patient(Duration::from_millis(200));
    let (gpu, sibling) = (node.engine(0), node.engine(1));
    let hashes = prompt(b'a', 4);
    gpu.put_by_window(&hashes);
    node.controls[0].hold_calls();
    let copies: Vec<NodeCopy> = (0..4).map(|_| gpu.load(&hashes, NO_FLAGS).unwrap()).collect();
    node.controls[0].wait_until_held();
    for copy in &copies {
        assert_eq!(gpu.end(copy), CopyEnd::Stalled, "whoever asked hears of it");
    }
    assert_eq!(node.get("/healthz"), "ok\n");
    assert_eq!(node.get("/readyz"), "ok\n");
    assert_eq!(sibling.put(&prompt(b'b', 4)), CopyEnd::Done, "another GPU goes on");
    gpu.put_by_window(&prompt(b'c', 4));
    assert_eq!(gpu.get_from_arena(&prompt(b'c', 4)), 4, "and so does what its own actor does without it");
    assert_eq!(sibling.get_from_arena(&prompt(b'c', 4)), 4, "what it holds is copied to others");
    assert!(node.status(0, "quarantined_bytes") >= 4 * BLOCK_BYTES as u64);
    node.controls[0].release_calls();
    node.wait_for("device_copies", 0);
    node.wait_for("quarantined_bytes", 0);
}

#[test]
fn a_session_has_a_bounded_number_of_copies_and_is_busy_beyond_it() {
    let node = Node::start();
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 1);
    gpu.put_by_window(&hashes);
    let waiting = CopyFlags { after: Some((0, 1)), then: None };
    let copies: Vec<NodeCopy> = (0..16).map(|_| gpu.load(&hashes, waiting).unwrap()).collect();
    let busy = gpu.load(&hashes, waiting);
    assert!(matches!(busy, Err(SessionError::Busy { what: Scarce::Copies, .. })), "{busy:?}");
    assert_eq!(node.engine(0).put(&prompt(b'b', 2)), CopyEnd::Done, "another session is not");
    drop(copies);
    node.wait_for("device_copies", 0);
    let copy = gpu.load(&hashes, NO_FLAGS).unwrap();
    assert_eq!(gpu.end(&copy), CopyEnd::Done, "those that were given up before they began make room");
}

#[test]
fn a_process_that_dies_under_its_copies_leaves_what_they_touch_quarantined_until_the_gpu_lets_go() {
    for (deed, chunks) in [("load by gpu", 2), ("save by gpu", 2)] {
        let node = Node::start();
        // The engine process has the namespace of one layer, so it finds what it stores itself.
        node.controls[0].fail_next(Fault::Stall { after: 1 });
        let dying = EngineProcess::start(ENGINE, &node.socket, deed).unwrap();
        node.wait_for("device_copies", 1);
        dying.kill().unwrap();
        node.wait_for("sessions", 0);
        node.wait_for("lingering_processes", 0);
        node.wait_for("quarantined_bytes", chunks * BLOCK_BYTES as u64);
        assert_eq!((node.status(0, "leases"), node.status(0, "reservations")), (0, 0), "{deed}");
        let gpu = node.engine(0);
        assert_eq!(gpu.put(&prompt(b'z', 3)), CopyEnd::Done, "the others go on");
        assert_eq!(node.status(0, "quarantined_bytes"), chunks * BLOCK_BYTES as u64, "{deed}");
        node.controls[0].fail_next(Fault::Lose { after: 0 });
        assert_eq!(gpu.end(&gpu.load(&prompt(b'z', 3), NO_FLAGS).unwrap()), CopyEnd::Lost);
        node.wait_for("quarantined_bytes", 0);
        node.wait_for("device_copies", 0);
    }
}

#[test]
fn a_gpu_that_was_lost_is_opened_again_when_its_tensors_are_registered_again() {
    let node = Node::start();
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 2);
    assert_eq!(gpu.put(&hashes), CopyEnd::Done);
    node.controls[0].fail_next(Fault::Lose { after: 3 });
    assert_eq!(gpu.end(&gpu.load(&hashes, NO_FLAGS).unwrap()), CopyEnd::Lost);
    assert_eq!(refused_as(gpu.load(&hashes, NO_FLAGS)), RefusalCode::Unknown, "its tensors are gone");
    wait::until("the device is gone", || (node.controls[0].gone() == 1).then_some(()));
    let again = node.engine(0);
    let copy = again.load(&hashes, NO_FLAGS).unwrap();
    assert_eq!(again.end(&copy), CopyEnd::Done);
    assert!(again.has(1, &hashes[1], 0..SHAPE.layers));
}

#[test]
fn a_gpu_that_cannot_be_given_up_keeps_what_it_touched_for_ever() {
    let node = Node::start();
    let gpu = node.engine(0);
    gpu.put_by_window(&prompt(b'a', 2));
    node.controls[0].cling();
    node.controls[0].fail_next(Fault::Lose { after: 1 });
    assert_eq!(gpu.end(&gpu.load(&prompt(b'a', 2), NO_FLAGS).unwrap()), CopyEnd::Lost);
    drop(gpu);
    node.wait_for("sessions", 0);
    node.wait_for("quarantined_bytes", 2 * BLOCK_BYTES as u64);
    assert_eq!(node.get("/healthz"), "ok\n");
}
