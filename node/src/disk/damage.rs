//! The damage that a tier found on its drive, as operators are told of it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::clock::Clock;

/// Counts the damage since the tier was opened. Cloning shares.
#[derive(Debug, Clone)]
pub(crate) struct FoundDamage {
    clock: Clock,
    found: Arc<Mutex<Found>>,
}

#[derive(Debug, Default)]
struct Found {
    wrong: u64,
    unreadable: u64,
    last: Duration,
}

impl FoundDamage {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, found: Arc::default() }
    }

    /// Notes that a record, or the description of a namespace, has wrong bytes.
    pub(super) fn wrong_bytes(&self) {
        self.note(|found| found.wrong += 1);
    }

    /// Notes that the drive could not read a record, a page or the description of a namespace.
    pub(super) fn unreadable(&self) {
        self.note(|found| found.unreadable += 1);
    }

    /// Says so for an hour after the last damage.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.lock().trouble(self.clock.elapsed())
    }

    fn note(&self, note: impl FnOnce(&mut Found)) {
        let mut found = self.lock();
        note(&mut found);
        found.last = self.clock.elapsed();
    }

    fn lock(&self) -> MutexGuard<'_, Found> {
        larder_net::lock(&self.found)
    }
}

impl Found {
    fn trouble(&self, now: Duration) -> Option<String> {
        let &Self { wrong, unreadable, last } = self;
        let since = now.saturating_sub(last);
        (wrong + unreadable > 0 && since < RECENT).then(|| {
            format!(
                "since its opening {wrong} records or descriptions of namespaces had wrong bytes and {unreadable} could not be read, the last {} min ago: \
                 check the drive (dmesg, smartctl)",
                since.as_secs() / 60
            )
        })
    }
}

/// How long damage is told after the last of it: as long as alerts of the drive's read errors last.
const RECENT: Duration = Duration::from_secs(3_600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_told_for_an_hour_after_the_last_of_it() {
        let minute = Duration::from_secs(60);
        assert_eq!(Found::default().trouble(minute), None);
        let found = Found { wrong: 2, unreadable: 1, last: 7 * minute };
        let trouble = found.trouble(66 * minute).unwrap();
        assert!(trouble.contains("2 records or descriptions of namespaces had wrong bytes and 1 could not be read, the last 59 min ago"));
        assert_eq!(found.trouble(67 * minute), None);
    }
}
