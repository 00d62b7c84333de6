//! Finds chunks that this actor lacks: asks its siblings, then peers by the directory, then the object store for the rest.
//!
//! A lease or prefetch does not ask the directory for chunks that a lookup has just found: the actor remembers their holders. So
//! a get that follows its lookup goes to the holder at once, without the two changes of thread that a question costs.

use std::time::Duration;

use larder_protocol::session::{Lease, Lookup, Tier};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{Chain, ChunkRef, Fingerprint};

use crate::Core;
use crate::cause::Cause;
use crate::directory::Holders;
use crate::directory::lookup::row_keys;
use crate::effect::Effect;
use crate::event::{QuestionId, RequestId};
use crate::store::ids::{ChunkKey, SessionId, TenantId};
use crate::store::{FetchId, Source, Walk};
use crate::tiers::presence::Fact;

/// Positions of a chain whose chunks are not on this node, and the places that may be asked for them.
#[derive(Debug, Default)]
pub(super) struct Missing {
    positions: Vec<u32>,
    from_siblings: bool,
    from_peers: bool,
    from_objects: bool,
}

/// The places of chunks that are not on this node.
#[derive(Debug, Clone, Default)]
pub(super) struct Located {
    /// The requested positions, in order.
    positions: Vec<u32>,
    /// The holders of each chunk.
    holders: Vec<Holders>,
    /// The chunks that the object store has.
    pub(super) stored: Vec<u32>,
    /// Whether a question was asked, so that time may have passed.
    pub(super) took_time: bool,
    /// Positions whose holders are unknown because homes did not answer.
    pub(super) unanswered: Vec<u32>,
}

/// A search for chunks.
#[derive(Debug)]
pub(super) struct ChunkSearch {
    purpose: LocatePurpose,
    cause: Cause,
    missing: Missing,
    located: Located,
    asks: Asks,
    /// Deadline of the question: without an answer by then, the chunks count as absent.
    until: Duration,
}

/// The next step once the places of the chunks are known.
#[derive(Debug)]
pub(super) enum LocatePurpose {
    Lookup(RequestId, Lookup),
    Lease(RequestId, Lease),
    Prefetch(RequestId, Lookup),
    /// Asks again for chunks whose holders did not have them.
    Again(Vec<FetchId>),
    /// Asks who else has the chunks that a drain is to move.
    Drain,
}

/// The place whose answer a question waits for.
#[derive(Debug)]
enum Asks {
    Siblings,
    Directory,
    /// The positions that the object store was asked for, with the names of their chunks.
    Objects(Vec<(u32, ChunkKey)>),
}

impl Missing {
    pub(super) fn is_nothing(&self) -> bool {
        self.positions.is_empty()
    }
}

impl Located {
    /// The source of each of the first `chunks` chunks, by position. Other actors go before the object store.
    pub(super) fn sources(&self, chunks: usize) -> Vec<Option<Source>> {
        let mut sources = vec![None; chunks];
        let mut is = |position: u32, source| {
            sources.get_mut(position as usize).into_iter().for_each(|place| *place = Some(source));
        };
        self.stored.iter().for_each(|&position| is(position, Source::Object));
        for (&position, holders) in self.positions.iter().zip(&self.holders) {
            if let Some(first) = holders.first() {
                let is_sibling = first.node == NodeNumber::THIS_NODE;
                is(position, if is_sibling { Source::Sibling } else { Source::Peer });
            }
        }
        sources
    }

    /// The actors that have the chunk at a position.
    pub(super) fn holders(&self, position: u32) -> Holders {
        let at = self.positions.binary_search(&position).ok();
        at.and_then(|at| self.holders.get(at)).cloned().unwrap_or_default()
    }

    /// Whether any of the chunks was found.
    pub(super) fn is_anywhere(&self) -> bool {
        !self.stored.is_empty() || self.holders.iter().any(|holders| !holders.is_empty())
    }

