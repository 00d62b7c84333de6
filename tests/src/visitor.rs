//! A client that connects to the processes of a cluster over QUIC and sends whatever a test tells it to.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use larder_net::coordinator_client::read_messages;
use larder_net::quic::{
    ConnectError, Connection, Credentials, Endpoint, TransportSettings, read_message, write_message,
};
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::table::{Table, TableReader};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// An endpoint with credentials, and the runtime that it lives on. Its calls block.
pub struct Visitor {
    runtime: Runtime,
    endpoint: Endpoint,
}

impl Visitor {
    /// A client with these credentials, on a free port.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub fn new(credentials: &Credentials) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = runtime.block_on(async { bind(credentials) })?;
        Ok(Self { runtime, endpoint })
    }

    /// Connects to the process with this role at `address`.
    ///
    /// # Errors
    /// Fails if either side does not accept the other. The other side may find out only after this side has connected.
    pub fn dial(&self, address: SocketAddr, role: Role) -> Result<Connection, ConnectError> {
        self.runtime.block_on(self.endpoint.connect(address, role, None))
    }

    /// Connects; `None` if nobody answers soon.
    #[must_use]
    pub fn dial_soon(&self, address: SocketAddr, role: Role) -> Option<Connection> {
        let dial = async { timeout(A_MOMENT, self.endpoint.connect(address, role, None)).await };
        self.runtime.block_on(dial).ok()?.ok()
    }

    /// Connects, and waits to be turned away. Returns whether that happened.
    #[must_use]
    pub fn is_turned_away(&self, address: SocketAddr, role: Role) -> bool {
        let call = async {
            if let Ok(connection) = self.endpoint.connect(address, role, None).await {
                connection.quic().closed().await;
            }
        };
        self.runtime.block_on(async { timeout(PATIENCE, call).await.is_ok() })
    }

    /// Asks a node something on a stream of its own.
    ///
    /// # Errors
    /// Fails if no answer comes.
    pub fn ask(&self, node: &Connection, request: &PeerRequest) -> anyhow::Result<PeerResponse> {
        self.runtime.block_on(async { timeout(PATIENCE, ask(node, request)).await })?
    }

    /// Sends bytes on a stream of their own. Returns how many bytes come back before the other side ends or breaks the stream.
    ///
    /// # Errors
    /// Fails if the connection breaks, or nothing happens.
    pub fn send_bytes(&self, to: &Connection, bytes: &[u8]) -> anyhow::Result<usize> {
        let call = async {
            let (mut send, mut receive) = to.quic().open_bi().await?;
            send.write_all(bytes).await?;
            send.finish()?;
            anyhow::Ok(receive.read_to_end(MOST_BYTES).await.map_or(0, |answer| answer.len()))
        };
        self.runtime.block_on(async { timeout(PATIENCE, call).await })?
    }

    /// Announces a message of the longest kind on each of `streams` streams, and sends little of it.
    pub fn open_half(&self, to: &Connection, streams: usize) {
        let call = async {
            for _ in 0..streams {
                let Ok((mut send, receive)) = to.quic().open_bi().await else { return };
                let mut half = [7; 64];
                half[..8].copy_from_slice(&(MOST_BYTES as u64).to_le_bytes());
                // The stream may be refused meanwhile.
                let _ = send.write_all(&half).await;
                // Neither end of the stream is closed while the connection stays.
                std::mem::forget((send, receive));
            }
        };
        // Does not wait for streams that are not granted.
        let _ = self.runtime.block_on(async { timeout(A_MOMENT, call).await });
    }

    /// Sends a message to a coordinator. Returns the first answer, or `None` if the coordinator ends the stream or the connection
    /// instead.
    ///
    /// # Errors
    /// Fails if the coordinator does neither.
    pub fn tell_coordinator(
        &self,
        coordinator: &Connection,
        message: &FollowerMessage,
    ) -> anyhow::Result<Option<CoordinatorMessage>> {
        let call = async {
            let (mut send, mut receive) = coordinator.quic().open_bi().await.ok()?;
            write_message(&mut send, message).await.ok()?;
            read_message(&mut receive).await.ok().flatten()
        };
        self.runtime.block_on(async { timeout(PATIENCE, call).await }).context("no answer")
    }

    /// The table that a coordinator gives to watchers.
    ///
    /// # Errors
    /// Fails if the coordinator gives no table.
    pub fn watch(&self, coordinator: SocketAddr) -> anyhow::Result<Table> {
        let call = async {
            let connection = self.endpoint.connect(coordinator, Role::Coordinator, None).await?;
            let (mut send, mut receive) = connection.quic().open_bi().await?;
            write_message(&mut send, &FollowerMessage::Watch).await?;
            let mut reader = TableReader::default();
            while let Some(messages) = read_messages(&mut receive, connection.version()).await {
                for message in messages {
                    if let CoordinatorMessage::Table(page) = message
                        && let Some(table) = reader.take(page)?
                    {
                        return Ok(Table::clone(&table));
                    }
                }
            }
            anyhow::bail!("the coordinator gives no table")
        };
        self.runtime.block_on(async { timeout(PATIENCE, call).await })?
    }
}

/// An endpoint on a free port; needs a runtime.
pub(crate) fn bind(credentials: &Credentials) -> anyhow::Result<Endpoint> {
    Ok(Endpoint::bind(([127, 0, 0, 1], 0).into(), credentials, &TransportSettings::default())?)
}

/// One request and its answer on a stream of its own.
pub(crate) async fn ask(node: &Connection, request: &PeerRequest) -> anyhow::Result<PeerResponse> {
    let (mut send, mut receive) = node.quic().open_bi().await?;
    write_message(&mut send, request).await?;
    send.finish()?;
    read_message(&mut receive).await?.context("the node ended the stream without an answer")
}

/// Far more than any answer takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a visitor waits when it only disturbs.
const A_MOMENT: Duration = Duration::from_millis(200);

/// More bytes than any process answers to garbage.
const MOST_BYTES: usize = 1 << 20;
