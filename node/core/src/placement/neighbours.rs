//! The last answers of the other nodes: the worth of their next victims, and how much they serve.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::Fingerprint;
use larder_protocol::peer::Room;
use larder_protocol::table::{Holder, NodeNumber};

use super::{Worth, pays_to_forward, transfer_weight};

/// The other nodes that answered lately.
#[derive(Debug, Clone, Default)]
pub struct Neighbours {
    heard: BTreeMap<NodeNumber, (Room, Duration)>,
    /// The sum of the bytes a second that these nodes serve.
    served: u64,
    /// The bytes a second that this node serves.
    own: u64,
    /// The last answers of [`Neighbours::cheapest`], by namespace, kept so that an eviction does not look at all nodes.
    cheapest: BTreeMap<Fingerprint, (NodeNumber, Worth, Duration)>,
    /// The nodes that took no chunk of a namespace though they had room.
    refusals: BTreeMap<(Fingerprint, NodeNumber), Refusal>,
}

/// A node's refusal of the chunks of a namespace.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    /// Until then it is offered no more of them.
    until: Duration,
    /// The pause. It doubles with each refusal in a row.
    pause: Duration,
}

impl Neighbours {
    /// Notes what a node's answer said of the node itself.
    pub fn heard(&mut self, node: NodeNumber, room: Room, now: Duration) {
        if self.heard.len() >= MAX_NEIGHBOURS && !self.heard.contains_key(&node) {
            (self.heard, self.served) = (BTreeMap::new(), 0);
            self.cheapest.clear();
        }
        // A broken node may say anything.
        let room = Room { served: room.served.min(MOST_SERVED), ..room };
        let before = self.heard.insert(node, (room, now));
        self.served += room.served;
        self.served -= before.map_or(0, |(before, _)| before.served);
        let (least, refusals) = (Worth(room.least), &self.refusals);
        self.cheapest.retain(|&namespace, cheapest| {
            let (other, worth, _) = *cheapest;
            // If this node's worth has grown, another node may be the cheapest now.
            let is_known = other != node || least <= worth;
            if is_known && least <= worth && !refuses(refusals, namespace, node, now) {
                *cheapest = (node, least, now);
            }
            is_known
        });
    }

    /// Forgets a node that did not answer an offer: it gets no offers until it is heard again.
    pub fn forget(&mut self, node: NodeNumber) {
        if let Some((room, _)) = self.heard.remove(&node) {
            self.served -= room.served;
        }
        self.cheapest.retain(|_, (cheapest, ..)| *cheapest != node);
    }

    /// Notes that a node took none of the chunks of a namespace that have this worth. If the node has room for such chunks,
    /// it may not know the namespace: it gets no offers of the namespace for a while, and for longer after each refusal in a row.
    pub fn refused(&mut self, node: NodeNumber, namespace: Fingerprint, worth: Worth, now: Duration) {
        let has_room =
            self.heard.get(&node).is_some_and(|(room, _)| pays_to_forward(worth, Worth(room.least)));
        if has_room {
            self.refusals.retain(|_, refusal| refusal.until + LONGEST_PAUSE > now);
            let before = self.refusals.get(&(namespace, node));
            let pause = before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
            self.refusals.insert((namespace, node), Refusal { until: now + pause, pause });
            self.cheapest.remove(&namespace);
        }
    }

    /// Notes that a node took chunks of a namespace.
    pub fn accepted(&mut self, node: NodeNumber, namespace: Fingerprint) {
        self.refusals.remove(&(namespace, node));
    }

    /// The node whose next victim is worth least, and that worth, for chunks of a namespace. Of equal nodes, the one that was
    /// heard last.
    #[must_use]
    pub fn cheapest(&mut self, namespace: Fingerprint, now: Duration) -> Option<(NodeNumber, Worth)> {
        let is_fresh = |at: Duration| now.saturating_sub(at) < FRESH;
        let known = self.cheapest.get(&namespace).copied().filter(|&(.., at)| is_fresh(at));
        let cheapest = known.or_else(|| {
            self.heard.retain(|_, (_, at)| is_fresh(*at));
            self.served = self.heard.values().map(|(room, _)| room.served).sum();
            let refusals = &self.refusals;
            let willing = self.heard.iter().filter(|&(&node, _)| !refuses(refusals, namespace, node, now));
            let cheapest = willing.min_by_key(|&(_, &(room, at))| (room.least, std::cmp::Reverse(at)));
            cheapest.map(|(&node, &(room, at))| (node, Worth(room.least), at))
        });
        match cheapest {
            Some(cheapest) => _ = self.cheapest.insert(namespace, cheapest),
            None => _ = self.cheapest.remove(&namespace),
        }
        cheapest.map(|(node, worth, _)| (node, worth))
    }

