//! The answers to engines, and the engines' next deeds. Engines check everything that they are shown.

use std::time::Duration;

use larder_core::store::Refused;
use larder_core::store::ids::SessionId;
use larder_protocol::Chain;
use larder_protocol::checksum::BlockKey;
use larder_protocol::handoff::InPlace;
use larder_protocol::lane::CopyEnd;
use larder_protocol::session::{Checked, ReportDamage, Request, Response};

use super::{Answer, Asked, Deed, Loading, Reply, What, Writing};
use crate::bytes::{Reader, Reading, sums_of_bytes};
use crate::space::Space;
use crate::world::{At, World};

/// The blocks that are needed to restore `chunks` chunks: by chunk, slice, pool.
pub(super) fn keys(space: &Space, chain: &Chain, chunks: usize) -> Vec<BlockKey> {
    let hashes = chain.hashes.iter().take(chunks).enumerate();
    hashes.flat_map(|(at, &hash)| space.blocks_of(hash, space.rules.needed(at, chunks))).collect()
}

impl World {
    pub(crate) fn engine_hears(&mut self, engine: usize, life: u64, Reply { tag, answer }: Reply) {
        if self.engines[engine].life != life {
            return;
        }
        let Some(asked) = self.engines[engine].asked.remove(&tag) else { return };
        match answer {
            Answer::Done => {}
            Answer::Found(found) => {
                self.found(engine, asked, found.spans.last().map_or(0, |span| span.to as usize))
            }
            Answer::Prefetching(Ok(started)) => {
                let after = self.some_us(100, 60_000);
                let Asked { space, chain, .. } = asked;
                match started.ticket {
                    0 => self.will(engine, after, Deed::Read { space, chain }),
                    ticket => self.will(engine, after, Deed::Collect { space, chain, ticket }),
                }
            }
            Answer::Leased(leased) => self.leased(engine, asked, &leased),
            Answer::Refused(refused) | Answer::Prefetching(Err(refused)) => {
                self.was_refused(engine, asked, &refused)
            }
            Answer::Response(response, _) => self.response(engine, asked, response),
        }
    }

    fn found(&mut self, engine: usize, asked: Asked, chunks: usize) {
        let Asked { space, chain, .. } = asked;
        if chunks > chain.len() {
            return self.violate(|| format!("engine {engine} is told of {chunks} chunks of {}", chain.len()));
        }
        let after = self.some_us(10, 5_000);
        self.will(engine, after, Deed::Read { space, chain });
    }

    fn leased(&mut self, engine: usize, asked: Asked, leased: &larder_core::store::Leased) {
        let Asked { space, chain, .. } = asked;
        if leased.lease == 0 {
            return self.compute(engine, space, &chain);
        }
        let Some(session) = &self.engines[engine].session else { return };
        let at = session.at;
        let has_tensors = session.tensors.contains_key(&space);
        let of = self.spaces[space].clone();
        // An engine verifies the blocks that it reads, and reports wrong blocks.
        let mut damaged = None;
        for ((key, place), &said) in
            keys(&of, &chain, leased.chunks as usize).iter().zip(&leased.places).zip(&leased.checksums)
        {
            let Some(actor) = self.actor(at) else { return };
            let Some(memory) = &actor.memory[place.extent as usize] else {
                return self.violate(|| format!("{at:?}: a lease of an extent without memory"));
            };
            let mut bytes = vec![0; of.block_bytes(key.pool.into()) as usize];
            let copied = memory.copy_out(place.offset, &mut bytes);
            let range_bytes = larder_protocol::checksum::range_bytes(&of.spec.pools[usize::from(key.pool)]);
            let sums = sums_of_bytes(key, &bytes, range_bytes);
            let is_right = crate::content::content(key, 0, bytes.len() as u64) == bytes;
            let is_flipped =
                actor.uses.is_flipped(place.extent, place.offset, place.offset + bytes.len() as u64);
            // Bits that flip before a sum is computed become part of the sum.
            if copied.is_err() || (!is_flipped && (sums.whole == said) != is_right) {
                return self.violate(|| {
                    format!("{at:?}: the checksum of {key:?} that was leased is not that of its bytes")
                });
            }
            if sums.whole != said {
                damaged = Some(*key);
            }
        }
        if let (Some(key), Some(namespace)) = (damaged, self.space_number(engine, space)) {
            self.saw_damage(at.life, at.life.host);
            let ask = Request::ReportDamage(ReportDamage { namespace, hash: key.hash });
            self.ask(engine, (space, &chain, What::Report { lease: leased.lease, key }), ask);
        }
        if has_tensors && self.random.bool() && damaged.is_none() && leased.chunks <= 8 {
            self.load(engine, space, &chain, leased.lease, leased.chunks as usize);
        }
        self.engines[engine].last_lease = leased.lease;
        let holds = self.some_us(500, 150_000);
        // One lease in fifty is never released before the engine ends.
        if self.random.u8(..50) > 0 {
            self.will(engine, holds, Deed::Release(leased.lease));
        }
        if (leased.chunks as usize) < chain.len() {
            self.compute(engine, space, &chain);
        }
    }