    /// The positions from `from` on whose chunks other nodes have, and the first such node's actor.
    pub(super) fn on_peers(&self, from: u32) -> impl Iterator<Item = (u32, Holder)> {
        let first = self.positions.partition_point(|&position| position < from);
        let behind = self.positions.iter().zip(&self.holders).skip(first);
        behind.filter_map(|(&position, holders)| {
            let first = holders.first().filter(|first| first.node != NodeNumber::THIS_NODE)?;
            Some((position, *first))
        })
    }

    /// The first actor that has the chunk at a position.
    pub(super) fn first_holder(&self, position: u32) -> Option<Holder> {
        let at = self.positions.binary_search(&position).ok()?;
        self.holders.get(at)?.first().copied()
    }

    /// Indexes into `positions` of the chunks that no actor has.
    fn unheld(&self) -> impl Iterator<Item = usize> {
        let is_held = |at: usize| self.holders.get(at).is_some_and(|holders| !holders.is_empty());
        (0..self.positions.len()).filter(move |&at| !is_held(at))
    }
}

impl ChunkSearch {
    /// The session whose request the search belongs to.
    pub(super) fn session(&self) -> Option<SessionId> {
        match self.purpose {
            LocatePurpose::Lookup(request, _)
            | LocatePurpose::Lease(request, _)
            | LocatePurpose::Prefetch(request, _) => Some(request.session),
            LocatePurpose::Again(_) | LocatePurpose::Drain => None,
        }
    }
}

impl LocatePurpose {
    fn chain(&self) -> Option<(u32, &Chain)> {
        match self {
            Self::Lookup(_, ask) | Self::Prefetch(_, ask) => Some((ask.namespace, &ask.chain)),
            Self::Lease(_, ask) => Some((ask.namespace, &ask.chain)),
            Self::Again(_) | Self::Drain => None,
        }
    }
}

impl Core {
    /// The missing chunks that a lookup may ask for in its tiers.
    pub(super) fn missing_for_lookup(&self, ask: &Lookup, walk: &Walk) -> Missing {
        if ask.skip_read {
            return Missing::default();
        }
        let may_ask = |tier| ask.tiers.is_empty() || ask.tiers.contains(&tier);
        let usable = self.store.usable(ask.namespace, &ask.chain, ask.prompt_tokens);
        let chunks = usable.map_or(0, |usable| usable.chunks);
        let mut missing = self.missing(ask.namespace, walk, chunks);
        missing.from_siblings &= may_ask(Tier::Host);
        missing.from_peers &= may_ask(Tier::Peer);
        missing.from_objects &= may_ask(Tier::Object);
        missing
    }

    /// The missing chunks among a walk's first chunks. Nothing is asked for while the namespace is being purged.
    pub(super) fn missing(&self, namespace: u32, walk: &Walk, chunks: usize) -> Missing {
        let sources = &self.bring.sources;
        let (from_siblings, from_peers) = (sources.siblings.is_some(), sources.peers.is_some());
        let from_objects = sources.object.is_some();
        let is_askable = (from_siblings || from_peers || from_objects) && self.store.may_bring(namespace);
        let positions = if is_askable { walk.absent(chunks) } else { Vec::new() };
        Missing { positions, from_siblings, from_peers, from_objects }
    }

    /// Finds the places of the missing chunks, then takes the next step.
    pub(super) fn locate(&mut self, purpose: LocatePurpose, missing: Missing, cause: Cause) {
        let located = Located { positions: missing.positions.clone(), ..Located::default() };
        let until = Duration::ZERO;
        let mut question = ChunkSearch { purpose, cause, missing, located, asks: Asks::Siblings, until };
        let Some((fingerprint, chunks)) = self.chunks_of(&question, 0..question.located.positions.len())
        else {
            return self.located(question);
        };
        if question.missing.from_siblings {
            question.asks = Asks::Siblings;
            let question = self.ask(question);
            return self.effects.push_back(Effect::FindSiblings { question, fingerprint, chunks });
        }
        question.located.holders = vec![Holders::default(); chunks.len()];
        self.ask_directory(question);
    }

