//! The cost of an engine session: a bare session with a node process, one request at a time.

use std::hint::black_box;
use std::path::{Path, PathBuf};

use larder_client::{BlockPart, LookupOptions, Namespace, Session, SessionOptions, Verify};
use larder_protocol::frame::HEADER_BYTES;
use larder_protocol::session::{
    Found, Lease, Leased, Lookup, Place, Request, Response, Span, Tier, encode_request, encode_response,
};
use larder_protocol::{Chain, ChunkHash};
use rkyv::util::AlignedVec;

use super::Measurement;
use super::crowd::crowd;
use super::measure::{medians, timed};
use super::placement::CpuPair;
use super::yardsticks::{Memcpy, PingPong, WORKING_SET_BYTES};
use crate::content::chunk_hash;
use crate::replay::namespace::replay_namespace;

/// A session whose requests are measured.
pub struct SessionBench {
    socket: PathBuf,
    session: Session,
    placement: CpuPair,
    rounds: usize,
}

impl SessionBench {
    /// Opens the session.
    ///
    /// # Errors
    /// The node refuses the session.
    pub fn connect(socket: &Path, placement: &CpuPair, rounds: usize) -> anyhow::Result<Self> {
        let session = open(socket, SessionOptions { copy_threads: 1, ..SessionOptions::default() })?;
        Ok(Self { socket: socket.to_owned(), session, placement: placement.clone(), rounds })
    }

    /// Measures with the engine on the CPU of its answerers. Otherwise another CPU must wake up, which takes longer than all the
    /// work and hides its cost.
    ///
    /// # Errors
    /// An error of `measure`, or the system does not move this thread.
    pub fn on_one_cpu(
        &self,
        measure: impl FnOnce(&Self) -> anyhow::Result<Measurement>,
    ) -> anyhow::Result<Measurement> {
        self.placement.be_answerer()?;
        let measured = measure(self);
        self.placement.be_engine()?;
        measured
    }

    /// A lookup of 100 chunks that the node has, against a bare ping-pong of messages of the same sizes.
    ///
    /// # Errors
    /// The session or the yardstick failed.
    pub fn lookup(&self, name: &str) -> anyhow::Result<Measurement> {
        let (namespace, chain) = self.hundred_chunks()?;
        let (request_bytes, response_bytes) = lookup_bytes(&namespace, &chain);
        let mut ping_pong = PingPong::start(&self.placement, request_bytes, response_bytes)?;
        let mut lookup = || timed(|| Ok(self.session.lookup(&namespace, &chain, all_tokens()).wait()?));
        let mut round_trip = || timed(|| Ok(ping_pong.round_trip()?));
        let [subject, yardstick] = medians(self.rounds * LATENCY_ROUNDS, [&mut lookup, &mut round_trip])?;
        Ok(Measurement::microseconds(name, "socket ping-pong", subject, yardstick))
    }

    /// The same lookup by many engines of one actor at once, against as many ping-pongs.
    ///
    /// # Errors
    /// A session or a yardstick failed.
    pub fn lookup_by_many(&self, name: &str, engines: usize) -> anyhow::Result<[Measurement; 3]> {
        let (namespace, chain) = self.hundred_chunks()?;
        let (request_bytes, response_bytes) = lookup_bytes(&namespace, &chain);
        let engine = || {
            self.placement.be_engines()?;
            let session = open(&self.socket, SessionOptions::default())?;
            let (namespace, chain) = (register(&session, SMALL_BLOCK_BYTES)?, chain.clone());
            Ok(move || {
                let found = session.lookup(&namespace, &chain, all_tokens()).wait()?;
                anyhow::ensure!(
                    found.spans.last().is_some_and(|span| span.to == CHUNKS as u32),
                    "a chunk is gone"
                );
                Ok(())
            })
        };
        let ping_pong = || {
            self.placement.be_engines()?;
            let mut ping_pong = PingPong::start(&self.placement, request_bytes, response_bytes)?;
            Ok(move || Ok(ping_pong.round_trip()?))
        };
        let requests = (self.rounds * LATENCY_ROUNDS * MANY_ENGINES / engines).max(1);
        let seen = crowd(engines, requests, engine)?;
        Ok(seen.beside(name, "socket ping-pongs", &crowd(engines, requests, ping_pong)?))
    }

