//! One request of an engine: reads and checks the cached part of a prompt, and writes the rest, with holes.

mod layers;

use std::fmt;
use std::time::{Duration, Instant};

use larder_cli::content;
use larder_client::{LeaseGuard, LookupOptions, Namespace, Reservation, Session, SessionError};
use larder_protocol::session::Wait;
use larder_protocol::{Chain, ChunkHash};
use tokio::time::sleep;

use super::space::{CHUNK_TOKENS, Space};
use super::tally::Tally;
use crate::wait::now;

/// A request of an engine, drawn before it is sent: a request that is repeated is the same.
pub(super) struct Request {
    /// The number of its namespace.
    pub(super) space: usize,
    hashes: Vec<ChunkHash>,
    way: Way,
    /// For how long the engine keeps the blocks that it reads, before it reads them again.
    hold: Option<Duration>,
    /// When the engine loses interest.
    cancel_after: Option<Duration>,
    /// The seed of its smaller choices.
    seed: u64,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, hashes, way, hold, cancel_after, seed } = self;
        let chunks = hashes.len();
        write!(f, "{chunks} chunks of namespace {space} by {way:?}")?;
        write!(f, ", held for {hold:?}, given up after {cancel_after:?}, seed {seed}")
    }
}

/// How an engine reads.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// The engine looks up the prompt and leases what was found.
    LookUp {
        pin: Option<Duration>,
    },
    /// The engine leases at once, without a lookup.
    Lease,
    Prefetch(Wait),
    /// The engine begins a prefetch and gives it up.
    GiveUp,
    /// The engine follows the prompt's present writer, and reads the layers that are in place.
    Follow,
}

/// The destination of a request.
pub(super) struct Asked<'a> {
    pub(super) session: &'a Session,
    pub(super) namespace: &'a Namespace,
    pub(super) space: &'a Space,
    pub(super) tenant: usize,
    pub(super) tally: &'a Tally,
}

impl Request {
    pub(super) fn draw(spaces: &[Space], rng: &mut fastrand::Rng) -> Self {
        let space = rng.usize(..spaces.len());
        let wait = |rng: &mut fastrand::Rng| match rng.u8(..3) {
            0 => Wait::BestEffort,
            1 => Wait::Complete,
            _ => Wait::TimeoutMs(rng.u64(1..=200)),
        };
        let way = match rng.u8(..20) {
            0..=8 => Way::LookUp { pin: None },
            9 => Way::LookUp { pin: Some(Duration::from_millis(rng.u64(1..=2_000))) },
            10..=12 => Way::Lease,
            13..=17 => Way::Prefetch(wait(rng)),
            18 => Way::Follow,
            _ => Way::GiveUp,
        };
        let sometimes = |rng: &mut fastrand::Rng, one_in: u8, most_ms: u64| {
            (rng.u8(..one_in) == 0).then(|| Duration::from_millis(rng.u64(1..=most_ms)))
        };
        Self {
            space,
            hashes: spaces[space].draw(rng),
            way,
            hold: sometimes(rng, 10, 200),
            cancel_after: sometimes(rng, 25, 30),
            seed: rng.u64(..),
        }
    }

    /// Plays the request.
    pub(super) async fn play(&self, asked: &Asked<'_>) -> Result<(), SessionError> {
        match self.cancel_after {
            None => self.play_whole(asked).await,
            Some(after) => tokio::time::timeout(after, self.play_whole(asked)).await.unwrap_or(Ok(())),
        }
    }

    async fn play_whole(&self, asked: &Asked<'_>) -> Result<(), SessionError> {
        let chain = asked.namespace.chain(self.hashes.clone());
        let lease = self.read(asked, &chain).await?;
        let hit = lease.as_ref().map_or(0, LeaseGuard::chunks);
        asked.tally.count(|counts| {
            counts.chunks_asked += chain.len() as u64;
            counts.chunks_hit += hit as u64;
        });
        if let Some(lease) = lease {
            asked.check(&self.hashes, &lease);
            if let Some(hold) = self.hold {
                sleep(hold).await;
                asked.check(&self.hashes, &lease);
            }
        }
        self.save(asked, &chain, hit).await
    }

    async fn read(&self, asked: &Asked<'_>, chain: &Chain) -> Result<Option<LeaseGuard>, SessionError> {
        let Asked { session, namespace, .. } = asked;
        let prompt_tokens = chain.len() as u64 * u64::from(CHUNK_TOKENS) + 1;
        let options = || LookupOptions { prompt_tokens, ..LookupOptions::default() };
        match self.way {
            Way::LookUp { pin } => {
                let options = LookupOptions { pin, ..options() };
                let ask = async || session.lookup(namespace, chain, options.clone()).await;
                let found = asked.patiently(ask).await?.map_or(0, |found| found.tokens);
                let chain = chain.part(0, (found / u64::from(CHUNK_TOKENS)) as usize);
                if chain.is_empty() {
                    return Ok(None);
                }
                asked.patiently(async || session.lease(namespace, &chain).await).await
            }
            Way::Lease => asked.patiently(async || session.lease(namespace, chain).await).await,
            Way::Prefetch(wait) => {
                let ask = async || session.prefetch(namespace, chain, options()).await;
                let Some(ticket) = asked.patiently(ask).await? else { return Ok(None) };
                session.progress(&ticket).await?;
                match session.collect(ticket, wait).await {
                    Err(SessionError::Busy { .. }) => Ok(None),
                    leased => leased.map(Some),
                }
            }
            Way::Follow => asked.follow(chain).await.map(|()| None),
            Way::GiveUp => {
                let ask = async || session.prefetch(namespace, chain, options()).await;
                drop(asked.patiently(ask).await?);
                Ok(None)
            }
        }
    }

