//! One question of an actor: chooses the homes to ask and merges their answers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter;
use std::sync::Arc;

use larder_protocol::limits::{MAX_FIND_ROWS, MAX_MEMBERS};
use larder_protocol::peer::{Find, Rows};
use larder_protocol::run::{run_start, run_start_before};
use larder_protocol::table::{Holder, MemberState, NodeNumber, RowKey, RunKey, Table};
use larder_protocol::v1::is_merged;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

use super::Holders;
use super::cache::Cache;
use super::shard::MAX_FOUND_HOLDERS;
use crate::Millis;

/// The cluster as this node sees it.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// The table.
    pub table: Arc<Table>,
    /// This node's number in the table.
    pub own: NodeNumber,
    /// Members that do not answer.
    pub silent: BTreeSet<NodeNumber>,
    /// Homes that did not answer in time.
    late: HashMap<NodeNumber, Late>,
}

/// A home that did not answer in time.
#[derive(Debug, Clone, Default)]
struct Late {
    /// The number of late answers in a row.
    questions: u32,
    /// The time until which the home is not asked again.
    until: Millis,
}

/// A question under way.
#[derive(Debug)]
pub struct Lookup {
    keys: Vec<RowKey>,
    found: Vec<Holders>,
    /// Whether a home, or the cache, answered for each chunk.
    answered: Vec<bool>,
    asks: Vec<HomeAsk>,
    cached: usize,
}

/// The question for one home.
#[derive(Debug, PartialEq, Eq)]
pub struct HomeAsk {
    /// The home; it may be this node.
    pub home: NodeNumber,
    /// The question.
    pub find: Find,
    /// Positions of the rows in the question.
    pub positions: Vec<u32>,
}

impl View {
    /// Notes that a home did not answer in time. From the second time in a row on, the home is not asked during a pause that
    /// grows each time. The node is still asked for blocks that it holds.
    pub fn is_late(&mut self, home: NodeNumber, now: Millis) {
        let members = &self.table;
        self.late.retain(|home, late| late.until + FORGOTTEN_MS > now && members.member(*home).is_some());
        if self.late.len() < MAX_MEMBERS {
            let late = self.late.entry(home).or_default();
            late.questions += 1;
            let pause_ms = match late.questions {
                0 | 1 => 0,
                questions => (FIRST_PAUSE_MS << (questions - 2).min(8)).min(LAST_PAUSE_MS),
            };
            late.until = now + pause_ms;
        }
    }

    /// Notes that a home answered.
    pub fn answers(&mut self, home: NodeNumber) {
        self.late.remove(&home);
    }

    /// Whether a home may be asked.
    pub fn may_ask(&self, home: NodeNumber, now: Millis) -> bool {
        !self.silent.contains(&home) && self.late.get(&home).is_none_or(|late| late.until <= now)
    }

    /// Whether nodes of version 1 may be members: then the table has the homes that these nodes know.
    fn may_have_v1(&self) -> bool {
        is_merged(&self.table.homes)
    }

    /// The holders worth asking: members other than this node; suspect or silent members count only if no other member has the
    /// chunk.
    fn choose(&self, holders: &mut Holders) {
        let member = |holder: &Holder| self.table.member(holder.node);
        holders.retain(|holder| holder.node != self.own && member(holder).is_some());
        let is_well = |holder: &Holder| {
            member(holder).is_some_and(|member| member.state == MemberState::Alive)
                && !self.silent.contains(&holder.node)
        };
        if holders.iter().any(is_well) {
            holders.retain(|holder| is_well(holder));
        }
    }
}

impl Lookup {
    /// Plans a lookup: chunks that the cache does not know are asked of their homes, with one message to each home. Silent or
    /// late homes are not asked.
    pub fn new(
        fingerprint: &Fingerprint,
        chunks: &[ChunkRef],
        view: &View,
        cache: &Cache,
        now: Millis,
    ) -> Self {
        let keys = row_keys(fingerprint, chunks);
        let before = if view.may_have_v1() { row_keys_before(fingerprint, chunks) } else { Vec::new() };
        let mut found = vec![Holders::new(); keys.len()];
        let mut answered = vec![false; keys.len()];
        let mut by_home: BTreeMap<NodeNumber, HomeAsk> = BTreeMap::new();
        let mut cached = 0;
        for (position, key) in (0_u32..).zip(&keys).take(MAX_FIND_ROWS) {
            if let Some(holders) = cache.get(key, now) {
                found[position as usize].clone_from(holders);
                answered[position as usize] = true;
                cached += 1;
                continue;
            }
            let before = before.get(position as usize).copied().flatten();
            for key in iter::once(*key).chain(before) {
                let Some(home) = view.table.home(key.run.partition()) else { continue };
                if home != view.own && !view.may_ask(home, now) {
                    continue;
                }
                let ask = by_home.entry(home).or_insert_with(|| HomeAsk {
                    home,
                    find: Find { epoch: view.table.epoch, rows: Vec::new() },
                    positions: Vec::new(),
                });
                if ask.find.rows.len() < MAX_FIND_ROWS {
                    ask.find.rows.push(key);
                    ask.positions.push(position);
                }
            }
        }
        Self { keys, found, answered, asks: by_home.into_values().collect(), cached }
    }

