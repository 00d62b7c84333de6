//! Purges of the object store: deletes the objects of chunks.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::Ordering;

use futures_util::StreamExt as _;
use futures_util::stream::iter;
use larder_core::store::PurgedKeys;
use larder_core::store::ids::ChunkKey;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkHash, Fingerprint};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt as _, Result as StoreResult};
use tokio::time::{Instant, timeout};

use super::super::metrics::Kind;
use super::super::record::format_folder;
use super::super::trouble::{Trouble, TroubleKind};
use super::request::{DELETE, GET, Line};
use super::{Client, Failed};
use crate::disk::format::{PAGE_BYTES, RecordHeader};

/// Why objects of a purge are left.
#[derive(Debug, Clone)]
pub struct PurgeTrouble {
    /// The first failure.
    trouble: Trouble,
    /// Objects that could not be deleted, or read to see whether they are to be purged.
    objects: u64,
    /// The name of the first of them.
    first: Option<Path>,
    /// Failures since the last object that was deleted or read.
    in_a_row: u32,
}

impl From<Trouble> for PurgeTrouble {
    fn from(trouble: Trouble) -> Self {
        Self { trouble, objects: 0, first: None, in_a_row: 0 }
    }
}

impl fmt::Display for PurgeTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trouble, objects, first, in_a_row } = self;
        trouble.fmt(f)?;
        if let Some(first) = first {
            write!(f, "; objects that are left: {objects}, the first is {first}")?;
        }
        if *in_a_row >= MOST_IN_A_ROW { f.write_str("; then the purge ended") } else { Ok(()) }
    }
}

/// The troubles of a purge that is under way.
#[derive(Default)]
struct Troubles(RefCell<Option<PurgeTrouble>>);

impl Troubles {
    /// Notes a failure: of an object, or of a list.
    fn note(&self, trouble: Trouble, object: Option<&Path>) {
        let mut noted = self.0.borrow_mut();
        let noted = noted.get_or_insert_with(|| trouble.into());
        noted.in_a_row += 1;
        noted.objects += u64::from(object.is_some());
        noted.first = noted.first.take().or_else(|| object.cloned());
    }

    /// Notes an object that stays, since it leads to an object that is left.
    fn note_kept(&self) {
        if let Some(noted) = &mut *self.0.borrow_mut() {
            noted.objects += 1;
        }
    }

    fn note_success(&self) {
        if let Some(noted) = &mut *self.0.borrow_mut() {
            noted.in_a_row = 0;
        }
    }

    /// Whether the store fails all the time.
    fn are_too_many(&self) -> bool {
        self.0.borrow().as_ref().is_some_and(|noted| noted.in_a_row >= MOST_IN_A_ROW)
    }
}

/// How far each purged chunk is behind the first purged chunk of its prompt, and the chunk that it continues: the first continues
/// itself here.
type Tree = HashMap<ChunkHash, (u32, ChunkHash)>;

impl Client {
    /// Deletes the objects of chunks, or counts them. `progress` hears of each page. Forgets all facts about these objects.
    ///
    /// # Errors
    /// Fails if the store cannot be listed, or objects cannot be deleted: some are left.
    pub(in super::super) async fn purge(
        &self,
        mut keys: PurgedKeys,
        mode: PurgeMode,
        progress: &dyn Fn(u64),
    ) -> Result<(), PurgeTrouble> {
        self.forget(&keys);
        let purged = self.purge_namespaces(&mut keys, mode, progress).await;
        // Objects that were found meanwhile are known again.
        self.forget(&keys);
        purged
    }

    async fn purge_namespaces(
        &self,
        keys: &mut PurgedKeys,
        mode: PurgeMode,
        progress: &dyn Fn(u64),
    ) -> Result<(), PurgeTrouble> {
        let all = format_folder(&self.prefix);
        let listed = self.store.list_with_delimiter(Some(&all));
        let folders = timeout(self.patience, listed).await.map_err(|_| late())?;
        let folders = folders.map_err(|error| Trouble::of(&error, LIST))?.common_prefixes;
        let is_purged = |folder: &Path, keys: &PurgedKeys| {
            let fingerprint = folder.filename().and_then(|name| name.parse::<ChunkHash>().ok());
            fingerprint.is_some_and(|ChunkHash(bytes)| keys.has_namespace(&Fingerprint(bytes)))
        };
        let troubles = Troubles::default();
        for folder in folders {
            if !is_purged(&folder, keys) {
                continue;
            }
            let mut tree = Tree::new();
            if keys.hashes().is_some() {
                tree = self.add_continuing(&folder, keys, &troubles).await;
                // A store that does not let read may let delete.
                troubles.note_success();
            }
            self.purge_namespace(&folder, keys, &tree, mode, progress, &troubles).await;
        }
        troubles.0.into_inner().map_or(Ok(()), Err)
    }

