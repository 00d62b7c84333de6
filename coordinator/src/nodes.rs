//! Connections to the nodes, opened on demand and kept.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_net::quic::{ConnectError, Connection, Endpoint};
use larder_protocol::identity::Role;
use larder_protocol::table::{NodeNumber, Table};
use tokio::sync::Mutex;

/// The connections. Lives on the endpoint's thread.
pub(crate) struct Nodes {
    endpoint: Endpoint,
    lines: RefCell<BTreeMap<NodeNumber, Rc<Line>>>,
}

/// Why there is no connection to a node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotReached {
    /// The node is gone.
    #[error("the node is no member any more")]
    NoMember,
    /// Nobody answers at its address, somebody else does, or one of the two does not trust the other.
    #[error("the coordinator does not reach the node")]
    Connect(#[from] ConnectError),
}

/// The connection to a node, with the incarnation of the node's life. It is locked while the node is dialled: a node allows a
/// coordinator few connections.
type Line = Mutex<Option<(u64, Connection)>>;

impl Nodes {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, lines: RefCell::default() }
    }

    /// The connection to a member's present life. Questions that come together share one dial.
    ///
    /// # Errors
    /// [`NotReached`]
    ///
    /// # Cancel safety
    /// Dropped, it gives up its dial; the next question that waits for the connection dials.
    pub(crate) async fn connection(&self, table: &Table, node: NodeNumber) -> Result<Connection, NotReached> {
        let member = table.member(node).ok_or(NotReached::NoMember)?;
        let line = self.line(table, node);
        let mut line = line.lock().await;
        if let Some((incarnation, connection)) = &*line
            && *incarnation == member.incarnation
            && connection.quic().close_reason().is_none()
        {
            return Ok(connection.clone());
        }
        let connection = self.endpoint.connect(member.peer, Role::Node, Some(&member.name)).await?;
        *line = Some((member.incarnation, connection.clone()));
        Ok(connection)
    }

    /// A node did not answer over this connection: the next question dials the node anew, unless another question has done so.
    pub(crate) fn forget(&self, node: NodeNumber, lost: &Connection) {
        let line = self.lines.borrow().get(&node).cloned();
        // A line that is locked gets another connection anyway.
        if let Some(line) = line
            && let Ok(mut line) = line.try_lock()
        {
            line.take_if(|(_, known)| known.quic().stable_id() == lost.quic().stable_id());
        }
    }

    /// The line of a member. Forgets nodes that are members no more.
    fn line(&self, table: &Table, node: NodeNumber) -> Rc<Line> {
        let mut lines = self.lines.borrow_mut();
        if let Some(line) = lines.get(&node) {
            return Rc::clone(line);
        }
        lines.retain(|&node, _| table.member(node).is_some());
        Rc::clone(lines.entry(node).or_default())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::SocketAddr;

    use futures_util::future::join_all;
    use larder_net::quic::ca::{Authority, Validity};
    use larder_net::quic::{Credentials, TransportSettings};
    use larder_protocol::identity::Identity;
    use larder_protocol::table::{Member, MemberState};

    use super::*;

    fn endpoint(authority: &Authority, identity: &Identity) -> Endpoint {
        let issued = authority.issue(identity, Validity::days(1)).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let ca = authority.certificate_pem().as_bytes();
        let credentials = Credentials::from_pem(ca, certificate, key).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Endpoint::bind(any, &credentials, &TransportSettings::default()).unwrap()
    }

    pub(crate) fn member(number: u16, endpoint: &Endpoint) -> Member {
        member_at(number, endpoint.local_address())
    }

    pub(crate) fn member_at(number: u16, peer: SocketAddr) -> Member {
        Member {
            number: NodeNumber(number),
            name: "node".into(),
            incarnation: 1,
            peer,
            http: peer,
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        }
    }

    fn table(members: Vec<Member>) -> Table {
        Table { members, ..Table::default() }
    }

    /// Lets in everybody, and gives each connection to `guest`.
    pub(crate) async fn serve(endpoint: Endpoint, mut guest: impl FnMut(Connection)) {
        while let Some(incoming) = endpoint.accept().await {
            guest(incoming.accept().await.unwrap());
        }
    }

    /// Lets in everybody; the connections stay open.
    async fn keep_all(endpoint: Endpoint) {
        let mut guests = Vec::new();
        serve(endpoint, |guest| guests.push(guest)).await;
    }

    /// Runs a test with connections to nodes, and an endpoint that `serve` serves.
    pub(crate) fn with_node<S: Future<Output = ()> + 'static>(
        serve: impl FnOnce(Endpoint) -> S,
        test: impl AsyncFnOnce(Nodes, Endpoint),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let (authority, _) = Authority::create(Validity::days(1)).unwrap();
            let node = endpoint(&authority, &Identity::new(Role::Node, "node"));
            let own = endpoint(&authority, &Identity::new(Role::Coordinator, "c"));
            tokio::task::spawn_local(serve(node.clone()));
            test(Nodes::new(own), node).await;
        });
    }

    #[test]
    fn questions_that_come_together_share_one_connection() {
        with_node(keep_all, async |nodes, node| {
            let table = table(vec![member(1, &node)]);
            let asked = (0..64).map(|_| nodes.connection(&table, NodeNumber(1)));
            let ids = join_all(asked).await.into_iter().map(|asked| asked.unwrap().quic().stable_id());
            let mut ids: Vec<usize> = ids.collect();
            ids.dedup();
            assert_eq!(ids.len(), 1);
        });
    }

    #[test]
    fn a_question_without_an_answer_spoils_only_its_own_connection() {
        with_node(keep_all, async |nodes, node| {
            let (one, table) = (NodeNumber(1), table(vec![member(1, &node)]));
            let lost = nodes.connection(&table, one).await.unwrap();
            nodes.forget(one, &lost);
            let next = nodes.connection(&table, one).await.unwrap();
            assert_ne!(next.quic().stable_id(), lost.quic().stable_id());
            nodes.forget(one, &lost);
            let same = nodes.connection(&table, one).await.unwrap();
            assert_eq!(
                same.quic().stable_id(),
                next.quic().stable_id(),
                "another question has dialled already"
            );
        });
    }

    #[test]
    fn nodes_that_departed_keep_no_connection() {
        with_node(keep_all, async |nodes, node| {
            for number in 1..=3 {
                let table = table(vec![member(number, &node)]);
                nodes.connection(&table, NodeNumber(number)).await.unwrap();
                assert_eq!(nodes.lines.borrow().len(), 1);
            }
        });
    }
}
