//! The last lookups of an actor with the outcome of each chunk, to explain why a prompt missed.
//!
//! The log keeps lookups, prefetches, and leases that wait for chunks or come short. The log is bounded by its lookups and by
//! their chunks; the oldest of the tenant with the most go first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use larder_protocol::session::Tier;
use larder_protocol::{Chain, ChunkHash, Fingerprint};

use crate::Core;
use crate::event::FetchFailure;
use crate::outcome::runs_of;
use crate::store::ids::TenantId;
use crate::store::{OtherNamespace, Refused, RememberedEvictions, absent_of};
use crate::time::Millis;

pub use crate::outcome::{ChunkOutcome, NotDelivered, OutcomeRun};

/// The engine's own name of a request, and the trace that it belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// The name, if the engine gives one.
    pub request: Option<Arc<str>>,
    /// The trace, whether it is recorded or not.
    pub trace_id: Option<[u8; 16]>,
}

/// The kind of a request that the log keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum LookupKind {
    /// Asks how much is here.
    Lookup,
    /// Asks to bring chunks from elsewhere.
    Prefetch,
    /// Asks to read.
    Lease,
}

/// A lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupRecord {
    /// Its number, which no other lookup of the actor has.
    pub number: u64,
    /// The time of the lookup.
    pub at: Millis,
    /// The kind of the request.
    pub kind: LookupKind,
    /// The engine's name of the request.
    pub origin: Origin,
    /// The tenant whose prompt it is.
    pub tenant: TenantId,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt, as the engine says.
    pub prompt_tokens: u64,
    /// The position of its first chunk in the prompt.
    pub first_index: u32,
    /// Its chunks.
    pub hashes: Arc<[ChunkHash]>,
    /// The outcomes of its chunks, in order.
    pub outcomes: Vec<OutcomeRun>,
    /// The reason of its refusal, if it was refused.
    pub refused: Option<String>,
    /// The number of evictions before it ([`Store::evictions_so_far`](crate::store::Store::evictions_so_far)).
    pub evictions_before: u64,
}

/// The lookups to show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LookupFilter {
    /// Only lookups of the request with this name.
    pub request: Option<String>,
    /// Only lookups of this trace.
    pub trace_id: Option<[u8; 16]>,
    /// Only lookups of these tenants. A tenant that left and came back has several numbers.
    pub tenants: Option<Vec<TenantId>>,
    /// Only lookups with a miss.
    pub misses_only: bool,
    /// The most lookups to show.
    pub most: usize,
}

/// An actor's last lookups, with the facts that explain them.
#[derive(Debug, Clone)]
pub struct ExplainedLookups {
    /// Each lookup. If one of its chunks was found nowhere, also the namespaces that resemble the lookup's namespace.
    pub records: Vec<(LookupRecord, Vec<OtherNamespace>)>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

impl Core {
    /// Explains the last lookups that pass the filter, the newest first.
    pub fn explain_lookups(&self, filter: &LookupFilter) -> ExplainedLookups {
        let mut likes = HashMap::new();
        let with_others = |record: LookupRecord| {
            let like = || self.store.like(&record.fingerprint);
            let others = absent_of(&record.hashes, &record.outcomes).map(|hash| {
                let like = likes.entry(record.fingerprint).or_insert_with(like);
                self.store.others_among(like, hash)
            });
            (record, others.unwrap_or_default())
        };
        let records = self.lookups.last(filter).into_iter().map(with_others).collect();
        ExplainedLookups { records, evictions: self.store.remembered_evictions() }
    }
}

/// The log.
#[derive(Debug, Default)]
pub(crate) struct Lookups {
    tenants: BTreeMap<TenantId, OfTenant>,
    lookups: usize,
    chunks: usize,
    last_number: u64,
    /// Chunks that lately did not come, the newest last, each with the number of the last lookup before its failure.
    undelivered: VecDeque<(u64, ChunkHash, NotDelivered)>,
}

/// A tenant's lookups, the newest last.
#[derive(Debug, Default)]
struct OfTenant {
    kept: VecDeque<LookupRecord>,
    chunks: usize,
}

impl From<FetchFailure> for NotDelivered {
    fn from(failure: FetchFailure) -> Self {
        match failure {
            FetchFailure::Unreachable => Self::Silent,
            FetchFailure::Deadline => Self::Deadline,
            FetchFailure::Broken | FetchFailure::Malformed => Self::Broken,
            FetchFailure::Full => Self::Busy,
        }
    }
}

impl LookupRecord {
    /// The outcome of each run, with the position of its first chunk.
    pub fn runs(&self) -> impl Iterator<Item = (u32, OutcomeRun)> {
        OutcomeRun::with_starts(&self.outcomes)
    }