    /// Chunks that the cache knew.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// The questions to send; empty at a second call.
    pub fn take_asks(&mut self) -> Vec<HomeAsk> {
        std::mem::take(&mut self.asks)
    }

    /// Takes a home's answer, and keeps it in the cache. Wrong parts of the answer are ignored.
    pub fn fill(
        &mut self,
        positions: &[u32],
        rows: &Rows,
        view: &View,
        cache: Option<&mut Cache>,
        now: Millis,
    ) {
        positions.iter().for_each(|&position| self.answered[position as usize] = true);
        // An honest home names this many holders at most. Further spans of a home that lies are ignored.
        let mut named = positions.len() * MAX_FOUND_HOLDERS;
        for span in rows.spans.iter().take(MAX_SPANS) {
            let range = span.from as usize..span.to as usize;
            let within = positions.get(range).unwrap_or_default();
            let Some(left) = named.checked_sub(within.len()) else { break };
            named = left;
            for &position in within {
                let holders = &mut self.found[position as usize];
                if holders.len() < MAX_FOUND_HOLDERS && !holders.contains(&span.holder) {
                    holders.push(span.holder);
                }
            }
        }
        let Some(cache) = cache else { return };
        let has_moved = rows.epoch > view.table.epoch;
        for &position in positions {
            let holders = &self.found[position as usize];
            // With a newer table, the answering node may no longer be the home.
            if !(holders.is_empty() && has_moved) {
                cache.insert(self.keys[position as usize], holders.clone(), now);
            }
        }
    }

    /// The positions of the chunks about which no home has answered, ascending.
    pub fn unanswered(&self) -> Vec<u32> {
        (0..).zip(&self.answered).filter(|(_, answered)| !**answered).map(|(place, _)| place).collect()
    }

    /// The answer: one item for each chunk, in the order of the chunks.
    #[must_use]
    pub fn finish(mut self, view: &View) -> Vec<Holders> {
        self.found.iter_mut().for_each(|holders| view.choose(holders));
        self.found
    }
}

/// The keys of chunks of one namespace. Consecutive chunks of one run share the run's digest.
pub fn row_keys(fingerprint: &Fingerprint, chunks: &[ChunkRef]) -> Vec<RowKey> {
    let mut last: Option<(ChunkHash, RunKey)> = None;
    let key = |chunk: &ChunkRef| {
        let run = match last {
            Some((anchor, run)) if anchor == chunk.anchor => run,
            _ => RunKey::new(fingerprint, &chunk.anchor),
        };
        last = Some((chunk.anchor, run));
        RowKey { run, chunk: chunk.hash.short() }
    };
    chunks.iter().map(key).collect()
}

/// The keys under which nodes of version 1 announce: their runs are shorter. `None` for a chunk whose anchor is the same in both
/// versions, or whose earlier anchor is not among these chunks.
fn row_keys_before(fingerprint: &Fingerprint, chunks: &[ChunkRef]) -> Vec<Option<RowKey>> {
    let key = |(position, chunk): (usize, &ChunkRef)| {
        let start = run_start_before(chunk.index);
        if start == run_start(chunk.index) {
            return None;
        }
        let anchor = chunks.get(position.checked_sub((chunk.index - start) as usize)?)?;
        let run = RunKey::new(fingerprint, &anchor.hash);
        (anchor.index == start).then(|| RowKey { run, chunk: chunk.hash.short() })
    };
    chunks.iter().enumerate().map(key).collect()
}

/// The first pause for a home that was late twice in a row.
pub const FIRST_PAUSE_MS: u64 = 100;
const LAST_PAUSE_MS: u64 = 1_000;

/// The time after which a late answer is forgotten.
const FORGOTTEN_MS: u64 = 10_000;

/// Spans of one answer: as many as an honest home sends at most.
const MAX_SPANS: usize = MAX_FIND_ROWS * MAX_FOUND_HOLDERS;

#[cfg(test)]
mod tests;
