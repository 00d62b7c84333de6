//! Chunks that moved to another actor: this actor gives them up once nobody uses them here.

use std::collections::VecDeque;
use std::time::Duration;

use larder_protocol::{ChunkHash, Fingerprint};

use crate::Core;
use crate::placement::PlacementRule;

/// Chunks that were in use when they were to be given up: their reader may not have let go yet.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    /// Chunks to try again, the next first: all wait equally long.
    again: VecDeque<(Duration, u32, Fingerprint, Vec<ChunkHash>)>,
}

impl Moved {
    /// When the next try is due.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.again.front().map(|&(at, ..)| at)
    }
}

impl Core {
    /// Notes that other actors keep these chunks: here they become copies, or are given up if the placement rule or a drain says
    /// so. Chunks that stay in use for too long stay until their eviction.
    pub(crate) fn give_up(&mut self, fingerprint: Fingerprint, hashes: &[ChunkHash], tries: u32) {
        if self.store.placement() == PlacementRule::Worth && !self.is_draining() {
            return self.store.others_keep(&fingerprint, hashes);
        }
        let used = self.store.give_up(&fingerprint, hashes);
        if !used.is_empty() && tries > 1 && self.moved.again.len() < MOST_WAITING {
            self.moved.again.push_back((self.now + PAUSE, tries - 1, fingerprint, used));
        }
    }

    /// Tries again to give up the chunks that are due.
    pub(crate) fn give_up_again(&mut self) {
        let now = self.now;
        while self.moved.next_deadline().is_some_and(|at| at <= now)
            && let Some((_, tries, fingerprint, hashes)) = self.moved.again.pop_front()
        {
            self.give_up(fingerprint, &hashes, tries);
        }
    }
}

/// The number of tries to give up a chunk that moved.
pub(crate) const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// The most messages whose chunks wait.
const MOST_WAITING: usize = 1_024;
