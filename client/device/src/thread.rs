//! The thread of one device, its only caller.
//!
//! It takes orders from a bounded ring. Callers never wait for the device: a device call that hangs blocks only this thread. A
//! caller hears the end of each order once. Places in the ring are given back when the end was heard, so the number of ends that
//! wait is bounded too.

use std::collections::HashSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::device::{CopyError, Device, DeviceError, Event};
use crate::memory::HostMemory;
use crate::order::{Order, OrderNumber};

/// The thread. Dropping it lets running work end; [`DeviceThread::join`] waits for that.
pub struct DeviceThread {
    ring: SyncSender<Request>,
    limit: usize,
    outstanding: Arc<AtomicUsize>,
    cancelled: Cancelled,
    thread: JoinHandle<()>,
}

/// A report of the thread. Reports of one order come in sequence.
#[derive(Debug)]
pub enum DeviceReport {
    /// Layers of an order are done, from its first on.
    Layers {
        /// The order.
        number: OrderNumber,
        /// How many layers are done.
        done: u32,
    },
    /// An order has ended; reported once for each order that was taken.
    Done {
        /// The order.
        number: OrderNumber,
        /// Whether all its bytes are where they should be. After [`CopyError::Lost`] the device may still touch its memory.
        result: Result<(), CopyError>,
        /// The order's place. Another order may have it when this is dropped.
        place: OrderPlace,
    },
    /// There is no device, or it failed. All later orders are refused.
    Lost(DeviceError),
    /// The device was closed, at the latest when the thread ends: its work touches no memory any more.
    Gone,
}

/// One of the bounded places for orders.
#[derive(Debug)]
pub struct OrderPlace(Arc<AtomicUsize>);

/// The word that an order raises ([`Order::then`]). If the device does not take the order, or is lost, the thread raises the word.
#[derive(Clone)]
pub struct EndWord {
    memory: HostMemory,
    offset: u64,
    value: u32,
}

/// Makes an order, after the device got the memory for it.
type Make = Box<dyn FnOnce(&mut dyn Device) -> Result<Order, DeviceError> + Send>;

/// Something else to do with the device.
type Call = Box<dyn FnOnce(&mut dyn Device) + Send>;

/// Takes reports on the device's thread. It must not wait. Reports of unfinished orders are bounded by the places for orders.
type Hear = Box<dyn FnMut(DeviceReport) + Send>;

/// Orders that were given up while the device had not heard of it: their copies must not begin.
type Cancelled = Arc<Mutex<HashSet<OrderNumber>>>;

/// The ring, or all places for orders, are taken: try again after the next [`DeviceReport::Done`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device has too many orders: try again when one has ended")]
pub struct Busy;

enum Request {
    Copy(Make, Taken),
    Call(Call),
}

/// An order whose end nobody has heard.
struct Taken {
    number: OrderNumber,
    then: Option<EndWord>,
    place: OrderPlace,
}

/// How long nothing happened.
#[derive(Default)]
struct Idle {
    spins: u32,
    waited: Duration,
}

/// The thread's state.
struct Worker {
    requests: Receiver<Request>,
    hear: Hear,
    cancelled: Cancelled,
    running: Vec<Taken>,
    /// The device. It is dropped before the other fields, while its users can still hear of it.
    device: Option<Box<dyn Device>>,
}

