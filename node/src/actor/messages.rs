//! The messages that an actor takes, and its answers.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use larder_core::Event;
use larder_core::lookups::Origin;
use larder_core::store::ids::SessionId;
use larder_net::trace::Trace;
use larder_protocol::session::{Request, Response};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::GpuActor;
use crate::exchange::Tell;

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

/// Tells each of these actors its event, all at once. Returns whether all have heard it: an actor that hangs is waited for a
/// moment only, and hears it later.
pub async fn tell_each<'a, A>(told: impl IntoIterator<Item = (&'a Addr<A>, Event)>) -> bool
where
    A: Actor<Context = Context<A>> + Handler<Tell>,
{
    let told = told.into_iter().map(|(actor, event)| {
        // An actor passes over a message whose sender is gone, so the sender waits beside.
        let told = actor.send(Tell(event));
        // An error: the actor is stopping.
        actix_rt::spawn(async { _ = told.await })
    });
    let has_heard = timeout(HANGS_AFTER, join_all(told)).await.is_ok();
    if !has_heard {
        tracing::error!("an actor does not answer: it hears of a change when it does");
    }
    has_heard
}

/// The silence after which an actor counts as hanging: others go on without it. No step of an actor takes that long.
pub(crate) const HANGS_AFTER: Duration = Duration::from_secs(5);

impl<T: Send + 'static> Message for Errand<T> {
    type Result = Option<T>;
}

impl<T: Send + 'static> Handler<Errand<T>> for GpuActor {
    type Result = MessageResult<Errand<T>>;

    fn handle(&mut self, Errand(what): Errand<T>, ctx: &mut Self::Context) -> Self::Result {
        MessageResult(self.guard(ctx, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands on what it hears, and hangs until the other end takes it.
    struct Hangs(std::sync::mpsc::SyncSender<Event>);

    impl Actor for Hangs {
        type Context = Context<Self>;
    }

    impl Handler<Tell> for Hangs {
        type Result = ();

        fn handle(&mut self, Tell(event): Tell, _: &mut Self::Context) {
            self.0.send(event).unwrap();
        }
    }

    #[actix::test]
    async fn an_actor_that_hangs_keeps_news_from_no_other_is_not_waited_for_and_hears_all_later() {
        let start = || {
            let (heard, hears) = std::sync::mpsc::sync_channel(0);
            let arbiter = Arbiter::new();
            (Hangs::start_in_arbiter(&arbiter.handle(), |_| Hangs(heard)), hears, arbiter)
        };
        let ((hangs, late, _first), (other, hears, _second)) = (start(), start());
        let heard = std::thread::spawn(move || hears.into_iter().take(2).count());
        tokio::time::pause();
        let events: [fn() -> Event; 2] = [|| Event::Tick, || Event::Alarm];
        for event in events {
            assert!(!tell_each([(&hangs, event()), (&other, event())]).await);
        }
        tokio::time::resume();
        let late = std::thread::spawn(move || late.into_iter().take(2).collect::<Vec<_>>());
        while !late.is_finished() || !heard.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(matches!(late.join().unwrap()[..], [Event::Tick, Event::Alarm]));
        assert_eq!(heard.join().unwrap(), 2);
    }
}
