//! The directory's actor: a mailbox around the shard, the outbox and the cache.
//!
//! After a panic the directory begins again empty, and every stream to it starts anew.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use larder_core::Millis;
use larder_core::directory::cache::Cache;
use larder_core::directory::lookup::{HomeAsk, Lookup, View, row_keys};
use larder_core::directory::{Answered, BatchId, FLUSH_MS, Holders, Moved, Outbox, Outgoing, Shard};
use larder_core::fair::FairPlaces;
use larder_core::store::ids::TenantId;
use larder_net::trace::{SpanKind, Trace};
use larder_protocol::peer::{Announce, Announced, Chunks, PeerRequest, PeerResponse, Repair, Rows};
use larder_protocol::table::{NodeNumber, RowKey, Table};
use tokio::sync::watch;

use super::metrics::DirectoryMetrics;
use super::{AskHolders, Changed, FoundHolders, Stale};
use crate::clock::Clock;
use crate::exchange::{AskPeer, ConnectedPeers, SilentPeers};
use crate::exchange::{NewTable, ServeAnnounce, ServeFind, ServeRepair};
use crate::watched::{Watch, here};

/// One node's part of the directory: keeps the rows whose home the node is, and announces its actors' chunks to other homes.
pub struct DirectoryActor {
    view: View,
    shard: Shard,
    outbox: Outbox,
    cache: Cache,
    peers: Recipient<AskPeer>,
    silent: SilentPeers,
    connected: ConnectedPeers,
    /// How often the directory began again. Each time, the actors tell it all that they hold.
    begins: watch::Sender<u64>,
    limits: DirectoryLimits,
    metrics: DirectoryMetrics,
    clock: Clock,
    watch: Watch,
    /// The questions to other homes that are under way.
    finds: FairPlaces<TenantId>,
    /// When the actor next looks for due messages.
    next_look: Option<(Millis, SpawnHandle)>,
}

/// The numbers of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryLimits {
    /// How long a lookup waits for the directory's answers.
    pub find_deadline: Duration,
    /// How long an announcement waits for its answer before it is sent again.
    pub announce_deadline: Duration,
    /// Rows that this home keeps, at about 17 bytes each.
    pub max_rows: u64,
}

impl DirectoryActor {
    /// A directory that knows no table yet. Until it gets one, nobody holds anything, and changes wait.
    pub fn new(
        peers: Recipient<AskPeer>,
        (silent, connected): (SilentPeers, ConnectedPeers),
        begins: watch::Sender<u64>,
        limits: DirectoryLimits,
        metrics: DirectoryMetrics,
        clock: Clock,
        watch: Watch,
    ) -> Self {
        Self {
            view: View::default(),
            shard: Shard::new(limits.max_rows),
            outbox: Outbox::default(),
            cache: Cache::default(),
            peers,
            silent,
            connected,
            begins,
            limits,
            metrics,
            clock,
            watch,
            finds: FairPlaces::default(),
            next_look: None,
        }
    }

