//! Requests of sessions. Each is answered once, by an effect that repeats its number.

use larder_protocol::session::{Lookup, Pin, Request, Reserve, Reserved, Response};

use crate::Core;
use crate::cause::Cause;
use crate::effect::Effect;
use crate::event::RequestId;
use crate::store::Refused;

impl Core {
    /// Answers a request, or begins the work before its answer.
    pub(crate) fn asked(&mut self, request: RequestId, ask: Request, cause: Cause) -> Result<(), Refused> {
        let response = match ask {
            Request::Lookup(ask) => return self.lookup(request, with_each_tier_once(ask), cause),
            Request::Lease(ask) => return self.lease(request, ask, cause),
            Request::Prefetch(ask) => return self.prefetch(request, with_each_tier_once(ask), cause),
            Request::Collect(ask) => return self.collect(request, ask),
            Request::Reserve(ask) => return self.reserve(request, &ask),
            Request::Commit(ask) => return self.commit(request, &ask),
            Request::HandOver(ask) => return self.hand_over(request, &ask),
            Request::Follow(ask) => return self.follow(request, ask),
            Request::AskInPlace(ask) => return self.ask_in_place(request, ask),
            Request::ReportDamage(ask) => return self.report_damage(request, &ask),
            Request::LoadPages(ask) => return self.load_pages(request, ask),
            Request::SavePages(ask) => return self.save_pages(request, ask),
            Request::AskCopy(ask) => return self.ask_copy(request, ask),
            Request::ForgetCopy(copy) => {
                self.forget_copy(request.session, copy);
                return self.done(request);
            }
            Request::Observe => {
                self.store.observe(request.session)?;
                return self.done(request);
            }
            Request::Cancel(ticket) => {
                self.cancel(request.session, ticket);
                return self.done(request);
            }
            Request::Release(lease) => {
                self.store.release(request.session, lease)?;
                return self.done(request);
            }
            Request::Register(ask) => {
                let registered = self.register(request.session, &ask.spec, &ask.slices, &ask.block_bytes)?;
                Response::Registered(registered)
            }
            Request::Abort(reservation) => {
                self.store.abort(request.session, reservation)?;
                Response::Aborted
            }
            Request::Pin(Pin { namespace, ref chain, duration_ms }) => {
                let now = self.millis();
                Response::Pinned(self.store.pin(request.session, namespace, chain, duration_ms, now)?)
            }
            Request::Unpin(pin) => {
                self.store.unpin(request.session, pin)?;
                Response::Unpinned
            }
            Request::Progress(ticket) => Response::Progress(self.progress(request.session, ticket)?),
            Request::Hello(_)
            | Request::Trace(_)
            | Request::Name(_)
            | Request::Describe(_)
            | Request::RegisterTensors(_) => {
                return Err(Refused::OutOfOrder);
            }
        };
        self.answer(request, response);
        Ok(())
    }

    fn reserve(&mut self, request: RequestId, ask: &Reserve) -> Result<(), Refused> {
        let now = self.millis();
        let Reserve { namespace, ref chain, ref pools, priority, attempt } = *ask;
        if self.is_draining() {
            self.store.find(request.session, namespace, chain)?;
            let nothing = Reserved {
                reservation: 0,
                chunks: Vec::new(),
                pools: Vec::new(),
                places: Vec::new(),
                deadline_ms: 0,
                extents: Vec::new(),
            };
            self.answer(request, Response::Reserved(nothing));
            return Ok(());
        }
        let reserved =
            self.store.reserve_attempt(request.session, namespace, chain, pools, priority, attempt, now)?;
        let response = Response::Reserved(Reserved {
            reservation: reserved.reservation,
            chunks: reserved.chunks,
            pools: reserved.pools,
            places: if self.store.trusts_engines() { reserved.places } else { Vec::new() },
            deadline_ms: reserved.deadline.since(now),
            extents: Vec::new(),
        });
        self.effects.push_back(Effect::Answer { request, response, new_extents: reserved.new_extents });
        Ok(())
    }

    pub(crate) fn answer(&mut self, request: RequestId, response: Response) {
        self.effects.push_back(Effect::Answer { request, response, new_extents: Vec::new() });
    }

    pub(crate) fn done(&mut self, request: RequestId) -> Result<(), Refused> {
        self.effects.push_back(Effect::Done { request });
        Ok(())
    }
}

/// The same lookup, with a list of tiers that is short: it is searched for each chunk.
fn with_each_tier_once(mut ask: Lookup) -> Lookup {
    let mut named = Vec::new();
    ask.tiers.retain(|tier| {
        let is_new = !named.contains(tier);
        if is_new {
            named.push(*tier);
        }
        is_new
    });
    ask
}
