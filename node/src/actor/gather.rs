//! Lookups and leases that need more than memory: ask where chunks are (`locate`), read or fetch them (`fetch`), answer.
//!
//! A lookup adds to its answer what is elsewhere; a lease has it brought into slots of its own. A session that asks does not wait for this: its answer comes later, and its other requests go on.

use std::time::Duration;

use super::answer::Asked;
use super::fetch::Fetch;
use super::locate::{Located, Locating};
use super::prefetch::Waiting;
use super::traces::{gather_span, source_span};
use super::{Answer, GpuActor, Reply};
use actix::prelude::*;
use larder_client::trace::Trace;
use larder_core::directory::Holders;
use larder_core::store::ids::SessionId;
use larder_core::store::{FetchId, LookupOptions, Refused, Source, Walk, Wanted};
use larder_protocol::Fingerprint;
use larder_protocol::peer::Class;
use larder_protocol::session::{Found, Lease, Lookup, Response};

/// What chunks are brought for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Errand<'a> {
    /// What waits for them.
    pub(super) class: Class,
    /// Until when.
    pub(super) until: Duration,
    /// What that belongs to.
    pub(super) trace: &'a Trace,
}

impl GpuActor {
    /// Answers a lookup, at once where other nodes need not be asked.
    pub(super) fn lookup(
        &mut self,
        session: SessionId,
        ask: Lookup,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        let missing = self.missing_for_lookup(&ask, &walk);
        let asking = match self.locate(ask.namespace, &ask.chain, missing, &asked.trace) {
            Locating::Known(located) => {
                let elsewhere = located.sources(ask.chain.len());
                return self.look_up(session, &ask, &walk, &elsewhere).map(Reply::Now);
            }
            Locating::Asked(asking) => asking,
        };
        let finish = asking.map(move |located, actor, _| {
            let elsewhere = located.sources(ask.chain.len());
            let walk = actor.store.find(session, ask.namespace, &ask.chain);
            let answer = walk.and_then(|walk| actor.look_up(session, &ask, &walk, &elsewhere));
            let answer = answer.unwrap_or_else(Answer::from);
            actor.reply(asked, answer);
        });
        self.spawn(ctx, finish);
        Ok(Reply::Later)
    }

    /// Answers a lease, at once where all of it is in memory or nobody else has the rest.
    pub(super) fn lease(
        &mut self,
        session: SessionId,
        ask: Lease,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        let missing = self.missing(&walk, ask.chain.len());
        match self.locate(ask.namespace, &ask.chain, missing, &asked.trace) {
            Locating::Known(located) if walk.needs_disk() || !located.stored.is_empty() => {
                self.gather(session, &ask, &located, asked, ctx);
            }
            Locating::Known(_) => {
                let leased = self.store.lease_found(session, ask.namespace, &ask.chain, walk)?;
                return Ok(Reply::Now(self.show_lease(leased)));
            }
            Locating::Asked(asking) => {
                let finish = asking.map(move |located, actor, ctx| {
                    actor.gather(session, &ask, &located, asked, ctx);
                });
                self.spawn(ctx, finish);
            }
        }
        Ok(Reply::Later)
    }

    fn look_up(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        walk: &Walk,
        elsewhere: &[Option<Source>],
    ) -> Result<Answer, Refused> {
        let found = self.found_on(session, ask, walk, elsewhere)?;
        self.avoided(ask, found.tokens);
        Ok(Answer::from(Response::Found(found)))
    }

