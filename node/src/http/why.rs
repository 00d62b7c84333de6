//! `GET /lookups` and `POST /explain`: why a prompt was a miss.
//!
//! An actor gives its records of lookups and shares its memory of evictions. This module searches that memory on another thread.

use std::time::{SystemTime, UNIX_EPOCH};

use larder_core::Millis;
use larder_core::lookups::{ChunkOutcome, ExplainedLookups, LookupFilter, LookupRecord, OutcomeRun};
use larder_core::store::{
    ExplainedChain, FoundEvictions, Keeper, OtherNamespace, RememberedEviction, RememberedEvictions, Stay,
};
use larder_net::blocking::try_blocking;
use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use larder_protocol::{ChunkHash, Fingerprint};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::HttpState;
use super::show::{Arguments, Refused};

/// A lookup in the list that `GET /lookups` returns, the newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LookupStatus {
    /// The device that served the lookup.
    pub device: u16,
    /// The lookup's number at that device.
    pub number: u64,
    /// The time of the lookup: milliseconds since 1970.
    pub unix_ms: u64,
    /// The kind of the engine's request: `lookup`, `prefetch` or `lease`.
    pub kind: String,
    /// The engine's name of the request; `None` if the engine gave no name.
    pub request: Option<String>,
    /// The trace of the request, 32 hexadecimal digits; `None` if the engine named no trace.
    pub trace: Option<String>,
    /// The prompt's tenant.
    pub tenant: String,
    /// Fingerprint of the namespace: 64 hexadecimal digits.
    pub namespace: String,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt, as the engine said; 0 for a lease.
    pub prompt_tokens: u64,
    /// The place of the lookup's first chunk in the prompt.
    pub first_index: u32,
    /// Chunks that the lookup asked for.
    pub chunks: u64,
    /// Chunks that could be used.
    pub found_chunks: u64,
    /// Why the request was refused; `None` if it was not refused.
    pub refused: Option<String>,
    /// The outcomes of the chunks, in order.
    pub runs: Vec<RunStatus>,
    /// If a chunk was stored nowhere: namespaces of the tenant that resemble the lookup's namespace.
    pub other_namespaces: Vec<OtherStatus>,
    /// The hashes of the chunks, 64 hexadecimal digits each; only if a request or trace was asked for.
    pub hashes: Vec<String>,
}

/// Consecutive chunks with the same outcome, in [`LookupStatus`] and [`ChainStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Position of the first chunk.
    pub from: u32,
    /// Position after the last chunk.
    pub to: u32,
    /// The outcome of the chunks: `found`, `behind_gap` (held, but an earlier chunk is missing), `computed_faster` (held, but
    /// computing is faster than fetching), `not_asked`, `being_written`, `evicted`, `never_stored`, `unknown` (possibly evicted:
    /// the oldest evictions are forgotten), `home_silent` (the home of the directory rows did not answer), `peer_silent`,
    /// `deadline`, `busy`, `not_held` (the directory was wrong), `broken` (the connection broke), `damaged`, `unreadable` (the
    /// tier could not read them) or `refused`.
    pub outcome: String,
    /// The tier where the chunks were; `None` if they were nowhere.
    pub tier: Option<String>,
    /// The eviction of the chunks; `None` for any other outcome.
    pub evicted: Option<EvictedStatus>,
}

/// An eviction in [`RunStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvictedStatus {
    /// When the first chunk of the run was evicted: milliseconds since 1970.
    pub unix_ms: u64,
    /// The reason: `watermark` (more was cached than allowed), `need` (a reservation found no slot), `clearing` (an extent was
    /// cleared for another block size or tenant), `disk` (the disk dropped it), `moved` (to another actor), `purged` or
    /// `damaged`.
    pub rule: String,
    /// The worth of the first chunk at that time: tokens of prefill saved per GiB and second.
    pub worth: f64,
}

/// A namespace that resembles the asker's namespace, in [`LookupStatus`] and [`ChainStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherStatus {
    /// The namespace's fingerprint: 64 hexadecimal digits.
    pub fingerprint: String,
    /// Name of the namespace's model.
    pub model: String,
    /// The fields in which the two namespaces differ.
    pub differing: Vec<String>,
    /// Chunks of the namespace at this device.
    pub chunks: u64,
    /// Whether the namespace has the missing chunk; `None` if equal tokens have other hashes in this namespace.
    pub has_chunk: Option<bool>,
}

