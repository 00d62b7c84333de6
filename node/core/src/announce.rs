//! Tells others the chunks that an actor gains and loses. Other actors of the node hear at once; the directory and followers of
//! events hear in messages that cover a few milliseconds.
//!
//! The actor repeats a message that the directory does not take. If changes were lost, on either side, the actor tells all chunks
//! that it holds, page by page. Between two pages it tells the changes since.
//!
//! Others hear of a chunk once, however it moves between memory and disk. They never hear of a chunk that only the object
//! store has.

use std::time::Duration;

use crate::Core;
use crate::directory::{Changes, Page};
use crate::effect::Effect;
use crate::event::{Announced, NextPage};
use crate::store::Change;

/// Changes that the directory has not heard yet.
#[derive(Debug, Default)]
pub(crate) struct Untold {
    changes: Vec<Change>,
    /// The number of these changes that the followers of events know.
    told_followers: usize,
    /// Number of the next event.
    sequence: u64,
    /// The position in a full announcement, after changes were lost.
    resync: Option<Resync>,
    /// The number of the last full announcement, whether it has ended or not.
    resyncs: u64,
    tell_at: Option<Duration>,
}

/// How far the full announcement to the directory is.
#[derive(Debug, Clone, Copy, Default)]
struct Resync {
    /// Position of the next page in the store.
    from: usize,
    /// Whether the directory has taken a page.
    has_begun: bool,
}

impl Untold {
    /// Forgets everything that was told. Numbers go on.
    pub(crate) fn begin_anew(&mut self) {
        *self = Self { sequence: self.sequence, resyncs: self.resyncs, ..Self::default() };
        self.lost();
    }

    /// When the next message is due.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.tell_at
    }

    /// Notes that the directory knows nothing of this actor.
    pub(crate) fn lost(&mut self) {
        self.resyncs += 1;
        self.resync = Some(Resync::default());
    }
}

impl Core {
    /// Takes the store's changes and schedules their announcement.
    pub(crate) fn note_changes(&mut self) {
        let changes = self.store.take_changes();
        if !changes.is_empty() && self.bring.sources.siblings.is_some() {
            self.effects.push_back(Effect::TellSiblings(changes.clone()));
        }
        let untold = &mut self.untold;
        untold.changes.extend(changes);
        if untold.tell_at.is_none() && (untold.resync.is_some() || !untold.changes.is_empty()) {
            untold.tell_at = Some(self.now + TELL_AFTER);
        }
    }

    /// Announces the changes that are due.
    pub(crate) fn tell_changes(&mut self) {
        let untold = &mut self.untold;
        if untold.tell_at.is_none_or(|at| self.now < at) {
            return;
        }
        untold.tell_at = None;
        if untold.changes.len() > MAX_UNTOLD_CHANGES {
            untold.lost();
        }
        let (changes, told) =
            (std::mem::take(&mut untold.changes), std::mem::take(&mut untold.told_followers));
        // Before the first page of a full announcement, the directory needs no changes: the pages will contain them.
        let is_before_pages = untold.resync.is_some_and(|resync| !resync.has_begun);
        let to_directory = self.bring.sources.peers.is_some() && !is_before_pages && !changes.is_empty();
        if !changes.is_empty() {
            let sequence = untold.sequence;
            untold.sequence += (changes.len() - told) as u64;
            self.effects.push_back(Effect::Changed { sequence, told, changes, to_directory });
        }
        if !to_directory {
            self.tell_page();
        }
    }

    /// Notes whether the directory took a message.
    pub(crate) fn announced(&mut self, announced: Announced) {
        match announced {
            Announced::Taken => self.tell_page(),
            Announced::Full(Changes::Since(mut changes)) => {
                // Followers know all these changes, and none of the changes since.
                self.untold.told_followers += changes.len();
                changes.append(&mut self.untold.changes);
                self.untold.changes = changes;
            }
            Announced::Full(Changes::Page(_)) => {}
            Announced::Lost => self.untold.lost(),
        }
    }

    /// Tells the directory the next page of all held chunks, if a full announcement is under way. Chunks may change before the
    /// next page.
    fn tell_page(&mut self) {
        let (Some(_), Some(resync)) = (self.bring.sources.peers, self.untold.resync) else {
            self.untold.resync = None;
            return;
        };
        let (chunks, from) = self.store.held_from(resync.from, RESYNC_CHUNKS);
        let page = Page { is_first: !resync.has_begun, chunks, is_last: from.is_none() };
        let next = NextPage { resync: self.untold.resyncs, from };
        self.effects.push_back(Effect::AnnouncePage { page, next });
    }

    /// Notes that a page was taken, and where the next page begins. If the directory has lost everything since the page was made,
    /// the announcement begins with the first page all the same.
    pub(crate) fn page_announced(&mut self, next: NextPage) {
        if next.resync == self.untold.resyncs {
            self.untold.resync = next.from.map(|from| Resync { from, has_begun: true });
        }
    }
}

/// How long a change waits for further changes.
const TELL_AFTER: Duration = Duration::from_millis(3);

/// Chunks of a page of a full announcement: collecting them takes less than a millisecond.
const RESYNC_CHUNKS: usize = 1_024;

/// Changes kept for a directory that does not take them; beyond this number, the directory is told everything anew.
const MAX_UNTOLD_CHANGES: usize = 65_536;
