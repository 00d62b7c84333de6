//! The tiers below memory, disk and object store: one contract for both.
//!
//! A chunk to be read waits in the tier's line (`reads`). At its turn, [`Effect::Read`] orders the read. The answer says that its
//! blocks are in their slots, or why they are not. After a failed read the two tiers differ: other nodes or the object store may
//! have a chunk that the disk lost; nobody has a chunk that the object store lost. `writes` decides which chunks are written,
//! `described` which namespaces are described on disk; `segments` visits the whole disk.

pub(crate) mod described;
pub mod presence;
pub(crate) mod reads;
pub mod search;
mod segments;
pub(crate) mod writes;

use larder_protocol::PoolSet;
use larder_protocol::peer::Class;

use crate::Core;
use crate::effect::Effect;
use crate::event::{Below, ReadAnswer, ReadId};
use crate::loading::Meter;
use crate::store::ids::{ChunkKey, TenantId};
use crate::store::{Came, ChangeKind, Checksums, FetchId};
use presence::Fact;
use reads::ReadLine;

/// The reading side of a tier.
#[derive(Debug)]
pub(crate) struct Reads {
    pub(crate) line: ReadLine,
    pub(crate) meter: Meter,
    /// Whether the tier was busy: the next read waits until a read ends, or for the next tick.
    is_busy: bool,
}

/// A read under way.
#[derive(Debug)]
pub(crate) struct Read {
    tier: Below,
    tenant: TenantId,
    chunk: FetchId,
    key: ChunkKey,
    bytes: u64,
    /// Whether the read's fetch has ended without it.
    is_given_up: bool,
}

impl Reads {
    pub(crate) fn new(tier: Below) -> Self {
        let most_bytes = match tier {
            Below::Disk => MAX_DISK_READING_BYTES,
            Below::Object => MAX_OBJECT_READING_BYTES,
        };
        Self { line: ReadLine::new(most_bytes), meter: Meter::default(), is_busy: false }
    }
}

impl Core {
    /// Lines chunks up before a tier, which reads some at a time. A chunk that nobody waits for when its turn comes is not
    /// read.
    pub(crate) fn read_from(&mut self, tier: Below, chunks: Vec<FetchId>) {
        for id in chunks {
            let fetch = self.bring.fetches.get(&id);
            let class = fetch.map_or(Class::Decode, |fetch| fetch.class);
            let tenant = fetch.and_then(|fetch| self.store.tenant_of_namespace(&fetch.fingerprint));
            match (self.bring.reads_of(tier), tier) {
                (Some(_), Below::Disk) if self.store.is_disk_silent() => self.missed_on_disk(id),
                (Some(reads), _) => reads.line.wait(tenant.unwrap_or_default(), id, class, self.now),
                (None, Below::Disk) => self.missed_on_disk(id),
                (None, Below::Object) => self.did_not_come(id),
            }
        }
        self.read_queued(tier);
    }

    /// Orders waiting reads, up to the limit of reads in flight.
    pub(crate) fn read_queued(&mut self, tier: Below) {
        let now = self.now;
        while let Some(reads) = self.bring.reads_of(tier)
            && !reads.is_busy
            && let Some(chunk) = reads.line.next()
        {
            let Some(fetch) = self.bring.fetches.get_mut(&chunk) else { continue };
            fetch.is_object_asked |= tier == Below::Object;
            let (bytes, key) = (fetch.bytes(), fetch.key());
            let tenant = self.store.tenant_of_namespace(&key.fingerprint).unwrap_or_default();
            let read = ReadId(self.bring.next_number());
            self.bring.reads.insert(read, Read { tier, tenant, chunk, key, bytes, is_given_up: false });
            if let Some(reads) = self.bring.reads_of(tier) {
                reads.line.began(tenant, bytes);
                reads.meter.ordered(bytes, now);
            }
            self.effects.push_back(Effect::Read { read, tier, chunk });
        }
    }

    /// Does without the disk while its drive does not answer. Ordered reads count as failed, but the drive may still write to their
    /// slots, so these stay unused until it answers. Ordered writes keep their places. Chunks that wait to be read, or whose order
    /// nobody has taken yet, are looked for elsewhere, and chunks that wait to be written are not written.
    pub(crate) fn disk_silent(&mut self, is_silent: bool) {
        self.store.disk_silent(is_silent);
        if !is_silent {
            return;
        }
        while let Some(write) = self.store.next_write(Below::Disk) {
            self.store.written(write.write, false);
        }
        self.take_back_reads();
        let mut ordered = Vec::new();
        for (&read, under_way) in &mut self.bring.reads {
            if under_way.tier == Below::Disk && !under_way.is_given_up {
                under_way.is_given_up = true;
                ordered.push((read, under_way.chunk));
            }
        }
        ordered.sort_unstable_by_key(|(read, _)| read.0);
        for (read, chunk) in ordered {
            self.give_up_read(read, chunk);
        }
        let line = self.bring.reads_of(Below::Disk).map(|reads| reads.line.clear());
        for id in line.into_iter().flatten() {
            self.missed_on_disk(id);
        }
    }

