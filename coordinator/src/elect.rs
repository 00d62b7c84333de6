//! Takes part in an election: asks the register and the leader, and lets the membership lead or follow.

mod lookout;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use larder_net::coordinator_client::{FollowAs, Known, follow};
use larder_net::quic::Endpoint;
use larder_protocol::membership::Standing;
use larder_protocol::table::Table;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

pub(crate) use self::lookout::{Lookout, look_out};
use crate::election::{Candidate, Election, RegisterAnswer, RegisterOp};
use crate::membership::Millis;
use crate::published::Published;
use crate::register::{Register, ask};
use crate::shared::SharedMembership;
use crate::uptime::Uptime;

/// This coordinator's part in the election.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// This life of this coordinator.
    pub(crate) life: u64,
    /// The leader, as long as another coordinator leads.
    pub(crate) leader: watch::Receiver<Option<Candidate>>,
    /// Gets terms that are later than that of this leader, each with the node that knows a table of it.
    pub(crate) later_terms: mpsc::Sender<(u64, String)>,
    /// Gets a leader that this coordinator does not know, and to which it yields.
    pub(crate) rivals: mpsc::Sender<Rival>,
}

/// A coordinator that leads in a higher term, and was elected elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rival {
    pub(crate) address: SocketAddr,
    pub(crate) term: u64,
}

impl Part {
    /// This coordinator's standing, for others.
    pub(crate) fn standing(&self, membership: &SharedMembership, uptime: Uptime) -> Standing {
        let membership = membership.lock();
        let leads = membership.leads(uptime.now());
        let leader = self.leader.borrow().as_ref().map(|leader| leader.peer.clone()).filter(|_| !leads);
        Standing { term: membership.term(), life: self.life, leads, leader }
    }
}

/// A part in an election.
pub(crate) struct Elect {
    pub(crate) election: Election,
    pub(crate) membership: SharedMembership,
    pub(crate) uptime: Uptime,
    pub(crate) leader: watch::Sender<Option<Candidate>>,
    pub(crate) later_terms: mpsc::Receiver<(u64, String)>,
    pub(crate) lookout: Lookout,
    /// Time for an answer of the register.
    pub(crate) deadline: Duration,
    /// The term in which this coordinator led at the last look.
    pub(crate) led: Option<u64>,
}

impl Elect {
    /// Takes part until `stop` is ready, and frees the lease then.
    ///
    /// # Cancel safety
    /// If the future is dropped, the others wait until this coordinator's lease is over.
    pub(crate) async fn run(mut self, register: impl Register, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let (register, mut asking) = (&register, None);
        loop {
            let now = self.uptime.now();
            if let Some(leader) = self.election.poll_leader(now) {
                self.lookout.ask(leader);
            }
            if let Some(asked) = self.election.poll(now) {
                self.warn_of_silence(&asked, now);
                let deadline = self.deadline;
                asking = Some(Box::pin(async move { ask(register, &asked, deadline).await }));
            }
            let pause = self.election.wakes().saturating_sub(now).clamp(1, LONGEST_PAUSE_MS);
            tokio::select! {
                answer = answered(&mut asking) => self.election.answer(answer, self.uptime.now()),
                life = self.lookout.answer() => self.hear_leader(life),
                () = sleep(Duration::from_millis(pause)) => {}
                Some((term, node)) = self.later_terms.recv() => {
                    tracing::warn!(term, node, "a node knows a table of a later term: this coordinator leads on in a term after that");
                    self.election.heard_of(term, self.uptime.now());
                }
                () = &mut stop => break,
            }
            self.apply();
        }
        drop(asking);
        let freed = self.election.resign();
        self.apply();
        if let Some(freed) = freed {
            ask(register, &freed, FREE_DEADLINE).await;
        }
    }

    fn hear_leader(&mut self, life: u64) {
        let now = self.uptime.now();
        self.election.hear_leader(life);
        if self.election.leader(now).is_some_and(|leader| leader.life == life) {
            self.membership.lock().hears_leader(now);
        }
    }

