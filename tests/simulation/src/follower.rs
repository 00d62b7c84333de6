//! A node that follows the coordinators, with the real decisions: it dials one after the other.

use std::sync::Arc;
use std::time::Duration;

use larder_net::coordinator_client::following::{Candidate, Following, Known};
use larder_protocol::version::Version;

use crate::coordinator::{Follows, Stream, at_address};
use crate::process::Own;
use crate::world::{CoordinatorSays, Life, World};

/// The part of a node that follows the coordinators.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) following: Following,
    /// The present stream; 0 between two attempts.
    stream: u64,
    /// The coordinator of the present stream.
    coordinator: usize,
    /// The coordinators to dial next in this attempt.
    left: Vec<usize>,
    /// The alarm that is set, and its time.
    alarm: (u64, Duration),
}

impl Follower {
    pub(crate) fn new(candidate: Candidate) -> Self {
        let following = Following::node(candidate, Known::default());
        Self { following, stream: 0, coordinator: 0, left: Vec::new(), alarm: (0, Duration::ZERO) }
    }
}

impl World {
    /// A node dials its coordinators; if it knows the leader, it dials the leader last.
    pub(crate) fn dial_coordinators(&mut self, life: Life) {
        let (local, count) = (self.local(life.host), self.coordinators.all.len());
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        let leader = follower.following.dial(local).and_then(|leader| at_address(&leader));
        follower.left =
            (0..count).map(|at| (follower.coordinator + count - at) % count).chain(leader).collect();
        self.dial_next(life);
    }

    fn dial_next(&mut self, life: Life) {
        let (stream, local) = (self.next_number(), self.local(life.host));
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        let Some(next) = follower.left.pop() else {
            follower.stream = 0;
            let pause = follower.following.pause(local);
            return self.plan_local(life, pause, Own::Dial);
        };
        (follower.coordinator, follower.stream) = (next, stream);
        follower.alarm = (0, Duration::MAX);
        follower.following.begin(local, Version::LATEST);
        self.follows_on(life);
        self.plan_local(life, DIAL_DEADLINE, Own::DialLate(stream));
    }

    /// A coordinator has not answered in time.
    pub(crate) fn dial_is_late(&mut self, life: Life, stream: u64) {
        let Some(process) = self.process(life) else { return };
        if process.follower.stream == stream && !process.follower.following.is_taken() {
            self.dial_next(life);
        }
    }

    /// It is time for a heartbeat, or to dial again.
    pub(crate) fn beat(&mut self, life: Life, alarm: u64) {
        let local = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        if process.follower.alarm.0 != alarm {
            return;
        }
        process.follower.alarm = (0, Duration::MAX);
        let silent = || process.silent.iter().copied().collect();
        match process.follower.following.tick(local, silent) {
            Ok(()) => self.follows_on(life),
            Err(_) => self.stream_ends(life),
        }
    }

    /// A message of the coordinator has come.
    pub(crate) fn follower_hears(
        &mut self,
        life: Life,
        CoordinatorSays { stream, message }: CoordinatorSays,
    ) {
        let local = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        if process.follower.stream != stream {
            return;
        }
        let heard = process.follower.following.hear(local, message);
        if let Some(known) = process.follower.following.take_news() {
            self.learns(life, &known);
        }
        match heard {
            Ok(()) => self.follows_on(life),
            Err(_) => self.stream_ends(life),
        }
    }

    /// Sends the messages that are due, and sets the next alarm.
    pub(crate) fn follows_on(&mut self, life: Life) {
        let (local, alarm) = (self.local(life.host), self.next_number());
        while let Some(process) = self.process(life) {
            let Follower { following, stream, coordinator, .. } = &mut process.follower;
            let (to, stream) = (*coordinator, Stream { of: Follows::Node(life), number: *stream });
            let Some(message) = following.poll_message() else { break };
            self.say_on_stream(to, stream, message);
        }
        let Some(process) = self.process(life) else { return };
        let due = process.follower.following.next_deadline().unwrap_or_default();
        if due < process.follower.alarm.1 {
            process.follower.alarm = (alarm, due);
            self.plan_local(life, due.saturating_sub(local) + Duration::from_micros(1), Own::Beat(alarm));
        }
    }

    /// Dials the next coordinator, or begins again with all.
    fn stream_ends(&mut self, life: Life) {
        let Some(process) = self.process(life) else { return };
        if process.follower.following.is_taken() {
            process.follower.left.clear();
        }
        self.dial_next(life);
    }

    /// Tells a table that names this life of the node to the node's parts.
    fn learns(&mut self, life: Life, known: &Known) {
        let Known { table, own, incarnation, .. } = known;
        let is_made = self.coordinators.made.get(&table.epoch) == Some(table) || table.epoch.number == 0;
        if !is_made && !self.faults_forget() {
            self.violate(|| format!("{life:?}: table {} is no coordinator's", table.epoch));
        }
        if table.member(*own).is_some_and(|member| member.incarnation == *incarnation) {
            self.take_table(life, Arc::clone(table), *own);
        }
    }
}

/// Time in which a coordinator must tell its standing.
const DIAL_DEADLINE: Duration = Duration::from_millis(500);
