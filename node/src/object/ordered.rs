//! The writes that were ordered and have not ended. A purge waits for those of its chunks: the actor that ordered a write may have
//! forgotten it since, after a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use tokio::time::{sleep, timeout};

/// The writes of a tier.
#[derive(Debug, Clone, Default)]
pub(super) struct OrderedWrites(Arc<Mutex<Numbered>>);

#[derive(Debug, Default)]
struct Numbered {
    last: u64,
    keys: BTreeMap<u64, ChunkKey>,
}

/// A write. It has ended when this is dropped.
pub(super) struct Ordered {
    number: u64,
    writes: OrderedWrites,
}

/// Writes that were ordered before a purge.
pub(super) struct Earlier {
    numbers: BTreeSet<u64>,
    writes: OrderedWrites,
}

impl OrderedWrites {
    /// Notes that a chunk is to be written.
    pub(super) fn order(&self, key: ChunkKey) -> Ordered {
        let mut numbered = self.numbered();
        numbered.last += 1;
        let number = numbered.last;
        numbered.keys.insert(number, key);
        Ordered { number, writes: self.clone() }
    }

    /// The writes of such chunks that have not ended.
    pub(super) fn of(&self, is_wanted: impl Fn(&ChunkKey) -> bool) -> Earlier {
        let numbered = self.numbered();
        let wanted = numbered.keys.iter().filter(|(_, key)| is_wanted(key));
        Earlier { numbers: wanted.map(|(&number, _)| number).collect(), writes: self.clone() }
    }

    fn numbered(&self) -> MutexGuard<'_, Numbered> {
        larder_net::lock(&self.0)
    }
}

impl Earlier {
    /// Waits for the ends of these writes; returns whether all have ended in time. A write to a folder of a file system that hangs
    /// never ends.
    pub(super) async fn end(&self) -> bool {
        let end = async {
            while self.numbers.iter().any(|number| self.writes.numbered().keys.contains_key(number)) {
                sleep(LOOK_EVERY).await;
            }
        };
        timeout(END_WITHIN, end).await.is_ok()
    }
}

impl Drop for Ordered {
    fn drop(&mut self) {
        self.writes.numbered().keys.remove(&self.number);
    }
}

/// How long a purge waits for them.
const END_WITHIN: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use larder_protocol::{ChunkHash, Fingerprint};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_write_that_never_ends_is_waited_for_a_minute_and_those_of_other_chunks_are_not() {
        let writes = OrderedWrites::default();
        let [ours, other] =
            [1, 2].map(|byte| ChunkKey { fingerprint: Fingerprint([byte; 32]), hash: ChunkHash([byte; 32]) });
        let (hangs, _others) = (writes.order(ours), writes.order(other));
        let start = tokio::time::Instant::now();
        assert!(!writes.of(|key| *key == ours).end().await);
        assert!((END_WITHIN..END_WITHIN * 2).contains(&start.elapsed()));
        drop(hangs);
        assert!(writes.of(|key| *key == ours).end().await);
    }
}
