//! The last hour of the cluster, for the console: a few sums of all nodes, every 10 seconds, while there are 256 nodes at most.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_protocol::peer::{PeerRequest, Show};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::gather::{NodeQuery, Shown, Wanted};
use crate::published::Published;

/// The cluster at one time, in the body of `GET /console/history`, a list: the oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Moment {
    /// The time: milliseconds since 1970.
    unix_ms: u64,
    /// Nodes that answered.
    nodes: u64,
    /// Members that did not answer.
    silent: u64,
    /// Bytes of the arenas.
    arena_bytes: u64,
    /// Bytes of slots in use.
    used_bytes: u64,
    /// Open sessions.
    sessions: u64,
    /// Prompt tokens of lookups since the moment before; of a node or actor that was silent meanwhile, one moment's part of them.
    tokens_asked: u64,
    /// Tokens among them that were found.
    tokens_hit: u64,
    /// Chunks evicted since the moment before.
    evictions: u64,
}

/// The moments that are kept. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct History(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    moments: VecDeque<Moment>,
    /// The last answers of each node, by name.
    before: BTreeMap<String, Before>,
}

/// The last answers of one life of a node.
#[derive(Debug, Default)]
struct Before {
    incarnation: u64,
    /// The last counters of each actor, by device, and the number of moments since. An actor that is late is missing in an answer.
    actors: BTreeMap<u16, (Counters, u64)>,
}

/// Counters of an actor.
#[derive(Debug, Clone, Copy)]
struct Counters {
    tokens_asked: u64,
    tokens_hit: u64,
    evictions: u64,
}

/// The part of a node's `/status` that is summed.
#[derive(Debug, Deserialize)]
struct NodeSums {
    #[serde(default)]
    incarnation: u64,
    actors: Vec<ActorStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ActorStatus {
    device: u16,
    arena_bytes: u64,
    used_bytes: u64,
    sessions: u64,
    tokens_asked: u64,
    tokens_hit: u64,
    evictions: u64,
}

impl History {
    /// Starts to keep the moments; the nodes' answers to these questions fill them.
    pub(crate) fn start(questions: mpsc::Sender<NodeQuery>, tables: watch::Receiver<Arc<Published>>) -> Self {
        let history = Self::default();
        actix_rt::spawn(history.clone().keep(questions, tables));
        history
    }

    /// Asks the nodes until nobody answers questions any more.
    async fn keep(self, questions: mpsc::Sender<NodeQuery>, tables: watch::Receiver<Arc<Published>>) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            if tables.borrow().table().members.len() > MOST_NODES {
                continue;
            }
            let (answer, answered) = oneshot::channel();
            let show = Show { path: "/status".into(), body: Vec::new() };
            let question = NodeQuery { wanted: Wanted::Answer(PeerRequest::Show(show)), node: None, answer };
            if questions.send(question).await.is_err() {
                return;
            }
            if let Ok(shown) = answered.await {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                self.kept().note(since.as_millis() as u64, &shown);
            }
        }
    }

    /// The moments, the oldest first.
    pub(crate) fn moments(&self) -> Vec<Moment> {
        self.kept().moments.iter().cloned().collect()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn note(&mut self, unix_ms: u64, shown: &[Shown]) {
        let mut moment = Moment { unix_ms, ..Moment::default() };
        for one in shown {
            let node = one.said.as_ref().ok().and_then(|json| serde_json::from_slice::<NodeSums>(json).ok());
            let before = self.before.entry(one.node.clone()).or_default();
            before.actors.values_mut().for_each(|(_, moments)| *moments += 1);
            let Some(NodeSums { incarnation, actors }) = node else {
                moment.silent += 1;
                continue;
            };
            moment.nodes += 1;
            if before.incarnation != incarnation {
                *before = Before { incarnation, ..Before::default() };
            }
            for actor in actors {
                moment.arena_bytes += actor.arena_bytes;
                moment.used_bytes += actor.used_bytes;
                moment.sessions += actor.sessions;
                let ActorStatus { device, tokens_asked, tokens_hit, evictions, .. } = actor;
                let now = Counters { tokens_asked, tokens_hit, evictions };
                // An actor that is new here or has started again counts from the next moment on. After a silence, the part of one
                // moment counts.
                if let Some((before, moments)) = before.actors.insert(device, (now, 0)) {
                    let grown = |now: u64, before: u64| now.saturating_sub(before) / moments;
                    moment.tokens_asked += grown(tokens_asked, before.tokens_asked);
                    moment.tokens_hit += grown(tokens_hit, before.tokens_hit);
                    moment.evictions += grown(evictions, before.evictions);
                }
            }
        }
        self.before.retain(|name, _| shown.iter().any(|one| one.node == *name));
        if self.moments.len() == MOST_MOMENTS {
            self.moments.pop_front();
        }
        self.moments.push_back(moment);
    }
}