    /// Whether a chunk was missed.
    pub fn has_miss(&self) -> bool {
        self.outcomes.iter().any(|run| run.outcome.is_miss())
    }

    fn change(&mut self, change: impl Fn(u32, ChunkOutcome) -> ChunkOutcome) {
        let chunks: Vec<ChunkOutcome> =
            self.runs().flat_map(|(from, run)| (from..run.to).map(move |_| run.outcome)).collect();
        self.outcomes = runs_of((0..).zip(chunks).map(|(position, outcome)| change(position, outcome)));
    }
}

impl LookupFilter {
    fn wants(&self, record: &LookupRecord) -> bool {
        let is_named = self.request.is_none() || self.request.as_deref() == record.origin.request.as_deref();
        let is_of_trace = self.trace_id.is_none() || self.trace_id == record.origin.trace_id;
        let is_of_tenant = self.tenants.as_ref().is_none_or(|tenants| tenants.contains(&record.tenant));
        is_named && is_of_trace && is_of_tenant && (!self.misses_only || record.has_miss())
    }
}

impl Lookups {
    /// Keeps a lookup, and returns its number.
    pub(crate) fn note(&mut self, record: LookupRecord) -> u64 {
        self.last_number += 1;
        self.lookups += 1;
        self.chunks += record.hashes.len();
        let of = self.tenants.entry(record.tenant).or_default();
        of.chunks += record.hashes.len();
        of.kept.push_back(LookupRecord { number: self.last_number, ..record });
        while self.lookups > MOST_LOOKUPS {
            self.forget_oldest(|of| of.kept.len());
        }
        while self.chunks > MOST_CHUNKS {
            self.forget_oldest(|of| of.chunks);
        }
        self.last_number
    }

    /// Forgets the oldest lookup of the tenant with the most.
    fn forget_oldest(&mut self, has: impl Fn(&OfTenant) -> usize) {
        let Some((&tenant, of)) = self.tenants.iter_mut().max_by_key(|(_, of)| has(of)) else { return };
        if let Some(oldest) = of.kept.pop_front() {
            self.lookups -= 1;
            self.chunks -= oldest.hashes.len();
            of.chunks -= oldest.hashes.len();
        }
        if of.kept.is_empty() {
            self.tenants.remove(&tenant);
        }
    }

    /// Notes that a chunk did not come from its place.
    pub(crate) fn did_not_come(&mut self, hash: ChunkHash, why: NotDelivered) {
        if self.undelivered.len() == MOST_UNDELIVERED {
            self.undelivered.pop_front();
        }
        self.undelivered.push_back((self.last_number, hash, why));
    }

    /// Notes that a lookup's first chunks have come; the chunks behind them have not, or are of no use.
    pub(crate) fn delivered(&mut self, number: u64, chunks: u32, is_late: bool) {
        let since = self.undelivered.partition_point(|(after, ..)| *after < number);
        // Of several failures of a chunk, the last counts.
        let failed: HashMap<ChunkHash, NotDelivered> =
            self.undelivered.range(since..).map(|&(_, hash, why)| (hash, why)).collect();
        if let Some(record) = self.find(number) {
            let hashes = Arc::clone(&record.hashes);
            record.change(|position, outcome| match outcome {
                ChunkOutcome::Found(tier) if position >= chunks => {
                    match failed.get(&hashes[position as usize]) {
                        Some(&why) => ChunkOutcome::NotDelivered(why),
                        None if is_late && is_brought(tier) => {
                            ChunkOutcome::NotDelivered(NotDelivered::Deadline)
                        }
                        None => ChunkOutcome::BehindGap(tier),
                    }
                }
                outcome => outcome,
            });
        }
    }