impl DeviceThread {
    /// Starts a thread, on which `open` makes the device; `hear` gets all reports, including the failure to make one. At most
    /// `orders` orders are accepted whose end nobody heard yet.
    ///
    /// # Errors
    /// Fails if the system gives no thread.
    pub fn start(
        name: &str,
        orders: usize,
        open: impl FnOnce() -> Result<Box<dyn Device>, DeviceError> + Send + 'static,
        hear: impl FnMut(DeviceReport) + Send + 'static,
    ) -> io::Result<Self> {
        let (ring, requests) = sync_channel(orders + MOST_CALLS);
        let cancelled = Cancelled::default();
        let of_worker = Arc::clone(&cancelled);
        let run = move || {
            let mut worker = Worker {
                requests,
                hear: Box::new(hear),
                cancelled: of_worker,
                running: Vec::new(),
                device: None,
            };
            match guarded(open) {
                Ok(device) => worker.device = Some(device),
                Err(error) => worker.lose(error),
            }
            worker.run();
        };
        let thread = Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self { ring, limit: orders, outstanding: Arc::default(), cancelled, thread })
    }

    /// Hands an order to the thread; `then` as for [`DeviceThread::submit_made`].
    ///
    /// # Errors
    /// [`Busy`], with nothing done, if too many orders are under way.
    pub fn submit(&self, number: OrderNumber, order: Order, then: Option<EndWord>) -> Result<(), Busy> {
        self.submit_made(number, then, move |_| Ok(order))
    }

    /// Hands an order to the thread that `make` makes there: it may need memory that has yet to be attached. An error of `make`
    /// refuses the copy. The thread raises `then`, the word of the order, if the device refuses the order or is lost.
    ///
    /// # Errors
    /// [`Busy`], with nothing done, if too many orders are under way.
    pub fn submit_made(
        &self,
        number: OrderNumber,
        then: Option<EndWord>,
        make: impl FnOnce(&mut dyn Device) -> Result<Order, DeviceError> + Send + 'static,
    ) -> Result<(), Busy> {
        let place = OrderPlace(Arc::clone(&self.outstanding));
        if self.outstanding.fetch_add(1, Ordering::Relaxed) >= self.limit {
            return Err(Busy);
        }
        self.send(Request::Copy(Box::new(make), Taken { number, then, place }))
    }

    /// Has the thread do something else with its device: attach memory, register tensors. If the device is lost, `call` is
    /// dropped.
    ///
    /// # Errors
    /// [`Busy`], with nothing done, if too many requests wait.
    pub fn call(&self, call: impl FnOnce(&mut dyn Device) + Send + 'static) -> Result<(), Busy> {
        self.send(Request::Call(Box::new(call)))
    }

    /// Gives up an order that has not begun: the thread refuses it, also if it is busy now. An order that waits for its flag is
    /// given up when the thread hears of it; see [`Device::cancel`].
    ///
    /// # Errors
    /// [`Busy`] if too many requests wait: the order may still wait for its flag.
    pub fn cancel(&self, number: OrderNumber) -> Result<(), Busy> {
        lock(&self.cancelled).insert(number);
        let cancelled = Arc::clone(&self.cancelled);
        self.call(move |device| {
            lock(&cancelled).remove(&number);
            device.cancel(number);
        })
    }

    /// Orders that were taken and whose end nobody has heard, or whose place is still held.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Waits until all requested work has ended. A stalled device delays this.
    pub fn join(self) {
        drop(self.ring);
        if self.thread.join().is_err() {
            tracing::error!("the thread of a device panicked outside of any call; please report this line");
        }
    }

    fn send(&self, request: Request) -> Result<(), Busy> {
        self.ring.try_send(request).map_err(|error| match error {
            TrySendError::Full(_) | TrySendError::Disconnected(_) => Busy,
        })
    }
}

impl EndWord {
    /// The word at `offset` of `memory`, and its value at the end of the order. `None` if there is no such word, or the memory is
    /// read-only.
    #[must_use]
    pub fn new(memory: HostMemory, offset: u64, value: u32) -> Option<Self> {
        let is_there = memory.is_writable() && memory.contains(offset, 4) && offset.is_multiple_of(4);
        is_there.then_some(Self { memory, offset, value })
    }

    fn raise(&self) {
        let found = self.memory.word(self.offset);
        // A device that was lost may have raised it, and later orders may have raised it further.
        if found.wrapping_sub(self.value).cast_signed() < 0 {
            self.memory.set_word(self.offset, self.value);
        }
    }
}

impl Idle {
    /// How long to wait now: not at all at first, then a small part of the waiting so far, so that an order's end is reported
    /// soon, however long the order takes.
    fn pause(&mut self) -> Duration {
        if self.spins < SPINS {
            self.spins += 1;
            return Duration::ZERO;
        }
        let pause = (self.waited / PAUSE_PART).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        self.waited += pause;
        pause
    }
}

impl Drop for OrderPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Worker {
    fn run(mut self) {
        let mut events = Vec::new();
        let mut idle = Idle::default();
        loop {
            let Some(was_asked) = self.take_requests(&mut idle) else { return self.give_up() };
            if let Some(device) = &mut self.device
                && let Err(error) = guarded(|| device.poll(&mut events))
            {
                self.forward(&mut events);
                self.lose(error);
            }
            let is_news = self.forward(&mut events);
            if was_asked || is_news {
                idle = Idle::default();
            }
        }
    }

