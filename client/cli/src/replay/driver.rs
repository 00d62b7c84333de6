//! Plays requests through engine sessions.
//!
//! Requests start in the order of the trace, with a limit of sessions at a time; a turn starts when the turn before was saved.
//! Each request looks its prompt up, leases and copies out the found chunks, compares them, computes the rest and saves it.
//! Bytes come from the sessions' descriptors alone. All of it runs on the caller's thread.

mod load;

use std::cell::{Cell, RefCell, RefMut};
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder_client::{Reservation, SessionError};
use larder_core::what_if::cluster::LeastRecomputed;
use larder_net::trace::{Sampler, Trace};
use larder_protocol::routing::queue_key;
use larder_protocol::{Chain, ChunkHash};
use tokio::sync::watch;

pub use self::load::Load;
use super::engine::Engine;
use super::holdings::Holdings;
use super::infinite::InfiniteCache;
use super::link::{Link, LinkError, LinkSettings, OpenLink, RequestError};
use super::losses::{Losses, Served};
use super::namespace::replay_namespace;
use super::progress::Progress;
use super::route::{Router, cost_at};
use super::sessions::Schedule;
use super::tally::Transport;
use super::{Report, Tally, part_chunks};
use crate::clock::now;
use crate::cluster::{NodeAddress, TENANT};
use crate::content::{self, TraceName};
use crate::output;
use crate::trace::{CHUNK_TOKENS, Request};

/// A replay under way.
#[derive(Debug)]
pub struct Driver {
    nodes: Vec<Link>,
    part_chunks: usize,
    in_flight: u16,
    deadline: Duration,
    prefill_tokens_per_s: f64,
    load: Load,
    /// Part of every chunk's name.
    trace: TraceName,
    /// Decides which requests are traced.
    sampler: Sampler,
    /// Requests that were looked up; nodes know each as `replay-NUMBER`.
    asked: Cell<u64>,
    /// Requests that were started.
    started: watch::Sender<usize>,
    holdings: Holdings,
    /// The engines of the nodes.
    engines: Vec<Engine>,
    /// The GPUs of the engines, if computing takes time. A GPU computes one request at a time.
    gpus: Vec<Engine>,
    /// Finds the node where a request costs least; `None`: the load alone decides.
    router: Option<Router>,
    /// Never borrowed across an await.
    state: RefCell<ReplayState>,
}

#[derive(Debug)]
struct ReplayState {
    tally: Tally,
    infinite: InfiniteCache,
    losses: Losses,
    loads: LeastRecomputed,
    /// A block, on its way in or out.
    block: Vec<u8>,
}

/// A request whose hits were read.
struct Got<'a> {
    link: &'a Link,
    opened: Rc<OpenLink>,
    /// The same session with the request's name; traced if the request is.
    open: Rc<OpenLink>,
    chain: Chain,
    served: Served,
}

impl Driver {
    /// Opens a session with each node; some nodes may be down. Leaves nodes of other hosts out: the paths of their sockets lead to
    /// other nodes here. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// [`LinkError`] names the node that cannot be used; [`LinkError::AllDown`] if no node answers.
    pub async fn connect(nodes: &[NodeAddress], settings: LinkSettings) -> Result<Self, LinkError> {
        let (mut links, mut here) = (Vec::new(), Vec::new());
        for node in nodes {
            match Link::connect(node, settings).await {
                Ok(link) => {
                    links.push(link);
                    here.push(node);
                }
                Err(error @ LinkError::Another { .. }) => output::note(format_args!("{error}")),
                Err(error) => return Err(error),
            }
        }
        if !links.iter().any(Link::is_open) {
            return Err(LinkError::AllDown);
        }
        let LinkSettings { block_bytes, in_flight, prefills, deadline, prefill_tokens_per_s, load, computes } =
            settings;
        let state = ReplayState {
            tally: Tally::new(prefill_tokens_per_s),
            infinite: InfiniteCache::default(),
            losses: Losses::default(),
            loads: LeastRecomputed::new(links.len()),
            block: vec![0; block_bytes as usize],
        };
        let part_chunks = part_chunks(block_bytes, in_flight) as usize;
        let namespace = replay_namespace(block_bytes).fingerprint(TENANT);
        let holdings = Holdings::follow(here.iter().map(|node| node.http), &namespace);
        Ok(Self {
            nodes: links,
            part_chunks,
            in_flight,
            deadline,
            prefill_tokens_per_s,
            load,
            asked: Cell::new(0),
            trace: TraceName::default(),
            sampler: Sampler::default(),
            started: watch::Sender::default(),
            holdings,
            engines: here.iter().map(|_| Engine::new(prefills)).collect(),
            gpus: here.iter().filter(|_| computes).map(|_| Engine::new(1)).collect(),
            router: None,
            state: RefCell::new(state),
        })
    }

