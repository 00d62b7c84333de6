//! What an actor does with the object store: writes what the store wants there.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::store::ids::ChunkKey;
use larder_core::store::{ChunkWrite, WriteId};
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use crate::disk::{Refused, WriteAnswer};
use crate::object::ObjectTier;

/// An actor's part in the object store, as it is handed over.
pub struct ObjectParts {
    /// The tier, which all actors share.
    pub tier: Arc<ObjectTier>,
    /// How long a lease waits for it.
    pub deadline: Duration,
    /// How long a lookup waits to hear what is there.
    pub find_deadline: Duration,
    /// Chunks of which the actor remembers whether they are there: about 100 bytes each.
    pub known_chunks: usize,
}

/// An actor's part in the object store.
pub(super) struct Objects {
    pub(super) tier: Arc<ObjectTier>,
    pub(super) find_deadline: Duration,
    /// Uploads under way.
    uploads: usize,
}

impl Objects {
    pub(super) fn new(parts: ObjectParts) -> Self {
        let ObjectParts { tier, find_deadline, .. } = parts;
        Self { tier, find_deadline, uploads: 0 }
    }
}

impl Objects {
    /// Nothing is under way for the actor any more.
    pub(super) fn begin_anew(&mut self) {
        self.uploads = 0;
    }
}

impl GpuActor {
    /// Orders what the store wants written there, as far as it keeps up.
    pub(super) fn write_to_objects(&mut self, ctx: &mut Context<Self>) {
        while self.objects.as_ref().is_some_and(|objects| objects.uploads < MAX_UPLOADS)
            && let Some(write) = self.core.store.next_upload()
        {
            if !self.order_upload(&write, ctx) {
                return;
            }
        }
    }

    /// Orders one upload; whether more may follow.
    fn order_upload(&mut self, write: &ChunkWrite, ctx: &mut Context<Self>) -> bool {
        let id = write.write;
        let order = match self.write_order(write) {
            Ok(order) => order,
            Err(error) => {
                tracing::warn!(%error, chunk = %write.chunk.hash, "a chunk cannot be written to the object store");
                self.core.store.uploaded(id, false);
                return true;
            }
        };
        let Some(objects) = &mut self.objects else { return false };
        let key = order.key();
        match objects.tier.write(order) {
            Ok(answer) => {
                objects.uploads += 1;
                let finish = answer
                    .into_actor(self)
                    .map(move |answer, actor, ctx| actor.uploaded(id, key, answer, ctx));
                self.spawn(ctx, finish);
                true
            }
            // Asked again with the next tick at the latest.
            Err(Refused::Busy(_)) => {
                self.core.store.postpone_upload(id);
                false
            }
            Err(Refused::Closed(_)) => {
                self.core.store.uploaded(id, false);
                true
            }
        }
    }

    fn uploaded(
        &mut self,
        id: WriteId,
        key: ChunkKey,
        answer: Result<WriteAnswer, RecvError>,
        ctx: &mut Context<Self>,
    ) {
        let is_stored = matches!(answer, Ok(WriteAnswer::Durable | WriteAnswer::AlreadyThere));
        if let Some(objects) = &mut self.objects {
            objects.uploads -= 1;
        }
        if is_stored {
            self.core.object_has(key);
        }
        self.core.store.uploaded(id, is_stored);
        self.settle(ctx);
    }
}

/// Chunks that are uploaded at a time.
const MAX_UPLOADS: usize = 64;
