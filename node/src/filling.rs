//! Takes the arenas' memory from the system while the node already serves, and tells how much is there.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytesize::ByteSize;
use larder_net::blocking::blocking;
use tokio::sync::mpsc;

use crate::arena::{self, ArenaLimits, ArenaPlacement, ExtentMemory, MemoryError};

/// An extent's number, and its memory.
pub(crate) type Arrival = (u32, Arc<ExtentMemory>);

/// The progress of taking the memory of all arenas.
#[derive(Debug)]
pub(crate) struct MemoryProgress {
    of_bytes: u64,
    bytes: AtomicU64,
    is_done: AtomicBool,
}

impl MemoryProgress {
    /// Starts with none of `of_bytes` there.
    pub(crate) fn new(of_bytes: u64) -> Self {
        Self { of_bytes, bytes: AtomicU64::new(0), is_done: AtomicBool::new(false) }
    }

    /// Notes that more bytes are there, and logs each tenth.
    fn add(&self, more: u64) {
        let before = self.bytes.fetch_add(more, Ordering::Relaxed);
        let tenths = |bytes: u64| u128::from(bytes) * 10 / u128::from(self.of_bytes.max(1));
        if tenths(before) < tenths(before + more) {
            tracing::info!(here = %size(before + more), of = %size(self.of_bytes), "memory comes");
        }
    }

    /// Notes that all memory is there.
    pub(crate) fn end(&self) {
        self.is_done.store(true, Ordering::Release);
    }

    /// Whether all memory is there.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// The progress, for people.
    pub(crate) fn text(&self) -> String {
        let (here, of) = (size(self.bytes.load(Ordering::Relaxed)), size(self.of_bytes));
        format!("{here} of {of} of memory are there; sessions are accepted already")
    }
}

/// Takes the memory of an actor's arena and gives the actor each extent as soon as it is there. At the end, the kernel tells
/// where the memory is. Memory in another place than requested is only a warning.
///
/// # Errors
/// The system does not give all memory.
///
/// # Cancel safety
/// If dropped, the work goes on as long as the actor is there.
pub(crate) async fn fill(
    limits: ArenaLimits,
    arrivals: mpsc::Sender<Arrival>,
    progress: Arc<MemoryProgress>,
) -> Result<ArenaPlacement, MemoryError> {
    blocking(move || {
        let here = Mutex::new(Vec::new());
        arena::fill(&limits, &|extent, memory| {
            larder_net::lock(&here).push(Arc::downgrade(&memory));
            progress.add(limits.extent.bytes);
            // The channel has room for every extent: an error means that the actor is gone.
            arrivals.try_send((extent, memory)).is_ok()
        })?;
        let here = here.into_inner().unwrap_or_else(PoisonError::into_inner);
        let here: Vec<_> = here.iter().filter_map(Weak::upgrade).collect();
        let placement = ArenaPlacement::read(limits.extent.numa_node, here.iter());
        placement.warn_if_wrong();
        Ok(placement)
    })
    .await
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::tests::limits;

    #[tokio::test]
    async fn every_extent_comes_once_and_progress_says_how_much_is_there() {
        let (progress, limits) = (Arc::new(MemoryProgress::new(10 << 20)), limits(5));
        assert_eq!(progress.text(), "0 B of 10.0 MiB of memory are there; sessions are accepted already");
        let (arrivals, mut arrived) = mpsc::channel(5);
        let placement = fill(limits, arrivals, Arc::clone(&progress)).await.unwrap();
        assert_eq!((placement.bytes, placement.absent_pages), (10 << 20, 0));
        let mut extents: Vec<u32> = std::iter::from_fn(|| Some(arrived.try_recv().ok()?.0)).collect();
        extents.sort_unstable();
        assert_eq!(extents, [0, 1, 2, 3, 4]);
        assert!(progress.text().starts_with("10.0 MiB of 10.0 MiB") && !progress.is_done());
    }

    #[tokio::test]
    async fn filling_stops_when_nobody_takes_the_memory() {
        let (progress, (arrivals, arrived)) =
            (Arc::new(MemoryProgress::new(2 << 30)), mpsc::channel(1 << 10));
        drop(arrived);
        fill(limits(1 << 10), arrivals, Arc::clone(&progress)).await.unwrap();
        let text = progress.text();
        assert!(
            text.starts_with("4.0 MiB of") || text.starts_with("2.0 MiB of"),
            "one extent a thread: {text}"
        );
    }
}
