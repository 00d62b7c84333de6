//! The copies under way, with the chunks and the room that they keep from others.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use larder_device::thread::DeviceReport;
use larder_device::{CopyError, DeviceError, OrderNumber};

use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::lock;
use crate::reservation::{StagedChunk, StagedLayers};

/// All copies of a lane.
#[derive(Default)]
pub(super) struct Copies(Mutex<CopyTable>);

#[derive(Default)]
struct CopyTable {
    running: HashMap<OrderNumber, (CopyClaims, Arc<Copied>)>,
    /// The claims of copies that a lost device may still make, kept until the device is gone.
    limbo: Vec<CopyClaims>,
    lost: Option<DeviceError>,
}

/// What a copy holds: the chunks that it reads, or the room that it writes to.
pub(super) enum CopyClaims {
    Lease(Arc<LeaseGuard>),
    Staged(StagedChunk),
    Layers(StagedLayers),
}

/// The progress of one copy.
#[derive(Default)]
pub struct Copied {
    state: Mutex<CopyProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct CopyProgress {
    layers: u32,
    result: Option<Result<(), CopyError>>,
    /// The room that was written, until its owner takes it back.
    written: Option<CopyClaims>,
    /// Why the device refused the copy.
    reason: Option<DeviceError>,
}

/// A copy under way. It goes on if the handle is dropped. `T` is the value that the end of the copy gives back.
pub struct CopyHandle<T> {
    copied: Arc<Copied>,
    gives: PhantomData<fn() -> T>,
}

impl CopyClaims {
    /// The session that granted it.
    pub(super) fn link(&self) -> &Link {
        match self {
            Self::Lease(lease) => lease.link(),
            Self::Staged(staged) => staged.link(),
            Self::Layers(staged) => staged.link(),
        }
    }
}

impl Copies {
    /// Enters a copy that begins. `None` if the device is lost.
    pub(super) fn begin(&self, number: OrderNumber, held: CopyClaims) -> Option<Arc<Copied>> {
        let mut table = lock(&self.0);
        if table.lost.is_some() {
            return None;
        }
        let copied = Arc::new(Copied::default());
        table.running.insert(number, (held, Arc::clone(&copied)));
        Some(copied)
    }

    /// Removes a copy that was not begun.
    pub(super) fn forget(&self, number: OrderNumber) {
        // Dropped after the lock: giving back a lease takes other locks.
        let forgotten = lock(&self.0).running.remove(&number);
        drop(forgotten);
    }

    pub(super) fn under_way(&self) -> usize {
        let table = lock(&self.0);
        table.running.len() + table.limbo.len()
    }

    pub(super) fn why_lost(&self) -> Option<DeviceError> {
        lock(&self.0).lost.clone()
    }

    /// Handles a report of the device's thread.
    pub(super) fn hear(&self, report: DeviceReport) {
        match report {
            DeviceReport::Layers { number, done } => {
                if let Some((_, copied)) = lock(&self.0).running.get(&number) {
                    lock(&copied.state).layers = done;
                    copied.changed.notify_all();
                }
            }
            DeviceReport::Done { number, result, place } => {
                let ended = lock(&self.0).running.remove(&number);
                drop(place);
                if let Some((held, copied)) = ended {
                    self.end(held, &copied, result);
                }
            }
            DeviceReport::Lost(error) => lock(&self.0).lost = Some(error),
            DeviceReport::Gone => {
                let gone = std::mem::take(&mut lock(&self.0).limbo);
                drop(gone);
            }
        }
    }

    fn end(&self, held: CopyClaims, copied: &Copied, result: Result<(), CopyError>) {
        let mut written = None;
        match (held, result) {
            (held, Err(CopyError::Lost)) => lock(&self.0).limbo.push(held),
            (held @ (CopyClaims::Staged(_) | CopyClaims::Layers(_)), Ok(())) => written = Some(held),
            // A lease, or room with unknown bytes: given up.
            _ => {}
        }
        let mut state = lock(&copied.state);
        (state.layers, state.result, state.written) = (u32::MAX, Some(result), written);
        drop(state);
        copied.changed.notify_all();
    }
}

impl Copied {
    /// Notes why the device refuses the copy.
    pub(super) fn refused(&self, reason: DeviceError) {
        lock(&self.state).reason = Some(reason);
    }
}

impl<T> From<Arc<Copied>> for CopyHandle<T> {
    fn from(copied: Arc<Copied>) -> Self {
        Self { copied, gives: PhantomData }
    }
}

impl<T> CopyHandle<T> {
    /// The number of layers that are done, from the first on; `u32::MAX` once the copy has ended.
    #[must_use]
    pub fn layers(&self) -> u32 {
        lock(&self.copied.state).layers
    }

    /// Why the device refused the copy, if it gave a reason; for people.
    #[must_use]
    pub fn reason(&self) -> Option<DeviceError> {
        lock(&self.copied.state).reason.clone()
    }

    /// Waits until the copy has ended, at most for `patience`. `None` if it has not ended by then: it goes on.
    fn wait_for_end(&self, patience: Duration) -> Option<Result<(), CopyError>> {
        let state = lock(&self.copied.state);
        let waited = self.copied.changed.wait_timeout_while(state, patience, |state| state.result.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.result
    }
}

impl CopyHandle<()> {
    /// Waits until all is loaded, at most for `patience`. `None` if it is not loaded by then: the device may be stalled, and the
    /// pages must not be used.
    ///
    /// # Errors
    /// [`CopyError`]: the pages have unknown bytes.
    pub fn wait(&self, patience: Duration) -> Option<Result<(), CopyError>> {
        self.wait_for_end(patience)
    }
}

impl CopyHandle<StagedChunk> {
    /// Waits until all is saved, at most for `patience`, and gives the chunk back, to be committed. `None` if it is not saved
    /// by then: the copy goes on.
    ///
    /// # Errors
    /// [`CopyError`]: the chunk was given up.
    pub fn wait(&self, patience: Duration) -> Option<Result<StagedChunk, CopyError>> {
        let result = self.wait_for_end(patience)?;
        Some(result.and_then(|()| match self.take_written() {
            Some(CopyClaims::Staged(chunk)) => Ok(chunk),
            _ => Err(CopyError::Failed),
        }))
    }
}

impl CopyHandle<StagedLayers> {
    /// Waits until all is saved, at most for `patience`, and gives the layers back, to be handed over. `None` if they are not
    /// saved by then: the copy goes on.
    ///
    /// # Errors
    /// [`CopyError`]: the layers were given up.
    pub fn wait(&self, patience: Duration) -> Option<Result<StagedLayers, CopyError>> {
        let result = self.wait_for_end(patience)?;
        Some(result.and_then(|()| match self.take_written() {
            Some(CopyClaims::Layers(layers)) => Ok(layers),
            _ => Err(CopyError::Failed),
        }))
    }
}

impl<T> CopyHandle<T> {
    /// Takes the room that was written; only the first caller gets it.
    fn take_written(&self) -> Option<CopyClaims> {
        lock(&self.copied.state).written.take()
    }
}
