//! Says why tokens were not hit: each token of a prompt that no tier served has one reason.
//!
//! It follows every chunk of the replay: the requests that compute the chunk, the nodes that hold it, and its removal from the
//! last of these nodes. Time is the trace's.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use hdrhistogram::Histogram;
use larder_protocol::ChunkHash;
use serde::{Deserialize, Serialize};

use crate::trace::CHUNK_TOKENS;

/// Why a token was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// The token is in no full chunk, or is the last of its prompt: no cache can serve it.
    NoFullChunk,
    /// No request before had its chunk.
    NeverSeen,
    /// A request that still runs computes its chunk.
    BeingWritten,
    /// Requests computed its chunk, and no node kept it, for lack of room or because the node was gone.
    NotSaved,
    /// The token's chunk was evicted by the last node that had it.
    Evicted,
    /// A node holds its chunk, and the lookup did not find it: the directory had not heard of it yet.
    NotFound,
    /// The lookup found the token's chunk, and the engine computed it rather than wait for it.
    NotLoaded,
    /// The lookup found the token's chunk, but the lease lacked it: it was evicted meanwhile, or there was no room for it.
    LeaseFellShort,
    /// The lease lacked the token's chunk, which another node holds but did not send.
    PeerFailed,
    /// The lease lacked the token's chunk, since the time was up.
    Deadline,
    /// The node of the token's request was gone, or failed.
    NodeGone,
}

/// The reasons of a replay's lost tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reasons {
    /// Tokens by reason; their sum is the tokens that were asked and not hit.
    pub tokens: BTreeMap<Loss, u64>,
    /// The evicted tokens among these, by the rule that evicted their chunks.
    pub evicted: BTreeMap<String, Evicted>,
}

/// Tokens whose chunks one rule had evicted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Evicted {
    /// Number of tokens.
    pub tokens: u64,
    /// Time from the eviction to the request, in milliseconds of the trace: median.
    pub ago_p50_ms: u64,
    /// 99th percentile of the same time.
    pub ago_p99_ms: u64,
}

/// How the cluster served one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Served {
    /// Chunks that its lookup found.
    pub found: usize,
    /// Chunks that it asked for. The engine computes the other found chunks rather than wait for them.
    pub wanted: usize,
    /// Chunks that its lease got: its hits.
    pub leased: usize,
    /// The reason that a lease fell short, as far as the engine can tell.
    pub short: Short,
}

impl Served {
    /// A request whose node was gone.
    pub const NODE_GONE: Self = Self { found: 0, wanted: 0, leased: 0, short: Short::NodeGone };
}

/// The reason that a request got fewer chunks than were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Short {
    /// The answer does not say.
    #[default]
    Unsaid,
    /// The first chunk that did not come is another node's.
    Peer,
    /// The answer came when the time of a lease was up.
    Deadline,
    /// The node went away, or refused.
    NodeGone,
}

/// A change of the chunks that a node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The node holds this chunk from now on.
    Gained(ChunkHash),
    /// The node lost this chunk, by this rule.
    Lost(ChunkHash, String),
    /// The node is gone, with all its chunks.
    Ended,
}

/// The chunks of a replay, and the tokens lost so far.
#[derive(Debug, Clone, Default)]
pub struct Losses {
    chunks: HashMap<ChunkHash, Chunk>,
    tokens: BTreeMap<Loss, u64>,
    evicted: BTreeMap<String, Histogram<u64>>,
    now_ms: u64,
}

/// The state of one chunk.
#[derive(Debug, Clone, Default)]
struct Chunk {
    /// Requests under way that have it in their prompts.
    writers: u32,
    /// The nodes that hold it.
    holders: BTreeSet<usize>,
    /// Whether a node acknowledged the chunk, and no node reported its loss since.
    is_saved: bool,
    /// The last time that the chunk left its last holder, and the rule.
    left: Option<(u64, String)>,
}

/// A request that has begun, with the prospects of its chunks at that time. [`Losses::end`] ends it.
#[derive(Debug)]
pub struct Begun {
    chunks: Vec<ChunkHash>,
    /// The prospects of the usable chunks.
    prospects: Vec<Prospect>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Prospect {
    Held,
    Lost(Loss),
    Evicted(u64, String),
}

impl Losses {
    /// Notes that a request begins at this time of the trace. It can use the first `usable` of its chunks.
    pub fn begin(&mut self, now_ms: u64, chunks: Vec<ChunkHash>, usable: usize) -> Begun {
        self.now_ms = self.now_ms.max(now_ms);
        let prospects = chunks.iter().take(usable).map(|hash| self.prospect(hash, false)).collect();
        for &hash in &chunks {
            self.chunks.entry(hash).or_default().writers += 1;
        }
        Begun { chunks, prospects }
    }

