//! Lookups and leases: finds the chunks that are here, and brings the rest first.
//!
//! **A get** in order:
//!
//! 1. A session asks to read a prompt's chunks, and the store walks the chain ([`Store::find`]).
//! 2. If memory has all chunks, or nobody else has the rest, the store leases the prefix at once ([`Store::lease_found`]).
//! 3. Otherwise `locate` finds the holders of the rest. The store claims the chunks that are here and takes slots for the
//!    others ([`Store::gather`]).
//! 4. Each missing chunk is read from a tier or fetched from another actor (`load`).
//! 5. Chunks on their way have little room, so a long prompt comes in parts: when one part is here and stays, the next follows
//!    ([`Store::gather_more`]).
//! 6. When the last chunk has come or failed, or time is up, the gather ends as a lease of the prefix that is here by then
//!    ([`Store::finish_gather`]). Other requests of the session go on meanwhile.
//!
//! A lookup goes the same way up to `locate`, and brings nothing.
//!
//! [`Store::find`]: crate::store::Store::find
//! [`Store::lease_found`]: crate::store::Store::lease_found
//! [`Store::gather`]: crate::store::Store::gather
//! [`Store::gather_more`]: crate::store::Store::gather_more
//! [`Store::finish_gather`]: crate::store::Store::finish_gather

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::Fingerprint;
use larder_protocol::chain::Chain;
use larder_protocol::peer::Class;
use larder_protocol::session::{Found, Lease, Lookup};

use super::locate::{LocatePurpose, Located};
use super::{Bring, Fetch, Rest, Waiting};
use crate::Core;
use crate::cause::Cause;
use crate::directory::Holders;
use crate::effect::Effect;
use crate::event::Below;
use crate::event::RequestId;
use crate::lookups::LookupKind;
use crate::store::ids::SessionId;
use crate::store::{Cut, FetchId, Gathered, LookupOptions, Refused, Source, Walk, Wanted};

/// The purpose for which chunks are brought.
#[derive(Debug, Clone, Copy)]
pub(super) struct Errand<'a> {
    /// The urgency of the requests that wait for the chunks.
    pub(super) class: Class,
    /// The deadline.
    pub(super) until: Duration,
    /// The cause of the request.
    pub(super) cause: &'a Cause,
}

impl Core {
    /// Answers a lookup, at once if no other node need be asked.
    pub(crate) fn lookup(&mut self, request: RequestId, ask: Lookup, cause: Cause) -> Result<(), Refused> {
        let about = (ask.namespace, &ask.chain, ask.prompt_tokens);
        let walk = self.find_for(LookupKind::Lookup, request, about)?;
        let missing = self.missing_for_lookup(&ask, &walk);
        if missing.is_nothing() {
            return self.look_up(request, ask, &walk, &Located::default());
        }
        self.locate(LocatePurpose::Lookup(request, ask), missing, cause);
        Ok(())
    }

    /// Answers a lookup, now that it is known where the chunks are.
    pub(super) fn look_up_located(
        &mut self,
        request: RequestId,
        ask: Lookup,
        located: &Located,
    ) -> Result<(), Refused> {
        let walk = self.store.find(request.session, ask.namespace, &ask.chain)?;
        self.look_up(request, ask, &walk, located)
    }

    fn look_up(
        &mut self,
        request: RequestId,
        ask: Lookup,
        walk: &Walk,
        located: &Located,
    ) -> Result<(), Refused> {
        let elsewhere = located.sources(ask.chain.len());
        let mut found = self.found_on(request.session, &ask, walk, &elsewhere)?;
        self.note_lookup(LookupKind::Lookup, request, &ask, (walk, located, &found));
        self.note_hole(&ask, located, &found);
        self.find_on_device(request.session, &ask, &mut found);
        self.avoided(request.session, &ask, found.tokens);
        self.effects.push_back(Effect::Found { request, ask, found });
        Ok(())
    }

