//! Engines that lie: wrong names, sizes, numbers and places, requests out of order.

use larder_core::store::ids::SessionId;
use larder_protocol::chain::{Links, Start};
use larder_protocol::describe::Describe;
use larder_protocol::handoff::{Follow, HandOver};
use larder_protocol::lane::{AskCopy, CopyWords, LoadPages, SavePages};
use larder_protocol::session::{Commit, Hello, Lease, Request, Reserve};
use larder_protocol::{Chain, Fingerprint, PoolSet, PoolSpec, TraceContext};

use super::What;
use crate::world::{At, World};

impl World {
    /// An engine sends a false message.
    pub(super) fn lie(&mut self, engine: usize) {
        let known = self.engines[engine].session.as_ref().map(|session| session.spaces.clone());
        let known: Vec<(usize, u32)> = known.unwrap_or_default().into_iter().collect();
        if known.is_empty() {
            return;
        }
        let (space, namespace) = known[self.random.usize(..known.len())];
        let chain = self.spaces[space].prompt(&mut self.random);
        match self.random.u8(..12) {
            0 | 1 => self.misname(engine, space, namespace, &chain),
            2 => self.lie_of_namespace(engine, space),
            3..6 => self.lie_of_writing(engine, space, namespace, &chain),
            6 | 7 => self.lie_of_pages(engine, space, namespace),
            8 => self.ask_only(engine, Request::Lease(Lease { namespace: 999, chain })),
            9 => {
                let hello = Hello { version: 5, client: "liar".into(), device: None, window_bytes: 0 };
                self.ask_only(engine, Request::Hello(hello));
                let trace = TraceContext { trace_id: [1; 16], span_id: [1; 8], flags: 1 };
                self.ask_only(engine, Request::Trace(trace));
                self.ask_only(engine, Request::Name("liar".into()));
                let describe = Describe { fingerprint: Fingerprint([1; 32]), chunks: Vec::new() };
                self.ask_only(engine, Request::Describe(describe));
            }
            10 => {
                let number = self.random.u64(1..1_000);
                self.ask_only(engine, Request::Unpin(number));
                self.ask_only(engine, Request::Progress(number));
                self.ask_only(engine, Request::Abort(number));
                self.ask_only(engine, Request::Observe);
            }
            _ => {
                let (writer, attempt, patience_ms) = (None, 0, 200);
                let ask = Follow { namespace, chain: chain.clone(), writer, attempt, patience_ms };
                self.ask(engine, (space, &chain, What::Other), Request::Follow(ask));
            }
        }
    }

    /// Names a chunk after another parent: a node that knows the chunk must refuse.
    fn misname(&mut self, engine: usize, space: usize, namespace: u32, chain: &Chain) {
        let Links::Linked(start) = chain.links else { return };
        if chain.len() < 2 {
            return;
        }
        let hash = chain.hashes[chain.len() - 1];
        let links = Links::Linked(Start { anchor: hash, ..start });
        let wrong = Chain { links, hashes: vec![hash], anchor_before: None };
        let Some(session) = &self.engines[engine].session else { return };
        let (at, store) = (session.at, session.store);
        let (fingerprint, misnamed) = (self.spaces[space].fingerprint, wrong.chunk(0));
        let is_known = self.actor(at).is_some_and(|actor| {
            let is_it = |(of, chunk): (_, larder_protocol::ChunkRef)| {
                of == fingerprint && chunk.hash == hash && chunk != misnamed
            };
            actor.life == store && actor.core.store().held().any(is_it)
        });
        let priority = 0;
        let ask = Reserve { namespace, chain: wrong.clone(), priority, pools: Vec::new(), attempt: 0 };
        if is_known {
            // At once, so that no other event comes in between.
            return self.ask_at_once(engine, (space, &wrong, What::Misnamed), Request::Reserve(ask));
        }
        if self.random.bool() {
            // No node knows better here: the chunk is written, and contradicts what others write.
            return self.reserve(engine, space, &wrong, namespace);
        }
        let ask = Lease { namespace, chain: wrong.clone() };
        self.ask(engine, (space, &wrong, What::Other), Request::Lease(ask));
    }

    fn lie_of_namespace(&mut self, engine: usize, space: usize) {
        let mut ask = self.registration(space);
        match self.random.u8(..7) {
            0 => ask.spec.chunk_tokens = 0,
            1 => ask.block_bytes[0] += 8,
            2 => ask.block_bytes.push(8),
            3 => ask.slices = vec![9],
            4 => {
                ask.spec.pools[0] = PoolSpec { layer_bytes: 64 << 10, ..ask.spec.pools[0].clone() };
                ask.block_bytes[0] = ask.spec.pools[0].block_bytes();
            }
            5 => ask.spec.slices = 1_024,
            _ => {
                for number in 0..20 {
                    let mut other = self.registration(space);
                    other.spec.model = format!("x{number}");
                    self.ask_only(engine, Request::Register(other));
                }
                return;
            }
        }
        self.ask_only(engine, Request::Register(ask));
    }