    /// Notes that a node acknowledged these chunks.
    pub fn saved(&mut self, chunks: &[ChunkHash]) {
        for hash in chunks {
            self.chunks.entry(*hash).or_default().is_saved = true;
        }
    }

    /// Notes a change that a node reported.
    pub fn changed(&mut self, node: usize, change: Change) {
        match change {
            Change::Gained(hash) => {
                self.chunks.entry(hash).or_default().holders.insert(node);
            }
            Change::Lost(hash, rule) => {
                let now_ms = self.now_ms;
                self.chunks.entry(hash).or_default().leave(node, now_ms, || rule);
            }
            Change::Ended => {
                let held = self.chunks.values_mut().filter(|chunk| chunk.holders.contains(&node));
                held.for_each(|chunk| chunk.leave(node, self.now_ms, || NODE_GONE.to_owned()));
            }
        }
    }

    /// Gives each token of a request's prompt that was not hit its reason, now that its lease has come.
    pub fn served(&mut self, begun: &Begun, tokens: u64, served: Served) {
        let usable = begun.prospects.len();
        self.lose(Loss::NoFullChunk, tokens - usable as u64 * CHUNK_TOKENS);
        let mut gap: Option<Prospect> = None;
        for position in served.leased.min(usable)..usable {
            let hash = &begun.chunks[position];
            let reason = match begun.prospects[position].clone() {
                Prospect::Lost(Loss::NeverSeen) => Prospect::Lost(Loss::NeverSeen),
                _ if served.short == Short::NodeGone => Prospect::Lost(Loss::NodeGone),
                _ if (served.wanted..served.found).contains(&position) => Prospect::Lost(Loss::NotLoaded),
                // A lookup finds the chunk until the directory has heard of the eviction.
                Prospect::Evicted(at_ms, rule) => Prospect::Evicted(at_ms, rule),
                _ if position < served.found => Prospect::Lost(self.shortfall(hash, served.short)),
                Prospect::Held => match (gap.clone(), self.prospect(hash, true)) {
                    // A chunk behind a gap is lost for the gap's reason.
                    (Some(gap), _) => gap,
                    (None, Prospect::Evicted(at_ms, rule)) => Prospect::Evicted(at_ms, rule),
                    (None, _) => Prospect::Lost(Loss::NotFound),
                },
                prospect => prospect,
            };
            match &reason {
                Prospect::Lost(loss) => self.lose(*loss, CHUNK_TOKENS),
                Prospect::Evicted(at_ms, rule) => self.lose_evicted(*at_ms, rule),
                Prospect::Held => {}
            }
            gap.get_or_insert(reason);
        }
    }

    /// Notes that a request ends: it no longer computes its chunks.
    pub fn end(&mut self, begun: Begun) {
        for hash in &begun.chunks {
            if let Some(chunk) = self.chunks.get_mut(hash) {
                chunk.writers -= 1;
            }
        }
    }

    /// The reasons so far.
    pub fn reasons(&self) -> Reasons {
        let evicted = self.evicted.iter().map(|(rule, ago)| {
            let ago_ms = |quantile| ago.value_at_quantile(quantile);
            let tokens = ago.len() * CHUNK_TOKENS;
            (rule.clone(), Evicted { tokens, ago_p50_ms: ago_ms(0.5), ago_p99_ms: ago_ms(0.99) })
        });
        Reasons { tokens: self.tokens.clone(), evicted: evicted.collect() }
    }

    fn prospect(&self, hash: &ChunkHash, has_begun: bool) -> Prospect {
        let Some(chunk) = self.chunks.get(hash) else { return Prospect::Lost(Loss::NeverSeen) };
        match &chunk.left {
            _ if !chunk.holders.is_empty() || chunk.is_saved => Prospect::Held,
            _ if chunk.writers > u32::from(has_begun) => Prospect::Lost(Loss::BeingWritten),
            Some((at_ms, rule)) => Prospect::Evicted(*at_ms, rule.clone()),
            None => Prospect::Lost(Loss::NotSaved),
        }
    }

    /// Why a lease came without a chunk that was found.
    fn shortfall(&self, hash: &ChunkHash, short: Short) -> Loss {
        let is_held = self.chunks.get(hash).is_some_and(|chunk| !chunk.holders.is_empty());
        match short {
            Short::Deadline => Loss::Deadline,
            Short::Peer if is_held => Loss::PeerFailed,
            _ => Loss::LeaseFellShort,
        }
    }

