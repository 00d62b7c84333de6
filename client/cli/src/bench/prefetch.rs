//! The prefetch of a prompt that is spread over memory, disk and another node.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use larder_client::LookupOptions;
use larder_node::Status;
use larder_protocol::session::Wait;
use larder_protocol::{Chain, ChunkHash};
use tokio::runtime::{Builder, Runtime};

use super::Measurement;
use super::measure::medians;
use super::peer::End;
use super::transfer::Transfer;
use crate::clock::now;
use crate::content::chunk_hash;
use crate::dev::{DevCluster, DevDisk, DevOptions};
use crate::http;

/// Two nodes with disks, and an engine at each.
struct PrefetchBench {
    runtime: Runtime,
    cluster: DevCluster,
    near: End,
    far: End,
    next_id: u64,
}

/// Measures the time to the last chunk of a prompt, against the slower of disk and peer alone. A third of the prompt is in
/// memory, a third on disk, a third at a peer. The peer sends the given bytes a second, or as many as the loopback interface
/// takes.
///
/// # Errors
/// The cluster does not start, or a chunk does not come.
pub fn prefetch_beside_its_slowest_tier(
    name: &str,
    rounds: usize,
    send_bytes_per_second: Option<u64>,
) -> anyhow::Result<Measurement> {
    let bench = RefCell::new(PrefetchBench::start(send_bytes_per_second)?);
    let mut spread = || bench.borrow_mut().spread();
    let mut disk = || bench.borrow_mut().disk();
    let mut peer = || bench.borrow_mut().peer();
    let [spread, disk, peer] = medians(rounds, [&mut spread, &mut disk, &mut peer])?;
    let PrefetchBench { runtime, cluster, near, far, .. } = bench.into_inner();
    drop((near, far));
    runtime.block_on(cluster.stop())?;
    let slowest = if disk > peer { "disk alone" } else { "peer alone" };
    Ok(Measurement::microseconds(name, slowest, spread, disk.max(peer)))
}

impl PrefetchBench {
    fn start(send_bytes_per_second: Option<u64>) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let options = DevOptions {
            arena_bytes: Some(ARENA_BYTES),
            extent_bytes: Some(EXTENT_BYTES),
            chunks_per_node: Some(PART as u64 * 2),
            disk: Some(DevDisk::of_bytes(DISK_BYTES)),
            send_bytes_per_second,
            ..DevOptions::new()?
        };
        let (cluster, [near, far]) = runtime.block_on(End::pair(options, Transfer::of(BLOCK_BYTES)))?;
        Ok(Self { runtime, cluster, near, far, next_id: 0 })
    }

    /// Times a prompt whose first third is in memory, the second on disk and the last at the other node.
    fn spread(&mut self) -> anyhow::Result<Duration> {
        let chain = self.prompt(3 * PART);
        self.put_on_disk(&chain.part(0, 2 * PART))?;
        let Self { runtime, near, far, .. } = self;
        runtime.block_on(async {
            // A lease brings the found chunks into memory.
            drop(near.session.lease(&near.namespace, &chain.part(0, PART)).await?);
            far.put(&[chain.part(2 * PART, 3 * PART)], &vec![1; BLOCK_BYTES]).await
        })?;
        self.time(&chain)
    }

    fn disk(&mut self) -> anyhow::Result<Duration> {
        let chain = self.prompt(PART);
        self.put_on_disk(&chain)?;
        self.time(&chain)
    }

    fn peer(&mut self) -> anyhow::Result<Duration> {
        let chain = self.prompt(PART);
        let Self { runtime, far, .. } = self;
        runtime.block_on(far.put(std::slice::from_ref(&chain), &vec![1; BLOCK_BYTES]))?;
        self.time(&chain)
    }

    fn prompt(&mut self, chunks: usize) -> Chain {
        let first = self.next_id;
        self.next_id += chunks as u64;
        let hashes: Vec<ChunkHash> = (first..self.next_id).map(chunk_hash).collect();
        self.near.namespace.chain(hashes)
    }

    /// Puts chunks at the near node, then other chunks, so that only the disk keeps the first ones.
    fn put_on_disk(&mut self, chain: &Chain) -> anyhow::Result<()> {
        let pushing = self.prompt(2 * PART);
        let address = self.cluster.addresses().nodes[0].http;
        let Self { runtime, near, .. } = self;
        let block = vec![1; BLOCK_BYTES];
        // A few at a time, since the node drops writes if a slow drive does not keep up.
        for first in (0..chain.len()).step_by(PUT_AT_ONCE) {
            let end = chain.len().min(first + PUT_AT_ONCE);
            runtime.block_on(near.put(&[chain.part(0, end)], &block))?;
            wait_for_disk(address)?;
        }
        runtime.block_on(near.put(&[pushing], &block))?;
        wait_for_disk(address)
    }

    /// Time of a prefetch of the whole chain.
    fn time(&self, chain: &Chain) -> anyhow::Result<Duration> {
        let Self { runtime, near, .. } = self;
        runtime.block_on(async {
            near.wait_for(std::slice::from_ref(chain)).await?;
            let options = LookupOptions { prompt_tokens: u64::MAX, ..LookupOptions::default() };
            let start = now();
            let ticket = near.session.prefetch(&near.namespace, chain, options).await?;
            let lease = near.session.collect(ticket, Wait::Complete).await?;
            let took = now() - start;
            anyhow::ensure!(lease.chunks() == chain.len(), "a chunk that a lookup found did not come");
            Ok(took)
        })
    }
}

/// Waits until the node has no write left for its disk.
fn wait_for_disk(node: SocketAddr) -> anyhow::Result<()> {
    let start = now();
    loop {
        let status: Status = http::get_json(&node, "/status")?;
        let disk = status.actors.first().and_then(|actor| actor.disk);
        if disk.context("the node has no disk")?.waiting_bytes == 0 {
            return Ok(());
        }
        anyhow::ensure!(now() - start < PATIENCE, "the disk does not keep up");
        std::thread::sleep(POLL);
    }
}

/// Chunks of a third of the prompt.
const PART: usize = 16;

const BLOCK_BYTES: usize = 4 << 20;

/// Chunks that are put before the disk is waited for.
const PUT_AT_ONCE: usize = 8;

const ARENA_BYTES: u64 = 768 << 20;

const EXTENT_BYTES: u64 = 64 << 20;

const DISK_BYTES: u64 = 4 << 30;

const PATIENCE: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(5);
