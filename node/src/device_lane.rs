//! The device lane of an actor: copies between engines' GPU memory and the arena, on the device's own thread.
//!
//! The core decides what is copied, which slots may be reused, and who hears of the end. The thread starts when an engine
//! first registers GPU memory: a node without such engines needs no driver and opens no GPU. All copies are made in the
//! node's context, so the death of an engine ends no copy. A GPU that failed is opened again when tensors are registered
//! again, once its context is gone.

mod devices;
mod orders;
mod refused;
mod regions;
mod tensors;
mod words;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use larder_core::store::ids::SessionId;
use larder_device::thread::{Busy, DeviceReport, EndWord};
use larder_device::{Device, DeviceError, DeviceThread, Order, OrderNumber};
use larder_net::lock;
use tokio::sync::{mpsc, oneshot};

pub use devices::Devices;
pub(crate) use refused::DeviceCopyRefused;
use regions::Regions;
pub(crate) use tensors::ClosedAside;
pub(crate) use words::{WORD_BYTES, Words};

use crate::host::{CpuSet, PciAddress};
use crate::threads;

/// Sends an actor's requests to the thread of its device.
pub struct DeviceLane {
    place: DevicePlace,
    orders: usize,
    thread: Option<DeviceThread>,
    /// The device's memory; used on its thread alone.
    regions: Arc<Mutex<Regions>>,
    words: HashMap<SessionId, Arc<Words>>,
    /// Ended sessions that the thread has not heard of.
    closing: Vec<SessionId>,
    /// Cancelled orders that the thread has not heard of.
    cancelling: Vec<OrderNumber>,
    /// Whether the device has refused memory for the device tier. Set before the end of the copy that needed it is reported.
    has_no_tier: Arc<AtomicBool>,
    /// Why the device cannot be used. Set before the loss is reported.
    lost: Arc<Mutex<Option<DeviceError>>>,
    sweeps: Arc<Sweeps>,
    /// The extents were pinned in an earlier life: the next sweep gives them up.
    has_old_extents: bool,
    reports: mpsc::UnboundedSender<DeviceReport>,
}

/// Whether the device holds memory that nobody uses any more.
#[derive(Default)]
struct Sweeps {
    /// The device may hold unused memory.
    wanted: AtomicBool,
    /// The thread was asked for a sweep, and has not swept yet.
    waits: AtomicBool,
}

/// The device of an actor, and the place of its thread.
#[derive(Clone)]
pub struct DevicePlace {
    /// The opener of devices.
    pub devices: Devices,
    /// The actor's number.
    pub device: u16,
    /// The GPU's address, if there is a GPU.
    pub pci: Option<PciAddress>,
    /// The CPUs of its thread.
    pub cpus: CpuSet,
}

impl DeviceLane {
    /// A lane and the channel of its reports. The lane's thread has not started yet, and takes up to `orders` orders. The channel
    /// holds at most one report for each layer of each order.
    pub fn new(place: DevicePlace, orders: usize) -> (Self, mpsc::UnboundedReceiver<DeviceReport>) {
        let (reports, receiver) = mpsc::unbounded_channel();
        let lane = Self {
            place,
            orders,
            thread: None,
            regions: Arc::default(),
            words: HashMap::new(),
            closing: Vec::new(),
            cancelling: Vec::new(),
            has_no_tier: Arc::default(),
            lost: Arc::default(),
            sweeps: Arc::default(),
            has_old_extents: false,
            reports,
        };
        (lane, receiver)
    }

    /// Why the device cannot be used.
    pub(crate) fn why_lost(&self) -> DeviceError {
        let absent = || DeviceError::Absent("the node has opened no GPU".into());
        lock(&self.lost).clone().unwrap_or_else(absent)
    }

