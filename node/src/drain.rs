//! The node's drain: an admin or SIGTERM asks for it, the actors carry it out.
//!
//! The wish to drain is kept here. The coordinator's client tells the coordinator, so a restarted coordinator hears of the drain
//! too. One task (`Drains::carry_out`) names the takers to the actors, adds up the actors' progress, and decides when the node
//! leaves: when no actor has anything more to move, or when the time is up. It goes on without an actor that hangs. An admin's
//! drain is given up, and the node goes on, if every other node drains or if no taker appears for `ALONE_FOR`. A node that was
//! told to stop leaves anyway.
//!
//! If all nodes drain at once, one node stays. An admin's drain ends only when the table lists this node as draining. That table
//! also lists every node whose drain the coordinator heard of earlier, so the last node sees that no taker is left. And of two
//! nodes that leave, one knows that it has the last copy of their common chunks. A node that was told to stop waits for that table
//! for `LISTED_WITHIN` at most, if other nodes have some of its chunks.

mod heard;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use actix::Addr;
use futures_util::FutureExt as _;
use larder_core::{DrainOrder, DrainProgress, Event, OtherNodes};
use larder_net::coordinator_client::Known;
use larder_protocol::drain::{AfterDrain, DrainCommand, DrainCounts, DrainReport, DrainStart};
use larder_protocol::table::{Holder, MemberState};
use tokio::sync::watch;
use tokio::time::sleep;

use self::heard::Heard;
use crate::actor::{GpuActor, ask};
use crate::clock::Clock;
use crate::tell::Tell;

/// The node's drain. Cloning shares.
#[derive(Debug, Clone)]
pub struct Drains(Arc<NodeDrain>);

#[derive(Debug)]
struct NodeDrain {
    clock: Clock,
    /// The default time of a drain before a stop, and the default limit of bytes moved per second.
    limits: Mutex<(Duration, u64)>,
    known: watch::Receiver<Known>,
    wish: watch::Sender<Option<Wish>>,
    /// The drains so far.
    begun: AtomicU64,
    drains: watch::Sender<bool>,
    state: Mutex<DrainCourse>,
}

/// How the node ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The node was told to stop.
    Stopped,
    /// The node has drained for good.
    Drained,
    /// The node has drained, and is to be started again.
    ToRestart,
}

/// A drain that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wish {
    /// The drain's number.
    drain: u64,
    until: Duration,
    bytes_per_second: u64,
    then: AfterDrain,
    /// Whether the node leaves in any case.
    is_stopping: bool,
    keeps_disk: bool,
}

#[derive(Debug, Default)]
struct DrainCourse {
    chunks: DrainCounts,
    is_over: bool,
    trouble: Option<String>,
}

impl Drains {
    /// Starts without a drain. `known` has the tables of the cluster.
    pub(crate) fn new(
        clock: Clock,
        at_stop: Duration,
        bytes_per_second: u64,
        known: watch::Receiver<Known>,
    ) -> Self {
        Self(Arc::new(NodeDrain {
            clock,
            limits: Mutex::new((at_stop, bytes_per_second)),
            known,
            wish: watch::Sender::default(),
            begun: AtomicU64::default(),
            drains: watch::Sender::default(),
            state: Mutex::default(),
        }))
    }

    /// Changes the limits for future drains.
    pub(crate) fn change(&self, at_stop: Duration, bytes_per_second: u64) {
        *self.limits() = (at_stop, bytes_per_second);
    }

    /// How long a drain before a stop may take.
    pub(crate) fn at_stop(&self) -> Duration {
        self.limits().0
    }

