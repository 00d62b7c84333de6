//! Commits: their bytes are copied and summed before anybody sees them.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_protocol::checksum::BlockKey;
use larder_protocol::session::{Busy, Commit, Response, Scarce};

use super::{Answer, GpuActor};
use crate::copy::{self, BlockChecksums, CopyOrder, INLINE_COPY_BYTES, Move};
use crate::metrics::Outcome;
use crate::store::ids::{OrderId, SessionId};
use crate::store::{BlockMove, Checksums, CommitOrder, Refused};

impl GpuActor {
    /// Starts a commit. A small one is copied on the spot, since handing it over would take longer.
    pub(super) fn commit(
        &mut self,
        session: SessionId,
        commit: &Commit,
        started: Duration,
    ) -> Result<ActorResponse<Self, Answer>, Refused> {
        let CommitOrder { order, moves } =
            self.store.begin_commit(session, commit.reservation, &commit.chunks, &commit.sources)?;
        let bytes = moves.iter().map(|block| block.layer_bytes * u64::from(block.layers)).sum();
        let copies = CopyOrder {
            window: self.windows.get(&session).map(Arc::clone),
            moves: moves.iter().map(|block| self.copy_move(block)).collect(),
        };
        if bytes <= INLINE_COPY_BYTES {
            let checksums = copy::perform(&copies);
            return Ok(ActorResponse::reply(self.committed(order, bytes, Some(checksums), started)));
        }
        let Ok(copied) = self.lane.submit(copies) else {
            self.store.postpone_commit(order);
            let busy = Busy { what: Scarce::Memory, retry_after_ms: LANE_RETRY_MS };
            let answer = Answer::from(Response::Busy(busy));
            self.metrics.requested("commit", Outcome::Busy, (self.clock.elapsed() - started).as_secs_f64());
            return Ok(ActorResponse::reply(answer));
        };
        let finish = copied.into_actor(self).map(move |copied, actor, _| {
            if copied.is_err() {
                tracing::error!(?order, "the copy lane failed: the blocks are dropped");
            }
            actor.committed(order, bytes, copied.ok(), started)
        });
        Ok(ActorResponse::r#async(finish))
    }

    /// Orders new memory for extents that change tenant.
    pub(super) fn renew_extents(&mut self, ctx: &mut Context<Self>) {
        for extent in self.store.take_renewals() {
            let renewed = self.lane.renew(Arc::clone(&self.arena), extent);
            let note = renewed.into_actor(self).map(move |renewed, actor, _| match renewed {
                Ok(Ok(())) => actor.store.extent_renewed(extent),
                Ok(Err(error)) => tracing::error!(extent, %error, "an extent got no new memory: it stays unused"),
                Err(_) => tracing::error!(extent, "the copy lane is gone: the extent stays unused"),
            });
            ctx.spawn(note);
        }
    }

    fn committed(
        &mut self,
        order: OrderId,
        bytes: u64,
        checksums: Option<Vec<BlockChecksums>>,
        started: Duration,
    ) -> Answer {
        let copied = checksums.is_some();
        let kept = self.store.finish_commit(order, checksums.map(|sums| sums.into_iter().map(Checksums::from).collect()));
        if copied {
            self.metrics.moved("committed", bytes);
        }
        self.metrics.requested("commit", Outcome::Done, (self.clock.elapsed() - started).as_secs_f64());
        Answer::from(Response::Committed(kept))
    }

    fn copy_move(&self, block: &BlockMove) -> Move {
        Move {
            source: block.source.unwrap_or_default(),
            extent: self.arena.extent(block.place.extent),
            offset: block.place.offset,
            layers: block.layers,
            layer_bytes: block.layer_bytes,
            key: BlockKey {
                fingerprint: block.fingerprint,
                hash: block.hash,
                slice: block.slice,
                pool: block.pool,
            },
        }
    }
}

impl From<BlockChecksums> for Checksums {
    fn from(sums: BlockChecksums) -> Self {
        let ranges = if sums.ranges.len() > 1 { sums.ranges.into_vec().into() } else { Box::default() };
        Self { whole: sums.whole, ranges }
    }
}

/// How long a session waits when the copy lane is full: about as long as a few blocks take.
const LANE_RETRY_MS: u64 = 5;
