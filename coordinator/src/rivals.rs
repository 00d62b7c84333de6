//! Which other leaders the members of this cluster report.
//!
//! A node whose configuration names the coordinator of another cluster must not end a coordinator of either. So a coordinator yields
//! to another only if most of its members report that one, or if it has no members once its grace time is over.

use std::collections::BTreeMap;

use larder_protocol::table::NodeNumber;

use crate::membership::Millis;

/// For each life of another leader, the members that reported it, and when.
#[derive(Debug, Default)]
pub(crate) struct RivalReports(BTreeMap<u64, BTreeMap<NodeNumber, Millis>>);

impl RivalReports {
    /// Notes that a member reports the leader of this life.
    pub(crate) fn note(&mut self, life: u64, by: NodeNumber, now: Millis) {
        self.0.retain(|_, reports| {
            reports.retain(|_, then| now.saturating_sub(*then) < REPORT_MS);
            !reports.is_empty()
        });
        if self.0.len() < MOST_RIVALS || self.0.contains_key(&life) {
            self.0.entry(life).or_default().insert(by, now);
        }
    }

    /// Whether most of these members report the leader of this life.
    pub(crate) fn are_of_most(&self, life: u64, members: &[NodeNumber], now: Millis) -> bool {
        let reports = self.0.get(&life);
        let is_new = |by: &&NodeNumber| {
            reports
                .and_then(|reports| reports.get(by))
                .is_some_and(|then| now.saturating_sub(*then) < REPORT_MS)
        };
        members.is_empty() || members.iter().filter(is_new).count() * 2 > members.len()
    }
}

/// How long a report counts. A member looks for other leaders once a minute.
const REPORT_MS: Millis = 180_000;

/// Other leaders whose reports are kept.
const MOST_RIVALS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_of_several_does_not_end_its_coordinator_and_most_do() {
        let members = [1, 2, 3, 4].map(NodeNumber);
        let mut reports = RivalReports::default();
        assert!(reports.are_of_most(7, &[], 0), "without members it has nothing to lose");
        reports.note(7, members[0], 0);
        assert!(reports.are_of_most(7, &members[..1], 0));
        assert!(!reports.are_of_most(7, &members[..2], 0));
        (0..9).for_each(|_| reports.note(7, members[0], 1_000));
        reports.note(7, members[1], 60_000);
        assert!(!reports.are_of_most(7, &members, 60_000), "half are not most");
        reports.note(7, members[2], 61_000);
        assert!(reports.are_of_most(7, &members, 61_000));
        assert!(!reports.are_of_most(8, &members, 61_000), "they reported another");
        assert!(!reports.are_of_most(7, &members, 200_000), "the first report is too old");
    }

    #[test]
    fn reports_take_little_memory_whatever_members_say() {
        let mut reports = RivalReports::default();
        for life in 0..10_000 {
            reports.note(life, NodeNumber(1), life);
        }
        assert!(reports.0.len() <= MOST_RIVALS);
        reports.note(20_000, NodeNumber(1), 10_000 + REPORT_MS);
        assert_eq!(reports.0.len(), 1);
    }
}
