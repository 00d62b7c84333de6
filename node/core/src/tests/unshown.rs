//! Tests of answers whose memory cannot be shown: what they granted is given back, and a later answer shows the memory.

use larder_protocol::session::{Reserve, Reserved, Scarce};

use super::copies::ALONE;
use super::*;

impl World {
    /// Takes the next effect, a lease that the shell cannot show.
    fn cannot_show(&mut self) {
        let answer = self.next();
        assert!(matches!(answer, Effect::Leased { .. } | Effect::Answer { .. }), "{answer:?}");
        self.core.cannot_show(answer);
    }

    fn must_wait(&mut self, request: RequestId) {
        assert!(matches!(self.refused(request), Refused::Busy { what: Scarce::Memory, .. }));
    }

    fn reserve_later(&mut self, word: &str) -> RequestId {
        let (namespace, chain) = (self.namespace, self.chain(word));
        let ask = Reserve { namespace, chain, pools: Vec::new(), priority: 0, attempt: 0 };
        self.asks(self.session, Request::Reserve(ask))
    }
}

#[test]
fn a_lease_that_cannot_be_shown_is_given_back_and_the_next_one_shows_its_extents() {
    let mut w = World::new(ALONE);
    w.put("ab");
    let request = w.lease("ab");
    w.cannot_show();
    w.must_wait(request);
    let usage = w.core.store.usage();
    assert_eq!((usage.leases, w.core.store.session_facts().next().unwrap().leased_blocks), (0, 0));
    let again = w.lease("ab");
    let leased = w.leased(again);
    assert_eq!((leased.chunks, leased.new_extents.is_empty()), (2, false));
    let once_more = w.lease("ab");
    assert!(w.leased(once_more).new_extents.is_empty(), "the session has them now");
}

#[test]
fn answers_that_rely_on_the_extents_of_an_answer_that_cannot_be_shown_are_taken_back_too() {
    let mut w = World::new(ALONE);
    w.put("ab");
    let other = w.other_session();
    let (first, second) = (w.lease("ab"), w.lease("a"));
    let (namespace, chain) = (w.namespace, w.chain("a"));
    let of_other = w.asks(other, Request::Lease(Lease { namespace, chain }));
    w.cannot_show();
    assert!(!w.leased(of_other).new_extents.is_empty(), "another session was shown its extents");
    w.must_wait(first);
    w.must_wait(second);
    let again = w.lease("a");
    assert!(!w.leased(again).new_extents.is_empty());
}

#[test]
fn the_slots_of_a_reservation_that_cannot_be_shown_are_free_at_once() {
    let mut w = World::with(StoreLimits { trust_engines: true, disk: None, ..limits() }, ALONE);
    let free = w.core.store.usage().bytes;
    let request = w.reserve_later("ab");
    w.cannot_show();
    w.must_wait(request);
    assert_eq!(w.core.store.usage().reservations, 0);
    let unshown = w.core.store.usage().bytes;
    assert_eq!((unshown.quarantined, unshown.used), (free.quarantined, free.used));
    w.reserve_later("ab");
    let Effect::Answer { response: Response::Reserved(Reserved { places, .. }), new_extents, .. } = w.next()
    else {
        panic!("a reservation");
    };
    assert_eq!((places.len(), new_extents.is_empty()), (2, false));
}
