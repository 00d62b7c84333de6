//! The requests that find, bring, read and keep chunks.

use std::sync::Arc;
use std::time::Duration;

use larder_protocol::session::{
    Checked, Collect, Found, Lease, Lookup, Pin, Pinned, Progress, Register, ReportDamage, Request, Response,
    Wait,
};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec};

use super::{NAMESPACE, Session};
use crate::call::{Call, Step};
use crate::error::SessionError;
use crate::lease::LeaseGuard;
use crate::link::round_trip::RoundTrip;
use crate::namespace::Namespace;
use crate::options::{LookupOptions, millis};
use crate::ticket::{NOTHING_TO_BRING, Ticket};

impl Session {
    /// Makes a namespace known: the `slices` that this session reads and writes, and the bytes of one block of each pool
    /// as the engine's own tensors have it.
    ///
    /// Cancel safe: the node may know the namespace nevertheless.
    ///
    /// # Errors
    /// `Refused` if the namespace is impossible, the sizes disagree, or this session registered the namespace with other slices;
    /// the general errors of [`SessionError`].
    pub fn register(&self, spec: &NamespaceSpec, slices: &[u16], block_bytes: &[u64]) -> Call<Namespace> {
        let asked =
            Register { spec: spec.clone(), slices: slices.to_vec(), block_bytes: block_bytes.to_vec() };
        self.ask(Request::Register(asked.clone()), move |link, response, _| match response {
            Response::Registered(_)
                if asked.slices.is_empty()
                    || asked.block_bytes.is_empty()
                    || asked.block_bytes.len() != asked.spec.pools.len() =>
            {
                Err(SessionError::wrong_answer(
                    "a namespace has a slice, a pool, and a block size of each pool",
                ))
            }
            Response::Registered(registered) => Ok(Namespace::new(link.number, &registered, &asked)),
            _ => Err(SessionError::wrong_answer("a namespace is registered")),
        })
    }

    /// Asks how much of a prompt is here. Nothing found is a result with 0 tokens.
    ///
    /// Cancel safe: a pin that was asked for ends.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; the general errors of [`SessionError`].
    pub fn lookup(&self, namespace: &Namespace, chain: &Chain, options: LookupOptions) -> Call<Found> {
        let request = Request::Lookup(lookup_message(namespace, self.link.chain(chain), options));
        let asked = chain.len() as u64;
        let most_tokens = asked * u64::from(namespace.chunk_tokens());
        let pin = |found: &Found| found.pin.unwrap_or(0);
        let round_trip = RoundTrip::pinning(request, pin, move |_, response, _| match response {
            Response::Found(Found { tokens, spans, .. })
                if tokens > most_tokens || spans.iter().any(|span| u64::from(span.to) > asked) =>
            {
                Err(SessionError::wrong_answer("a lookup finds chunks that were asked for"))
            }
            Response::Found(found) => Ok(found),
            _ => Err(SessionError::wrong_answer("a lookup finds")),
        });
        self.call(Step::Ask(round_trip)).checked(self.check(namespace, chain))
    }

    /// Asks to read the longest prefix of `chain` that is here. A miss is a lease of 0 chunks.
    ///
    /// Cancel safe: the lease is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general errors of [`SessionError`].
    pub fn lease(&self, namespace: &Namespace, chain: &Chain) -> Call<LeaseGuard> {
        let request = Request::Lease(Lease { namespace: namespace.number(), chain: self.link.chain(chain) });
        let (known, asked) = (namespace.clone(), chain.hashes.clone());
        let call = self.ask(request, move |link, response, descriptors| match response {
            Response::Leased(leased) => LeaseGuard::accept(link, known, &asked, leased, &descriptors),
            _ => Err(SessionError::wrong_answer("a lease leases")),
        });
        call.checked(self.check(namespace, chain))
    }

    /// Asks how much of a prompt can be served. Meanwhile the node brings these chunks into its memory, from disk and from other
    /// nodes at the same time.
    ///
    /// Cancel safe: the prefetch ends, and a pin that was asked for too.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general errors of [`SessionError`].
    pub fn prefetch(&self, namespace: &Namespace, chain: &Chain, options: LookupOptions) -> Call<Ticket> {
        let request = Request::Prefetch(lookup_message(namespace, self.link.chain(chain), options));
        let (known, asked) = (namespace.clone(), chain.hashes.as_slice().into());
        let pin = |ticket: &Ticket| ticket.found().pin.unwrap_or(0);
        let round_trip = RoundTrip::pinning(request, pin, |link, response, _| match response {
            Response::Prefetching(prefetching) => Ticket::accept(link, known, asked, prefetching),
            _ => Err(SessionError::wrong_answer("a prefetch begins")),
        });
        self.call(Step::Ask(round_trip)).checked(self.check(namespace, chain))
    }

