//! Fetching: carries an order out, batch by batch, on the thread between nodes or on block threads.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use larder_core::exchange::{Turn, Wanted};
use larder_core::{Arrival, FetchFailure};
use larder_net::trace::{SpanKind, Trace};
use larder_protocol::peer::{Chunks, Class};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::block_threads::ThreadFetch;
use super::connections::{AskedAgain, Link};
use super::metrics::{Counted, Stage};
use super::peers::Peers;
use super::place::InLine;
use super::receive::{Asked, Batch, From};
use super::{FetchChunk, FetchOrder};
use crate::watched::here;

/// The report of an order, sent once all threads that may write to its slots have dropped it. A report that is dropped without a
/// result, as by a panic, ends the channel. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Report(Arc<Mutex<Pending>>);

#[derive(Debug)]
struct Pending {
    done: Option<oneshot::Sender<Vec<Arrival>>>,
    came: Option<Vec<Arrival>>,
}

impl Report {
    pub(super) fn new(done: oneshot::Sender<Vec<Arrival>>) -> Self {
        Self(Arc::new(Mutex::new(Pending { done: Some(done), came: None })))
    }

    pub(super) fn is(&self, came: Vec<Arrival>) {
        larder_net::lock(&self.0).came = Some(came);
    }

    /// Waits until nobody waits for the report.
    async fn is_unwanted(&self) {
        poll_fn(|context| {
            let mut pending = larder_net::lock(&self.0);
            pending.done.as_mut().map_or(Poll::Pending, |done| done.poll_closed(context))
        })
        .await;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let (Some(done), Some(came)) = (self.done.take(), self.came.take()) {
            // An error: the actor stopped, and its arena goes.
            let _ = done.send(came);
        }
    }
}

/// Carries an order out, and reports each chunk's result. After the report, nothing writes to the slots.
pub(super) async fn carry_out(peers: Peers, order: FetchOrder, report: Report) {
    let FetchOrder { ordered, chunks: all, class, cancelled, trace } = order;
    let all = Arc::new(all);
    let chunks = all.len();
    let metrics = peers.metrics().clone();
    let counted = Counted::new(&metrics.fetches_in_flight, chunks as i64);
    here("fetch");
    let came = RefCell::new((0..chunks).map(|_| None).collect());
    let link = peers.link(ordered.holder.node);
    let left = match link {
        Err(_) => FetchFailure::Unreachable,
        Ok(link) => {
            let (order, chunks, class, trace) = (&ordered, &all, &class, &trace);
            let (peers, came, report) = (&peers, &came, &report);
            let fetch = Fetching { peers, link, order, chunks, class, trace, came, report };
            tokio::select! {
                () = fetch.batches() => {}
                // Nobody waits any more.
                () = report.is_unwanted() => {}
                Ok(()) = cancelled => {}
            }
            FetchFailure::Deadline
        }
    };
    drop(counted);
    let came = came.take().into_iter().map(|came: Option<_>| came.unwrap_or(Arrival::Failed(left)));
    let came: Vec<Arrival> = came.inspect(|came| metrics.fetched(came)).collect();
    if trace.is_recorded() {
        let here = came.iter().filter(|came| matches!(came, Arrival::Here { .. })).count();
        trace.count("larder.chunks", chunks as u64);
        trace.count("larder.chunks_here", here as u64);
        trace.set("larder.outcome", outcome(&came));
    }
    report.is(came);
}

/// The outcome of an order in a trace: that of the first chunk that did not come.
fn outcome(came: &[Arrival]) -> &'static str {
    let not_here = came.iter().find(|came| !matches!(came, Arrival::Here { .. }));
    match not_here {
        None | Some(Arrival::Here { .. }) => "done",
        Some(Arrival::NotHeld) => "not_held",
        Some(Arrival::Busy { .. }) => "busy",
        Some(Arrival::Damaged | Arrival::Failed(_)) => "failed",
    }
}

/// An order that is being carried out.
struct Fetching<'a> {
    peers: &'a Peers,
    link: Rc<Link>,
    order: &'a larder_core::FetchOrder,
    chunks: &'a Arc<Vec<FetchChunk>>,
    class: &'a watch::Receiver<Class>,
    trace: &'a Trace,
    came: &'a RefCell<Vec<Option<Arrival>>>,
    report: &'a Report,
}

