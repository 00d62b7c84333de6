//! Tables with the messages for them, which are encoded once for all followers.

use std::sync::{Arc, OnceLock};

use larder_protocol::membership::CoordinatorMessage;
use larder_protocol::peer::Message as _;
use larder_protocol::table::{Epoch, Table, pages};
use larder_protocol::v1;
use rkyv::util::AlignedVec;

/// A table, and the messages that tell it to followers.
#[derive(Debug, Default)]
pub struct Published {
    table: Arc<Table>,
    /// The table before it.
    before: Epoch,
    /// The pages that change the table before into this one.
    change: Vec<AlignedVec>,
    whole: OnceLock<Vec<AlignedVec>>,
    for_v1: OnceLock<AlignedVec>,
}

impl Published {
    /// A table that follows `before`, which may be the empty table.
    pub fn new(before: &Table, table: Arc<Table>) -> Self {
        let change = encode(before, &table);
        Self { table, before: before.epoch, change, whole: OnceLock::new(), for_v1: OnceLock::new() }
    }

    /// The table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The message for a follower of version 1.
    pub fn message_for_v1(&self) -> &AlignedVec {
        let encode = || v1::CoordinatorMessage::Table(v1::table_before(&self.table)).encode();
        self.for_v1.get_or_init(encode)
    }

    /// The messages for a follower. `last` is the epoch of the last table on its stream. The messages tell the changes since
    /// then, or else the whole table.
    pub fn messages(&self, last: Epoch) -> &[AlignedVec] {
        if last == self.before {
            &self.change
        } else {
            self.whole.get_or_init(|| encode(&Table::default(), &self.table))
        }
    }
}

fn encode(from: &Table, to: &Table) -> Vec<AlignedVec> {
    pages(from, to).into_iter().map(|page| CoordinatorMessage::Table(page).encode()).collect()
}