    /// Notes that only the first chunks of a lookup are brought: the others are computed sooner.
    pub(crate) fn computes_from(&mut self, number: u64, chunks: u32) {
        if let Some(record) = self.find(number) {
            record.change(|position, outcome| match outcome {
                ChunkOutcome::Found(tier) if position >= chunks => ChunkOutcome::ComputedFaster(tier),
                outcome => outcome,
            });
        }
    }

    /// Notes that a lookup was refused: none of its chunks can be used.
    pub(crate) fn refused(&mut self, number: u64, refused: &Refused) {
        if let Some(record) = self.find(number) {
            record.refused = Some(refused.to_string());
            record.change(|_, outcome| match outcome {
                ChunkOutcome::Found(_) | ChunkOutcome::BehindGap(_) => ChunkOutcome::Refused,
                outcome => outcome,
            });
        }
    }

    /// The last lookups that pass the filter, the newest first.
    pub(crate) fn last(&self, filter: &LookupFilter) -> Vec<LookupRecord> {
        let kept = self.tenants.values().flat_map(|of| &of.kept);
        let mut wanted: Vec<&LookupRecord> = kept.filter(|record| filter.wants(record)).collect();
        wanted.sort_unstable_by_key(|record| Reverse(record.number));
        wanted.into_iter().take(filter.most).cloned().collect()
    }

    /// Bytes of the hashes of all kept lookups.
    pub(crate) fn bytes(&self) -> u64 {
        (self.chunks * size_of::<ChunkHash>()) as u64
    }

    fn find(&mut self, number: u64) -> Option<&mut LookupRecord> {
        self.tenants.values_mut().find_map(|OfTenant { kept, .. }| {
            let position = kept.binary_search_by_key(&number, |record| record.number).ok()?;
            kept.get_mut(position)
        })
    }
}

/// A record of a request that has no outcome yet.
pub(crate) fn record(
    (kind, origin, at): (LookupKind, Origin, Millis),
    (tenant, fingerprint, chunk_tokens): (TenantId, Fingerprint, u32),
    chain: &Chain,
    prompt_tokens: u64,
) -> LookupRecord {
    LookupRecord {
        number: 0,
        at,
        kind,
        origin,
        tenant,
        fingerprint,
        chunk_tokens,
        prompt_tokens,
        first_index: if chain.is_empty() { 0 } else { chain.chunk(0).index },
        hashes: chain.hashes.as_slice().into(),
        outcomes: Vec::new(),
        refused: None,
        evictions_before: 0,
    }
}

fn is_brought(tier: Tier) -> bool {
    !matches!(tier, Tier::Device | Tier::Host)
}

/// The most lookups that are kept.
const MOST_LOOKUPS: usize = 1_024;

/// The most chunks of these lookups, of 32 bytes each: 2 MiB.
const MOST_CHUNKS: usize = 65_536;

/// The most missing chunks whose reasons are kept.
const MOST_UNDELIVERED: usize = 2_048;

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(chunks: usize, request: &str) -> LookupRecord {
        let origin = Origin { request: Some(request.into()), trace_id: None };
        let about = (LookupKind::Lookup, origin, Millis(1));
        let hashes = (0..chunks).map(|number| ChunkHash([number as u8; 32])).collect();
        let chain = Chain::from_root(ChunkHash([9; 32]), hashes);
        let mut record = record(about, (TenantId(0), Fingerprint([1; 32]), 16), &chain, 1);
        record.outcomes = runs_of((0..chunks).map(|_| ChunkOutcome::Found(Tier::Peer)));
        record
    }

    #[test]
    fn the_log_is_bounded_by_lookups_and_by_chunks() {
        let mut log = Lookups::default();
        (0..MOST_LOOKUPS + 10).for_each(|number| _ = log.note(lookup(1, &number.to_string())));
        let all = LookupFilter { most: usize::MAX, ..LookupFilter::default() };
        assert_eq!((log.last(&all).len(), log.bytes()), (MOST_LOOKUPS, 32 * MOST_LOOKUPS as u64));
        let named = LookupFilter { request: Some("12".into()), ..all.clone() };
        assert_eq!(log.last(&named).len(), 1);
        assert!(log.last(&LookupFilter { request: Some("9".into()), ..all.clone() }).is_empty(), "forgotten");
        (0..9).for_each(|_| _ = log.note(lookup(8_192, "long")));
        assert_eq!(log.last(&all).len(), MOST_CHUNKS / 8_192);
    }

