//! The homes that answered late: they are left out for a while, so that a home which stands still does not slow every question.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::table::{Member, NodeNumber, Table};
use tokio::time::Instant;

/// The late homes.
#[derive(Debug, Default)]
pub(super) struct LateHomes(BTreeMap<NodeNumber, Late>);

/// A home that did not answer in time.
#[derive(Debug)]
struct Late {
    /// The life of the node that was late: its next life is asked at once.
    incarnation: u64,
    left_out_until: Instant,
}

impl LateHomes {
    /// Whether a home is asked now. After the time in which a late home is left out, one question tries it; the others leave it out
    /// until it has answered.
    pub(super) fn is_asked(&mut self, home: &Member, now: Instant) -> bool {
        let Some(late) = self.0.get_mut(&home.number) else { return true };
        if late.incarnation == home.incarnation && now < late.left_out_until {
            return false;
        }
        late.left_out_until = now + LEFT_OUT_FOR;
        true
    }

    /// Notes that a home answered in time.
    pub(super) fn answered(&mut self, home: NodeNumber) {
        self.0.remove(&home);
    }

    /// Notes that a home did not answer in time. Forgets nodes that are members no more.
    pub(super) fn was_late(&mut self, table: &Table, home: &Member, now: Instant) {
        self.0.retain(|&node, _| table.member(node).is_some());
        let late = Late { incarnation: home.incarnation, left_out_until: now + LEFT_OUT_FOR };
        self.0.insert(home.number, late);
    }
}

/// How long a late home is left out.
const LEFT_OUT_FOR: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::nodes::tests::member_at;

    fn table(incarnation: u64) -> Table {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let member = |number| Member { incarnation, ..member_at(number, address) };
        Table { members: vec![member(1), member(2)], ..Table::default() }
    }

    #[test]
    fn a_late_home_is_left_out_for_a_second_and_then_one_question_tries_it() {
        let (mut late, table, start) = (LateHomes::default(), table(1), Instant::now());
        let [one, two] = [0, 1].map(|at| &table.members[at]);
        late.was_late(&table, one, start);
        assert!(!late.is_asked(one, start) && late.is_asked(two, start));
        let tried = start + LEFT_OUT_FOR;
        assert!(late.is_asked(one, tried) && !late.is_asked(one, tried));
        late.answered(one.number);
        assert!(late.is_asked(one, tried) && late.is_asked(one, tried));
    }

    #[test]
    fn a_node_that_started_again_is_asked_at_once() {
        let (mut late, start) = (LateHomes::default(), Instant::now());
        late.was_late(&table(1), &table(1).members[0], start);
        assert!(late.is_asked(&table(2).members[0], start));
    }

    #[test]
    fn nodes_that_departed_are_forgotten() {
        let (mut late, table, start) = (LateHomes::default(), table(1), Instant::now());
        late.was_late(&table, &table.members[0], start);
        let others = Table { members: table.members[1..].to_vec(), ..Table::default() };
        late.was_late(&others, &others.members[0], start);
        assert_eq!(late.0.len(), 1);
    }
}
