//! Memory: copies into it, sums over it, and the permitted readers and writers of each place.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use larder_core::store::ids::{ProcessId, SessionId};
use larder_core::store::{BlockMove, Checksums};
use larder_core::{CopyAnswer, CopyNumber, Event, OrderNumber, ReadId, WriteNumber};
use larder_node::arena::{Binding, Destination, ExtentMemory, ExtentSpec, HugePages};
use larder_node::copy::{CopyOrder, Move};
use larder_protocol::checksum::{BlockKey, block_ranges, range_checksum};

use crate::actor::EXTENT_BYTES;
use crate::content::{content, holds};
use crate::world::{ActorHappening, At, World};

/// A reading: somebody may read a part of a block. Has the place, the block's name, and the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) extent: u32,
    pub(crate) offset: u64,
    pub(crate) key: BlockKey,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// The reason why somebody may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reader {
    /// A lease or follow of a session.
    Lease(SessionId, u64),
    /// A process that may still map the memory that its sessions were shown.
    Process(ProcessId, u64),
    /// A peer or sibling.
    Grant(u64, u64),
}

/// The name of a lease that outlives its session.
pub(crate) fn ghost(session: SessionId, lease: u64) -> u64 {
    u64::from(session.0) << 32 | lease
}

/// An effect that reads or writes memory, in a life of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Doing {
    Order(OrderNumber),
    Followed(OrderNumber, usize),
    Read(ReadId),
    Write(WriteNumber),
    Copy(CopyNumber),
    Device(u64),
}

/// The readers and writers of one actor's memory.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    pub(crate) readings: BTreeMap<Reader, Vec<Reading>>,
    doing: BTreeMap<(u64, Doing), Vec<Span>>,
    /// Places with bits that were flipped.
    flips: BTreeSet<(u32, u64)>,
    /// Bytes that a GPU wrote and that are not summed yet. A bit that flips there becomes part of the sum: no cache can notice.
    unsummed: Vec<Span>,
    /// The tenant of each extent's bytes.
    pub(crate) tenants: BTreeMap<u32, u16>,
    /// The places to which the last bytes of engines were copied: an extent, an offset, and a length.
    pub(crate) fresh: VecDeque<(u32, u64, u64)>,
}

/// Bytes of an extent, and whether they are being written.
#[derive(Debug, Clone, Copy)]
struct Span {
    extent: u32,
    from: u64,
    to: u64,
    is_written: bool,
}

/// Bytes that are being copied.
pub(crate) struct Copying {
    pub(crate) copy: CopyNumber,
    moves: Vec<BlockMove>,
    memory: Vec<Arc<ExtentMemory>>,
    /// The session whose window the blocks come from, and the content of that window.
    session: Option<SessionId>,
    sources: Vec<Option<(BlockKey, u64)>>,
    fails: Option<CopyAnswer>,
}

impl Uses {
    /// Whether bits were flipped in these bytes.
    pub(crate) fn is_flipped(&self, extent: u32, from: u64, to: u64) -> bool {
        self.flips.range((extent, from)..(extent, to)).next().is_some()
    }

    pub(crate) fn flip(&mut self, extent: u32, at: u64) {
        self.flips.insert((extent, at));
    }

    /// Whether nobody has summed this byte since a GPU wrote it.
    pub(crate) fn is_unsummed(&self, extent: u32, at: u64) -> bool {
        self.unsummed.iter().any(|span| span.meets(extent, at, at + 1))
    }

    /// Notes that these bytes are summed.
    fn is_summed(&mut self, extent: u32, from: u64, to: u64) {
        self.unsummed.retain(|span| !span.meets(extent, from, to));
    }

    /// Notes that these bytes are new.
    pub(crate) fn is_written(&mut self, extent: u32, from: u64, to: u64) {
        let gone: Vec<_> = self.flips.range((extent, from)..(extent, to)).copied().collect();
        gone.iter().for_each(|at| _ = self.flips.remove(at));
        self.is_summed(extent, from, to);
    }

