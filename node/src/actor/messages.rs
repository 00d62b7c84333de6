//! The messages that an actor takes, and its answers.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;

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
    /// The engine's name for itself.
    pub name: String,
    /// The engine's process, if the system tells.
    pub pid: Option<u32>,
    /// The engine's tenant.
    pub tenant: Arc<str>,
    /// The engine's name in the audit log.
    pub audited_as: String,
}

/// A session's request. The reply to this message means that the request was taken; its own answer comes by [`Ask::reply_to`].
#[derive(Message)]
#[rtype(result = "()")]
pub struct Ask {
    /// The asking session.
    pub session: SessionId,
    /// The request.
    pub request: Request,
    /// Descriptors of memory that came with the request.
    pub descriptors: Vec<OwnedFd>,
    /// The channel for the answer.
    pub reply_to: ReplyTo,
    /// The trace of the request.
    pub trace: Trace,
    /// The engine's name for the request.
    pub origin: Origin,
}

/// The channel for all of a session's answers, in the order in which the actor makes them: an answer may refer to memory that
/// an earlier answer brought. The channel holds at most one answer for each open request, and the session bounds open requests.
#[derive(Debug, Clone)]
pub struct ReplyTo {
    /// Number of the request.
    pub number: u64,
    /// The answers of the session.
    pub answers: mpsc::UnboundedSender<(u64, Answer)>,
    /// Dropped when the request has been answered, or never will be, if the request copies out of the session's window.
    pub copies: Option<mpsc::Sender<Infallible>>,
}

/// An answer to a session, with its descriptors.
#[derive(Debug)]
pub struct Answer {
    /// The message; `None` if the request gets no answer.
    pub response: Option<Response>,
    /// Descriptors of the memory that the message mentions for the first time.
    pub descriptors: Vec<OwnedFd>,
}

/// Runs a closure in an actor. The reply is the closure's result, or `None` if a fault ended the actor's life meanwhile.
pub struct Errand<T>(Doing<T>);

type Doing<T> = Box<dyn FnOnce(&mut GpuActor, &mut Context<GpuActor>) -> T + Send>;

impl<T> Errand<T> {
    /// An errand that runs `what`.
    pub(crate) fn new(
        what: impl FnOnce(&mut GpuActor, &mut Context<GpuActor>) -> T + Send + 'static,
    ) -> Self {
        Self(Box::new(what))
    }
}

/// An errand that changes nothing in the actor's core.
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