    /// Asks the directory a second time for chunks whose holders did not have them: they may have moved to a reader.
    pub(crate) fn ask_again(&mut self, ids: Vec<FetchId>) {
        let Some(first) = ids.first().and_then(|id| self.bring.fetches.get(id)) else { return };
        let (fingerprint, cause) = (first.fingerprint, first.cause.child("find_holders"));
        let mut chunks = Vec::with_capacity(ids.len());
        for id in &ids {
            if let Some(fetch) = self.bring.fetches.get_mut(id) {
                fetch.is_asked_again = true;
                chunks.push(fetch.wanted.chunk);
            }
        }
        if self.bring.sources.peers.is_none() {
            return self.order_fetches(ids);
        }
        let question = self.ask(ChunkSearch {
            purpose: LocatePurpose::Again(ids),
            cause: Cause::default(),
            missing: Missing::default(),
            located: Located::default(),
            asks: Asks::Directory,
            until: Duration::ZERO,
        });
        self.find_holders(question, fingerprint, chunks, cause);
    }

    /// Asks the directory who else has the chunks that a drain is to move.
    pub(crate) fn ask_for_drain(&mut self, fingerprint: Fingerprint, chunks: Vec<ChunkRef>) -> QuestionId {
        let question = self.ask(ChunkSearch {
            purpose: LocatePurpose::Drain,
            cause: Cause::default(),
            missing: Missing::default(),
            located: Located::default(),
            asks: Asks::Directory,
            until: Duration::ZERO,
        });
        let cause = Cause::default();
        self.find_holders(question, fingerprint, chunks, cause);
        question
    }

    /// Takes the answer of this node's other actors.
    pub(crate) fn siblings_found(&mut self, number: QuestionId, holders: Vec<Holders>) {
        let Some(mut question) = self.answered(number, |asks| matches!(asks, Asks::Siblings)) else { return };
        question.located.holders = holders;
        question.located.holders.resize(question.located.positions.len(), Holders::default());
        self.ask_directory(question);
    }

    /// Takes the directory's answer.
    pub(crate) fn holders_found(&mut self, number: QuestionId, holders: Vec<Holders>) {
        let Some(mut question) = self.answered(number, |asks| matches!(asks, Asks::Directory)) else {
            return;
        };
        match question.purpose {
            LocatePurpose::Again(ids) => return self.found_again(ids, holders),
            LocatePurpose::Drain => return self.drain_located(number, &holders),
            _ => {}
        }
        let unheld: Vec<usize> = question.located.unheld().collect();
        if matches!(question.purpose, LocatePurpose::Lookup(..)) {
            self.remember_holders(&question, &unheld, &holders);
        }
        unheld.into_iter().zip(holders).for_each(|(at, others)| question.located.holders[at] = others);
        self.ask_objects(question);
    }

    /// Notes that the homes of some chunks of a question do not answer: the answer that follows says nothing about these chunks.
    /// `places` are their indexes in the question; if it is empty, no home answered.
    pub fn homes_are_silent(&mut self, number: QuestionId, places: &[u32]) {
        let Some(ChunkSearch { located, .. }) = self.bring.questions.get_mut(&number) else { return };
        let asked: Vec<u32> = located.unheld().map(|at| located.positions[at]).collect();
        located.unanswered = match places {
            [] => asked,
            places => places.iter().filter_map(|&place| asked.get(place as usize).copied()).collect(),
        };
    }