    fn lose(&mut self, loss: Loss, tokens: u64) {
        if tokens > 0 {
            *self.tokens.entry(loss).or_default() += tokens;
        }
    }

    fn lose_evicted(&mut self, at_ms: u64, rule: &str) {
        self.lose(Loss::Evicted, CHUNK_TOKENS);
        let ago_ms = self.now_ms.saturating_sub(at_ms);
        let ages = self.evicted.entry(rule.to_owned()).or_insert_with(|| {
            Histogram::new_with_bounds(1, LONGEST_MS, 2)
                .expect("the bounds are constants that the crate allows")
        });
        ages.saturating_record(ago_ms);
    }
}

impl Chunk {
    fn leave(&mut self, node: usize, now_ms: u64, rule: impl FnOnce() -> String) {
        self.holders.remove(&node);
        if self.holders.is_empty() {
            self.is_saved = false;
            self.left = Some((now_ms, rule()));
        }
    }
}

impl Loss {
    /// The reason, for people.
    pub fn about(self) -> &'static str {
        match self {
            Self::NoFullChunk => "in no full chunk",
            Self::NeverSeen => "never seen",
            Self::BeingWritten => "still being written",
            Self::NotSaved => "not saved",
            Self::Evicted => "evicted",
            Self::NotFound => "held and not found",
            Self::NotLoaded => "found and not loaded",
            Self::LeaseFellShort => "lease fell short",
            Self::PeerFailed => "peer failed",
            Self::Deadline => "deadline",
            Self::NodeGone => "node gone",
        }
    }
}

/// The rule by which a node loses all chunks at its end.
const NODE_GONE: &str = "node_gone";

