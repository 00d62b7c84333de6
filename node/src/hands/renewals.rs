//! Extents that get new memory from the copy pool.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::oneshot::error::RecvError;

use crate::arena::{Arena, ExtentMemory, MemoryError, Renewal};
use crate::copy::CopyPool;

/// Extents that get new memory, one after the other.
#[derive(Default)]
pub(crate) struct Renewals {
    /// Extents that wait for the copy pool.
    waiting: Vec<Renewal>,
    /// Whether the copy pool makes memory for one.
    is_renewing: bool,
    failures: RenewalFailures,
    /// No memory is asked for before then.
    from: Duration,
}

/// An extent, and its new memory.
pub(crate) type Renewed = (u32, Result<Result<Arc<ExtentMemory>, MemoryError>, RecvError>);

/// The failures to get new memory for an extent since the last success.
#[derive(Default)]
struct RenewalFailures {
    count: u64,
    last: String,
}

impl Renewals {
    /// Adds an extent whose memory was taken away.
    pub(crate) fn add(&mut self, renewal: Renewal) {
        self.waiting.push(renewal);
    }

    /// Orders new memory for an extent, one at a time: the memory of an extent takes as long as some hundred copies. The others
    /// wait, also if the copy pool has no room, and for a while after a failure. The result belongs to [`Self::end`].
    pub(crate) fn next(
        &mut self,
        copy_pool: &CopyPool,
        now: Duration,
    ) -> Option<impl Future<Output = Renewed> + use<>> {
        if self.is_renewing || now < self.from {
            return None;
        }
        let renewal = self.waiting.pop()?;
        let extent = renewal.extent;
        let coming = copy_pool.renew(renewal).map_err(|renewal| self.waiting.push(renewal)).ok()?;
        self.is_renewing = true;
        Some(coming.map(move |renewed| (extent, renewed)))
    }

    /// Gives an extent its new memory; returns the extent, or `None` if there is no memory.
    pub(crate) fn end(
        &mut self,
        (extent, renewed): Renewed,
        arena: &mut Arena,
        now: Duration,
    ) -> Option<u32> {
        self.is_renewing = false;
        match renewed {
            Ok(Ok(memory)) => {
                if let Some(failures) = self.failures.end() {
                    tracing::info!(extent, failures, "extents get new memory again");
                }
                arena.occupy(extent, memory);
                return Some(extent);
            }
            Ok(Err(error)) => {
                if self.failures.is_news(&error.to_string()) {
                    tracing::error!(extent, %error, "an extent got no new memory: the node tries again and again");
                }
                self.from = now + self.failures.pause();
                // Others go first.
                self.waiting.insert(0, arena.vacate(extent));
            }
            Err(_) => tracing::error!(
                extent,
                "the copy pool failed: the extent stays unused until the node starts again"
            ),
        }
        None
    }
}

impl RenewalFailures {
    /// Notes a failure; returns whether it is the first, or differs from the one before.
    fn is_news(&mut self, error: &str) -> bool {
        self.count += 1;
        let is_news = self.last != error;
        if is_news {
            error.clone_into(&mut self.last);
        }
        is_news
    }

    /// The pause before the next attempt. It doubles with each failure in a row.
    fn pause(&self) -> Duration {
        let doublings = self.count.saturating_sub(1).min(LONGEST_PAUSE_DOUBLINGS) as u32;
        FIRST_PAUSE * 2_u32.pow(doublings)
    }

    /// Notes a success; returns the number of failures before it, if there were any.
    fn end(&mut self) -> Option<u64> {
        let Self { count, .. } = std::mem::take(self);
        (count > 0).then_some(count)
    }
}

/// The pause after the first failure to get new memory.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause is 6.4 s.
const LONGEST_PAUSE_DOUBLINGS: u64 = 6;

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::arena::tests::arena;
    use crate::copy::CopyLimits;
    use crate::threads::pinned_to;

    const NOW: Duration = Duration::from_secs(9);

    fn copy_pool(threads: usize) -> CopyPool {
        let limits = CopyLimits { threads, cpus: pinned_to().unwrap(), queue_orders: 4 * threads };
        CopyPool::start("larder-copy", &limits).unwrap()
    }

    fn all_of(arena: &mut Arena, extents: u32) -> Renewals {
        let mut renewals = Renewals::default();
        (0..extents).for_each(|extent| renewals.add(arena.vacate(extent)));
        renewals
    }

    #[tokio::test]
    async fn extents_get_new_memory_one_after_the_other() {
        let (mut arena, copy_pool) = (arena(3), copy_pool(2));
        let mut renewals = all_of(&mut arena, 3);
        let mut renewed = Vec::new();
        while let Some(coming) = renewals.next(&copy_pool, NOW) {
            assert!(renewals.next(&copy_pool, NOW).is_none(), "one is under way");
            renewed.extend(renewals.end(coming.await, &mut arena, NOW));
        }
        renewed.sort_unstable();
        assert_eq!(renewed, [0, 1, 2]);
        assert!((0..3).all(|extent| arena.is_unshared(extent)));
    }

    #[tokio::test]
    async fn an_extent_that_got_no_memory_lets_others_go_first_and_is_tried_again_after_a_pause() {
        let (mut arena, copy_pool) = (arena(2), copy_pool(2));
        let mut renewals = all_of(&mut arena, 2);
        let (failed, _) = renewals.next(&copy_pool, NOW).unwrap().await;
        let full = Err(MemoryError::Create(Errno::MFILE));
        assert_eq!(renewals.end((failed, Ok(full)), &mut arena, NOW), None);
        assert!(renewals.next(&copy_pool, NOW + FIRST_PAUSE / 2).is_none());
        for expected in [1 - failed, failed] {
            let coming = renewals.next(&copy_pool, NOW + FIRST_PAUSE).unwrap().await;
            assert_eq!(renewals.end(coming, &mut arena, NOW), Some(expected));
        }
        assert!(renewals.next(&copy_pool, NOW + FIRST_PAUSE).is_none());
    }

    #[tokio::test]
    async fn an_extent_waits_for_room_in_the_copy_pool() {
        let mut arena = arena(2);
        let mut renewals = all_of(&mut arena, 1);
        assert!(renewals.next(&copy_pool(0), NOW).is_none());
        let coming = renewals.next(&copy_pool(1), NOW).unwrap().await;
        assert_eq!(renewals.end(coming, &mut arena, NOW), Some(0));
    }

    #[test]
    fn a_failure_to_get_new_memory_is_news_once_until_it_ends_or_its_cause_changes() {
        let mut failures = RenewalFailures::default();
        assert_eq!(failures.end(), None, "it never failed");
        let news =
            |failures: &mut RenewalFailures, error| (0..100).filter(|_| failures.is_news(error)).count();
        assert_eq!(["no file", "no memory"].map(|error| news(&mut failures, error)), [1, 1]);
        assert_eq!((failures.end(), failures.end()), (Some(200), None));
        assert_eq!(news(&mut failures, "no memory"), 1);
    }
}