    /// The result of a lookup's walk.
    pub(super) fn found_on(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        walk: &Walk,
        elsewhere: &[Option<Source>],
    ) -> Result<Found, Refused> {
        let &Lookup { prompt_tokens, skip_read, pin_ms, ref tiers, .. } = ask;
        let options = LookupOptions { elsewhere, prompt_tokens, skip_read, tiers, pin_ms };
        self.store.lookup_found(session, &ask.chain, walk, options, self.millis())
    }

    /// Answers a lease, at once if memory has all chunks or nobody else has the rest.
    pub(crate) fn lease(&mut self, request: RequestId, ask: Lease, cause: Cause) -> Result<(), Refused> {
        let walk = self.find_for(LookupKind::Lease, request, (ask.namespace, &ask.chain, 0))?;
        let missing = self.missing(ask.namespace, &walk, ask.chain.len());
        if !missing.is_nothing() {
            self.locate(LocatePurpose::Lease(request, ask), missing, cause);
            return Ok(());
        }
        if walk.needs_disk() {
            return self.gather(request, &ask, &Located::default(), (&walk, &cause));
        }
        self.lease_now(request, &ask, &Located::default(), walk)
    }

    /// Answers a lease, now that it is known where the chunks are.
    pub(super) fn lease_located(
        &mut self,
        request: RequestId,
        ask: &Lease,
        located: &Located,
        cause: &Cause,
    ) -> Result<(), Refused> {
        let walk = self.store.find(request.session, ask.namespace, &ask.chain)?;
        if located.took_time || walk.needs_disk() || located.is_anywhere() {
            return self.gather(request, ask, located, (&walk, cause));
        }
        self.lease_now(request, ask, located, walk)
    }

    fn lease_now(
        &mut self,
        request: RequestId,
        ask: &Lease,
        located: &Located,
        walk: Walk,
    ) -> Result<(), Refused> {
        let lookup = if walk.is_whole() { 0 } else { self.note_lease(request, ask, &walk, located) };
        self.origins.remove(&request);
        let leased = self.store.lease_found(request.session, ask.namespace, &ask.chain, walk);
        let leased = leased.inspect_err(|refused| self.lookups.refused(lookup, refused))?;
        self.effects.push_back(Effect::Leased { request, leased });
        Ok(())
    }

    /// Starts to read and fetch the chunks that a lease lacks.
    fn gather(
        &mut self,
        request: RequestId,
        ask: &Lease,
        located: &Located,
        (walk, cause): (&Walk, &Cause),
    ) -> Result<(), Refused> {
        let elsewhere = located.sources(ask.chain.len());
        let lookup = self.note_lease(request, ask, walk, located);
        let gathered = self.store.gather(request.session, ask.namespace, &ask.chain, &elsewhere);
        let Gathered { gather, is_ready, wanted, cut } =
            gathered.inspect_err(|refused| self.lookups.refused(lookup, refused))?;
        let (until, cause) = (self.now + self.bring.load_deadline(), gather_cause(cause, &wanted));
        let (session, request) = (request.session, Some(request));
        let rest = cut.map(|_| Rest::new(ask.namespace, &ask.chain, located));
        let waiting = Waiting { session, request, cause: cause.clone(), until, lookup, rest };
        self.bring.waiting.insert(gather, waiting);
        if is_ready {
            self.gathers_are_ready(&[gather]);
        }
        // Chunks that a prefetch had ordered already are urgent from now on.
        self.hurry(gather);
        self.load(ask.namespace, wanted, located, Errand { class: Class::Decode, until, cause: &cause });
        Ok(())
    }

    /// Notes that an engine waits for these chunks.
    pub(super) fn hurry(&mut self, gather: u64) {
        let awaited: Vec<FetchId> = self.store.awaited(gather).collect();
        awaited.into_iter().for_each(|id| self.hurry_fetch(id));
    }