    /// Runs `work`. If it panics, trusts nothing that it worked on: drops rows, streams and answers, and asks the holders of the
    /// rows and this node's actors for everything again.
    fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let watch = self.watch.clone();
        let came = watch.catch("directory", || work(self));
        if came.is_none() {
            let (table, own) = (Arc::clone(&self.view.table), self.view.own);
            self.view = View::default();
            self.shard = self.shard.begin_again();
            self.outbox = self.outbox.begin_again();
            self.cache = Cache::default();
            // If this table panics again, the directory waits for the next table.
            watch.catch("directory", || self.take_table(table, own));
            self.begins.send_modify(|begins| *begins += 1);
        }
        came
    }

    fn take_table(&mut self, table: Arc<Table>, own: NodeNumber) {
        self.cache.new_table(&self.view.table, &table, own);
        self.shard.new_table(&table, own);
        self.outbox.new_table(&table, own, self.clock.now());
        (self.view.table, self.view.own) = (table, own);
    }

    /// Sends the due messages. Changes for which this node is home go to its own shard at once, but only some at a time: requests
    /// of other nodes are answered in between.
    fn send_due(&mut self, ctx: &mut Context<Self>) {
        for _ in 0..OWN_BATCHES {
            let mut has_own = false;
            let is_near = |home| {
                let member = self.view.table.member(home);
                member.is_some_and(|member| self.connected.contains(&member.name))
            };
            for outgoing in self.outbox.due(self.clock.now(), is_near) {
                if outgoing.home == self.view.own {
                    has_own = true;
                    let answers = self.serve_announces(&outgoing.announces);
                    self.announced(&outgoing, Some(answers), ctx);
                } else {
                    self.send(outgoing, ctx);
                }
            }
            // The own shard has answered, so more may be due.
            if !has_own {
                break;
            }
        }
        self.look_again(ctx);
    }

    /// Schedules the next look for messages, for when the next one is due.
    fn look_again(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.now();
        // Messages that are already due wait for their turn or for an answer.
        let Some(next) = self.outbox.next_due().map(|due| due.max(now + FLUSH_MS)) else { return };
        if let Some((planned, look)) = self.next_look.take() {
            if planned <= next && planned > now {
                self.next_look = Some((planned, look));
                return;
            }
            ctx.cancel_future(look);
        }
        let look = ctx.run_later(Duration::from_millis(next.0 - now.0), |act, ctx| {
            act.next_look = None;
            act.guarded(|act| act.send_due(ctx));
        });
        self.next_look = Some((next, look));
    }

    fn send(&self, outgoing: Outgoing, ctx: &mut Context<Self>) {
        let request = PeerRequest::Announce(outgoing.announces.clone());
        let asked = self.ask(outgoing.home, request, self.limits.announce_deadline);
        let answered = asked.into_actor(self).map(move |answer, act, ctx| {
            let answer = match answer {
                Some(PeerResponse::Announced(announced)) => Some(announced),
                Some(_) | None => None,
            };
            act.guarded(|act| act.announced(&outgoing, answer, ctx));
        });
        ctx.spawn(answered);
    }

    fn announced(&mut self, message: &Outgoing, answers: Option<Vec<Announced>>, ctx: &mut Context<Self>) {
        // If the home's answer is too short, the remaining batches count as unanswered.
        let answers = answers.unwrap_or_default().into_iter().map(Some).chain(std::iter::repeat(None));
        for (announce, answer) in message.announces.iter().zip(answers) {
            let batch = BatchId::new(message.home, announce);
            let answered = self.outbox.answered(&batch, answer, self.clock.now());
            self.metrics.batches.with_label_values(&[<&str>::from(&answered)]).inc();
            if let Answered::Known { changes, lag_ms, moved } = answered {
                self.metrics.changes.inc_by(changes as u64);
                if changes > 0 {
                    self.metrics.lag.observe(lag_ms as f64 / 1e3);
                }
                moved.into_iter().for_each(|moved| self.tell_moved(moved, ctx));
            }
        }
        self.look_again(ctx);
    }

    fn tell_moved(&self, moved: Moved, ctx: &mut Context<Self>) {
        let Moved { holder, fingerprint, hashes } = moved;
        let request = PeerRequest::Moved(Chunks { device: holder.device, fingerprint, hashes });
        let told = self.ask(holder.node, request, self.limits.announce_deadline);
        ctx.spawn(told.into_actor(self).map(|answer, act, _| {
            // A holder that misses this message keeps a copy that others may read: nothing is lost.
            let outcome = if answer == Some(PeerResponse::Done) { "done" } else { "failed" };
            act.metrics.moved.with_label_values(&[outcome]).inc();
        }));
    }

    fn serve_announces(&mut self, announces: &[Announce]) -> Vec<Announced> {
        announces.iter().map(|announce| self.serve_announce(announce)).collect()
    }

    fn serve_announce(&mut self, announce: &Announce) -> Announced {
        let answer = self.shard.announce(announce);
        self.metrics.announced.with_label_values(&[<&str>::from(answer)]).inc();
        answer
    }

    /// Asks the homes in parallel, for rows that are not known here.
    fn look_up(&mut self, ask: AskHolders) -> ResponseActFuture<Self, FoundHolders> {
        here("directory");
        let now = self.clock.now();
        self.view.silent = self.silent.get();
        let mut lookup = Lookup::new(&ask.fingerprint, &ask.chunks, &self.view, &self.cache, now);
        self.metrics.asked.inc_by(ask.chunks.len() as u64);
        self.metrics.cached.inc_by(lookup.cached() as u64);
        let (own, others): (Vec<_>, Vec<_>) =
            lookup.take_asks().into_iter().partition(|ask| ask.home == self.view.own);
        for HomeAsk { find, positions, .. } in own {
            let rows = self.shard.find(&find, now);
            // The own shard is as near as the cache, and always right.
            lookup.fill(&positions, &rows, &self.view, None, now);
        }
        self.metrics.homes.observe(others.len() as f64);
        let trace = ask.trace;
        trace.count("larder.chunks", ask.chunks.len() as u64);
        trace.count("larder.homes", others.len() as u64);
        let (tenant, finds) = (ask.tenant, others.len() as u64);
        if others.is_empty() || !self.finds.take(tenant, finds, MAX_FINDS) {
            self.metrics.finds.with_label_values(&["shed"]).inc_by(finds);
            return Box::pin(fut::ready(self.found(lookup)));
        }
        let asked = others.into_iter().map(|HomeAsk { home, find, positions }| {
            let trace = trace.child(SpanKind::Client, "find");
            trace.count("larder.chunks", positions.len() as u64);
            let answer = self.ask_traced(home, PeerRequest::Find(find), self.limits.find_deadline, trace);
            async move { (home, positions, answer.await) }
        });
        let chunks = ask.chunks.len();
        Box::pin(join_all(asked).into_actor(self).map(move |answers, act, _| {
            act.finds.give_back(tenant, finds);
            let nobody = || nobody_knows(chunks);
            act.guarded(|act| act.answers(lookup, answers, &trace)).unwrap_or_else(nobody)
        }))
    }

    /// Takes the homes' answers to a question.
    fn answers(
        &mut self,
        mut lookup: Lookup,
        answers: Vec<(NodeNumber, Vec<u32>, Option<PeerResponse>)>,
        trace: &Trace,
    ) -> FoundHolders {
        let now = self.clock.now();
        for (home, positions, answer) in answers {
            if let Some(rows) = self.rows_of(home, answer) {
                lookup.fill(&positions, &rows, &self.view, Some(&mut self.cache), now);
            }
        }
        let found = self.found(lookup);
        let here = found.holders.iter().filter(|held| !held.is_empty()).count();
        trace.count("larder.chunks_here", here as u64);
        found
    }

    fn found(&self, lookup: Lookup) -> FoundHolders {
        let unanswered = lookup.unanswered();
        FoundHolders { holders: lookup.finish(&self.view), unanswered }
    }

    /// The rows in a home's answer to a question. Notes whether the home is late.
    fn rows_of(&mut self, home: NodeNumber, answer: Option<PeerResponse>) -> Option<Rows> {
        let now = self.clock.now();
        let (rows, outcome) = match answer {
            Some(PeerResponse::Rows(rows)) => (Some(rows), "found"),
            Some(PeerResponse::Busy(_)) => (None, "busy"),
            Some(_) => (None, "refused"),
            None => (None, "silent"),
        };
        match outcome {
            "silent" => self.view.is_late(home, now),
            _ => self.view.answers(home),
        }
        self.metrics.finds.with_label_values(&[outcome]).inc();
        rows
    }

    fn stale(&mut self, stale: &Stale, ctx: &mut Context<Self>) {
        let rows = row_keys(&stale.fingerprint, &stale.chunks);
        self.metrics.stale.inc_by(rows.len() as u64);
        let rows = self.cache.not_held(stale.holder, &rows, self.clock.now());
        let mut by_home = BTreeMap::<NodeNumber, Vec<RowKey>>::new();
        for row in rows {
            if let Some(home) = self.view.table.home(row.run.partition()) {
                by_home.entry(home).or_default().push(row);
            }
        }
        for (home, rows) in by_home {
            if home == self.view.own {
                self.shard.not_held(stale.holder, &rows, self.clock.now());
            } else if self.view.may_ask(home, self.clock.now()) {
                let repair = PeerRequest::Repair(Repair { holder: stale.holder, rows });
                let told = self.ask(home, repair, self.limits.announce_deadline);
                // A row that is not repaired costs the next reader a round trip.
                ctx.spawn(told.into_actor(self).map(|_, _, _| ()));
            }
        }
    }

    /// Asks a node; `None` if no answer comes in time. Dropping the future gives up the answer.
    fn ask(
        &self,
        node: NodeNumber,
        request: PeerRequest,
        deadline: Duration,
    ) -> impl Future<Output = Option<PeerResponse>> + use<> {
        self.ask_traced(node, request, deadline, Trace::default())
    }

    fn ask_traced(
        &self,
        node: NodeNumber,
        request: PeerRequest,
        deadline: Duration,
        trace: Trace,
    ) -> impl Future<Output = Option<PeerResponse>> + use<> {
        let asked = self.peers.send(AskPeer { node, request, deadline, trace });
        // The exchange keeps the deadline. This timeout also bounds the wait for a full mailbox of the exchange.
        async move {
            match tokio::time::timeout(deadline, asked).await {
                Ok(Ok(Ok(response))) => Some(response),
                Ok(Ok(Err(_)) | Err(_)) | Err(_) => None,
            }
        }
    }
}