    /// What a lookup finds now; counts it.
    pub(super) fn found(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        elsewhere: &[Option<Source>],
    ) -> Result<Found, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        self.found_on(session, ask, &walk, elsewhere)
    }

    fn found_on(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        walk: &Walk,
        elsewhere: &[Option<Source>],
    ) -> Result<Found, Refused> {
        let &Lookup { prompt_tokens, skip_read, pin_ms, ref tiers, .. } = ask;
        let options = LookupOptions { elsewhere, prompt_tokens, skip_read, tiers, pin_ms };
        let now = self.clock.now();
        let mut found = self.store.lookup_found(session, &ask.chain, walk, options, now)?;
        self.find_on_device(session, ask, &mut found);
        self.looked_up(ask, &found);
        Ok(found)
    }

    /// How long chunks may take to come from where they are.
    pub(super) fn load_deadline(&self) -> Duration {
        let others = (self.peers.is_some() || self.siblings.is_some()).then(|| self.peers_deadline());
        let (disk, objects) = (self.disk.as_ref(), self.objects.as_ref());
        let below = [disk.map(|disk| disk.deadline), objects.map(|objects| objects.deadline)];
        others.into_iter().chain(below.into_iter().flatten()).max().unwrap_or_default()
    }

    /// Starts to read and fetch what a lease needs.
    fn gather(
        &mut self,
        session: SessionId,
        ask: &Lease,
        located: &Located,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) {
        let elsewhere = located.sources(ask.chain.len());
        let gathered = match self.store.gather(session, ask.namespace, &ask.chain, &elsewhere) {
            Ok(gathered) => gathered,
            Err(refused) => {
                return self.reply(asked, Answer::from(refused));
            }
        };
        let until = asked.started + self.load_deadline();
        let trace = gather_span(&asked.trace, &gathered);
        let waiting = Waiting { session, asked: Some(asked), trace: trace.clone(), until };
        self.waiting.insert(gathered.gather, waiting);
        if gathered.is_ready {
            self.finish_gathers(vec![gathered.gather]);
        }
        // What a ticket had ordered already is urgent from now on.
        self.hurry(gathered.gather);
        let errand = Errand { class: Class::Decode, until, trace: &trace };
        self.load(ask.namespace, gathered.wanted, located, errand, ctx);
    }

    /// An engine stands still until these chunks are there.
    pub(super) fn hurry(&mut self, gather: u64) {
        let awaited: Vec<FetchId> = self.store.awaited(gather).collect();
        awaited.into_iter().for_each(|id| self.hurry_fetch(id));
    }

    /// Orders chunks, each from where it is.
    pub(super) fn load(
        &mut self,
        namespace: u32,
        wanted: Vec<Wanted>,
        located: &Located,
        errand: Errand<'_>,
        ctx: &mut Context<Self>,
    ) {
        let Errand { class, until, trace } = errand;
        let peers_deadline = self.peers_deadline();
        let deadline = match class {
            Class::Decode => until.min(self.clock.elapsed() + peers_deadline),
            // Nobody waits: it has as long as the ticket lives.
            Class::Prefetch => Duration::MAX,
        };
        let fingerprint = self.store.fingerprint(namespace).unwrap_or(Fingerprint([0; 32]));
        let (mut held, mut on_disk, mut stored) = (Vec::with_capacity(wanted.len()), Vec::new(), Vec::new());
        let disk_trace = source_span(trace, &wanted, Source::Disk);
        let object_trace = source_span(trace, &wanted, Source::Object);
        for wanted in wanted {
            let (candidates, ids, trace) = match wanted.from {
                Source::Disk => (Holders::default(), &mut on_disk, &disk_trace),
                Source::Object => (Holders::default(), &mut stored, &object_trace),
                Source::Sibling | Source::Peer => (located.holders(wanted.position), &mut held, trace),
            };
            ids.push(wanted.fetch);
            let fetch = Fetch::new(wanted, fingerprint, class, candidates, deadline, trace.clone());
            self.fetching.insert(fetch.wanted.fetch, fetch);
        }
        self.read_from_disk(on_disk, ctx);
        self.read_from_objects(stored, ctx);
        self.order_fetches(held, ctx);
        self.renew_extents(ctx);
    }

    /// Answers leases that have waited as long as they may with what is here. What they waited for may still come.
    pub(super) fn finish_late_gathers(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.elapsed();
        let late = self.waiting.iter().filter(|(_, waiting)| waiting.asked.is_some() && waiting.until <= now);
        let mut late: Vec<u64> = late.map(|(&gather, _)| gather).collect();
        if late.is_empty() {
            return;
        }
        late.sort_unstable();
        self.finish_gathers(late);
        self.stop_abandoned(ctx);
    }

    pub(super) fn finish_gathers(&mut self, ready: Vec<u64>) {
        for gather in ready {
            // A ticket that nobody has collected yet stays.
            let Some(waiting) = self.waiting.get_mut(&gather) else { continue };
            let Some(asked) = waiting.asked.take() else { continue };
            let trace = std::mem::take(&mut waiting.trace);
            self.waiting.remove(&gather);
            let leased = self.store.finish_gather(gather);
            if let Ok(leased) = &leased {
                trace.count("larder.chunks_here", leased.chunks);
            }
            let answer = leased.map_or_else(Answer::from, |leased| self.show_lease(leased));
            self.reply(asked, answer);
        }
    }
}
