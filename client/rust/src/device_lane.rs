//! Copies between an engine's GPU memory and blocks, made by the node: the device lane.
//!
//! The engine says once where its tensors are ([`Session::register_tensors`]); from then on its requests carry page numbers. The
//! bytes never pass through the engine's process. A copy goes on even if nobody waits for it. The end of a copy says whether all
//! bytes are in their place: use no byte of a copy that did not end as [`CopyEnd::Done`](larder_protocol::lane::CopyEnd::Done).

mod messages;

use std::fmt;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_device::{EngineMemory, HostMemory, PagedLayout};
use larder_protocol::lane::{AskCopy, CopyProgress, RegisterTensors};
use larder_protocol::limits::MAX_FRAME_DESCRIPTORS;
use larder_protocol::session::{Request, Response};

pub use messages::layout_message;

use crate::call::{Call, Step};
use crate::engine_lane::{CopyFlags, LoadPages};
use crate::error::{Damaged, SessionError};
use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::link::round_trip::RoundTrip;
use crate::lock;
use crate::namespace::Namespace;
use crate::options::millis;
use crate::reservation::Reservation;
use crate::session::{NAMESPACE, Session};
use larder_ipc::Mapping;

/// An engine's tensors that the node knows, until the session ends. Cheap to clone.
#[derive(Clone)]
pub struct NodeTensors(Arc<RegisteredTensors>);

struct RegisteredTensors {
    number: u32,
    namespace: Namespace,
    block: usize,
    layout: PagedLayout,
    words: HostMemory,
}

/// The pages to save as chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavePages {
    /// Positions of the chunks in the reserved chain.
    pub positions: Vec<u32>,
    /// The pages of each chunk, chunk by chunk.
    pub pages: Vec<u32>,
    /// The layers to save; a chunk can be committed when all its layers were saved.
    pub layers: Range<u32>,
}

/// A copy that the node makes.
///
/// A dropped copy that has begun goes on; the node gives up one that has not begun. In either case nobody else gets the
/// memory while the copy may touch it.
pub struct NodeCopy(Arc<Copying>);

/// The state that a copy shares with the calls that wait for it.
struct Copying {
    link: Arc<Link>,
    number: u64,
    /// The node's last news.
    progress: Mutex<CopyProgress>,
}

impl NodeTensors {
    /// The page of words by which copies and the engine's streams wait for each other. Pin it if a GPU is to use it. All tensors
    /// of a session have the same page.
    #[must_use]
    pub fn words(&self) -> &HostMemory {
        &self.0.words
    }

    /// The places of the tensors' pages.
    #[must_use]
    pub fn layout(&self) -> &PagedLayout {
        &self.0.layout
    }

    /// The block, among a chunk's blocks, that the tensors hold.
    #[must_use]
    pub fn block(&self) -> usize {
        self.0.block
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.0.namespace
    }

    /// Verifies in place the bytes that a load would copy, if the session's options say so and the bytes were not verified
    /// before. Layers of followed chunks must have come.
    ///
    /// # Errors
    /// [`Damaged`], for the first damaged block.
    ///
    /// # Panics
    /// Panics if the namespace has no such block.
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
    /// How far the copy was at the node's last news. Its layers count from the first requested layer.
    #[must_use]
    pub fn progress(&self) -> CopyProgress {
        *lock(&self.0.progress)
    }

    fn new(link: &Arc<Link>, number: u64) -> Self {
        let progress = Mutex::new(CopyProgress { layers: 0, end: None });
        Self(Arc::new(Copying { link: Arc::clone(link), number, progress }))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        if lock(&self.progress).end.is_none() {
            self.link.post(&Request::ForgetCopy(self.number));
        }
    }
}

impl fmt::Debug for NodeCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCopy")
            .field("number", &self.0.number)
            .field("progress", &self.progress())
            .finish()
    }
}

impl fmt::Debug for NodeTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeTensors").field("number", &self.0.number).finish_non_exhaustive()
    }
}

impl Session {
    /// Registers GPU memory for copies by the node. `memory` has the regions that the layout names, in order, by IPC handle or
    /// descriptor. `block` counts the blocks of a chunk in this session, by slice, then pool.
    ///
    /// Cancel safe: the node may know the tensors nevertheless, until the session ends.
    ///
    /// # Errors
    /// `Refused` if the node has no GPU for this, this kind of memory cannot be shared, or the namespace has another
    /// layout; `NotShared` for memory that no other process can map; `TooManyDescriptors`; the general errors of
    /// [`SessionError`].
    ///
    /// # Panics
    /// Panics if the namespace has no such block.
    pub fn register_tensors(
        &self,
        namespace: &Namespace,
        block: usize,
        layout: &PagedLayout,
        memory: Vec<EngineMemory>,
    ) -> Call<NodeTensors> {
        let blocks = namespace.blocks_per_chunk();
        assert!(block < blocks, "a chunk has {blocks} blocks, not {block}");
        let Some((memory, descriptors)) = messages::shared(memory) else {
            return self.call(Step::Done(Err(SessionError::NotShared)));
        };
        if descriptors.len() > MAX_FRAME_DESCRIPTORS {
            let found = descriptors.len();
            return self.call(Step::Done(Err(SessionError::TooManyDescriptors { found })));
        }
        let request = Request::RegisterTensors(RegisterTensors {
            namespace: namespace.number(),
            block: block as u16,
            layout: layout_message(layout),
            memory,
        });
        let is_own = self.link.check_own(NAMESPACE, namespace.session());
        let (namespace, layout) = (namespace.clone(), layout.clone());
        let mut round_trip = RoundTrip::new(request, move |link, response, descriptors| {
            let (Response::TensorsRegistered(known), [words]) = (response, descriptors.as_slice()) else {
                return Err(SessionError::wrong_answer("tensors come to be known, with a page of words"));
            };
            let mut mapped = lock(&link.words);
            let words = match &*mapped {
                Some(words) => words,
                None => mapped.insert(Arc::new(Mapping::writable(words.as_fd(), known.word_bytes)?)),
            };
            let words = words.host_memory();
            Ok(NodeTensors(Arc::new(RegisteredTensors {
                number: known.tensors,
                namespace,
                block,
                layout,
                words,
            })))
        });
        round_trip.descriptors = descriptors;
        self.call(Step::Ask(round_trip)).checked(is_own)
    }