    /// Orders each chunk from its source.
    pub(super) fn load(
        &mut self,
        namespace: u32,
        wanted: Vec<Wanted>,
        located: &Located,
        Errand { class, until, cause }: Errand<'_>,
    ) {
        let deadline = match class {
            Class::Decode => until.min(self.now + self.bring.others_deadline()),
            // Nobody waits: the chunk has as long as the prefetch lives.
            Class::Prefetch => Duration::MAX,
        };
        let fingerprint = self.store.fingerprint(namespace).unwrap_or(Fingerprint([0; 32]));
        let (mut held, mut on_disk, mut stored) = (Vec::with_capacity(wanted.len()), Vec::new(), Vec::new());
        let (disk, object) =
            (read_cause(cause, Below::Disk, &wanted), read_cause(cause, Below::Object, &wanted));
        let turn = self.bring.turn;
        for wanted in wanted {
            let (candidates, ids, cause) = match wanted.from {
                Source::Disk => (Holders::default(), &mut on_disk, &disk),
                Source::Object => (Holders::default(), &mut stored, &object),
                Source::Sibling | Source::Peer => {
                    let mut holders = located.holders(wanted.position);
                    if holders.len() > 1 {
                        self.store.neighbours().order(&mut holders, turn);
                        self.bring.turn = turn.wrapping_add(1);
                    }
                    (holders, &mut held, cause)
                }
            };
            let id = wanted.fetch;
            ids.push(id);
            let fetch = Fetch::new(wanted, fingerprint, class, candidates, deadline, cause.clone());
            self.bring.fetches.insert(id, fetch);
        }
        self.read_from(Below::Disk, on_disk);
        self.read_from(Below::Object, stored);
        self.order_fetches(held);
    }

    /// Goes on with gathers whose chunks are all here, and ends those that are whole.
    pub(crate) fn gathers_are_ready(&mut self, ready: &[u64]) {
        for &gather in ready {
            if !self.bring_more(gather) {
                self.finish_gathers(&[gather]);
            }
        }
    }

    /// Brings the next part of a gather whose first part filled the room of chunks on their way; returns whether there is one, or
    /// may be when other chunks have come.
    fn bring_more(&mut self, gather: u64) -> bool {
        let Some(waiting) = self.bring.waiting.get_mut(&gather) else { return false };
        let class = if waiting.request.is_some() { Class::Decode } else { Class::Prefetch };
        let (until, cause) = (waiting.until, waiting.cause.clone());
        let Some(rest) = waiting.rest.take().filter(|_| self.now < until) else { return false };
        let elsewhere = rest.located.sources(rest.chain.len());
        let Some(more) = self.store.gather_more(gather, &rest.chain, &elsewhere) else { return false };
        let waits = more.is_ready && more.cut == Some(Cut::Crowded) && self.store.may_find_room(gather);
        let goes_on = waits || !more.is_ready;
        if let Some(waiting) = self.bring.waiting.get_mut(&gather).filter(|_| goes_on && more.cut.is_some()) {
            waiting.rest = Some(Arc::clone(&rest));
        }
        if waits {
            self.bring.crowded_out.push_back(gather);
        }
        self.load(rest.namespace, more.wanted, &rest.located, Errand { class, until, cause: &cause });
        goes_on
    }

    /// Goes on with the gathers that have waited longest for the room of chunks on their way, if some of these have ended. When
    /// none is left, all such gathers go on or end.
    pub(crate) fn use_left_room(&mut self) {
        if !std::mem::take(&mut self.bring.has_left_room) {
            return;
        }
        let (mut tries, mut still) = (0, VecDeque::new());
        while (tries < CROWDED_TRIES || !self.store.is_bringing())
            && let Some(gather) = self.bring.crowded_out.pop_front()
        {
            // Some were answered meanwhile, or nobody wants them any more.
            if self.bring.waiting.contains_key(&gather) {
                self.gathers_are_ready(&[gather]);
                if self.bring.crowded_out.back() == Some(&gather) {
                    still.extend(self.bring.crowded_out.pop_back());
                }
                tries += 1;
            }
        }
        still.into_iter().rev().for_each(|gather| self.bring.crowded_out.push_front(gather));
    }

