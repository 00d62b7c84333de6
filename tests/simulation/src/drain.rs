//! Drains: nodes that leave on purpose, while everything goes wrong around them.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_core::{DrainOrder, Event, OtherNodes, TakeNumber, TakeOrder, TakeReply};
use larder_protocol::drain::{Take, Taken};
use larder_protocol::peer::{PeerRequest, PeerResponse, RetryAfter};
use larder_protocol::table::{Holder, MemberState};

use crate::exchange::{Body, For};
use crate::process::Own;
use crate::serve::BUSY_RETRY_MS;
use crate::world::{At, Happening, Life, World};

/// The drain of a process.
#[derive(Debug)]
pub(crate) struct Draining {
    until: Duration,
    keeps_disk: bool,
    others: OtherNodes,
    /// The end of the process's last standstill, as known when the drain began.
    paused_until: Duration,
}

/// Peers that wait until an actor has taken chunks.
pub(crate) type Taking = BTreeMap<TakeNumber, (Life, u64)>;

impl World {
    /// An admin makes a process drain.
    pub(crate) fn drain_begins(&mut self, host: usize, within: Duration, gives_up: bool) {
        let until = self.local(host) + within;
        let (keeps_disk, paused_until) = (self.random.bool(), self.hosts[host].paused_until);
        let cancelled_after = self.random.u64(..within.as_millis() as u64);
        let Some(process) = &mut self.hosts[host].process else { return };
        let life = process.life;
        if process.drain.is_some() {
            return;
        }
        process.drain = Some(Draining { until, keeps_disk, others: OtherNodes::default(), paused_until });
        self.note("drain", &[host as u64, life.number]);
        if self.others(life).takers.is_empty() {
            if let Some(process) = self.process(life) {
                process.drain = None;
            }
            return;
        }
        self.say_drains(life, true);
        self.drain_goes_on(life);
        if gives_up {
            self.plan_local(life, Duration::from_millis(cancelled_after), Own::DrainCancelled);
        }
    }

    /// Tells the coordinator whether the process drains.
    fn say_drains(&mut self, life: Life, drains: bool) {
        if let Some(process) = self.process(life) {
            process.follower.following.drains(drains);
            self.follows_on(life);
        }
    }

    pub(crate) fn drain_cancelled(&mut self, life: Life) {
        let Some(process) = self.process(life) else { return };
        if process.drain.take().is_none() {
            return;
        }
        self.note("drains no more", &[life.host as u64]);
        for actor in 0..self.settings.actors {
            self.tell(At { life, actor }, Event::DrainCancelled);
        }
        self.say_drains(life, false);
    }

    /// Checks the progress of a drain: the process leaves when the drain is over.
    pub(crate) fn drain_goes_on(&mut self, life: Life) {
        let (others, now) = (self.others(life), self.local(life.host));
        let Some(process) = self.process(life) else { return };
        let Some(drain) = &mut process.drain else { return };
        if others.takers.is_empty() {
            return self.drain_cancelled(life);
        }
        let order =
            DrainOrder { until: drain.until, keeps_disk: drain.keeps_disk, bytes_per_second: Some(400_000) };
        let (until, paused_until) = (drain.until, drain.paused_until);
        if drain.others != others {
            drain.others.clone_from(&others);
            for actor in 0..self.settings.actors {
                self.tell(At { life, actor }, Event::TakersAre(others.clone()));
                self.tell(At { life, actor }, Event::Drain(order));
            }
        }
        let Some(process) = self.process(life) else { return };
        let is_over =
            |actor: &crate::actor::Actor| actor.core.drain_progress().is_none_or(|progress| progress.is_over);
        let is_over = process.actors.iter().all(is_over);
        if !is_over && now > until + LATE && self.hosts[life.host].paused_until == paused_until {
            self.violate(|| format!("{life:?}: a drain is not over {:?} after its deadline", now - until));
        }
        if is_over {
            return self.leaves(life);
        }
        self.plan_local(life, LOOK_EVERY, Own::DrainGoesOn);
    }

