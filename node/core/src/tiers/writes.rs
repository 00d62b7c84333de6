//! Writes to the tiers below: turns the store's wishes into effects, as many as each tier keeps up with.
//!
//! A write ends with [`Event::WriteEnded`](crate::Event::WriteEnded). A busy tier is asked again when one of its writes has
//! ended, or at the next tick. A chunk goes to disk only once its namespace is described there (`described`), so that a
//! restarted node can use it.
//!
//! Chunks go to the object store from memory, never from the disk. A chunk that leaves memory goes to both tiers, so that no
//! chunk is read from disk to be uploaded.

use std::collections::HashMap;

use crate::Core;
use crate::effect::{Counted, Effect};
use crate::event::{Below, WriteNumber, Written};
use crate::store::WriteId;
use crate::store::ids::ChunkKey;
use crate::tiers::described::MayWrite;
use crate::tiers::presence::Fact;

/// Writes under way.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    under_way: HashMap<WriteNumber, (WriteId, ChunkKey)>,
    disk: Side,
    object: Side,
    last_number: u64,
}

/// The writes of one tier.
#[derive(Debug, Default)]
struct Side {
    under_way: usize,
    /// Whether the tier had too much to do.
    is_busy: bool,
}

impl Writes {
    /// Forgets all writes under way. Numbers go on.
    pub(crate) fn begin_anew(&mut self) {
        *self = Self { last_number: self.last_number, ..Self::default() };
    }

    /// The chunks that are being written, and where.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (Below, &ChunkKey)> {
        self.under_way.values().map(|(write, key)| (write.tier, key))
    }

    fn side(&mut self, tier: Below) -> &mut Side {
        match tier {
            Below::Disk => &mut self.disk,
            Below::Object => &mut self.object,
        }
    }

    fn may_begin(&mut self, tier: Below) -> bool {
        let side = self.side(tier);
        side.under_way < MAX_WRITES && !side.is_busy
    }

    fn begin(&mut self, write: WriteId, key: ChunkKey) -> WriteNumber {
        self.last_number += 1;
        let number = WriteNumber(self.last_number);
        self.side(write.tier).under_way += 1;
        self.under_way.insert(number, (write, key));
        number
    }
}

impl Core {
    /// Orders the store's next write for each tier below, if the tier keeps up. The following write comes in the next call, so
    /// that a postponed write keeps its place.
    pub(crate) fn write_below(&mut self) {
        let touched = self.store.take_touched();
        if !touched.is_empty() {
            self.effects.push_back(Effect::Touch(touched));
        }
        self.effects.extend(self.store.take_given_up().into_iter().map(Effect::Remove));
        for tier in [Below::Disk, Below::Object] {
            while self.writes.may_begin(tier)
                && let Some(write) = self.store.next_write(tier)
            {
                let may_write = match tier {
                    Below::Disk => self.may_write_to_disk(write.fingerprint),
                    Below::Object => MayWrite::Now,
                };
                match may_write {
                    MayWrite::Now => {
                        let key = ChunkKey { fingerprint: write.fingerprint, hash: write.chunk.hash };
                        let number = self.writes.begin(write.write, key);
                        self.effects.push_back(Effect::Write { number, write });
                        break;
                    }
                    MayWrite::Later => {
                        self.store.postpone_write(write.write);
                        break;
                    }
                    // The chunk stays in memory, and has another chance when it is evicted.
                    MayWrite::Never => {
                        self.store.written(write.write, false);
                        self.count(Counted::NotWritten);
                    }
                }
            }
        }
    }

    /// Lets the tiers be asked again that had too much to do.
    pub(crate) fn write_again(&mut self) {
        (self.writes.disk.is_busy, self.writes.object.is_busy) = (false, false);
    }

    /// Takes a tier's answer.
    pub(crate) fn write_ended(&mut self, number: WriteNumber, answer: Written) {
        let Some((write, key)) = self.writes.under_way.remove(&number) else { return };
        let side = self.writes.side(write.tier);
        side.under_way -= 1;
        side.is_busy = answer == Written::Busy;
        match answer {
            Written::Busy => return self.store.postpone_write(write),
            Written::There if write.tier == Below::Object => {
                self.bring.known.set(key, Fact::Present, self.now);
            }
            _ => {}
        }
        self.store.written(write, answer == Written::There);
        if answer == Written::Closed && write.tier == Below::Disk {
            self.store.disk_closed();
        }
    }
}

/// Writes in flight to one tier; its queue has room for reads besides.
const MAX_WRITES: usize = 64;
