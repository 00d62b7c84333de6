//! Tables, chunks and changes for tests of the directory, here and in the node.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_protocol::table::{Epoch, Holder, Member, MemberState, NodeNumber, PARTITIONS, RowKey, Table};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

use super::{Change, ChangeKind, Changes};

pub(crate) const SPACE: Fingerprint = Fingerprint([7; 32]);

/// A table of these members and their incarnations. Members keep most of their partitions from one table to the next.
pub(crate) fn table(number: u64, members: &BTreeMap<u16, u64>) -> Arc<Table> {
    let score = |partition: u16, member: u16| {
        let both = u64::from(partition) << 16 | u64::from(member);
        both.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    let home = |partition: u16| {
        members.keys().copied().max_by_key(|&member| score(partition, member)).map(NodeNumber)
    };
    Arc::new(Table {
        epoch: Epoch { term: 1, number },
        // Sixteen neighboring partitions move together: the test is as good, and faster.
        homes: (0..PARTITIONS / 16).filter_map(home).flat_map(|home| [home; 16]).collect(),
        members: members.iter().map(|(&number, &incarnation)| member(number, incarnation)).collect(),
    })
}

/// A table in which node 1 is the home of all partitions.
pub(crate) fn table_of_one_home(number: u64, members: &[(u16, u64)]) -> Arc<Table> {
    let members: BTreeMap<u16, u64> = members.iter().copied().collect();
    let mut table = Table::clone(&table(number, &members));
    table.homes = vec![NodeNumber(1); usize::from(PARTITIONS)];
    Arc::new(table)
}

pub(crate) fn member(number: u16, incarnation: u64) -> Member {
    Member {
        number: NodeNumber(number),
        name: format!("node-{number}"),
        incarnation,
        peer: ([127, 0, 0, 1], number).into(),
        http: ([127, 0, 0, 1], number).into(),
        devices: 2,
        weight: 1,
        state: MemberState::Alive,
    }
}

pub(crate) fn holder(node: u16) -> Holder {
    Holder { node: NodeNumber(node), device: 0 }
}

/// The chunk of this number; four consecutive numbers are one run.
pub(crate) fn chunk(number: u64) -> ChunkRef {
    let hash = |number: u64| {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        ChunkHash(hash)
    };
    ChunkRef { hash: hash(number), parent: hash(number), index: 0, anchor: hash(number / 4 * 4) }
}

pub(crate) fn key(number: u64) -> RowKey {
    RowKey::new(&SPACE, &chunk(number))
}

pub(crate) fn changes(kind: ChangeKind, numbers: impl IntoIterator<Item = u64>) -> Changes {
    let change = |number| Change { fingerprint: SPACE, chunk: chunk(number), kind, evicted: None };
    Changes::Since(numbers.into_iter().map(change).collect())
}