    /// Takes the object store's answer.
    pub(crate) fn stored_found(&mut self, number: QuestionId, found: &[Option<bool>]) {
        let Some(mut question) = self.answered(number, |asks| matches!(asks, Asks::Objects(_))) else {
            return;
        };
        let Asks::Objects(keys) = &question.asks else { return };
        let namespace = question.purpose.chain().map(|(namespace, _)| namespace);
        let is_flat = namespace.is_some_and(|namespace| self.store.blocks_of(namespace).1);
        for (&(position, key), &is_there) in keys.iter().zip(found) {
            match is_there {
                Some(true) => {
                    self.bring.known.set(key, Fact::Present, self.now);
                    question.located.stored.push(position);
                }
                Some(false) => self.bring.known.set(key, Fact::Absent, self.now),
                None => {}
            }
            if is_there != Some(true) && !is_flat {
                // The answer says nothing about the chunks behind the hole.
                break;
            }
        }
        question.located.stored.sort_unstable();
        self.located(question);
    }

    /// Asks the directory for chunks that no sibling has, unless a lookup has just found them.
    fn ask_directory(&mut self, mut question: ChunkSearch) {
        if !question.missing.from_peers {
            return self.ask_objects(question);
        }
        if !matches!(question.purpose, LocatePurpose::Lookup(..)) {
            self.recall_holders(&mut question);
        }
        let unheld: Vec<usize> = question.located.unheld().collect();
        if unheld.is_empty() {
            return self.ask_objects(question);
        }
        let Some((fingerprint, chunks)) = self.chunks_of(&question, unheld) else {
            return self.located(question);
        };
        (question.asks, question.located.took_time) = (Asks::Directory, true);
        let cause = question.cause.child("find_holders");
        let question = self.ask(question);
        self.find_holders(question, fingerprint, chunks, cause);
    }

    fn find_holders(
        &mut self,
        question: QuestionId,
        fingerprint: Fingerprint,
        chunks: Vec<ChunkRef>,
        cause: Cause,
    ) {
        let tenant = self.store.tenant_of_namespace(&fingerprint).unwrap_or(TenantId(0));
        self.effects.push_back(Effect::FindHolders { question, fingerprint, tenant, chunks, cause });
    }

    /// Keeps the directory's answer to a lookup for the lease that follows.
    fn remember_holders(&mut self, question: &ChunkSearch, places: &[usize], holders: &[Holders]) {
        let Some((fingerprint, chunks)) = self.chunks_of(question, places.iter().copied()) else { return };
        let now = self.millis();
        for (key, holders) in row_keys(&fingerprint, &chunks).into_iter().zip(holders) {
            if !holders.is_empty() {
                self.bring.heard_of.insert(key, holders.clone(), now);
            }
        }
    }

    /// Fills in the holders that a lookup has just found.
    fn recall_holders(&self, question: &mut ChunkSearch) {
        let unheld: Vec<usize> = question.located.unheld().collect();
        if self.bring.heard_of.is_empty() || unheld.is_empty() {
            return;
        }
        let Some((fingerprint, chunks)) = self.chunks_of(question, unheld.iter().copied()) else { return };
        let now = self.millis();
        for (at, key) in unheld.into_iter().zip(row_keys(&fingerprint, &chunks)) {
            if let Some(holders) = self.bring.heard_of.get(&key, now) {
                question.located.holders[at].clone_from(holders);
            }
        }
    }

    /// Forgets that a holder has chunks, because it did not give them.
    pub(super) fn forget_holder(&mut self, holder: Holder, fingerprint: &Fingerprint, chunks: &[ChunkRef]) {
        if !self.bring.heard_of.is_empty() {
            let now = self.millis();
            self.bring.heard_of.not_held(holder, &row_keys(fingerprint, chunks), now);
        }
    }