    /// Runs `what` on the device's thread, and starts the thread if it does not run. The answer never comes if there is no
    /// device.
    fn call<T: Send + 'static>(
        &mut self,
        what: impl FnOnce(&mut dyn Device, &mut Regions) -> Result<T, DeviceCopyRefused> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<T, DeviceCopyRefused>>, Busy> {
        let (answer, answered) = oneshot::channel();
        let regions = Arc::clone(&self.regions);
        self.thread()?.call(move |device| {
            let result = what(device, &mut lock(&regions));
            // If nobody waits any more, there is nobody to tell.
            drop(answer.send(result));
        })?;
        Ok(answered)
    }

    /// Hands an order to the device. The device's thread calls `make` to build the order, and raises `then` if
    /// the device does not take it.
    fn submit(
        &self,
        number: OrderNumber,
        then: Option<EndWord>,
        make: impl FnOnce(&mut dyn Device, &mut Regions) -> Result<Order, DeviceError> + Send + 'static,
    ) -> Result<(), Busy> {
        let (regions, has_no_tier) = (Arc::clone(&self.regions), Arc::clone(&self.has_no_tier));
        let thread = self.thread.as_ref().ok_or(Busy)?;
        thread.submit_made(number, then, move |device| {
            let mut regions = lock(&regions);
            let made = make(device, &mut regions);
            has_no_tier.fetch_or(regions.has_no_pool(), Ordering::Release);
            made
        })
    }

    /// Gives up an order that has not begun, or that waits for its word.
    pub(crate) fn cancel(&mut self, number: OrderNumber) {
        self.cancelling.push(number);
        self.catch_up();
    }

    /// Repeats the cancellations and ends of sessions for which the thread had no room.
    fn catch_up(&mut self) {
        let Some(thread) = &self.thread else {
            self.closing.clear();
            return self.cancelling.clear();
        };
        self.cancelling.retain(|&number| thread.cancel(number).is_err());
        let regions = &self.regions;
        self.closing.retain(|&session| {
            let regions = Arc::clone(regions);
            thread.call(move |device| lock(&regions).close(device, session)).is_err()
        });
    }

    /// Notes that the device may hold memory that nobody uses any more.
    pub(crate) fn want_sweep(&self) {
        self.sweeps.wanted.store(true, Ordering::Relaxed);
    }

    /// Lets the device give up unused memory, if there is some.
    pub(crate) fn sweep(&mut self) {
        self.catch_up();
        let Some(thread) = &self.thread else { return };
        let is_wanted = self.has_old_extents || self.sweeps.wanted.load(Ordering::Relaxed);
        if !is_wanted || self.sweeps.waits.swap(true, Ordering::Relaxed) {
            return;
        }
        let (regions, sweeps) = (Arc::clone(&self.regions), Arc::clone(&self.sweeps));
        let retires = self.has_old_extents;
        let asked = thread.call(move |device| {
            let mut regions = lock(&regions);
            if retires {
                regions.retire_extents();
            }
            sweeps.wanted.store(regions.sweep(device), Ordering::Relaxed);
            sweeps.waits.store(false, Ordering::Relaxed);
        });
        match asked {
            Ok(()) => self.has_old_extents = false,
            Err(Busy) => self.sweeps.waits.store(false, Ordering::Relaxed),
        }
    }

    /// A session's page of words. The first call makes the page.
    fn words(&mut self, session: SessionId) -> Result<Arc<Words>, DeviceCopyRefused> {
        if let Some(words) = self.words.get(&session) {
            return Ok(Arc::clone(words));
        }
        let words = Arc::new(Words::create().map_err(DeviceCopyRefused::Words)?);
        self.words.insert(session, Arc::clone(&words));
        Ok(words)
    }

    /// Ends a session: the device gives up the session's memory as soon as no copy uses it.
    pub(crate) fn close_session(&mut self, session: SessionId) {
        if self.words.remove(&session).is_some() {
            self.closing.push(session);
            self.want_sweep();
            self.catch_up();
        }
    }

    /// Ends all sessions, and gives up all extents, so that the arena alone holds them.
    pub(crate) fn close_all(&mut self) {
        self.has_old_extents = self.thread.is_some();
        let all: Vec<SessionId> = self.words.keys().copied().collect();
        all.into_iter().for_each(|session| self.close_session(session));
    }

