//! A member of a cluster that announces blocks and breaks its word.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use larder_net::quic::ca::Validity;
use larder_net::quic::{Connection, Endpoint, read_message, write_message};
use larder_protocol::checksum::{BlockKey, RangeChecksum, block_checksum};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, Join};
use larder_protocol::peer::{
    Announce, Announced, Fetch, FetchedChunk, HeldBlock, HeldChunk, PeerRequest, PeerResponse, RowChange,
    RowSpan, Rows,
};
use larder_protocol::table::{Epoch, Holder, NodeNumber, RowKey, Table, TableReader};
use larder_protocol::{ChunkHash, Fingerprint};
use quinn::{RecvStream, SendStream};
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_local};

use crate::cluster::Cluster;
use crate::content::{BLOCK_BYTES, block};
use crate::visitor;

/// The answers of an impostor to requests for the blocks that it announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manners {
    /// The impostor has none of the blocks.
    HasNothing,
    /// The impostor sends the right checksum, and bytes with one wrong bit.
    FlipsABit,
    /// The impostor sends bytes and checksum of another chunk.
    SendsAnother,
    /// The impostor sends half of the announced bytes.
    StopsHalfway,
    /// The impostor sends blocks of twice the size.
    SendsTwice,
    /// The impostor sends bytes that are no message.
    TalksGarbage,
    /// The impostor sends nothing, and keeps the stream open.
    SaysNothing,
    /// The impostor sends the right bytes, at [`THROTTLED_BLOCKS_PER_SECOND`].
    IsThrottled,
}

/// A running impostor. Dropping it ends it without a goodbye.
pub struct Impostor {
    number: NodeNumber,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Impostor {
    /// Joins `cluster` as the node `name` and announces `rows` to their homes, without having the chunks.
    ///
    /// # Errors
    /// Fails if the cluster does not let it join.
    pub fn join(cluster: &Cluster, name: &str, rows: Vec<RowKey>, manners: Manners) -> anyhow::Result<Self> {
        let credentials = cluster.credentials(&Identity::new(Role::Node, name), Validity::days(1))?;
        let coordinator: SocketAddr = cluster.coordinator_peer().parse()?;
        let (joined, number) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::spawn(move || {
            let run = async {
                let member = async {
                    let endpoint = visitor::bind(&credentials)?;
                    Member::join(endpoint, coordinator, manners).await
                };
                let announced = async {
                    let member = member.await?;
                    member.announce(&rows).await?;
                    anyhow::Ok(member.number)
                };
                let number = tokio::time::timeout(PATIENCE, announced).await;
                // The test may have given up.
                _ = joined.send(
                    number.context("the coordinator did not let the impostor join").and_then(|number| number),
                );
                _ = stopped.await;
            };
            LocalSet::new().block_on(&runtime, run);
        });
        let mut impostor = Self { number: NodeNumber(0), stop: Some(stop), thread: Some(thread) };
        impostor.number = number.recv()??;
        Ok(impostor)
    }

    /// The impostor's number in the table.
    pub fn number(&self) -> NodeNumber {
        self.number
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panics only if the test has failed already.
            _ = thread.join();
        }
    }
}

/// The shared state of the impostor's tasks.
#[derive(Clone)]
struct Member {
    endpoint: Endpoint,
    number: NodeNumber,
    incarnation: u64,
    manners: Manners,
    table: Arc<Mutex<Table>>,
}

impl Member {
    /// Joins, and from then on follows the coordinator and serves peers.
    async fn join(endpoint: Endpoint, coordinator: SocketAddr, manners: Manners) -> anyhow::Result<Self> {
        let connection = endpoint.connect(coordinator, Role::Coordinator, None).await?;
        let (mut send, mut receive) = connection.quic().open_bi().await?;
        let incarnation = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?;
        let join = Join {
            incarnation,
            epoch: Epoch::default(),
            peer: endpoint.local_address(),
            http: ([127, 0, 0, 1], 9).into(),
            devices: 1,
            weight: 1,
        };
        write_message(&mut send, &FollowerMessage::Join(join)).await?;
        let mut reader = TableReader::default();
        let mut table = Arc::default();
        let joined = loop {
            match read_message(&mut receive).await?.context("the coordinator ended the stream")? {
                CoordinatorMessage::Joined(joined) => break joined,
                CoordinatorMessage::Table(page) => table = reader.take(page)?.unwrap_or(table),
                CoordinatorMessage::Standing(_) => {}
                other => anyhow::bail!("not joined: {other:?}"),
            }
        };
        let number = joined.number;
        let table = Arc::new(Mutex::new(Table::clone(&table)));
        let member = Self { endpoint, number, incarnation, manners, table };
        spawn_local(member.clone().follow(connection, receive, reader));
        spawn_local(member.clone().live(send, Duration::from_millis(joined.heartbeat_ms)));
        spawn_local(member.clone().serve());
        Ok(member)
    }

    /// Keeps the latest table. The connection lives as long as this runs.
    async fn follow(self, _connection: Connection, mut receive: RecvStream, mut reader: TableReader) {
        while let Ok(Some(message)) = read_message(&mut receive).await {
            if let CoordinatorMessage::Table(page) = message
                && let Ok(Some(table)) = reader.take(page)
            {
                *self.table.lock().unwrap_or_else(PoisonError::into_inner) = Table::clone(&table);
            }
        }
    }

    async fn live(self, mut send: SendStream, heartbeat: Duration) {
        let mut beat = tokio::time::interval(heartbeat);
        loop {
            beat.tick().await;
            let heartbeat = Heartbeat { epoch: self.table().epoch, silent: Vec::new() };
            if write_message(&mut send, &FollowerMessage::Heartbeat(heartbeat)).await.is_err() {
                return;
            }
        }
    }

