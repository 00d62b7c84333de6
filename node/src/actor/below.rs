//! The actor's calls to the tiers below, disk and object store: find chunks, read them, write them.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::store::{BlockMove, Checksums, ChunkWrite, FetchId};
use larder_core::{Below, Event, QuestionId, ReadAnswer, ReadId, WriteNumber, Written};
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::oneshot;

use super::GpuActor;
use crate::disk::order::OrderError;
use crate::disk::{BlockPlace, ReadOrder, Refused, Source, WriteAnswer, WriteOrder};
use crate::object::{BlockId, ObjectTier};

/// An actor's part in the object store.
pub struct ObjectParts {
    /// The tier, which all actors share.
    pub tier: Arc<ObjectTier>,
    /// How long a lease waits for it.
    pub deadline: Duration,
    /// How long a lookup waits for the store's answer.
    pub find_deadline: Duration,
    /// Limit of chunks for which the actor remembers the store's answer: about 100 bytes each.
    pub known_chunks: usize,
}

impl GpuActor {
    pub(super) fn find_stored(
        &mut self,
        question: QuestionId,
        fingerprint: Fingerprint,
        chunks: Vec<ChunkRef>,
        blocks: &[(u16, u8)],
        ctx: &mut Context<Self>,
    ) {
        let blocks = blocks.iter().map(|&(slice, pool)| BlockId { slice, pool }).collect();
        let asking = self.objects.as_ref().and_then(|objects| {
            let asking = objects.tier.find(fingerprint, chunks, blocks).ok()?;
            // Its own deadline begins when it is taken up.
            Some(tokio::time::timeout(objects.find_deadline, asking))
        });
        let Some(asking) = asking else {
            return self.tell(Event::StoredFound { question, found: Vec::new() });
        };
        self.tell_when(ctx, asking, move |found| {
            let found = found.ok().and_then(Result::ok).unwrap_or_default();
            Event::StoredFound { question, found }
        });
    }

    /// Has a tier read a chunk into its slots.
    pub(super) fn read(&mut self, read: ReadId, tier: Below, chunk: FetchId, ctx: &mut Context<Self>) {
        let order = self.core.wanted(chunk).map(|(fingerprint, wanted)| {
            let places = wanted.blocks.iter().map(|block| BlockPlace::of(&self.arena, block)).collect();
            ReadOrder::new(fingerprint, wanted.chunk, places)
        });
        let coming = match (order, tier) {
            (Some(Ok(order)), Below::Disk) => self.disk.as_ref().map(|disk| disk.tier.read(order)),
            (Some(Ok(order)), Below::Object) => self.objects.as_ref().map(|objects| objects.tier.read(order)),
            (Some(Err(error)), _) => {
                tracing::error!(%error, "the store made an order that does not fit its memory");
                return self.tell(Event::ReadEnded { read, answer: ReadAnswer::Impossible });
            }
            (None, _) => None,
        };
        let coming = match coming {
            Some(Ok(coming)) => coming,
            Some(Err(Refused::Busy)) => {
                return self.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
            }
            Some(Err(Refused::Closed)) | None => {
                return self.tell(Event::ReadEnded { read, answer: ReadAnswer::Closed });
            }
        };
        self.tell_when(ctx, coming, move |answer| {
            let answer = answer.map_or_else(
                |_| {
                    tracing::error!(?tier, "the tier's thread failed: the memory of its reads stays unused");
                    ReadAnswer::Lost
                },
                ReadAnswer::from,
            );
            Event::ReadEnded { read, answer }
        });
    }

    /// Has a tier write a chunk from its slots.
    pub(super) fn write(&mut self, number: WriteNumber, write: &ChunkWrite, ctx: &mut Context<Self>) {
        let answer = match self.order_write(write) {
            Ok(coming) => {
                return self.tell_when(ctx, coming, move |answer| {
                    let answer = answer.map_or(Written::Failed, Written::from);
                    Event::WriteEnded { number, answer }
                });
            }
            Err(answer) => answer,
        };
        self.tell(Event::WriteEnded { number, answer });
    }

    fn order_write(&self, write: &ChunkWrite) -> Result<oneshot::Receiver<WriteAnswer>, Written> {
        let (tier, chunk) = (write.write.tier, write.chunk.hash);
        let order = self.write_order(write).map_err(|error| {
            let why = match error {
                OrderError::Misnamed { .. } => {
                    tracing::error!(%error, ?tier, %chunk, "the store handed out a chunk under a wrong name");
                    "misnamed"
                }
                _ => {
                    tracing::warn!(%error, ?tier, %chunk, "a chunk cannot be written");
                    "too_large"
                }
            };
            if tier == Below::Disk {
                self.metrics.not_written(why);
            }
            Written::Failed
        })?;
        let ordered = match tier {
            Below::Disk => self.disk.as_ref().map(|disk| disk.tier.write(order)),
            Below::Object => self.objects.as_ref().map(|objects| objects.tier.write(order)),
        };
        match ordered {
            Some(Ok(coming)) => Ok(coming),
            Some(Err(Refused::Busy)) => Err(Written::Busy),
            Some(Err(Refused::Closed)) | None => Err(Written::Closed),
        }
    }

    fn write_order(&self, write: &ChunkWrite) -> Result<WriteOrder, OrderError> {
        let source = |(block, checksums): &(BlockMove, Checksums)| Source {
            place: BlockPlace::of(&self.arena, block),
            checksums: checksums.clone(),
        };
        let sources = write.blocks.iter().map(source);
        let order = WriteOrder::new(write.fingerprint, write.chunk, sources.collect())?;
        Ok(if write.replaces { order.replacing() } else { order })
    }
}