    /// Asks how far a prefetch is.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// The general errors of [`SessionError`].
    pub fn progress(&self, ticket: &Ticket) -> Call<Progress> {
        if ticket.number() == 0 {
            return self.call(Step::Done(Ok(NOTHING_TO_BRING)));
        }
        let request = Request::Progress(ticket.number());
        let call = self.ask(request, |_, response, _| match response {
            Response::Progress(progress) => Ok(progress),
            _ => Err(SessionError::wrong_answer("a ticket has progress")),
        });
        call.checked(self.link.check_own("ticket", ticket.session()))
    }

    /// Ends a prefetch and leases the contiguous prefix that has come. The prefix ends at a chunk that failed to come; later
    /// chunks that came stay cached.
    ///
    /// Cancel safe: the lease is given back.
    ///
    /// # Errors
    /// The general errors of [`SessionError`].
    pub fn collect(&self, ticket: Ticket, wait: Wait) -> Call<LeaseGuard> {
        let namespace = ticket.namespace().clone();
        if ticket.number() == 0 {
            return self.call(Step::Done(LeaseGuard::nothing(&self.link, namespace)));
        }
        let is_own = self.link.check_own("ticket", ticket.session());
        let asked = Arc::clone(ticket.chunks());
        let request = Request::Collect(Collect { ticket: ticket.number(), wait });
        let call = self.ask(request, move |link, response, descriptors| match response {
            Response::Leased(leased) => LeaseGuard::accept(link, namespace, &asked, leased, &descriptors),
            _ => Err(SessionError::wrong_answer("a ticket is collected as a lease")),
        });
        let mut ticket = Some(ticket);
        let call = call.then(move |leased| {
            ticket.take().into_iter().for_each(Ticket::end);
            Step::Done(Ok(leased))
        });
        call.checked(is_own)
    }

    /// Keeps the longest prefix of `chain` that is here from eviction, for `duration`, or for as long as the node grants. The
    /// caller may end the pin; its number is 0 if nothing is pinned.
    ///
    /// Cancel safe: the pin ends.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general errors of [`SessionError`].
    pub fn pin(&self, namespace: &Namespace, chain: &Chain, duration: Duration) -> Call<Pinned> {
        let (number, asked) = (namespace.number(), chain.len());
        let request = Request::Pin(Pin {
            namespace: number,
            chain: self.link.chain(chain),
            duration_ms: millis(duration),
        });
        let round_trip = RoundTrip::pinning(
            request,
            |pinned: &Pinned| pinned.pin,
            move |_, response, _| match response {
                Response::Pinned(pinned) if pinned.chunks as usize <= asked => Ok(pinned),
                _ => Err(SessionError::wrong_answer("a pin pins chunks that were asked for")),
            },
        );
        self.call(Step::Ask(round_trip)).checked(self.check(namespace, chain))
    }

    /// Ends a pin before its deadline.
    ///
    /// Cancel safe: a request that was sent takes effect.
    ///
    /// # Errors
    /// `Refused` if there is no such pin; the general errors of [`SessionError`].
    pub fn unpin(&self, pin: u64) -> Call<()> {
        self.ask(Request::Unpin(pin), |_, response, _| match response {
            Response::Unpinned => Ok(()),
            _ => Err(SessionError::wrong_answer("an unpin unpins")),
        })
    }

    /// Tells the node that a chunk has other bytes than were committed under its name. The node verifies the chunk, and drops it
    /// if it is damaged. Leases report the damage that they find by themselves.
    ///
    /// Cancel safe: a request that was sent takes effect.
    ///
    /// # Errors
    /// `Busy` if this session reports too much; `Refused` for a namespace that the session did not register; the general errors
    /// of [`SessionError`].
    pub fn report_damage(&self, namespace: &Namespace, hash: ChunkHash) -> Call<Checked> {
        let request = Request::ReportDamage(ReportDamage { namespace: namespace.number(), hash });
        let call = self.ask(request, |_, response, _| match response {
            Response::Checked(checked) => Ok(checked),
            _ => Err(SessionError::wrong_answer("a chunk that is reported is checked")),
        });
        call.checked(self.link.check_own(NAMESPACE, namespace.session()))
    }

    /// # Errors
    /// `OtherSession`; `Chain` if `chain` cannot be of this namespace.
    pub(crate) fn check(&self, namespace: &Namespace, chain: &Chain) -> Result<(), SessionError> {
        self.link.check_own(NAMESPACE, namespace.session())?;
        Ok(namespace.check(chain)?)
    }
}

fn lookup_message(namespace: &Namespace, chain: Chain, options: LookupOptions) -> Lookup {
    let LookupOptions { prompt_tokens, skip_read, preempted, tiers, pin, prefill_tokens_per_second } =
        options;
    Lookup {
        namespace: namespace.number(),
        chain,
        prompt_tokens,
        skip_read,
        preempted,
        tiers,
        pin_ms: pin.map(millis),
        prefill_tokens_per_second,
    }
}
