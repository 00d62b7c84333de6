//! Messages of version 1 that differ from today's.
//!
//! As long as a node of version 1 is a member, each four partitions that are one partition in version 1 have one home. A
//! coordinator of version 1 leads alone, and sends whole tables of 4,096 partitions, in which no node drains. All other messages
//! of version 1 are the same today; `tests/golden` verifies this.

use std::net::SocketAddr;

use rkyv::{Archive, Deserialize, Serialize};

use crate::membership::{self, InUse, Joined};
use crate::table::{Member, MemberState, NodeNumber, PARTITIONS, Table, pages};

/// A message of a coordinator.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum CoordinatorMessage {
    /// As today.
    Joined(Joined),
    /// As today.
    Outdated(u64),
    /// As today.
    Removed,
    /// The whole table.
    Table(Table),
    /// As today.
    Heard,
    /// As today.
    InUse(InUse),
    /// As today.
    Contested(SocketAddr),
    /// As today.
    Refused(String),
}

impl CoordinatorMessage {
    /// The same message in today's messages.
    #[must_use]
    pub fn today(self) -> Vec<membership::CoordinatorMessage> {
        use membership::CoordinatorMessage as Today;
        vec![match self {
            Self::Joined(joined) => Today::Joined(joined),
            Self::Outdated(at_least) => Today::Outdated(at_least),
            Self::Removed => Today::Removed,
            Self::Heard => Today::Heard,
            Self::InUse(in_use) => Today::InUse(in_use),
            Self::Contested(address) => Today::Contested(address),
            Self::Refused(reason) => Today::Refused(reason),
            Self::Table(table) => {
                let pages = pages(&Table::default(), &table_today(table));
                return pages.into_iter().map(Today::Table).collect();
            }
        }]
    }

    /// The same message in version 1; `None` if version 1 has none. For tables, see [`table_before`].
    #[must_use]
    pub fn before(message: membership::CoordinatorMessage) -> Option<Self> {
        use membership::CoordinatorMessage as Today;
        Some(match message {
            Today::Joined(joined) => Self::Joined(joined),
            Today::Outdated(at_least) => Self::Outdated(at_least),
            Today::Removed => Self::Removed,
            Today::Heard => Self::Heard,
            Today::InUse(in_use) => Self::InUse(in_use),
            Today::Contested(address) => Self::Contested(address),
            Today::Refused(reason) => Self::Refused(reason),
            Today::Table(_) | Today::Standing(_) | Today::Bring | Today::Reloaded(_) | Today::Forgot(_) => {
                return None;
            }
        })
    }
}

/// A table of version 1 in today's form: each partition is split into parts with the same home. A part's number begins with the
/// bits of its partition.
#[must_use]
pub fn table_today(table: Table) -> Table {
    let homes = if table.homes.len() == PARTITIONS_BEFORE { split(&table.homes) } else { table.homes };
    Table { homes, ..table }
}

/// A table in the form of version 1. If the parts of a partition have several homes, the table names the home of the first part.
#[must_use]
pub fn table_before(table: &Table) -> Table {
    let member = |member: &Member| {
        let state = match member.state {
            MemberState::Draining => MemberState::Suspect,
            state => state,
        };
        Member { state, ..member.clone() }
    };
    let members = table.members.iter().map(member).collect();
    Table { epoch: table.epoch, members, homes: merge(&table.homes) }
}

/// The home of each part, from the homes of version 1's partitions.
#[must_use]
pub fn split(homes: &[NodeNumber]) -> Vec<NodeNumber> {
    homes.iter().flat_map(|&home| std::iter::repeat_n(home, PARTS)).collect()
}

/// The home of the first part of each partition of version 1.
#[must_use]
pub fn merge(homes: &[NodeNumber]) -> Vec<NodeNumber> {
    homes.iter().step_by(PARTS).copied().collect()
}

/// Whether all parts of each partition of version 1 have one home, while there are several homes.
#[must_use]
pub fn is_merged(homes: &[NodeNumber]) -> bool {
    homes.iter().any(|home| *home != homes[0])
        && homes.chunks(PARTS).all(|parts| parts.iter().all(|home| *home == parts[0]))
}

/// The partitions of version 1.
pub const PARTITIONS_BEFORE: usize = 4_096;

/// Parts of a partition of version 1.
const PARTS: usize = PARTITIONS as usize / PARTITIONS_BEFORE;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Epoch, RunKey, TableReader};

    fn table(state: MemberState) -> Table {
        let address = ([127, 0, 0, 1], 1).into();
        let member = |number| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1,
            peer: address,
            http: address,
            devices: 1,
            weight: 1,
            state,
        };
        let homes: Vec<_> = (0..PARTITIONS_BEFORE as u16).map(|at| NodeNumber(at % 3 + 1)).collect();
        Table { epoch: Epoch { term: 3, number: 9 }, members: (1..=3).map(member).collect(), homes }
    }

    #[test]
    fn a_table_of_version_1_names_the_same_homes_today() {
        let before = table(MemberState::Alive);
        let mut reader = TableReader::default();
        let messages = CoordinatorMessage::Table(before.clone()).today();
        let mut came = None;
        for message in messages {
            let membership::CoordinatorMessage::Table(page) = message else { panic!("{message:?}") };
            came = reader.take(page).unwrap();
        }
        let today = came.unwrap();
        assert_eq!(today.home(RunKey(0xabcd << 112).partition()), Some(before.homes[0xabc]));
        assert!(is_merged(&today.homes));
        assert_eq!(table_before(&today), before);
    }

    #[test]
    fn version_1_sees_a_draining_node_as_one_to_ask_last() {
        let draining = table_today(table(MemberState::Draining));
        assert_eq!(table_before(&draining), table(MemberState::Suspect));
    }
}