    /// A process leaves the cluster in order, ends, and starts again.
    fn leaves(&mut self, life: Life) {
        let counts = self.process(life).map(|process| {
            let chunks = process.actors.iter().filter_map(|actor| actor.core.drain_progress());
            chunks.fold((0, 0), |(moved, left), progress| {
                (moved + progress.chunks.moved, left + progress.chunks.left)
            })
        });
        let (moved, left) = counts.unwrap_or_default();
        self.note("drained", &[life.host as u64, moved, left]);
        if let Some(process) = self.process(life) {
            process.follower.following.leave();
            self.follows_on(life);
        }
        self.crash(life.host, false);
        let after = Duration::from_millis(self.random.u64(100..2_000));
        self.plan(after, Happening::Start(life.host));
    }

    /// The actors that may take chunks of a process, as it knows them.
    fn others(&mut self, life: Life) -> OtherNodes {
        let actors = self.settings.actors;
        let Some(process) = self.process(life) else { return OtherNodes::default() };
        let (table, own) = (process.exchange.table(), process.directory.own());
        let others = table.members.iter().filter(|member| member.number != own);
        let stay = others.filter(|member| member.state != MemberState::Draining);
        let well = stay.clone().filter(|member| member.state == MemberState::Alive);
        let takers = well.flat_map(|member| (0..actors).map(|device| Holder { node: member.number, device }));
        OtherNodes { takers: takers.collect(), stay: stay.map(|member| member.number).collect() }
    }

    /// An actor asks an actor of another node to keep chunks.
    pub(crate) fn ask_to_take(&mut self, at: At, store: u64, order: TakeOrder) {
        let TakeOrder { take, taker, namespace, chunks } = order;
        let request = Take { from: at.actor, to: taker.device, namespace, chunks };
        let request = PeerRequest::Take(Box::new(request));
        self.ask_peer(at.life, taker.node, request, TAKE_DEADLINE, For::Take(at, store, take));
    }

    /// The answer has come, or will not come.
    pub(crate) fn take_answered(
        &mut self,
        at: At,
        store: u64,
        take: TakeNumber,
        answer: Option<PeerResponse>,
    ) {
        let taken = match answer {
            Some(PeerResponse::Taken(taken)) => Some(taken),
            _ => None,
        };
        self.tell_soon(at, store, Event::TakeAnswered { take, taken });
    }

    /// A peer that drains asks an actor to keep chunks.
    pub(crate) fn take(&mut self, at: At, from: Life, call: u64, take: &Take) {
        let now = self.local(at.life.host);
        let name = self.host_name(from.host);
        let Some(process) = self.process(at.life) else { return };
        let table = process.exchange.table();
        let member = table.members.iter().find(|member| member.name == name);
        let Some(node) = member.map(|member| member.number) else { return };
        let Some(actor) = self.actor(at) else { return };
        let holder = Holder { node, device: take.from };
        match actor.core.take(now, holder, take.namespace.as_ref(), &take.chunks) {
            TakeReply::Now(taken) => self.answer_take(at.life, from, call, PeerResponse::Taken(taken)),
            TakeReply::Busy => {
                let retry = RetryAfter { retry_after_ms: BUSY_RETRY_MS };
                self.answer_take(at.life, from, call, PeerResponse::Busy(retry));
            }
            // The peer asks again if the answer was lost: its first question no longer counts.
            TakeReply::Later(number) => _ = actor.takes.insert(number, (from, call)),
        }
        self.tell(at, Event::Alarm);
    }

    /// An actor has taken the chunks that it will take.
    pub(crate) fn taken(&mut self, at: At, number: TakeNumber, taken: Taken) {
        let waiting = self.actor(at).and_then(|actor| actor.takes.remove(&number));
        if let Some((from, call)) = waiting {
            self.answer_take(at.life, from, call, PeerResponse::Taken(taken));
        }
    }

    fn answer_take(&mut self, life: Life, from: Life, call: u64, response: PeerResponse) {
        self.send(life, from.host, Some(from), &Body::Answer { call, response });
    }
}

/// Pause between checks of a drain's progress.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How late a drain may end: actors check deadlines each time they tick.
const LATE: Duration = Duration::from_millis(200);

const TAKE_DEADLINE: Duration = Duration::from_secs(8);
