//! The cost of a start and a scrub of the disk tier, by its number of chunks: `cargo bench -p larder-node --bench restart`.
//!
//! `LARDER_BENCH_FOLDER` names the folder, on the drive to measure, with room for 9 GB; `LARDER_BENCH_CHUNKS` is the size of the
//! largest tier. Blocks have 4 KiB, the smallest that a disk takes, so each chunk takes two pages.

#![expect(clippy::print_stdout, reason = "a bench says what it measured")]

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use larder_core::store::Checksums;
use larder_node::arena::{Binding, ExtentMemory, ExtentSpec, HugePages};
use larder_node::clock::Clock;
use larder_node::disk::{
    BlockPlace, DEFAULT_SEGMENT_BYTES, DiskMetrics, DiskOptions, DiskTier, Source, WriteAnswer, WriteOrder,
};
use larder_node::threads::pinned_to;
use larder_protocol::checksum::{BlockKey, range_checksum};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use prometheus::Registry;

fn main() -> Result<()> {
    let folder = std::env::var("LARDER_BENCH_FOLDER").map_or_else(|_| std::env::temp_dir(), PathBuf::from);
    let most: u64 = std::env::var("LARDER_BENCH_CHUNKS").map_or(Ok(1_000_000), |text| text.parse())?;
    println!("{:>10}  {:>9}  {:>9}  {:>9}  {:>14}", "chunks", "start", "list", "scrub", "scrub a chunk");
    for chunks in [most / 100, most / 10, most] {
        let folder = tempfile::tempdir_in(&folder)?;
        let bench = Bench::new(folder.path(), chunks)?;
        bench.write_all()?;
        let (start, list) = bench.restart()?;
        let scrub = bench.scrub()?;
        let each = scrub.as_secs_f64() * 1e6 / chunks as f64;
        println!(
            "{chunks:>10}  {:>7.3} s  {:>7.3} s  {:>7.2} s  {each:>11.1} us",
            start.as_secs_f64(),
            list.as_secs_f64(),
            scrub.as_secs_f64()
        );
    }
    Ok(())
}

struct Bench {
    folder: PathBuf,
    chunks: u64,
    clock: Clock,
    memory: Arc<ExtentMemory>,
    checksum: u64,
}

impl Bench {
    fn new(folder: &Path, chunks: u64) -> Result<Self> {
        let spec = ExtentSpec {
            bytes: BLOCK_BYTES,
            numa_node: None,
            binding: Binding::Strict,
            huge_pages: HugePages::Never,
            trust_engines: false,
        };
        let (memory, content) = (Arc::new(spec.create()?), [7; BLOCK_BYTES as usize]);
        memory.copy_in(0, &content)?;
        let (folder, clock) = (folder.to_owned(), Clock::start());
        Ok(Self { folder, chunks, clock, memory, checksum: range_checksum(&content) })
    }

    fn open(&self, scrub_bytes_per_second: u64) -> Result<(DiskTier, Registry)> {
        let options = DiskOptions {
            folder: self.folder.join("tier"),
            capacity_bytes: (2 * self.chunks * BLOCK_BYTES).next_multiple_of(DEFAULT_SEGMENT_BYTES)
                + SPARE_SEGMENTS * DEFAULT_SEGMENT_BYTES,
            segment_bytes: DEFAULT_SEGMENT_BYTES,
            queue_orders: ORDERS,
            scrub_bytes_per_second,
            silent_after: Duration::MAX,
            cpus: pinned_to()?,
            lane: None,
        };
        let registry = Registry::new();
        let metrics = DiskMetrics::new(&registry, 0)?;
        Ok((DiskTier::open(&options, metrics, Box::new(|_| ()))?, registry))
    }

    fn write_all(&self) -> Result<()> {
        let (tier, _) = self.open(0)?;
        let mut waiting = VecDeque::new();
        for number in 0..self.chunks {
            if waiting.len() == ORDERS - 1 {
                expect_durable(waiting.pop_front())?;
            }
            let place = BlockPlace {
                slice: 0,
                pool: 0,
                memory: Arc::clone(&self.memory),
                offset: 0,
                bytes: BLOCK_BYTES,
                range_bytes: BLOCK_BYTES,
            };
            let checksums = Checksums::of(&key(number), [self.checksum]);
            let order = WriteOrder::new(FINGERPRINT, chunk(number), vec![Source { place, checksums }])?;
            waiting.push_back(tier.write(order).map_err(|refused| anyhow::anyhow!("{refused:?}"))?);
        }
        while !waiting.is_empty() {
            expect_durable(waiting.pop_front())?;
        }
        Ok(())
    }

    /// How long the tier takes to open, and then to list its chunks.
    fn restart(&self) -> Result<(Duration, Duration)> {
        let began = self.clock.elapsed();
        let (tier, _) = self.open(0)?;
        let opened = self.clock.elapsed();
        let (mut next, mut found) = (Some(0), 0);
        while let Some(after) = next {
            let page = tier.snapshot(after).map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
            let page = page.blocking_recv()?.context("the tier is closed")?;
            (next, found) = (page.next, found + page.held.len() as u64);
        }
        ensure!(found == self.chunks, "{found} of {} chunks are there after a start", self.chunks);
        Ok((opened - began, self.clock.elapsed() - opened))
    }

    /// How long the scrubber takes to verify the whole tier, if nothing holds it back.
    fn scrub(&self) -> Result<Duration> {
        let began = self.clock.elapsed();
        let (_tier, registry) = self.open(u64::MAX)?;
        let scrubbed = || -> Option<f64> {
            let families = registry.gather();
            let family =
                families.iter().find(|family| family.name() == "larder_disk_scrubbed_bytes_total")?;
            Some(family.get_metric().first()?.get_counter().get_value())
        };
        while scrubbed().context("there is no such metric")? < (self.chunks * BLOCK_BYTES) as f64 {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(self.clock.elapsed() - began)
    }
}

fn expect_durable(waiting: Option<tokio::sync::oneshot::Receiver<WriteAnswer>>) -> Result<()> {
    match waiting.context("nothing waits")?.blocking_recv()? {
        WriteAnswer::Durable => Ok(()),
        other => bail!("a block is not written: {other:?}"),
    }
}

fn chunk(number: u64) -> ChunkRef {
    let hash = key(number).hash;
    ChunkRef { hash, parent: hash, index: 0, anchor: hash }
}

fn key(number: u64) -> BlockKey {
    let mut hash = [1; 32];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey { fingerprint: FINGERPRINT, hash: ChunkHash(hash), slice: 0, pool: 0 }
}

const FINGERPRINT: Fingerprint = Fingerprint([1; 32]);
const BLOCK_BYTES: u64 = 4 << 10;

/// Writes that are ordered at the same time.
const ORDERS: usize = 1_024;

/// Segments that the tier needs beside those of its chunks.
const SPARE_SEGMENTS: u64 = 6;
