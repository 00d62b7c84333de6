//! Prefetches: what is found of a prompt is brought while the engine does something else.
//!
//! A ticket is a gather that nobody waits for yet. All its chunks are ordered at once, each from where it is, as far as that
//! is faster than computing them. The engine asks how far it is, collects what has come, or cancels.

use std::collections::HashMap;
use std::time::Duration;

use actix::prelude::*;
use larder_client::trace::Trace;
use larder_core::loading::{Meter, Piece, Prefill, worth_loading};
use larder_core::store::ids::SessionId;
use larder_core::store::{Refused, Source};
use larder_protocol::Chain;
use larder_protocol::peer::Class;
use larder_protocol::session::{Collect, Found, Lookup, Prefetching, Response, Tier, Wait};
use larder_protocol::table::Holder;

use super::answer::Asked;
use super::gather::Errand;
use super::locate::{Located, Locating};
use super::traces::gather_span;
use super::{Answer, GpuActor, Reply};

/// What the sources of this actor deliver.
#[derive(Debug, Default)]
pub(super) struct Meters {
    pub(super) disk: Meter,
    pub(super) object: Meter,
    peers: HashMap<Holder, Meter>,
}

/// A gather and who waits for it.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) session: SessionId,
    /// Nobody, for a ticket that is not collected yet.
    pub(super) asked: Option<Asked>,
    /// The bringing of it; it ends with the last chunk that refers to it.
    pub(super) trace: Trace,
    /// When they are answered at the latest.
    pub(super) until: Duration,
}

impl Meters {
    pub(super) fn peer(&mut self, holder: Holder) -> &mut Meter {
        // Nodes that left are forgotten with all others: they are measured again soon.
        if self.peers.len() >= MAX_METERED_PEERS && !self.peers.contains_key(&holder) {
            self.peers.clear();
        }
        self.peers.entry(holder).or_default()
    }
}

impl GpuActor {
    /// Answers a prefetch, when it is known where its chunks are.
    pub(super) fn prefetch(
        &mut self,
        session: SessionId,
        ask: Lookup,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        let missing = self.missing_for_lookup(&ask, &walk);
        let trace = asked.trace.clone();
        let asking = match self.locate(ask.namespace, &ask.chain, missing, &trace) {
            Locating::Known(located) => {
                return self.start_prefetch(session, &ask, &located, &trace, ctx).map(Reply::Now);
            }
            Locating::Asked(asking) => asking,
        };
        let finish = asking.map(move |located, actor, ctx| {
            let answer = actor.start_prefetch(session, &ask, &located, &trace, ctx);
            actor.reply(asked, answer.unwrap_or_else(Answer::from));
            actor.follow_up(ctx);
        });
        self.spawn(ctx, finish);
        Ok(Reply::Later)
    }

    fn start_prefetch(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        located: &Located,
        trace: &Trace,
        ctx: &mut Context<Self>,
    ) -> Result<Answer, Refused> {
        let Lookup { namespace, ref chain, .. } = *ask;
        let elsewhere = located.sources(chain.len());
        let found = self.found(session, ask, &elsewhere)?;
        let Some(chunk_tokens) = self.store.chunk_tokens(namespace) else { return Err(Refused::Internal) };
        let run = match self.hoped(session, ask, &elsewhere)? {
            // What others have besides, lookups do not count on.
            Some(hoped) => hoped,
            None => leading_chunks(&found),
        };
        let wanted = match prefill_speed(ask) {
            Some(tokens_per_second) => {
                let prefill = Prefill { tokens_per_second, chunk_tokens };
                self.worth_loading(namespace, run, &found, located, prefill)
            }
            None => run,
        };
        let tokens_to_recompute = (run - wanted) as u64 * u64::from(chunk_tokens);
        let (mut ticket, mut tokens) = (0, 0);
        if wanted > 0 {
            let part: Chain = chain.part(0, wanted);
            let gathered = self.store.gather(session, namespace, &part, &elsewhere[..wanted])?;
            ticket = gathered.gather;
            let trace = gather_span(trace, &gathered);
            let waiting = Waiting { session, asked: None, trace: trace.clone(), until: Duration::MAX };
            self.waiting.insert(ticket, waiting);
            tokens = self.store.progress(session, ticket)?.tokens_expected;
            let until = self.clock.elapsed() + self.load_deadline();
            let errand = Errand { class: Class::Prefetch, until, trace: &trace };
            self.load(namespace, gathered.wanted, located, errand, ctx);
        }
        self.avoided(ask, tokens);
        Ok(Answer::from(Response::Prefetching(Prefetching { ticket, found, tokens, tokens_to_recompute })))
    }

    /// Answers how far a prefetch is.
    pub(super) fn progress(&self, session: SessionId, ticket: u64) -> Result<Answer, Refused> {
        Ok(Answer::from(Response::Progress(self.store.progress(session, ticket)?)))
    }

