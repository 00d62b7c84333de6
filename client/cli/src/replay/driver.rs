//! Plays requests through engine sessions.
//!
//! One request after the other is started, in the order of the trace, at most so many at a time: look
//! the prompt up, lease and copy out what is there, compare it, "compute" the rest, save it. Bytes come from the
//! sessions' descriptors alone. All of it runs on the caller's thread.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use larder_client::{LookupOptions, Reservation, SessionError};
use larder_net::trace::{Sampler, Trace};
use larder_protocol::Chain;
use larder_protocol::session::{Found, Tier};
use tokio::sync::watch;

use super::assignment::LeastRecomputed;
use super::infinite::InfiniteCache;
use super::link::{Link, LinkError, LinkSettings, Open, RequestError};
use super::progress::Progress;
use super::tally::Transport;
use super::{Report, Tally, part_chunks};
use crate::clock::now;
use crate::cluster::NodeAddress;
use crate::content::{self, TraceName};
use crate::trace::{CHUNK_TOKENS, Request};

/// A replay under way.
#[derive(Debug)]
pub struct Driver {
    nodes: Vec<Link>,
    part_chunks: usize,
    in_flight: u16,
    deadline: Duration,
    prefill_tokens_per_s: f64,
    /// Part of every chunk's name.
    trace: TraceName,
    /// Decides which requests are traced.
    sampler: Sampler,
    /// Requests that were started.
    started: watch::Sender<usize>,
    /// Never borrowed across an await.
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    tally: Tally,
    infinite: InfiniteCache,
    loads: LeastRecomputed,
    /// A block, on its way in or out.
    block: Vec<u8>,
}

impl Driver {
    /// Opens a session with each node; some nodes may be down. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// [`LinkError`] names the node that cannot be used; [`LinkError::AllDown`] if none is there.
    pub async fn connect(nodes: &[NodeAddress], settings: LinkSettings) -> Result<Self, LinkError> {
        let mut links = Vec::new();
        for node in nodes {
            links.push(Link::connect(node, settings).await?);
        }
        if !links.iter().any(Link::is_open) {
            return Err(LinkError::AllDown);
        }
        let LinkSettings { block_bytes, in_flight, deadline, prefill_tokens_per_s } = settings;
        let state = State {
            tally: Tally::new(prefill_tokens_per_s),
            infinite: InfiniteCache::default(),
            loads: LeastRecomputed::new(links.len()),
            block: vec![0; block_bytes as usize],
        };
        let part_chunks = part_chunks(block_bytes, in_flight) as usize;
        Ok(Self {
            nodes: links,
            part_chunks,
            in_flight,
            deadline,
            prefill_tokens_per_s,
            trace: TraceName::default(),
            sampler: Sampler::default(),
            started: watch::Sender::default(),
            state: RefCell::new(state),
        })
    }

    /// Uses this trace's name.
    #[must_use]
    pub fn named(self, trace: TraceName) -> Self {
        Self { trace, ..self }
    }

    /// Traces some of the requests.
    #[must_use]
    pub fn traced(self, sampler: Sampler) -> Self {
        Self { sampler, ..self }
    }

    /// Plays the requests, as many at a time as the links are set for. One that fails is counted, and the others go on. What
    /// a node that is gone does not serve is computed, and the next requests go to the others until it is back.
    ///
    /// With a `speed`, no request starts before its time in the trace, run this many times as fast.
    ///
    /// # Cancel safety
    /// Dropped, it leaves the requests in flight uncounted; [`Self::report`] has the others.
    pub async fn play(&self, requests: &[Request], speed: Option<f64>, progress: &Progress) {
        let start = tokio::time::Instant::now();
        let first_ms = requests.first().map_or(0, |request| request.timestamp_ms);
        let playing = requests.iter().map(async |request| {
            if let Some(speed) = speed {
                let after_ms = request.timestamp_ms.saturating_sub(first_ms) as f64 / speed;
                tokio::time::sleep_until(start + Duration::from_secs_f64(after_ms / 1e3)).await;
            }
            self.started.send_modify(|started| *started += 1);
            self.play_one(request).await;
        });
        let mut playing = stream::iter(playing).buffer_unordered(self.in_flight.into());
        while playing.next().await.is_some() {
            progress.advance(self.state.borrow().tally.hit_rate());
        }
    }

