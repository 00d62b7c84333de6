//! The store's results as messages of the protocol.

use std::time::Duration;

use larder_core::Counted;
use larder_core::store::ids::SessionId;
use larder_core::store::{self, Refused};
use larder_net::trace::Trace;
use larder_protocol::handoff::InPlace;
use larder_protocol::session::{Leased, Pinned, Reserved, Response};

use super::{Answer, GpuActor, ReplyTo};
use crate::hands::Shown;
use crate::metrics::Outcome;
use crate::spans::describe_answer;

/// A request under way.
#[derive(Debug, Clone)]
pub(super) struct PendingRequest {
    pub(super) request: &'static str,
    pub(super) reply_to: ReplyTo,
    pub(super) trace: Trace,
    pub(super) started: Duration,
}

impl GpuActor {
    /// Answers a request. A session that ended needs no answer: its end releases what it held.
    pub(super) fn reply(&mut self, asked: PendingRequest, answer: Answer) {
        let PendingRequest { request, reply_to: ReplyTo { number, answers, .. }, trace, started } = asked;
        let outcome = Outcome::of(answer.response.as_ref());
        if trace.is_recorded() {
            describe_answer(&trace, outcome, answer.response.as_ref());
        }
        self.hands.metrics.requested(request, outcome, (self.hands.clock.elapsed() - started).as_secs_f64());
        if answers.send((number, answer)).is_err() {
            tracing::debug!(request, "the session ended before its answer");
        }
    }

    /// Notes in the audit log that an engine pinned or unpinned chunks, whether the engine hears the answer or not.
    pub(super) fn note_pin(&self, session: SessionId, request: &'static str, answer: &Answer) {
        let what = match &answer.response {
            Some(Response::Pinned(Pinned { pin, chunks, duration_ms })) => {
                format!("pin {pin}: {chunks} chunks for {duration_ms} ms")
            }
            _ => String::new(),
        };
        let outcome = Outcome::of(answer.response.as_ref());
        let done = if outcome == Outcome::Done { Ok(()) } else { Err(outcome.name()) };
        let client = self.engines.get(&session).map(|engine| &engine.client);
        let by = client.map_or(("", ""), |client| (&client.tenant, &client.audited_as));
        self.hands.audit.note_of_engine(by, request, &what, done);
    }

    /// An answer with places, and with the descriptors of extents that the session sees for the first time.
    pub(super) fn show_answer(mut response: Response, (shown, descriptors): Shown) -> Answer {
        match &mut response {
            Response::Reserved(Reserved { extents, .. })
            | Response::InPlace(InPlace { leased: Some(Leased { extents, .. }), .. }) => *extents = shown,
            _ => {}
        }
        Answer { response: Some(response), descriptors }
    }

    /// A lease's answer, with the places.
    pub(super) fn show_lease(&self, leased: store::Leased, (extents, descriptors): Shown) -> Answer {
        self.hands.metrics.count(&Counted::Leased(leased.bytes));
        let response = Response::Leased(Leased {
            lease: leased.lease,
            chunks: leased.chunks,
            places: leased.places,
            checksums: leased.checksums,
            extents,
        });
        Answer { response: Some(response), descriptors }
    }
}

impl From<Response> for Answer {
    fn from(response: Response) -> Self {
        Self { response: Some(response), descriptors: Vec::new() }
    }
}

impl From<Refused> for Answer {
    fn from(refused: Refused) -> Self {
        Self::from(Response::from(refused))
    }
}
