//! Blocks that an engine puts at one node, and another engine gets at another node.

use std::cell::RefCell;
use std::fs::{read_dir, read_to_string};
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use larder_client::{LookupOptions, Namespace, Session, SessionOptions};
use larder_protocol::{Chain, ChunkHash};
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

use super::measure::timed;
use super::placement::CpuPair;
use super::transfer::Transfer;
use crate::clock::{now, process_seconds};
use crate::content::chunk_hash;
use crate::dev::{DevCluster, DevOptions, TENANT};
use crate::http;
use crate::replay::namespace::replay_namespace;

/// A cluster of two nodes, and an engine at each. Every pass reads blocks that were never read before: the node that reads
/// them fetches them from the other, and keeps them.
pub struct PeerBench {
    runtime: Runtime,
    cluster: DevCluster,
    writer: End,
    reader: End,
    transfer: Transfer,
    blocks_per_get: usize,
    next_id: u64,
    /// Time of each get, over all passes.
    latencies: Vec<Duration>,
    bytes: usize,
    /// CPU time of the gets.
    spent_seconds: f64,
    /// The nodes.
    pids: Vec<u32>,
}

/// The ways in which the nodes of a bench differ.
#[derive(Debug, Clone, Copy, Default)]
pub struct NodeKind {
    /// Block threads of each node; `None`: as many as suit the machine.
    pub block_threads: Option<u8>,
    /// Whether blocks move over TCP.
    pub blocks_over_tcp: bool,
}

/// An engine at a node.
pub(super) struct End {
    pub(super) session: Session,
    pub(super) namespace: Namespace,
}

impl PeerBench {
    /// Starts the cluster and connects. Each get is for `blocks_per_get` blocks of one prompt.
    ///
    /// # Errors
    /// The cluster does not start, or refuses a session.
    pub fn start(transfer: Transfer, blocks_per_get: usize) -> anyhow::Result<Self> {
        Self::with(transfer, blocks_per_get, NodeKind::default())
    }

    /// As [`Self::start`], with nodes of this kind.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub fn with(
        transfer: Transfer,
        blocks_per_get: usize,
        NodeKind { block_threads, blocks_over_tcp }: NodeKind,
    ) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let options = DevOptions {
            arena_bytes: Some(ARENA_BYTES),
            extent_bytes: Some(EXTENT_BYTES),
            block_threads,
            blocks_over_tcp,
            ..DevOptions::new()?
        };
        let (cluster, [writer, reader]) = runtime.block_on(End::pair(options, transfer))?;
        let pids = cluster.pids().into_iter().skip(1).filter_map(|(_, pid)| pid).collect();
        Ok(Self {
            runtime,
            cluster,
            writer,
            reader,
            transfer,
            blocks_per_get,
            next_id: 0,
            latencies: Vec::new(),
            bytes: 0,
            spent_seconds: 0.0,
            pids,
        })
    }

    /// Puts new blocks at one node, waits until the other node knows of the blocks, and gets the blocks there. Only the gets are
    /// timed. A get is a lease, which the engine reads in place.
    ///
    /// # Errors
    /// A session ended, or a block did not come.
    pub fn pass(&mut self) -> anyhow::Result<Duration> {
        let first = self.next_id;
        self.next_id += self.transfer.blocks() as u64;
        let Self { runtime, writer, reader, transfer, .. } = &*self;
        let hashes: Vec<ChunkHash> = (first..self.next_id).map(chunk_hash).collect();
        let prompts = hashes.chunks(self.blocks_per_get);
        let chains: Vec<Chain> = prompts.map(|prompt| reader.namespace.chain(prompt.to_vec())).collect();
        let (tasks, latencies) = (LocalSet::new(), RefCell::default());
        tasks.block_on(runtime, async {
            writer.put(&chains, &vec![1; transfer.block_bytes]).await?;
            reader.wait_for(&chains).await
        })?;
        let before = self.cpu_seconds()?;
        let took =
            timed(|| tasks.block_on(runtime, reader.get_all(&chains, transfer.in_flight, &latencies)))?;
        self.spent_seconds += self.cpu_seconds()? - before;
        self.bytes += self.transfer.bytes();
        self.latencies.extend(latencies.take());
        Ok(took)
    }

    /// Forgets the times of the passes so far, which only warmed up.
    pub fn forget(&mut self) {
        self.latencies.clear();
        (self.bytes, self.spent_seconds) = (0, 0.0);
    }

    /// CPU time that the nodes and this process have used since they started.
    ///
    /// # Errors
    /// A node is gone.
    pub fn cpu_seconds(&self) -> io::Result<f64> {
        let nodes = self.pids.iter().map(|&pid| seconds_of(pid));
        Ok(process_seconds() + nodes.sum::<io::Result<f64>>()?)
    }

    /// Each node's metrics, in Prometheus' text format.
    ///
    /// # Errors
    /// A node does not answer.
    pub fn metrics(&self) -> anyhow::Result<Vec<String>> {
        self.cluster.addresses().nodes.iter().map(|node| http::get_text(&node.http, "/metrics")).collect()
    }

    /// CPU seconds of the nodes and of this process for 10^9 bytes, over all passes.
    pub fn cpu_s_per_gigabyte(&self) -> f64 {
        self.spent_seconds / self.bytes as f64 * 1e9
    }

    /// Times of the gets, over all passes, ascending.
    pub fn latencies(&self) -> Vec<Duration> {
        let mut latencies = self.latencies.clone();
        latencies.sort_unstable();
        latencies
    }

    /// Puts the node that holds the blocks on one CPU, as if on another host, and the node that gets the blocks on the other CPU,
    /// with the engine.
    ///
    /// # Errors
    /// The system refuses.
    pub fn put_apart(&self, placement: &CpuPair) -> io::Result<()> {
        let [holder, asker] = self.pids[..] else { return Ok(()) };
        placement.put_with_answerer(holder)?;
        placement.put_with_engine(asker)
    }

    /// Ends the cluster.
    ///
    /// # Errors
    /// A process had to be killed.
    pub fn stop(self) -> anyhow::Result<()> {
        drop((self.writer, self.reader));
        Ok(self.runtime.block_on(self.cluster.stop())?)
    }
}

