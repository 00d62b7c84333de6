//! The facts of an answered lookup: for hit rates, the lookup log, and trying other caches.

use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use larder_protocol::session::{Found, Lookup};
use larder_protocol::{ChunkHash, Fingerprint};

use crate::Core;
use crate::bring::prefetch::prefill_speed;
use crate::effect::{Counted, Effect};
use crate::store::Usable;
use crate::store::ids::SessionId;
use crate::time::Millis;
use crate::what_if::PastLookup;

/// An answered lookup.
#[derive(Debug, Clone, Copy)]
pub struct LookedUp<'a> {
    /// The time of the answer.
    pub at: Millis,
    /// The lookup.
    pub ask: &'a Lookup,
    /// The answer.
    pub found: &'a Found,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt: as many as the engine says, if a prompt with these full chunks can have them.
    pub prompt_tokens: u64,
    /// The chunks that could have been hit: the prompt's full chunks, with a token left to compute.
    pub usable: &'a [ChunkHash],
}

impl LookedUp<'_> {
    /// Whether the lookup names the prompt's chunks from the first on.
    pub fn is_whole(&self) -> bool {
        let chain = &self.ask.chain;
        chain.hashes.is_empty() || chain.chunk(0).index == 0
    }

    /// The lookup as it can be played again, without the names of its chunks.
    pub fn past(&self) -> PastLookup {
        PastLookup {
            at: self.at,
            namespace: self.fingerprint,
            chunk_tokens: self.chunk_tokens,
            prompt_tokens: self.prompt_tokens,
            tokens_hit: self.found.tokens,
            chunks: [].into(),
        }
    }
}

impl Core {
    /// The facts of an answered lookup; `None` for a namespace that nobody registered, and for an operator's lookup. A whole lookup
    /// is kept, to try other caches.
    pub fn looked_up<'a>(
        &mut self,
        session: SessionId,
        ask: &'a Lookup,
        found: &'a Found,
    ) -> Option<LookedUp<'a>> {
        if self.store.is_observer(session) {
            return None;
        }
        let usable = self.store.usable(ask.namespace, &ask.chain, ask.prompt_tokens)?;
        let Usable { chunks, chunk_tokens, fingerprint } = usable;
        let prompt_tokens = ask.prompt_tokens.min(most_prompt_tokens(ask, chunk_tokens));
        let usable = &ask.chain.hashes[..chunks];
        let at = self.millis();
        let lookup = LookedUp { at, ask, found, fingerprint, chunk_tokens, prompt_tokens, usable };
        if lookup.is_whole() {
            self.past.note(&ask.chain.hashes, lookup.past());
        }
        Some(lookup)
    }

    /// Counts the seconds of prefill that a hit saves. The speed counts as one token a second at least: an engine may say that it
    /// is arbitrarily slow, and an infinite sum would stay infinite.
    pub(crate) fn avoided(&mut self, session: SessionId, ask: &Lookup, tokens: u64) {
        let is_counted = !self.store.is_observer(session);
        if let Some(tokens_per_second) = prefill_speed(ask).filter(|_| is_counted) {
            let seconds = tokens as f64 / tokens_per_second.max(1.0);
            self.effects.push_back(Effect::Count(Counted::Avoided(ask.namespace, seconds)));
        }
    }
}

/// The most tokens of a prompt with these full chunks. The last chunk may be left out if nothing follows it: a token at least is
/// left to compute.
fn most_prompt_tokens(ask: &Lookup, chunk_tokens: u32) -> u64 {
    let (chain, chunks) = (&ask.chain, ask.chain.len() as u64);
    // A lookup that reads nothing need not name chunks, and no chain is longer than this.
    if ask.skip_read || chain.len() >= MAX_CHAIN_CHUNKS {
        return MOST_PROMPT_TOKENS;
    }
    let before = chain.hashes.first().map_or(0, |_| u64::from(chain.chunk(0).index));
    (before + chunks + 1) * u64::from(chunk_tokens)
}

/// Tokens of a prompt that are counted: far more than any model takes.
const MOST_PROMPT_TOKENS: u64 = 1 << 32;
