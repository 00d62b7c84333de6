//! Copies and sums by the copy pool, and extents that get new memory there.
//!
//! The actor copies small blocks itself ([`INLINE_COPY_BYTES`](crate::copy::INLINE_COPY_BYTES)): handing a copy over costs
//! more.

use std::sync::Arc;

use actix::prelude::*;
use futures_util::FutureExt as _;
use larder_core::store::BlockMove;
use larder_core::store::ids::SessionId;
use larder_core::{CopyAnswer, CopyNumber, Event};
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use crate::arena::{ExtentMemory, MemoryError};
use crate::copy::{CopyOrder, Move};

impl GpuActor {
    /// Copies and sums blocks. Few bytes are copied on the spot, since handing them over would take longer.
    pub(super) fn copy(
        &mut self,
        copy: CopyNumber,
        session: Option<SessionId>,
        moves: &[BlockMove],
        ctx: &mut Context<Self>,
    ) {
        let copied = self.order_copy(session, moves);
        self.tell_answer(ctx, copied, move |answer| Event::Copied { copy, answer });
    }

    fn order_copy(
        &self,
        session: Option<SessionId>,
        moves: &[BlockMove],
    ) -> Result<impl Future<Output = CopyAnswer> + use<>, CopyAnswer> {
        let window = session.and_then(|session| self.windows.get(&session)).map(Arc::clone);
        let copied = moves.iter().map(|block| Move {
            source: block.source.unwrap_or_default(),
            is_in_place: block.is_in_place,
            to: self.hands.arena.destination(block),
        });
        let order = CopyOrder::new(window, copied.collect()).map_err(|error| {
            tracing::error!(%error, "the store made an order that does not fit its memory; please report this line");
            CopyAnswer::Impossible
        })?;
        if order.is_small() {
            return Err(CopyAnswer::Done(order.perform()));
        }
        let copied = self.hands.lane.submit(order).ok_or(CopyAnswer::Busy)?;
        Ok(copied.map(|copied| {
            let failed = |_| {
                tracing::error!("the copy pool failed: the blocks are dropped");
                CopyAnswer::Failed
            };
            copied.map_or_else(failed, CopyAnswer::Done)
        }))
    }

    /// Orders new memory for an extent, one at a time: the memory of an extent takes as long as some hundred copies. The others
    /// wait, also if the copy pool has no room.
    pub(super) fn renew_extents(&mut self, ctx: &mut Context<Self>) {
        if self.is_renewing {
            return;
        }
        let Some(renewal) = self.renewals.pop() else { return };
        let extent = renewal.extent;
        match self.hands.lane.renew(renewal) {
            Ok(renewed) => {
                self.is_renewing = true;
                let note =
                    renewed.into_actor(self).map(move |renewed, actor, _| actor.renewed(extent, renewed));
                // Not bound to a life: the arena needs the memory, whichever life ordered it.
                ctx.spawn(note);
            }
            Err(renewal) => self.renewals.push(renewal),
        }
    }

    /// Gives an extent its new memory.
    pub(super) fn occupied(&mut self, extent: u32, memory: Arc<ExtentMemory>) -> Event {
        self.hands.arena.occupy(extent, memory);
        self.device_lane.want_sweep();
        Event::ExtentRenewed(extent)
    }

    fn renewed(&mut self, extent: u32, renewed: Result<Result<Arc<ExtentMemory>, MemoryError>, RecvError>) {
        self.is_renewing = false;
        match renewed {
            Ok(Ok(memory)) => {
                let event = self.occupied(extent, memory);
                self.tell(event);
            }
            Ok(Err(error)) => {
                tracing::error!(extent, %error, "an extent got no new memory: the node tries again");
                // Others go first.
                self.renewals.insert(0, self.hands.arena.vacate(extent));
            }
            Err(_) => tracing::error!(
                extent,
                "the copy pool failed: the extent stays unused until the node starts again"
            ),
        }
    }
}
