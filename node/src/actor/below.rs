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
use crate::disk::{self, BlockPlace, ReadOrder, Refused, Source, WriteAnswer, WriteOrder};
use crate::object::{BlockId, ObjectTier};

/// An actor's part in the object store, as it is handed over.
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

/// An actor's part in the object store.
pub(super) struct Objects {
    pub(super) tier: Arc<ObjectTier>,
    pub(super) find_deadline: Duration,
}

impl Objects {
    pub(super) fn new(parts: ObjectParts) -> Self {
        let ObjectParts { tier, find_deadline, .. } = parts;
        Self { tier, find_deadline }
    }
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
        let finish = asking.into_actor(self).map(move |found, actor, ctx| {
            let found = found.ok().and_then(Result::ok).unwrap_or_default();
            actor.decide(Event::StoredFound { question, found }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Has a tier read a chunk into its slots.
    pub(super) fn read(&mut self, read: ReadId, tier: Below, chunk: FetchId, ctx: &mut Context<Self>) {
        let order = self.core.wanted(chunk).map(|(fingerprint, wanted)| {
            let places = wanted.blocks.iter().map(|block| self.block_place(block)).collect();
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
        let finish = coming.into_actor(self).map(move |answer, actor, ctx| {
            let answer = answer.map_or_else(
                |_| {
                    tracing::error!(?tier, "the tier's thread failed: the memory of its reads stays unused");
                    ReadAnswer::Lost
                },
                ReadAnswer::from,
            );
            actor.decide(Event::ReadEnded { read, answer }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Has a tier write a chunk from its slots.
    pub(super) fn write(&mut self, number: WriteNumber, write: &ChunkWrite, ctx: &mut Context<Self>) {
        let answer = match self.order_write(write) {
            Ok(coming) => {
                let finish = coming.into_actor(self).map(move |answer, actor, ctx| {
                    let is_there = matches!(answer, Ok(WriteAnswer::Durable | WriteAnswer::AlreadyThere));
                    let answer = if is_there { Written::There } else { Written::Failed };
                    actor.decide(Event::WriteEnded { number, answer }, ctx);
                });
                return self.spawn(ctx, finish);
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

    pub(super) fn write_order(&self, write: &ChunkWrite) -> Result<WriteOrder, OrderError> {
        let source = |(block, checksums): &(BlockMove, Checksums)| Source {
            place: self.block_place(block),
            checksums: checksums.clone(),
        };
        let sources = write.blocks.iter().map(source);
        let order = WriteOrder::new(write.fingerprint, write.chunk, sources.collect())?;
        Ok(if write.replaces { order.replacing() } else { order })
    }

    pub(super) fn block_place(&self, block: &BlockMove) -> BlockPlace {
        BlockPlace {
            slice: block.key.slice,
            pool: block.key.pool,
            memory: Arc::clone(self.arena.extent(block.place.extent)),
            offset: block.place.offset,
            bytes: block.bytes,
            range_bytes: block.range_bytes,
        }
    }
}

impl From<disk::ReadAnswer> for ReadAnswer {
    fn from(answer: disk::ReadAnswer) -> Self {
        match answer {
            disk::ReadAnswer::Here { checksums, pools, .. } => Self::Here { checksums, pools },
            disk::ReadAnswer::NotHeld
            | disk::ReadAnswer::OtherBlocks
            | disk::ReadAnswer::Damaged
            | disk::ReadAnswer::Disagrees => Self::Missing,
            disk::ReadAnswer::Closed => Self::Closed,
        }
    }
}