/// How often nodes are asked.
const EVERY: Duration = Duration::from_secs(10);

/// Larger clusters have no history here: their questions would be most of a coordinator's work.
const MOST_NODES: usize = 256;

/// Moments of an hour.
const MOST_MOMENTS: usize = 360;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn said(node: &str, incarnation: u64, asked: u64, hit: u64) -> Shown {
        let actor = json!({ "arena_bytes": 100, "used_bytes": 40, "sessions": 1,
            "tokens_asked": asked, "tokens_hit": hit, "evictions": 2 * hit, "more": "than is read" });
        said_by(node, incarnation, &[actor, json!({ "device": 1, "arena_bytes": 1 })])
    }

    fn said_by(node: &str, incarnation: u64, actors: &[Value]) -> Shown {
        let status = json!({ "incarnation": incarnation, "actors": actors });
        Shown { node: node.into(), said: Ok(status.to_string().into_bytes()) }
    }

    #[test]
    fn counters_are_told_as_differences_within_one_life_of_a_node() {
        let mut kept = Kept::default();
        let silent = Shown { node: "b".into(), said: Err("no answer in time".into()) };
        kept.note(1, &[said("a", 7, 1_000, 500), said("b", 1, 10, 0)]);
        kept.note(2, &[said("a", 7, 1_100, 560), silent]);
        kept.note(3, &[said("a", 8, 50, 20), said("b", 1, 25, 5)]);
        kept.note(4, &[said("a", 8, 60, 25), said("b", 1, 30, 7)]);
        kept.note(5, &[said("a", 8, 60, 25)]);
        let told: Vec<_> = kept
            .moments
            .iter()
            .map(|moment| {
                (moment.nodes, moment.silent, moment.tokens_asked, moment.tokens_hit, moment.evictions)
            })
            .collect();
        assert_eq!(
            told,
            [(2, 0, 0, 0, 0), (1, 1, 100, 60, 120), (2, 0, 7, 2, 5), (2, 0, 15, 7, 14), (1, 0, 0, 0, 0)]
        );
        assert_eq!((kept.moments[0].arena_bytes, kept.moments[0].used_bytes), (202, 80));
        assert_eq!(kept.before.len(), 1, "a node that left is forgotten");
    }

    #[test]
    fn of_an_actor_that_answered_late_the_part_of_one_moment_counts_and_not_its_whole_life() {
        let mut kept = Kept::default();
        let actor = |device: u16, asked: u64| json!({ "device": device, "tokens_asked": asked });
        kept.note(1, &[said_by("a", 7, &[actor(0, 500), actor(1, 90_000)])]);
        kept.note(2, &[said_by("a", 7, &[actor(0, 510)])]);
        kept.note(3, &[said_by("a", 7, &[actor(0, 520), actor(1, 90_008)])]);
        kept.note(4, &[said_by("a", 7, &[actor(0, 530), actor(1, 90_012), actor(2, 70_000)])]);
        let asked: Vec<_> = kept.moments.iter().map(|moment| moment.tokens_asked).collect();
        assert_eq!(asked, [0, 10, 14, 14]);
    }

    #[test]
    fn an_hour_is_kept() {
        let mut kept = Kept::default();
        (0..MOST_MOMENTS as u64 + 5).for_each(|at| kept.note(at, &[]));
        assert_eq!((kept.moments.len(), kept.moments[0].unix_ms), (MOST_MOMENTS, 5));
        assert_eq!(EVERY * MOST_MOMENTS as u32, Duration::from_secs(3_600));
    }
}
