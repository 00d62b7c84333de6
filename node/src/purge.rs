//! The node's purges: an admin has the node remove chunks from memory, disk and object store.
//!
//! A purge passes over each actor's disk and memory until it finds nothing more and no write of its chunks is under way. Then it
//! removes the objects. While a purge is open, none of its chunks is brought from elsewhere. It stays open while the admin purges
//! other nodes too: until the admin ends it, or is silent for `SILENCE`.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use actix::Addr;
use larder_core::store::PurgedKeys;
use larder_core::{Event, PurgeStep};
use larder_protocol::purge::{PurgeCommand, PurgeCounts, PurgeMode, PurgeReport, PurgeScope};
use tokio::sync::oneshot::Receiver;
use tokio::time::{sleep, timeout};

use crate::actor::{Errand, GpuActor, ask};
use crate::clock::{Clock, now_us};
use crate::disk::drive::DriveWatch;
use crate::disk::{DiskPurge, PurgedSegment, Refused};
use crate::object::ObjectTier;
use crate::object::tier::ObjectPurge;
use crate::tell::tell_each;
use crate::watched::{Watch, here};
use larder_net::audit::Audit;

/// The node's purges. Cloning shares.
#[derive(Clone)]
pub(crate) struct Purges(Arc<NodePurges>);

struct NodePurges {
    clock: Clock,
    audit: Audit,
    parts: OnceLock<Parts>,
    last: Mutex<Purge>,
}

/// The parts of a node that have chunks.
struct Parts {
    actors: Vec<Addr<GpuActor>>,
    /// The object store, if there is to be one; dangling if it could not be opened.
    objects: Option<Weak<ObjectTier>>,
}

/// The purge that was begun last.
#[derive(Debug, Clone, Default)]
struct Purge {
    report: PurgeReport,
    /// Whether the purge has ended, so that its chunks may come again.
    has_ended: bool,
    /// The time of the admin's last request.
    heard: Duration,
}

impl Purge {
    /// Whether its chunks may not come again yet. An admin who asks nothing any more counts as gone.
    fn is_open(&self, now: Duration) -> bool {
        !self.has_ended && now.saturating_sub(self.heard) < SILENCE
    }
}

impl Purges {
    /// Starts without a purge. No purge works before [`Purges::begin`].
    pub(crate) fn new(clock: Clock, audit: Audit) -> Self {
        let report = PurgeReport { purge: now_us(), is_over: true, ..PurgeReport::default() };
        let last = Purge { report, has_ended: true, ..Purge::default() };
        Self(Arc::new(NodePurges { clock, audit, parts: OnceLock::new(), last: Mutex::new(last) }))
    }

    /// Sets the parts that purges work on.
    pub(crate) fn begin(&self, actors: &[Addr<GpuActor>], objects: Option<Weak<ObjectTier>>) {
        _ = self.0.parts.set(Parts { actors: actors.to_vec(), objects });
    }

    /// Carries out an admin's command, and reports the purge's progress. If a purge panics, `watch` catches it, and the purge is
    /// over.
    ///
    /// # Errors
    /// A text for people: why the command cannot be carried out.
    pub(crate) fn command(
        &self,
        watch: &Watch,
        admin: &str,
        command: PurgeCommand,
    ) -> Result<PurgeReport, String> {
        match command {
            PurgeCommand::Start(scope, mode) => self.start(watch, admin, scope, mode),
            PurgeCommand::Report(purge) => self.heard_of(purge).map(|last| last.report),
            PurgeCommand::End(purge) => {
                let last = self.heard_of(purge)?;
                self.last().has_ended = true;
                Ok(last.report)
            }
        }
    }

    fn start(
        &self,
        watch: &Watch,
        admin: &str,
        scope: PurgeScope,
        mode: PurgeMode,
    ) -> Result<PurgeReport, String> {
        let purge = {
            let mut last = self.last();
            let is_open = last.is_open(self.0.clock.elapsed());
            // A purge whose admin ended it early goes on. One that is over stays open until its admin has heard of all nodes: a
            // command that only counts does not end it.
            if !last.report.is_over || is_open && mode == PurgeMode::Count {
                return Err("a purge is under way: try again when it is over".to_owned());
            }
            let purge = last.report.purge + 1;
            let report = PurgeReport { purge, ..PurgeReport::default() };
            *last = Purge { report, has_ended: false, heard: self.0.clock.elapsed() };
            purge
        };
        if mode == PurgeMode::Remove {
            self.0.audit.note(admin, "purge", &scope.to_string(), Ok::<_, &str>(()));
        }
        tracing::info!(admin, %scope, ?mode, "a purge begins");
        let (this, watch, admin) = (self.clone(), watch.clone(), admin.to_owned());
        actix_rt::spawn(async move {
            let carried_out = this.carry_out(purge, scope, mode, &admin);
            if watch.catch_in("purge", carried_out).await.is_none() {
                this.give_up(purge).await;
            }
        });
        Ok(self.last().report.clone())
    }