    /// Writes the missing chunks after the first `hit` chunks, a part at a time, at times from the end. Leaves out some parts and
    /// some chunks.
    async fn save(&self, asked: &Asked<'_>, chain: &Chain, hit: usize) -> Result<(), SessionError> {
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let part_chunks = (PART_BYTES / asked.space.chunk_bytes()).max(1) as usize;
        let mut starts: Vec<usize> = (hit..chain.len()).step_by(part_chunks).collect();
        if rng.u8(..8) == 0 {
            starts.reverse();
        }
        for from in starts {
            if rng.u8(..10) == 0 {
                continue;
            }
            let part = chain.part(from, chain.len().min(from + part_chunks));
            let reserve = async || asked.session.reserve(asked.namespace, &part, 0).await;
            let Some(reservation) = asked.patiently(reserve).await? else { break };
            let holes = rng.u8(..4) == 0;
            let chosen = |position: &u32| !(holes && (position + rng.u32(..2)).is_multiple_of(4));
            let positions: Vec<u32> = reservation.chunks().iter().copied().filter(chosen).collect();
            let wrote = match rng.u8(..30) {
                0 => true,
                1..=5 if asked.has_one_pool() => asked.hand_over(&part, &reservation, &positions).await?,
                _ => asked.write(&part, &reservation, &positions).await?,
            };
            if !wrote {
                break;
            }
        }
        Ok(())
    }
}

impl Asked<'_> {
    /// Compares all blocks of a lease with their expected bytes.
    fn check(&self, hashes: &[ChunkHash], lease: &LeaseGuard) {
        let mut checked = 0;
        let largest = self.space.block_bytes.iter().copied().max().unwrap_or(0) as usize;
        let mut bytes = vec![0; largest];
        for (position, hash) in hashes.iter().enumerate().take(lease.chunks()) {
            for block in 0..lease.blocks_per_chunk() {
                if !lease.has_block(position, block) {
                    continue;
                }
                let bytes = &mut bytes[..self.namespace.block_bytes(block) as usize];
                let is_damaged = lease.copy_block(position, block, bytes).is_err();
                checked += bytes.len() as u64;
                let key = self.space.key(self.tenant, hash, block);
                if is_damaged || content::first_difference(&key, bytes).is_some() {
                    self.complain(&key, bytes, || format!("block {block} of chunk {position}, {hash}"));
                }
            }
        }
        self.tally.count(|counts| counts.bytes_checked += checked);
    }

    fn complain(&self, key: &ChunkHash, bytes: &[u8], which: impl FnOnce() -> String) {
        let wrong = content::differences(key, bytes) as u64;
        let (model, node) = (&self.space.spec.model, self.session.node());
        self.tally.wrong(wrong, || {
            format!(
                "{wrong} of {} bytes: {} of `{model}`, tenant {}, at {node}",
                bytes.len(),
                which(),
                self.tenant
            )
        });
    }

    /// Writes chunks of a reservation. Returns whether the node took them.
    async fn write(
        &self,
        part: &Chain,
        reservation: &Reservation,
        positions: &[u32],
    ) -> Result<bool, SessionError> {
        let mut staged = Vec::with_capacity(positions.len());
        let mut bytes = Vec::new();
        for &position in positions {
            let mut chunk = self.session.stage(reservation, position).await?;
            let blocks: Vec<usize> = chunk.blocks().collect();
            for block in blocks {
                bytes.resize(self.namespace.block_bytes(block) as usize, 0);
                let key = self.space.key(self.tenant, &part.hashes[position as usize], block);
                content::fill(&key, &mut bytes);
                chunk.copy_from(block, 0, &bytes);
            }
            staged.push(chunk);
        }
        self.was_taken(self.session.commit(reservation, staged).await)
    }

    /// Whether a node took the written chunks; a busy node does not.
    fn was_taken<T>(&self, answer: Result<T, SessionError>) -> Result<bool, SessionError> {
        match answer {
            Err(SessionError::Busy { .. }) => {
                self.tally.count(|counts| counts.given_up += 1);
                Ok(false)
            }
            answer => answer.map(|_| true),
        }
    }

    /// Repeats a request as long as the node is busy, after the time that the node names; `None` if the node is still busy at the
    /// end.
    async fn patiently<T>(
        &self,
        mut ask: impl AsyncFnMut() -> Result<T, SessionError>,
    ) -> Result<Option<T>, SessionError> {
        let start: Instant = now();
        loop {
            let retry_after = match ask().await {
                Err(SessionError::Busy { retry_after, .. }) => retry_after,
                answer => return answer.map(Some),
            };
            self.tally.count(|counts| counts.busy_answers += 1);
            if start.elapsed() > BUSY_PATIENCE {
                self.tally.count(|counts| counts.given_up += 1);
                return Ok(None);
            }
            sleep(retry_after.min(MOST_RETRY_AFTER)).await;
        }
    }
}

/// Bytes that are reserved and written together, unless one chunk has more.
pub(super) const PART_BYTES: u64 = 256 << 10;

/// How long requests to a busy node are repeated.
const BUSY_PATIENCE: Duration = Duration::from_secs(10);
const MOST_RETRY_AFTER: Duration = Duration::from_millis(100);
