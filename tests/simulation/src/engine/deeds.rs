//! The deeds of engines, one after the other.

use std::time::Duration;

use larder_core::Event;
use larder_core::store::ids::{ProcessId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_protocol::checksum::BlockKey;
use larder_protocol::handoff::{AskInPlace, Follow, HandOver, Writer};
use larder_protocol::lane::{AskCopy, CopyWords, LoadPages, SavePages};
use larder_protocol::session::{Collect, Commit, Lease, Lookup, Pin, Register, Request, Reserve, Wait};
use larder_protocol::{Chain, PoolSet};

use super::{Deed, Loading, Session, WINDOW_BYTES, What, Writing};
use crate::actor::limits;
use crate::content::content;
use crate::gpu::PAGES;
use crate::space::TENANTS;
use crate::world::{At, World};

impl World {
    pub(crate) fn engine_does(&mut self, engine: usize, life: u64, deed: Deed) {
        if self.engines[engine].life != life {
            return;
        }
        match deed {
            Deed::Start => self.engine_starts(engine),
            Deed::Wake => self.wake(engine),
            Deed::Release(lease) => self.let_go(engine, lease),
            Deed::Collect { space, chain, ticket } => self.collect(engine, space, &chain, ticket),
            Deed::Read { space, chain } => {
                let Some(namespace) = self.space_number(engine, space) else { return };
                let ask = Request::Lease(Lease { namespace, chain: chain.clone() });
                self.ask(engine, (space, &chain, What::Lease), ask);
            }
            Deed::Write { space, chain, reservation, chunks, pools } => {
                self.write_reserved(engine, space, &chain, reservation, &chunks, &pools);
            }
            Deed::NextLayer { space, chain, writing } => self.next_layer(engine, space, &chain, writing),
            Deed::AskInPlace { space, chain, follow, layers } => {
                let (chunks, wait_ms) = (chain.len() as u32, self.random.u64(..300));
                let ask = Request::AskInPlace(AskInPlace { follow, chunks, layers, wait_ms });
                self.ask(engine, (space, &chain, What::InPlace(follow)), ask);
            }
            Deed::AskCopy { space, chain, copy, lease, writing } => {
                let ask = AskCopy { copy, layers: self.random.u32(1..3), wait_ms: self.random.u64(1..300) };
                let what = What::Copy { lease, writing, copy };
                self.ask(engine, (space, &chain, what), Request::AskCopy(ask));
            }
            Deed::Unpin(pin) => self.ask_only(engine, Request::Unpin(pin)),
        }
    }

    /// A request that the engine need not remember.
    pub(super) fn ask_only(&mut self, engine: usize, ask: Request) {
        let nothing = self.spaces[0].chain("");
        self.ask(engine, (0, &nothing, What::Other), ask);
    }

    fn engine_starts(&mut self, engine: usize) {
        let number = self.next_number();
        let (actor, tenant) =
            (self.random.u16(..self.settings.actors), self.random.u16(..TENANTS.len() as u16));
        let window = if self.random.u8(..12) == 0 { 2_048 } else { WINDOW_BYTES };
        let host = self.engines[engine].host;
        let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else {
            let after = self.some_us(50_000, 400_000);
            return self.will(engine, after, Deed::Start);
        };
        let (at, process) = (At { life, actor }, ProcessId(number as u32));
        let Some(found) = self.actor(at) else { return };
        let id = found.core.open_session(TenantId(tenant), process, window);
        found.windows.insert(id, std::collections::BTreeMap::new());
        let store = found.life;
        let found = &mut self.engines[engine];
        (found.actor, found.tenant, found.process) = (actor, tenant, process);
        let (spaces, tensors) = (Default::default(), Default::default());
        found.session = Some(Session {
            at,
            store,
            id,
            spaces,
            window_next: 0,
            mapped: std::collections::BTreeMap::new(),
            tensors,
            loading: None,
            is_saving: false,
        });
        for space in 0..self.spaces.len() {
            if self.spaces[space].tenant == tenant {
                let ask = self.registration(space);
                let nothing = self.spaces[space].chain("");
                self.ask(engine, (space, &nothing, What::Register), Request::Register(ask));
            }
        }
        self.will(engine, Duration::from_millis(2), Deed::Wake);
    }

    pub(super) fn registration(&self, space: usize) -> Register {
        let spec = self.spaces[space].spec.clone();
        let block_bytes = spec.pools.iter().map(larder_protocol::PoolSpec::block_bytes).collect();
        Register { slices: (0..spec.slices).collect(), block_bytes, spec }
    }

    /// An engine turns to another prompt.
    fn wake(&mut self, engine: usize) {
        if !self.is_busy {
            return;
        }
        let after = self.some_us(5_000, 90_000);
        self.will(engine, after, Deed::Wake);
        let known = self.engines[engine].session.as_ref().map(|session| session.spaces.clone());
        let known: Vec<(usize, u32)> = known.unwrap_or_default().into_iter().collect();
        if known.is_empty() || self.engines[engine].asked.len() > 24 {
            return;
        }
        if self.engines[engine].lies && self.random.u8(..3) > 0 {
            return self.lie(engine);
        }
        let (space, namespace) = known[self.random.usize(..known.len())];
        let chain = self.spaces[space].prompt(&mut self.random);
        match self.random.u32(..1_000) {
            0..250 => self.look_for(engine, space, chain, namespace),
            250..430 => {
                let ask = Request::Lease(Lease { namespace, chain: chain.clone() });
                self.ask(engine, (space, &chain, What::Lease), ask);
            }
            430..800 => self.reserve(engine, space, &chain, namespace),
            800..870 => self.follow(engine, space, chain, namespace),
            870..910 => {
                let duration_ms = self.random.u64(..4_000);
                let ask = Request::Pin(Pin { namespace, chain: chain.clone(), duration_ms });
                self.ask(engine, (space, &chain, What::Pin), ask);
            }
            910..975 => self.know_tensors(engine, space, namespace),
            975..994 => {
                let hash = chain.hashes[chain.len() - 1];
                let ask = larder_protocol::session::ReportDamage { namespace, hash };
                self.ask_only(engine, Request::ReportDamage(ask));
            }
            994..996 => self.change_policy(),
            996 => self.change_limits(),
            997 => self.change_tenants(),
            998 => self.purge(space),
            _ => self.engine_dies(engine),
        }
    }

    /// A node reads its configuration again, with different limits.
    fn change_limits(&mut self) {
        let host = self.random.usize(..self.settings.nodes);
        let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else { return };
        let mut new = limits(&self.settings, false);
        new.capacity_chunks = self.random.bool().then(|| self.random.u64(4..24));
        let tenths = |bytes: &mut u64, tenths| *bytes = *bytes * tenths / 8;
        new.tenant_bytes.iter_mut().for_each(|bytes| tenths(bytes, self.random.u64(2..=8)));
        let share = self.random.u64(4..=8);
        tenths(&mut new.high_watermark_bytes, share);
        tenths(&mut new.low_watermark_bytes, share);
        for actor in 0..self.settings.actors {
            self.tell_soon_in_any_life(At { life, actor }, Event::LimitsAre(Box::new(new.clone())));
        }
    }

    /// A tenant without engines comes to a node, or leaves it.
    fn change_tenants(&mut self) {
        let host = self.random.usize(..self.settings.nodes);
        let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else { return };
        let bytes = limits(&self.settings, false).tenant_bytes;
        let mut tenants: Vec<(String, u64)> =
            TENANTS.map(str::to_owned).into_iter().zip(bytes.clone()).collect();
        tenants.push(("c".to_owned(), if self.random.bool() { bytes[0] } else { 0 }));
        for actor in 0..self.settings.actors {
            self.tell_soon_in_any_life(At { life, actor }, Event::TenantsAre(tenants.clone()));
        }
    }

    /// An admin makes a node evict by another policy.
    fn change_policy(&mut self) {
        let host = self.random.usize(..self.settings.nodes);
        let policy = PolicyName::ALL[self.random.usize(..PolicyName::ALL.len())];
        let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else { return };
        for actor in 0..self.settings.actors {
            self.tell_soon_in_any_life(At { life, actor }, Event::PolicyIs(policy));
        }
    }

    fn look_for(&mut self, engine: usize, space: usize, chain: Chain, namespace: u32) {
        let tokens = chain.len() as u64 * 16;
        let lookup = Lookup {
            namespace,
            chain: chain.clone(),
            prompt_tokens: tokens + self.random.u64(1..16),
            skip_read: self.random.u8(..30) == 0,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: (self.random.u8(..10) == 0).then_some(500),
            prefill_tokens_per_second: (self.random.u8(..4) == 0).then_some(200.0),
        };
        let is_prefetch = self.random.bool();
        let what = if is_prefetch { What::Prefetch } else { What::Lookup };
        let ask = if is_prefetch { Request::Prefetch(lookup) } else { Request::Lookup(lookup) };
        self.ask(engine, (space, &chain, what), ask);
    }

    fn collect(&mut self, engine: usize, space: usize, chain: &Chain, ticket: u64) {
        match self.random.u8(..8) {
            0 => self.ask_only(engine, Request::Cancel(ticket)),
            kind => {
                if kind < 3 {
                    self.ask_only(engine, Request::Progress(ticket));
                }
                let wait = [Wait::BestEffort, Wait::Complete, Wait::TimeoutMs(60)][self.random.usize(..3)];
                let ask = Request::Collect(Collect { ticket, wait });
                self.ask(engine, (space, chain, What::Lease), ask);
                if kind == 7 {
                    self.ask_only(engine, Request::Cancel(ticket));
                }
            }
        }
    }

    pub(super) fn reserve(&mut self, engine: usize, space: usize, chain: &Chain, namespace: u32) {
        let has_pools = self.spaces[space].spec.pools.len() > 1 && self.random.bool();
        let last = chain.len() - 1;
        let pools = |at| if at == last { PoolSet::first(2) } else { PoolSet::first(1) };
        let pools = if has_pools { (0..chain.len()).map(pools).collect() } else { Vec::new() };
        let attempt = if self.random.u8(..4) == 0 {
            self.engines[engine].attempts += 1;
            self.engines[engine].attempts
        } else {
            0
        };
        let priority = self.random.i8(..3);
        let ask = Reserve { namespace, chain: chain.clone(), priority, pools, attempt };
        self.ask(engine, (space, chain, What::Reserve { attempt }), Request::Reserve(ask));
    }

    /// Commits, hands over, saves from the GPU, gives up, or forgets the reserved chunks.
    fn write_reserved(
        &mut self,
        engine: usize,
        space: usize,
        chain: &Chain,
        reservation: u64,
        chunks: &[u32],
        pools: &[PoolSet],
    ) {
        let every = self.spaces[space].rules.every();
        let mut writing = Writing { reservation, chunks: [0; 2], layer: 0 };
        for (at, &chunk) in chunks.iter().enumerate().filter(|(_, chunk)| **chunk < 64) {
            for pool in pools.get(at).copied().unwrap_or(every).iter() {
                writing.chunks[pool] |= 1 << chunk;
            }
        }
        let has_tensors =
            self.engines[engine].session.as_ref().is_some_and(|session| session.tensors.contains_key(&space));
        match self.random.u8(..20) {
            0 => self.ask_only(engine, Request::Abort(reservation)),
            1 => {}
            2 => self.engine_dies(engine),
            3..9 => self.next_layer(engine, space, chain, writing),
            9..13 if has_tensors => self.save(engine, space, chain, writing),
            17 => self.commit_and_abort(engine, space, chain, writing, pools),
            kind => {
                // In one message or two.
                let half = if kind == 19 { chunks.len() / 2 } else { chunks.len() };
                for (from, to) in [(0, half), (half, chunks.len())] {
                    if from < to {
                        let pools = pools.get(from..to).unwrap_or_default();
                        self.commit(engine, space, chain, reservation, &chunks[from..to], pools);
                        if kind == 18 {
                            // The engine did not notice that it had committed already.
                            self.commit(engine, space, chain, reservation, &chunks[from..to], pools);
                        }
                    }
                }
            }
        }
    }

    /// Commits, and gives the reservation up before the answer.
    fn commit_and_abort(
        &mut self,
        engine: usize,
        space: usize,
        chain: &Chain,
        writing: Writing,
        pools: &[PoolSet],
    ) {
        let window =
            |world: &Self| world.engines[engine].session.as_ref().map_or(0, |session| session.window_next);
        let from = window(self);
        let chunks = writing.all_chunks();
        self.commit(engine, space, chain, writing.reservation, &chunks, pools);
        let what = What::Abort { from, to: window(self) };
        self.ask(engine, (space, chain, what), Request::Abort(writing.reservation));
    }

    fn commit(
        &mut self,
        engine: usize,
        space: usize,
        chain: &Chain,
        reservation: u64,
        chunks: &[u32],
        pools: &[PoolSet],
    ) {
        let of = self.spaces[space].clone();
        let every = of.rules.every();
        let mut sources = Vec::new();
        for (at, &chunk) in chunks.iter().enumerate() {
            let pools = pools.get(at).copied().unwrap_or(every);
            for key in of.blocks_of(chain.hashes[chunk as usize], pools.and(every)) {
                let bytes = of.block_bytes(key.pool.into());
                sources.push(self.write_window(engine, key, 0, bytes));
            }
        }
        let ask = Commit { reservation, chunks: chunks.to_vec(), sources };
        self.ask(engine, (space, chain, What::Written), Request::Commit(ask));
    }

    /// Hands over the next layer, or commits if there is none.
    fn next_layer(&mut self, engine: usize, space: usize, chain: &Chain, writing: Writing) {
        let Writing { reservation, layer, .. } = writing;
        let of = self.spaces[space].clone();
        // One pool after the other.
        let pools = (0_u8..).zip(&of.spec.pools);
        let layers = pools.flat_map(|(pool, spec)| (0..spec.layers).map(move |at| (pool, at)));
        let mut left = (0..).zip(layers).skip(layer as usize);
        let next = left.find(|&(_, (pool, _))| writing.chunks[usize::from(pool)] != 0);
        let Some((layer, (pool, from_layer))) = next else {
            let ask = Commit { reservation, chunks: writing.all_chunks(), sources: Vec::new() };
            return self.ask(engine, (space, chain, What::Written), Request::Commit(ask));
        };
        let chunks = writing.chunks_of(pool);
        let layer_bytes = of.layer_bytes(pool.into());
        let mut sources = Vec::new();
        for &chunk in &chunks {
            for slice in 0..of.spec.slices {
                let hash = chain.hashes[chunk as usize];
                let key = BlockKey { fingerprint: of.fingerprint, hash, slice, pool };
                let offset = u64::from(from_layer) * layer_bytes;
                sources.push(self.write_window(engine, key, offset, layer_bytes));
            }
        }
        let ask = HandOver { reservation, chunks, pool, from_layer, to_layer: from_layer + 1, sources };
        let what = What::Layers(Writing { layer: layer + 1, ..writing });
        self.ask(engine, (space, chain, what), Request::HandOver(ask));
    }

    fn follow(&mut self, engine: usize, space: usize, chain: Chain, namespace: u32) {
        let others = self.settings.nodes;
        let writer = (self.random.u8(..4) > 0).then(|| {
            let host = self.random.usize(..others);
            (host, Writer { node: self.host_name(host), device: self.random.u16(..self.settings.actors) })
        });
        let patience_ms = self.random.u64(100..1_500);
        let attempt = self.random.u64(..2);
        // Chunks that are written at this node need no other writer.
        let writer = writer.filter(|(host, _)| *host != self.engines[engine].host);
        if let Some((host, writer)) = &writer
            && self.random.u8(..4) > 0
        {
            self.begin_prefill(*host, writer.device, space, &chain);
        }
        let writer = writer.map(|(_, writer)| writer);
        let ask = Follow { namespace, chain: chain.clone(), writer, attempt, patience_ms };
        self.ask(engine, (space, &chain, What::Follow), Request::Follow(ask));
    }

    /// An engine of another node begins to write the followed chunks.
    fn begin_prefill(&mut self, host: usize, actor: u16, space: usize, chain: &Chain) {
        let is_it = |engine: &super::Engine| {
            engine.host == host
                && engine
                    .session
                    .as_ref()
                    .is_some_and(|session| session.at.actor == actor && session.spaces.contains_key(&space))
        };
        if let Some(engine) = self.engines.iter().position(is_it)
            && let Some(namespace) = self.space_number(engine, space)
        {
            self.reserve(engine, space, chain, namespace);
        }
    }

    fn let_go(&mut self, engine: usize, lease: u64) {
        let found = &self.engines[engine];
        if let Some(session) = &found.session {
            let (at, id) = (session.at, session.id);
            self.check_lease(at, id, lease);
        }
        self.ask_only(engine, Request::Release(lease));
    }

    /// Registers tensors for a namespace of one slice.
    fn know_tensors(&mut self, engine: usize, space: usize, namespace: u32) {
        self.coverage.note("Request::RegisterTensors");
        if self.spaces[space].spec.slices > 1 || self.spaces[space].spec.pools.len() > 1 {
            return;
        }
        let Some(session) = &self.engines[engine].session else { return };
        let (at, id) = (session.at, session.id);
        let Some(actor) = self.actor(at) else { return };
        match actor.core.may_know_tensors(id, namespace, 0) {
            Ok(facts) => {
                let tensors = actor.gpu.know(id, facts, namespace, 0);
                let device = tensors.id;
                if let Ok(number) = actor.core.know_tensors(id, tensors)
                    && let Some(session) = &mut self.engines[engine].session
                {
                    session.tensors.insert(space, (device, number));
                }
            }
            Err(refused) => self.coverage.note(crate::coverage::refused(&refused)),
        }
    }

    /// Two pages for each of some chunks: loads go into the first half of all pages, saves come from the second half.
    fn some_pages(&mut self, chunks: usize, is_load: bool) -> Vec<u32> {
        let half = if is_load { 0..PAGES / 2 } else { PAGES / 2..PAGES };
        let mut pages: Vec<u32> = half.collect();
        self.random.shuffle(&mut pages);
        pages.truncate(2 * chunks);
        pages
    }

    /// Saves reserved chunks from the engine's pages.
    fn save(&mut self, engine: usize, space: usize, chain: &Chain, writing: Writing) {
        let reservation = writing.reservation;
        let mut chunks = writing.chunks_of(0);
        chunks.truncate(PAGES as usize / 4);
        let pages = self.some_pages(chunks.len(), false);
        let of = self.spaces[space].clone();
        let Some(session) = &mut self.engines[engine].session else { return };
        let Some(&(device, tensors)) = session.tensors.get(&space) else { return };
        if std::mem::replace(&mut session.is_saving, true) {
            return;
        }
        let at = session.at;
        for (number, &chunk) in chunks.iter().enumerate() {
            let hash = chain.hashes[chunk as usize];
            let key = BlockKey { fingerprint: of.fingerprint, hash, slice: 0, pool: 0 };
            let block = content(&key, 0, of.block_bytes(0));
            if let Some(actor) = self.actor(at) {
                actor.gpu.fill(device, &pages[2 * number..2 * number + 2], &block);
            }
        }
        let bits = chunks.iter().fold(0, |bits, chunk| bits | 1 << chunk);
        let to_layer = of.spec.pools[0].layers;
        let words = CopyWords::default();
        let ask = SavePages { reservation, chunks, tensors, pages, from_layer: 0, to_layer, words };
        let what = What::Save(Writing { reservation, chunks: [bits, 0], layer: to_layer });
        self.ask(engine, (space, chain, what), Request::SavePages(ask));
    }

    /// Loads the leased chunks into the engine's pages.
    pub(super) fn load(&mut self, engine: usize, space: usize, chain: &Chain, lease: u64, chunks: usize) {
        let pages = self.some_pages(chunks, true);
        let Some(session) = &mut self.engines[engine].session else { return };
        let Some(&(device, tensors)) = session.tensors.get(&space) else { return };
        if session.loading.is_some() || chunks > PAGES as usize / 4 {
            return;
        }
        session.loading = Some(Loading { device, space, chain: chain.clone(), pages: pages.clone() });
        let to_layer = self.spaces[space].spec.pools[0].layers;
        let by_layer = self.random.bool();
        let (from_layer, first_page, words) = (0, 0, CopyWords::default());
        let ask = LoadPages { lease, tensors, pages, first_page, from_layer, to_layer, by_layer, words };
        self.ask(engine, (space, chain, What::Load { lease }), Request::LoadPages(ask));
    }
}
