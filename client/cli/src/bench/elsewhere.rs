//! Lookups that other nodes answer, since the directory's rows of a chunk are at its home.

use std::time::Duration;

use anyhow::Context as _;
use larder_client::LookupOptions;
use larder_net::quic::TransportSettings;
use larder_protocol::{Chain, ChunkHash};
use tokio::runtime::Builder;

use super::Measurement;
use super::measure::{medians, timed};
use super::peer::End;
use super::placement::CpuPair;
use super::quic::BareQuinn;
use super::transfer::{REQUEST_BYTES, Transfer};
use crate::content::chunk_hash;
use crate::dev::{DevCluster, DevOptions, TENANT};

/// Measures a lookup of 100 chunks that nobody has, beside one ping over bare QUIC. All nodes of a cluster are homes of the
/// chunks. The asked node is on the engine's CPU, all other nodes on the other CPU.
///
/// # Errors
/// The cluster does not start, or a node does not answer.
pub fn lookup_beside_a_ping(
    name: &str,
    nodes: u16,
    rounds: usize,
    placement: &CpuPair,
) -> anyhow::Result<Measurement> {
    placement.be_anywhere()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let options = DevOptions { nodes, arena_bytes: Some(ARENA_BYTES), ..DevOptions::new()? };
    let cluster = runtime.block_on(DevCluster::start(options))?;
    runtime.block_on(cluster.joined())?;
    let sockets = &cluster.addresses().nodes[0].sockets;
    let socket = sockets.get(TENANT).context("the node has no socket")?;
    let engine = runtime.block_on(End::connect(socket, Transfer::of(BLOCK_BYTES)))?;
    let mut pids = cluster.pids().into_iter().skip(1).filter_map(|(_, pid)| pid);
    pids.next().map_or(Ok(()), |asked| placement.put_with_engine(asked))?;
    pids.try_for_each(|other| placement.put_with_answerer(other))?;
    placement.be_engine()?;
    let ping = Transfer { block_bytes: REQUEST_BYTES, in_flight: 1 };
    let mut quinn = BareQuinn::start(ping, &TransportSettings::default(), placement)?;
    let mut next_id = 0;
    let mut look_up = || -> anyhow::Result<Duration> {
        let first = next_id;
        next_id += (PASS_LOOKUPS * CHUNKS) as u64;
        let hashes: Vec<ChunkHash> = (first..next_id).map(chunk_hash).collect();
        let chains: Vec<Chain> =
            hashes.chunks(CHUNKS).map(|chunks| engine.namespace.chain(chunks.to_vec())).collect();
        timed(|| {
            runtime.block_on(async {
                for chain in &chains {
                    let options = LookupOptions { prompt_tokens: u64::MAX, ..LookupOptions::default() };
                    engine.session.lookup(&engine.namespace, chain, options).await?;
                }
                Ok(())
            })
        })
    };
    let mut pings = || quinn.blocks(PASS_LOOKUPS);
    let [subject, yardstick] = medians(rounds, [&mut look_up, &mut pings])?;
    placement.be_anywhere()?;
    drop(engine);
    runtime.block_on(cluster.stop())?;
    let [subject, yardstick] = [subject, yardstick].map(|seconds| seconds / PASS_LOOKUPS as f64);
    Ok(Measurement::microseconds(name, "QUIC ping", subject, yardstick))
}

/// Chunks of a lookup.
const CHUNKS: usize = 100;

/// Lookups, or pings, of a pass.
const PASS_LOOKUPS: usize = 50;

const BLOCK_BYTES: usize = 4 << 10;

const ARENA_BYTES: u64 = 64 << 20;