    /// A lease of 100 chunks and its release, without a copy, against a bare ping-pong of messages of the same sizes.
    ///
    /// # Errors
    /// The session or the yardstick failed.
    pub fn lease(&self, name: &str) -> anyhow::Result<Measurement> {
        let (namespace, chain) = self.hundred_chunks()?;
        let asked = Request::Lease(Lease { namespace: namespace.number(), chain: chain.clone() });
        let places = vec![Place { extent: 0, offset: 0 }; CHUNKS];
        let (checksums, extents) = (vec![0; CHUNKS], Vec::new());
        let answered = Leased { lease: 1, chunks: CHUNKS as u32, places, checksums, extents };
        let sizes = (request_bytes(&asked), response_bytes(&Response::Leased(answered)));
        let mut ping_pong =
            PingPong::start(&self.placement, sizes.0 + request_bytes(&Request::Release(1)), sizes.1)?;
        let mut lease = || {
            timed(|| {
                self.session.lease(&namespace, &chain).wait()?.release();
                Ok(())
            })
        };
        let mut round_trip = || timed(|| Ok(ping_pong.round_trip()?));
        let [subject, yardstick] = medians(self.rounds * LATENCY_ROUNDS, [&mut lease, &mut round_trip])?;
        Ok(Measurement::microseconds(name, "socket ping-pong", subject, yardstick))
    }

    /// A get of a prompt of `blocks` blocks (lease, copies into the caller's memory, release) against one copy of the same size.
    /// Both walk over more memory than caches hold. The memory was touched before, since an engine waits only once for the kernel
    /// to enter a page of the arena.
    ///
    /// # Errors
    /// The session failed.
    pub fn get(&self, name: &str, block_bytes: u64, blocks: usize) -> anyhow::Result<Measurement> {
        self.get_by(&self.session, name, block_bytes, blocks)
    }

    /// As [`SessionBench::get`], with copies by two threads, each on a CPU that the system chooses.
    ///
    /// # Errors
    /// The session failed, or the system does not move this thread.
    pub fn get_by_two_threads(
        &self,
        name: &str,
        block_bytes: u64,
        blocks: usize,
    ) -> anyhow::Result<Measurement> {
        let session = open(&self.socket, SessionOptions { copy_threads: 2, ..SessionOptions::default() })?;
        self.placement.be_anywhere()?;
        let measured = self.get_by(&session, name, block_bytes, blocks);
        self.placement.be_engine()?;
        measured
    }

    fn get_by(
        &self,
        session: &Session,
        name: &str,
        block_bytes: u64,
        blocks: usize,
    ) -> anyhow::Result<Measurement> {
        let namespace = register(session, block_bytes)?;
        let bytes = block_bytes * blocks as u64;
        let prompts = (WORKING_SET_BYTES as u64 / bytes).max(2);
        // Each length has ids of its own, since a hash has one parent in a namespace.
        let first = (blocks as u64 - 1) * FIRST_LONGER;
        let hashes: Vec<ChunkHash> = (first..first + prompts * blocks as u64).map(chunk_hash).collect();
        let chains: Vec<Chain> =
            hashes.chunks(blocks).map(|prompt| namespace.chain(prompt.to_vec())).collect();
        let mut targets = vec![vec![1; bytes as usize]; chains.len()];
        let own = self.namespace(block_bytes)?;
        for chain in &chains {
            self.put_chain(&own, chain, &targets[0][..block_bytes as usize])?;
        }
        let mut memcpy = Memcpy::new(bytes as usize);
        let mut next = 0;
        let mut get = || {
            let at = next % chains.len();
            next += 1;
            timed(|| {
                let lease = session.lease(&namespace, &chains[at]).wait()?;
                anyhow::ensure!(lease.chunks() == blocks, "a block that was put is not there");
                let outs = targets[at].chunks_exact_mut(block_bytes as usize).enumerate();
                lease.copy_parts(outs.map(|(position, out)| BlockPart {
                    position,
                    block: 0,
                    offset: 0,
                    out,
                }))?;
                lease.release();
                black_box(&mut targets[at]);
                Ok(())
            })
        };
        for _ in &chains {
            get()?;
        }
        let mut copy = || {
            timed(|| {
                memcpy.pass();
                Ok(())
            })
        };
        let [subject, yardstick] = medians(self.rounds, [&mut get, &mut copy])?;
        Ok(Measurement::throughput(name, "memcpy", bytes, subject, yardstick))
    }

