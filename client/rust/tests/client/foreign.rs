//! Values of one session that are used with another, where their numbers name other things.

use std::time::Duration;

use larder_client::{FollowOptions, LookupOptions, Session, SessionError};
use larder_protocol::session::{Response, Wait};

use crate::fake_node::{BLOCK_BYTES, SLICES, chain, node, options, prefetching, reserved, spec};

fn refused<T>(result: Result<T, SessionError>) -> &'static str {
    match result {
        Err(SessionError::OtherSession { what }) => what,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was asked for"),
    }
}

#[test]
fn what_one_session_gave_is_refused_by_another_and_nothing_is_sent() {
    let (socket, giving) = node(|mut node| {
        node.open(2_000);
        node.answer_next(&reserved(21, [0]), Vec::new());
        node.answer_next(&prefetching(22), Vec::new());
        node.answer_next(&prefetching(23), Vec::new());
        node.answer_next(&Response::Following(24), Vec::new());
        while node.next().is_some() {}
    });
    let (other_socket, other) = node(|mut node| {
        node.open(2_000);
        assert_eq!(node.next(), None);
    });
    let own = Session::open(socket, options()).wait().unwrap();
    let namespace = own.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let chain = chain(1);
    let reservation = own.reserve(&namespace, &chain, 0).wait().unwrap();
    let [first, second] =
        [(); 2].map(|()| own.prefetch(&namespace, &chain, LookupOptions::default()).wait().unwrap());
    let following = || FollowOptions { writer: None, attempt: 0, patience: Duration::ZERO };
    let follow = own.follow(&namespace, &chain, following()).wait().unwrap();
    let staged = own.stage(&reservation, 0).wait().unwrap();
    let layers = own.stage_layers(&reservation, &[0], 0, 0..1).wait().unwrap();

    let session = Session::open(other_socket, options()).wait().unwrap();
    session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let of_namespace = [
        refused(session.lookup(&namespace, &chain, LookupOptions::default()).wait()),
        refused(session.lease(&namespace, &chain).wait()),
        refused(session.prefetch(&namespace, &chain, LookupOptions::default()).wait()),
        refused(session.pin(&namespace, &chain, Duration::ZERO).wait()),
        refused(session.reserve(&namespace, &chain, 0).wait()),
        refused(session.follow(&namespace, &chain, following()).wait()),
        refused(session.report_damage(&namespace, chain.hashes[0]).wait()),
    ];
    assert_eq!(of_namespace, ["namespace"; 7]);
    let of_reservation = [
        refused(session.stage(&reservation, 0).wait()),
        refused(session.stage_chunks(&reservation, &[0]).wait()),
        refused(session.stage_layers(&reservation, &[0], 0, 0..1).wait()),
        refused(session.commit(&reservation, vec![staged]).wait()),
        refused(session.commit_handed_over(&reservation, &[0]).wait()),
    ];
    assert_eq!(of_reservation, ["reservation"; 5]);
    assert_eq!(refused(session.hand_over(layers).wait()), "room for layers");
    assert_eq!(refused(session.progress(&first).wait()), "ticket");
    assert_eq!(refused(session.collect(second, Wait::Complete).wait()), "ticket");
    assert_eq!(refused(session.wait_for_layers(&follow, 1, Duration::MAX).wait()), "follow");
    drop((session, own, reservation, first, follow));
    other.join().unwrap();
    giving.join().unwrap();
}
