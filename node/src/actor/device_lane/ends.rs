//! How copies by a device end: what the device says of them, and the sums of what was saved.

use actix::prelude::*;
use larder_core::store::ids::OrderId;
use larder_core::store::{BlockMove, Checksums};
use larder_device::thread::Report;
use larder_device::{CopyError, Ticket};
use larder_protocol::lane::CopyEnd;

use super::{GpuActor, Held, HeldBy, Lane, Saved};
use crate::copy::{BlockChecksums, CopyOrder};
use crate::device_lane::Ended;
use crate::metrics::{HandedOver, LaneCopy};

impl GpuActor {
    fn copy_ended(&mut self, ticket: Ticket, result: Result<(), CopyError>, ctx: &mut Context<Self>) {
        let Some(Ended { held: Held { what, bytes }, is_whole }) =
            self.device_lane.account.ended(ticket, result)
        else {
            return;
        };
        match what {
            HeldBy::Load(load, wanted) => {
                if is_whole {
                    self.metrics.lane_copied(LaneCopy::Loaded, bytes);
                    self.device_lane.account.finish(ticket, CopyEnd::Done);
                    self.verify_and_promote(load, wanted, ctx);
                } else {
                    self.core.store.end_load(load);
                }
            }
            HeldBy::Promotion(load, slots) => {
                if result == Err(CopyError::Refused) {
                    self.device_lane.tier.refused();
                }
                for (slot, facts) in slots {
                    match is_whole {
                        true => self.device_lane.tier.filled(slot, facts),
                        false => self.device_lane.tier.dropped(slot),
                    }
                }
                self.core.store.end_load(load);
                if is_whole {
                    self.metrics.lane_copied(LaneCopy::Promoted, bytes);
                }
            }
            HeldBy::Save(order, moves) if is_whole => self.sum(ticket, order, bytes, &moves, ctx),
            HeldBy::Save(order, _) => _ = self.core.store.finish_layers(order, None),
        }
        if !is_whole {
            self.metrics.lane_copied(LaneCopy::Failed, 0);
        }
    }

    /// Has the bytes of a save summed as they stand in the arena.
    fn sum(
        &mut self,
        ticket: Ticket,
        order: OrderId,
        bytes: u64,
        moves: &[BlockMove],
        ctx: &mut Context<Self>,
    ) {
        match CopyOrder::new(None, moves.iter().map(|block| self.copy_move(block)).collect()) {
            Ok(sums) => {
                self.device_lane.unsummed.push(Saved { ticket, order, bytes, sums });
                self.sum_saved(ctx);
            }
            Err(error) => {
                tracing::error!(%error, ?order, "the store made an order that does not fit its memory");
                self.saved(ticket, order, bytes, None);
            }
        }
    }

    /// Sums what was saved, as far as the copy threads have room for it; the rest waits for the next time.
    pub(super) fn sum_saved(&mut self, ctx: &mut Context<Self>) {
        for Saved { ticket, order, bytes, sums } in std::mem::take(&mut self.device_lane.unsummed) {
            if sums.is_small() {
                let sums = sums.perform();
                self.saved(ticket, order, bytes, Some(sums));
                continue;
            }
            match self.lane.submit(sums) {
                Ok(summed) => {
                    let finish = summed.into_actor(self).map(move |sums, actor: &mut Self, ctx| {
                        actor.saved(ticket, order, bytes, sums.ok());
                        actor.tell_of_copies();
                        actor.settle(ctx);
                    });
                    self.spawn(ctx, finish);
                }
                Err(sums) => self.device_lane.unsummed.push(Saved { ticket, order, bytes, sums }),
            }
        }
    }

    /// What was saved is summed: it can be committed, if the right to do that has not ended.
    fn saved(&mut self, ticket: Ticket, order: OrderId, bytes: u64, sums: Option<Vec<BlockChecksums>>) {
        let sums = sums.map(|sums| sums.into_iter().map(Checksums::from).collect::<Vec<_>>());
        let pieces = sums.as_ref().map_or(0, |sums| sums.len() as u64);
        let end = if self.core.store.finish_layers(order, sums) {
            self.metrics.lane_copied(LaneCopy::Saved, bytes);
            self.metrics.handed_over(HandedOver::Given, pieces, bytes);
            CopyEnd::Done
        } else {
            self.metrics.lane_copied(LaneCopy::Failed, 0);
            CopyEnd::Failed
        };
        self.device_lane.account.finish(ticket, end);
    }
}

impl StreamHandler<Report> for GpuActor {
    /// What the device's thread tells.
    fn handle(&mut self, report: Report, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.device_reports(report, ctx));
    }

    /// The lane holds a sender itself: the stream ends only with the actor.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl GpuActor {
    fn device_reports(&mut self, report: Report, ctx: &mut Context<Self>) {
        match report {
            Report::Layers { ticket, done } => self.device_lane.account.layers(ticket, done),
            Report::Done { ticket, result, place } => {
                self.copy_ended(ticket, result, ctx);
                drop(place);
            }
            Report::Lost(error) => {
                let Lane { lane, account, tier, .. } = &mut self.device_lane;
                lane.lose(&error);
                tier.clear().into_iter().for_each(|slot| account.give_up_slot(slot));
            }
            Report::Gone => {
                self.device_lane.lane.gone();
                for held in self.device_lane.account.gone() {
                    match held.what {
                        HeldBy::Load(load, _) => self.core.store.end_load(load),
                        HeldBy::Promotion(load, slots) => {
                            slots.iter().for_each(|&(slot, _)| self.device_lane.tier.dropped(slot));
                            self.core.store.end_load(load);
                        }
                        HeldBy::Save(order, _) => _ = self.core.store.finish_layers(order, None),
                    }
                }
            }
        }
        self.tell_of_copies();
        self.settle(ctx);
    }
}