    async fn serve(self) {
        while let Some(incoming) = self.endpoint.accept().await {
            let member = self.clone();
            spawn_local(async move {
                let Ok(connection) = incoming.accept().await else { return };
                while let Ok((send, receive)) = connection.quic().accept_bi().await {
                    let member = member.clone();
                    // An error: the requester has gone.
                    spawn_local(async move { _ = member.answer(send, receive).await });
                }
            });
        }
    }

    async fn answer(&self, mut send: SendStream, mut receive: RecvStream) -> anyhow::Result<()> {
        let request = read_message(&mut receive).await?.context("no request")?;
        let response = match request {
            PeerRequest::Fetch(fetch) => return self.send_blocks(send, &fetch).await,
            PeerRequest::Announce(announces) => {
                let known = announces.iter().map(|announce| Announced::Known(announce.sequence));
                PeerResponse::Announced(known.collect())
            }
            PeerRequest::Find(find) => {
                let span = RowSpan { from: 0, to: u32::try_from(find.rows.len())?, holder: self.holder() };
                PeerResponse::Rows(Rows { epoch: self.table().epoch, spans: vec![span] })
            }
            _ => PeerResponse::Done,
        };
        write_message(&mut send, &response).await?;
        Ok(send.finish()?)
    }

    async fn send_blocks(&self, mut send: SendStream, fetch: &Fetch) -> anyhow::Result<()> {
        let hashes = &fetch.chunks.hashes;
        let fingerprint = fetch.chunks.fingerprint;
        let (said, mut bytes): (Vec<_>, Vec<_>) =
            hashes.iter().map(|hash| self.manners.chunk(fingerprint, hash)).unzip();
        match self.manners {
            Manners::SaysNothing => {
                // The requester gives up after some time.
                _ = send.stopped().await;
                return Ok(());
            }
            Manners::TalksGarbage => send.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?,
            _ => write_message(&mut send, &PeerResponse::Fetched(said)).await?,
        }
        if self.manners == Manners::StopsHalfway {
            bytes.truncate(1);
            bytes[0].truncate(BLOCK_BYTES / 2);
        }
        // A late block makes no other block late: even on a slow machine all blocks come in the calculated time.
        let began = tokio::time::Instant::now();
        for (block, bytes) in (1..).zip(bytes) {
            if self.manners == Manners::IsThrottled {
                tokio::time::sleep_until(began + Duration::from_secs(block) / THROTTLED_BLOCKS_PER_SECOND)
                    .await;
            }
            send.write_all(&bytes).await?;
        }
        Ok(send.finish()?)
    }

    /// Announces these rows to their homes, until all homes have accepted them.
    async fn announce(&self, rows: &[RowKey]) -> anyhow::Result<()> {
        loop {
            let table = self.table();
            let home = |row: &RowKey| table.home(row.run.partition());
            let mut homes: Vec<_> =
                rows.iter().filter_map(home).filter(|&home| home != self.number).collect();
            homes.sort_unstable();
            homes.dedup();
            let mut believed = table.member(self.number).is_some();
            for node in homes {
                let changes = rows.iter().filter(|row| home(row) == Some(node));
                let changes = changes.map(|&row| RowChange { row, is_held: true }).collect();
                believed &= self.announce_to(node, &table, changes).await?;
            }
            if believed {
                return Ok(());
            }
            // The homes do not know the impostor yet.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn announce_to(
        &self,
        node: NodeNumber,
        table: &Table,
        changes: Vec<RowChange>,
    ) -> anyhow::Result<bool> {
        let address = table.member(node).context("the home is not a member")?.peer;
        let home = self.endpoint.connect(address, Role::Node, None).await?;
        let announce = PeerRequest::Announce(vec![Announce {
            holder: self.holder(),
            incarnation: self.incarnation,
            epoch: table.epoch,
            stream: 1,
            sequence: 0,
            digest: None,
            changes,
        }]);
        match visitor::ask(&home, &announce).await? {
            PeerResponse::Announced(announced) => Ok(matches!(announced[..], [Announced::Known(_)])),
            other => anyhow::bail!("not heard: {other:?}"),
        }
    }

    fn holder(&self) -> Holder {
        Holder { node: self.number, device: 0 }
    }

    fn table(&self) -> Table {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Manners {
    /// The answer for a chunk, and the bytes that follow.
    fn chunk(self, fingerprint: Fingerprint, hash: &ChunkHash) -> (FetchedChunk, Vec<u8>) {
        if self == Self::HasNothing {
            return (FetchedChunk::NotHeld, Vec::new());
        }
        let named = if self == Self::SendsAnother { ChunkHash([0xee; 32]) } else { *hash };
        let mut bytes = block(&named);
        let mut range = RangeChecksum::new();
        range.update(&bytes);
        let key = BlockKey { fingerprint, hash: named, slice: 0, pool: 0 };
        let checksum = block_checksum(&key, &[range.finish()]);
        match self {
            Self::FlipsABit => bytes[BLOCK_BYTES / 2] ^= 4,
            Self::SendsTwice => bytes.extend_from_within(..),
            _ => {}
        }
        let held = HeldBlock { bytes: bytes.len() as u64, checksum };
        (
            FetchedChunk::Held(HeldChunk {
                reads: 1,
                is_on_disk: false,
                pools: larder_protocol::PoolSet::first(1),
                blocks: vec![held],
            }),
            bytes,
        )
    }
}

/// Blocks of each fetch that a throttled impostor sends in a second.
pub const THROTTLED_BLOCKS_PER_SECOND: u32 = 50;

/// Time in which a cluster must let the impostor join.
const PATIENCE: Duration = Duration::from_secs(20);