    /// Notes that an extent has new memory.
    pub(crate) fn renew(&mut self, extent: u32) {
        self.flips.retain(|&(of, _)| of != extent);
        self.tenants.remove(&extent);
        self.unsummed.retain(|span| span.extent != extent);
        self.readings.values_mut().for_each(|readings| readings.retain(|reading| reading.extent != extent));
    }

    /// Somebody who uses these bytes. Users that only read count only if the bytes are to be written.
    fn user(&self, span: Span) -> Option<String> {
        let reader = self.readings.iter().find(|(_, readings)| {
            readings.iter().any(|reading| {
                span.meets(reading.extent, reading.offset, reading.offset + reading.to - reading.from)
            })
        });
        let doing = self.doing.iter().find(|(_, spans)| {
            spans.iter().any(|other| {
                (other.is_written || span.is_written) && span.meets(other.extent, other.from, other.to)
            })
        });
        let reader = reader.filter(|_| span.is_written).map(|(reader, _)| format!("{reader:?}"));
        reader.or_else(|| doing.map(|(doing, _)| format!("{doing:?}")))
    }

    pub(crate) fn end(&mut self, life: u64, doing: Doing) {
        let ended = self.doing.remove(&(life, doing)).unwrap_or_default();
        if matches!(doing, Doing::Device(_)) {
            self.unsummed.extend(ended.into_iter().filter(|span| span.is_written));
        }
    }

    /// Whether effects use an extent.
    pub(crate) fn uses(&self, extent: u32) -> bool {
        self.doing.values().flatten().any(|span| span.extent == extent)
    }
}

impl Span {
    fn meets(&self, extent: u32, from: u64, to: u64) -> bool {
        extent == self.extent && from < self.to && self.from < to
    }
}

impl World {
    /// Notes that an effect begins to read or write blocks.
    pub(crate) fn begin(&mut self, at: At, doing: Doing, blocks: &[BlockMove], is_written: bool) {
        let span = |block: &&BlockMove| {
            let (extent, from) = (block.place.extent, block.place.offset);
            (extent, from, from + block.bytes)
        };
        let (written, read): (Vec<_>, Vec<_>) =
            blocks.iter().partition(|block| is_written && !block.is_in_place);
        self.begin_spans(at, doing, &read.iter().map(span).collect::<Vec<_>>(), false);
        self.begin_spans(at, doing, &written.iter().map(span).collect::<Vec<_>>(), true);
    }

    /// As [`Self::begin`], for bytes of extents.
    pub(crate) fn begin_spans(&mut self, at: At, doing: Doing, spans: &[(u32, u64, u64)], is_written: bool) {
        let Some(actor) = self.actor(at) else { return };
        let spans: Vec<Span> =
            spans.iter().map(|&(extent, from, to)| Span { extent, from, to, is_written }).collect();
        let user = spans.iter().find_map(|&span| actor.uses.user(span));
        let outside = spans.iter().find(|span| span.to > EXTENT_BYTES).copied();
        for span in spans.iter().filter(|span| span.is_written) {
            actor.uses.is_written(span.extent, span.from, span.to);
        }
        actor.uses.doing.entry((actor.life, doing)).or_default().extend(spans);
        if let Some(user) = user {
            self.violate(|| format!("{at:?}: {doing:?} uses memory that {user} uses"));
        }
        if let Some(outside) = outside {
            self.violate(|| format!("{at:?}: {doing:?} uses {outside:?}, outside of its extent"));
        }
    }

