//! The directory's actor: a mailbox around the shard, the outbox and the cache, on the peer thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use larder_protocol::peer::{Announced, Chunks, Find, PeerRequest, PeerResponse, Repair, Rows};
use larder_protocol::table::{Holder, NodeNumber, RowKey, Table};
use larder_protocol::{ChunkHash, Fingerprint};

use super::lookup::Lookup;
use super::metrics::AskedOf;
use super::{
    AskHolders, Changed, DirectoryMetrics, Holders, Moved, NewTable, Outbox, Outgoing, RowCache,
    ServeAnnounce, ServeFind, ServeRepair, Shard, Stale,
};
use crate::clock::Clock;
use crate::exchange::{AskPeer, SilentPeers};

/// This node's part of the directory.
pub struct DirectoryActor {
    table: Arc<Table>,
    own: NodeNumber,
    shard: Shard,
    outbox: Outbox,
    cache: RowCache,
    peers: Recipient<AskPeer>,
    silent: SilentPeers,
    limits: DirectoryLimits,
    metrics: DirectoryMetrics,
    clock: Clock,
    /// Whether a call of [`Self::send_waiting`] is on its way.
    is_scheduled: bool,
}

/// What bounds the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryLimits {
    /// How long a lookup waits for a home.
    pub find_deadline: Duration,
    /// Rows that this node is home to, at most.
    pub max_rows: u64,
}

impl DirectoryActor {
    /// A directory without rows, before the first table.
    #[must_use]
    pub fn new(
        peers: Recipient<AskPeer>,
        silent: SilentPeers,
        limits: DirectoryLimits,
        metrics: DirectoryMetrics,
        clock: Clock,
    ) -> Self {
        Self {
            table: Arc::default(),
            own: NodeNumber::default(),
            shard: Shard::new(limits.max_rows),
            outbox: Outbox::default(),
            cache: RowCache::default(),
            peers,
            silent,
            limits,
            metrics,
            clock,
            is_scheduled: false,
        }
    }

    /// Sends what is due, and comes back when something else is.
    fn send_waiting(&mut self, ctx: &mut Context<Self>) {
        for outgoing in self.outbox.poll(self.clock.now()) {
            self.send(outgoing, ctx);
        }
        self.schedule(ctx);
    }

    fn schedule(&mut self, ctx: &mut Context<Self>) {
        let Some(due) = self.outbox.due().filter(|_| !self.is_scheduled) else { return };
        self.is_scheduled = true;
        let pause = Duration::from_millis(due.since(self.clock.now())).max(BATCH_PAUSE);
        ctx.run_later(pause, |actor, ctx| {
            actor.is_scheduled = false;
            actor.send_waiting(ctx);
        });
    }

    fn send(&mut self, outgoing: Outgoing, ctx: &mut Context<Self>) {
        if outgoing.home == self.own {
            let answer = self.shard.announce(&outgoing.announce);
            return self.answered(&outgoing, Some(answer), ctx);
        }
        let request = PeerRequest::Announce(outgoing.announce.clone());
        let asked = self.peers.send(AskPeer { node: outgoing.home, request, deadline: ANNOUNCE_DEADLINE });
        let finish = asked.into_actor(self).map(move |answer, actor, ctx| {
            let answer = match answer {
                Ok(Ok(PeerResponse::Announced(answer))) => Some(answer),
                Ok(Ok(PeerResponse::Refused(reason))) => {
                    tracing::warn!(home = %outgoing.home, reason, "a home refuses an announcement");
                    None
                }
                _ => None,
            };
            actor.answered(&outgoing, answer, ctx);
        });
        ctx.spawn(finish);
    }

    fn answered(&mut self, sent: &Outgoing, answer: Option<Announced>, ctx: &mut Context<Self>) {
        let moved = self.outbox.answered(sent, answer, self.clock.now());
        self.tell_moved(moved, ctx);
        self.schedule(ctx);
    }

    /// Tells holders what they may give up. One that does not hear it keeps a copy more.
    fn tell_moved(&mut self, moved: Vec<Moved>, ctx: &mut Context<Self>) {
        let mut by_holder = BTreeMap::<(Holder, Fingerprint), Vec<ChunkHash>>::new();
        for Moved { from, fingerprint, hash } in moved {
            by_holder.entry((from, fingerprint)).or_default().push(hash);
        }
        for ((Holder { node, device }, fingerprint), hashes) in by_holder {
            let request = PeerRequest::Moved(Chunks { device, fingerprint, hashes });
            let told = self.peers.send(AskPeer { node, request, deadline: ANNOUNCE_DEADLINE });
            ctx.spawn(told.into_actor(self).map(move |told, _, _| {
                if !matches!(told, Ok(Ok(_))) {
                    tracing::debug!(%node, "a node was not told what it may give up");
                }
            }));
        }
    }

    /// Asks the homes that a lookup needs, all at once.
    fn ask_homes(&self, lookup: &Lookup) -> impl Future<Output = Vec<(NodeNumber, Option<Rows>)>> + use<> {
        let others = lookup.homes.keys().filter(|&&home| home != self.own);
        let asked: Vec<_> = others
            .map(|&home| {
                let rows = lookup.rows_of(home);
                let request = PeerRequest::Find(Find { epoch: self.table.epoch, rows });
                let asked =
                    self.peers.send(AskPeer { node: home, request, deadline: self.limits.find_deadline });
                async move {
                    match asked.await {
                        Ok(Ok(PeerResponse::Rows(rows))) => (home, Some(rows)),
                        _ => (home, None),
                    }
                }
            })
            .collect();
        join_all(asked)
    }