    /// Waits until so many requests were started.
    pub async fn reached(&self, requests: usize) {
        // An error: never, since this has the sender.
        let _ = self.started.subscribe().wait_for(|&started| started >= requests).await;
    }

    /// Says which nodes serve and do not leave soon, by name: these get the requests, as long as there are any.
    pub fn serving(&self, names: &[String]) {
        self.nodes.iter().for_each(|link| link.set_leaves(!names.contains(&link.node())));
    }

    /// The results so far, `took` after the start, where nodes have forwarded so many chunks meanwhile.
    #[must_use]
    pub fn report(&self, took: Duration, forwarded_chunks: u64) -> Report {
        let transport = Transport {
            bytes_moved: self.nodes.iter().map(Link::bytes_moved).sum(),
            sessions_reconnected: self.nodes.iter().map(Link::reconnected).sum(),
            forwarded_chunks,
        };
        let state = self.state.borrow();
        state.tally.clone().finish(transport, state.infinite.hit_rate(), took)
    }

    async fn play_one(&self, request: &Request) {
        let node = {
            let state = &mut *self.state.borrow_mut();
            state.infinite.ask(request);
            let may_serve = |node: usize| self.nodes[node].may_serve();
            let is_well = |node: usize| may_serve(node) && !self.nodes[node].leaves();
            let node = state.loads.choose_among(request.timestamp_ms, is_well);
            let node = node.or_else(|| state.loads.choose_among(request.timestamp_ms, may_serve));
            if let Some(node) = node {
                state.loads.recomputed(node, request.timestamp_ms, request.input_tokens);
            }
            node
        };
        let mut hit = 0;
        let trace = self.sampler.begin("replay_request");
        let served = match node {
            Some(node) => self.serve(&self.nodes[node], request, &trace, &mut hit).await.err(),
            None => {
                self.wait_for_a_node().await;
                Some(RequestError::Lost { node: "every node".to_owned() })
            }
        };
        trace.count("larder.tokens", request.input_tokens);
        trace.count("larder.tokens_found", hit);
        trace.set("larder.outcome", if served.is_none() { "done" } else { "failed" });
        let state = &mut *self.state.borrow_mut();
        state.tally.asked(request.input_tokens);
        let recomputed = request.input_tokens - hit;
        match served {
            None => {}
            Some(RequestError::Lost { .. }) => state.tally.recomputed_after_failure(recomputed),
            Some(error) => state.tally.failed(&error),
        }
        if let Some(node) = node {
            state.loads.served(node, request.timestamp_ms, hit);
        }
    }

    /// Waits until some node may serve again, or so long as computing the request may take.
    async fn wait_for_a_node(&self) {
        let start = now();
        while now() - start < self.deadline && !self.nodes.iter().any(Link::may_serve) {
            tokio::time::sleep(NODE_POLL).await;
        }
    }

    /// Plays one request; `hit` becomes how many of its tokens were served.
    async fn serve(
        &self,
        link: &Link,
        request: &Request,
        trace: &Trace,
        hit: &mut u64,
    ) -> Result<(), RequestError> {
        let opened = &link.open().await?;
        let traced = trace.context().map(|context| Rc::new(opened.traced(context)));
        let open = traced.as_ref().unwrap_or(opened);
        let hashes = request.full_chunks().iter().map(|&id| self.trace.chunk(id)).collect();
        let chain = open.namespace.chain(hashes);
        let failed = |error| link.failed(opened, error);
        let found = self.look_up(open, &chain, request.input_tokens).await.map_err(failed)?;
        let chunks = self.fetch(open, &chain, &found).await.map_err(failed)?;
        *hit = chunks as u64 * CHUNK_TOKENS;
        for from in (chunks..chain.len()).step_by(self.part_chunks) {
            let part = chain.part(from, chain.len().min(from + self.part_chunks));
            if !self.save(open, &part).await.map_err(failed)? {
                self.state.borrow_mut().tally.save_shed();
                break;
            }
        }
        Ok(())
    }