    /// Computes and writes the missing chunks.
    fn compute(&mut self, engine: usize, space: usize, chain: &Chain) {
        if let Some(namespace) = self.space_number(engine, space)
            && self.is_busy
        {
            self.reserve(engine, space, chain, namespace);
        }
    }

    fn was_refused(&mut self, engine: usize, asked: Asked, refused: &Refused) {
        if asked.what == What::Register {
            // The engine cannot work with this node's configuration.
            return self.engine_dies(engine);
        }
        if asked.what == What::Misnamed && !matches!(refused, Refused::Chain(_) | Refused::Busy { .. }) {
            self.violate(|| format!("a chunk under a wrong name is refused otherwise: {refused}"));
        }
        if let Some(session) = &mut self.engines[engine].session {
            match asked.what {
                What::Load { .. } => session.loading = None,
                What::Save(_) => session.is_saving = false,
                _ => {}
            }
        }
        if let What::Layers(writing) | What::Save(writing) = asked.what
            && self.random.bool()
        {
            self.ask_only(engine, Request::Abort(writing.reservation));
        }
    }

    fn response(&mut self, engine: usize, asked: Asked, response: Response) {
        let Asked { space, chain, what, .. } = asked;
        if what == What::Misnamed {
            return self.violate(|| format!("engine {engine}: a chunk is taken under a name that contradicts the one that is known: {response:?}"));
        }
        let after = self.some_us(20, 8_000);
        match (response, what) {
            (Response::Registered(registered), What::Register) => {
                if registered.fingerprint != self.spaces[space].fingerprint {
                    return self.violate(|| "a namespace is registered as another".to_owned());
                }
                if let Some(session) = &mut self.engines[engine].session {
                    session.spaces.insert(space, registered.namespace);
                }
            }
            (Response::Reserved(reserved), What::Reserve { .. }) if reserved.reservation != 0 => {
                let (reservation, chunks, pools) = (reserved.reservation, reserved.chunks, reserved.pools);
                self.will(engine, after, Deed::Write { space, chain, reservation, chunks, pools });
            }
            (Response::Reserved(reserved), What::Bait) => {
                let found = &mut self.engines[engine];
                (found.last_lie, found.bait) = (reserved.reservation, Some((space, chain)));
            }
            (Response::HandedOver, What::Layers(writing)) => {
                self.will(engine, after, Deed::NextLayer { space, chain, writing });
            }
            (Response::Following(follow), What::Follow) => {
                self.will(engine, after, Deed::AskInPlace { space, chain, follow, layers: 0 });
            }
            (Response::InPlace(in_place), What::InPlace(follow)) => {
                let is_over = in_place.is_whole || (in_place.chunks as usize) < chain.len();
                let layers = in_place.layers;
                if is_over {
                    self.will(engine, after, Deed::Release(follow));
                } else {
                    self.will(engine, after, Deed::AskInPlace { space, chain, follow, layers });
                }
            }
            (Response::Aborted, What::Abort { from, to }) => self.scribble(engine, from, to),
            (Response::Checked(Checked::Right), What::Report { lease, key }) => {
                self.must_be_right(engine, lease, &key);
            }
            (Response::Pinned(pinned), What::Pin) if pinned.pin != 0 && self.random.bool() => {
                self.will(engine, after * 20, Deed::Unpin(pinned.pin));
            }
            (Response::Copying(copy), What::Load { lease }) => {
                if self.random.u8(..10) == 0 {
                    return self.ask_only(engine, Request::ForgetCopy(copy));
                }
                let (lease, writing) = (Some(lease), None);
                self.will(engine, after, Deed::AskCopy { space, chain, copy, lease, writing });
            }
            (Response::Copying(copy), What::Save(writing)) => {
                let (lease, writing) = (None, Some(writing));
                self.will(engine, after, Deed::AskCopy { space, chain, copy, lease, writing });
            }
            (Response::CopyProgress(progress), What::Copy { lease, writing, copy }) => match progress.end {
                None => {
                    self.will(engine, after, Deed::AskCopy { space, chain, copy, lease, writing });
                }
                Some(end) => self.copy_ended(engine, (space, chain), lease.is_some(), writing, end),
            },
            _ => {}
        }
    }

    /// The node called a block right that the engine had found damaged: if the engine still leases the block, its bytes must be
    /// right.
    fn must_be_right(&mut self, engine: usize, lease: u64, key: &BlockKey) {
        let Some(session) = &self.engines[engine].session else { return };
        let (at, id) = (session.at, session.id);
        let Some(actor) = self.actor(at) else { return };
        let readings = actor.uses.readings.get(&Reader::Lease(id, lease)).cloned().unwrap_or_default();
        for Reading { extent, offset, key, from, to } in
            readings.into_iter().filter(|reading| reading.key == *key)
        {
            let memory = self.actor(at).and_then(|actor| actor.memory[extent as usize].clone());
            if memory.is_some_and(|memory| !crate::content::holds(&memory, offset, &key, from, to)) {
                self.violate(|| format!("{at:?}: {key:?} was called right, and is damaged"));
            }
        }
    }

