//! The announcements of nodes to homes, with the real outboxes and shards.

use std::time::Duration;

use larder_core::directory::{Answered, BatchId, Outgoing};
use larder_protocol::peer::Announced;
use larder_protocol::table::NodeNumber;

use super::cluster::{Cluster, Happening, ONE_WAY, index};
use super::connections::name;
use super::tally::Kind;
use crate::directory::millis;

impl Cluster<'_> {
    /// Sends batches that are due. Batches for this node as home go to its own shard at once.
    pub(super) fn send_due(&mut self, node: usize) {
        loop {
            let now = millis(self.now);
            let own = &mut self.nodes[node];
            let Some(player) = own.player.as_mut().filter(|_| own.is_alive) else { return };
            let mut has_own = false;
            let is_near = |home| own.ends.connections.used(&name(index(home))).is_some();
            for outgoing in player.outbox.due(now, is_near) {
                let own = &mut self.nodes[node];
                if outgoing.home == own.number {
                    has_own = true;
                    let answers = outgoing.announces.iter().map(|announce| own.shard.announce(announce));
                    let answers = answers.collect();
                    self.announced(node, &outgoing, Some(answers));
                } else if own
                    .player
                    .as_ref()
                    .is_some_and(|player| player.view.silent.contains(&outgoing.home))
                {
                    self.plan(ONE_WAY, Happening::Announced(node, outgoing, None));
                } else {
                    let compares = outgoing.announces.iter().all(|announce| announce.changes.is_empty());
                    let took = self.send(node, outgoing.home, compares);
                    self.plan(took, Happening::Announce(node, outgoing));
                }
            }
            if !has_own {
                return;
            }
        }
    }

    /// Batches come to a home.
    pub(super) fn announces(&mut self, from: usize, outgoing: Outgoing) {
        let changes: usize = outgoing.announces.iter().map(|announce| announce.changes.len()).sum();
        let kind = if changes == 0 { Kind::Compare } else { Kind::Announce };
        let bytes = self.sizes.announce.of(changes) + self.sizes.announced;
        self.tell(from, outgoing.home, kind, bytes);
        let Some(home) = self.node(outgoing.home) else {
            self.unanswered(from, outgoing.home, SILENCE);
            return self.plan(ANNOUNCE_DEADLINE, Happening::Announced(from, outgoing, None));
        };
        let answers = outgoing.announces.iter().map(|announce| home.shard.announce(announce)).collect();
        self.plan(ONE_WAY, Happening::Announced(from, outgoing, Some(answers)));
    }

    /// A home answered.
    pub(super) fn announced(&mut self, node: usize, outgoing: &Outgoing, answers: Option<Vec<Announced>>) {
        let now = millis(self.now);
        let answers = answers.unwrap_or_default().into_iter().map(Some).chain(std::iter::repeat(None));
        let Some(player) = &mut self.nodes[node].player else { return };
        for (announce, answer) in outgoing.announces.iter().zip(answers) {
            let batch = BatchId::new(outgoing.home, announce);
            match player.outbox.answered(&batch, answer, now) {
                Answered::Known { changes, .. } if changes > 0 => {
                    self.tally.known_at = self.now;
                    self.tally.known += changes as u64;
                }
                Answered::Restarted => self.tally.restarts += 1,
                Answered::Known { .. } | Answered::Again | Answered::Late => {}
            }
        }
    }

    /// Counts a message of one node to another, and its answer.
    pub(super) fn tell(&mut self, from: usize, to: NodeNumber, kind: Kind, bytes: u64) {
        let to = index(to);
        self.nodes[from].contacts.add(to, self.now);
        if let Some(to) = self.nodes.get_mut(to) {
            to.contacts.add(from, self.now);
        }
        self.tally.message(to, kind, bytes);
    }
}

/// A peer that sends nothing for this time, although it was asked, counts as silent.
pub(super) const SILENCE: Duration = Duration::from_millis(500);

/// Time for which an announcement waits for its answer.
const ANNOUNCE_DEADLINE: Duration = Duration::from_secs(1);