    /// Has the node begin to copy leased blocks into pages. The lease may be given back when the copy has begun. Blocks that the
    /// session verifies are verified when the call is made, in place and on this thread: call [`NodeTensors::verify`] before to
    /// verify them on another thread.
    ///
    /// Cancel safe: a copy that has begun goes on.
    ///
    /// # Errors
    /// `Refused` if the pages are not those of the lease or the tensors; `Damaged`; `Busy`; the general errors of
    /// [`SessionError`].
    ///
    /// # Panics
    /// Panics if the tensors hold another block than that to load.
    pub fn load_pages(
        &self,
        tensors: &NodeTensors,
        lease: &LeaseGuard,
        load: &LoadPages,
        flags: CopyFlags,
    ) -> Call<NodeCopy> {
        assert_eq!(tensors.0.block, load.block, "tensors hold the block that is loaded into them");
        let message = messages::load(tensors.0.number, lease.number(), load, flags);
        let is_own = self.own_tensors(tensors).and_then(|()| self.link.check_own("lease", lease.session()));
        let is_sound = is_own.and_then(|()| Ok(tensors.verify(lease, load)?));
        self.copy(Request::LoadPages(message)).checked(is_sound)
    }

    /// Has the node begin to copy pages into reserved chunks. When the copy is done, [`Session::commit_handed_over`] commits the
    /// chunks; if the copy fails, the chunks are given up.
    ///
    /// Cancel safe: a copy that has begun goes on.
    ///
    /// # Errors
    /// `Refused` if the pages are not those of the chunks or the tensors, or the reservation ended; `Busy`; the general ones of
    /// [`SessionError`].
    pub fn save_pages(
        &self,
        tensors: &NodeTensors,
        reservation: &Reservation,
        save: &SavePages,
        flags: CopyFlags,
    ) -> Call<NodeCopy> {
        let message = messages::save(tensors.0.number, reservation.number(), save, flags);
        let is_own = self.own_tensors(tensors).and_then(|()| self.own(reservation));
        self.copy(Request::SavePages(message)).checked(is_own)
    }

    /// Waits until `layers` layers of a copy are done, or the copy has ended, or `patience` has passed since the call was made.
    /// The result says how far the copy is then. Layers that are done may be used while the others are under way. `u32::MAX`
    /// waits for the end.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// The general errors of [`SessionError`].
    pub fn wait_for_copy(&self, copy: &NodeCopy, layers: u32, patience: Duration) -> Call<CopyProgress> {
        let (known, asked) = (Arc::clone(&copy.0), Arc::clone(&copy.0));
        let known = move || {
            let progress = *lock(&known.progress);
            (progress.end.is_some() || progress.layers >= layers).then_some(progress)
        };
        let is_own = self.link.check_own("copy", copy.0.link.number);
        Call::until(&self.link, self.origin.clone(), patience, known, move |wait| news(&asked, layers, wait))
            .checked(is_own)
    }

    fn own_tensors(&self, tensors: &NodeTensors) -> Result<(), SessionError> {
        self.link.check_own("memory", tensors.0.namespace.session())
    }

    fn copy(&self, request: Request) -> Call<NodeCopy> {
        self.ask(request, |link, response, _| match response {
            Response::Copying(number) => Ok(NodeCopy::new(link, number)),
            _ => Err(SessionError::wrong_answer("a copy begins")),
        })
    }
}

/// Asks how far a copy is. Each answer updates the copy itself.
fn news(copy: &Arc<Copying>, layers: u32, wait: Duration) -> RoundTrip<CopyProgress> {
    let request = Request::AskCopy(AskCopy { copy: copy.number, layers, wait_ms: millis(wait) });
    // A request whose answer nobody receives must not keep the session open.
    let (copy, known) = (Arc::downgrade(copy), Arc::downgrade(copy));
    let mut round_trip = RoundTrip::new(request, move |_, response, _| {
        let Response::CopyProgress(progress) = response else {
            return Err(SessionError::wrong_answer("a copy has progress"));
        };
        if let Some(copy) = copy.upgrade() {
            *lock(&copy.progress) = progress;
        }
        Ok(progress)
    });
    // The node says the end once. It refuses a question that came behind the answer to another waiter.
    let deliver = round_trip.deliver;
    round_trip.deliver = Box::new(move |link, response, descriptors| {
        let told = known.upgrade().map(|copy| *lock(&copy.progress)).filter(|told| told.end.is_some());
        let response = match (response, told) {
            (Response::Refused(_), Some(told)) => Response::CopyProgress(told),
            (response, _) => response,
        };
        deliver(link, response, descriptors)
    });
    round_trip
}
