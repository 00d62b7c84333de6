//! The decisions of a Larder node, and no IO: no thread, socket, file or clock. Time is an argument.
//!
//! A [`Core`] decides for one actor. Its shell tells it what happened ([`Core::handle`]), does what it wants
//! ([`Core::poll_effect`], until there is nothing more), and tells it again at [`Core::next_deadline`] and a few times a second
//! that time has passed:
//!
//! ```
//! # use std::time::Duration;
//! # use larder_core::{Core, Effect, Event};
//! # fn perform(_: &Effect) {}
//! fn settle(core: &mut Core, now: Duration, event: Event) {
//!     core.handle(now, event);
//!     while let Some(effect) = core.poll_effect() {
//!         perform(&effect); // Whatever comes of it is an event of its own, at once or later.
//!     }
//! }
//! ```
//!
//! Answers may come in any order, late, twice or never. A slot into which something is being written is given to nobody until
//! its effect is answered. What is decided stands in [`store`] (what is kept), `bring` (where chunks come from) and
//! [`tiers`] (disk and object store); the [`directory`] of a node is a core of its own.

mod announce;
mod bring;
pub mod cause;
pub mod directory;
mod effect;
mod event;
pub mod loading;
mod moved;
pub mod placement;
pub mod priority;
pub mod reports;
pub mod store;
#[cfg(test)]
mod tests;
pub mod tiers;
mod time;

use std::collections::VecDeque;
use std::time::Duration;

pub use bring::{Offer, Sources};
pub use effect::{Effect, FetchOrder, Started};
pub use event::{
    Announced, Arrival, Below, Description, Event, OrderNumber, QuestionId, ReadAnswer, ReadId, RecallId,
    RequestId, WriteNumber, Written,
};
pub use time::Millis;

use announce::Untold;
use bring::Bring;
use moved::Moved;
use store::{Refused, Store, StoreLimits};
use tiers::described::Described;
use tiers::writes::Writes;

/// What one actor decides.
#[derive(Debug)]
pub struct Core {
    /// What it keeps.
    pub store: Store,
    bring: Bring,
    writes: Writes,
    described: Described,
    untold: Untold,
    moved: Moved,
    effects: VecDeque<Effect>,
    /// Since the node started, as the last event says.
    now: Duration,
}

impl Core {
    /// A core that has nothing, and may get chunks from these places.
    #[must_use]
    pub fn new(limits: StoreLimits, sources: Sources) -> Self {
        let mut store = Store::new(limits);
        store.keep_journal();
        Self {
            store,
            bring: Bring::new(sources),
            writes: Writes::default(),
            described: Described::default(),
            untold: Untold::default(),
            moved: Moved::default(),
            effects: VecDeque::new(),
            now: Duration::ZERO,
        }
    }

    /// Takes note of something that happened, and decides what follows.
    pub fn handle(&mut self, now: Duration, event: Event) {
        self.now = self.now.max(now);
        match event {
            Event::Lookup { request, session, ask, cause } => {
                let done = self.lookup(request, session, ask, cause);
                self.refuse(request, done);
            }
            Event::Lease { request, session, ask, cause } => {
                let done = self.lease(request, session, ask, cause);
                self.refuse(request, done);
            }
            Event::Prefetch { request, session, ask, cause } => {
                let done = self.prefetch(request, session, ask, cause);
                self.refuse(request, done);
            }
            Event::Collect { request, session, ask } => {
                let done = self.collect(request, session, ask);
                self.refuse(request, done);
            }
            Event::Cancel { session, ticket } => self.cancel(session, ticket),
            Event::Closed(session) => {
                self.forget_waiting_of(session);
                self.store.close_session(session);
            }
            Event::SiblingsFound { question, holders } => self.siblings_found(question, holders),
            Event::HoldersFound { question, holders } => self.holders_found(question, holders),
            Event::StoredFound { question, found } => self.stored_found(question, &found),
            Event::OrderEnded { order, came } => self.order_ended(order, came),
            Event::OrderRefused(order) => self.order_refused(order),
            Event::ReadEnded { read, answer } => self.read_ended(read, answer),
            Event::WriteEnded { number, answer } => self.write_ended(number, answer),
            Event::Described { fingerprint, description } => self.description_is(fingerprint, description),
            Event::Recovered { held, is_all } => self.recovered(held, is_all),
            Event::LeftDisk(keys) => self.store.left_disk(&keys),
            Event::DiskClosed => self.store.disk_closed(),
            Event::Moved { fingerprint, hashes } => self.give_up(fingerprint, &hashes, moved::TRIES),
            Event::Announced(announced) => self.announced(announced),
            Event::PageAnnounced { next } => self.page_announced(next),
            Event::Tick => {
                self.store.tick(self.millis());
                self.finish_late_gathers();
                self.read_again();
                self.write_again();
                self.forget_unused();
            }
            Event::Alarm => {}
        }
        self.order_busy_again();
        self.give_up_again();
        self.tell_changes();
        self.stop_abandoned();
    }

    /// The next thing to do.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        if self.effects.is_empty() {
            self.write_below();
            self.note_changes();
        }
        self.effects.pop_front()
    }

    /// When [`Event::Alarm`] is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let due = [self.bring.next_deadline(), self.untold.next_deadline(), self.moved.next_deadline()];
        due.into_iter().flatten().min()
    }

    /// Says that the directory began again, and knows nothing of what is held here.
    pub fn directory_began_again(&mut self) {
        self.untold.lost();
    }

    /// Says whether the object store may be read from.
    pub fn object_is_open(&mut self, is_open: bool) {
        self.bring.object_is_open = is_open;
    }

    /// Drops whatever was decided after a fault, and goes on with an empty store. Answers to what was ordered before mean nothing
    /// any more.
    pub fn begin_anew(&mut self) {
        self.store = self.store.begin_anew();
        self.bring.begin_anew();
        self.writes.begin_anew();
        self.untold.begin_anew();
        self.moved = Moved::default();
        self.effects.clear();
        self.know_again();
    }

    fn refuse(&mut self, request: RequestId, done: Result<(), Refused>) {
        if let Err(refused) = done {
            self.effects.push_back(Effect::Refused { request, refused });
        }
    }

    fn millis(&self) -> Millis {
        Millis(self.now.as_millis() as u64)
    }
}
