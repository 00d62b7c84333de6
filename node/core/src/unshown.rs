//! Answers that name memory which the shell cannot show to the session: no descriptor is left for the memory.
//!
//! An answer with places of extents that the engine does not know would end the session. The core takes such an answer back, and
//! the session is asked to wait. A later answer shows the extents.

use larder_protocol::handoff::InPlace;
use larder_protocol::session::{Reserved, Response, Scarce};

use crate::Core;
use crate::effect::Effect;
use crate::event::RequestId;
use crate::store::Refused;

/// A grant of an answer that names memory.
struct Granted<'a> {
    request: RequestId,
    given: Given,
    new_extents: &'a [u32],
}

enum Given {
    Lease(u64),
    Reservation(u64),
    /// The places of a follow, which goes on.
    Places(u64),
}

impl Core {
    /// Takes back an answer whose new extents could not be shown: gives back what the answer granted, and refuses the request.
    /// The session's answers that are still in the queue may name the same extents, so they are taken back too.
    pub fn cannot_show(&mut self, answer: Effect) {
        let Some(Granted { request: RequestId { session, .. }, .. }) = granted(&answer) else { return };
        let is_unshown =
            |effect: &Effect| granted(effect).is_some_and(|granted| granted.request.session == session);
        let queue = std::mem::take(&mut self.effects);
        let (unshown, others) = queue.into_iter().partition::<Vec<_>, _>(is_unshown);
        self.effects = others.into();
        for answer in std::iter::once(answer).chain(unshown) {
            self.take_back(&answer);
        }
    }

    fn take_back(&mut self, answer: &Effect) {
        let Some(Granted { request, given, new_extents }) = granted(answer) else { return };
        self.store.was_not_shown(request.session, new_extents);
        // An error: what was granted has ended meanwhile.
        let _ = match given {
            Given::Lease(lease) => self.store.release(request.session, lease),
            Given::Reservation(reservation) => self.store.withdraw(request.session, reservation),
            Given::Places(follow) => self.store.hide_followed(request.session, follow),
        };
        self.refuse(request, Err(NOTHING_TO_SHOW_WITH));
    }
}

fn granted(answer: &Effect) -> Option<Granted<'_>> {
    match *answer {
        Effect::Leased { request, ref leased }
            if !(leased.places.is_empty() && leased.new_extents.is_empty()) =>
        {
            Some(Granted { request, given: Given::Lease(leased.lease), new_extents: &leased.new_extents })
        }
        Effect::Answer { request, ref response, ref new_extents } => {
            let given = match response {
                Response::Reserved(Reserved { reservation, places, .. }) if !places.is_empty() => {
                    Given::Reservation(*reservation)
                }
                Response::InPlace(InPlace { leased: Some(leased), .. }) => Given::Places(leased.lease),
                _ => return None,
            };
            Some(Granted { request, given, new_extents })
        }
        _ => None,
    }
}

/// Descriptors are a matter of seconds: sessions end, or an operator raises the limit.
const NOTHING_TO_SHOW_WITH: Refused = Refused::Busy { what: Scarce::Memory, retry_after_ms: 1_000 };
