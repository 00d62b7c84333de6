//! What the next victims of the other nodes are worth, as their last answers said.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::table::NodeNumber;

use super::Worth;

/// The other nodes that answered lately.
#[derive(Debug, Clone, Default)]
pub struct Neighbours {
    least: BTreeMap<NodeNumber, (Worth, Duration)>,
    /// The answer to [`Neighbours::cheapest`] as it was found last, so that an eviction does not look at all nodes.
    cheapest: Option<(NodeNumber, Worth, Duration)>,
}

impl Neighbours {
    /// A node's answer said this of its next victim.
    pub fn heard(&mut self, node: NodeNumber, least: Worth, now: Duration) {
        if self.least.len() >= MAX_NEIGHBOURS && !self.least.contains_key(&node) {
            self.least.clear();
            self.cheapest = None;
        }
        self.least.insert(node, (least, now));
        match self.cheapest {
            Some((cheapest, worth, _)) if cheapest != node && worth < least => {}
            // Others may be cheaper than this one is now.
            Some((cheapest, worth, _)) if cheapest == node && worth < least => self.cheapest = None,
            Some(_) => self.cheapest = Some((node, least, now)),
            None => {}
        }
    }

    /// A node did not take what it was offered: it gets no more until it is heard again.
    pub fn forget(&mut self, node: NodeNumber) {
        self.least.remove(&node);
        self.cheapest.take_if(|(cheapest, ..)| *cheapest == node);
    }

    /// The node whose next victim is worth least, and that worth. The node that was heard last goes first among equals.
    #[must_use]
    pub fn cheapest(&mut self, now: Duration) -> Option<(NodeNumber, Worth)> {
        let is_fresh = |at: Duration| now.saturating_sub(at) < FRESH;
        if !self.cheapest.is_some_and(|(.., at)| is_fresh(at)) {
            self.least.retain(|_, (_, at)| is_fresh(*at));
            let cheapest = self.least.iter().min_by_key(|&(_, &(worth, at))| (worth, std::cmp::Reverse(at)));
            self.cheapest = cheapest.map(|(&node, &(worth, at))| (node, worth, at));
        }
        self.cheapest.map(|(node, worth, _)| (node, worth))
    }
}

/// How long an answer counts.
const FRESH: Duration = Duration::from_secs(10);

/// Nodes that are remembered; past it, all are forgotten, and the next answers fill the memory again.
const MAX_NEIGHBOURS: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_node_with_the_least_worth_is_the_cheapest_until_its_answer_is_old() {
        let [a, b, c] = [1, 2, 3].map(NodeNumber);
        let mut neighbours = Neighbours::default();
        assert_eq!(neighbours.cheapest(at(0)), None);
        neighbours.heard(a, Worth(5), at(0));
        neighbours.heard(b, Worth(3), at(1));
        neighbours.heard(c, Worth(3), at(2));
        assert_eq!(neighbours.cheapest(at(2)), Some((c, Worth(3))));
        neighbours.forget(c);
        assert_eq!(neighbours.cheapest(at(2)), Some((b, Worth(3))));
        neighbours.heard(a, Worth(5), at(9));
        assert_eq!(neighbours.cheapest(at(11)), Some((a, Worth(5))));
        assert_eq!(neighbours.cheapest(at(19)), None);
    }
}