impl Fetching<'_> {
    async fn batches(&self) {
        let chunks = self.chunks;
        let sizes = chunks.iter().map(|chunk| chunk.bytes());
        let firsts = self.peers.decide(|exchange, _| exchange.batches(sizes));
        let ends = firsts.iter().copied().skip(1).chain([chunks.len()]);
        let batches = firsts.iter().zip(ends);
        let batches =
            batches.map(|(&first, end)| self.batch(Batch::new(Arc::clone(chunks), (first..end).collect())));
        futures_util::future::join_all(batches).await;
    }

    /// Fetches a batch within the deadline. Requests chunks again that the holder was too busy to send, unless other holders have
    /// them.
    async fn batch(&self, mut batch: Batch) {
        let (peers, link) = (self.peers, &self.link);
        let &larder_core::FetchOrder { tenant, deadline, has_others, .. } = self.order;
        let (bytes, class) = (batch.bytes, *self.class.borrow());
        let wanted = Wanted { tenant, bytes, class, deadline, has_others };
        let place = InLine::of_fetch(peers, link, wanted);
        let mut changes = self.class.clone();
        loop {
            let turn = place.turn(&mut changes).await;
            let Turn { class, waited, until } = turn;
            peers.metrics().waited(peers.metrics_name(link), class, waited);
            peers.metrics().took(Stage::Turn, waited);
            let Some(until) = until else {
                let unreachable = || Arrival::Failed(FetchFailure::Unreachable);
                return batch.chunks().for_each(|(at, _)| _ = self.note(at, unreachable()));
            };
            let before = peers.came(link);
            let from = From { holder: self.order.holder, fingerprint: self.order.fingerprint, class };
            let coming = self.receive(from, &batch);
            if timeout(until.saturating_sub(peers.now()), coming).await.is_err() {
                return place.is_late(peers.missed(link, before));
            }
            let Some((busy, retry)) = batch.busy(&self.came.borrow()) else { return };
            if !place.is_busy(busy.bytes, retry) {
                return;
            }
            batch = busy;
        }
    }

    async fn receive(&self, from: From, batch: &Batch) {
        let trace = self.trace.child(SpanKind::Client, "fetch_batch");
        trace.count("larder.chunks", batch.len() as u64);
        trace.count("larder.bytes", batch.bytes);
        trace.set("larder.peer", &*self.link.name);
        let thread = self.peers.take_thread(&self.link, batch.bytes);
        if let Some(thread) = thread.block_thread()
            && let Some(address) = self.peers.address_of(&self.link)
        {
            let (name, batch) = (self.link.name.clone(), batch.clone());
            let (trace, report) = (trace.clone(), self.report.clone());
            let incarnation = self.link.peer.incarnation;
            let fetch = ThreadFetch { incarnation, address, name, from, batch, trace, report };
            let came = |at: usize, arrival| {
                let bytes = self.note(at, arrival);
                self.peers.metrics().block_thread_bytes.inc_by(bytes);
            };
            if thread.fetch(fetch, came).await {
                return;
            }
            self.link.avoid_block_threads(self.peers.now());
        }
        if let Some(over_tcp) = self.peers.over_tcp()
            && let Some(address) = self.peers.address_of(&self.link)
        {
            let came = |at, arrival| _ = self.note(at, arrival);
            if over_tcp.fetch((&self.link.name, address), from, batch, &trace, came).await {
                return;
            }
        }
        let mut again = AskedAgain::default();
        // The connection stays in use until the last byte has come.
        let (asked, _connection) = loop {
            let Some(connection) = self.peers.connection(&self.link).await else {
                let unreachable = || Arrival::Failed(FetchFailure::Unreachable);
                return batch.chunks().for_each(|(at, _)| _ = self.note(at, unreachable()));
            };
            let asked = self.peers.mover().ask(&connection, from, batch, &trace).await;
            if asked.is_ok() || !again.may(&connection) {
                break (asked, connection);
            }
        };
        if asked.as_ref().is_ok_and(Asked::is_coming) {
            self.peers.heard(&self.link);
        }
        self.peers.mover().receive(asked, from, batch, |at, arrival| _ = self.note(at, arrival)).await;
    }

    /// Notes a chunk's result, and returns the bytes that came.
    fn note(&self, at: usize, arrival: Arrival) -> u64 {
        let (peers, link, order) = (self.peers, &self.link, self.order);
        let chunk = &self.chunks[at];
        if !matches!(arrival, Arrival::Failed(_)) {
            peers.heard(link);
        }
        let mut bytes = 0;
        if let Arrival::Here { pools, .. } = &arrival {
            let came = chunk.blocks.iter().filter(|to| pools.has(to.key.pool.into()));
            bytes = came.map(|to| to.bytes).sum();
            peers.metrics().received_bytes.with_label_values(&[peers.metrics_name(link)]).inc_by(bytes);
        }
        if arrival == Arrival::Damaged {
            let (device, fingerprint, hashes) = (order.holder.device, order.fingerprint, vec![chunk.hash]);
            peers.tell_damaged(link, Chunks { device, fingerprint, hashes });
        }
        self.came.borrow_mut()[at] = Some(arrival);
        bytes
    }
}