/// Longer times count as a week.
const LONGEST_MS: u64 = 7 * 24 * 3_600 * 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(numbers: &[u8]) -> Vec<ChunkHash> {
        numbers.iter().map(|&number| ChunkHash([number; 32])).collect()
    }

    /// A request for these chunks and 100 more tokens that found and leased the given numbers and saves nothing; its losses.
    fn play(losses: &mut Losses, at_ms: u64, numbers: &[u8], served: Served) -> BTreeMap<Loss, u64> {
        let before = losses.reasons().tokens;
        let begun = losses.begin(at_ms, chunks(numbers), numbers.len());
        losses.served(&begun, numbers.len() as u64 * CHUNK_TOKENS + 100, served);
        losses.end(begun);
        let lost = |(loss, tokens): (&Loss, &u64)| (*loss, tokens - before.get(loss).copied().unwrap_or(0));
        losses.reasons().tokens.iter().map(lost).filter(|&(_, tokens)| tokens > 0).collect()
    }

    fn hit(chunks: usize) -> Served {
        Served { found: chunks, wanted: chunks, leased: chunks, ..Served::default() }
    }

    fn lost(losses: &[(Loss, u64)]) -> BTreeMap<Loss, u64> {
        let chunks = losses.iter().map(|&(loss, chunks)| (loss, chunks * CHUNK_TOKENS));
        chunks.chain([(Loss::NoFullChunk, 100)]).collect()
    }

    #[test]
    fn a_chunk_is_new_once_then_unsaved_then_held() {
        let mut losses = Losses::default();
        assert_eq!(play(&mut losses, 0, &[1, 2], hit(0)), lost(&[(Loss::NeverSeen, 2)]));
        assert_eq!(
            play(&mut losses, 0, &[1, 2, 3], hit(0)),
            lost(&[(Loss::NotSaved, 2), (Loss::NeverSeen, 1)])
        );
        losses.saved(&chunks(&[1, 2]));
        assert_eq!(play(&mut losses, 0, &[1, 2], hit(2)), lost(&[]));
        assert_eq!(play(&mut losses, 0, &[1, 2], hit(1)), lost(&[(Loss::NotFound, 1)]));
    }

    #[test]
    fn a_chunk_that_another_request_computes_is_being_written() {
        let mut losses = Losses::default();
        let other = losses.begin(0, chunks(&[1]), 1);
        assert_eq!(play(&mut losses, 0, &[1], hit(0)), lost(&[(Loss::BeingWritten, 1)]));
        losses.end(other);
        assert_eq!(play(&mut losses, 0, &[1], hit(0)), lost(&[(Loss::NotSaved, 1)]));
    }

    #[test]
    fn an_evicted_chunk_has_a_rule_and_a_time_when_its_last_holder_lost_it() {
        let mut losses = Losses::default();
        let rule = |rule: &str| Change::Lost(ChunkHash([1; 32]), rule.to_owned());
        for node in [0, 1] {
            losses.changed(node, Change::Gained(ChunkHash([1; 32])));
        }
        losses.saved(&chunks(&[2]));
        play(&mut losses, 1_000, &[1, 2], hit(2));
        losses.changed(0, rule("watermark"));
        assert_eq!(play(&mut losses, 2_000, &[1, 2], hit(0)), lost(&[(Loss::NotFound, 2)]));
        losses.changed(1, rule("need"));
        let both = lost(&[(Loss::Evicted, 2)]);
        assert_eq!(
            play(&mut losses, 5_000, &[1, 2], hit(0)),
            both,
            "what stands behind the gap went with it"
        );
        let evicted = &losses.reasons().evicted["need"];
        assert_eq!((evicted.tokens, evicted.ago_p50_ms / 100), (2 * CHUNK_TOKENS, 30));
    }

    #[test]
    fn what_was_found_and_not_leased_says_who_failed() {
        let mut losses = Losses::default();
        losses.changed(0, Change::Gained(ChunkHash([1; 32])));
        losses.saved(&chunks(&[2]));
        let short = |short| Served { found: 2, wanted: 2, leased: 0, short };
        let apart = lost(&[(Loss::PeerFailed, 1), (Loss::LeaseFellShort, 1)]);
        assert_eq!(play(&mut losses, 0, &[1, 2], short(Short::Peer)), apart);
        assert_eq!(play(&mut losses, 0, &[1, 2], short(Short::Deadline)), lost(&[(Loss::Deadline, 2)]));
        assert_eq!(
            play(&mut losses, 0, &[1, 2, 3], short(Short::NodeGone)),
            lost(&[(Loss::NodeGone, 2), (Loss::NeverSeen, 1)])
        );
    }

    #[test]
    fn a_found_chunk_that_was_not_asked_for_is_not_loaded() {
        let mut losses = Losses::default();
        losses.saved(&chunks(&[1, 2, 3]));
        let served = Served { found: 3, wanted: 1, leased: 1, ..Served::default() };
        assert_eq!(play(&mut losses, 0, &[1, 2, 3], served), lost(&[(Loss::NotLoaded, 2)]));
    }

    #[test]
    fn a_node_that_ends_loses_all_that_it_had() {
        let mut losses = Losses::default();
        losses.changed(3, Change::Gained(ChunkHash([1; 32])));
        losses.changed(3 + 64, Change::Ended);
        assert_eq!(play(&mut losses, 0, &[1], hit(1)), lost(&[]));
        assert_eq!(play(&mut losses, 0, &[1], hit(0)), lost(&[(Loss::NotFound, 1)]), "another node ended");
        losses.changed(3, Change::Ended);
        assert_eq!(play(&mut losses, 0, &[1], hit(0)), lost(&[(Loss::Evicted, 1)]));
        assert!(losses.reasons().evicted.contains_key(NODE_GONE));
    }

    #[test]
    fn every_token_that_was_not_hit_has_one_reason() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut losses = Losses::default();
        let mut missed = 0;
        for at_ms in 0..500 {
            let start = rng.u8(..10);
            let asked = chunks(&(start..start + rng.u8(1..10)).collect::<Vec<_>>());
            let usable = asked.len() - usize::from(rng.bool());
            let found = rng.usize(..=asked.len());
            let wanted = rng.usize(..=found);
            let leased = rng.usize(..=wanted).min(usable);
            let short = [Short::Unsaid, Short::Peer, Short::Deadline, Short::NodeGone][rng.usize(..4)];
            let tokens = asked.len() as u64 * CHUNK_TOKENS + rng.u64(..CHUNK_TOKENS);
            let begun = losses.begin(at_ms, asked.clone(), usable);
            losses.served(&begun, tokens, Served { found, wanted, leased, short });
            losses.saved(&asked[..rng.usize(..=asked.len())]);
            losses.end(begun);
            missed += tokens - leased as u64 * CHUNK_TOKENS;
            let hash = ChunkHash([rng.u8(..20); 32]);
            losses.changed(
                rng.usize(..3),
                match rng.u8(..10) {
                    0 => Change::Ended,
                    1..5 => Change::Lost(hash, "watermark".into()),
                    _ => Change::Gained(hash),
                },
            );
            assert_eq!(losses.reasons().tokens.values().sum::<u64>(), missed);
        }
    }
}
