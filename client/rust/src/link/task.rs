//! Calls that tasks await, and the task that receives their answers.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError, Weak};

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::round_trip::RoundTrip;
use super::{Link, within};
use crate::error::SessionError;
use crate::origin::Origin;

/// Closes the session when its task ends, in whatever way.
struct CloseAtEnd(Weak<Link>);

impl Link {
    /// Sends a request and waits for its result. While as many requests are outstanding as the node allows, it first waits for one
    /// of them, for the session's timeout at most; the request's own timeout starts when it is sent.
    ///
    /// Cancel safe: what a late answer grants is given back.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        round_trip: RoundTrip<T>,
        origin: Origin,
    ) -> Result<T, SessionError> {
        self.start_task()?;
        let timeout = round_trip.answered_within(self.timeout);
        let permit = async { Arc::clone(&self.callers).acquire_owned().await.map_err(|_| self.closed()) };
        let permit = within(self.timeout, permit).await?;
        let answer = self.send(round_trip, origin, permit)?;
        let answer = async { answer.await.map_err(|_| self.closed())? };
        within(timeout, answer).await.map(|result| result.keep())
    }

    /// Starts the session's task on the current runtime, unless the session has one. The task ends when the last handle of the
    /// session shuts the socket down.
    ///
    /// # Panics
    /// Panics outside of a runtime, if the session has no task.
    fn start_task(self: &Arc<Self>) -> Result<(), SessionError> {
        if self.has_task.load(Ordering::Acquire) {
            return Ok(());
        }
        // A panic must leave the session without a task.
        let runtime = Handle::current();
        if self.has_task.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let socket = self.socket.try_clone().and_then(|socket| {
            socket.set_nonblocking(true)?;
            UnixStream::from_std(socket)
        });
        let socket = socket.map_err(|error| {
            self.has_task.store(false, Ordering::Release);
            SessionError::Socket(error)
        })?;
        let (free, unsent) = (Arc::clone(&self.reader_is_free), Arc::clone(&self.unsent));
        let link = Arc::downgrade(self);
        runtime.spawn(async move {
            let link = CloseAtEnd(link);
            tokio::select! {
                () = receive(&socket, &link.0, &free) => {}
                () = send_rest(&socket, &link.0, &unsent) => {}
            }
        });
        Ok(())
    }

    /// Delivers all answers that are here, unless a thread receives. Returns false if the session is over.
    fn receive_all(self: &Arc<Self>) -> bool {
        let mut reader = match self.reader.try_lock() {
            Ok(reader) => reader,
            Err(TryLockError::Poisoned(reader)) => reader.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        loop {
            if !self.deliver_all(&mut reader) {
                return false;
            }
            match reader.receive_now(self.socket.as_fd()) {
                Ok(1..) => {}
                Ok(0) => return false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) => {
                    tracing::debug!(%error, "a session's socket failed");
                    return false;
                }
            }
        }
    }
}

/// Receives until the session is over. A thread that has received notifies `free`: the socket does not become ready a second time
/// for bytes that came while the thread had the reader.
async fn receive(socket: &UnixStream, link: &Weak<Link>, free: &Notify) {
    let goes_on = || link.upgrade().is_some_and(|link| link.receive_all());
    let receive = || match goes_on() {
        true => io::Result::<()>::Err(io::ErrorKind::WouldBlock.into()),
        false => Ok(()),
    };
    while goes_on() {
        tokio::select! {
            _ = socket.async_io(Interest::READABLE, receive) => return,
            () = free.notified() => {}
        }
    }
}

/// Sends what callers could not send without blocking.
async fn send_rest(socket: &UnixStream, link: &Weak<Link>, unsent: &Notify) {
    loop {
        unsent.notified().await;
        let flush = || link.upgrade().map_or(Ok(()), |link| link.flush_rest());
        if socket.async_io(Interest::WRITABLE, flush).await.is_err() {
            return;
        }
    }
}

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        if let Some(link) = self.0.upgrade() {
            link.close();
        }
    }
}
