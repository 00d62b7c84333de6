//! A request as a value.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::SessionError;
use crate::link::round_trip::RoundTrip;
use crate::link::{Link, within};
use crate::opening::Opening;
use crate::options::bounded;
use crate::origin::Origin;
use crate::window::{Window, WindowRange};

/// A request of a session: await it in a task, or [wait](Call::wait) for it on a thread. Until then nothing is sent.
///
/// `.await` needs a tokio runtime with IO and time enabled; one thread is enough. The first awaited call starts a task on the
/// runtime that receives the session's answers: the session ends with this runtime. Many calls may be awaited at the same time.
///
/// `.wait()` needs no runtime. The thread sends the request and receives until the answer is here. Threads take turns:
/// a second thread waits for its turn, then sends its request, and the request's timeout starts.
///
/// Tasks and threads may use the same session.
///
/// Cancel safe: a call that is dropped before it was begun does nothing. A call that is dropped while it is awaited may have sent
/// its request; a lease or other grant in a late answer is given back. The method that makes a call says what else the request
/// may have done.
#[must_use = "a call asks for nothing until it is awaited or waited for"]
pub struct Call<T>(Work<T>);

/// The state of a call in a task.
pub type CallFuture<T> = Pin<Box<dyn Future<Output = Result<T, SessionError>> + Send>>;

#[expect(
    clippy::large_enum_variant,
    reason = "nearly all calls ask, and a box would cost each of them an allocation"
)]
enum Work<T> {
    Open(Opening, fn(Arc<Link>) -> T),
    Ask {
        link: Arc<Link>,
        origin: Origin,
        step: Step<T>,
        /// Decides what follows an answer; without it the answer is the result.
        then: Option<Then<T>>,
    },
}

/// The next step of a call.
pub(crate) enum Step<T> {
    Done(Result<T, SessionError>),
    Ask(RoundTrip<T>),
    TakeRoom(RoomFor<T>),
}

type Then<T> = Box<dyn FnMut(T) -> Step<T> + Send>;

/// Room in the write window that a value needs.
pub(crate) struct RoomFor<T> {
    pub(crate) window: Arc<Window>,
    /// The bytes of each piece.
    pub(crate) sizes: Vec<u64>,
    pub(crate) value: T,
    pub(crate) give: fn(&mut T, Vec<WindowRange>),
}

impl<T: Send + 'static> Call<T> {
    /// Waits for the result on this thread.
    ///
    /// # Errors
    /// The errors of the method that made the call; `Timeout`.
    pub fn wait(self) -> Result<T, SessionError> {
        let (link, origin, mut step, mut then) = match self.0 {
            Work::Open(opening, done) => return opening.wait().map(done),
            Work::Ask { link, origin, step, then } => (link, origin, step, then),
        };
        loop {
            let value = match step {
                Step::Done(result) => return result,
                Step::Ask(round_trip) => link.ask_on_this_thread(round_trip, origin.clone())?,
                Step::TakeRoom(RoomFor { window, sizes, mut value, give }) => {
                    give(&mut value, link.take_room_on_this_thread(&window, &sizes)?);
                    value
                }
            };
            match &mut then {
                Some(then) => step = then(value),
                None => return Ok(value),
            }
        }
    }

    async fn run(self) -> Result<T, SessionError> {
        let (link, origin, mut step, mut then) = match self.0 {
            Work::Open(opening, done) => return opening.run().await.map(done),
            Work::Ask { link, origin, step, then } => (link, origin, step, then),
        };
        loop {
            let value = match step {
                Step::Done(result) => return result,
                Step::Ask(round_trip) => link.ask(round_trip, origin.clone()).await?,
                Step::TakeRoom(RoomFor { window, sizes, mut value, give }) => {
                    let ranges = async { window.take(&sizes).await.ok_or_else(|| link.closed()) };
                    give(&mut value, within(link.timeout, ranges).await?);
                    value
                }
            };
            match &mut then {
                Some(then) => step = then(value),
                None => return Ok(value),
            }
        }
    }

    /// Opens a session. `done` makes the session from its link.
    pub(crate) fn open(opening: Opening, done: fn(Arc<Link>) -> T) -> Self {
        Self(Work::Open(opening, done))
    }

    pub(crate) fn new(link: &Arc<Link>, origin: Origin, step: Step<T>) -> Self {
        Self(Work::Ask { link: Arc::clone(link), origin, step, then: None })
    }

    /// The same call, after a check that may fail it.
    pub(crate) fn checked<E: Into<SessionError>>(mut self, check: Result<(), E>) -> Self {
        if let (Work::Ask { step, .. }, Err(error)) = (&mut self.0, check) {
            *step = Step::Done(Err(error.into()));
        }
        self
    }

    /// The same call; `then` decides what to do after each answer.
    pub(crate) fn then(mut self, decide: impl FnMut(T) -> Step<T> + Send + 'static) -> Self {
        if let Work::Ask { then, step: Step::Ask(_), .. } = &mut self.0 {
            *then = Some(Box::new(decide));
        }
        self
    }

    /// Asks for news until `known` finds the result in the news that came, or `patience` has passed. `ask` gets the time for
    /// which the node may wait for news.
    pub(crate) fn until(
        link: &Arc<Link>,
        origin: Origin,
        patience: Duration,
        known: impl Fn() -> Option<T> + Send + 'static,
        ask: impl Fn(Duration) -> RoundTrip<T> + Send + 'static,
    ) -> Self {
        let (until, longest) = (Instant::now() + bounded(patience), link.timeout / 4);
        let mut is_last = false;
        let mut next = move |news: Option<T>| {
            if let Some(news) = known().or(news.filter(|_| is_last)) {
                return Step::Done(Ok(news));
            }
            let left = until.saturating_duration_since(Instant::now());
            is_last = left.is_zero();
            Step::Ask(ask(left.min(longest)))
        };
        let first = next(None);
        Self::new(link, origin, first).then(move |news| next(Some(news)))
    }
}

impl<T: Send + 'static> IntoFuture for Call<T> {
    type Output = Result<T, SessionError>;
    type IntoFuture = CallFuture<T>;

    fn into_future(self) -> CallFuture<T> {
        Box::pin(self.run())
    }
}