    /// Sets the bytes of blocks that this node sends to others in a second.
    pub fn this_node_serves(&mut self, bytes_a_second: u64) {
        self.own = bytes_a_second;
    }

    /// How many transfers one transfer from `node` counts for: more than one if that node serves more than its share, and more
    /// than this node.
    pub fn transfer_weight(&self, node: NodeNumber) -> u64 {
        let mean = (self.served + self.own) / (self.heard.len() as u64 + 1);
        match self.heard.get(&node) {
            Some(&(Room { served, .. }, _)) if served > self.own => transfer_weight(served, mean),
            _ => 1,
        }
    }

    /// Puts the holders of a chunk into the order in which they are asked. They take turns, so that none serves all readers; of
    /// the first two, the one that serves less goes first.
    pub fn order(&self, holders: &mut [Holder], turn: usize) {
        let served = |holder: Holder| self.heard.get(&holder.node).map_or(0, |(room, _)| room.served);
        holders.rotate_left(turn % holders.len().max(1));
        if let [first, second, ..] = holders
            && served(*second) < served(*first)
        {
            std::mem::swap(first, second);
        }
    }
}

/// Whether a node took no chunk of a namespace lately.
fn refuses(
    refusals: &BTreeMap<(Fingerprint, NodeNumber), Refusal>,
    namespace: Fingerprint,
    node: NodeNumber,
    now: Duration,
) -> bool {
    refusals.get(&(namespace, node)).is_some_and(|refusal| refusal.until > now)
}

/// How long a node that took no chunk of a namespace is offered none: at first, and after many refusals in a row.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(32);

/// How long a node's answer counts.
const FRESH: Duration = Duration::from_secs(10);

/// Limit of nodes that are remembered. At this limit all are forgotten, and the next answers fill the memory again.
const MAX_NEIGHBOURS: usize = 4_096;

