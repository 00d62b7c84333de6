//! The lives of an actor: a panic ends one life, not the node.
//!
//! All work of the actor runs under [`GpuActor::guard`] or [`GpuActor::spawn`]. After a panic none of the actor's decisions
//! can be relied on. The store and everything that refers to it are dropped, every session ends with an error that says so,
//! and a new store begins, from disk if there is one. Answers that belong to an earlier life (of tiers, peers and copy
//! threads) are dropped when they come. Numbers go on, so that a number of an earlier life means nothing in a later one.
//!
//! **Memory.** The new store has no extent until nobody can touch the old store's bytes. Copies, sends to peers and devices
//! hold an extent's memory and let go of it; engines map it until their process ends. Extents that living engines were shown
//! get new memory instead, once for each process. An engine that keeps its old mappings costs that much memory; at the next
//! panic its extents wait until the engine is gone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use actix::fut::ActorFuture;
use actix::prelude::*;
use futures_util::Stream;
use larder_core::Event;
use pin_project_lite::pin_project;
use tokio::sync::watch;

use super::GpuActor;
use crate::watched::said;

/// An actor's present life.
pub(super) struct Lives {
    number: u64,
    /// Tells the sessions the number of the present life.
    told: watch::Sender<u64>,
    /// The time at which this life began.
    since: Duration,
}

pin_project! {
    /// A future that the actor awaits as long as the life `life` lasts.
    struct InLife<F> {
        life: u64,
        #[pin]
        future: F,
    }
}

impl Lives {
    pub(super) fn new(told: watch::Sender<u64>) -> Self {
        Self { number: 0, told, since: Duration::ZERO }
    }
}

impl GpuActor {
    /// Runs `what`. If it panics, begins a new life and returns `None`.
    pub(super) fn guard<T>(
        &mut self,
        ctx: &mut Context<Self>,
        what: impl FnOnce(&mut Self, &mut Context<Self>) -> T,
    ) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| what(self, ctx))) {
            Ok(done) => Some(done),
            Err(panic) => {
                self.begin_anew(&*panic, ctx);
                None
            }
        }
    }

    /// Awaits `future` as long as this life lasts.
    pub(super) fn spawn(
        &self,
        ctx: &mut Context<Self>,
        future: impl ActorFuture<Self, Output = ()> + 'static,
    ) {
        ctx.spawn(InLife { life: self.lives.number, future });
    }

    /// Awaits a result and tells the core its event, if this life lasts until then.
    pub(super) fn tell_when<T: 'static>(
        &self,
        ctx: &mut Context<Self>,
        coming: impl Future<Output = T> + 'static,
        event: impl FnOnce(T) -> Event + 'static,
    ) {
        let told = coming.into_actor(self);
        self.spawn(ctx, told.map(move |came, actor: &mut Self, ctx| actor.decide(event(came), ctx)));
    }

    /// Tells the core the event of an answer: at once if it is here already (`Err`), or when it comes (`Ok`), as
    /// [`GpuActor::tell_when`].
    pub(super) fn tell_answer<T: 'static>(
        &mut self,
        ctx: &mut Context<Self>,
        answer: Result<impl Future<Output = T> + 'static, T>,
        event: impl FnOnce(T) -> Event + 'static,
    ) {
        match answer {
            Ok(coming) => self.tell_when(ctx, coming, event),
            Err(answer) => self.tell(event(answer)),
        }
    }

    /// Tells the core an event for each item of the stream, in every life.
    pub(super) fn hear<T: 'static>(
        &self,
        ctx: &mut Context<Self>,
        coming: impl Stream<Item = T> + 'static,
        event: impl Fn(&mut Self, T) -> Event + 'static,
    ) {
        let told = coming.into_actor(self).map(move |came, actor: &mut Self, ctx| {
            actor.guard(ctx, |actor, ctx| {
                let event = event(actor, came);
                actor.decide(event, ctx);
            });
        });
        ctx.spawn(told.finish());
    }

    /// Runs `what` after a while, if this life lasts until then.
    pub(super) fn later(
        &self,
        ctx: &mut Context<Self>,
        after: Duration,
        what: impl FnOnce(&mut Self, &mut Context<Self>) + 'static,
    ) -> SpawnHandle {
        let life = self.lives.number;
        ctx.run_later(after, move |actor, ctx| {
            if actor.lives.number == life {
                actor.guard(ctx, what);
            }
        })
    }

    /// Drops this life's decisions, and begins another life.
    fn begin_anew(&mut self, panic: &(dyn Any + Send), ctx: &mut Context<Self>) {
        self.lives.number += 1;
        self.lives.since = self.hands.clock.elapsed();
        let (life, reason) = (self.lives.number, said(panic));
        let sessions = self.core.store().open_sessions().len();
        tracing::error!(
            life,
            sessions,
            reason,
            "a fault of Larder ended this actor's life: its sessions end, its memory is emptied, and it begins anew; please report this line"
        );
        self.engines.clear();
        self.device_lane.close_all();
        self.core.begin_anew();
        self.pending.begin_anew();
        self.device_lane.want_sweep();
        self.hands.begin_anew();
        self.lives.told.send_replace(life);
        self.return_extents(ctx);
        self.settle(ctx);
    }

    /// Gives back to the store the extents that nobody can touch any more, and renews the extents that only engines keep.
    pub(super) fn return_extents(&mut self, ctx: &mut Context<Self>) {
        let may_renew = self.hands.clock.elapsed() >= self.lives.since + UNMAP_TIME;
        for extent in self.core.store().secluded() {
            if self.hands.arena.is_unshared(extent) {
                self.tell(Event::ExtentLeft { extent, may_renew });
            }
        }
        self.settle(ctx);
    }
}

impl<F: ActorFuture<GpuActor, Output = ()>> ActorFuture<GpuActor> for InLife<F> {
    type Output = ();

    fn poll(
        self: Pin<&mut Self>,
        actor: &mut GpuActor,
        ctx: &mut Context<GpuActor>,
        task: &mut Task<'_>,
    ) -> Poll<()> {
        let this = self.project();
        if actor.lives.number != *this.life {
            return Poll::Ready(());
        }
        let future = this.future;
        actor.guard(ctx, |actor, ctx| future.poll(actor, ctx, task)).unwrap_or(Poll::Ready(()))
    }
}

/// The place at which tests make the actor panic.
#[cfg(test)]
pub(super) fn planted() {
    assert!(!PLANTED.swap(false, std::sync::atomic::Ordering::SeqCst), "planted");
}

/// Makes the next actor that gets a request panic.
#[cfg(test)]
fn plant() {
    PLANTED.store(true, std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
static PLANTED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// How long engines have to unmap their extents after their sessions ended, before the extents get new memory.
const UNMAP_TIME: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
