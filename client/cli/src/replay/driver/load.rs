//! A request's hits: which found chunks it waits for, and how it reads them.

use std::time::Duration;

use larder_client::{LeaseGuard, LookupOptions, SessionError, Ticket};
use larder_protocol::Chain;
use larder_protocol::session::{Found, Tier, Wait};

use super::{Driver, LEASE_DEADLINE, ReplayState};
use crate::clock::now;
use crate::replay::link::OpenLink;
use crate::replay::losses::{Served, Short};
use crate::trace::CHUNK_TOKENS;

/// The found chunks that a request waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// All found chunks
    #[default]
    All,
    /// The chunks that come sooner than the engine computes them, as the node decides
    Worth,
    /// The chunks in the node's own memory
    InPlace,
}

impl Driver {
    /// Looks a prompt up, and loads the found chunks as far as the engine waits for them.
    pub(super) async fn load(
        &self,
        link: &OpenLink,
        chain: &Chain,
        prompt_tokens: u64,
    ) -> Result<Served, SessionError> {
        let start = now();
        let prefill_tokens_per_second = Some(self.prefill_tokens_per_s);
        let options = LookupOptions { prompt_tokens, prefill_tokens_per_second, ..LookupOptions::default() };
        let OpenLink { session, namespace } = link;
        if self.load == Load::Worth {
            let prefetching = || async { session.prefetch(namespace, chain, options.clone()).await };
            let Some(ticket) = self.patiently(prefetching).await? else { return Ok(Served::default()) };
            self.state.borrow_mut().tally.looked_up(now() - start);
            return self.collect(link, chain, ticket).await;
        }
        let found = session.lookup(namespace, chain, options).await?;
        self.state.borrow_mut().tally.looked_up(now() - start);
        let chunks = (found.tokens / CHUNK_TOKENS) as usize;
        let wanted = if self.load == Load::All { chunks } else { chunks_in_place(&found) };
        self.fetch(link, chain, &found, Served { found: chunks, wanted, ..Served::default() }).await
    }

    /// Leases the wanted chunks and reads them. A node that grants fewer chunks, or stays busy, leaves the rest to be computed.
    async fn fetch(
        &self,
        link: &OpenLink,
        chain: &Chain,
        found: &Found,
        asked: Served,
    ) -> Result<Served, SessionError> {
        if asked.wanted == 0 {
            return Ok(asked);
        }
        let chain = chain.part(0, asked.wanted);
        let start = now();
        let lease = self.patiently(async || link.session.lease(&link.namespace, &chain).await).await?;
        self.read(&chain, found, asked, lease, now() - start)
    }

    /// Waits for the chunks that a prefetch brings, and reads them.
    async fn collect(&self, link: &OpenLink, chain: &Chain, ticket: Ticket) -> Result<Served, SessionError> {
        let found = ticket.found().clone();
        let wanted = (ticket.tokens() / CHUNK_TOKENS) as usize;
        let all = wanted + (ticket.tokens_to_recompute() / CHUNK_TOKENS) as usize;
        let asked = Served { found: all, wanted, ..Served::default() };
        if wanted == 0 {
            return Ok(asked);
        }
        let start = now();
        let lease = match link.session.collect(ticket, Wait::Complete).await {
            Err(SessionError::Busy { .. }) => None,
            lease => Some(lease?),
        };
        self.read(&chain.part(0, wanted), &found, asked, lease, now() - start)
    }

    /// Copies the blocks of a lease out and compares them; the lease took `took`.
    fn read(
        &self,
        chain: &Chain,
        found: &Found,
        asked: Served,
        lease: Option<LeaseGuard>,
        mut took: Duration,
    ) -> Result<Served, SessionError> {
        let ReplayState { tally, block, .. } = &mut *self.state.borrow_mut();
        let leased = lease.as_ref().map_or(0, LeaseGuard::chunks);
        let tier_of = |at: usize| found.spans.iter().find(|span| at < span.to as usize).map(|span| span.tier);
        let short = match tier_of(leased) {
            _ if took >= LEASE_DEADLINE => Short::Deadline,
            Some(Tier::Peer) if lease.is_some() => Short::Peer,
            _ => Short::Unsaid,
        };
        let served = Served { leased, short, ..asked };
        tally.lease_fell_short(asked.wanted.saturating_sub(leased) as u64);
        let Some(lease) = lease else { return Ok(served) };
        for (position, hash) in chain.hashes.iter().enumerate().take(leased) {
            let start = now();
            lease.copy_block(position, 0, block)?;
            took += now() - start;
            tally.check(hash, block);
        }
        tally.fetched(took, has_peers(found, leased));
        for span in &found.spans {
            let served = (span.to as usize).min(leased).saturating_sub(span.from as usize);
            tally.hit(span.tier, served as u64 * CHUNK_TOKENS);
        }
        Ok(served)
    }
}

/// Whether some of the first `leased` chunks came from other nodes.
fn has_peers(found: &Found, leased: usize) -> bool {
    found.spans.iter().any(|span| span.tier == Tier::Peer && (span.from as usize) < leased)
}

/// The chunks at the front of a prompt that are in the memory of the node.
fn chunks_in_place(found: &Found) -> usize {
    let in_place = found.spans.iter().take_while(|span| matches!(span.tier, Tier::Device | Tier::Host));
    let end = in_place.last().map_or(0, |span| span.to as usize);
    end.min((found.tokens / CHUNK_TOKENS) as usize)
}

#[cfg(test)]
mod tests {
    use larder_protocol::session::Span;

    use super::*;

    #[test]
    fn a_request_whose_lease_ended_before_the_chunks_of_other_nodes_got_nothing_from_them() {
        let span = |from, to, tier| Span { from, to, tier };
        let spans = vec![span(0, 2, Tier::Host), span(2, 3, Tier::Peer)];
        let found = Found { tokens: 3 * CHUNK_TOKENS, spans, pin: None };
        assert!(!has_peers(&found, 2) && has_peers(&found, 3));
    }

    #[test]
    fn chunks_are_in_place_up_to_the_first_that_is_elsewhere() {
        let span = |from, to, tier| Span { from, to, tier };
        let mut found = Found { tokens: 6 * CHUNK_TOKENS, spans: Vec::new(), pin: None };
        assert_eq!(chunks_in_place(&found), 0);
        found.spans = vec![span(0, 2, Tier::Host), span(2, 3, Tier::Disk), span(3, 6, Tier::Host)];
        assert_eq!(chunks_in_place(&found), 2);
        found.spans = vec![span(0, 6, Tier::Host)];
        assert_eq!(chunks_in_place(&found), 6);
        found.spans = vec![span(0, 6, Tier::Peer)];
        assert_eq!(chunks_in_place(&found), 0);
    }
}