    fn limits(&self) -> MutexGuard<'_, (Duration, u64)> {
        larder_net::lock(&self.0.limits)
    }

    /// Carries out an admin's command, and reports the drain's progress.
    ///
    /// # Errors
    /// A text for people: why the command cannot be carried out.
    pub(crate) fn command(&self, admin: &str, command: DrainCommand) -> Result<DrainReport, String> {
        match command {
            DrainCommand::Report => {}
            DrainCommand::Start(start) => {
                self.start(start)?;
                let DrainStart { within_ms, then, .. } = start;
                tracing::info!(admin, within_ms, ?then, "an admin starts a drain of this node");
            }
            DrainCommand::Cancel => {
                // Held to the end: the drain ends either before the cancel, or not at all.
                let state = self.state();
                if state.is_over || self.0.wish.borrow().is_some_and(|wish| wish.is_stopping) {
                    return Err("the node is leaving already".to_owned());
                }
                if self.0.wish.send_replace(None).is_none() {
                    return Err("the node does not drain".to_owned());
                }
                drop(state);
                tracing::info!(admin, "an admin cancels the drain of this node");
            }
        }
        Ok(self.report())
    }

    fn start(&self, DrainStart { within_ms, bytes_per_second, then }: DrainStart) -> Result<(), String> {
        if self.0.wish.borrow().is_some() {
            return Err(
                "the node drains already: watch it by `larder drain --watch`, or end it by `--cancel`"
                    .to_owned(),
            );
        }
        let Known { table, own, .. } = self.0.known.borrow().clone();
        let refused = match table.member(own).map(|member| member.devices) {
            None => Some("the node is no member of its cluster, so no other node would take its chunks"),
            Some(0) => {
                Some("the node shares no chunks ([cluster] share is false): to end it, stop its process")
            }
            Some(_) => None,
        };
        if let Some(refused) = refused {
            return Err(refused.to_owned());
        }
        if self.others().takers.is_empty() {
            return Err("every other node drains or is gone, so no other node would take its chunks: to end this node nevertheless, stop its process".to_owned());
        }
        let within = Duration::from_millis(within_ms.min(MOST_WITHIN_MS));
        self.wish(Wish {
            drain: self.next_drain(),
            until: self.0.clock.elapsed() + within,
            bytes_per_second: bytes_per_second.unwrap_or(self.limits().1),
            then,
            is_stopping: false,
            keeps_disk: then == AfterDrain::Restart,
        });
        Ok(())
    }

    /// Drains before a stop, for at most `within`; chunks on the node's disk stay there. A drain that is already under way keeps
    /// its settings, and ends by then too.
    pub(crate) fn stop_within(&self, within: Duration) {
        let until = self.0.clock.elapsed() + within;
        let before = *self.0.wish.borrow();
        self.wish(match before {
            Some(wish) => Wish { until: wish.until.min(until), is_stopping: true, ..wish },
            None => Wish {
                drain: self.next_drain(),
                until,
                bytes_per_second: self.limits().1,
                then: AfterDrain::Stop,
                is_stopping: true,
                keeps_disk: true,
            },
        });
    }

    fn next_drain(&self) -> u64 {
        self.0.begun.fetch_add(1, Ordering::Relaxed)
    }

    fn wish(&self, wish: Wish) {
        self.state().trouble = None;
        self.0.wish.send_replace(Some(wish));
    }

    /// The drain's progress.
    pub fn report(&self) -> DrainReport {
        let wish = *self.0.wish.borrow();
        let state = self.state();
        let left = wish.map(|wish| wish.until.saturating_sub(self.0.clock.elapsed()));
        DrainReport {
            is_draining: wish.is_some(),
            is_over: state.is_over,
            then: wish.map(|wish| wish.then),
            left_ms: left.map_or(0, |left| left.as_millis() as u64),
            trouble: state.trouble.clone(),
            chunks: state.chunks,
        }
    }

    /// Watches whether the node drains, for messages to others.
    pub(crate) fn watch(&self) -> watch::Receiver<bool> {
        self.0.drains.subscribe()
    }

    /// Whether the node drains.
    pub fn is_draining(&self) -> bool {
        self.0.wish.borrow().is_some()
    }

    /// Carries out drains until one is over, and returns how the node ends.
    ///
    /// # Cancel safety
    /// If dropped, the actors go on draining.
    pub(crate) async fn carry_out(&self, actors: &[Addr<GpuActor>]) -> Ended {
        let mut wishes = self.0.wish.subscribe();
        loop {
            let wish = *wishes.borrow_and_update();
            let Some(wish) = wish else {
                // Never an error: `self` holds the sender.
                let _ = wishes.changed().await;
                continue;
            };
            self.0.drains.send_replace(true);
            *self.state() = DrainCourse::default();
            if let Some(ended) = self.drain(wish, actors).await {
                let chunks = self.state().chunks;
                tracing::info!(
                    moved = chunks.moved,
                    bytes = chunks.moved_bytes,
                    elsewhere = chunks.elsewhere,
                    kept_below = chunks.kept_below,
                    left = chunks.left,
                    "the node has drained"
                );
                if ended != Ended::Stopped {
                    // Leaves watchers time to hear how the drain ended.
                    sleep(LAST_WORDS).await;
                }
                return ended;
            }
            self.0.drains.send_replace(false);
            cancel(actors);
        }
    }

    /// Carries out one drain; `None` if it was cancelled or given up. Another drain may have begun since.
    async fn drain(&self, first: Wish, actors: &[Addr<GpuActor>]) -> Option<Ended> {
        let mut told: (Option<Wish>, OtherNodes) = (None, OtherNodes::default());
        let mut alone_since = None;
        let mut heard = Heard::new(actors.len());
        let listed_until = self.0.clock.elapsed() + LISTED_WITHIN;
        loop {
            let wish = self.wish_for(first.drain)?;
            let others = self.others();
            if others.takers.is_empty() && !wish.is_stopping {
                let now = self.0.clock.elapsed();
                if self.all_others_drain() || now - *alone_since.get_or_insert(now) >= ALONE_FOR {
                    self.give_up();
                    return None;
                }
                // An actor without takers reports that its drain is over. So all actors begin anew when there is a taker.
                if told.0.take().is_some() {
                    cancel(actors);
                }
                sleep(LOOK_EVERY).await;
                continue;
            }
            alone_since = None;
            if told != (Some(wish), others.clone()) {
                heard.order_changed();
                told = (Some(wish), others);
            }
            let ask = |device: usize, must_tell: bool| {
                let order = must_tell.then(|| (order(wish, actors.len()), told.1.clone()));
                ask_actor(&actors[device], order).boxed_local()
            };
            heard.hear(self.0.clock.elapsed(), ask).await;
            self.state().chunks = heard.chunks();
            let is_late = self.0.clock.elapsed() >= wish.until + LATE;
            let is_listed = self.is_known_to_drain();
            let others_now = self.others();
            let may_leave = match wish.is_stopping {
                true => is_listed || heard.chunks().elsewhere == 0 || self.0.clock.elapsed() >= listed_until,
                false => is_listed && !others_now.takers.is_empty(),
            };
            // The actors must know the takers of the table that lists this node.
            if is_late || (may_leave && others_now == told.1 && heard.is_over()) {
                return self.end(first.drain);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// The wish for this drain, unless the drain was cancelled.
    fn wish_for(&self, drain: u64) -> Option<Wish> {
        self.0.wish.borrow().filter(|wish| wish.drain == drain)
    }

    /// Ends a drain, and returns how the node ends; `None` if the drain was cancelled while the actors were asked. From now on it
    /// cannot be cancelled.
    fn end(&self, drain: u64) -> Option<Ended> {
        let mut state = self.state();
        let wish = self.wish_for(drain)?;
        state.is_over = true;
        Some(match (wish.is_stopping, wish.then) {
            (true, _) => Ended::Stopped,
            (false, AfterDrain::Stop) => Ended::Drained,
            (false, AfterDrain::Restart) => Ended::ToRestart,
        })
    }

    /// Whether the table lists this node as draining. Also true if the table does not list the node at all, or if the coordinator
    /// is too old to report drains.
    fn is_known_to_drain(&self) -> bool {
        let Known { table, own, lacks_drains, .. } = &*self.0.known.borrow();
        *lacks_drains || table.member(*own).is_none_or(|member| member.state == MemberState::Draining)
    }

    fn give_up(&self) {
        let trouble = "every other node drains or is gone: the drain is given up, and the node goes on";
        tracing::warn!("{trouble}");
        self.state().trouble = Some(trouble.to_owned());
        self.0.wish.send_replace(None);
    }

    /// Whether there are other nodes, and all of them drain.
    fn all_others_drain(&self) -> bool {
        let Known { table, own, .. } = &*self.0.known.borrow();
        let mut others = table.members.iter().filter(|member| member.number != *own).peekable();
        others.peek().is_some() && others.all(|member| member.state == MemberState::Draining)
    }

    /// The other nodes. Of the actors that may take chunks, those of nodes with lower numbers come first, the nearest of them at
    /// the front: in a rolling restart they have just started again.
    fn others(&self) -> OtherNodes {
        let Known { table, own, .. } = self.0.known.borrow().clone();
        let takes = |member: &&larder_protocol::table::Member| {
            member.number != own && member.state == MemberState::Alive
        };
        let members = || table.members.iter().filter(takes).rev();
        let before = members().filter(|member| member.number < own);
        let after = members().filter(|member| member.number > own);
        let actors = |member: &larder_protocol::table::Member| {
            let node = member.number;
            (0..member.devices).map(move |device| Holder { node, device })
        };
        let takers = before.chain(after).flat_map(actors).collect();
        let others = table.members.iter().filter(|member| member.number != own);
        let stay = others.filter(|member| member.state != MemberState::Draining).map(|member| member.number);
        OtherNodes { takers, stay: stay.collect() }
    }

    fn state(&self) -> MutexGuard<'_, DrainCourse> {
        larder_net::lock(&self.0.state)
    }
}

/// Asks an actor for its progress. Tells it to drain first, if there is an order.
async fn ask_actor(actor: &Addr<GpuActor>, order: Option<(DrainOrder, OtherNodes)>) -> DrainProgress {
    if let Some((order, others)) = order {
        // Errors: the actor is stopping.
        _ = actor.send(Tell(Event::TakersAre(others))).await;
        _ = actor.send(Tell(Event::Drain(order))).await;
    }
    // An actor that began a new life has nothing to move.
    let over = DrainProgress { is_over: true, ..DrainProgress::default() };
    let said = actor.send(ask(|actor| actor.core.drain_progress())).await;
    said.ok().flatten().flatten().unwrap_or(over)
}

fn order(wish: Wish, actors: usize) -> DrainOrder {
    DrainOrder {
        until: wish.until,
        keeps_disk: wish.keeps_disk,
        bytes_per_second: Some((wish.bytes_per_second / actors.max(1) as u64).max(1)),
    }
}

/// Tells the actors that the drain is cancelled, without waiting for them: an actor that hangs hears it later.
fn cancel(actors: &[Addr<GpuActor>]) {
    for actor in actors {
        // An actor passes over a message whose sender is gone, so the sender waits beside.
        let told = actor.send(Tell(Event::DrainCancelled));
        // An error: the actor is stopping.
        actix_rt::spawn(async { _ = told.await });
    }
}

/// How long a drain waits for a node that takes chunks. The only other node may be suspect for a moment, and a coordinator that
/// starts without its state hears of one node after the other.
const ALONE_FOR: Duration = Duration::from_secs(5);

/// How often the actors are asked for their progress.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a node that was told to stop waits until the table lists it as draining. Without a leader, no table will.
const LISTED_WITHIN: Duration = Duration::from_secs(1);

/// How long after the deadline the node still waits for its actors. Then it leaves without their answers.
const LATE: Duration = Duration::from_secs(1);

/// How long a node stays after a drain, for its watchers.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The longest drain: a day.
const MOST_WITHIN_MS: u64 = 24 * 60 * 60 * 1_000;

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use larder_protocol::table::{Epoch, Member, NodeNumber, Table};
    use tokio::task::LocalSet;
    use tokio::time::timeout;

    use super::*;

    const OWN: NodeNumber = NodeNumber(1);

    /// The drain of a node beside another node, and the way to set the state in which the table lists the node.
    fn drains() -> (Drains, impl Fn(MemberState)) {
        let tables = watch::Sender::new(known(MemberState::Alive));
        let drains = Drains::new(Clock::start(), Duration::ZERO, 1, tables.subscribe());
        (drains, move |state| drop(tables.send_replace(known(state))))
    }

    fn known(own: MemberState) -> Known {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let member = |number, state| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1,
            peer: address,
            http: address,
            devices: 1,
            weight: 1,
            state,
        };
        let members = vec![member(OWN.0, own), member(OWN.0 + 1, MemberState::Alive)];
        let table = Table { epoch: Epoch { term: 1, number: 1 }, members, homes: Vec::new() };
        Known { table: Arc::new(table), own: OWN, ..Known::default() }
    }

    fn start(then: AfterDrain) -> DrainCommand {
        DrainCommand::Start(DrainStart { within_ms: 60_000, bytes_per_second: None, then })
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        LocalSet::new().block_on(&runtime, async { timeout(Duration::from_secs(60), test).await.unwrap() });
    }

    #[test]
    fn a_drain_that_begins_right_after_a_cancel_ends_as_it_was_asked_for() {
        run(async {
            let (drains, listed_as) = drains();
            drains.command("me", start(AfterDrain::Stop)).unwrap();
            let carrying = drains.clone();
            let ended = tokio::task::spawn_local(async move { carrying.carry_out(&[]).await });
            // The drain goes on until the table lists it.
            let mut watched = drains.watch();
            watched.wait_for(|drains| *drains).await.unwrap();
            drains.command("me", DrainCommand::Cancel).unwrap();
            drains.command("me", start(AfterDrain::Restart)).unwrap();
            listed_as(MemberState::Draining);
            assert_eq!(ended.await.unwrap(), Ended::ToRestart);
        });
    }

    #[test]
    fn a_drain_that_was_cancelled_while_the_actors_were_asked_does_not_end_the_node() {
        let (drains, _) = drains();
        drains.command("me", start(AfterDrain::Stop)).unwrap();
        let asked = drains.0.wish.borrow().unwrap();
        drains.command("me", DrainCommand::Cancel).unwrap();
        assert_eq!(drains.end(asked.drain), None);
        assert!(!drains.report().is_over);
        drains.command("me", start(AfterDrain::Restart)).unwrap();
        assert_eq!(drains.end(asked.drain), None, "that is another drain");
        let asked = drains.0.wish.borrow().unwrap();
        assert_eq!(drains.end(asked.drain), Some(Ended::ToRestart));
        assert!(drains.command("me", DrainCommand::Cancel).is_err(), "too late");
    }
}
