//! Views of a volume for tests.

use super::super::log::RecordPlace;
use super::*;

impl Volume {
    pub(in super::super) fn find(&self, key: &ChunkKey) -> Option<RecordPlace> {
        self.log.find(key)
    }

    pub(in super::super) fn has_record_at(&self, segment: u32, page: u32) -> bool {
        let mut from = 0;
        while let Some((_, place, next)) = self.log.scrub_after(from) {
            if place.segment == segment && (place.page..place.page + place.pages).contains(&page) {
                return true;
            }
            from = next;
        }
        false
    }

    pub(in super::super) fn evict_ahead_if_wanted(&mut self) {
        if self.wants_eviction() {
            self.evict_ahead();
        }
    }
}
