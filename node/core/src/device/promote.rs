//! The core's use of the device tier: promotes blocks, and tells lookups which blocks are there.

use larder_protocol::checksum::BlockKey;
use larder_protocol::session::{Found, Lookup, Span, Tier};

use super::{CopyClaims, Device, HeldBy, SlotId};
use crate::Core;
use crate::effect::{DeviceWork, Promoted};
use crate::event::CopyAnswer;
use crate::reports::Reporter;
use crate::store::LoadBlock;
use crate::store::ids::{ChunkKey, SessionId};

impl Device {
    /// Forgets the blocks of a chunk whose bytes on the host are wrong: nobody verifies reads from the device tier.
    pub(crate) fn drop_blocks(&mut self, keys: &[BlockKey]) {
        let Self { account, tier, .. } = self;
        keys.iter().filter_map(|key| tier.drop_block(key)).for_each(|slot| account.slots.give_up(slot));
    }

    /// Forgets blocks that are purged.
    pub(crate) fn purge(&mut self, is_purged: impl Fn(&BlockKey) -> bool) {
        let Self { account, tier, .. } = self;
        tier.purge(is_purged).into_iter().for_each(|slot| account.slots.give_up(slot));
    }

    /// Reserves a slot of the tier: a free slot, or else the slot of the next victim, which is evicted.
    fn reserve_slot(&mut self) -> Option<SlotId> {
        self.account.slots.reserve().or_else(|| {
            self.account.slots.give_up(self.tier.evict()?);
            self.account.slots.reserve()
        })
    }
}

impl Core {
    /// Marks the chunks of a lookup that the device tier has too, with all their blocks.
    pub(crate) fn find_on_device(&self, session: SessionId, ask: &Lookup, found: &mut Found) {
        let tier = &self.device.tier;
        let is_asked = ask.tiers.is_empty() || ask.tiers.contains(&Tier::Device);
        if !is_asked || tier.usage().blocks == 0 {
            return;
        }
        let is_there = |position: u32| {
            let hash = ask.chain.hashes[position as usize];
            let mut keys = self.store.block_keys(session, ask.namespace, hash).peekable();
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

    /// Takes the sums of the device tier's candidates: right blocks go to the tier, wrong blocks are reported. Without sums, the
    /// next load tries again.
    pub(crate) fn summed_wanted(&mut self, load: u64, wanted: Vec<LoadBlock>, answer: CopyAnswer) {
        let sums = answer.sums().unwrap_or_default();
        let summed = wanted.into_iter().zip(sums);
        let (right, wrong): (Vec<_>, Vec<_>) = summed.partition(|(block, sums)| block.checksum == sums.whole);
        self.promote(load, right.into_iter().map(|(block, _)| block).collect());
        for (LoadBlock { key, .. }, _) in wrong {
            self.doubt(&Reporter::DeviceLane, key.fingerprint, vec![key.hash]);
        }
    }

    /// Copies the blocks of a load into the device tier, in one order.
    fn promote(&mut self, load: u64, wanted: Vec<LoadBlock>) {
        let device = &mut self.device;
        let (mut slots, mut moves, mut bytes) = (Vec::new(), Vec::new(), 0);
        for block in wanted {
            // Another copy may have brought the block meanwhile, or it may be purged.
            let key = ChunkKey { fingerprint: block.key.fingerprint, hash: block.key.hash };
            if !device.tier.wants(&block.key, block.bytes, u8::MAX) || self.store.is_condemned(&key) {
                continue;
            }
            let Some(slot) = device.reserve_slot() else { break };
            device.tier.fill(slot, block.key);
            bytes += block.bytes;
            slots.push((slot, block.facts));
            moves.push(Promoted { from: block.place, to: device.tier.offset(slot), bytes: block.bytes });
        }
        if slots.is_empty() {
            return self.store.end_load(load);
        }
        let fills: Vec<SlotId> = slots.iter().map(|&(slot, _)| slot).collect();
        let held = CopyClaims { what: HeldBy::Promotion(load, slots), tenant: None, bytes };
        match self.device.account.begin_own(self.millis().0, fills.clone(), held) {
            Ok(number) => self.order_device_copy(number, DeviceWork::Promote(moves)),
            Err(held) => {
                fills.into_iter().for_each(|slot| self.device.account.slots.give_up(slot));
                self.not_begun(held);
            }
        }
    }
}