    fn heard_of(&self, purge: u64) -> Result<Purge, String> {
        let mut last = self.last();
        if last.report.purge != purge {
            return Err("another purge began meanwhile, or the node started again".to_owned());
        }
        last.heard = self.0.clock.elapsed();
        Ok(last.clone())
    }

    /// Carries out one purge, and waits for its end.
    async fn carry_out(&self, purge: u64, scope: PurgeScope, mode: PurgeMode, admin: &str) {
        let Some(Parts { actors, objects }) = self.0.parts.get() else { return };
        if mode == PurgeMode::Remove {
            let begin = || Event::Purge(PurgeStep::Begin(purge, scope.clone()));
            tell_each(actors.iter().map(|actor| (actor, begin()))).await;
        }
        let mut purged = PurgedKeys::default();
        let removed = match self.remove(purge, &scope, mode).await {
            Ok(Removed { keys, unreached, left }) => {
                purged.clone_from(&keys);
                let objects = self.remove_objects(purge, mode, &keys, objects.as_ref()).await;
                let described = self.tenants_are_known(&scope, &keys).await;
                left.and(objects).and_then(|()| unreached.was_read()).and(described)
            }
            Err(trouble) => Err(trouble),
        };
        let counts = self.note(purge, |last| {
            last.report.trouble = removed.as_ref().err().cloned();
            last.report.is_over = true;
        });
        let PurgeCounts { memory_chunks, disk_chunks, objects: deleted, .. } = counts;
        tracing::info!(admin, %scope, ?mode, memory_chunks, disk_chunks, objects = deleted, trouble = removed.err(), "a purge is over");
        if mode == PurgeMode::Count {
            self.note(purge, |last| last.has_ended = true);
            return;
        }
        while self.is_open(purge) {
            sleep(LOOK_EVERY).await;
        }
        // Other nodes deleted objects until now.
        self.forget_objects(purged, objects.as_ref()).await;
        self.end(purge).await;
    }

    /// Ends a purge that panicked: its chunks may come again, and others may purge.
    async fn give_up(&self, purge: u64) {
        self.note(purge, |last| {
            if !last.report.is_over {
                last.report.trouble = Some("the purge failed: the node's log says why".to_owned());
                last.report.is_over = true;
            }
        });
        self.end(purge).await;
    }

    async fn end(&self, purge: u64) {
        self.note(purge, |last| last.has_ended = true);
        if let Some(Parts { actors, .. }) = self.0.parts.get() {
            tell_each(actors.iter().map(|actor| (actor, Event::Purge(PurgeStep::End(purge))))).await;
        }
    }

    /// Removes a purge's chunks from disk and memory, until none is found and none is being written.
    async fn remove(&self, purge: u64, scope: &PurgeScope, mode: PurgeMode) -> Result<Removed, String> {
        here("purge");
        let actors = self.0.parts.get().map(|parts| &parts.actors[..]).unwrap_or_default();
        let (mut rounds, mut pause, mut waits_since) = (0, LOOK_EVERY, None);
        loop {
            let (mut found, mut writes, mut unreached) = (0, 0, Unreached::default());
            // Chunks that continue a purged chunk may have come since the last round.
            let keys = Arc::new(self.keys(purge, scope).await?);
            for actor in actors {
                // The disk comes first: purging memory makes the disk forget records, and these would no longer be counted.
                found += self.remove_from_disk(purge, actor, &keys, mode, &mut unreached).await?;
                let mut from = Some(0);
                while let Some(at) = from {
                    let page = PurgeStep::Page { purge, scope: scope.clone(), mode, from: at };
                    let page =
                        answer_of(actor, Errand::new(|actor, ctx| actor.purge_page(page, ctx))).await?;
                    let (page, under_way) = page.ok_or_else(actor_failed)?;
                    from = page.next;
                    writes += under_way * u64::from(page.next.is_none());
                    found += page.removed;
                    self.note(purge, |last| last.report.counts = last.report.counts.and(page.counts));
                }
            }
            let mut is_late = false;
            let left = if mode == PurgeMode::Count || (found == 0 && writes == 0) {
                Ok(())
            } else if found > 0 {
                (rounds, pause, waits_since) = (rounds + 1, LOOK_EVERY, None);
                Err("engines keep writing and reading the purged chunks: end these engines first".to_owned())
            } else {
                // Writes that began before the purge take as long as their tier allows.
                let now = self.0.clock.elapsed();
                is_late = now - *waits_since.get_or_insert(now) > WRITES_WITHIN;
                pause = (pause * 2).min(LONGEST_PAUSE);
                Err(format!(
                    "{writes} writes to the disk or object store that began before the purge are still under way: purge again"
                ))
            };
            if left.is_ok() || is_late || rounds == MOST_ROUNDS {
                return Ok(Removed { keys, unreached, left });
            }
            sleep(pause).await;
        }
    }