/// A device in the list that `POST /explain` returns, with the chunks of a prompt that the device has now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainStatus {
    /// The device.
    pub device: u16,
    /// Whether the device knows the namespace.
    pub knows_namespace: bool,
    /// The outcomes of the prompt's chunks at this device, by position.
    pub runs: Vec<RunStatus>,
    /// If a chunk is missing: namespaces of the tenant that resemble the prompt's namespace.
    pub other_namespaces: Vec<OtherStatus>,
    /// How long the device keeps the prompt's chunks in memory, by position.
    #[serde(default)]
    pub stays: Vec<StayStatus>,
    /// How long the recently evicted chunks had been unused; `None` before the first eviction.
    #[serde(default)]
    pub evicted_after_seconds: Option<f64>,
}

/// Consecutive chunks that stay in memory for the same reason, in [`ChainStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StayStatus {
    /// Position of the first chunk.
    pub from: u32,
    /// Position after the last chunk.
    pub to: u32,
    /// Why the chunks stay: `pin`, `use` (they are being read or written), `continuation` (a later chunk of the prompt is in
    /// memory: prompts are evicted from their ends), or `nothing` (the policy may evict them at any moment).
    pub keeper: String,
    /// Seconds until the pin ends; `None` if the chunks are not pinned.
    pub pin_seconds_left: Option<f64>,
    /// Seconds since the last use of any of these chunks.
    pub idle_seconds: f64,
}

/// The body of a request to `POST /explain`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainRequest {
    /// The namespace's fingerprint: 64 hexadecimal digits.
    fingerprint: String,
    /// The hashes of the prompt's chunks, first to last, 64 hexadecimal digits each.
    hashes: Vec<String>,
}

/// The last lookups. The arguments `request`, `trace` and `tenant` choose lookups, `misses` leaves only those with misses, and
/// `most` bounds their number.
pub(super) async fn lookups(state: &HttpState, arguments: &Arguments) -> Result<Vec<LookupStatus>, Refused> {
    let filter = filter_of(state, arguments)?;
    let shows_hashes = filter.request.is_some() || filter.trace_id.is_some();
    let most = filter.most;
    let now = Now::of(state);
    // Never an error: nobody closes the semaphore.
    let searching = SEARCHES.acquire().await;
    let seen = state.ask_actors(move |actor| actor.core.explain_lookups(&filter)).await;
    let seen: Vec<(u16, ExplainedLookups)> = seen.collect();
    let tenant = |tenant| state.tenant(tenant);
    let named: Vec<(u16, String, LookupRecord, Vec<OtherNamespace>)> = seen
        .iter()
        .flat_map(|(device, seen)| {
            let records = seen.records.iter().cloned();
            records.map(|(record, others)| (*device, tenant(record.tenant), record, others))
        })
        .collect();
    let memories: Vec<(u16, RememberedEvictions)> =
        seen.into_iter().map(|(device, seen)| (device, seen.evictions)).collect();
    let shown = try_blocking(move || {
        // The search goes on if the asker goes away, and keeps its place until it ends.
        let _searching = searching;
        let absent = named.iter().flat_map(|(_, _, record, _)| absent_of(record));
        let memories = Memory::search(&memories, &absent.collect::<Vec<_>>());
        let shown = named.iter().cloned().map(|(device, tenant, record, others)| {
            let past = Past { memories: &memories, device, before: record.evictions_before, at: record.at };
            lookup_status((device, tenant), &record, others, (&past, now, shows_hashes))
        });
        let mut shown: Vec<LookupStatus> = shown.collect();
        shown.sort_by_key(|lookup| std::cmp::Reverse((lookup.unix_ms, lookup.number)));
        shown.truncate(most);
        shown
    });
    shown.await.map_err(|error| Refused::Question(error.to_string()))
}