impl Actor for DirectoryActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(MAILBOX_MESSAGES);
        ctx.run_interval(TICK, |act, ctx| {
            act.guarded(|act| {
                act.shard.tick(act.clock.now());
                act.metrics.show(&act.shard, &act.outbox);
                // After a panic, nothing else looks for messages.
                act.send_due(ctx);
            });
        });
    }
}

/// The answer to a question that this node could not ask.
fn nobody_knows(chunks: usize) -> FoundHolders {
    FoundHolders { holders: vec![Holders::default(); chunks], unanswered: (0..chunks as u32).collect() }
}

impl Handler<AskHolders> for DirectoryActor {
    type Result = ResponseActFuture<Self, FoundHolders>;

    fn handle(&mut self, ask: AskHolders, _: &mut Context<Self>) -> Self::Result {
        let nobody = nobody_knows(ask.chunks.len());
        self.guarded(|act| act.look_up(ask)).unwrap_or_else(|| Box::pin(fut::ready(nobody)))
    }
}

impl Handler<Changed> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, mut changed: Changed, ctx: &mut Context<Self>) {
        self.guarded(|act| {
            act.cache.leave_out(&mut changed.changes, act.clock.now());
            act.outbox.changed(changed.device, &changed.changes, act.clock.now());
            act.send_due(ctx);
        });
    }
}