    /// The names of all chunks that the actors have had since the purge began. Actors may know different namespaces of a tenant,
    /// and different chunks that continue a chunk.
    async fn keys(&self, purge: u64, scope: &PurgeScope) -> Result<PurgedKeys, String> {
        let actors = self.0.parts.get().map(|parts| &parts.actors[..]).unwrap_or_default();
        let mut all = PurgedKeys::default();
        let began = self.0.clock.elapsed();
        for actor in actors {
            loop {
                let scope = scope.clone();
                let keys = Errand::new(move |actor, _| actor.core.keys_of_purge(purge, &scope));
                if let Some(keys) = answer_of(actor, keys).await? {
                    all.add_all(&keys);
                    break;
                }
                if self.0.clock.elapsed() - began > SILENCE {
                    return Err("the node is still listing its disk: purge again later".to_owned());
                }
                sleep(LOOK_EVERY).await;
            }
        }
        Ok(all)
    }

    /// # Errors
    /// A text for people, if a whole tenant is purged and a disk has chunks whose tenant nobody knows, or the node does not know all
    /// namespaces of the tenant any more.
    async fn tenants_are_known(&self, scope: &PurgeScope, keys: &PurgedKeys) -> Result<(), String> {
        let (PurgeScope::Tenant(_), Some(Parts { actors, .. })) = (scope, self.0.parts.get()) else {
            return Ok(());
        };
        if keys.lack_namespaces() {
            return Err("engines have used more namespaces than the node remembers: chunks of a namespace of the tenant may be left on disk and in the object store, so purge each by `--namespace-id`".to_owned());
        }
        for actor in actors {
            let undescribed =
                |actor: &mut GpuActor| actor.core.undescribed(actor.hands.namespaces_at_start());
            for namespace in answer_of(actor, ask(undescribed)).await? {
                let mut keys = PurgedKeys::default();
                keys.add(namespace);
                // Counted for no purge.
                let (keys, mut unreached) = (Arc::new(keys), Unreached::default());
                let left = self.remove_from_disk(0, actor, &keys, PurgeMode::Count, &mut unreached).await?;
                if left > 0 {
                    return Err(format!(
                        "namespace {namespace} on disk has no usable description, or belongs to a tenant that has just left, so nobody knows whether its {left} chunks are the tenant's: if they stay, purge it by `--namespace-id`"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Removes a purge's records from an actor's disk, and returns their number.
    async fn remove_from_disk(
        &self,
        purge: u64,
        actor: &Addr<GpuActor>,
        keys: &Arc<PurgedKeys>,
        mode: PurgeMode,
        unreached: &mut Unreached,
    ) -> Result<u64, String> {
        let (mut after, mut found) = (0, 0);
        loop {
            let of_disk = DiskPurge { keys: Arc::clone(keys), mode };
            let ordered = ask(move |actor| actor.hands.purge_disk(of_disk, after));
            let purged = match answer_of(actor, ordered).await? {
                None => return Ok(found),
                Some(Ok((purged, drive))) => purged_segment(purged, &drive).await,
                Some(Err(refused)) => Err(refused),
            };
            match purged {
                Err(Refused::Busy) => sleep(LOOK_EVERY).await,
                Err(Refused::Closed) => {
                    unreached.has_closed = true;
                    return Ok(found);
                }
                Err(Refused::Silent) => {
                    unreached.is_silent = true;
                    return Ok(found);
                }
                Ok(segment) => {
                    found += segment.records;
                    unreached.pages += segment.unreadable;
                    self.note(purge, |last| last.report.counts.disk_chunks += segment.records);
                    match segment.next {
                        Some(next) => after = next,
                        None => return Ok(found),
                    }
                }
            }
        }
    }

    async fn remove_objects(
        &self,
        purge: u64,
        mode: PurgeMode,
        keys: &PurgedKeys,
        objects: Option<&Weak<ObjectTier>>,
    ) -> Result<(), String> {
        let Some(objects) = objects else { return Ok(()) };
        let left = |why: &dyn std::fmt::Display| format!("objects are left in the object store: {why}");
        let this = self.clone();
        let progress = Box::new(move |more| {
            this.note(purge, |last| last.report.counts.objects += more);
        });
        let ordered = objects
            .upgrade()
            .ok_or_else(|| left(&"it is not open; purge again when it is"))?
            .purge(ObjectPurge { keys: keys.clone(), mode, progress });
        match ordered {
            Err(Refused::Busy | Refused::Silent) => Err(left(&"the store has too much to do; purge again")),
            Err(Refused::Closed) => {
                Err(left(&"the node leaves the store alone after failures; purge again later"))
            }
            Ok(purged) => match purged.await {
                Ok(purged) => purged.map_err(|trouble| left(&trouble)),
                Err(_) => Err(left(&"the thread of the object tier failed")),
            },
        }
    }

    /// Has the object tier forget which objects of a purge's namespaces are there.
    async fn forget_objects(&self, keys: PurgedKeys, objects: Option<&Weak<ObjectTier>>) {
        let Some(objects) = objects.and_then(Weak::upgrade) else { return };
        loop {
            match objects.forget(keys.clone()) {
                Err(Refused::Busy) => sleep(LOOK_EVERY).await,
                Err(_) => return,
                Ok(done) => return drop(done.await),
            }
        }
    }

    /// Applies `note` to the last purge, if that is still `purge`. Returns the last purge's counts.
    fn note(&self, purge: u64, note: impl FnOnce(&mut Purge)) -> PurgeCounts {
        let mut last = self.last();
        if last.report.purge == purge {
            note(&mut last);
        }
        last.report.counts
    }

    fn is_open(&self, purge: u64) -> bool {
        let last = self.last();
        last.report.purge == purge && last.is_open(self.0.clock.elapsed())
    }

    fn last(&self) -> MutexGuard<'_, Purge> {
        larder_net::lock(&self.0.last)
    }
}

impl std::fmt::Debug for Purges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Purges").finish_non_exhaustive()
    }
}

/// The chunks that a purge has removed from memory and disks.
struct Removed {
    keys: Arc<PurgedKeys>,
    unreached: Unreached,
    /// Why some are left, for people.
    left: Result<(), String>,
}

/// The parts of a node's disks that a purge did not reach.
#[derive(Debug, Default)]
struct Unreached {
    /// Pages that could not be read.
    pages: u32,
    /// Whether a tier closed itself.
    has_closed: bool,
    /// Whether a drive does not answer.
    is_silent: bool,
}

impl Unreached {
    /// # Errors
    /// A text for people, if a purge did not reach everything on disk.
    fn was_read(&self) -> Result<(), String> {
        let pages = self.pages;
        match self {
            Self { has_closed: true, .. } => Err(
                "a disk tier is closed: its chunks come back if the tier opens again, so purge again then"
                    .to_owned(),
            ),
            Self { is_silent: true, .. } => {
                Err("the drive does not answer: its chunks are left; purge again when it answers".to_owned())
            }
            Self { pages: 0, .. } => Ok(()),
            _ => Err(format!(
                "{pages} pages of the disk cannot be read: purged chunks on them come back if the drive reads them at a start, so purge again then"
            )),
        }
    }
}

/// A disk's answer to a purge of a segment. The order of a silent drive stays; its answer comes too late.
async fn purged_segment(
    mut purged: Receiver<Option<PurgedSegment>>,
    drive: &DriveWatch,
) -> Result<PurgedSegment, Refused> {
    loop {
        match timeout(LOOK_EVERY, &mut purged).await {
            Ok(purged) => return purged.ok().flatten().ok_or(Refused::Closed),
            Err(_) if drive.silent_for().is_some() => return Err(Refused::Silent),
            Err(_) => {}
        }
    }
}

/// An actor's answer to a purge.
///
/// # Errors
/// A text for people, if the actor hangs or failed.
async fn answer_of<T: Send + 'static>(actor: &Addr<GpuActor>, errand: Errand<T>) -> Result<T, String> {
    let answer = timeout(SILENCE, actor.send(errand)).await;
    let answer = answer.map_err(|_| {
        "an actor does not answer, and nothing more was purged: restart the node, and purge again".to_owned()
    })?;
    answer.ok().flatten().ok_or_else(actor_failed)
}

fn actor_failed() -> String {
    "an actor failed: the node's log says why".to_owned()
}

/// Maximum number of passes over disk and memory before a purge gives up.
const MOST_ROUNDS: u32 = 50;

/// How often a purge looks at work that takes a while, at first and at last.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long a purge waits for writes that began before it.
const WRITES_WITHIN: Duration = Duration::from_secs(60);

/// How long an admin may be silent. After this time the admin counts as gone, and the purge's chunks may come again.
const SILENCE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::silent::{everything, hanging};
    use crate::watched::plant;

    #[actix::test]
    async fn a_purge_that_panics_is_over_and_holds_up_no_later_one() {
        let (purges, watch) = (Purges::new(Clock::start(), Audit::default()), Watch::in_test());
        purges.begin(&[], None);
        let purge = async || {
            let start = PurgeCommand::Start(PurgeScope::Tenant("chat".to_owned()), PurgeMode::Remove);
            let purge = purges.command(&watch, "admin me", start).unwrap().purge;
            loop {
                let report = purges.command(&watch, "admin me", PurgeCommand::Report(purge)).unwrap();
                if report.is_over {
                    break report.trouble;
                }
                tokio::task::yield_now().await;
            }
        };
        plant("purge");
        assert!(timeout(SILENCE, purge()).await.unwrap().unwrap().contains("the purge failed"));
        assert!(purges.last().has_ended);
        assert_eq!(timeout(SILENCE, purge()).await.unwrap(), None);
    }

    #[actix::test]
    async fn a_count_ends_no_purge_whose_admin_waits_for_other_nodes() {
        let (purges, watch) = (Purges::new(Clock::start(), Audit::default()), Watch::in_test());
        purges.begin(&[], None);
        let command = |command| purges.command(&watch, "admin me", command);
        let start = |mode| command(PurgeCommand::Start(PurgeScope::Tenant("chat".to_owned()), mode));
        let purge = start(PurgeMode::Remove).unwrap().purge;
        while !command(PurgeCommand::Report(purge)).unwrap().is_over {
            tokio::task::yield_now().await;
        }
        assert!(start(PurgeMode::Count).unwrap_err().contains("try again when it is over"));
        command(PurgeCommand::End(purge)).unwrap();
        assert_eq!(start(PurgeMode::Count).map(|count| count.purge), Ok(purge + 1));
    }

    #[actix::test]
    async fn a_command_about_a_purge_from_before_a_restart_meets_no_later_purge() {
        let watch = Watch::in_test();
        let start = || PurgeCommand::Start(PurgeScope::Tenant("chat".to_owned()), PurgeMode::Count);
        let lives = [(); 2].map(|()| {
            // A node does not start twice in a microsecond.
            std::thread::sleep(Duration::from_millis(1));
            Purges::new(Clock::start(), Audit::default())
        });
        lives.iter().for_each(|purges| purges.begin(&[], None));
        let [before, now] =
            lives.each_ref().map(|purges| purges.command(&watch, "me", start()).unwrap().purge);
        assert!(before < now, "{before} {now}");
        let refused = lives[1].command(&watch, "me", PurgeCommand::End(before)).unwrap_err();
        assert!(refused.contains("or the node started again"), "{refused}");
    }

    #[tokio::test]
    async fn a_purge_does_not_wait_for_a_silent_drive() {
        let (tier, _, _hold) = hanging();
        let purged = tier.purge(everything(), 0).unwrap();
        let purged = purged_segment(purged, tier.watch()).await;
        assert_eq!(purged.map(drop), Err(Refused::Silent));
        let unreached = Unreached { is_silent: true, ..Unreached::default() };
        assert!(unreached.was_read().unwrap_err().contains("purge again when it answers"));
    }
}
