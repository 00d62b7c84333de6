//! Copies and sums by the copy pool, and extents that get new memory there.

use std::sync::Arc;

use actix::prelude::*;
use futures_util::FutureExt as _;
use larder_core::store::BlockMove;
use larder_core::store::ids::SessionId;
use larder_core::{CopyAnswer, Event};
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use crate::arena::{ExtentMemory, MemoryError};
use crate::copy::{CopyOrder, Move};

/// The failures to get new memory for an extent since the last success.
#[derive(Default)]
pub(super) struct RenewalFailures {
    count: u64,
    last: String,
}

impl RenewalFailures {
    /// Notes a failure; returns whether it is the first, or differs from the one before.
    fn is_news(&mut self, error: &str) -> bool {
        self.count += 1;
        let is_news = self.last != error;
        if is_news {
            error.clone_into(&mut self.last);
        }
        is_news
    }

    /// Notes a success; returns the number of failures before it, if there were any.
    fn end(&mut self) -> Option<u64> {
        let Self { count, .. } = std::mem::take(self);
        (count > 0).then_some(count)
    }
}

impl GpuActor {
    /// Copies and sums blocks. Few bytes are copied on the spot.
    pub(super) fn order_copy(
        &self,
        session: Option<SessionId>,
        moves: &[BlockMove],
    ) -> Result<impl Future<Output = CopyAnswer> + use<>, CopyAnswer> {
        let window = session.and_then(|session| self.engines.get(&session)?.window.clone());
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
                let note = renewed.into_actor(self).map(move |renewed, actor: &mut Self, ctx| {
                    actor.guard(ctx, |actor, ctx| {
                        actor.renewed(extent, renewed);
                        actor.settle(ctx);
                    });
                });
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
        #[cfg(test)]
        super::lives::planted();
        match renewed {
            Ok(Ok(memory)) => {
                if let Some(failures) = self.renewal_failures.end() {
                    tracing::info!(extent, failures, "extents get new memory again");
                }
                let event = self.occupied(extent, memory);
                self.tell(event);
            }
            Ok(Err(error)) => {
                if self.renewal_failures.is_news(&error.to_string()) {
                    tracing::error!(extent, %error, "an extent got no new memory: the node tries again and again");
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_to_get_new_memory_is_news_once_until_it_ends_or_its_cause_changes() {
        let mut failures = RenewalFailures::default();
        assert_eq!(failures.end(), None, "it never failed");
        let news =
            |failures: &mut RenewalFailures, error| (0..100).filter(|_| failures.is_news(error)).count();
        assert_eq!(["no file", "no memory"].map(|error| news(&mut failures, error)), [1, 1]);
        assert_eq!((failures.end(), failures.end()), (Some(200), None));
        assert_eq!(news(&mut failures, "no memory"), 1);
    }
}