/// For each device: the chunks of a prompt that it has now, and why the other chunks are missing.
pub(super) async fn explain(state: &HttpState, body: &[u8]) -> Result<Vec<ChainStatus>, Refused> {
    let wrong = |error: &dyn std::fmt::Display| Refused::Question(format!("the body: {error}"));
    let asked: ExplainRequest = serde_json::from_slice(body).map_err(|error| wrong(&error))?;
    if asked.hashes.len() > MAX_CHAIN_CHUNKS {
        return Err(Refused::Question(format!("a prompt has at most {MAX_CHAIN_CHUNKS} chunks")));
    }
    let parse = |text: &String| text.parse::<ChunkHash>().map_err(|error| wrong(&error));
    let fingerprint = Fingerprint(parse(&asked.fingerprint)?.0);
    let hashes: Vec<ChunkHash> = asked.hashes.iter().map(parse).collect::<Result<_, _>>()?;
    let now = Now::of(state);
    let asked = hashes.clone();
    // Never an error: nobody closes the semaphore.
    let searching = SEARCHES.acquire().await;
    let seen = state.ask_actors(move |actor| actor.core.store().explain(&fingerprint, &asked)).await;
    let seen: Vec<(u16, ExplainedChain)> = seen.collect();
    let shown = try_blocking(move || {
        // The search goes on if the asker goes away, and keeps its place until it ends.
        let _searching = searching;
        let memories: Vec<(u16, RememberedEvictions)> =
            seen.iter().map(|(device, seen)| (*device, seen.evictions.clone())).collect();
        let asked: Vec<_> = hashes.iter().map(|hash| (&fingerprint, hash)).collect();
        let found = Memory::search(&memories, &asked);
        let chain = |(device, seen): (u16, ExplainedChain)| {
            let past = Past { memories: &found, device, before: u64::MAX, at: now.node };
            let knows_namespace = seen.outcomes.is_some();
            let nothing = || vec![OutcomeRun { to: hashes.len() as u32, outcome: ChunkOutcome::Absent }];
            let outcomes = seen.outcomes.unwrap_or_else(nothing);
            ChainStatus {
                device,
                knows_namespace,
                runs: runs(&outcomes, &past.of(&fingerprint, &hashes), now),
                other_namespaces: seen.others.into_iter().map(other_status).collect(),
                stays: seen.stays.into_iter().map(stay_status).collect(),
                evicted_after_seconds: seen.evicted_after_ms.map(|ms| ms as f64 / 1_000.0),
            }
        };
        seen.into_iter().map(chain).collect()
    });
    shown.await.map_err(|error| Refused::Question(error.to_string()))
}

fn stay_status(Stay { from, to, keeper, idle_ms }: Stay) -> StayStatus {
    let (keeper, left_ms) = match keeper {
        Keeper::Pin(left_ms) => ("pin", Some(left_ms)),
        Keeper::Use => ("use", None),
        Keeper::Continuation => ("continuation", None),
        Keeper::Nothing => ("nothing", None),
    };
    let (pin_seconds_left, idle_seconds) = (left_ms.map(|ms| ms as f64 / 1_000.0), idle_ms as f64 / 1_000.0);
    StayStatus { from, to, keeper: keeper.to_owned(), pin_seconds_left, idle_seconds }
}

/// The present moment, by the node's clock and by the world's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    node: Millis,
    unix_ms: u64,
}

/// The memories of evictions of all devices, for a lookup at one device.
struct Past<'a> {
    memories: &'a [Memory],
    device: u16,
    before: u64,
    at: Millis,
}

/// A device's evictions of the wanted chunks.
struct Memory {
    device: u16,
    found: FoundEvictions,
    is_cut: bool,
}

/// The remembered evictions of a prompt's chunks.
struct Remembered {
    evictions: Vec<Option<RememberedEviction>>,
    is_cut: bool,
}

impl Now {
    pub(super) fn of(state: &HttpState) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { node: state.clock.now(), unix_ms: since.as_millis() as u64 }
    }

    pub(super) fn unix_ms(self, at: Millis) -> u64 {
        self.unix_ms.saturating_sub(self.node.since(at))
    }
}

impl Memory {
    /// Reads each memory once, whatever the number of chunks: a full memory has a million evictions.
    fn search(memories: &[(u16, RememberedEvictions)], chunks: &[(&Fingerprint, &ChunkHash)]) -> Vec<Self> {
        let search = |(device, memory): &(u16, RememberedEvictions)| Self {
            device: *device,
            found: memory.search(chunks.iter().copied()),
            is_cut: memory.is_cut(),
        };
        memories.iter().map(search).collect()
    }
}

/// The chunks of a lookup that were nowhere.
fn absent_of(record: &LookupRecord) -> impl Iterator<Item = (&Fingerprint, &ChunkHash)> {
    let absent = record.runs().filter(|(_, run)| run.outcome == ChunkOutcome::Absent);
    let hashes = absent.flat_map(|(from, run)| &record.hashes[from as usize..run.to as usize]);
    hashes.map(|hash| (&record.fingerprint, hash))
}