    /// Begins the requested orders. Without running work it waits for a request, else for a moment at most. `None` when
    /// nobody can ask any more and nothing runs.
    fn take_requests(&mut self, idle: &mut Idle) -> Option<bool> {
        let mut was_asked = false;
        for _ in 0..REQUESTS_PER_POLL {
            match self.requests.try_recv() {
                Ok(request) => {
                    self.begin(request);
                    was_asked = true;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if self.running.is_empty() => return None,
                Err(TryRecvError::Disconnected) => {
                    std::thread::sleep(idle.pause());
                    return Some(was_asked);
                }
            }
        }
        if was_asked {
            return Some(true);
        }
        if self.running.is_empty() {
            self.begin(self.requests.recv().ok()?);
            return Some(true);
        }
        let pause = idle.pause();
        if pause.is_zero() {
            std::thread::yield_now();
            return Some(false);
        }
        match self.requests.recv_timeout(pause) {
            Ok(request) => self.begin(request),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Some(false),
        }
        Some(true)
    }

    fn begin(&mut self, request: Request) {
        match (request, &mut self.device) {
            (Request::Copy(make, taken), Some(device)) => {
                let number = taken.number;
                let begun = guarded(|| {
                    let order = make(device.as_mut())?;
                    let is_cancelled = lock(&self.cancelled).contains(&number);
                    if is_cancelled { device.refuse(number, order) } else { device.start(number, order) }
                });
                match begun {
                    Ok(()) => self.running.push(taken),
                    Err(error @ DeviceError::Lost(_)) => {
                        self.running.push(taken);
                        self.lose(error);
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a copy was refused");
                        self.give_up_order(taken, CopyError::Refused);
                    }
                }
            }
            (Request::Copy(_, taken), None) => self.give_up_order(taken, CopyError::Refused),
            (Request::Call(call), Some(device)) => {
                let done = guarded(|| {
                    call(device.as_mut());
                    Ok(())
                });
                if let Err(error) = done {
                    self.lose(error);
                }
            }
            (Request::Call(_), None) => {}
        }
    }

    fn forward(&mut self, events: &mut Vec<Event>) -> bool {
        let is_news = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Layers { number, done } => (self.hear)(DeviceReport::Layers { number, done }),
                Event::Done { number, result } => {
                    let Some(at) = self.running.iter().position(|running| running.number == number) else {
                        continue;
                    };
                    let Taken { place, .. } = self.running.swap_remove(at);
                    (self.hear)(DeviceReport::Done { number, result, place });
                }
            }
        }
        is_news
    }

    /// Tells all callers first: giving up a device that failed may take for ever.
    fn lose(&mut self, error: DeviceError) {
        tracing::error!(%error, "a device is lost: all its copies fail");
        (self.hear)(DeviceReport::Lost(error));
        for taken in std::mem::take(&mut self.running) {
            self.give_up_order(taken, CopyError::Lost);
        }
        self.give_up();
    }

    /// Ends an order that no device ends.
    fn give_up_order(&mut self, Taken { number, then, place }: Taken, error: CopyError) {
        if let Some(then) = then {
            then.raise();
        }
        (self.hear)(DeviceReport::Done { number, result: Err(error), place });
    }

    /// Only a device that could be closed is known to touch nothing.
    fn give_up(&mut self) {
        let Some(device) = self.device.take() else { return };
        match guarded(|| device.close()) {
            Ok(()) => (self.hear)(DeviceReport::Gone),
            Err(error) => {
                tracing::error!(%error, "a device cannot be closed: the memory of its copies stays unusable until this process ends")
            }
        }
    }
}

/// Locks; no code panics while it holds the lock.
fn lock(cancelled: &Mutex<HashSet<OrderNumber>>) -> MutexGuard<'_, HashSet<OrderNumber>> {
    cancelled.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a device. A device that panics is lost: its work is unknown.
fn guarded<T>(call: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(DeviceError::Lost("the code of the device panicked".into())))
}

/// Calls that may wait beside orders.
const MOST_CALLS: usize = 64;

/// Orders are begun in batches; between batches the device is polled for ended orders.
const REQUESTS_PER_POLL: usize = 16;

/// Looks at the device without a pause, after something happened: about 50 us.
const SPINS: u32 = 256;

const SHORTEST_PAUSE: Duration = Duration::from_micros(20);

const PAUSE_PART: u32 = 32;

const LONGEST_PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests;