    /// Lines up again the chunks whose read from disk nobody has begun. The order names a fetch, and a later fetch of the same chunk
    /// has other slots.
    fn take_back_reads(&mut self) {
        let mut untaken = Vec::new();
        self.effects.retain(|effect| match *effect {
            Effect::Read { read, tier: Below::Disk, .. } => {
                untaken.push(read);
                false
            }
            _ => true,
        });
        for read in untaken {
            let Some(Read { tenant, chunk, bytes, .. }) = self.bring.reads.remove(&read) else { continue };
            if let Some(reads) = self.bring.reads_of(Below::Disk) {
                reads.line.ended(tenant, bytes);
                reads.meter.gave_up(bytes);
                reads.line.put_off(tenant, chunk);
            }
        }
    }

    /// Ends a fetch whose read may still write to the slots.
    fn give_up_read(&mut self, ReadId(read): ReadId, chunk: FetchId) {
        self.store.may_write_later(chunk, read);
        self.did_not_come(chunk);
    }

    /// Asks the tiers again that had too much to do.
    pub(crate) fn read_again(&mut self) {
        for tier in [Below::Disk, Below::Object] {
            if let Some(reads) = self.bring.reads_of(tier).filter(|reads| reads.is_busy) {
                reads.is_busy = false;
                self.read_queued(tier);
            }
        }
    }

    /// Takes a tier's answer.
    pub(crate) fn read_ended(&mut self, read: ReadId, answer: ReadAnswer) {
        let Some(Read { tier, tenant, chunk, key, bytes, is_given_up }) = self.bring.reads.remove(&read)
        else {
            return;
        };
        let (now, is_here) = (self.now, matches!(answer, ReadAnswer::Here { .. }));
        if let Some(reads) = self.bring.reads_of(tier) {
            reads.line.ended(tenant, bytes);
            match is_here {
                true => reads.meter.delivered(bytes, now),
                false => reads.meter.gave_up(bytes),
            }
            reads.is_busy = answer == ReadAnswer::Busy && tier == Below::Disk;
        }
        match (answer, tier) {
            (ReadAnswer::Lost, _) if is_given_up => {}
            (ReadAnswer::Lost, _) => self.give_up_read(read, chunk),
            (answer, _) if is_given_up => {
                self.store.read_is_over(read.0);
                match answer {
                    ReadAnswer::Missing => self.store.left_disk(&[key]),
                    ReadAnswer::Closed => self.store.disk_closed(),
                    _ => {}
                }
            }
            (ReadAnswer::Here { checksums, .. }, Below::Disk) => {
                // The read asked for exactly the pools that the disk's record has.
                self.came_from(tier, chunk, PoolSet::ANY, checksums);
            }
            (ReadAnswer::Here { checksums, pools }, Below::Object) => {
                self.bring.known.set(key, Fact::Present, now);
                self.came_from(tier, chunk, pools, checksums);
            }
            (ReadAnswer::Missing, Below::Disk) => {
                self.store.left_disk(&[key]);
                self.missed_on_disk(chunk);
            }
            (ReadAnswer::Missing, Below::Object) => {
                self.bring.known.set(key, Fact::Absent, now);
                self.did_not_come(chunk);
            }
            (ReadAnswer::Busy, Below::Disk) => {
                if let Some(reads) = self.bring.reads_of(tier) {
                    reads.line.put_off(tenant, chunk);
                }
                return;
            }
            (ReadAnswer::Closed, Below::Disk) => {
                self.store.disk_closed();
                self.missed_on_disk(chunk);
            }
            (ReadAnswer::Impossible, Below::Disk) => self.missed_on_disk(chunk),
            // Nothing was read from the object store: computing is the better way.
            (ReadAnswer::Busy | ReadAnswer::Closed | ReadAnswer::Impossible, Below::Object) => {
                self.did_not_come(chunk);
            }
        }
        self.read_queued(tier);
    }

    fn came_from(&mut self, tier: Below, id: FetchId, pools: PoolSet, checksums: Vec<Checksums>) {
        if self.bring.fetches.remove(&id).is_none() {
            return;
        }
        // A chunk that only a peer asked for stays until it is sent.
        let kept = self.store.is_leased_soon(id).then_some(ChangeKind::Gained);
        let is_stored = tier == Below::Object;
        let came =
            Came { checksums, pools, reads: 1, is_on_disk_elsewhere: false, is_stored, is_copy: false };
        self.end_fetch(id, Some(came), kept);
    }

    /// Looks elsewhere for a chunk that cannot be read from disk: other nodes or the object store may have it.
    pub(crate) fn missed_on_disk(&mut self, id: FetchId) {
        let may_come = self.store.is_leased_soon(id) && self.store.takes_all_pools(id);
        let is_asked_again = self.bring.fetches.get(&id).is_none_or(|fetch| fetch.is_asked_again);
        if self.bring.sources.peers.is_some() && may_come && !is_asked_again {
            self.ask_again(vec![id]);
        } else if self.may_be_stored(id) {
            self.read_from(Below::Object, vec![id]);
        } else {
            self.did_not_come(id);
        }
    }
}

/// Bytes that are read from disk at a time: enough for a fast drive, and few enough to stop soon.
const MAX_DISK_READING_BYTES: u64 = 32 << 20;

/// Bytes of reads in flight from the object store: the bytes that a link of 20 Gbit/s delivers in 25 ms, the time in which a
/// distant store answers.
const MAX_OBJECT_READING_BYTES: u64 = 64 << 20;