impl Past<'_> {
    /// The last eviction of each chunk before the lookup, at the lookup's device or else at another device.
    fn of(&self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> Remembered {
        let until = u32::try_from(self.at.0 / 100).unwrap_or(u32::MAX);
        let (own, others): (Vec<&Memory>, Vec<&Memory>) =
            self.memories.iter().partition(|memory| memory.device == self.device);
        let last_of = |hash: &ChunkHash| {
            own.iter().chain(&others).find_map(|memory| {
                let before = if memory.device == self.device { self.before } else { u64::MAX };
                memory.found.last(fingerprint, hash, before, until)
            })
        };
        let evictions = hashes.iter().map(last_of).collect();
        Remembered { evictions, is_cut: self.memories.iter().any(|memory| memory.is_cut) }
    }
}

/// The arguments of `/lookups`.
pub(super) const LOOKUPS_ARGUMENTS: [&str; 5] = ["request", "trace", "tenant", "misses", "most"];

fn filter_of(state: &HttpState, arguments: &Arguments) -> Result<LookupFilter, Refused> {
    let mut filter = LookupFilter { most: USUAL_LOOKUPS, ..LookupFilter::default() };
    for (name, value) in arguments {
        let wrong = |what: &str| Refused::Question(format!("{name}={value}: {what}"));
        match name.as_str() {
            "request" => filter.request = Some(value.clone()),
            "trace" => {
                let id = trace_id(value).ok_or_else(|| wrong("a trace has 32 hexadecimal digits"))?;
                filter.trace_id = Some(id);
            }
            "tenant" => {
                let numbers = state.tenants.numbers(value);
                if numbers.is_empty() {
                    return Err(wrong("this node serves no such tenant"));
                }
                filter.tenants = Some(numbers);
            }
            "misses" => filter.misses_only = value == "1" || value == "true",
            "most" => {
                let most: usize = value.parse().map_err(|_| wrong("not a number"))?;
                filter.most = most.min(MOST_LOOKUPS);
            }
            _ => return Err(Refused::Question(format!("{name}: this is no argument of this path"))),
        }
    }
    Ok(filter)
}

fn trace_id(digits: &str) -> Option<[u8; 16]> {
    let is_id = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u128::from_str_radix(digits, 16).ok().filter(|_| is_id).map(u128::to_be_bytes)
}

fn lookup_status(
    (device, tenant): (u16, String),
    record: &LookupRecord,
    others: Vec<OtherNamespace>,
    (past, now, shows_hashes): (&Past<'_>, Now, bool),
) -> LookupStatus {
    let found = record.runs().filter(|(_, run)| matches!(run.outcome, ChunkOutcome::Found(_)));
    let found_chunks = found.map(|(from, run)| u64::from(run.to - from)).sum();
    LookupStatus {
        device,
        number: record.number,
        unix_ms: now.unix_ms(record.at),
        kind: record.kind.to_string(),
        request: record.origin.request.as_deref().map(str::to_owned),
        trace: record.origin.trace_id.map(|id| format!("{:032x}", u128::from_be_bytes(id))),
        tenant,
        namespace: ChunkHash(record.fingerprint.0).to_string(),
        chunk_tokens: record.chunk_tokens,
        prompt_tokens: record.prompt_tokens,
        first_index: record.first_index,
        chunks: record.hashes.len() as u64,
        found_chunks,
        refused: record.refused.clone(),
        runs: runs(&record.outcomes, &past.of(&record.fingerprint, &record.hashes), now),
        other_namespaces: others.into_iter().map(other_status).collect(),
        hashes: if shows_hashes {
            record.hashes.iter().map(ToString::to_string).collect()
        } else {
            Vec::new()
        },
    }
}

/// Joins chunks with the same outcome into runs; absent chunks are divided by their evictions.
fn runs(outcomes: &[OutcomeRun], Remembered { evictions, is_cut }: &Remembered, now: Now) -> Vec<RunStatus> {
    let chunks = OutcomeRun::with_starts(outcomes);
    let chunks = chunks.flat_map(|(from, run)| (from..run.to).map(move |_| run.outcome));
    let mut runs = Vec::<RunStatus>::new();
    for (position, outcome) in (0_u32..).zip(chunks) {
        let eviction = evictions.get(position as usize).copied().flatten();
        let eviction = eviction.filter(|_| outcome == ChunkOutcome::Absent);
        let name = match (outcome, eviction) {
            (ChunkOutcome::Absent, Some(_)) => "evicted",
            (ChunkOutcome::Absent, None) if *is_cut => "unknown",
            (outcome, _) => outcome_name(outcome),
        };
        let tier = tier_of(outcome).map(str::to_owned);
        let rule = eviction.map(|eviction| eviction.rule.as_str());
        match runs.last_mut() {
            Some(run)
                if run.outcome == name
                    && run.tier == tier
                    && run.evicted.as_ref().map(|evicted| evicted.rule.as_str()) == rule =>
            {
                run.to = position + 1;
            }
            _ => runs.push(RunStatus {
                from: position,
                to: position + 1,
                outcome: name.to_owned(),
                tier,
                evicted: eviction.map(|eviction| EvictedStatus {
                    unix_ms: now.unix_ms(Millis(u64::from(eviction.at_tenths) * 100)),
                    rule: eviction.rule.as_str().to_owned(),
                    worth: eviction.worth.0 as f64 / 1e6,
                }),
            }),
        }
    }
    runs
}

fn outcome_name(outcome: ChunkOutcome) -> &'static str {
    match outcome {
        ChunkOutcome::NotDelivered(why) => why.into(),
        _ => outcome.into(),
    }
}