    async fn purge_namespace(
        &self,
        folder: &Path,
        keys: &PurgedKeys,
        tree: &Tree,
        mode: PurgeMode,
        progress: &dyn Fn(u64),
        troubles: &Troubles,
    ) {
        let is_named = |hash: &ChunkHash| keys.hashes().is_none_or(|hashes| hashes.contains(hash));
        let mut in_tree = Vec::new();
        let mut objects = self.store.list(Some(folder)).ready_chunks(PAGE);
        while let Some(page) = self.next_page(&mut objects, troubles).await {
            let found = page.into_iter().map(|ObjectMeta { location, .. }| location);
            let found: Vec<Path> =
                found.filter(|at| hash_of(at).is_some_and(|hash| is_named(&hash))).collect();
            match mode {
                PurgeMode::Count => progress(found.len() as u64),
                PurgeMode::Remove if keys.hashes().is_some() => in_tree.extend(found),
                PurgeMode::Remove => _ = self.purge_page(found, progress, troubles).await,
            }
        }
        self.purge_tree(in_tree, tree, progress, troubles).await;
    }

    /// Deletes the last chunks of prompts first. An object that is left keeps those that lead to it, so a repeated purge finds it. The
    /// first chunks go in any case: without them nothing of what is left is found by lookups.
    async fn purge_tree(&self, objects: Vec<Path>, tree: &Tree, progress: &dyn Fn(u64), troubles: &Troubles) {
        let place = |at: &Path| tree.get(&hash_of(at)?);
        let depth = |at: &Path| place(at).map_or(0, |&(depth, _)| depth);
        let mut objects: Vec<(u32, Path)> = objects.into_iter().map(|at| (depth(&at), at)).collect();
        objects.sort_unstable_by(|one, other| other.cmp(one));
        let mut kept: HashSet<ChunkHash> = HashSet::new();
        for level in objects.chunk_by(|(one, _), (other, _)| one == other) {
            let is_kept = |at: &Path| depth(at) > 0 && hash_of(at).is_some_and(|hash| kept.contains(&hash));
            let (mut left, go): (Vec<Path>, Vec<Path>) =
                level.iter().map(|(_, at)| at.clone()).partition(is_kept);
            left.iter().for_each(|_| troubles.note_kept());
            for page in go.chunks(PAGE) {
                left.extend(self.purge_page(page.to_vec(), progress, troubles).await);
            }
            kept.extend(left.iter().filter_map(place).map(|&(_, parent)| parent));
        }
    }

    /// Deletes objects, and returns those that are left.
    async fn purge_page(&self, objects: Vec<Path>, progress: &dyn Fn(u64), troubles: &Troubles) -> Vec<Path> {
        let count = objects.len();
        let purged = iter(objects).map(async |at| {
            let is_gone = self.purge_object(at.clone(), troubles).await;
            (!is_gone).then_some(at)
        });
        let left =
            purged.buffer_unordered(AT_A_TIME).filter_map(std::future::ready).collect::<Vec<_>>().await;
        progress((count - left.len()) as u64);
        left
    }

    /// Adds the chunks whose objects say that they continue chunks of a purge: a node does not know the chunks that only the object
    /// store has. Returns how the chunks continue each other.
    async fn add_continuing(&self, folder: &Path, keys: &mut PurgedKeys, troubles: &Troubles) -> Tree {
        let mut chunks: Vec<(ChunkHash, ChunkHash)> = Vec::new();
        let mut objects = self.store.list(Some(folder)).ready_chunks(PAGE);
        while let Some(mut page) = self.next_page(&mut objects, troubles).await {
            page.retain(|object| hash_of(&object.location).is_some());
            // One object of each chunk is enough: they follow each other.
            page.dedup_by_key(|object| hash_of(&object.location));
            let read = iter(page).map(|object| self.parent_and_name(object, troubles));
            chunks.extend(
                read.buffer_unordered(AT_A_TIME).filter_map(std::future::ready).collect::<Vec<_>>().await,
            );
            if chunks.len() > MOST_READ {
                troubles.note(
                    Trouble::new(TroubleKind::Other, GET, "too many objects: purge the namespace"),
                    None,
                );
                break;
            }
        }
        chunks.sort_unstable();
        let tree = tree_of(&chunks, keys);
        keys.add_chunks(tree.keys().copied());
        tree
    }

    /// The hash of the chunk that an object's chunk continues, and that of the object's chunk. `None` if there is no such object any
    /// more, it is damaged, or it cannot be read.
    async fn parent_and_name(
        &self,
        object: ObjectMeta,
        troubles: &Troubles,
    ) -> Option<(ChunkHash, ChunkHash)> {
        let ObjectMeta { location: at, size, .. } = object;
        if size < PAGE_BYTES || self.is_to_end(troubles) {
            return None;
        }
        let _turn = self.turn(Line::Blocks(PAGE_BYTES)).await;
        let read = timeout(self.patience, self.store.get_range(&at, 0..PAGE_BYTES)).await;
        let trouble = match read {
            Ok(Ok(page)) => {
                troubles.note_success();
                return Some((RecordHeader::peek_chunk(&page).ok()?.parent, hash_of(&at)?));
            }
            Ok(Err(Error::NotFound { .. })) => return None,
            Ok(Err(error)) => Trouble::of(&error, GET),
            Err(_) => Trouble::new(TroubleKind::TimedOut, GET, "it does not answer"),
        };
        troubles.note(trouble, Some(&at));
        None
    }

