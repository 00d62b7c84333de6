//! Calls that threads wait for: a thread receives itself.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use larder_ipc::socket::FrameReader;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;
use tokio::sync::TryAcquireError;
use tokio::sync::oneshot::error::TryRecvError;

use super::Link;
use super::round_trip::RoundTrip;
use crate::error::SessionError;
use crate::lock;
use crate::origin::Origin;
use crate::window::{Window, WindowRange};

impl Link {
    /// Sends a request and receives until its answer is here. Other threads wait until then.
    pub(crate) fn ask_on_this_thread<T>(
        self: &Arc<Self>,
        round_trip: RoundTrip<T>,
        origin: Origin,
    ) -> Result<T, SessionError> {
        self.receiving(|reader| {
            let deadline = now() + round_trip.answered_within(self.timeout);
            let permit = loop {
                match Arc::clone(&self.callers).try_acquire_owned() {
                    Ok(permit) => break permit,
                    Err(TryAcquireError::Closed) => return Err(self.closed()),
                    // The session's tasks wait for so many answers, or many requests timed out: each answer frees a permit.
                    Err(TryAcquireError::NoPermits) => self.receive(reader, deadline)?,
                }
            };
            let mut answer = self.send(round_trip, origin, permit)?;
            loop {
                match answer.try_recv() {
                    Ok(result) => return result.map(|result| result.keep()),
                    Err(TryRecvError::Closed) => return Err(self.closed()),
                    Err(TryRecvError::Empty) => self.receive(reader, deadline)?,
                }
            }
        })
    }

    /// Waits for room in the write window. Receives meanwhile, unless others do: the late answer to a request that timed out may
    /// free the room.
    pub(crate) fn take_room_on_this_thread(
        self: &Arc<Self>,
        window: &Arc<Window>,
        sizes: &[u64],
    ) -> Result<Vec<WindowRange>, SessionError> {
        let deadline = now() + self.timeout;
        loop {
            self.receive_what_is_here();
            let left = deadline.saturating_duration_since(now());
            if let Poll::Ready(ranges) = window.take_within(sizes, left.min(LOOK_AGAIN)) {
                return ranges.ok_or_else(|| self.closed());
            }
            if left.is_zero() {
                return Err(SessionError::Timeout);
            }
        }
    }

    /// Delivers the answers that have come, and notices the session's end, unless another thread receives. The session's task may
    /// be on a runtime that nobody drives at the moment, so this does not rely on the task.
    pub(super) fn receive_what_is_here(self: &Arc<Self>) {
        let Ok(mut reader) = self.reader.try_lock() else { return };
        loop {
            match reader.receive_now(self.socket.as_fd()) {
                Ok(1..) if self.deliver_all(&mut reader) => {}
                Err(error) if would_block(&error) => break,
                Ok(1..) => break,
                Ok(0) | Err(_) => {
                    self.close();
                    break;
                }
            }
        }
        drop(reader);
        self.reader_is_free.notify_one();
    }

    /// Runs `work` while no other thread or task receives.
    fn receiving<R>(&self, work: impl FnOnce(&mut FrameReader) -> R) -> R {
        let result = work(&mut lock(&self.reader));
        self.reader_is_free.notify_one();
        result
    }

    /// Sends the remaining bytes and waits once for bytes to receive; none may have come when it returns.
    fn receive(self: &Arc<Self>, reader: &mut FrameReader, deadline: Instant) -> Result<(), SessionError> {
        let left = deadline.checked_duration_since(now()).ok_or(SessionError::Timeout)?;
        let socket = self.socket.as_fd();
        let wait = |reader: &mut FrameReader, until: PollFlags| {
            let left = Timespec::try_from(left).ok();
            // Whether it was interrupted, timed out or became ready shows in the next round.
            let _ = poll(&mut [PollFd::new(&socket, until)], left.as_ref());
            reader.receive_now(socket)
        };
        let received = match self.flush_rest() {
            Ok(()) => match self.receive_soon(reader, socket) {
                // With a task, the socket does not block. Without, it blocks for the whole timeout of a request.
                Err(error)
                    if would_block(&error)
                        && (self.has_task.load(Ordering::Acquire) || left + MOST_LATE < self.timeout) =>
                {
                    wait(reader, PollFlags::IN)
                }
                Err(error) if would_block(&error) => reader.receive(socket),
                received => received,
            },
            Err(error) if would_block(&error) => wait(reader, PollFlags::IN | PollFlags::OUT),
            // The node's last messages before it closed may still be unread.
            Err(_) => reader.receive_now(socket),
        };
        match received {
            Ok(1..) => _ = self.deliver_all(reader),
            Err(error) if would_block(&error) => {}
            Ok(0) | Err(_) => self.close(),
        }
        Ok(())
    }

    /// Receives what comes soon, without sleeping: a sleeping thread takes longer to wake than most answers to come.
    /// `WouldBlock` if nothing came, or others want the CPU.
    fn receive_soon(&self, reader: &mut FrameReader, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut looks_on = self.look_or_sleep.may_look();
        let mut last = now();
        let until = last + SPIN;
        loop {
            match reader.receive_now(socket) {
                Err(error) if would_block(&error) && looks_on && last < until => {}
                received => return received,
            }
            let lent = now();
            sched_yield();
            last = now();
            looks_on = self.look_or_sleep.looks_on(last - lent);
        }
    }
}

fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// How much longer than its timeout a thread may wait.
const MOST_LATE: Duration = Duration::from_millis(1);

/// The pause between two looks at the socket while a thread waits for room.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How long a thread looks for its answer before it sleeps. An answer takes 10 us if the node is awake, waking a thread on
/// another core 15 us and more. After that time the node is busy, and others use the core better.
const SPIN: Duration = Duration::from_micros(50);

#[expect(clippy::disallowed_methods, reason = "requests of threads have deadlines in real time")]
fn now() -> Instant {
    Instant::now()
}
