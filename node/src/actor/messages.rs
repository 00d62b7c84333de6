//! The messages that an actor takes, and its answers.

use std::os::fd::OwnedFd;

use actix::prelude::*;
use larder_core::lookups::Origin;
use larder_core::store::ids::SessionId;
use larder_net::trace::Trace;
use larder_protocol::session::{Request, Response};
use tokio::sync::mpsc;

use super::GpuActor;

/// The engine behind a session, for people.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// The name that it gave itself.
    pub name: String,
    /// Its process, if the system tells.
    pub pid: Option<u32>,
    /// Its name in the audit log.
    pub audited_as: String,
}

/// A session's request. It is taken when this message is answered; the request's own answer comes by [`Ask::reply_to`].
#[derive(Message)]
#[rtype(result = "()")]
pub struct Ask {
    /// The asking session.
    pub session: SessionId,
    /// The request.
    pub request: Request,
    /// The memory that comes along.
    pub descriptors: Vec<OwnedFd>,
    /// The channel for the answer.
    pub reply_to: ReplyTo,
    /// The trace of the request.
    pub trace: Trace,
    /// The engine's name of the request.
    pub origin: Origin,
}

/// The channel for all of a session's answers, in the order in which the actor makes them: an answer may speak of memory that
/// an earlier one brought. It holds at most one answer per unanswered request, and the session bounds those.
#[derive(Debug, Clone)]
pub struct ReplyTo {
    /// Number of the request.
    pub number: u64,
    /// The answers of the session.
    pub answers: mpsc::UnboundedSender<(u64, Answer)>,
}

/// An answer to a session, with its descriptors. `None` if a request has no answer.
#[derive(Debug)]
pub struct Answer {
    /// The message.
    pub response: Option<Response>,
    /// The memory that it speaks of for the first time.
    pub descriptors: Vec<OwnedFd>,
}

/// Has an actor do something. Answered with the result; `None` if a fault ended the actor's life meanwhile.
pub struct Errand<T>(Doing<T>);

type Doing<T> = Box<dyn FnOnce(&mut GpuActor, &mut Context<GpuActor>) -> T + Send>;

impl<T> Errand<T> {
    /// Has it do this.
    pub(crate) fn new(
        what: impl FnOnce(&mut GpuActor, &mut Context<GpuActor>) -> T + Send + 'static,
    ) -> Self {
        Self(Box::new(what))
    }
}

/// Asks an actor something that changes nothing in its core.
pub fn ask<T>(what: impl FnOnce(&mut GpuActor) -> T + Send + 'static) -> Errand<T> {
    Errand::new(|actor, _| what(actor))
}

impl<T: Send + 'static> Message for Errand<T> {
    type Result = Option<T>;
}

impl<T: Send + 'static> Handler<Errand<T>> for GpuActor {
    type Result = MessageResult<Errand<T>>;

    fn handle(&mut self, Errand(what): Errand<T>, ctx: &mut Self::Context) -> Self::Result {
        MessageResult(self.guard(ctx, what))
    }
}