    /// Commits and hands over chunks that are not reserved, or from empty places, or only parts. The bytes that the engine claims
    /// to have written are there.
    fn lie_of_writing(&mut self, engine: usize, space: usize, namespace: u32, chain: &Chain) {
        let reservation = self.engines[engine].last_lie;
        let Some((of, bait)) = self.engines[engine].bait.clone() else {
            // Makes a reservation for the next lies.
            let ask = Reserve { namespace, chain: chain.clone(), priority: 0, pools: Vec::new(), attempt: 0 };
            return self.ask(engine, (space, chain, What::Bait), Request::Reserve(ask));
        };
        let of = self.spaces[of].clone();
        let blocks = of.blocks_of(bait.hashes[0], of.rules.every()).count();
        let chunks = vec![0];
        let commit = |world: &mut Self, reservation, chunks, sources| {
            world.ask_only(engine, Request::Commit(Commit { reservation, chunks, sources }));
        };
        match self.random.u8(..7) {
            0 => commit(self, NO_RESERVATION, chunks, vec![0]),
            1 => commit(self, reservation, chunks, vec![0; blocks + 1]),
            2 => commit(self, reservation, chunks, vec![u64::MAX / 2; blocks]),
            3 => commit(self, reservation, vec![63], vec![0]),
            4 | 5 => {
                // Of one layer only, or of layers that do not exist.
                let from_layer = self.random.u32(..2) * 7;
                let layer_bytes = of.layer_bytes(0);
                let keys: Vec<_> = of.blocks_of(bait.hashes[0], PoolSet::first(1)).collect();
                let sources =
                    keys.into_iter().map(|key| self.write_window(engine, key, 0, layer_bytes)).collect();
                let (pool, to_layer) = (0, from_layer + 1);
                let ask =
                    HandOver { reservation, chunks: chunks.clone(), pool, from_layer, to_layer, sources };
                self.ask_only(engine, Request::HandOver(ask));
                // As soon as the commit is done, if it is.
                commit(self, reservation, chunks, Vec::new());
                if self.random.bool() {
                    self.engines[engine].bait = None;
                }
            }
            _ => {
                let pools = vec![PoolSet::first(1); chain.len() + 1];
                let ask = Reserve { namespace, chain: chain.clone(), priority: 0, pools, attempt: 0 };
                self.ask_only(engine, Request::Reserve(ask));
                self.engines[engine].bait = None;
            }
        }
    }

    fn lie_of_pages(&mut self, engine: usize, space: usize, namespace: u32) {
        let Some(session) = &self.engines[engine].session else { return };
        let tensors = session.tensors.values().next().map_or(9_999, |&(_, number)| number);
        let (at, id) = (session.at, session.id);
        let (words, by_layer, from_layer, first_page) = (CopyWords::default(), false, 0, 0);
        let load = |tensors, pages, to_layer| {
            let lease = 1;
            Request::LoadPages(LoadPages {
                lease,
                tensors,
                pages,
                first_page,
                from_layer,
                to_layer,
                by_layer,
                words,
            })
        };
        match self.random.u8(..6) {
            0 => self.ask_only(engine, load(9_999, vec![0, 1], 1)),
            1 => self.ask_only(engine, load(tensors, vec![99], 1)),
            2 => {
                // More pages than the engine's own lease covers.
                let lease = self.engines[engine].last_lease;
                let pages = (0..14).collect();
                let ask =
                    LoadPages { lease, tensors, pages, first_page, from_layer, to_layer: 1, by_layer, words };
                self.ask_only(engine, Request::LoadPages(ask));
            }
            3 => self.ask_only(engine, Request::AskCopy(AskCopy { copy: 123_456, layers: 1, wait_ms: 1 })),
            4 => self.know_too_many_tensors(at, id, namespace),
            _ if self.spaces[space].spec.slices > 1 => self.lie_of_slices(engine, space),
            _ => {}
        }
    }

    /// Registers more tensors than are allowed.
    fn know_too_many_tensors(&mut self, at: At, id: SessionId, namespace: u32) {
        for _ in 0..70 {
            let Some(actor) = self.actor(at) else { return };
            match actor.core.may_know_tensors(id, namespace, 0) {
                Ok(facts) => {
                    let known = actor.gpu.know(id, facts, namespace, 0);
                    // A request for these tensors gets only bytes that the engine itself wrote.
                    let _ = actor.core.know_tensors(id, known);
                }
                Err(refused) => return self.coverage.note(crate::coverage::refused(&refused)),
            }
        }
    }

    /// Saves pages of a session with several slices.
    fn lie_of_slices(&mut self, engine: usize, space: usize) {
        let Some(session) = &self.engines[engine].session else { return };
        let (at, id) = (session.at, session.id);
        let Some(&namespace) = session.spaces.get(&space) else { return };
        let reservation = self.engines[engine].last_lie;
        let Some(actor) = self.actor(at) else { return };
        let Ok(facts) = actor.core.may_know_tensors(id, namespace, 0) else { return };
        let known = actor.gpu.know(id, facts, namespace, 0);
        let Ok(tensors) = actor.core.know_tensors(id, known) else { return };
        let (from_layer, to_layer, words) = (0, 1, CopyWords::default());
        let ask = SavePages {
            reservation,
            chunks: vec![0],
            tensors,
            pages: vec![0, 1],
            from_layer,
            to_layer,
            words,
        };
        self.ask_only(engine, Request::SavePages(ask));
    }
}

/// A number that no reservation has. A real number would make bytes wrong by the engine's own word, as nothing was written for it
/// there.
const NO_RESERVATION: u64 = 1 << 60;