impl End {
    /// Starts a cluster of two nodes, and an engine at each.
    pub(super) async fn pair(
        options: DevOptions,
        transfer: Transfer,
    ) -> anyhow::Result<(DevCluster, [Self; 2])> {
        let cluster = DevCluster::start(DevOptions { nodes: 2, ..options }).await?;
        cluster.joined().await?;
        let connect = async |node: usize| {
            let sockets = &cluster.addresses().nodes[node].sockets;
            Self::connect(sockets.get(TENANT).context("the node has no socket")?, transfer).await
        };
        let ends = [connect(0).await?, connect(1).await?];
        Ok((cluster, ends))
    }

    pub(super) async fn connect(socket: &Path, transfer: Transfer) -> anyhow::Result<Self> {
        let client = concat!("larder bench ", env!("CARGO_PKG_VERSION")).into();
        let options = SessionOptions { client, ..SessionOptions::default() };
        let session = Session::connect(socket, options).await?;
        let block_bytes = transfer.block_bytes as u64;
        let namespace = session.register(&replay_namespace(block_bytes), &[0], &[block_bytes]).await?;
        Ok(Self { session, namespace })
    }

    pub(super) async fn put(&self, chains: &[Chain], block: &[u8]) -> anyhow::Result<()> {
        for chain in chains {
            let reservation = self.session.reserve(&self.namespace, chain, 0).await?;
            for &position in reservation.chunks() {
                let mut staged = self.session.stage(&reservation, position).await?;
                staged.copy_from(0, 0, block);
                self.session.commit(&reservation, vec![staged]).await?;
            }
        }
        Ok(())
    }

    /// Waits until the directory knows of all these chains.
    pub(super) async fn wait_for(&self, chains: &[Chain]) -> anyhow::Result<()> {
        for chain in chains {
            let start = now();
            let options = LookupOptions { prompt_tokens: u64::MAX, ..LookupOptions::default() };
            let found = async || {
                let found = self.session.lookup(&self.namespace, chain, options.clone()).await?;
                anyhow::Ok(found.spans.last().map_or(0, |span| span.to as usize))
            };
            while found().await? < chain.len() {
                anyhow::ensure!(
                    now() - start < PATIENCE,
                    "the other node does not find a block that was put"
                );
                tokio::time::sleep(POLL).await;
            }
        }
        Ok(())
    }

    /// Gets all these chains, some at a time.
    async fn get_all(
        &self,
        chains: &[Chain],
        in_flight: usize,
        latencies: &RefCell<Vec<Duration>>,
    ) -> anyhow::Result<()> {
        let waiting = RefCell::new(chains.iter());
        try_join_all((0..in_flight).map(async |_| {
            loop {
                let Some(chain) = waiting.borrow_mut().next() else { return Ok(()) };
                let start = now();
                let lease = self.session.lease(&self.namespace, chain).await?;
                anyhow::ensure!(lease.chunks() == chain.len(), "a block that a lookup found did not come");
                latencies.borrow_mut().push(now() - start);
            }
        }))
        .await?;
        Ok(())
    }
}

/// CPU time of the threads of a process, as the scheduler has counted it.
fn seconds_of(pid: u32) -> io::Result<f64> {
    let mut nanoseconds = 0;
    for task in read_dir(format!("/proc/{pid}/task"))? {
        // The thread has just ended.
        let Ok(text) = read_to_string(task?.path().join("schedstat")) else { continue };
        nanoseconds += text.split(' ').next().and_then(|on_cpu| on_cpu.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(nanoseconds as f64 / 1e9)
}

/// Room for some passes at each node.
const ARENA_BYTES: u64 = 768 << 20;

const EXTENT_BYTES: u64 = 64 << 20;

/// Far more than an announcement takes.
const PATIENCE: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_process_is_that_of_its_threads() {
        let start = process_seconds();
        while process_seconds() - start < 0.02 {}
        let seen = seconds_of(std::process::id()).unwrap();
        assert!(seen >= 0.02 && seen < process_seconds() + 1.0, "{seen}");
    }
}
