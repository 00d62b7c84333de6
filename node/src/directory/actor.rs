//! The directory's actor: a mailbox around the shard, the outbox and the cache.

use std::collections::BTreeMap;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use larder_client::trace::{SpanKind, Trace};
use larder_protocol::peer::{Announce, Announced, Chunks, PeerRequest, PeerResponse, Repair, Rows};
use larder_protocol::table::{NodeNumber, RowKey};

use super::cache::Cache;
use super::lookup::{HomeAsk, Lookup, View, row_keys};
use super::metrics::DirectoryMetrics;
use super::outbox::{Answered, Moved, Outbox, Outgoing};
use super::shard::Shard;
use super::{AskHolders, Changed, Holders, NewTable, ServeAnnounce, ServeFind, ServeRepair, Stale};
use crate::clock::Clock;
use crate::exchange::AskPeer;

/// The directory's part of one node: home of its rows, speaker of its actors.
pub struct DirectoryActor {
    view: View,
    shard: Shard,
    outbox: Outbox,
    cache: Cache,
    peers: Recipient<AskPeer>,
    limits: DirectoryLimits,
    metrics: DirectoryMetrics,
    clock: Clock,
    finds: usize,
}

/// The numbers of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryLimits {
    /// How long a lookup waits to hear who has what.
    pub find_deadline: Duration,
    /// How long an announcement waits for its answer before it is sent again.
    pub announce_deadline: Duration,
    /// Rows that this home keeps, at about 17 bytes each.
    pub max_rows: u64,
}

impl Default for DirectoryLimits {
    fn default() -> Self {
        Self {
            find_deadline: Duration::from_millis(100),
            announce_deadline: Duration::from_secs(1),
            max_rows: 1 << 25,
        }
    }
}

impl DirectoryActor {
    /// A directory that knows no table yet: until then nobody holds anything, and changes wait.
    #[must_use]
    pub fn new(
        peers: Recipient<AskPeer>,
        limits: DirectoryLimits,
        metrics: DirectoryMetrics,
        clock: Clock,
    ) -> Self {
        Self {
            view: View::default(),
            shard: Shard::new(limits.max_rows),
            outbox: Outbox::default(),
            cache: Cache::default(),
            peers,
            limits,
            metrics,
            clock,
            finds: 0,
        }
    }

    /// Sends what is due. What this node is home to goes to its own shard at once.
    fn send_due(&mut self, ctx: &mut Context<Self>) {
        loop {
            let mut has_own = false;
            for outgoing in self.outbox.due(self.clock.now()) {
                if outgoing.home == self.view.own {
                    has_own = true;
                    let answer = self.serve_announce(&outgoing.announce);
                    self.announced(&outgoing, Some(answer), ctx);
                } else {
                    self.send(outgoing, ctx);
                }
            }
            // The own shard has answered: more may be due, until nothing waits or its stream starts anew.
            if !has_own {
                break;
            }
        }
    }

    fn send(&self, outgoing: Outgoing, ctx: &mut Context<Self>) {
        let request = PeerRequest::Announce(outgoing.announce.clone());
        let asked = self.ask(outgoing.home, request, self.limits.announce_deadline);
        let answered = asked.into_actor(self).map(move |answer, act, ctx| {
            let answer = match answer {
                Some(PeerResponse::Announced(announced)) => Some(announced),
                Some(_) | None => None,
            };
            act.announced(&outgoing, answer, ctx);
        });
        ctx.spawn(answered);
    }

    fn announced(&mut self, batch: &Outgoing, answer: Option<Announced>, ctx: &mut Context<Self>) {
        let outcome = match self.outbox.answered(&batch.id(), answer, self.clock.now()) {
            Answered::Known { changes, lag_ms, moved } => {
                self.metrics.changes.inc_by(changes as u64);
                if changes > 0 {
                    self.metrics.lag.observe(lag_ms as f64 / 1e3);
                }
                moved.into_iter().for_each(|moved| self.tell_moved(moved, ctx));
                "known"
            }
            Answered::Restarted => "restarted",
            Answered::Again => "again",
            Answered::Late => "late",
        };
        self.metrics.batches.with_label_values(&[outcome]).inc();
    }

    fn tell_moved(&self, moved: Moved, ctx: &mut Context<Self>) {
        let Moved { holder, fingerprint, hashes } = moved;
        let request = PeerRequest::Moved(Chunks { device: holder.device, fingerprint, hashes });
        let told = self.ask(holder.node, request, self.limits.announce_deadline);
        ctx.spawn(told.into_actor(self).map(|answer, act, _| {
            // A holder that does not hear of it keeps a copy that others may read: nothing is lost.
            let outcome = if answer == Some(PeerResponse::Done) { "done" } else { "failed" };
            act.metrics.moved.with_label_values(&[outcome]).inc();
        }));
    }

    fn serve_announce(&mut self, announce: &Announce) -> Announced {
        let answer = self.shard.announce(announce);
        let outcome = match answer {
            Announced::Known(_) => "known",
            Announced::StartAnew => "start_anew",
            Announced::Later => "later",
            Announced::OtherIncarnation(_) => "other_incarnation",
        };
        self.metrics.announced.with_label_values(&[outcome]).inc();
        answer
    }

