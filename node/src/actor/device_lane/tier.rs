//! The device tier as the actor uses it: what comes there, and what lookups say of it.

use std::sync::Arc;

use actix::prelude::*;
use larder_core::Event;
use larder_core::reports::Reporter;
use larder_core::store::ids::SessionId;
use larder_device::{BlockMove, DeviceError, Direction, Order, Place, Work};
use larder_protocol::checksum::BlockKey;
use larder_protocol::session::{Found, Lookup, Span, Tier};

use super::{GpuActor, Held, HeldBy, Lane, Wanted};
use crate::arena::ExtentMemory;
use crate::copy::{BlockChecksums, CopyOrder, Move};

impl GpuActor {
    /// Tells of what was found on the host which chunks the device tier has too, in all their blocks.
    pub(in crate::actor) fn find_on_device(&self, session: SessionId, ask: &Lookup, found: &mut Found) {
        let tier = &self.device_lane.tier;
        let is_asked = ask.tiers.is_empty() || ask.tiers.contains(&Tier::Device);
        if !is_asked || tier.usage().blocks == 0 {
            return;
        }
        let is_there = |position: u32| {
            let hash = ask.chain.hashes[position as usize];
            let mut keys = self.core.store.block_keys(session, ask.namespace, hash).peekable();
            keys.peek().is_some() && keys.all(|key| tier.find(&key).is_some())
        };
        let mut spans: Vec<Span> = Vec::with_capacity(found.spans.len());
        for span in found.spans.drain(..) {
            if span.tier != Tier::Host {
                spans.push(span);
                continue;
            }
            let first = spans.len();
            for from in span.from..span.to {
                let tier = if is_there(from) { Tier::Device } else { Tier::Host };
                match spans[first..].last_mut() {
                    Some(last) if last.tier == tier => last.to = from + 1,
                    _ => spans.push(Span { from, to: from + 1, tier }),
                }
            }
        }
        found.spans = spans;
    }

    /// Forgets these blocks of a chunk, which is wrong on the host: what is read from the tier nobody verifies.
    pub(in crate::actor) fn drop_from_device(&mut self, keys: &[BlockKey]) {
        let Lane { account, tier, .. } = &mut self.device_lane;
        keys.iter().filter_map(|key| tier.drop_block(key)).for_each(|slot| account.give_up_slot(slot));
    }

    /// Sums the blocks of a load that the tier wants, and copies those into it that are right; the load keeps them in place until
    /// that has ended.
    pub(super) fn verify_and_promote(&mut self, load: u64, wanted: Vec<Wanted>, ctx: &mut Context<Self>) {
        if wanted.is_empty() {
            return self.core.store.end_load(load);
        }
        let block = |wanted: &Wanted| Move {
            source: 0,
            is_in_place: true,
            extent: Arc::clone(&wanted.memory),
            offset: wanted.offset,
            bytes: wanted.bytes,
            range_bytes: wanted.range_bytes,
            key: wanted.key,
        };
        let sums = CopyOrder::new(None, wanted.iter().map(block).collect());
        // Where the copy threads have too much to do, the next load promotes them.
        let Some(summed) = sums.ok().and_then(|sums| self.lane.submit(sums).ok()) else {
            return self.core.store.end_load(load);
        };
        let finish = summed.into_actor(self).map(move |sums, actor: &mut Self, ctx: &mut Context<Self>| {
            let sums = sums.unwrap_or_default();
            let is_right = |(wanted, sums): &(Wanted, BlockChecksums)| wanted.checksum == sums.whole;
            let (right, wrong): (Vec<_>, Vec<_>) = wanted.into_iter().zip(sums).partition(is_right);
            actor.promote(load, right.into_iter().map(|(wanted, _)| wanted).collect());
            for (Wanted { key, .. }, _) in wrong {
                let (by, fingerprint, hashes) = (Reporter::DeviceLane, key.fingerprint, vec![key.hash]);
                actor.tell(Event::Damaged { by, fingerprint, hashes });
            }
            actor.settle(ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Copies blocks that were loaded into the tier, as one order; the load keeps them in place until that has ended.
    fn promote(&mut self, load: u64, wanted: Vec<Wanted>) {
        let Lane { lane, account, tier, .. } = &mut self.device_lane;
        let (mut slots, mut moves, mut bytes) = (Vec::new(), Vec::new(), 0);
        for wanted in wanted {
            // Another copy may have brought it meanwhile.
            if !tier.wants(&wanted.key, wanted.bytes, u8::MAX) {
                continue;
            }
            let slot = account.reserve_slot().or_else(|| {
                account.give_up_slot(tier.evict()?);
                account.reserve_slot()
            });
            let Some(slot) = slot else { break };
            tier.fill(slot, wanted.key);
            bytes += wanted.bytes;
            slots.push((slot, wanted.facts));
            moves.push((wanted.memory, wanted.offset, tier.offset(slot), wanted.bytes));
        }
        if slots.is_empty() {
            return self.core.store.end_load(load);
        }
        let fills = slots.iter().map(|&(slot, _)| slot).collect();
        let held = Held { what: HeldBy::Promotion(load, slots), bytes };
        let now = self.clock.now().0;
        let ticket = match account.begin_own(now, fills, held) {
            Ok(ticket) => ticket,
            Err(Held { what, bytes }) => {
                if let HeldBy::Promotion(_, slots) = &what {
                    slots.iter().for_each(|&(slot, _)| account.give_up_slot(slot));
                }
                return self.not_begun(Held { what, bytes });
            }
        };
        let pool_bytes = tier.pool_bytes();
        let submitted = lane.submit(ticket, move |device, regions| {
            let pool = regions.pool(device, pool_bytes)?;
            let block = |(memory, offset, to, bytes): (Arc<ExtentMemory>, u64, u64, u64)| {
                let from = Place { region: regions.find(device, &memory)?, offset };
                let to = Place { region: pool, offset: to };
                Ok::<_, DeviceError>(BlockMove { from, to, bytes })
            };
            let moves = moves.into_iter().map(block).collect::<Result<Vec<_>, DeviceError>>()?;
            Ok(Order { direction: Direction::Load, work: Work::Blocks(moves), after: None, then: None })
        });
        if submitted.is_err()
            && let Some(held) = account.withdraw(ticket)
        {
            self.not_begun(held);
        }
    }
}
