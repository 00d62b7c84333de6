//! Calls to the tiers below, disk and object store: find chunks, read them, write them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use larder_core::store::{BlockMove, Checksums, ChunkWrite, Wanted};
use larder_core::{Below, ReadAnswer, Written};
use larder_protocol::{ChunkRef, Fingerprint};

use super::Hands;
use crate::disk::order::OrderError;
use crate::disk::{BlockPlace, ReadOrder, Refused, Source, WriteOrder};
use crate::object::{BlockId, ObjectTier};

/// An actor's part in the object store.
pub struct ObjectParts {
    /// The tier, which all actors share.
    pub tier: Arc<ObjectTier>,
    /// How long a lease waits for the tier.
    pub deadline: Duration,
    /// How long a lookup waits for the store's answer.
    pub find_deadline: Duration,
    /// Limit of chunks for which the actor remembers the store's answer: about 100 bytes each.
    pub known_chunks: usize,
}

impl Hands {
    /// Asks the object store for chunks.
    pub(crate) fn find_stored(
        &self,
        fingerprint: Fingerprint,
        chunks: Vec<ChunkRef>,
        blocks: &[(u16, u8)],
    ) -> Result<impl Future<Output = Vec<Option<bool>>> + use<>, Vec<Option<bool>>> {
        let objects = self.objects.as_ref().ok_or_else(Vec::new)?;
        let blocks = blocks.iter().map(|&(slice, pool)| BlockId { slice, pool }).collect();
        let asking = objects.tier.find(fingerprint, chunks, blocks).map_err(|_| Vec::new())?;
        // The tier's own deadline begins only when the tier takes the question up. Its answer at that time has what it knows.
        let found = tokio::time::timeout(objects.find_deadline + FIND_MARGIN, asking);
        Ok(found.map(|found| found.ok().and_then(Result::ok).unwrap_or_default()))
    }

    /// Has a tier read a chunk into its slots.
    pub(crate) fn read(
        &self,
        tier: Below,
        (fingerprint, wanted): (Fingerprint, &Wanted),
    ) -> Result<impl Future<Output = ReadAnswer> + use<>, ReadAnswer> {
        let places = wanted.blocks.iter().map(|block| BlockPlace::of(&self.arena, block)).collect();
        let order = ReadOrder::new(fingerprint, wanted.chunk, places).map_err(|error| {
            tracing::error!(%error, "the store made an order that does not fit its memory; please report this line");
            ReadAnswer::Impossible
        })?;
        let coming = match tier {
            Below::Disk => self.disk.as_ref().map(|disk| disk.tier.read(order)),
            Below::Object => self.objects.as_ref().map(|objects| objects.tier.read(order)),
        };
        let coming = coming.unwrap_or(Err(Refused::Closed))?;
        Ok(coming.map(move |answer| {
            let lost = |_| {
                tracing::error!(?tier, "the tier's thread failed: the memory of its reads stays unused until the node starts again");
                ReadAnswer::Lost
            };
            answer.map_or_else(lost, ReadAnswer::from)
        }))
    }

    /// Has a tier write a chunk from its slots.
    pub(crate) fn write(&self, write: &ChunkWrite) -> Result<impl Future<Output = Written> + use<>, Written> {
        let tier = write.write.tier;
        let order = self.write_order(write).inspect_err(|error| self.cannot_write(write, error));
        let order = order.map_err(|_| Written::Failed)?;
        let coming = match tier {
            Below::Disk => self.disk.as_ref().map(|disk| disk.tier.write(order)),
            Below::Object => self.objects.as_ref().map(|objects| objects.tier.write(order)),
        };
        let coming = coming.unwrap_or(Err(Refused::Closed))?;
        Ok(coming.map(|answer| answer.map_or(Written::Failed, Written::from)))
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

    fn cannot_write(&self, write: &ChunkWrite, error: &OrderError) {
        let (tier, chunk) = (write.write.tier, write.chunk.hash);
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
        match (tier, &self.objects) {
            (Below::Disk, _) => self.metrics.not_written(why),
            (Below::Object, Some(objects)) => objects.tier.not_written(why),
            (Below::Object, None) => {}
        }
    }
}

/// How much later than its deadline a tier's answer may come.
const FIND_MARGIN: Duration = Duration::from_millis(50);
