//! The requests of a history's engines: writes, reads, follows, pins, reports, and lies.

use super::*;

impl History {
    pub(super) fn asks(&mut self, at: usize, chunks: (Vec<ChunkHash>, Fingerprint), ask: Request) {
        self.last_request += 1;
        let (session, (hashes, fingerprint)) = (self.sessions[at].session, chunks);
        let request = RequestId { session, number: self.last_request };
        self.requests
            .insert(request, AskedFor { session, ask: ask.clone(), hashes, fingerprint, is_over: false });
        self.tell(Event::Asked { request, ask, cause: Cause::default() });
    }

    /// Sends a request that the history need not remember.
    pub(super) fn asks_only(&mut self, at: usize, ask: Request) {
        let fingerprint = self.spaces[0].fingerprint;
        self.asks(at, (Vec::new(), fingerprint), ask);
    }

    pub(super) fn reserve(&mut self, at: usize) {
        let (space, chain) = self.prompt(at as u16);
        let (hashes, attempt) = (chain.hashes.clone(), self.random.u64(..3));
        let (namespace, pools, priority) = (space.namespace, Vec::new(), self.random.i8(..3));
        let ask = Request::Reserve(Reserve { namespace, chain, priority, pools, attempt });
        self.asks(at, (hashes, space.fingerprint), ask);
    }

    /// Commits, hands over or gives up reserved chunks; now and then those of another session, in the wrong order, or from
    /// outside the window.
    pub(super) fn write_reserved(&mut self, at: usize) {
        let lies = self.random.u8(..20) == 0;
        let from = if lies { self.random.usize(..self.sessions.len()) } else { at };
        let reservations = &mut self.sessions[from].reservations;
        if reservations.is_empty() {
            return;
        }
        let which = self.random.usize(..reservations.len());
        let Reservation { number: reservation, ref chunks, given, .. } = reservations[which];
        let (chunks, source) = (chunks.clone(), if self.random.u8(..40) == 0 { u64::MAX } else { 0 });
        let (is_in_place, sources) = (given == 2, vec![source; chunks.len()]);
        match self.random.u8(..10) {
            0 => {
                reservations.swap_remove(which);
                self.asks_only(at, Request::Abort(reservation));
            }
            1..5 if !is_in_place || lies => {
                reservations[which].given += 1;
                let (pool, from_layer, to_layer) = (0, given, given + 1);
                let ask = HandOver { reservation, chunks, pool, from_layer, to_layer, sources };
                self.asks_only(at, Request::HandOver(ask));
            }
            _ if given == 1 && !lies => {}
            _ => {
                if self.random.u8(..4) > 0 {
                    reservations.swap_remove(which);
                }
                let sources = if is_in_place { Vec::new() } else { sources };
                self.asks_only(at, Request::Commit(Commit { reservation, chunks, sources }));
            }
        }
    }

    pub(super) fn look_for(&mut self, at: usize) {
        let (space, chain) = self.prompt(at as u16);
        let (namespace, hashes) = (space.namespace, chain.hashes.clone());
        let lookup = |chain| Lookup {
            namespace,
            chain,
            prompt_tokens: 1 << 20,
            skip_read: false,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: None,
            prefill_tokens_per_second: None,
        };
        let ask = match self.random.u8(..3) {
            0 => Request::Lookup(lookup(chain)),
            1 => Request::Prefetch(lookup(chain)),
            _ => Request::Lease(Lease { namespace, chain }),
        };
        self.asks(at, (hashes, space.fingerprint), ask);
    }

    pub(super) fn collect_or_cancel(&mut self, at: usize) {
        let tickets = &mut self.sessions[at].tickets;
        if tickets.is_empty() {
            return;
        }
        let which = self.random.usize(..tickets.len());
        let (ticket, hashes, fingerprint) = tickets[which].clone();
        // Some tickets are collected or canceled twice, or canceled while they are collected.
        if self.random.u8(..3) > 0 {
            tickets.swap_remove(which);
        }
        if self.random.u8(..3) == 0 {
            return self.asks_only(at, Request::Cancel(ticket));
        }
        let wait = [Wait::BestEffort, Wait::Complete, Wait::TimeoutMs(30)][self.random.usize(..3)];
        self.asks_only(at, Request::Progress(ticket));
        self.asks(at, (hashes, fingerprint), Request::Collect(Collect { ticket, wait }));
    }

    /// Ends a lease or a follow.
    pub(super) fn let_go(&mut self, at: usize) {
        let Live { leases, follows, .. } = &mut self.sessions[at];
        let held = leases.keys().chain(follows.keys()).copied().min();
        let is_lie = self.random.u8(..20) == 0;
        let Some(number) = held.or(is_lie.then_some(7)) else { return };
        leases.remove(&number);
        follows.remove(&number);
        self.asks_only(at, Request::Release(number));
    }

    pub(super) fn follow(&mut self, at: usize) {
        let (space, chain) = self.prompt(at as u16);
        let hashes = chain.hashes.clone();
        let writer = self.random.bool().then(|| Writer { node: "b".to_owned(), device: 0 });
        let (attempt, patience_ms) = (self.random.u64(..3), self.random.u64(100..2_000));
        let ask = Follow { namespace: space.namespace, chain, writer, attempt, patience_ms };
        self.asks(at, (hashes, space.fingerprint), Request::Follow(ask));
    }

    pub(super) fn ask_in_place(&mut self, at: usize) {
        let follows = &self.sessions[at].follows;
        let Some((&follow, followed)) = follows.iter().min_by_key(|(number, _)| **number) else { return };
        let (hashes, fingerprint) = (followed.hashes.clone(), followed.space.fingerprint);
        let (chunks, layers, wait_ms) = (hashes.len() as u32, self.random.u32(..2), self.random.u64(..300));
        let ask = Request::AskInPlace(AskInPlace { follow, chunks, layers, wait_ms });
        self.asks(at, (hashes, fingerprint), ask);
    }

    pub(super) fn pin_or_unpin(&mut self, at: usize) {
        if let Some(pin) = self.sessions[at].pins.pop() {
            return self.asks_only(at, Request::Unpin(pin));
        }
        let (space, chain) = self.prompt(at as u16);
        let (namespace, duration_ms) = (space.namespace, self.random.u64(..500));
        self.asks_only(at, Request::Pin(Pin { namespace, chain, duration_ms }));
    }

    /// Makes an engine or a peer report damaged chunks.
    pub(super) fn report(&mut self, at: usize) {
        let (space, chain) = self.prompt(at as u16);
        let (namespace, fingerprint) = (space.namespace, space.fingerprint);
        if self.random.bool() {
            let hash = chain.hashes[chain.len() - 1];
            return self.asks_only(at, Request::ReportDamage(ReportDamage { namespace, hash }));
        }
        let by = Reporter::Peer("b".to_owned());
        self.tell(Event::Damaged { by, fingerprint, hashes: chain.hashes });
    }
}
