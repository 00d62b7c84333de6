//! Purges of the object store: deletes the objects of chunks.

use std::sync::atomic::Ordering;

use futures_util::stream::iter;
use futures_util::{StreamExt as _, TryStreamExt as _};
use larder_core::store::PurgedKeys;
use larder_core::store::ids::ChunkKey;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkHash, Fingerprint};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use tokio::time::{Instant, timeout};

use super::super::metrics::Kind;
use super::super::record::format_folder;
use super::super::trouble::{Trouble, TroubleKind};
use super::request::{DELETE, Line};
use super::{Client, Failed};

impl Client {
    /// Deletes the objects of chunks, or counts them. `progress` hears of each page. Forgets all facts about these objects.
    ///
    /// # Errors
    /// Fails if the store cannot be listed, or objects cannot be deleted: some are left.
    pub(in super::super) async fn purge(
        &self,
        keys: &PurgedKeys,
        mode: PurgeMode,
        progress: &dyn Fn(u64),
    ) -> Result<(), Trouble> {
        self.forget(keys);
        let all = format_folder(&self.prefix);
        let listed = self.store.list_with_delimiter(Some(&all));
        let folders = timeout(self.patience, listed).await.map_err(|_| late())?;
        let folders = folders.map_err(|error| Trouble::of(&error, LIST))?.common_prefixes;
        let is_purged = |folder: &Path| {
            let fingerprint = folder.filename().and_then(|name| name.parse::<ChunkHash>().ok());
            fingerprint.is_some_and(|ChunkHash(bytes)| keys.has_namespace(&Fingerprint(bytes)))
        };
        for folder in folders.into_iter().filter(is_purged) {
            self.purge_namespace(&folder, keys, mode, progress).await?;
        }
        // Objects that were found meanwhile are known again.
        self.forget(keys);
        Ok(())
    }

    async fn purge_namespace(
        &self,
        folder: &Path,
        keys: &PurgedKeys,
        mode: PurgeMode,
        progress: &dyn Fn(u64),
    ) -> Result<(), Trouble> {
        let named = |at: &Path| {
            let hash: ChunkHash = at.filename()?.get(..64)?.parse().ok()?;
            Some(keys.hashes().is_none_or(|hashes| hashes.contains(&hash)))
        };
        let mut objects = self.store.list(Some(folder)).ready_chunks(PAGE);
        while let Some(page) = timeout(self.patience, objects.next()).await.map_err(|_| late())? {
            let mut found = Vec::with_capacity(page.len());
            for object in page {
                let at = object.map_err(|error| Trouble::of(&error, LIST))?.location;
                found.extend(Some(at).filter(|at| named(at) == Some(true)));
            }
            let count = found.len() as u64;
            if mode == PurgeMode::Remove {
                iter(found.into_iter().map(Ok))
                    .try_for_each_concurrent(AT_A_TIME, |at| self.purge_object(at))
                    .await?;
            }
            progress(count);
        }
        Ok(())
    }

    async fn purge_object(&self, at: Path) -> Result<(), Trouble> {
        if self.said.stops.load(Ordering::Acquire) {
            return Err(Trouble::new(TroubleKind::Other, DELETE, "the node stops"));
        }
        let deadline = Instant::now() + self.patience;
        let deleted = self.ask(Line::Blocks(0), (Kind::Delete, DELETE), deadline, self.store.delete(&at));
        match deleted.await {
            Ok(()) | Err(Failed::Absent | Failed::Exists) => Ok(()),
            Err(Failed::Trouble(trouble)) => Err(trouble),
        }
    }

    fn forget(&self, keys: &PurgedKeys) {
        let mut known = self.known.borrow_mut();
        known.forget(|key| keys.has(&ChunkKey { ..key.chunk }));
        self.metrics.known.set(known.len() as i64);
    }
}

fn late() -> Trouble {
    Trouble::new(TroubleKind::TimedOut, LIST, "it does not answer")
}

const LIST: &str = "list the objects of a namespace";

/// Objects that are listed before they are deleted: a page of S3.
const PAGE: usize = 1_000;

/// Deletions at a time.
const AT_A_TIME: usize = 16;