    /// The engine no longer needs a part of its window, and overwrites it.
    fn scribble(&mut self, engine: usize, from: u64, to: u64) {
        let Some(session) = &self.engines[engine].session else { return };
        let (at, id, is_last) = (session.at, session.id, session.window_next == to);
        let Some(actor) = self.actor(at).filter(|_| is_last && from < to) else { return };
        let written = actor.windows.get(&id).map(|window| window.range(from..to).map(|(&at, _)| at));
        let written = written.into_iter().flatten().collect::<Vec<_>>();
        actor.scribbled.entry(id).or_default().extend(written);
    }

    /// A copy of the engine's GPU has ended: saved chunks are committed.
    fn copy_ended(
        &mut self,
        engine: usize,
        (space, chain): (usize, Chain),
        is_load: bool,
        writing: Option<Writing>,
        end: CopyEnd,
    ) {
        let after = self.some_us(20, 8_000);
        match end {
            CopyEnd::Done => {
                self.check_loaded(engine, is_load);
                let Some(writing) = writing else { return };
                if let Some(session) = &mut self.engines[engine].session {
                    session.is_saving = false;
                }
                self.will(engine, after, Deed::NextLayer { space, chain, writing });
            }
            CopyEnd::Lost => {
                if let Some(session) = &mut self.engines[engine].session {
                    session.tensors.clear();
                    (session.loading, session.is_saving) = (None, false);
                }
            }
            CopyEnd::Refused | CopyEnd::Failed | CopyEnd::Stalled => {}
        }
    }

    /// Checks that the loaded bytes are right.
    fn check_loaded(&mut self, engine: usize, is_load: bool) {
        let Some(session) = &mut self.engines[engine].session else { return };
        if !is_load {
            return;
        }
        let Some(Loading { device, space, chain, pages }) = session.loading.take() else { return };
        let at = session.at;
        let of = self.spaces[space].clone();
        for (pages, &hash) in pages.chunks(2).zip(&chain.hashes) {
            let key = BlockKey { fingerprint: of.fingerprint, hash, slice: 0, pool: 0 };
            let right = crate::content::content(&key, 0, of.block_bytes(0));
            let found = self.actor(at).and_then(|actor| actor.gpu.read(device, pages));
            if found.is_some_and(|found| found != right) && !self.flips_memory() {
                self.violate(|| format!("{at:?}: a GPU loaded other bytes than those of {key:?}"));
            }
        }
    }

    /// The readable layers of a follow.
    pub(super) fn followed(
        &mut self,
        at: At,
        (engine, session): (usize, SessionId),
        asked: &Asked,
        follow: u64,
        in_place: &InPlace,
    ) -> Vec<Reading> {
        let _ = engine;
        let space = self.spaces[asked.space].clone();
        let all = keys(&space, &asked.chain, asked.chain.len());
        let key = Reader::Lease(session, follow);
        if let Some(leased) = &in_place.leased {
            let needed = keys(&space, &asked.chain, leased.chunks as usize).len();
            if leased.places.len() != needed {
                let shown = leased.places.len();
                self.violate(|| format!("{at:?}: a follow shows {shown} places where {needed} restore it"));
                return Vec::new();
            }
            let places = leased.places.iter().zip(&all).map(|(place, &key)| Reading {
                extent: place.extent,
                offset: place.offset,
                key,
                from: 0,
                to: 0,
            });
            let places = places.collect();
            let Some(actor) = self.actor(at) else { return Vec::new() };
            actor.uses.readings.insert(key, places);
        }
        let Some(actor) = self.actor(at) else { return Vec::new() };
        let known = actor.uses.readings.get(&key).cloned().unwrap_or_default();
        let shown: usize = keys(&space, &asked.chain, in_place.chunks as usize).len();
        let layers = u64::from(in_place.layers);
        let mut readings = Vec::new();
        for reading in known.iter().filter(|reading| reading.to == 0).take(shown) {
            let pool = usize::from(reading.key.pool);
            let to = (layers * space.layer_bytes(pool)).min(space.block_bytes(pool));
            if to > 0 {
                readings.push(Reading { to, ..*reading });
            }
        }
        readings
    }

    /// Checks at the release that the leased bytes have not changed.
    pub(super) fn check_lease(&mut self, at: At, session: SessionId, lease: u64) {
        let Some(actor) = self.actor(at) else { return };
        let readings = actor.uses.readings.get(&Reader::Lease(session, lease)).cloned().unwrap_or_default();
        readings.iter().for_each(|reading| self.must_hold(at, reading));
    }

    /// Whether an engine has waited too long for an answer.
    pub(crate) fn check_waiting(&mut self, engine: usize, most: Duration) {
        let now = self.now;
        let late = self.engines[engine].asked.values().find(|asked| now > asked.at + most).cloned();
        if let Some(asked) = late {
            self.violate(|| format!("engine {engine} has no answer to {asked:?}"));
        }
    }
}
