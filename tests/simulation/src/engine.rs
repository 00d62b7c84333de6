//! Engines that behave as their connector does: they look prompts up, read the found chunks, compute and write the rest, follow
//! each other, pin, give up, and die. Some lie (`lies`); the others check every byte that they are shown (`answers`).

mod answers;
mod deeds;
mod lies;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_core::store::ids::{ProcessId, SessionId};
use larder_core::store::{self, Refused};
use larder_core::{RequestId, Started};
use larder_node::arena::ExtentMemory;
use larder_protocol::checksum::BlockKey;
use larder_protocol::session::{Found, Request, Response};
use larder_protocol::{Chain, PoolSet};

use crate::bytes::{Reader, Reading};
use crate::world::{ActorHappening, At, Happening, World};

/// An engine process, and its open sessions and requests.
pub(crate) struct Engine {
    pub(crate) host: usize,
    actor: u16,
    pub(crate) lies: bool,
    /// The number of the engine's life.
    life: u64,
    process: ProcessId,
    tenant: u16,
    session: Option<Session>,
    last_tag: u64,
    asked: BTreeMap<u64, Asked>,
    attempts: u64,
    /// An open reservation of a lying engine, and its purpose.
    last_lie: u64,
    last_lease: u64,
    bait: Option<(usize, Chain)>,
    /// The arrival time of the engine's last message: messages of one engine arrive in order.
    said: Duration,
}

/// An open session.
struct Session {
    at: At,
    store: u64,
    id: SessionId,
    /// The number of each namespace that is registered.
    spaces: BTreeMap<usize, u32>,
    window_next: u64,
    /// The memory of extents that the session was given.
    mapped: BTreeMap<u32, Weak<ExtentMemory>>,
    /// For each namespace, the device's number and the session's number of its tensors.
    tensors: BTreeMap<usize, (u32, u32)>,
    /// The chunks that are being loaded into the first half of a namespace's pages.
    loading: Option<Loading>,
    /// Whether the other half is being saved.
    is_saving: bool,
}

/// Chunks that are being loaded.
struct Loading {
    device: u32,
    space: usize,
    chain: Chain,
    pages: Vec<u32>,
}

/// A request under way.
#[derive(Debug, Clone)]
struct Asked {
    at: Duration,
    space: usize,
    chain: Chain,
    what: What,
}

/// The subject of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Register,
    Lookup,
    Prefetch,
    Lease,
    Reserve {
        attempt: u64,
    },
    Written,
    Layers(Writing),
    Follow,
    InPlace(u64),
    Pin,
    Load {
        lease: u64,
    },
    Save(Writing),
    Copy {
        lease: Option<u64>,
        writing: Option<Writing>,
        copy: u64,
    },
    /// A chunk that is known by another name; it must be refused.
    Misnamed,
    /// A reservation for lies.
    Bait,
    /// A reservation is given up while it is being committed from these parts of the window.
    Abort {
        from: u64,
        to: u64,
    },
    /// The engine reports a leased block as damaged.
    Report {
        lease: u64,
        key: BlockKey,
    },
    /// A request that the engine does not remember.
    Other,
}

/// A reservation that is being written layer by layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Writing {
    reservation: u64,
    /// Chunks of each pool, by position in the chain, as bits.
    chunks: [u64; 2],
    /// The next layer, counted over all pools.
    layer: u32,
}

impl Writing {
    fn chunks_of(&self, pool: u8) -> Vec<u32> {
        positions(self.chunks[usize::from(pool)])
    }

    fn all_chunks(&self) -> Vec<u32> {
        positions(self.chunks[0] | self.chunks[1])
    }
}

fn positions(bits: u64) -> Vec<u32> {
    (0..u64::BITS).filter(|at| bits >> at & 1 == 1).collect()
}