fn tier_of(outcome: ChunkOutcome) -> Option<&'static str> {
    match outcome {
        ChunkOutcome::Found(tier) | ChunkOutcome::BehindGap(tier) | ChunkOutcome::ComputedFaster(tier) => {
            Some(tier.name())
        }
        _ => None,
    }
}

fn other_status(other: OtherNamespace) -> OtherStatus {
    OtherStatus {
        fingerprint: ChunkHash(other.fingerprint.0).to_string(),
        model: other.model,
        differing: other.differing.into_iter().map(str::to_owned).collect(),
        chunks: other.chunks.into(),
        has_chunk: other.has_chunk,
    }
}

/// Number of lookups shown by default, and at most.
const USUAL_LOOKUPS: usize = 50;
const MOST_LOOKUPS: usize = 500;

/// One search through the memories runs at a time. Other requests wait; the number of connections bounds them.
pub(super) static SEARCHES: Semaphore = Semaphore::const_new(1);

#[cfg(test)]
mod tests {
    use larder_core::placement::Worth;
    use larder_core::store::EvictionRule;
    use larder_protocol::session::Tier;

    use super::*;

    const NOW: Now = Now { node: Millis(10_000), unix_ms: 1_000_000 };

    fn evicted(at_tenths: u32, rule: EvictionRule) -> Option<RememberedEviction> {
        Some(RememberedEviction { at_tenths, rule, worth: Worth(2_500_000) })
    }

    fn named(outcomes: &[OutcomeRun], remembered: &Remembered) -> Vec<(u32, u32, String)> {
        let runs = runs(outcomes, remembered, NOW).into_iter();
        runs.map(|run| (run.from, run.to, run.outcome)).collect()
    }

    #[test]
    fn absent_chunks_are_told_apart_by_what_is_remembered() {
        let outcomes = [
            OutcomeRun { to: 1, outcome: ChunkOutcome::Found(Tier::Disk) },
            OutcomeRun { to: 5, outcome: ChunkOutcome::Absent },
        ];
        let evictions = vec![
            // The chunk was evicted once, and came back.
            evicted(1, EvictionRule::Need),
            evicted(50, EvictionRule::Watermark),
            evicted(49, EvictionRule::Watermark),
            evicted(40, EvictionRule::Disk),
            None,
        ];
        let mut remembered = Remembered { evictions, is_cut: false };
        let run = |from, to, name: &str| (from, to, name.to_owned());
        let expected =
            [run(0, 1, "found"), run(1, 3, "evicted"), run(3, 4, "evicted"), run(4, 5, "never_stored")];
        assert_eq!(named(&outcomes, &remembered), expected);
        let first = runs(&outcomes, &remembered, NOW).swap_remove(1).evicted.unwrap();
        assert_eq!((first.unix_ms, first.rule.as_str(), first.worth), (995_000, "watermark", 2.5));
        remembered.is_cut = true;
        assert_eq!(named(&outcomes, &remembered)[3], run(4, 5, "unknown"));
    }

    #[test]
    fn a_trace_id_is_32_digits() {
        assert_eq!(trace_id(&"0a".repeat(16)), Some([10; 16]));
        assert!(
            [&"0".repeat(31), "+0af7651916cd43dd8448eb211c80319", ""]
                .map(trace_id)
                .iter()
                .all(Option::is_none)
        );
    }
}