    /// Answers late leases with the chunks that are here. The others may still come.
    pub(crate) fn finish_late_gathers(&mut self) {
        let is_late = |waiting: &Waiting| waiting.request.is_some() && waiting.until <= self.now;
        let late = self.bring.waiting.iter().filter(|(_, waiting)| is_late(waiting));
        let mut late: Vec<u64> = late.map(|(&gather, _)| gather).collect();
        late.sort_unstable();
        self.finish_gathers(&late);
    }

    /// Ends gathers for which nothing more will come; a prefetch that nobody has collected yet stays.
    pub(crate) fn finish_gathers(&mut self, ready: &[u64]) {
        for gather in ready {
            let waiting = self.bring.waiting.get(gather).and_then(|waiting| waiting.request);
            let Some(request) = waiting else { continue };
            let Some(Waiting { cause, until, lookup, .. }) = self.bring.waiting.remove(gather) else {
                continue;
            };
            match self.store.finish_gather(*gather) {
                Ok(leased) => {
                    self.lookups.delivered(lookup, leased.chunks, until <= self.now);
                    cause.count("larder.chunks_here", leased.chunks.into());
                    self.effects.push_back(Effect::Leased { request, leased });
                }
                Err(refused) => {
                    self.lookups.refused(lookup, &refused);
                    self.refuse(request, Err(refused));
                }
            }
        }
    }

    /// Forgets the requests of a session: nobody waits for them any more.
    pub(crate) fn forget_waiting_of(&mut self, session: SessionId) {
        self.bring.waiting.retain(|_, waiting| waiting.session != session);
        self.forget_crowded();
        self.bring.questions.retain(|_, question| question.session() != Some(session));
        self.origins.retain(|request, _| request.session != session);
        self.forget_followers_of(session);
    }

    /// Forgets the gathers that nobody waits for among those that wait for room.
    pub(super) fn forget_crowded(&mut self) {
        let Bring { crowded_out, waiting, .. } = &mut self.bring;
        crowded_out.retain(|gather| waiting.contains_key(gather));
    }

    /// Stops transfers that nobody waits for.
    pub(crate) fn stop_abandoned(&mut self) {
        let abandoned = self.store.take_abandoned();
        if abandoned.is_empty() {
            return;
        }
        for id in abandoned.into_iter().filter(|&id| !self.store.is_awaited(id)).collect::<Vec<_>>() {
            let lines = [Below::Disk, Below::Object];
            match lines
                .into_iter()
                .any(|tier| self.bring.reads_of(tier).is_some_and(|reads| reads.line.leave(id)))
            {
                true => self.did_not_come(id),
                false => self.stop_fetch(id),
            }
        }
        self.read_queued(Below::Disk);
        self.read_queued(Below::Object);
    }
}

impl Rest {
    pub(super) fn new(namespace: u32, chain: &Chain, located: &Located) -> Arc<Self> {
        Arc::new(Self { namespace, chain: chain.clone(), located: located.clone() })
    }
}

/// The span of a gather for a lease or a prefetch.
pub(super) fn gather_cause(cause: &Cause, wanted: &[Wanted]) -> Cause {
    if wanted.is_empty() {
        return Cause::default();
    }
    let gather = cause.child("gather");
    gather.count("larder.chunks", wanted.len() as u64);
    gather
}

/// The span of the gather's reads from a tier.
pub(super) fn read_cause(cause: &Cause, tier: Below, wanted: &[Wanted]) -> Cause {
    let (from, name) = match tier {
        Below::Disk => (Source::Disk, "read_disk"),
        Below::Object => (Source::Object, "read_object"),
    };
    let from_there = || wanted.iter().filter(|wanted| wanted.from == from);
    if cause.span().is_none() || from_there().next().is_none() {
        return Cause::default();
    }
    let read = cause.child(name);
    read.count("larder.chunks", from_there().count() as u64);
    read.count("larder.bytes", from_there().flat_map(|wanted| &wanted.blocks).map(|block| block.bytes).sum());
    read
}

/// The most gathers that try again when room was left: each walks its whole chain.
const CROWDED_TRIES: usize = 4;