    /// Asks what is not known here, the homes in parallel.
    fn look_up(&mut self, ask: AskHolders) -> ResponseActFuture<Self, Vec<Holders>> {
        let now = self.clock.now();
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
        if others.is_empty() || self.finds + others.len() > MAX_FINDS {
            self.metrics.finds.with_label_values(&["shed"]).inc_by(others.len() as u64);
            return Box::pin(fut::ready(lookup.finish(&self.view, now)));
        }
        self.finds += others.len();
        let asked = others.into_iter().map(|HomeAsk { home, find, positions }| {
            let trace = trace.child(SpanKind::Client, "find");
            trace.count("larder.chunks", positions.len() as u64);
            let answer = self.ask_traced(home, PeerRequest::Find(find), self.limits.find_deadline, trace);
            async move { (home, positions, answer.await) }
        });
        Box::pin(join_all(asked).into_actor(self).map(move |answers, act, _| {
            let now = act.clock.now();
            act.finds -= answers.len();
            for (home, positions, answer) in answers {
                if let Some(rows) = act.rows_of(home, answer) {
                    lookup.fill(&positions, &rows, &act.view, Some(&mut act.cache), now);
                }
            }
            let holders = lookup.finish(&act.view, now);
            trace.count("larder.chunks_here", holders.iter().filter(|held| !held.is_empty()).count() as u64);
            holders
        }))
    }

    /// A home's answer to a question. One that does not come makes the home silent for a moment.
    fn rows_of(&mut self, home: NodeNumber, answer: Option<PeerResponse>) -> Option<Rows> {
        let now = self.clock.now();
        let (rows, outcome) = match answer {
            Some(PeerResponse::Rows(rows)) => (Some(rows), "found"),
            Some(PeerResponse::Busy(_)) => (None, "busy"),
            Some(_) => (None, "refused"),
            None => (None, "silent"),
        };
        match outcome {
            "silent" => self.view.is_silent(home, now),
            _ => self.view.answers(home),
        }
        self.metrics.finds.with_label_values(&[outcome]).inc();
        rows
    }

    fn stale(&mut self, stale: &Stale, ctx: &mut Context<Self>) {
        let rows = row_keys(&stale.fingerprint, &stale.chunks);
        self.metrics.stale.inc_by(rows.len() as u64);
        self.cache.not_held(stale.holder, &rows);
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

    /// Asks a node; `None` where no answer comes in time. Dropping the future gives up the answer.
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
        // The exchange keeps the deadline; but a full mailbox before it must not cost more.
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
        ctx.run_interval(TICK, |act, ctx| act.send_due(ctx));
        ctx.run_interval(SLOW_TICK, |act, _| {
            act.shard.tick(act.clock.now());
            act.metrics.show(&act.shard, &act.outbox);
        });
    }
}

impl Handler<AskHolders> for DirectoryActor {
    type Result = ResponseActFuture<Self, Vec<Holders>>;

    fn handle(&mut self, ask: AskHolders, _: &mut Context<Self>) -> Self::Result {
        self.look_up(ask)
    }
}

impl Handler<Changed> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, changed: Changed, ctx: &mut Context<Self>) {
        self.outbox.changed(changed.device, &changed.changes, self.clock.now());
        self.send_due(ctx);
    }
}

impl Handler<Stale> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, stale: Stale, ctx: &mut Context<Self>) {
        self.stale(&stale, ctx);
    }
}

impl Handler<NewTable> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, NewTable { table, own }: NewTable, ctx: &mut Context<Self>) {
        self.cache.new_table(&self.view.table, &table);
        self.shard.new_table(&table, own);
        self.outbox.new_table(&table, own, self.clock.now());
        (self.view.table, self.view.own) = (table, own);
        self.send_due(ctx);
    }
}

impl Handler<ServeFind> for DirectoryActor {
    type Result = MessageResult<ServeFind>;

    fn handle(&mut self, ServeFind(find): ServeFind, _: &mut Context<Self>) -> Self::Result {
        self.metrics.served.inc();
        MessageResult(self.shard.find(&find, self.clock.now()))
    }
}

impl Handler<ServeAnnounce> for DirectoryActor {
    type Result = MessageResult<ServeAnnounce>;

    fn handle(&mut self, ServeAnnounce(announce): ServeAnnounce, _: &mut Context<Self>) -> Self::Result {
        MessageResult(self.serve_announce(&announce))
    }
}

impl Handler<ServeRepair> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, ServeRepair(repair): ServeRepair, _: &mut Context<Self>) {
        self.shard.not_held(repair.holder, &repair.rows, self.clock.now());
    }
}

/// How often batches are looked for.
const TICK: Duration = Duration::from_millis(super::stream::FLUSH_MS);

/// How often gauges are brought up to date, and old doubts forgotten.
const SLOW_TICK: Duration = Duration::from_secs(1);

/// Messages that may wait.
const MAILBOX_MESSAGES: usize = 1_024;

/// Questions to other homes at a time. Past it, what is not known here counts as held by nobody.
const MAX_FINDS: usize = 4_096;
