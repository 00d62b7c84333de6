//! One message together with the meaning of its answer.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::session::{Busy, Collect, Request, Response, Wait};
use tokio::sync::oneshot;

use super::Link;
use crate::error::SessionError;
use crate::options::bounded;

/// A request, and the way in which its answer becomes a result.
///
/// A dropped result gives back what it grants, so an answer that nobody waits for leaks nothing.
pub(crate) struct RoundTrip<T> {
    pub(crate) request: Request,
    /// Descriptors that go along with the request.
    pub(crate) descriptors: Vec<OwnedFd>,
    pub(crate) deliver: Deliver,
    pub(crate) answer: Answer<T>,
}

/// Hands the answer to its waiter. Returns whether the session can go on.
pub(crate) type Deliver = Box<dyn FnOnce(&Arc<Link>, Response, Vec<OwnedFd>) -> bool + Send>;

/// The result of a request, once it has come. If the channel closes without a result, the session has ended.
pub(crate) type Answer<T> = oneshot::Receiver<Result<OnTheWay<T>, SessionError>>;

/// A result whose pin, if it has one, ends unless somebody keeps it.
pub(crate) struct OnTheWay<T> {
    result: T,
    pin: Option<PinOnTheWay>,
}

struct PinOnTheWay {
    link: Arc<Link>,
    /// The pin's number; 0 if the caller keeps the pin.
    pin: u64,
}

impl<T> RoundTrip<T> {
    /// How long the answer may take in a session with this timeout: longer if the request asks the node to wait.
    pub(crate) fn answered_within(&self, timeout: Duration) -> Duration {
        let wait = match self.request {
            Request::Collect(Collect { wait: Wait::TimeoutMs(wait_ms), .. }) => {
                Duration::from_millis(wait_ms)
            }
            Request::Collect(Collect { wait: Wait::Complete, .. }) => timeout,
            _ => Duration::ZERO,
        };
        bounded(timeout.saturating_add(wait))
    }
}

impl<T: Send + 'static> RoundTrip<T> {
    /// `accept` makes the result from any answer other than `Busy` and `Refused`.
    pub(crate) fn new(
        request: Request,
        accept: impl FnOnce(&Arc<Link>, Response, Vec<OwnedFd>) -> Result<T, SessionError> + Send + 'static,
    ) -> Self {
        Self::pinning(request, |_| 0, accept)
    }

    /// As [`RoundTrip::new`], for a result with a pin. `pin` finds the pin's number in the result: 0 if there is no pin.
    pub(crate) fn pinning(
        request: Request,
        pin: fn(&T) -> u64,
        accept: impl FnOnce(&Arc<Link>, Response, Vec<OwnedFd>) -> Result<T, SessionError> + Send + 'static,
    ) -> Self {
        let (reply, answer) = oneshot::channel();
        let deliver: Deliver = Box::new(move |link, response, descriptors| {
            let result = granted(response).and_then(|response| accept(link, response, descriptors));
            let fatal = result.as_ref().err().filter(|error| error.is_fatal());
            if let Some(error) = fatal {
                tracing::warn!(%error, node = link.welcome.node, "the session with the node ends with an error");
            }
            let goes_on = fatal.is_none();
            let result = result.map(|result| OnTheWay::new(link, pin(&result), result));
            // If nobody waits any more, the result comes back, and dropping it gives back what it grants.
            drop(reply.send(result));
            goes_on
        });
        Self { request, descriptors: Vec::new(), deliver, answer }
    }
}

impl<T> OnTheWay<T> {
    fn new(link: &Arc<Link>, pin: u64, result: T) -> Self {
        let pin = (pin != 0).then(|| PinOnTheWay { link: Arc::clone(link), pin });
        Self { result, pin }
    }

    /// The result; its pin is the caller's from now on.
    pub(crate) fn keep(self) -> T {
        let Self { result, pin } = self;
        if let Some(mut pin) = pin {
            pin.pin = 0;
        }
        result
    }
}

impl Drop for PinOnTheWay {
    fn drop(&mut self) {
        if self.pin != 0 {
            self.link.give_back(Request::Unpin(self.pin));
        }
    }
}

/// Turns `Busy` and `Refused`, which any request may get, into errors.
pub(crate) fn granted(response: Response) -> Result<Response, SessionError> {
    match response {
        Response::Busy(Busy { what, retry_after_ms }) => {
            Err(SessionError::Busy { what, retry_after: Duration::from_millis(retry_after_ms) })
        }
        Response::Refused(refusal) => Err(SessionError::Refused(refusal)),
        response => Ok(response),
    }
}