impl Handler<Stale> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, stale: Stale, ctx: &mut Context<Self>) {
        self.guarded(|act| act.stale(&stale, ctx));
    }
}

impl Handler<NewTable> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, NewTable { table, own }: NewTable, ctx: &mut Context<Self>) {
        self.guarded(|act| {
            act.take_table(table, own);
            act.send_due(ctx);
        });
    }
}

impl Handler<ServeFind> for DirectoryActor {
    type Result = MessageResult<ServeFind>;

    fn handle(&mut self, ServeFind(find): ServeFind, _: &mut Context<Self>) -> Self::Result {
        self.metrics.served.inc();
        let rows = self.guarded(|act| act.shard.find(&find, act.clock.now()));
        let nothing = || Rows { epoch: self.view.table.epoch, spans: Vec::new() };
        MessageResult(rows.unwrap_or_else(nothing))
    }
}

impl Handler<ServeAnnounce> for DirectoryActor {
    type Result = MessageResult<ServeAnnounce>;

    fn handle(&mut self, ServeAnnounce(announces): ServeAnnounce, _: &mut Context<Self>) -> Self::Result {
        MessageResult(self.guarded(|act| act.serve_announces(&announces)).unwrap_or_default())
    }
}

impl Handler<ServeRepair> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, ServeRepair(repair): ServeRepair, _: &mut Context<Self>) {
        self.guarded(|act| act.shard.not_held(repair.holder, &repair.rows, act.clock.now()));
    }
}

/// How often gauges are updated, and old doubts forgotten.
const TICK: Duration = Duration::from_secs(1);

/// Messages that may wait.
const MAILBOX_MESSAGES: usize = 1_024;

/// Batches of changes that the directory takes from this node's own actors at once.
const OWN_BATCHES: u32 = 4;

/// Limit of questions to other homes at a time; one tenant alone has half of them. Beyond it, unknown chunks count as held by
/// nobody.
const MAX_FINDS: u64 = 8_192;
