//! The writes that were ordered and have not ended. A purge waits for those of its chunks: the actor that ordered a write may have
//! forgotten it since, after a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use tokio::time::sleep;

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Earlier {
    /// Waits until these writes have ended. Each has a deadline.
    pub(super) async fn end(&self) {
        while self.numbers.iter().any(|number| self.writes.numbered().keys.contains_key(number)) {
            sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Ordered {
    fn drop(&mut self) {
        self.writes.numbered().keys.remove(&self.number);
    }
}

const LOOK_EVERY: Duration = Duration::from_millis(20);
