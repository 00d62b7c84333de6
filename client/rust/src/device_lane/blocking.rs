//! The device lane for threads without a runtime.

use std::time::Duration;

use larder_device::{EngineMemory, PagedLayout};
use larder_protocol::lane::CopyProgress;

use super::{NodeCopy, NodeTensors, SavePages, messages};
use crate::blocking::{BlockingSession, now};
use crate::engine_lane::{CopyFlags, LoadPages};
use crate::error::SessionError;
use crate::lease::LeaseGuard;
use crate::namespace::Namespace;
use crate::options::millis;
use crate::reservation::Reservation;

impl BlockingSession {
    /// Makes GPU memory known that the node is to copy to and from; see
    /// [`Session::register_tensors`](crate::Session::register_tensors).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// Where the namespace has no such block.
    pub fn register_tensors(
        &self,
        namespace: &Namespace,
        block: usize,
        layout: &PagedLayout,
        memory: Vec<EngineMemory>,
    ) -> Result<NodeTensors, SessionError> {
        self.exchange(messages::register(namespace, block, layout, memory)?)
    }

    /// Has the node begin to copy what is leased into pages; see [`Session::load_pages`](crate::Session::load_pages).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// Where the tensors hold another block than that to load.
    pub fn load_pages(
        &self,
        tensors: &NodeTensors,
        lease: &LeaseGuard,
        load: &LoadPages,
        flags: CopyFlags,
    ) -> Result<NodeCopy, SessionError> {
        self.exchange(messages::load(tensors, lease, load, flags)?)
    }

    /// Has the node begin to copy pages into reserved chunks, which [`Self::commit_handed_over`] then commits; see
    /// [`Session::save_pages`](crate::Session::save_pages).
    ///
    /// # Errors
    /// As there.
    pub fn save_pages(
        &self,
        tensors: &NodeTensors,
        reservation: &Reservation,
        save: &SavePages,
        flags: CopyFlags,
    ) -> Result<NodeCopy, SessionError> {
        self.exchange(messages::save(tensors, reservation, save, flags))
    }

    /// Waits until so many layers of a copy are done, or it has ended, or `patience` has passed, and says how far it is then; see
    /// [`Session::wait_for_copy`](crate::Session::wait_for_copy). Other threads' requests wait meanwhile, for a quarter of the
    /// session's timeout at a time.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub fn wait_for_copy(
        &self,
        copy: &NodeCopy,
        layers: u32,
        patience: Duration,
    ) -> Result<CopyProgress, SessionError> {
        let until = now() + patience;
        loop {
            let left = until.saturating_duration_since(now());
            if copy.has(layers) {
                return Ok(copy.progress());
            }
            let wait = millis(left.min(self.timeout() / 4));
            let news = self.exchange(messages::ask(copy, layers, wait))?;
            copy.heard(news);
            if left.is_zero() {
                return Ok(news);
            }
        }
    }
}