    /// Uses this trace's name.
    #[must_use]
    pub fn named(self, trace: TraceName) -> Self {
        Self { trace, ..self }
    }

    /// Routes requests by what is cached.
    #[must_use]
    pub fn routed(self, router: Option<Router>) -> Self {
        Self { router, ..self }
    }

    /// Traces some of the requests.
    #[must_use]
    pub fn traced(self, sampler: Sampler) -> Self {
        Self { sampler, ..self }
    }

    /// Plays the requests, as many sessions at a time as the links are set for. A request that fails is counted, and the others
    /// go on. If a node is gone, its requests are computed, and the next requests go to other nodes until it is back.
    ///
    /// With a `speed`, no request starts before its time in the trace, run this many times as fast.
    ///
    /// # Cancel safety
    /// If the future is dropped, [`Self::report`] has the requests whose hits were known.
    pub async fn play(&self, requests: &[Request], speed: Option<f64>, progress: &Progress) {
        let start = tokio::time::Instant::now();
        let first_ms = requests.first().map_or(0, |request| request.timestamp_ms);
        let play = async |number: usize| {
            let request = &requests[number];
            if let Some(speed) = speed {
                let after_ms = request.timestamp_ms.saturating_sub(first_ms) as f64 / speed;
                tokio::time::sleep_until(start + pause(after_ms / 1e3)).await;
            }
            self.started.send_modify(|started| *started += 1);
            self.play_one(request).await;
            number
        };
        let mut schedule = Schedule::new(requests, self.in_flight.into());
        let mut playing = FuturesUnordered::new();
        loop {
            while let Some(number) = schedule.start() {
                playing.push(play(number));
            }
            let Some(number) = playing.next().await else { break };
            schedule.done(number);
            progress.advance(self.state.borrow().tally.hit_rate());
        }
    }

    /// Waits until this number of requests was started.
    pub async fn reached(&self, requests: usize) {
        // This never fails, since the driver has the sender.
        let _ = self.started.subscribe().wait_for(|&started| started >= requests).await;
    }

    /// Sets the names of the nodes that serve and do not leave soon. Requests go to these nodes, as long as there are any.
    pub fn serving(&self, names: &[String]) {
        self.nodes.iter().for_each(|link| link.set_leaves(!names.contains(&link.node())));
    }

    /// The results so far, `took` after the start; nodes have forwarded `forwarded_chunks` chunks meanwhile.
    pub fn report(&self, took: Duration, forwarded_chunks: u64) -> Report {
        let transport = Transport {
            bytes_moved: self.nodes.iter().map(Link::bytes_moved).sum(),
            sessions_reconnected: self.nodes.iter().map(Link::reconnected).sum(),
            forwarded_chunks,
        };
        let state = self.state.borrow();
        let tally = state.tally.clone();
        tally.finish(transport, state.infinite.hit_rate(), state.losses.reasons(), took)
    }