    #[test]
    fn lookups_of_one_tenant_do_not_push_out_those_of_another() {
        let mut log = Lookups::default();
        let number = log.note(LookupRecord { tenant: TenantId(1), ..lookup(2, "b") });
        (0..9).for_each(|_| _ = log.note(lookup(8_192, "a")));
        (0..MOST_LOOKUPS).for_each(|_| _ = log.note(lookup(1, "a")));
        log.computes_from(number, 0);
        let of_b = LookupFilter { request: Some("b".into()), most: 1, ..LookupFilter::default() };
        let computed = runs_of([ChunkOutcome::ComputedFaster(Tier::Peer); 2]);
        assert_eq!(log.last(&of_b).into_iter().map(|record| record.outcomes).collect::<Vec<_>>(), [computed]);
        let all = log.last(&LookupFilter { most: usize::MAX, ..LookupFilter::default() });
        assert_eq!((all.len(), log.bytes()), (MOST_LOOKUPS, 32 * (MOST_LOOKUPS as u64 + 1)));
        assert!(all.is_sorted_by(|newer, older| newer.number > older.number));
    }

    #[test]
    fn chunks_that_did_not_come_say_why_and_those_behind_them_are_behind_a_gap() {
        let mut log = Lookups::default();
        let number = log.note(lookup(4, "a"));
        log.did_not_come(ChunkHash([1; 32]), NotDelivered::Broken);
        log.did_not_come(ChunkHash([1; 32]), NotDelivered::Silent);
        log.delivered(number, 1, false);
        let found = ChunkOutcome::Found(Tier::Peer);
        let expected = runs_of([
            found,
            ChunkOutcome::NotDelivered(NotDelivered::Silent),
            ChunkOutcome::BehindGap(Tier::Peer),
            ChunkOutcome::BehindGap(Tier::Peer),
        ]);
        assert_eq!(log.last(&LookupFilter { most: 1, ..LookupFilter::default() })[0].outcomes, expected);
    }

    #[test]
    fn failures_before_a_lookup_do_not_explain_it() {
        let mut log = Lookups::default();
        log.note(lookup(1, "a"));
        log.did_not_come(ChunkHash([1; 32]), NotDelivered::Broken);
        let number = log.note(lookup(2, "b"));
        log.delivered(number, 1, false);
        let expected = [ChunkOutcome::Found(Tier::Peer), ChunkOutcome::BehindGap(Tier::Peer)];
        assert_eq!(
            log.last(&LookupFilter { most: 1, ..LookupFilter::default() })[0].outcomes,
            runs_of(expected)
        );
    }

    #[test]
    fn no_chunk_of_a_refused_lookup_is_said_to_be_found() {
        let mut log = Lookups::default();
        let (found, behind) = (ChunkOutcome::Found(Tier::Host), ChunkOutcome::BehindGap(Tier::Peer));
        let outcomes = runs_of([found, ChunkOutcome::Absent, behind]);
        let number = log.note(LookupRecord { outcomes, ..lookup(3, "a") });
        log.refused(number, &Refused::OutOfOrder);
        let record = log.last(&LookupFilter { most: 1, ..LookupFilter::default() }).remove(0);
        assert!(record.refused.is_some());
        assert_eq!(
            record.outcomes,
            runs_of([ChunkOutcome::Refused, ChunkOutcome::Absent, ChunkOutcome::Refused])
        );
    }

    #[test]
    fn a_tenants_lookups_are_shown_alone() {
        let mut log = Lookups::default();
        for tenant in [0, 1, 0] {
            log.note(LookupRecord { tenant: TenantId(tenant), ..lookup(1, "a") });
        }
        let of = |tenants: &[u16]| {
            let tenants = Some(tenants.iter().copied().map(TenantId).collect());
            log.last(&LookupFilter { tenants, most: 9, ..LookupFilter::default() }).len()
        };
        assert_eq!([of(&[0]), of(&[1]), of(&[2]), of(&[1, 2, 0])], [2, 1, 0, 3]);
    }
}
