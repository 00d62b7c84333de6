//! Commits: their bytes are copied and summed before anybody sees them.

use std::sync::Arc;

use actix::prelude::*;
use larder_core::store::ids::{OrderId, SessionId};
use larder_core::store::{BlockMove, Checksums, CommitOrder, Ranges, Refused};
use larder_protocol::handoff::HandOver;
use larder_protocol::session::{Commit, Response, Scarce};

use tokio::sync::oneshot::error::RecvError;

use super::answer::Asked;
use super::{Answer, GpuActor, Reply};
use crate::arena::{ExtentMemory, MemoryError};
use crate::copy::{BlockChecksums, CopyOrder, Move};
use crate::metrics::{HandedOver, Movement};

/// What follows when bytes were copied.
type Finish = fn(&mut GpuActor, OrderId, u64, Option<Vec<BlockChecksums>>) -> Answer;

impl GpuActor {
    /// Starts a commit. A small one is copied on the spot, since handing it over would take longer.
    pub(super) fn commit(
        &mut self,
        session: SessionId,
        commit: &Commit,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let order =
            self.core.store.begin_commit(session, commit.reservation, &commit.chunks, &commit.sources)?;
        self.copy(session, order, Self::committed, asked, ctx)
    }

    /// Takes over some layers of chunks that are not committed yet, the same way.
    pub(super) fn hand_over(
        &mut self,
        session: SessionId,
        layers: &HandOver,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let order = self.core.store.begin_layers(session, layers)?;
        self.copy(session, order, Self::handed_over, asked, ctx)
    }

    /// Copies what an order says, and answers as `finish` says.
    fn copy(
        &mut self,
        session: SessionId,
        CommitOrder { order, moves }: CommitOrder,
        finish: Finish,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let window = self.windows.get(&session).map(Arc::clone);
        let copies = match CopyOrder::new(window, moves.iter().map(|block| self.copy_move(block)).collect()) {
            Ok(copies) => copies,
            Err(error) => {
                tracing::error!(%error, ?order, "the store made an order that does not fit its memory");
                self.core.store.finish_commit(order, None);
                return Err(Refused::Internal);
            }
        };
        let bytes = copies.bytes();
        if copies.is_small() {
            let checksums = copies.perform();
            return Ok(Reply::Now(finish(self, order, bytes, Some(checksums))));
        }
        let Ok(copied) = self.lane.submit(copies) else {
            self.core.store.postpone_commit(order);
            return Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: LANE_RETRY_MS });
        };
        let finish = copied.into_actor(self).map(move |copied, actor: &mut Self, ctx: &mut Context<Self>| {
            if copied.is_err() {
                tracing::error!(?order, "the copy lane failed: the blocks are dropped");
            }
            let answer = finish(actor, order, bytes, copied.ok());
            actor.reply(asked, answer);
            actor.settle(ctx);
        });
        self.spawn(ctx, finish);
        Ok(Reply::Later)
    }

    /// Orders new memory for extents that change tenant. What the copy lane has no room for waits for the next time.
    pub(super) fn renew_extents(&mut self, ctx: &mut Context<Self>) {
        let mut waiting = std::mem::take(&mut self.renewals);
        waiting.extend(self.core.store.take_renewals().into_iter().map(|extent| self.arena.vacate(extent)));
        for renewal in waiting {
            let extent = renewal.extent;
            match self.lane.renew(renewal) {
                Ok(renewed) => {
                    let note =
                        renewed.into_actor(self).map(move |renewed, actor, _| actor.renewed(extent, renewed));
                    // Whatever life it was ordered in, the arena has the memory.
                    ctx.spawn(note);
                }
                Err(renewal) => self.renewals.push(renewal),
            }
        }
    }

    fn renewed(&mut self, extent: u32, renewed: Result<Result<Arc<ExtentMemory>, MemoryError>, RecvError>) {
        match renewed {
            Ok(Ok(memory)) => {
                self.arena.occupy(extent, memory);
                self.extent_changed();
                self.core.store.extent_renewed(extent);
            }
            Ok(Err(error)) => {
                tracing::error!(extent, %error, "an extent got no new memory: it is tried again");
                self.renewals.push(self.arena.vacate(extent));
            }
            Err(_) => tracing::error!(extent, "the copy lane failed: the extent stays unused"),
        }
    }

    fn committed(&mut self, order: OrderId, bytes: u64, checksums: Option<Vec<BlockChecksums>>) -> Answer {
        let copied = checksums.is_some();
        let kept = self
            .core
            .store
            .finish_commit(order, checksums.map(|sums| sums.into_iter().map(Checksums::from).collect()));
        if copied {
            self.metrics.moved(Movement::Committed, bytes);
        }
        Answer::from(Response::Committed(kept))
    }

    fn handed_over(&mut self, order: OrderId, bytes: u64, checksums: Option<Vec<BlockChecksums>>) -> Answer {
        let sums = checksums.map(|sums| sums.into_iter().map(Checksums::from).collect::<Vec<_>>());
        let pieces = sums.as_ref().map_or(0, |sums| sums.len() as u64);
        if !self.core.store.finish_layers(order, sums) {
            return Answer::from(Refused::Unknown { what: "reservation", number: 0 });
        }
        self.metrics.handed_over(HandedOver::Given, pieces, bytes);
        Answer::from(Response::HandedOver)
    }

    pub(super) fn copy_move(&self, block: &BlockMove) -> Move {
        Move {
            source: block.source.unwrap_or_default(),
            is_in_place: block.is_in_place,
            extent: Arc::clone(self.arena.extent(block.place.extent)),
            offset: block.place.offset,
            bytes: block.bytes,
            range_bytes: block.range_bytes,
            key: block.key,
        }
    }
}

impl From<BlockChecksums> for Checksums {
    fn from(sums: BlockChecksums) -> Self {
        let ranges = match sums.ranges.as_slice() {
            &[range] => Ranges::One(range),
            _ => Ranges::Many(Box::new(sums.ranges.into_vec().into())),
        };
        Self { whole: sums.whole, ranges }
    }
}

/// How long a session waits when the copy lane is full: about as long as a few blocks take.
const LANE_RETRY_MS: u64 = 5;