    async fn play_one(&self, request: &Request) {
        let trace = self.sampler.begin("replay_request");
        let hashes: Vec<ChunkHash> = request.full_chunks().iter().map(|&id| self.trace.chunk(id)).collect();
        let (node, expected) = self.choose(request, &hashes).await;
        // Further requests wait in the engine's queue, and look their prompts up when it begins with them.
        let _prefill = match node {
            Some(node) => {
                let arrived = Duration::from_millis(request.timestamp_ms);
                let known = if self.router.is_some() { expected } else { 0 };
                let key = queue_key(arrived, known, self.prefill_tokens_per_s);
                Some(self.engines[node].begin(key).await)
            }
            None => None,
        };
        let bound = self.state.borrow_mut().infinite.ask(request);
        let begun = self.losses().begin(request.timestamp_ms, hashes.clone(), request.usable_chunks());
        let got = match node {
            Some(node) => self.get(&self.nodes[node], request, hashes, &trace).await,
            None => {
                self.wait_for_a_node().await;
                Err(RequestError::Lost { node: "every node".to_owned() })
            }
        };
        let served = got.as_ref().map_or(Served::NODE_GONE, |got| got.served);
        let hit = served.leased as u64 * CHUNK_TOKENS;
        self.losses().served(&begun, request.input_tokens, served);
        self.state.borrow_mut().tally.asked(request.input_tokens, hit.saturating_sub(bound));
        if let Some(node) = node {
            let loads = &mut self.state.borrow_mut().loads;
            loads.served(node, request.timestamp_ms, expected);
            loads.recomputed(node, request.timestamp_ms, request.input_tokens - hit);
        }
        self.compute(node, request.input_tokens - hit).await;
        let done = match got {
            Ok(got) => self.put(&got).await,
            Err(error) => Err(error),
        };
        trace.count("larder.tokens", request.input_tokens);
        trace.count("larder.tokens_found", hit);
        trace.set("larder.outcome", if done.is_ok() { "done" } else { "failed" });
        self.losses().end(begun);
        let state = &mut *self.state.borrow_mut();
        match done {
            Ok(()) => {}
            Err(RequestError::Lost { .. }) if served == Served::NODE_GONE => {
                state.tally.recomputed_after_failure(request.input_tokens);
            }
            Err(RequestError::Lost { .. }) => {}
            Err(error) => state.tally.failed(&error),
        }
    }

    /// Waits as long as the engine of a node computes these tokens, if computing takes time.
    async fn compute(&self, node: Option<usize>, tokens: u64) {
        let Some(gpu) = node.and_then(|node| self.gpus.get(node)) else { return };
        let _gpu = gpu.begin(Duration::ZERO).await;
        tokio::time::sleep(pause(tokens as f64 / self.prefill_tokens_per_s)).await;
    }

    /// The node of a request, if any serves, and the tokens that count as recomputed there until its hits are known.
    async fn choose(&self, request: &Request, hashes: &[ChunkHash]) -> (Option<usize>, u64) {
        let now_ms = request.timestamp_ms;
        let costs = match &self.router {
            None => None,
            Some(router) => {
                let backlogs = {
                    let loads = &self.state.borrow().loads;
                    let backlog = |(node, link): (usize, &Link)| (link.node(), loads.backlog(node, now_ms));
                    self.nodes.iter().enumerate().map(backlog).collect()
                };
                router.ask(hashes, request.input_tokens, backlogs).await
            }
        };
        let cost = |node: usize| cost_at(costs.as_ref(), &self.nodes[node].node());
        let state = &mut *self.state.borrow_mut();
        let may_serve = |node: usize| self.nodes[node].may_serve();
        let is_well = |node: usize| may_serve(node) && !self.nodes[node].leaves();
        let node = state.loads.cheapest_among(now_ms, is_well, cost);
        let node = node.or_else(|| state.loads.cheapest_among(now_ms, may_serve, cost));
        let cached = costs.as_ref().map_or(0, |costs| costs.cluster.tokens);
        let expected = request.input_tokens.saturating_sub(cached);
        if let Some(node) = node {
            state.loads.recomputed(node, now_ms, expected);
        }
        (node, expected)
    }

