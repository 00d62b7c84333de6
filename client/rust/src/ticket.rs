//! Prefetches under way.

use std::sync::Arc;

use larder_protocol::ChunkHash;
use larder_protocol::session::{Found, Prefetching, Progress, Request};

use crate::error::SessionError;
use crate::link::Link;
use crate::namespace::Namespace;

/// A prefetch: the node brings the found chunks of a prompt into its memory. Collect the ticket to read the chunks that have
/// come.
///
/// Dropping the ticket cancels the prefetch at once, without blocking, from any thread: transfers under way are stopped.
pub struct Ticket {
    link: Arc<Link>,
    namespace: Namespace,
    /// The ticket's number; 0 if there is nothing to bring, or the ticket was collected.
    number: u64,
    found: Found,
    tokens: u64,
    tokens_to_recompute: u64,
    chunks: Arc<[ChunkHash]>,
}

impl Ticket {
    pub(crate) fn accept(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: Arc<[ChunkHash]>,
        answer: Prefetching,
    ) -> Result<Self, SessionError> {
        let Prefetching { ticket: number, found, tokens, tokens_to_recompute } = answer;
        let most = asked.len() as u64 * u64::from(namespace.chunk_tokens());
        let ticket = Self {
            link: Arc::clone(link),
            namespace,
            number,
            found,
            tokens,
            tokens_to_recompute,
            chunks: asked,
        };
        if ticket.tokens > most || ticket.found.tokens > most {
            return Err(SessionError::wrong_answer("a prefetch brings chunks that were asked for"));
        }
        Ok(ticket)
    }

    /// What was found, as the answer of a lookup.
    #[must_use]
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Tokens of the prefix that is being brought.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Found tokens that are not brought because the engine computes them sooner.
    #[must_use]
    pub fn tokens_to_recompute(&self) -> u64 {
        self.tokens_to_recompute
    }

    /// The number of its session.
    pub(crate) fn session(&self) -> u64 {
        self.link.number
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Chunks of the requested chain.
    pub(crate) fn chunks(&self) -> &Arc<[ChunkHash]> {
        &self.chunks
    }

    /// Notes that the ticket was collected: nothing is left to cancel.
    pub(crate) fn end(mut self) {
        self.number = 0;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.number != 0 {
            self.link.post(&Request::Cancel(self.number));
        }
    }
}

/// The progress of a prefetch that brings nothing.
pub(crate) const NOTHING_TO_BRING: Progress =
    Progress { tokens_in_place: 0, tokens_expected: 0, is_done: true };