    /// Asks the object store for chunks that no node has, unless the answer is known already. A chain counts up to its first
    /// hole.
    fn ask_objects(&mut self, mut question: ChunkSearch) {
        if !question.missing.from_objects || !self.bring.object_is_open {
            return self.located(question);
        }
        let Some((namespace, chain)) = question.purpose.chain() else { return };
        let Some(fingerprint) = self.store.fingerprint(namespace) else { return self.located(question) };
        let (blocks, is_flat) = self.store.blocks_of(namespace);
        let (mut stored, mut unknown) = (Vec::new(), Vec::new());
        for at in question.located.unheld() {
            let position = question.located.positions[at];
            let key = ChunkKey { fingerprint, hash: chain.hashes[position as usize] };
            match self.bring.known.get(&key, self.now) {
                Some(Fact::Present) if unknown.is_empty() || is_flat => stored.push(position),
                Some(Fact::Present) | None => unknown.push((position, key)),
                Some(_) if is_flat => {}
                Some(_) => break,
            }
        }
        let chunks = unknown.iter().map(|&(position, _)| chain.chunk(position as usize)).collect();
        question.located.stored = stored;
        if unknown.is_empty() {
            return self.located(question);
        }
        (question.asks, question.located.took_time) = (Asks::Objects(unknown), true);
        let question = self.ask(question);
        self.effects.push_back(Effect::FindStored { question, fingerprint, chunks, blocks });
    }

    /// Ends a search, and takes the step that waited for it.
    fn located(&mut self, ChunkSearch { purpose, cause, located, .. }: ChunkSearch) {
        let (request, done) = match purpose {
            LocatePurpose::Lookup(request, ask) => (request, self.look_up_located(request, ask, &located)),
            LocatePurpose::Lease(request, ask) => {
                (request, self.lease_located(request, &ask, &located, &cause))
            }
            LocatePurpose::Prefetch(request, ask) => {
                (request, self.start_prefetch(request, ask, &located, &cause))
            }
            LocatePurpose::Again(_) | LocatePurpose::Drain => return,
        };
        self.refuse(request, done);
    }

    /// Ends the questions whose deadline has passed, without the late answers.
    pub(crate) fn answer_late_questions(&mut self) {
        let late = self.bring.questions.iter().filter(|(_, question)| question.until <= self.now);
        let mut late: Vec<QuestionId> = late.map(|(&number, _)| number).collect();
        late.sort_unstable();
        for number in late {
            match self.bring.questions.get(&number).map(|question| &question.asks) {
                Some(Asks::Siblings) => self.siblings_found(number, Vec::new()),
                Some(Asks::Directory) => {
                    self.homes_are_silent(number, &[]);
                    self.holders_found(number, Vec::new());
                }
                Some(Asks::Objects(_)) => self.stored_found(number, &[]),
                None => {}
            }
        }
    }

    fn found_again(&mut self, ids: Vec<FetchId>, holders: Vec<Holders>) {
        for (id, holders) in ids.iter().zip(holders) {
            let Some(fetch) = self.bring.fetches.get_mut(id) else { continue };
            fetch.copies = holders.len();
            fetch.candidates = holders;
        }
        self.order_awaited(ids);
    }

    /// The chunks at some of a question's positions, and their namespace; `None` if nobody registered the namespace.
    fn chunks_of(
        &self,
        question: &ChunkSearch,
        places: impl IntoIterator<Item = usize>,
    ) -> Option<(Fingerprint, Vec<ChunkRef>)> {
        let (namespace, chain) = question.purpose.chain()?;
        let chunk = |at: usize| chain.chunk(question.located.positions[at] as usize);
        Some((self.store.fingerprint(namespace)?, places.into_iter().map(chunk).collect()))
    }

    fn ask(&mut self, question: ChunkSearch) -> QuestionId {
        let number = QuestionId(self.bring.next_number());
        let until = self.now + self.bring.load_deadline();
        self.bring.questions.insert(number, ChunkSearch { until, ..question });
        number
    }

    /// Takes out the search that an answer belongs to, if the search waits for this kind of answer.
    fn answered(&mut self, number: QuestionId, is_asked: impl Fn(&Asks) -> bool) -> Option<ChunkSearch> {
        let is_asked = is_asked(&self.bring.questions.get(&number)?.asks);
        is_asked.then(|| self.bring.questions.remove(&number)).flatten()
    }
}