/// Something that an engine does later.
#[derive(Debug, Clone)]
pub(crate) enum Deed {
    /// The engine starts, and opens a session.
    Start,
    /// The engine turns to another prompt.
    Wake,
    /// The engine has read what it leased.
    Release(u64),
    /// The engine waits for a prefetch.
    Collect { space: usize, chain: Chain, ticket: u64 },
    /// The engine reads the found chunks.
    Read { space: usize, chain: Chain },
    /// The engine writes the reserved chunks.
    Write { space: usize, chain: Chain, reservation: u64, chunks: Vec<u32>, pools: Vec<PoolSet> },
    /// The engine hands over the next layer, or commits.
    NextLayer { space: usize, chain: Chain, writing: Writing },
    /// The engine asks how much of the followed chunks is in place.
    AskInPlace { space: usize, chain: Chain, follow: u64, layers: u32 },
    /// The engine asks for the progress of a copy.
    AskCopy { space: usize, chain: Chain, copy: u64, lease: Option<u64>, writing: Option<Writing> },
    /// The engine lets go of a pin.
    Unpin(u64),
}

/// An answer to an engine.
pub(crate) enum Answer {
    /// A response, with extents that the session sees for the first time.
    Response(Response, Vec<u32>),
    Done,
    Found(Found),
    Prefetching(Result<Started, Refused>),
    Leased(store::Leased),
    Refused(Refused),
}

/// An answer, with its request.
pub(crate) struct Reply {
    tag: u64,
    answer: Answer,
}

/// A request on its way to an actor.
pub(crate) struct Asking {
    pub(crate) pending: Pending,
    pub(crate) session: SessionId,
    pub(crate) ask: Request,
}

/// A request that waits for an answer.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    engine: usize,
    engine_life: u64,
    tag: u64,
    pub(crate) session: SessionId,
    /// The life of the store.
    pub(crate) life: u64,
}

impl Engine {
    pub(crate) fn new(host: usize) -> Self {
        Self {
            host,
            actor: 0,
            lies: false,
            life: 0,
            process: ProcessId(0),
            tenant: 0,
            session: None,
            last_tag: 0,
            asked: BTreeMap::new(),
            attempts: 0,
            last_lie: 0,
            last_lease: 0,
            bait: None,
            said: Duration::ZERO,
        }
    }

    /// Whether the engine has a session with this actor.
    pub(crate) fn is_at(&self, at: At) -> bool {
        self.session.as_ref().is_some_and(|session| session.at == at)
    }

    /// Number of requests that are not answered.
    pub(crate) fn waiting(&self) -> usize {
        self.asked.len()
    }
}

impl World {
    /// Plans a deed of an engine.
    fn will(&mut self, engine: usize, after: Duration, deed: Deed) {
        let life = self.engines[engine].life;
        self.plan(after, Happening::Engine(engine, life, deed));
    }

    /// An engine asks its node.
    fn ask(&mut self, engine: usize, asked: (usize, &Chain, What), ask: Request) {
        let after = self.some_us(5, 60);
        let now = self.now;
        let found = &mut self.engines[engine];
        let Some(session) = &found.session else { return };
        found.last_tag += 1;
        let (space, chain, what) = asked;
        let asked = Asked { at: now, space, chain: chain.clone(), what };
        // A request without an answer counts as done, and nobody waits for it.
        found.asked.insert(found.last_tag, asked);
        let pending = Pending {
            engine,
            engine_life: found.life,
            tag: found.last_tag,
            session: session.id,
            life: session.store,
        };
        let (at, asking) = (session.at, Asking { pending, session: session.id, ask });
        let comes = (now + after).max(found.said);
        found.said = comes;
        self.plan(comes - now, Happening::Actor(at, ActorHappening::Asked(asking)));
    }

    /// An engine's request arrives at once, before any other event.
    fn ask_at_once(&mut self, engine: usize, asked: (usize, &Chain, What), ask: Request) {
        let now = self.now;
        let found = &mut self.engines[engine];
        let Some(session) = &found.session else { return };
        found.last_tag += 1;
        let (space, chain, what) = asked;
        found.asked.insert(found.last_tag, Asked { at: now, space, chain: chain.clone(), what });
        let pending = Pending {
            engine,
            engine_life: found.life,
            tag: found.last_tag,
            session: session.id,
            life: session.store,
        };
        let (at, session) = (session.at, session.id);
        self.actor_happens(at, ActorHappening::Asked(Asking { pending, session, ask }));
    }

