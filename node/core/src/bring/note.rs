//! Notes requests of engines in the log of lookups; those of operators' sessions are left out.

use larder_protocol::Chain;
use larder_protocol::session::{Found, Lease, Lookup};

use super::locate::Located;
use crate::Core;
use crate::event::RequestId;
use crate::lookups::{ChunkOutcome, LookupKind, LookupRecord, OutcomeRun, record};
use crate::store::{LookupOptions, Refused, Walk};

impl Core {
    /// Finds the chunks of a request, and notes the request if it is refused.
    pub(super) fn find_for(
        &mut self,
        kind: LookupKind,
        request: RequestId,
        (namespace, chain, prompt_tokens): (u32, &Chain, u64),
    ) -> Result<Walk, Refused> {
        let found = self.store.find(request.session, namespace, chain);
        if let Err(refused) = &found
            && let Some(mut noted) = self.record_of(kind, request, (namespace, chain, prompt_tokens))
        {
            noted.refused = Some(refused.to_string());
            noted.outcomes = vec![OutcomeRun { to: chain.len() as u32, outcome: ChunkOutcome::Refused }];
            self.lookups.note(noted);
        }
        found
    }

    /// Notes a lookup or a prefetch, and returns its number.
    pub(super) fn note_lookup(
        &mut self,
        kind: LookupKind,
        request: RequestId,
        ask: &Lookup,
        (walk, located, found): (&Walk, &Located, &Found),
    ) -> u64 {
        let about = (ask.namespace, &ask.chain, ask.prompt_tokens);
        let elsewhere = located.sources(ask.chain.len());
        let options = LookupOptions {
            elsewhere: &elsewhere,
            prompt_tokens: ask.prompt_tokens,
            skip_read: ask.skip_read,
            tiers: &ask.tiers,
            pin_ms: None,
        };
        let chunks = found.spans.last().map_or(0, |span| span.to as usize);
        self.note(kind, request, about, (walk, located, options, chunks))
    }

    /// Notes a lease, and returns its number.
    pub(super) fn note_lease(
        &mut self,
        request: RequestId,
        ask: &Lease,
        walk: &Walk,
        located: &Located,
    ) -> u64 {
        let elsewhere = located.sources(ask.chain.len());
        let options = LookupOptions {
            elsewhere: &elsewhere,
            prompt_tokens: u64::MAX,
            skip_read: false,
            tiers: &[],
            pin_ms: None,
        };
        let chunks = self.store.leading(walk, &elsewhere);
        let about = (ask.namespace, &ask.chain, 0);
        self.note(LookupKind::Lease, request, about, (walk, located, options, chunks))
    }

    /// Notes the chunks of a lookup that other nodes have and that nobody can read, since a chunk before them is nowhere.
    pub(super) fn note_hole(&mut self, ask: &Lookup, located: &Located, found: &Found) {
        if !located.is_anywhere() {
            return;
        }
        let Some(fingerprint) = self.store.fingerprint(ask.namespace) else { return };
        let readable = found.spans.last().map_or(0, |span| span.to);
        for (position, holder) in located.on_peers(readable) {
            self.store.is_behind_hole(&fingerprint, &ask.chain.hashes[position as usize], holder);
        }
    }

    fn note(
        &mut self,
        kind: LookupKind,
        request: RequestId,
        about: (u32, &Chain, u64),
        (walk, located, options, chunks): (&Walk, &Located, LookupOptions<'_>, usize),
    ) -> u64 {
        let Some(mut noted) = self.record_of(kind, request, about) else { return 0 };
        noted.outcomes = self.store.outcomes(walk, about.1, options, chunks, &located.unanswered);
        self.lookups.note(noted)
    }

    fn record_of(
        &mut self,
        kind: LookupKind,
        request: RequestId,
        (namespace, chain, prompt_tokens): (u32, &Chain, u64),
    ) -> Option<LookupRecord> {
        let origin = self.origins.remove(&request).unwrap_or_default();
        let tenant = self.store.tenant(request.session).ok()?;
        let fingerprint = self.store.fingerprint(namespace)?;
        let chunk_tokens = self.store.chunk_tokens(namespace)?;
        if self.store.is_observer(request.session) {
            return None;
        }
        let about = (kind, origin, self.millis());
        let mut record = record(about, (tenant, fingerprint, chunk_tokens), chain, prompt_tokens);
        record.evictions_before = self.store.evictions_so_far();
        Some(record)
    }
}