    fn rows(fingerprint: &Fingerprint, chunks: &[larder_protocol::ChunkRef]) -> Vec<RowKey> {
        chunks.iter().map(|chunk| RowKey::new(fingerprint, chunk)).collect()
    }

    /// Counts what a home said, or that it said nothing.
    fn heard(&mut self, lookup: &mut Lookup, home: NodeNumber, rows: Option<&Rows>) {
        let asked = lookup.homes.get(&home).map_or(0, Vec::len);
        let now = self.clock.now();
        match rows {
            Some(rows) => {
                lookup.answered(home, &rows.spans, &mut self.cache, now);
                self.metrics.asked(AskedOf::Home, asked);
            }
            None => self.metrics.asked(AskedOf::Silent, asked),
        }
    }
}

impl Actor for DirectoryActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MESSAGES);
        ctx.run_interval(TICK, |actor, _| {
            actor.shard.tick(actor.clock.now());
            let (rows, held) = (actor.shard.len(), actor.outbox.held());
            let (outbox, shard) = (actor.outbox.counts(), actor.shard.counts());
            actor.metrics.observe(rows, held, actor.outbox.waiting(), outbox, shard);
        });
    }
}

impl Handler<AskHolders> for DirectoryActor {
    type Result = ResponseActFuture<Self, Vec<Holders>>;

    fn handle(&mut self, ask: AskHolders, _: &mut Self::Context) -> Self::Result {
        let now = self.clock.now();
        let rows = Self::rows(&ask.fingerprint, &ask.chunks);
        let mut lookup = Lookup::plan(rows, &self.table, &mut self.cache, now);
        self.metrics.finds.inc();
        self.metrics.asked(AskedOf::Cache, lookup.cached);
        if lookup.homes.contains_key(&self.own) {
            let find = Find { epoch: self.table.epoch, rows: lookup.rows_of(self.own) };
            self.metrics.asked(AskedOf::Own, find.rows.len());
            let spans = self.shard.find(&find, now).spans;
            lookup.answered(self.own, &spans, &mut self.cache, now);
        }
        let asked = self.ask_homes(&lookup);
        self.metrics.homes_asked.inc_by(lookup.homes.keys().filter(|&&home| home != self.own).count() as u64);
        Box::pin(asked.into_actor(self).map(move |answers, actor, _| {
            for (home, rows) in &answers {
                actor.heard(&mut lookup, *home, rows.as_ref());
            }
            lookup.finish(&actor.table, actor.own, |node| actor.silent.contains(node))
        }))
    }
}

impl Handler<Changed> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, changed: Changed, ctx: &mut Self::Context) {
        self.outbox.changed(changed.device, changed.changes);
        self.schedule(ctx);
    }
}

impl Handler<Stale> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, stale: Stale, ctx: &mut Self::Context) {
        let Stale { holder, fingerprint, chunks } = stale;
        let rows = Self::rows(&fingerprint, &chunks);
        self.metrics.stale_rows.inc_by(rows.len() as u64);
        let mut by_home = BTreeMap::<NodeNumber, Vec<RowKey>>::new();
        for row in rows {
            self.cache.remove(&row, holder);
            if let Some(home) = self.table.home(row.run.partition()) {
                by_home.entry(home).or_default().push(row);
            }
        }
        for (home, rows) in by_home {
            if home == self.own {
                self.shard.not_held(holder, &rows, self.clock.now());
                continue;
            }
            let request = PeerRequest::Repair(Repair { holder, rows });
            let told = self.peers.send(AskPeer { node: home, request, deadline: ANNOUNCE_DEADLINE });
            ctx.spawn(told.into_actor(self).map(move |told, _, _| {
                if !matches!(told, Ok(Ok(_))) {
                    tracing::debug!(%home, "a home was not told of a stale row");
                }
            }));
        }
    }
}

impl Handler<NewTable> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, new: NewTable, ctx: &mut Self::Context) {
        let NewTable { table, own } = new;
        let incarnation = table.member(own).map_or(0, |member| member.incarnation);
        self.shard.new_table(&table, own);
        self.outbox.new_table(&table, own, incarnation);
        self.cache.clear();
        (self.table, self.own) = (table, own);
        self.send_waiting(ctx);
    }
}

impl Handler<ServeFind> for DirectoryActor {
    type Result = MessageResult<ServeFind>;

    fn handle(&mut self, ServeFind(find): ServeFind, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.shard.find(&find, self.clock.now()))
    }
}

impl Handler<ServeAnnounce> for DirectoryActor {
    type Result = MessageResult<ServeAnnounce>;

    fn handle(&mut self, ServeAnnounce(announce): ServeAnnounce, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.shard.announce(&announce))
    }
}

impl Handler<ServeRepair> for DirectoryActor {
    type Result = ();

    fn handle(&mut self, ServeRepair(Repair { holder, rows }): ServeRepair, _: &mut Self::Context) {
        self.shard.not_held(holder, &rows, self.clock.now());
    }
}

/// Messages that wait for the directory; senders wait for a place.
const MAILBOX_MESSAGES: usize = 4_096;

/// How long changes wait for others, so that one batch tells many.
const BATCH_PAUSE: Duration = Duration::from_millis(2);

/// How long a home may take to take an announcement.
const ANNOUNCE_DEADLINE: Duration = Duration::from_secs(1);

/// How often doubts are looked at and gauges brought up to date.
const TICK: Duration = Duration::from_millis(500);