    /// Checks that a place holds the shown content, unless bits of it were flipped.
    pub(crate) fn must_hold(&mut self, at: At, reading: &Reading) {
        let &Reading { extent, offset, ref key, from, to } = reading;
        let Some(actor) = self.actor(at) else { return };
        let is_flipped = actor.uses.is_flipped(extent, offset, offset + to - from);
        let is_right =
            actor.memory[extent as usize].as_ref().is_some_and(|memory| holds(memory, offset, key, from, to));
        if !is_right && !is_flipped {
            let reading = *reading;
            let stands = self.what_stands(at, extent, offset);
            self.violate(|| format!("{at:?}: wrong bytes: {reading:?}; there stands {stands}"));
        }
    }

    /// The content of a place, in words.
    fn what_stands(&mut self, at: At, extent: u32, offset: u64) -> String {
        let mut found = [0; 8];
        let memory = self.actor(at).and_then(|actor| actor.memory[extent as usize].clone());
        let Some(memory) = memory else { return "no memory".to_owned() };
        if memory.copy_out(offset, &mut found).is_err() || found == [0; 8] {
            return "nothing".to_owned();
        }
        for space in &self.spaces {
            for hash in space.all_hashes() {
                for key in space.blocks_of(hash, space.rules.every()) {
                    let layer_bytes = space.layer_bytes(key.pool.into());
                    let layers = space.spec.pools[usize::from(key.pool)].layers;
                    let layer = (0..u64::from(layers))
                        .find(|layer| content(&key, layer * layer_bytes, layer * layer_bytes + 8) == found);
                    if let Some(layer) = layer {
                        return format!("layer {layer} of {key:?}");
                    }
                }
            }
        }
        "something else".to_owned()
    }

    /// The memory of blocks, which lives as long as somebody holds it.
    pub(crate) fn memory_of(&mut self, at: At, blocks: &[BlockMove]) -> Option<Vec<Arc<ExtentMemory>>> {
        let actor = self.actor(at)?;
        blocks.iter().map(|block| actor.memory[block.place.extent as usize].clone()).collect()
    }

    /// Copies and sums blocks, some time later.
    pub(crate) fn copy(
        &mut self,
        at: At,
        copy: CopyNumber,
        session: Option<SessionId>,
        moves: Vec<BlockMove>,
    ) {
        self.begin(at, Doing::Copy(copy), &moves, true);
        let is_whole = |block: &&BlockMove| {
            let space = self.spaces.iter().find(|space| space.fingerprint == block.key.fingerprint);
            space.is_some_and(|space| space.block_bytes(block.key.pool.into()) == block.bytes)
        };
        let in_place = moves.iter().filter(|block| block.is_in_place).filter(is_whole).copied();
        for block in in_place.collect::<Vec<_>>() {
            self.must_hold_whole(at, &block);
        }
        let Some(memory) = self.memory_of(at, &moves) else {
            return self.violate(|| format!("{at:?}: {copy:?} goes to an extent without memory"));
        };
        let (slow, failing) = {
            let host = &self.hosts[at.life.host];
            (host.slow_copies, host.failing_copies)
        };
        if self.chance(failing) {
            self.coverage.note("CopyAnswer::Busy");
            return self.tell_at_once(at, Event::Copied { copy, answer: CopyAnswer::Busy });
        }
        let fails = self.chance(failing / 2).then_some(CopyAnswer::Failed);
        let Some(actor) = self.actor(at) else { return };
        let window = session.and_then(|session| actor.windows.get(&session));
        let source = |block: &BlockMove| window?.get(&block.source?).copied();
        let sources = moves.iter().map(source).collect();
        let life = actor.life;
        let after = if slow { self.some_us(100, 2_000_000) } else { self.some_us(10, 300) };
        let copying = Copying { copy, moves, memory, session, sources, fails };
        self.plan_actor(at, after, ActorHappening::Copied(life, copying));
    }