/// The most bytes a second that a node serves, whatever it says: the sum of all neighbours' fits a number.
const MOST_SERVED: u64 = 1 << 48;

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Fingerprint = Fingerprint([0; 32]);

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const fn room(least: u64, served: u64) -> Room {
        Room { least, served }
    }

    #[test]
    fn the_node_with_the_least_worth_is_the_cheapest_until_its_answer_is_old() {
        let [a, b, c] = [1, 2, 3].map(NodeNumber);
        let mut neighbours = Neighbours::default();
        assert_eq!(neighbours.cheapest(MODEL, at(0)), None);
        neighbours.heard(a, room(5, 0), at(0));
        neighbours.heard(b, room(3, 0), at(1));
        neighbours.heard(c, room(3, 0), at(2));
        assert_eq!(neighbours.cheapest(MODEL, at(2)), Some((c, Worth(3))));
        neighbours.forget(c);
        assert_eq!(neighbours.cheapest(MODEL, at(2)), Some((b, Worth(3))));
        neighbours.heard(a, room(5, 0), at(9));
        assert_eq!(neighbours.cheapest(MODEL, at(11)), Some((a, Worth(5))));
        assert_eq!(neighbours.cheapest(MODEL, at(19)), None);
    }

    #[test]
    fn a_node_may_say_any_number() {
        let mut neighbours = Neighbours::default();
        (0..9).for_each(|node| neighbours.heard(NodeNumber(node), room(5, u64::MAX), at(0)));
        assert_eq!(neighbours.transfer_weight(NodeNumber(0)), 1);
        assert!(neighbours.cheapest(MODEL, at(1)).is_some());
        (0..9).for_each(|node| neighbours.forget(NodeNumber(node)));
        assert_eq!(neighbours.served, 0);
    }

    #[test]
    fn a_node_whose_worth_has_grown_is_the_cheapest_no_more() {
        let [a, b] = [1, 2].map(NodeNumber);
        let mut neighbours = Neighbours::default();
        neighbours.heard(a, room(3, 0), at(0));
        neighbours.heard(b, room(5, 0), at(0));
        assert_eq!(neighbours.cheapest(MODEL, at(0)), Some((a, Worth(3))));
        neighbours.heard(a, room(9, 0), at(1));
        assert_eq!(neighbours.cheapest(MODEL, at(1)), Some((b, Worth(5))));
    }

    #[test]
    fn a_node_that_took_no_chunk_of_a_namespace_is_offered_others_but_no_more_of_these_for_a_while() {
        let ([a, b], other) = ([1, 2].map(NodeNumber), Fingerprint([7; 32]));
        let mut neighbours = Neighbours::default();
        neighbours.heard(a, room(5, 0), at(0));
        neighbours.heard(b, room(3, 0), at(0));
        assert_eq!(neighbours.cheapest(MODEL, at(0)), Some((b, Worth(3))));
        neighbours.refused(b, MODEL, Worth(1_000), at(0));
        assert_eq!(neighbours.cheapest(MODEL, at(0)), Some((a, Worth(5))));
        assert_eq!(neighbours.cheapest(other, at(0)), Some((b, Worth(3))));
        neighbours.heard(b, room(2, 0), at(0));
        assert_eq!(neighbours.cheapest(MODEL, at(0)), Some((a, Worth(5))), "its answers do not change that");
        assert_eq!(neighbours.cheapest(other, at(0)), Some((b, Worth(2))));
        neighbours.refused(a, MODEL, Worth(1_000), at(0));
        assert_eq!(neighbours.cheapest(MODEL, at(0)), None);
        neighbours.heard(b, room(2, 0), at(1));
        assert_eq!(neighbours.cheapest(MODEL, at(1)), Some((b, Worth(2))), "after a second");
        neighbours.refused(b, MODEL, Worth(1), at(1));
        assert_eq!(neighbours.cheapest(MODEL, at(1)), Some((b, Worth(2))), "the chunk was worth too little");
        neighbours.refused(b, MODEL, Worth(1_000), at(1));
        neighbours.heard(b, room(2, 0), at(2));
        assert_ne!(neighbours.cheapest(MODEL, at(2)), Some((b, Worth(2))), "two seconds this time");
        neighbours.accepted(b, MODEL);
        neighbours.refused(b, MODEL, Worth(1_000), at(4));
        neighbours.heard(b, room(2, 0), at(5));
        assert_eq!(neighbours.cheapest(MODEL, at(5)), Some((b, Worth(2))), "it begins with a second again");
    }

    #[test]
    fn a_transfer_counts_more_from_a_node_that_serves_a_quarter_more_than_the_mean_and_more_than_this_one() {
        let [a, b, c] = [1, 2, 3].map(NodeNumber);
        let mut neighbours = Neighbours::default();
        assert_eq!(neighbours.transfer_weight(a), 1, "it was never heard");
        for (node, served) in [(a, 400), (b, 100), (c, 300)] {
            neighbours.heard(node, room(5, served), at(0));
        }
        neighbours.this_node_serves(200);
        assert_eq!([a, b, c].map(|node| neighbours.transfer_weight(node)), [1_000, 1, 1]);
        neighbours.heard(a, room(5, 300), at(1));
        assert_eq!(neighbours.transfer_weight(a), 4, "the mean is 225, five quarters of it 281, and six 337");
    }

    #[test]
    fn the_last_word_of_a_node_counts_and_forgotten_nodes_count_no_more() {
        let [a, b, c] = [1, 2, 3].map(NodeNumber);
        let mut neighbours = Neighbours::default();
        (0..3).for_each(|second| neighbours.heard(a, room(5, 900), at(second)));
        neighbours.heard(a, room(5, 100), at(3));
        neighbours.heard(b, room(5, 200), at(3));
        neighbours.heard(c, room(5, 900), at(3));
        assert_eq!(neighbours.transfer_weight(b), 1, "the mean is 300");
        neighbours.forget(c);
        assert_eq!(neighbours.transfer_weight(b), 1_000, "the mean is 100");
        assert_eq!(neighbours.transfer_weight(c), 1);
        neighbours.this_node_serves(200);
        assert_eq!(neighbours.transfer_weight(b), 1, "this node serves as much");
    }

    #[test]
    fn holders_are_asked_in_turn_and_of_the_first_two_the_lighter_goes_first() {
        let [a, b, c] = [1, 2, 3].map(|node| Holder { node: NodeNumber(node), device: 0 });
        let mut neighbours = Neighbours::default();
        neighbours.heard(b.node, room(5, 7), at(0));
        let order = |turn| {
            let mut holders = [a, b, c];
            neighbours.order(&mut holders, turn);
            holders
        };
        assert_eq!([0, 1, 2, 3].map(order), [[a, b, c], [c, b, a], [c, a, b], [a, b, c]]);
        neighbours.order(&mut [], 1);
    }
}