    /// Gets of blocks that are verified as `verify` says, against gets of the same blocks without verification. A pass has as
    /// many gets as a sample needs to verify one block.
    ///
    /// # Errors
    /// The session failed.
    pub fn get_verified(&self, name: &str, block_bytes: u64, verify: Verify) -> anyhow::Result<Measurement> {
        let mut target = vec![1; block_bytes as usize];
        let blocks = (WORKING_SET_BYTES as u64 / block_bytes).clamp(2, MOST_BLOCKS);
        let gets_with = |verify: Verify| -> anyhow::Result<_> {
            let session = open(&self.socket, verifying(verify))?;
            let namespace = session.register(&replay_namespace(block_bytes), &[0], &[block_bytes]).wait()?;
            let ids = FIRST_VERIFIED..FIRST_VERIFIED + blocks;
            let chains: Vec<Chain> = ids.map(|id| namespace.chain(vec![chunk_hash(id)])).collect();
            for chain in &chains {
                self.put_chain(&self.namespace(block_bytes)?, chain, &target)?;
            }
            Ok((session, namespace, chains))
        };
        let (verified, plain) = (gets_with(verify)?, gets_with(Verify::Off)?);
        let mut next = 0;
        let mut batch = |(session, namespace, chains): &(Session, Namespace, Vec<Chain>)| {
            timed(|| {
                for _ in 0..SAMPLED_OF {
                    next += 1;
                    let lease = session.lease(namespace, &chains[next % chains.len()]).wait()?;
                    anyhow::ensure!(lease.chunks() == 1, "a block that was put is not there");
                    lease.copy_block(0, 0, &mut target)?;
                    lease.release();
                    black_box(&mut target);
                }
                Ok(())
            })
        };
        let batch = std::cell::RefCell::new(&mut batch);
        let mut subject = || (batch.borrow_mut())(&verified);
        let mut yardstick = || (batch.borrow_mut())(&plain);
        let [subject, yardstick] = medians(self.rounds.div_ceil(4), [&mut subject, &mut yardstick])?;
        let bytes = block_bytes * SAMPLED_OF as u64;
        Ok(Measurement::throughput(name, "get, not verified", bytes, subject, yardstick))
    }

    /// A put of one new block (reserve, stage, copy, commit) against one copy of the same size. The node copies the block
    /// a second time and sums it.
    ///
    /// # Errors
    /// The session failed.
    pub fn put(&self, name: &str, block_bytes: u64) -> anyhow::Result<Measurement> {
        let namespace = self.namespace(block_bytes)?;
        let sources = vec![vec![1; block_bytes as usize]; (WORKING_SET_BYTES / block_bytes as usize).max(2)];
        let mut memcpy = Memcpy::new(block_bytes as usize);
        let mut next = FIRST_PUT;
        let mut put = || {
            next += 1;
            let chain = namespace.chain(vec![chunk_hash(next)]);
            let source = &sources[next as usize % sources.len()];
            timed(|| self.put_chain(&namespace, &chain, source))
        };
        let mut copy = || {
            timed(|| {
                memcpy.pass();
                Ok(())
            })
        };
        let [subject, yardstick] = medians(self.rounds, [&mut put, &mut copy])?;
        Ok(Measurement::throughput(name, "memcpy", block_bytes, subject, yardstick))
    }

