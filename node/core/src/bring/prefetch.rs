//! Prefetches: bring a prompt's chunks while the engine does something else.
//!
//! A ticket is a gather that nobody waits for yet. It orders all its chunks at once, each from its place, as far as loading is
//! faster than computing. Disk reads go some MiB at a time, and peers get orders of a few MiB, so that a canceled prefetch stops
//! soon. The engine asks for the progress, collects the chunks that have come, or cancels. When an engine starts to wait for a
//! prefetch, the class of its chunks changes at once, in the queues of the disk, the object store and the exchange.

use std::time::Duration;

use larder_protocol::peer::Class;
use larder_protocol::session::{Collect, Found, Lookup, Progress, Tier, Wait};
use larder_protocol::table::Holder;

use super::gather::{Errand, gather_cause};
use super::locate::{LocatePurpose, Located};
use super::{Rest, Waiting};
use crate::Core;
use crate::cause::Cause;
use crate::effect::{Effect, Started};
use crate::event::RequestId;
use crate::loading::{ChunkSource, Meter, Prefill, worth_loading};
use crate::lookups::LookupKind;
use crate::store::ids::SessionId;
use crate::store::{Cut, Gathered, Refused, Source};

impl Core {
    /// Begins to bring the found chunks of a prompt.
    pub(crate) fn prefetch(&mut self, request: RequestId, ask: Lookup, cause: Cause) -> Result<(), Refused> {
        let about = (ask.namespace, &ask.chain, ask.prompt_tokens);
        let walk = self.find_for(LookupKind::Prefetch, request, about)?;
        let missing = self.missing_for_lookup(&ask, &walk);
        if missing.is_nothing() {
            return self.start_prefetch(request, ask, &Located::default(), &cause);
        }
        self.locate(LocatePurpose::Prefetch(request, ask), missing, cause);
        Ok(())
    }

    /// Orders the chunks that are worth loading, now that their places are known.
    pub(super) fn start_prefetch(
        &mut self,
        request: RequestId,
        ask: Lookup,
        located: &Located,
        cause: &Cause,
    ) -> Result<(), Refused> {
        let elsewhere = located.sources(ask.chain.len());
        let walk = self.store.find(request.session, ask.namespace, &ask.chain)?;
        let mut found = self.found_on(request.session, &ask, &walk, &elsewhere)?;
        let lookup = self.note_lookup(LookupKind::Prefetch, request, &ask, (&walk, located, &found));
        self.note_hole(&ask, located, &found);
        let started = self.start((request.session, lookup), &ask, (&found, &elsewhere), located, cause);
        match &started {
            Ok(started) => self.avoided(request.session, &ask, started.tokens),
            Err(refused) => self.lookups.refused(lookup, refused),
        }
        self.find_on_device(request.session, &ask, &mut found);
        self.effects.push_back(Effect::Prefetching { request, ask, found, started });
        Ok(())
    }

    fn start(
        &mut self,
        (session, lookup): (SessionId, u64),
        ask: &Lookup,
        (found, elsewhere): (&Found, &[Option<Source>]),
        located: &Located,
        cause: &Cause,
    ) -> Result<Started, Refused> {
        let Lookup { namespace, ref chain, .. } = *ask;
        let Some(chunk_tokens) = self.store.chunk_tokens(namespace) else { return Err(Refused::Internal) };
        // Lookups do not count on pools that other nodes may have.
        let run = self.hoped(session, ask, elsewhere)?.unwrap_or_else(|| leading_chunks(found));
        let wanted = match prefill_speed(ask) {
            Some(tokens_per_second) => {
                let prefill = Prefill { tokens_per_second, chunk_tokens };
                self.worth_loading(namespace, run, found, located, prefill)
            }
            None => run,
        };
        if wanted < run {
            self.lookups.computes_from(lookup, wanted as u32);
        }
        let tokens_to_recompute = (run - wanted) as u64 * u64::from(chunk_tokens);
        if wanted == 0 {
            return Ok(Started { ticket: 0, tokens: 0, tokens_to_recompute });
        }
        let chain = chain.part(0, wanted);
        let elsewhere = &elsewhere[..wanted.min(elsewhere.len())];
        let Gathered { gather: ticket, is_ready, wanted, cut } =
            self.store.gather(session, namespace, &chain, elsewhere)?;
        let tokens = self.store.progress(session, ticket)?.tokens_expected;
        let may_grow = cut == Some(Cut::Crowded) && self.store.may_find_room(ticket);
        if tokens == 0 && is_ready && !may_grow {
            self.store.cancel_gather(session, ticket);
            return Ok(Started { ticket: 0, tokens: 0, tokens_to_recompute });
        }
        let cause = gather_cause(cause, &wanted);
        let rest = cut.map(|_| Rest::new(namespace, &chain, located));
        let waiting =
            Waiting { session, request: None, cause: cause.clone(), until: Duration::MAX, lookup, rest };
        self.bring.waiting.insert(ticket, waiting);
        let until = self.now + self.bring.load_deadline();
        if is_ready {
            self.gathers_are_ready(&[ticket]);
        }
        self.load(namespace, wanted, located, Errand { class: Class::Prefetch, until, cause: &cause });
        Ok(Started { ticket, tokens, tokens_to_recompute })
    }

