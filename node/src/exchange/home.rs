//! Messages of the exchange to this node's part of the directory: the members, and questions of peers.

use std::sync::Arc;

use actix::Message;
use larder_protocol::peer::{Announce, Announced, Find, Repair, Rows};
use larder_protocol::table::{NodeNumber, Table};

/// A new table, or this node's first.
#[derive(Message, Debug, Clone)]
#[rtype(result = "()")]
pub struct NewTable {
    /// The table.
    pub table: Arc<Table>,
    /// This node's number in the table. The table has its incarnation.
    pub own: NodeNumber,
}

/// A peer asks this home who holds chunks.
#[derive(Message, Debug)]
#[rtype(result = "Rows")]
pub struct ServeFind(pub Find);

/// A peer announces its gained and lost chunks to this home. The exchange has checked that the peer speaks for itself.
#[derive(Message, Debug)]
#[rtype(result = "Vec<Announced>")]
pub struct ServeAnnounce(pub Vec<Announce>);

/// A peer tells this home that some of a holder's rows are wrong.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct ServeRepair(pub Repair);
