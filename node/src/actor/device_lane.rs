//! Copies by the device: engines' tensors, the core's orders, and the device's reports.
//!
//! The actor never waits for the device: it asks through the thread's bounded ring, and repeats a refused request at its tick.

use std::os::fd::OwnedFd;

use actix::prelude::*;
use larder_core::store::Refused;
use larder_core::store::ids::SessionId;
use larder_core::{DeviceEvent, DeviceOrder, Event, Tensors};
use larder_protocol::lane::{RegisterTensors, TensorsRegistered};
use larder_protocol::session::Response;

use super::answer::PendingRequest;
use super::{Answer, GpuActor};
use crate::device_lane::{ClosedAside, DeviceCopyRefused, WORD_BYTES, Words};

impl GpuActor {
    /// Registers an engine's tensors with the device. An error is the answer to a request that is refused at once.
    #[expect(clippy::result_large_err, reason = "it is an answer, made once for each of an engine's tensors")]
    pub(super) fn register_tensors(
        &mut self,
        session: SessionId,
        ask: RegisterTensors,
        descriptors: Vec<OwnedFd>,
        asked: PendingRequest,
        ctx: &mut Context<Self>,
    ) -> Result<(), Answer> {
        let descriptors = ClosedAside(descriptors);
        let facts = self.core.may_know_tensors(session, ask.namespace, ask.block.into())?;
        let (answered, words) = self.device_lane.register(session, ask, descriptors, facts)?;
        let finish = answered.into_actor(self).map(move |known, actor: &mut Self, _| {
            let lost = |_| Err(DeviceCopyRefused::from(actor.device_lane.why_lost()));
            let answer = match known.unwrap_or_else(lost) {
                Ok(tensors) => actor.know_tensors(session, tensors, &words).unwrap_or_else(Answer::from),
                Err(refused) => Answer::from(Response::from(refused)),
            };
            actor.reply(asked, answer);
        });
        self.spawn(ctx, finish);
        Ok(())
    }

    /// Tells the core of tensors that the device has registered. If the session ended meanwhile, the device hears of that
    /// afterwards.
    fn know_tensors(
        &mut self,
        session: SessionId,
        tensors: Tensors,
        words: &Words,
    ) -> Result<Answer, Refused> {
        let descriptor = words.descriptor().try_clone_to_owned().map_err(|error| {
            tracing::error!(%error, "no descriptor left for the words that show progress: raise the limit of open files");
            Refused::Internal
        })?;
        let tensors = self.core.know_tensors(session, tensors)?;
        let known = TensorsRegistered { tensors, word_bytes: WORD_BYTES };
        Ok(Answer { response: Some(Response::TensorsRegistered(known)), descriptors: vec![descriptor] })
    }

    /// Hands an order to the device's thread.
    pub(super) fn copy_by_device(&mut self, order: DeviceOrder) {
        let number = order.number;
        let is_taken = self.device_lane.copy(order, &self.hands.arena).is_ok();
        self.tell(Event::Device(DeviceEvent::Took { number, is_taken }));
    }
}