    /// The progress of a prefetch. It is not done while its rest waits for room.
    pub(crate) fn progress(&self, session: SessionId, ticket: u64) -> Result<Progress, Refused> {
        let progress = self.store.progress(session, ticket)?;
        let is_cut = self.bring.waiting.get(&ticket).is_some_and(|waiting| waiting.rest.is_some());
        Ok(Progress { is_done: progress.is_done && !is_cut, ..progress })
    }

    /// Answers a prefetch with a lease of the chunks that are here, at once or when they have come.
    pub(crate) fn collect(
        &mut self,
        request: RequestId,
        Collect { ticket, wait }: Collect,
    ) -> Result<(), Refused> {
        let is_done = self.progress(request.session, ticket)?.is_done;
        let until = self.now
            + match wait {
                Wait::BestEffort => Duration::ZERO,
                Wait::Complete => self.bring.load_deadline(),
                Wait::TimeoutMs(ms) => Duration::from_millis(ms).min(self.bring.load_deadline()),
            };
        let waiting = self.bring.waiting.get_mut(&ticket).filter(|waiting| waiting.request.is_none());
        let waiting = waiting.ok_or(Refused::Unknown { what: "ticket", number: ticket })?;
        (waiting.request, waiting.until) = (Some(request), until);
        if is_done || until == self.now {
            self.finish_gathers(&[ticket]);
        } else {
            self.hurry(ticket);
        }
        Ok(())
    }

    /// Ends a prefetch that nobody wants any more. A request that was collecting it still gets an answer: requests are
    /// counted until they are answered.
    pub(crate) fn cancel(&mut self, session: SessionId, ticket: u64) {
        if self.bring.waiting.get(&ticket).is_some_and(|waiting| waiting.session == session)
            && let Some(Waiting { request, .. }) = self.bring.waiting.remove(&ticket)
        {
            self.store.cancel_gather(session, ticket);
            self.forget_crowded();
            if let Some(request) = request {
                self.refuse(request, Err(Refused::Unknown { what: "ticket", number: ticket }));
            }
        }
    }

    /// The number of chunks that a prefetch may bring; `None` if the lookup's result says the number.
    fn hoped(
        &self,
        session: SessionId,
        ask: &Lookup,
        elsewhere: &[Option<Source>],
    ) -> Result<Option<usize>, Refused> {
        if ask.skip_read || !ask.tiers.is_empty() {
            return Ok(None);
        }
        let usable = self.store.usable(ask.namespace, &ask.chain, ask.prompt_tokens);
        let chunks = usable.map_or(0, |usable| usable.chunks);
        self.store.hoped(session, ask.namespace, &ask.chain, chunks, elsewhere)
    }

    /// The number of found chunks that come sooner than the engine computes them.
    fn worth_loading(
        &mut self,
        namespace: u32,
        run: usize,
        found: &Found,
        located: &Located,
        prefill: Prefill,
    ) -> usize {
        let bytes = self.store.chunk_bytes_of(namespace);
        // The disk is the first source, the object store the second; other actors follow.
        let mut sources: Vec<Holder> = Vec::new();
        let pieces: Vec<ChunkSource> = (0..run as u32)
            .map(|position| {
                let span = found.spans.iter().find(|span| (span.from..span.to).contains(&position));
                let source = match span.map(|span| span.tier) {
                    Some(Tier::Disk) => Some(0),
                    Some(Tier::Object) => Some(1),
                    Some(Tier::Device | Tier::Host) => None,
                    // A chunk that may be absent has no span.
                    Some(Tier::Peer) | None => located.first_holder(position).map(|holder| {
                        let known = sources.iter().position(|&other| other == holder);
                        2 + known.unwrap_or_else(|| {
                            sources.push(holder);
                            sources.len() - 1
                        })
                    }),
                };
                ChunkSource { source, bytes }
            })
            .collect();
        let unmeasured = Meter::default();
        let below = [&self.bring.disk, &self.bring.object];
        let below = below.map(|reads| reads.as_ref().map_or(&unmeasured, |reads| &reads.meter));
        let others = sources.iter().map(|holder| self.bring.meters.get(holder).unwrap_or(&unmeasured));
        let meters: Vec<&Meter> = below.into_iter().chain(others).collect();
        worth_loading(&pieces, &meters, prefill, self.now)
    }
}

/// The number of chunks at the front of a prompt that were found without a hole.
fn leading_chunks(found: &Found) -> usize {
    let run = found.spans.iter().scan(0, |end, span| {
        let follows = span.from == *end;
        *end = span.to;
        follows.then_some(span.to)
    });
    run.last().unwrap_or(0) as usize
}

/// Tokens that an engine computes in a second, if it gives a valid number.
pub(crate) fn prefill_speed(ask: &Lookup) -> Option<f64> {
    ask.prefill_tokens_per_second.filter(|speed| speed.is_finite() && *speed > 0.0)
}
