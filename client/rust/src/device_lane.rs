//! Copies between an engine's GPU memory and blocks, made by the node: the device lane.
//!
//! The engine says once where its tensors are ([`Session::register_tensors`]); from then on its requests carry page numbers. The
//! bytes never pass through the engine's process. A copy goes on whoever waits for it, and its end says whether all bytes are
//! where they should be: of one that did not end as [`CopyEnd::Done`](larder_protocol::lane::CopyEnd::Done) nothing may be used.

mod blocking;
mod messages;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_device::{EngineMemory, HostMemory, PagedLayout};
use larder_protocol::lane::CopyProgress;
use larder_protocol::session::Request;
use tokio::time::Instant;

pub use messages::layout_message;

use crate::engine_lane::{CopyFlags, LoadPages};
use crate::error::SessionError;
use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::lock;
use crate::namespace::Namespace;
use crate::options::millis;
use crate::reservation::Reservation;
use crate::session::Session;
use crate::verify::Damaged;

/// An engine's tensors that the node knows, until the session ends. Cheap to clone.
#[derive(Clone)]
pub struct NodeTensors(Arc<Known>);

struct Known {
    number: u32,
    namespace: Namespace,
    block: usize,
    layout: PagedLayout,
    words: HostMemory,
}

/// Which pages are saved as which chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePages {
    /// Positions of the chunks in the reserved chain.
    pub positions: Vec<u32>,
    /// The pages of each chunk, chunk by chunk.
    pub pages: Vec<u32>,
    /// Which layers; a chunk can be committed when all of them were saved.
    pub layers: Range<u32>,
}

/// A copy that the node makes.
///
/// Dropping it lets it go on, unless it still waits for its flag: then it is given up. What it touches stays kept from others in
/// either case.
pub struct NodeCopy {
    link: Arc<Link>,
    number: u64,
    known: Mutex<CopyProgress>,
}

impl NodeTensors {
    /// The page of words, by which copies and the engine's streams wait for each other: to be pinned where a GPU is to use it. All
    /// tensors of a session have the same.
    #[must_use]
    pub fn words(&self) -> &HostMemory {
        &self.0.words
    }

    /// Where their pages stand.
    #[must_use]
    pub fn layout(&self) -> &PagedLayout {
        &self.0.layout
    }

    /// Of a chunk's blocks the one that they hold.
    #[must_use]
    pub fn block(&self) -> usize {
        self.0.block
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.0.namespace
    }

    /// Verifies what a load would copy, where it stands, as far as the session's options say so and it was not done before.
    ///
    /// # Errors
    /// [`Damaged`], the first that is.
    ///
    /// # Panics
    /// Where the namespace has no such block.
    pub fn verify(&self, lease: &LeaseGuard, load: &LoadPages) -> Result<(), Damaged> {
        let layout = &self.0.layout;
        let per_chunk = u64::from(layout.spec().pages_per_chunk).max(1);
        let end = load.first_page.saturating_add(load.pages.len() as u64).div_ceil(per_chunk);
        let place = |layer: u32| u64::from(layer) * layout.layer_bytes();
        // Beyond the lease there is nothing to verify, and the node refuses.
        let positions = load.first_page / per_chunk..end.min(lease.chunks() as u64);
        positions.map(|position| position as usize).try_for_each(|position| {
            if !lease.has_block(position, load.block) {
                return Ok(());
            }
            lease.verify_bytes(position, load.block, &(place(load.layers.start)..place(load.layers.end)))
        })
    }
}

impl NodeCopy {
    /// How far it was when the node told last. Its layers count from the first that was asked for.
    #[must_use]
    pub fn progress(&self) -> CopyProgress {
        *lock(&self.known)
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn heard(&self, news: CopyProgress) {
        *lock(&self.known) = news;
    }

    /// Whether there is nothing to wait for until so many layers are done.
    pub(crate) fn has(&self, layers: u32) -> bool {
        let known = self.progress();
        known.end.is_some() || known.layers >= layers
    }

    fn new(link: &Arc<Link>, number: u64) -> Self {
        Self { link: Arc::clone(link), number, known: Mutex::new(CopyProgress { layers: 0, end: None }) }
    }
}

impl Drop for NodeCopy {
    fn drop(&mut self) {
        if lock(&self.known).end.is_none() {
            self.link.post(&Request::ForgetCopy(self.number));
        }
    }
}

impl fmt::Debug for NodeCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCopy").field("number", &self.number).field("known", &self.progress()).finish()
    }
}

impl fmt::Debug for NodeTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeTensors").field("number", &self.0.number).finish_non_exhaustive()
    }
}

impl Session {
    /// Makes GPU memory known that the node is to copy to and from: `memory` has the regions that the layout names, in order, by
    /// IPC handle or descriptor. `block` counts the blocks of a chunk in this session, by slice, then pool.
    ///
    /// Cancel safe: the node may know the tensors nevertheless, until the session ends.
    ///
    /// # Errors
    /// `Refused` where there is no GPU that the node could use, this kind of memory cannot be shared, or the layout is not that of
    /// the namespace; `NotShared` for memory that no other process can have; the general ones of [`SessionError`].
    ///
    /// # Panics
    /// Where the namespace has no such block.
    pub async fn register_tensors(
        &self,
        namespace: &Namespace,
        block: usize,
        layout: &PagedLayout,
        memory: Vec<EngineMemory>,
    ) -> Result<NodeTensors, SessionError> {
        self.exchange(messages::register(namespace, block, layout, memory)?).await
    }

    /// Has the node begin to copy what is leased into pages. The lease may be given back meanwhile. Blocks that the session
    /// verifies are verified first, where they stand and on the caller's thread: [`NodeTensors::verify`] does it on another.
    ///
    /// Cancel safe: a copy that has begun goes on.
    ///
    /// # Errors
    /// `Refused` where the pages are not those of the lease or the tensors; `Damaged`; `Busy`; the general ones of [`SessionError`].
    ///
    /// # Panics
    /// Where the tensors hold another block than that to load.
    pub async fn load_pages(
        &self,
        tensors: &NodeTensors,
        lease: &LeaseGuard,
        load: &LoadPages,
        flags: CopyFlags,
    ) -> Result<NodeCopy, SessionError> {
        self.exchange(messages::load(tensors, lease, load, flags)?).await
    }

    /// Has the node begin to copy pages into reserved chunks. When it is done, [`Session::commit_handed_over`] commits
    /// them; if it fails they are given up.
    ///
    /// Cancel safe: a copy that has begun goes on.
    ///
    /// # Errors
    /// `Refused` where the pages are not those of the chunks or the tensors, or the reservation ended; `Busy`; the general ones of
    /// [`SessionError`].
    pub async fn save_pages(
        &self,
        tensors: &NodeTensors,
        reservation: &Reservation,
        save: &SavePages,
        flags: CopyFlags,
    ) -> Result<NodeCopy, SessionError> {
        self.exchange(messages::save(tensors, reservation, save, flags)).await
    }

    /// Waits until so many layers of a copy are done, or it has ended, or `patience` has passed, and says how far it is then.
    /// Layers that are done may be used while the others are under way. `u32::MAX` waits for the end.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub async fn wait_for_copy(
        &self,
        copy: &NodeCopy,
        layers: u32,
        patience: Duration,
    ) -> Result<CopyProgress, SessionError> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if copy.has(layers) {
                return Ok(copy.progress());
            }
            let wait = millis(left.min(self.timeout() / 4));
            let news = self.exchange(messages::ask(copy, layers, wait)).await?;
            copy.heard(news);
            if left.is_zero() {
                return Ok(news);
            }
        }
    }
}