    async fn look_up(&self, link: &Open, chain: &Chain, prompt_tokens: u64) -> Result<Found, SessionError> {
        let start = now();
        let prefill_tokens_per_second = Some(self.prefill_tokens_per_s);
        let options = LookupOptions { prompt_tokens, prefill_tokens_per_second, ..LookupOptions::default() };
        let found = link.session.lookup(&link.namespace, chain, options).await?;
        self.state.borrow_mut().tally.looked_up(now() - start);
        Ok(found)
    }

    /// Leases the found chunks, copies them out and compares them. A node that grants fewer chunks, or stays busy, leaves the
    /// rest to be computed. Returns how many chunks were served.
    async fn fetch(&self, link: &Open, chain: &Chain, found: &Found) -> Result<usize, SessionError> {
        let chunks = (found.tokens / CHUNK_TOKENS) as usize;
        if chunks == 0 {
            return Ok(0);
        }
        let chain = chain.part(0, chunks);
        let start = now();
        let lease = self.patiently(async || link.session.lease(&link.namespace, &chain).await).await?;
        let Some(lease) = lease else { return Ok(0) };
        let mut took = now() - start;
        let State { tally, block, .. } = &mut *self.state.borrow_mut();
        for (position, hash) in chain.hashes.iter().enumerate().take(lease.chunks()) {
            let start = now();
            lease.copy_block(position, 0, block)?;
            took += now() - start;
            tally.check(hash, block);
        }
        tally.fetched(took, found.spans.iter().any(|span| span.tier == Tier::Peer));
        tally.lease_fell_short((chunks - lease.chunks()) as u64);
        for span in &found.spans {
            let served = (span.to as usize).min(lease.chunks()).saturating_sub(span.from as usize);
            tally.hit(span.tier, served as u64 * CHUNK_TOKENS);
        }
        Ok(lease.chunks())
    }

    /// Writes those chunks of a part of a chain that the node lacks; whether it had room.
    async fn save(&self, link: &Open, part: &Chain) -> Result<bool, SessionError> {
        let reserving = self.patiently(async || link.session.reserve(&link.namespace, part, 0).await).await?;
        let Some(reservation) = reserving else { return Ok(false) };
        if reservation.chunks().is_empty() {
            return Ok(true);
        }
        let writing = self.patiently(async || self.write(link, part, &reservation).await).await?;
        Ok(writing == Some(reservation.chunks().len()))
    }

    /// "Computes" the chunks of a reservation into the write window and commits them; how many the node keeps.
    async fn write(
        &self,
        link: &Open,
        part: &Chain,
        reservation: &Reservation,
    ) -> Result<usize, SessionError> {
        let mut staged = Vec::with_capacity(reservation.chunks().len());
        for &position in reservation.chunks() {
            let mut chunk = link.session.stage(reservation, position).await?;
            let State { block, .. } = &mut *self.state.borrow_mut();
            content::fill(&part.hashes[position as usize], block);
            chunk.copy_from(0, 0, block);
            staged.push(chunk);
        }
        Ok(link.session.commit(reservation, staged).await? as usize)
    }

    /// Asks again as long as the node is busy, after the time that it says; `None` if it still is at the end.
    async fn patiently<T>(
        &self,
        mut ask: impl AsyncFnMut() -> Result<T, SessionError>,
    ) -> Result<Option<T>, SessionError> {
        for _ in 0..MAX_TRIES {
            let retry_after = match ask().await {
                Err(SessionError::Busy { retry_after, .. }) => retry_after,
                answer => return answer.map(Some),
            };
            self.state.borrow_mut().tally.busy();
            tokio::time::sleep(retry_after.min(MAX_RETRY_AFTER)).await;
        }
        Ok(None)
    }
}

/// How often it is looked whether a node serves again, when none does.
const NODE_POLL: Duration = Duration::from_millis(20);

/// How often a busy node is asked; at its usual 5 ms, for a second.
const MAX_TRIES: u32 = 200;

/// The longest pause before a busy node is asked again, whatever its answer says.
const MAX_RETRY_AFTER: Duration = Duration::from_millis(100);