    fn space_number(&self, engine: usize, space: usize) -> Option<u32> {
        self.engines[engine].session.as_ref()?.spaces.get(&space).copied()
    }

    /// Writes content into the engine's window. Returns its offset.
    fn write_window(&mut self, engine: usize, key: BlockKey, from: u64, bytes: u64) -> u64 {
        let Some(session) = &mut self.engines[engine].session else { return 0 };
        if session.window_next + bytes > WINDOW_BYTES {
            session.window_next = 0;
        }
        let offset = session.window_next;
        session.window_next += bytes.next_multiple_of(64);
        let (at, id) = (session.at, session.id);
        if let Some(actor) = self.actor(at)
            && let Some(window) = actor.windows.get_mut(&id)
        {
            window.insert(offset, (key, from));
            if let Some(scribbled) = actor.scribbled.get_mut(&id) {
                scribbled.remove(&offset);
            }
        }
        offset
    }

    /// An actor answers. Memory that an engine is shown is not written any more.
    pub(crate) fn reply(&mut self, at: At, request: RequestId, answer: Answer) {
        let Some(actor) = self.actor(at) else { return };
        let Some(pending) = actor.requests.remove(&request) else {
            if actor.over.remove(&request) {
                return;
            }
            return self.violate(|| format!("{at:?}: {request:?} is answered twice, or was never asked"));
        };
        let refused = match &answer {
            Answer::Refused(refused) | Answer::Prefetching(Err(refused)) => Some(refused),
            _ => None,
        };
        if let Some(refused) = refused {
            self.coverage.note(crate::coverage::refused(refused));
        }
        let Pending { engine, engine_life, tag, session, .. } = pending;
        if self.engines[engine].life == engine_life {
            self.show(at, engine, session, tag, &answer);
        }
        let after = self.some_us(5, 40);
        self.plan(after, Happening::Reply(engine, engine_life, Reply { tag, answer }));
    }

    /// Notes the memory that an engine may read from now on.
    fn show(&mut self, at: At, engine: usize, session: SessionId, tag: u64, answer: &Answer) {
        let Some(asked) = self.engines[engine].asked.get(&tag).cloned() else { return };
        let space = self.spaces[asked.space].clone();
        let tenant = space.tenant;
        self.map_extents(at, engine, session, answer);
        let (number, readings) = match answer {
            Answer::Leased(leased) if leased.lease != 0 => {
                let keys = answers::keys(&space, &asked.chain, leased.chunks as usize);
                if keys.len() != leased.places.len() || leased.checksums.len() != leased.places.len() {
                    return self.violate(|| {
                        format!(
                            "{at:?}: a lease of {} blocks names {} places",
                            keys.len(),
                            leased.places.len()
                        )
                    });
                }
                let reading = |(key, place): (BlockKey, &store::Place)| {
                    let to = space.block_bytes(key.pool.into());
                    Reading { extent: place.extent, offset: place.offset, key, from: 0, to }
                };
                (leased.lease, keys.into_iter().zip(&leased.places).map(reading).collect())
            }
            Answer::Response(Response::InPlace(in_place), _) => {
                let What::InPlace(follow) = asked.what else { return };
                (follow, self.followed(at, (engine, session), &asked, follow, in_place))
            }
            _ => return,
        };
        let readings: Vec<Reading> = readings;
        for reading in &readings {
            self.must_hold(at, reading);
            self.must_be_mapped(at, engine, session, reading.extent);
            let Some(actor) = self.actor(at) else { return };
            let of = *actor.uses.tenants.entry(reading.extent).or_insert(tenant);
            if of != tenant {
                self.violate(|| {
                    format!("{at:?}: tenant {tenant} is shown extent {} of tenant {of}", reading.extent)
                });
            }
        }
        if let Some(actor) = self.actor(at) {
            let known = actor.uses.readings.entry(Reader::Lease(session, number)).or_default();
            for reading in readings {
                if !known.contains(&reading) {
                    known.push(reading);
                }
            }
        }
    }

