//! The ends of copies by a device: the device's answers, and the sums of saved blocks.

use larder_protocol::lane::CopyEnd;
use larder_protocol::session::Response;

use super::account::Ended;
use super::{CopyClaims, Device, HeldBy, TOO_MANY_COPIES};
use crate::Core;
use crate::copies::Save;
use crate::effect::{Counted, DeviceCopyEnd, Effect};
use crate::event::{CopyAnswer, DeviceCopyNumber, DeviceEvent, DeviceFailure};

impl Core {
    /// Takes a device's answer.
    pub(crate) fn device_says(&mut self, event: DeviceEvent) {
        match event {
            DeviceEvent::Took { number, is_taken } => self.device_took(number, is_taken),
            DeviceEvent::Layers { number, done } => self.device.account.layers(number, done),
            DeviceEvent::Ended { number, result } => self.device_copied(number, result),
            DeviceEvent::Lost => {
                let device = &mut self.device;
                device.tensors.clear();
                device.tier.clear().into_iter().for_each(|slot| device.account.slots.give_up(slot));
            }
            DeviceEvent::Gone => {
                self.device.tensors.clear();
                for held in self.device.account.gone() {
                    self.failed(held);
                }
            }
        }
    }

    fn device_took(&mut self, number: DeviceCopyNumber, is_taken: bool) {
        let request = self.device.untaken.remove(&number);
        if !is_taken {
            self.withdraw(number);
        }
        if let Some(request) = request {
            match is_taken {
                true => self.answer(request, Response::Copying(number.0)),
                false => self.refuse(request, Err(TOO_MANY_COPIES)),
            }
        }
    }

    fn device_copied(&mut self, number: DeviceCopyNumber, result: Result<(), DeviceFailure>) {
        let Some(Ended { held, is_whole }) = self.device.account.ended(number, result) else { return };
        if !is_whole {
            if result == Err(DeviceFailure::NoTier) {
                self.device.tier.refused();
            }
            self.count(Counted::ByDevice(DeviceCopyEnd::Failed, 0));
            return self.failed(held);
        }
        let CopyClaims { what, bytes, .. } = held;
        match what {
            HeldBy::Load(load, wanted) => {
                self.count(Counted::ByDevice(DeviceCopyEnd::Loaded, bytes));
                self.device.account.finish(number, CopyEnd::Done);
                // The load keeps the blocks that the device tier wants in place until the tier has them.
                match wanted.is_empty() {
                    true => self.store.end_load(load),
                    false => self.sum_wanted(load, wanted),
                }
            }
            HeldBy::Promotion(load, slots) => {
                let Device { account, tier, .. } = &mut self.device;
                for (slot, facts) in slots {
                    if !tier.filled(slot, facts) {
                        account.slots.give_up(slot);
                    }
                }
                self.store.end_load(load);
                self.count(Counted::ByDevice(DeviceCopyEnd::Promoted, bytes));
            }
            HeldBy::Save(order, moves) => self.sum(Save { number, order, bytes, moves }),
            HeldBy::Forgotten => {}
        }
    }

    /// Ends a failed copy whose memory the device has let go of.
    fn failed(&mut self, held: CopyClaims) {
        match held.what {
            HeldBy::Save(order, _) => _ = self.store.finish_layers(order, None),
            HeldBy::Load(..) | HeldBy::Promotion(..) | HeldBy::Forgotten => self.not_begun(held),
        }
    }

    /// Ends a copy that was not begun: its caller may ask again.
    pub(super) fn not_begun(&mut self, held: CopyClaims) {
        match held.what {
            HeldBy::Load(load, _) => self.store.end_load(load),
            HeldBy::Promotion(load, slots) => {
                slots.iter().for_each(|&(slot, _)| self.device.tier.dropped(slot));
                self.store.end_load(load);
            }
            HeldBy::Save(order, _) => self.store.postpone_commit(order),
            HeldBy::Forgotten => {}
        }
    }

    /// Ends a copy that the device's thread did not take.
    pub(super) fn withdraw(&mut self, number: DeviceCopyNumber) {
        if let Some(held) = self.device.account.withdraw(number) {
            self.not_begun(held);
        }
    }

    /// Takes the sums of a save: the save can now be committed, if the right to commit has not ended. If too much is being copied
    /// to sum its blocks, the save waits.
    pub(crate) fn saved(&mut self, save: Save, answer: CopyAnswer) {
        if answer == CopyAnswer::Busy {
            return self.device.unsummed.push(save);
        }
        let Save { number, order, bytes, .. } = save;
        let sums = answer.sums();
        let pieces = sums.as_ref().map_or(0, |sums| sums.len() as u64);
        let end = if self.store.finish_layers(order, sums) {
            self.count(Counted::ByDevice(DeviceCopyEnd::Saved, bytes));
            self.count(Counted::Given(pieces, bytes));
            CopyEnd::Done
        } else {
            self.count(Counted::ByDevice(DeviceCopyEnd::Failed, 0));
            CopyEnd::Failed
        };
        self.device.account.finish(number, end);
    }

    /// Does the periodic work for copies.
    pub(crate) fn look_after_copies(&mut self) {
        let now = self.millis().0;
        for number in self.device.account.overdue(now) {
            self.quarantine(number);
        }
        self.device.account.answer_late(now);
        for save in std::mem::take(&mut self.device.unsummed) {
            self.sum(save);
        }
    }

    /// Quarantines the memory of a copy that did not end in time, until the device lets go.
    fn quarantine(&mut self, number: DeviceCopyNumber) {
        let device = &mut self.device;
        match device.account.held(number).map(|held| &held.what) {
            Some(&HeldBy::Load(load, _)) => self.store.quarantine_load(load),
            Some(HeldBy::Promotion(load, slots)) => {
                slots.iter().for_each(|&(slot, _)| device.tier.dropped(slot));
                self.store.quarantine_load(*load);
            }
            Some(&HeldBy::Save(order, _)) => self.store.quarantine_save(order),
            Some(HeldBy::Forgotten) | None => {}
        }
        self.count(Counted::ByDevice(DeviceCopyEnd::Stalled, 0));
        self.effects.push_back(Effect::CancelDeviceCopy(number));
    }
}