    /// A copy has ended.
    pub(crate) fn copied(&mut self, at: At, life: u64, copying: Copying) {
        let Copying { copy, moves, memory, session, sources, fails } = copying;
        let (mut sums, mut fresh) = (Vec::new(), Vec::new());
        let scribbled =
            session.and_then(|session| self.actor(at)?.scribbled.get(&session).cloned()).unwrap_or_default();
        for ((block, memory), source) in moves.iter().zip(&memory).zip(sources) {
            if !block.is_in_place {
                let is_there = block.source.is_some_and(|from| !scribbled.contains(&from));
                let bytes = match source.filter(|_| is_there) {
                    Some((key, from)) => content(&key, from, from + block.bytes),
                    None => vec![0; block.bytes as usize],
                };
                let copied = memory.copy_in(block.place.offset, &bytes);
                debug_assert!(copied.is_ok(), "places are checked when the copy begins");
                fresh.push((block.place.extent, block.place.offset, block.bytes));
            }
            sums.push(sums_of_place(block, memory));
        }
        drop(memory);
        if let Some(actor) = self.actor(at) {
            for block in moves.iter().filter(|block| block.is_in_place) {
                let from = block.place.offset;
                actor.uses.is_summed(block.place.extent, from, from + block.bytes);
            }
            actor.uses.fresh.extend(fresh);
            let old = actor.uses.fresh.len().saturating_sub(MOST_FRESH);
            actor.uses.fresh.drain(..old);
        }
        let answer = fails.unwrap_or(CopyAnswer::Done(sums));
        self.coverage.note(crate::coverage::copied(&answer));
        self.tell_in_life(at, life, Event::Copied { copy, answer });
    }

    fn must_hold_whole(&mut self, at: At, block: &BlockMove) {
        let (extent, offset) = (block.place.extent, block.place.offset);
        let reading = Reading { extent, offset, key: block.key, from: 0, to: block.bytes };
        self.must_hold(at, &reading);
    }
}

/// Limit of the remembered places to which bytes were copied.
const MOST_FRESH: usize = 4;

/// New memory for an extent: all zeros.
pub(crate) fn new_extent() -> Option<Arc<ExtentMemory>> {
    let spec = ExtentSpec {
        bytes: EXTENT_BYTES,
        numa_node: None,
        binding: Binding::Preferred,
        huge_pages: HugePages::Never,
        trust_engines: false,
    };
    spec.create().ok().map(Arc::new)
}

/// The checksums of a block in its place, by the code of the node's own copy threads.
pub(crate) fn sums_of_place(block: &BlockMove, memory: &Arc<ExtentMemory>) -> Checksums {
    let to = Destination {
        memory: Arc::clone(memory),
        offset: block.place.offset,
        bytes: block.bytes,
        range_bytes: block.range_bytes,
        key: block.key,
    };
    let summed = Move { source: 0, is_in_place: true, to };
    let order = CopyOrder::new(None, vec![summed]);
    let sums = order.map(|order| order.perform()).unwrap_or_default();
    sums.into_iter().next().unwrap_or_default()
}

/// The checksums of the bytes of a block.
pub(crate) fn sums_of_bytes(key: &BlockKey, bytes: &[u8], range_bytes: u64) -> Checksums {
    let ranges = block_ranges(bytes.len() as u64, range_bytes);
    Checksums::of(key, ranges.map(|range| range_checksum(&bytes[range.start as usize..range.end as usize])))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seed 2508 of 2026-11-26: a bit flipped between the end of a GPU's copy and its first sum.
    #[test]
    fn what_a_gpu_wrote_is_unsummed_until_a_copy_thread_sums_it() {
        let (mut uses, gpu) = (Uses::default(), Doing::Device(3));
        let span = |from, is_written| Span { extent: 5, from, to: from + 100, is_written };
        uses.doing.insert((1, gpu), vec![span(0, true), span(200, false)]);
        uses.end(1, gpu);
        assert_eq!([0, 99, 100, 250].map(|at| uses.is_unsummed(5, at)), [true, true, false, false]);
        assert!(!uses.is_unsummed(6, 50), "another extent");
        uses.is_summed(5, 0, 100);
        assert!(!uses.is_unsummed(5, 50));
    }
}