    /// Forgets a device that is absent, or of which nothing is left. The next registration opens the device anew.
    fn gone(&mut self) {
        self.thread = None;
        self.regions = Arc::default();
        self.sweeps = Arc::default();
        self.has_old_extents = false;
    }

    fn thread(&mut self) -> Result<&DeviceThread, Busy> {
        if self.thread.is_none() {
            *lock(&self.lost) = None;
            self.thread = Some(self.start().map_err(|error| {
                tracing::error!(%error, "cannot start the thread of a device");
                Busy
            })?);
        }
        self.thread.as_ref().ok_or(Busy)
    }

    fn start(&self) -> std::io::Result<DeviceThread> {
        let (place, reports) = (self.place.clone(), self.reports.clone());
        let open = move || {
            threads::pin_or_warn(&place.cpus);
            let device = place.devices.open(place.device, place.pci)?;
            tracing::info!(
                device = place.device,
                name = device.name(),
                "a GPU is opened for the device lane"
            );
            Ok(device)
        };
        let lost = Arc::clone(&self.lost);
        let hear = move |report| {
            if let DeviceReport::Lost(error) = &report {
                *lock(&lost) = Some(error.clone());
            }
            // An error: the actor has stopped.
            drop(reports.send(report));
        };
        DeviceThread::start(&format!("larder-device-{}", self.place.device), self.orders, open, hear)
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{DeviceEvent, DeviceFailure};
    use larder_device::host::{HostControl, HostDevice};

    use super::*;

    /// Has the device make an order of nothing, and returns the failure of the order.
    async fn failure(
        lane: &mut DeviceLane,
        reports: &mut mpsc::UnboundedReceiver<DeviceReport>,
        make: impl FnOnce(&mut dyn Device, &mut Regions) -> Result<Order, DeviceError> + Send + 'static,
    ) -> DeviceFailure {
        lane.submit(OrderNumber(1), None, make).unwrap();
        loop {
            let report = reports.recv().await.unwrap();
            if let DeviceEvent::Ended { result, .. } = lane.event_of(report) {
                return result.unwrap_err();
            }
        }
    }

    #[tokio::test]
    async fn only_a_gpu_without_memory_for_the_tier_has_no_tier() {
        let open = |_| Ok(Box::new(HostDevice::new(1, HostControl::default())) as Box<dyn Device>);
        let (devices, cpus) = (Devices::stand_in(open), CpuSet::default());
        let (mut lane, mut reports) = DeviceLane::new(DevicePlace { devices, device: 0, pci: None, cpus }, 8);
        for _ in 0..2 {
            lane.call(|_, _| Ok(())).unwrap().await.unwrap().unwrap();
            let other = failure(&mut lane, &mut reports, |_, _| Err(DeviceError::Unknown)).await;
            assert_eq!(other, DeviceFailure::Refused, "such as a cancelled copy");
            let too_much = |device: &mut dyn Device, regions: &mut Regions| {
                Err(regions.pool(device, 1 << 62).unwrap_err())
            };
            assert_eq!(failure(&mut lane, &mut reports, too_much).await, DeviceFailure::NoTier);
            // The GPU is lost while a copy waits for it.
            lane.submit(OrderNumber(2), None, |_, _| Err(DeviceError::Lost("a fault".into()))).unwrap();
            lane.submit(OrderNumber(3), None, |_, _| unreachable!()).unwrap();
            let mut ends = Vec::new();
            while ends.len() < 2 {
                let report = reports.recv().await.unwrap();
                if let DeviceEvent::Ended { result, .. } = lane.event_of(report) {
                    ends.push(result.unwrap_err());
                }
            }
            assert_eq!(ends, [DeviceFailure::Lost, DeviceFailure::Refused]);
            while lane.thread.is_some() {
                let report = reports.recv().await.unwrap();
                lane.event_of(report);
            }
        }
    }
}