    /// The losses, with all changes that nodes have reported until now.
    fn losses(&self) -> RefMut<'_, Losses> {
        let mut losses = RefMut::map(self.state.borrow_mut(), |state| &mut state.losses);
        self.holdings.changes().for_each(|(node, change)| losses.changed(node, change));
        losses
    }

    /// Waits until some node may serve again, at most as long as computing the request may take.
    async fn wait_for_a_node(&self) {
        let start = now();
        while now() - start < self.deadline && !self.nodes.iter().any(Link::may_serve) {
            tokio::time::sleep(NODE_POLL).await;
        }
    }

    /// Looks a request's prompt up, and reads the found chunks.
    async fn get<'a>(
        &self,
        link: &'a Link,
        request: &Request,
        hashes: Vec<ChunkHash>,
        trace: &Trace,
    ) -> Result<Got<'a>, RequestError> {
        let opened = link.open().await?;
        let number = self.asked.get() + 1;
        self.asked.set(number);
        let named = opened.named(&format!("replay-{number}"));
        let open = Rc::new(match trace.context() {
            Some(context) => named.traced(context),
            None => named,
        });
        let chain = open.namespace.chain(hashes);
        let failed = |error| link.failed(&opened, error);
        let served = self.load(&open, &chain, request.input_tokens).await.map_err(failed)?;
        Ok(Got { link, opened, open, chain, served })
    }

    /// Saves the chunks that were not served.
    async fn put(&self, Got { link, opened, open, chain, served }: &Got<'_>) -> Result<(), RequestError> {
        for from in (served.leased..chain.len()).step_by(self.part_chunks) {
            let part = chain.part(from, chain.len().min(from + self.part_chunks));
            if !self.save(open, &part).await.map_err(|error| link.failed(opened, error))? {
                self.state.borrow_mut().tally.save_shed();
                break;
            }
            self.losses().saved(&part.hashes);
        }
        Ok(())
    }

    /// Writes the chunks of a part of a chain that the node lacks; returns whether the node had room.
    async fn save(&self, link: &OpenLink, part: &Chain) -> Result<bool, SessionError> {
        let reserving = self.patiently(async || link.session.reserve(&link.namespace, part, 0).await).await?;
        let Some(reservation) = reserving else { return Ok(false) };
        if reservation.chunks().is_empty() {
            return Ok(true);
        }
        let writing = self.patiently(async || self.write(link, part, &reservation).await).await?;
        Ok(writing == Some(reservation.chunks().len()))
    }

    /// "Computes" the chunks of a reservation into the write window and commits them; returns how many the node keeps.
    async fn write(
        &self,
        link: &OpenLink,
        part: &Chain,
        reservation: &Reservation,
    ) -> Result<usize, SessionError> {
        let mut staged = Vec::with_capacity(reservation.chunks().len());
        for &position in reservation.chunks() {
            let mut chunk = link.session.stage(reservation, position).await?;
            let ReplayState { block, .. } = &mut *self.state.borrow_mut();
            content::fill(&part.hashes[position as usize], block);
            chunk.copy_from(0, 0, block);
            staged.push(chunk);
        }
        Ok(link.session.commit(reservation, staged).await? as usize)
    }

    /// Asks a node. While the node is busy, asks again after the time that it requests; `None` if it is busy at the last try.
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

/// A pause of so many seconds, at most a year.
fn pause(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.min(365.0 * 24.0 * 3_600.0))
}

/// The time that a node lets a lease wait for other nodes, by the default of `cluster.fetch_deadline_ms`.
const LEASE_DEADLINE: Duration = Duration::from_secs(2);

/// Pause between checks whether a node serves again, when none does.
const NODE_POLL: Duration = Duration::from_millis(20);

/// Most questions to a busy node; at its usual 5 ms, for a second.
const MAX_TRIES: u32 = 200;

/// The longest pause before a busy node is asked again, even if its answer requests a longer one.
const MAX_RETRY_AFTER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_no_clock_reaches_is_a_long_pause() {
        assert_eq!(pause(1.5), Duration::from_millis(1_500));
        assert_eq!(pause(f64::INFINITY), Duration::from_hours(365 * 24));
        assert_eq!(pause(u64::MAX as f64 / 1e-300), Duration::from_hours(365 * 24));
    }
}