    /// The next objects of a list; `None` at its end, or if the purge ends.
    async fn next_page(
        &self,
        objects: &mut (impl futures_util::Stream<Item = Vec<StoreResult<ObjectMeta>>> + Unpin),
        troubles: &Troubles,
    ) -> Option<Vec<ObjectMeta>> {
        if self.is_to_end(troubles) {
            return None;
        }
        let page = timeout(self.patience, objects.next()).await;
        let page = match page {
            Ok(page) => page?.into_iter().collect::<StoreResult<Vec<_>>>(),
            Err(_) => {
                troubles.note(late(), None);
                return None;
            }
        };
        page.inspect_err(|error| troubles.note(Trouble::of(error, LIST), None)).ok()
    }

    /// Deletes an object. Returns whether it is gone.
    async fn purge_object(&self, at: Path, troubles: &Troubles) -> bool {
        if self.is_to_end(troubles) {
            return false;
        }
        let deadline = Instant::now() + self.patience;
        let deleted = self.ask(Line::Blocks(0), (Kind::Delete, DELETE), deadline, self.store.delete(&at));
        match deleted.await {
            Ok(()) | Err(Failed::Absent | Failed::Exists) => {
                troubles.note_success();
                true
            }
            Err(Failed::Trouble(trouble)) => {
                troubles.note(trouble, Some(&at));
                false
            }
        }
    }

    /// Whether a purge ends early.
    fn is_to_end(&self, troubles: &Troubles) -> bool {
        let stops = self.said.stops.load(Ordering::Acquire);
        if stops {
            troubles.note(Trouble::new(TroubleKind::Other, DELETE, "the node stops"), None);
        }
        stops || troubles.are_too_many()
    }

    /// Forgets all facts about the objects of these namespaces.
    pub(in super::super) fn forget_namespaces(&self, keys: &PurgedKeys) {
        self.forget_where(|key| keys.has_namespace(&key.fingerprint));
    }

    fn forget(&self, keys: &PurgedKeys) {
        self.forget_where(|key| keys.has(key));
    }

    fn forget_where(&self, is_one: impl Fn(&ChunkKey) -> bool) {
        let mut known = self.known.borrow_mut();
        known.forget(|key| is_one(&key.chunk));
        self.metrics.known.set(known.len() as i64);
    }
}

/// The named chunks, and all chunks that continue them. `chunks` has the parent and the name of each chunk, in order.
fn tree_of(chunks: &[(ChunkHash, ChunkHash)], named: &PurgedKeys) -> Tree {
    let is_named = |hash: &ChunkHash| named.hashes().is_some_and(|hashes| hashes.contains(hash));
    let continues =
        |(parent, hash): &&(ChunkHash, ChunkHash)| parent != hash && is_named(parent) && is_named(hash);
    let later: HashSet<ChunkHash> = chunks.iter().filter(continues).map(|(_, hash)| *hash).collect();
    let mut due: Vec<ChunkHash> = named.hashes().into_iter().flatten().copied().collect();
    due.retain(|hash| !later.contains(hash));
    let mut tree: Tree = due.iter().map(|&hash| (hash, (0, hash))).collect();
    while let Some(parent) = due.pop() {
        let depth = tree[&parent].0 + 1;
        let from = chunks.partition_point(|(of, _)| *of < parent);
        for &(_, hash) in chunks[from..].iter().take_while(|(of, _)| *of == parent) {
            if let Entry::Vacant(new) = tree.entry(hash) {
                new.insert((depth, parent));
                due.push(hash);
            }
        }
    }
    tree
}

/// The hash in an object's name.
fn hash_of(at: &Path) -> Option<ChunkHash> {
    at.filename()?.get(..64)?.parse().ok()
}

fn late() -> Trouble {
    Trouble::new(TroubleKind::TimedOut, LIST, "it does not answer")
}

const LIST: &str = "list the objects of a namespace";

/// Objects that are listed before they are deleted: a page of S3.
const PAGE: usize = 1_000;

/// Deletions at a time, or reads of first pages.
const AT_A_TIME: usize = 16;

/// Failures in a row that end a purge.
const MOST_IN_A_ROW: u32 = 100;

/// Chunks of a namespace whose first pages are read to find those that continue a chunk: 64 bytes of memory each.
const MOST_READ: usize = 2 << 20;