    fn namespace(&self, block_bytes: u64) -> anyhow::Result<Namespace> {
        register(&self.session, block_bytes)
    }

    /// A prompt of [`CHUNKS`] small chunks, which the node has.
    fn hundred_chunks(&self) -> anyhow::Result<(Namespace, Chain)> {
        let namespace = self.namespace(SMALL_BLOCK_BYTES)?;
        let chain = namespace.chain((0..CHUNKS as u64).map(chunk_hash).collect());
        self.put_chain(&namespace, &chain, &[1; SMALL_BLOCK_BYTES as usize])?;
        Ok((namespace, chain))
    }

    /// Saves the missing chunks of a chain, every block with the same bytes.
    fn put_chain(&self, namespace: &Namespace, chain: &Chain, block: &[u8]) -> anyhow::Result<()> {
        let reservation = self.session.reserve(namespace, chain, 0).wait()?;
        let mut staged = Vec::with_capacity(reservation.chunks().len());
        for &position in reservation.chunks() {
            let mut chunk = self.session.stage(&reservation, position).wait()?;
            chunk.copy_from(0, 0, block);
            staged.push(chunk);
        }
        if !staged.is_empty() {
            self.session.commit(&reservation, staged).wait()?;
        }
        Ok(())
    }
}

fn register(session: &Session, block_bytes: u64) -> anyhow::Result<Namespace> {
    Ok(session.register(&replay_namespace(block_bytes), &[0], &[block_bytes]).wait()?)
}

/// The options of a lookup whose caller can use every token.
pub(super) fn all_tokens() -> LookupOptions {
    LookupOptions { prompt_tokens: u64::MAX, ..LookupOptions::default() }
}

/// Bytes of the messages of a lookup whose chunks the node has: of the request, then of the answer.
fn lookup_bytes(namespace: &Namespace, chain: &Chain) -> (usize, usize) {
    let asked = Request::Lookup(Lookup {
        namespace: namespace.number(),
        chain: chain.clone(),
        prompt_tokens: u64::MAX,
        skip_read: false,
        preempted: false,
        tiers: Vec::new(),
        pin_ms: None,
        prefill_tokens_per_second: None,
    });
    let spans = vec![Span { from: 0, to: CHUNKS as u32, tier: Tier::Host }];
    let answered = Response::Found(Found { tokens: CHUNKS as u64, spans, pin: None });
    (request_bytes(&asked), response_bytes(&answered))
}

fn open(socket: &Path, options: SessionOptions) -> anyhow::Result<Session> {
    let client = concat!("larder bench ", env!("CARGO_PKG_VERSION")).into();
    Ok(Session::connect(socket, SessionOptions { client, ..options }).wait()?)
}

fn verifying(verify: Verify) -> SessionOptions {
    SessionOptions { verify, ..SessionOptions::default() }
}

fn request_bytes(request: &Request) -> usize {
    HEADER_BYTES + encode_request(request, AlignedVec::new()).len()
}

fn response_bytes(response: &Response) -> usize {
    HEADER_BYTES + encode_response(response, AlignedVec::new()).len()
}

/// Chunks of a prompt whose lookup and lease are measured.
const CHUNKS: usize = 100;

/// Engines that ask one actor at once.
const MANY_ENGINES: usize = 16;

const SMALL_BLOCK_BYTES: u64 = 4_096;

/// Round trips are short: this many for each round of another measurement.
const LATENCY_ROUNDS: usize = 20;

/// In a sample, one of this many blocks is verified.
const SAMPLED_OF: usize = 64;

/// Small blocks to get: more than any CPU cache holds.
const MOST_BLOCKS: u64 = 4_096;

/// First ids of the blocks that are put and of the blocks that are verified, apart from the ids of the blocks that are got: a
/// hash has one parent in a namespace.
const FIRST_PUT: u64 = 1 << 32;
const FIRST_VERIFIED: u64 = 1 << 33;

/// The first id of prompts of two blocks, of three and so on, apart from all the ids above.
const FIRST_LONGER: u64 = 1 << 34;