    /// Maps the memory of extents that an engine is given.
    fn map_extents(&mut self, at: At, engine: usize, session: SessionId, answer: &Answer) {
        let given = match answer {
            Answer::Leased(leased) => &leased.new_extents,
            Answer::Response(_, given) => given,
            _ => return,
        };
        for &extent in given {
            let memory = self.actor(at).and_then(|actor| actor.memory[extent as usize].clone());
            let held = self.engines[engine].session.as_mut().filter(|held| held.id == session);
            if let (Some(memory), Some(held)) = (memory, held) {
                held.mapped.insert(extent, Arc::downgrade(&memory));
            }
        }
    }

    /// An engine whose session has mapped this memory of an extent.
    pub(crate) fn engine_that_maps(&self, at: At, extent: u32, memory: &Arc<ExtentMemory>) -> Option<usize> {
        let memory = Arc::downgrade(memory);
        self.engines.iter().position(|engine| {
            let session = engine.session.as_ref().filter(|session| session.at == at);
            session
                .and_then(|session| session.mapped.get(&extent))
                .is_some_and(|mapped| mapped.ptr_eq(&memory))
        })
    }

    /// Checks that the engine has mapped the shown memory, and that the memory still belongs to the extent.
    fn must_be_mapped(&mut self, at: At, engine: usize, session: SessionId, extent: u32) {
        let Some(held) = self.engines[engine].session.as_ref().filter(|held| held.id == session) else {
            return;
        };
        let mapped = held.mapped.get(&extent).cloned();
        let memory =
            self.actor(at).and_then(|actor| actor.memory[extent as usize].as_ref().map(Arc::downgrade));
        let is_it = mapped.zip(memory).is_some_and(|(mapped, memory)| mapped.ptr_eq(&memory));
        if !is_it {
            self.violate(|| {
                format!("{at:?}: engine {engine} is shown extent {extent}, and has mapped other memory")
            });
        }
    }

    /// The process of an engine's node is gone, and so is the engine's session.
    pub(crate) fn node_is_gone(&mut self, engine: usize) {
        let found = &mut self.engines[engine];
        found.life += 1;
        found.session = None;
        found.asked.clear();
        let after = self.some_us(50_000, 900_000);
        self.will(engine, after, Deed::Start);
    }

    /// The sessions of an actor ended by a fault of the node: its engines' processes go on.
    pub(crate) fn session_is_gone(&mut self, engine: usize) {
        let found = &mut self.engines[engine];
        let (at, process, id) = match &found.session {
            Some(session) => (session.at, found.process, session.id),
            None => return,
        };
        self.leave_ghosts(at, process, id);
        self.node_is_gone(engine);
        // The engine unmaps the memory that it was shown when it ends, sooner or later.
        let after = self.some_us(100_000, 3_000_000);
        self.plan(after, Happening::EngineGone(at, process));
    }

    /// After a session's end, its process may still read the session's memory.
    fn leave_ghosts(&mut self, at: At, process: ProcessId, session: SessionId) {
        let Some(actor) = self.actor(at) else { return };
        let readings = std::mem::take(&mut actor.uses.readings);
        for (reader, held) in readings {
            let reader = match reader {
                Reader::Lease(of, lease) if of == session => {
                    Reader::Process(process, crate::bytes::ghost(session, lease))
                }
                other => other,
            };
            actor.uses.readings.insert(reader, held);
        }
    }

    /// An engine dies. Its node learns of the closed socket first, and of the ended process later.
    pub(crate) fn engine_dies(&mut self, engine: usize) {
        let found = &mut self.engines[engine];
        found.life += 1;
        found.asked.clear();
        let process = found.process;
        if let Some(session) = found.session.take() {
            self.leave_ghosts(session.at, process, session.id);
            self.plan_actor(session.at, Duration::from_micros(100), ActorHappening::Closed(session.id));
            let after = self.some_us(200, 800_000);
            self.plan(after, Happening::EngineGone(session.at, process));
        }
        let after = self.some_us(1_000, 900_000);
        self.will(engine, after, Deed::Start);
    }
}

/// Bytes of an engine's window.
const WINDOW_BYTES: u64 = 1 << 20;

impl Engine {
    /// Ends the engine: it does nothing any more.
    pub(crate) fn end(&mut self) {
        self.life += 1;
    }
}