    fn warn_of_silence(&self, asked: &RegisterOp, now: Millis) {
        if matches!(asked, RegisterOp::Write(..)) && self.election.misses_leader(now) {
            let leader = self.election.leader(now).map(|leader| leader.peer.as_str());
            tracing::warn!(
                leader,
                "the leader neither answers nor renews its lease: this coordinator takes over"
            );
        }
    }

    /// Lets the membership lead or follow.
    fn apply(&mut self) {
        let now = self.uptime.now();
        let reign = self.election.reign(now);
        let leads = reign.map(|reign| reign.term);
        let led = std::mem::replace(&mut self.led, leads);
        let mut membership = self.membership.lock();
        match reign {
            Some(reign) => membership.lead(reign.term, reign.until, now),
            None => membership.resign(),
        }
        drop(membership);
        match (led, leads) {
            (led, Some(term)) if led != leads => tracing::info!(term, "this coordinator leads"),
            (Some(term), None) => tracing::warn!(term, "this coordinator no longer leads"),
            _ => {}
        }
        let leader = self.election.leader(now).cloned();
        self.leader.send_if_modified(|known| {
            let is_news = *known != leader;
            *known = leader;
            is_news
        });
    }
}

/// Follows the tables of the leader that the register names, and of no other coordinator that answers at its address: this
/// coordinator would otherwise follow itself, if the leader registered a wrong address. Passes on each table that is newer than
/// all before.
pub(crate) async fn follow_leader(
    endpoint: Endpoint,
    mut leader: watch::Receiver<Option<Candidate>>,
    known: watch::Sender<Known>,
) {
    loop {
        let Some(Candidate { life, peer, .. }) = leader.borrow_and_update().clone() else {
            if leader.changed().await.is_err() {
                return;
            }
            continue;
        };
        let mut changes = leader.clone();
        let changed = async move { _ = changes.changed().await };
        follow(endpoint.clone(), vec![peer], FollowAs::WatcherOf(life), known.clone(), changed).await;
        if leader.has_changed().is_err() {
            return;
        }
    }
}

/// Passes the leader's tables to the membership; returns when one of them is new to it, or known from the state and not published
/// yet. `refused` is the term of the leader whose tables were refused last.
pub(crate) async fn followed(
    known: &mut watch::Receiver<Known>,
    membership: &SharedMembership,
    published: &watch::Sender<Arc<Published>>,
    uptime: Uptime,
    refused: &mut Option<u64>,
) -> Arc<Table> {
    loop {
        if known.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let table = Arc::clone(&known.borrow_and_update().table);
        let now = uptime.now();
        let (is_new, is_known, leads, term) = {
            let mut membership = membership.lock();
            let is_new = membership.follow(&table, now);
            (is_new, membership.table().epoch == table.epoch, membership.leads(now), membership.term())
        };
        let is_published = published.borrow().table().epoch >= table.epoch;
        if is_new || (is_known && !leads && !is_published) {
            return table;
        }
        if !leads && table.epoch.term < term && refused.replace(table.epoch.term) != Some(table.epoch.term) {
            tracing::warn!(
                leader = table.epoch.term,
                own = term,
                "the leader's tables are of an earlier term than this coordinator's state, and are not taken: if the state is another cluster's, or the register began anew, stop this coordinator, remove its state file, and start it again"
            );
        }
    }
}

/// The register's answer to the question under way. Never ready without a question.
async fn answered(asking: &mut Option<impl Future<Output = RegisterAnswer> + Unpin>) -> RegisterAnswer {
    let Some(question) = asking else { return std::future::pending().await };
    let answer = question.await;
    *asking = None;
    answer
}

/// The election is polled this often at least.
const LONGEST_PAUSE_MS: u64 = 60_000;

/// Time for freeing the lease while the coordinator stops.
const FREE_DEADLINE: Duration = Duration::from_millis(500);