    /// Leases what a prefetch brought, when it has waited as long as it is to.
    pub(super) fn collect(
        &mut self,
        session: SessionId,
        ask: Collect,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let Collect { ticket, wait } = ask;
        let progress = self.store.progress(session, ticket)?;
        let now = self.clock.elapsed();
        let until = match wait {
            Wait::BestEffort => now,
            Wait::Complete => now + self.load_deadline(),
            Wait::TimeoutMs(ms) => now + Duration::from_millis(ms).min(self.load_deadline()),
        };
        let unknown = Refused::Unknown { what: "ticket", number: ticket };
        let waiting =
            self.waiting.get_mut(&ticket).filter(|waiting| waiting.asked.is_none()).ok_or(unknown)?;
        (waiting.asked, waiting.until) = (Some(asked), until);
        if progress.is_done || until == now {
            self.finish_gathers(vec![ticket]);
            self.stop_abandoned(ctx);
        } else {
            self.hurry(ticket);
        }
        Ok(Reply::Later)
    }

    /// Ends a prefetch. What is on its way is stopped, unless others wait for it too.
    pub(super) fn cancel(&mut self, session: SessionId, ticket: u64, ctx: &mut Context<Self>) {
        if self.waiting.get(&ticket).is_some_and(|waiting| waiting.session == session) {
            self.waiting.remove(&ticket);
            self.store.cancel_gather(session, ticket);
            self.stop_abandoned(ctx);
        }
    }

    /// Stops what nobody waits for: what waits for the disk or the object store at once, what comes from a peer when nothing of its order is
    /// waited for.
    pub(super) fn stop_abandoned(&mut self, ctx: &mut Context<Self>) {
        let abandoned = self.store.take_abandoned();
        if abandoned.is_empty() {
            return;
        }
        let mut unqueued = self.unqueue_reads(&abandoned);
        unqueued.extend(self.unqueue_object_reads(&abandoned));
        unqueued.into_iter().for_each(|id| self.did_not_come(id));
        for id in abandoned {
            self.stop_fetch(id);
        }
        self.read_queued(ctx);
        self.read_queued_objects(ctx);
    }

    /// Counts the seconds of prefill that these tokens of a prompt would have taken, where the engine said how fast it is.
    pub(super) fn avoided(&mut self, ask: &Lookup, tokens: u64) {
        if let Some(tokens_per_second) = prefill_speed(ask) {
            // However slow an engine says it is: a sum that is infinite would stay so.
            self.metrics.avoided(ask.namespace, tokens as f64 / tokens_per_second.max(1.0));
        }
    }

    /// How many chunks of a hybrid model's prefix may turn out to come; `None` where what was found says it.
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

    /// How many of the chunks found are worth loading.
    fn worth_loading(
        &mut self,
        namespace: u32,
        run: usize,
        found: &Found,
        located: &Located,
        prefill: Prefill,
    ) -> usize {
        let bytes = self.store.chunk_bytes_of(namespace);
        // The disk is the first source, the object store the second; the peers follow.
        let mut sources: Vec<Holder> = Vec::new();
        let pieces: Vec<Piece> = (0..run as u32)
            .map(|position| {
                let span = found.spans.iter().find(|span| (span.from..span.to).contains(&position));
                let source = match span.map(|span| span.tier) {
                    Some(Tier::Disk) => Some(0),
                    Some(Tier::Object) => Some(1),
                    Some(Tier::Device | Tier::Host) => None,
                    // What is only hoped for has no span.
                    Some(Tier::Peer) | None => located.first_holder(position).map(|holder| {
                        let known = sources.iter().position(|&other| other == holder);
                        2 + known.unwrap_or_else(|| {
                            sources.push(holder);
                            sources.len() - 1
                        })
                    }),
                };
                Piece { source, bytes }
            })
            .collect();
        sources.iter().for_each(|&holder| _ = self.meters.peer(holder));
        let meters: Vec<&Meter> = [&self.meters.disk, &self.meters.object]
            .into_iter()
            .chain(sources.iter().map(|holder| &self.meters.peers[holder]))
            .collect();
        worth_loading(&pieces, &meters, prefill)
    }
}

/// Chunks of the spans that follow one another from the first chunk on.
fn leading_chunks(found: &Found) -> usize {
    let run = found.spans.iter().scan(0, |end, span| {
        let follows = span.from == *end;
        *end = span.to;
        follows.then_some(span.to)
    });
    run.last().unwrap_or(0) as usize
}

/// Peers whose rates are kept: as many as a large cluster has.
const MAX_METERED_PEERS: usize = 4_096;

/// How fast the engine computes, where it said a speed that one can have.
fn prefill_speed(ask: &Lookup) -> Option<f64> {
    ask.prefill_tokens_per_second.filter(|speed| speed.is_finite() && *speed > 0.0)
}
