//! Visits to the disk, a segment at a time: to learn the chunks there, and to purge the chunks of tenants that left.

use std::sync::Arc;
use std::time::Duration;

use larder_protocol::Fingerprint;

use crate::Core;
use crate::effect::Effect;
use crate::event::{SegmentVisit, Visited};
use crate::store::PurgedKeys;

impl Core {
    /// Begins to learn the chunks on disk, if there is a disk.
    pub fn list_disk(&mut self) {
        self.visit_segment(SegmentVisit::List, 0);
    }

    /// Purges chunks on disk for good. Until the last segment was visited, no chunk is written under these names (chunks that
    /// are committed meanwhile stay in memory alone), and none is found there.
    pub(crate) fn purge_disk(&mut self, keys: PurgedKeys) {
        if self.store.has_disk() {
            let keys = Arc::new(keys);
            self.purged_on_disk.push(Arc::clone(&keys));
            self.visit_segment(SegmentVisit::Purge(keys), 0);
        }
    }

    /// Begins the purges under way from the first segment again.
    pub(crate) fn purge_disk_again(&mut self) {
        for keys in self.purged_on_disk.clone() {
            self.visit_segment(SegmentVisit::Purge(keys), 0);
        }
    }

    /// Whether chunks of a namespace are being purged on disk.
    pub(super) fn is_purged_on_disk(&self, fingerprint: &Fingerprint) -> bool {
        self.purged_on_disk.iter().any(|keys| keys.has_namespace(fingerprint))
    }

    /// Takes the result of a visit.
    pub(crate) fn segment_visited(&mut self, visit: SegmentVisit, after: u64, result: Visited) {
        match result {
            Visited::Done { held, next } => {
                if matches!(visit, SegmentVisit::List) {
                    self.recovered(held, next.is_none());
                }
                match next {
                    Some(next) => self.visit_segment(visit, next),
                    None => self.visits_are_over(&visit),
                }
            }
            Visited::Busy => self.visit_again.push((self.now + VISIT_AGAIN, visit, after)),
            // A store that takes the place of another hears of a disk that had closed before.
            Visited::Closed => self.disk_closed(),
        }
    }

    /// Notes that the disk closed: nothing is there any more.
    pub(crate) fn disk_closed(&mut self) {
        self.purged_on_disk.clear();
        self.store.disk_closed();
    }

    /// Repeats the visits for which the disk was busy. While its drive does not answer, they wait.
    pub(crate) fn visit_again(&mut self) {
        if self.visit_again.is_empty() || self.store.is_disk_silent() {
            return;
        }
        let now = self.now;
        let due: Vec<_> = self.visit_again.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, visit, after) in due {
            self.visit_segment(visit, after);
        }
    }

    pub(crate) fn next_visit(&self) -> Option<Duration> {
        let may_visit = !self.store.is_disk_silent();
        self.visit_again.iter().filter(|_| may_visit).map(|(at, ..)| *at).min()
    }

    fn visits_are_over(&mut self, visit: &SegmentVisit) {
        if let SegmentVisit::Purge(purged) = visit {
            self.purged_on_disk.retain(|keys| !Arc::ptr_eq(keys, purged));
        }
    }

    fn visit_segment(&mut self, visit: SegmentVisit, after: u64) {
        if self.store.has_disk() {
            self.effects.push_back(Effect::VisitSegment { visit, after });
        }
    }
}

/// The pause before a busy disk is asked again.
const VISIT_AGAIN: Duration = Duration::from_millis(20);
