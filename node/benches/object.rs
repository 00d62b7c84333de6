//! The object tier on a local folder against plain files: `cargo bench -p larder-node --bench object`.
//!
//! `LARDER_BENCH_FOLDER` names the folder; `LARDER_BENCH_MIB` says how much is written. `LARDER_BENCH_URL` measures
//! another store (`s3://...`, settings from the environment) against the same files, and leaves its objects there.
//! The best of several rounds is kept.

#![expect(clippy::print_stdout, reason = "a bench says what it measured")]

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use larder_core::store::Checksums;
use larder_net::metrics::Part as _;
use larder_node::arena::Binding;
use larder_node::arena::HugePages;
use larder_node::arena::{ExtentMemory, ExtentSpec};
use larder_node::clock::Clock;
use larder_node::disk::{BlockPlace, ReadAnswer, ReadOrder, Source, WriteAnswer, WriteOrder};
use larder_node::object::{ObjectMetrics, ObjectOptions, ObjectTier};
use larder_node::threads::pinned_to;
use larder_protocol::checksum::{BlockKey, range_checksum};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use tokio::sync::oneshot;

fn main() -> Result<()> {
    let folder = std::env::var("LARDER_BENCH_FOLDER").map_or_else(|_| std::env::temp_dir(), PathBuf::from);
    let mib: u64 = std::env::var("LARDER_BENCH_MIB").map_or(Ok(512), |text| text.parse())?;
    let folder = tempfile::tempdir_in(folder)?;
    let url = format!("file://{}/tier", folder.path().display());
    let url = std::env::var("LARDER_BENCH_URL").unwrap_or(url);
    let bench = Bench::new((mib << 20) / BLOCK_BYTES)?;
    let (mut best_files, mut best_tier) = (Rates::default(), Rates::default());
    for round in 0..ROUNDS {
        let files = bench.files(folder.path(), round)?;
        let tier = bench.tier(&url, round)?;
        println!("round {round}: files {files:?}, tier {tier:?}");
        best_files.keep(files);
        best_tier.keep(tier);
    }
    for (what, tier, files) in
        [("put", best_tier.write, best_files.write), ("get", best_tier.read, best_files.read)]
    {
        println!(
            "object {what} of 4 MiB blocks: tier {tier:.2} GB/s, one file after the other {files:.2} GB/s, ratio {:.2}",
            tier / files
        );
    }
    Ok(())
}

struct Bench {
    blocks: u64,
    clock: Clock,
    memory: Arc<ExtentMemory>,
    checksums: Vec<u64>,
    content: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rates {
    write: f64,
    read: f64,
}

impl Rates {
    fn keep(&mut self, new: Self) {
        (self.write, self.read) = (self.write.max(new.write), self.read.max(new.read));
    }
}

impl Bench {
    fn new(blocks: u64) -> Result<Self> {
        let (bytes, huge_pages) = (SLOTS * BLOCK_BYTES, HugePages::Never);
        let memory = ExtentSpec {
            bytes,
            numa_node: None,
            binding: Binding::Preferred,
            huge_pages,
            trust_engines: false,
        }
        .create()?;
        let mut content = vec![0; BLOCK_BYTES as usize];
        fastrand::Rng::with_seed(7).fill(&mut content);
        for slot in 0..SLOTS {
            memory.copy_in(slot * BLOCK_BYTES, &content)?;
        }
        let checksums = content.chunks(RANGE_BYTES as usize).map(range_checksum).collect();
        Ok(Self { blocks, clock: Clock::start(), memory: Arc::new(memory), checksums, content })
    }

    fn rate(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let start = self.clock.elapsed();
        work()?;
        Ok((self.blocks * BLOCK_BYTES) as f64 / (self.clock.elapsed() - start).as_secs_f64() / 1e9)
    }

    /// Writes each block to a synced file, then reads each file and copies it to its place.
    fn files(&self, folder: &Path, round: u32) -> Result<Rates> {
        let path = |block| folder.join(format!("{round}-{block}"));
        let write = self.rate(|| {
            for block in 0..self.blocks {
                let mut file = File::create(path(block))?;
                file.write_all(&self.content)?;
                file.sync_all()?;
            }
            Ok(())
        })?;
        let mut buffer = vec![0; BLOCK_BYTES as usize];
        let read = self.rate(|| {
            for block in 0..self.blocks {
                File::open(path(block))?.read_exact(&mut buffer)?;
                self.memory.copy_in(block % SLOTS * BLOCK_BYTES, &buffer)?;
            }
            Ok(())
        })?;
        (0..self.blocks).try_for_each(|block| std::fs::remove_file(path(block)))?;
        Ok(Rates { write, read })
    }

    fn tier(&self, url: &str, round: u32) -> Result<Rates> {
        let options = ObjectOptions {
            url: url.to_owned(),
            settings: BTreeMap::new(),
            allow_http: true,
            start_without: false,
            writes: true,
            queue_orders: SLOTS as usize,
            max_in_flight: 16,
            bytes_in_flight: SLOTS * BLOCK_BYTES,
            timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(60),
            find_deadline: Duration::from_secs(1),
            known_chunks: 1 << 20,
            cpus: pinned_to()?,
        };
        let registry = prometheus::Registry::new();
        let tier = ObjectTier::open(&options, ObjectMetrics::register(&registry)?)?;
        let write = self.rate(|| {
            self.pipeline(
                |block| {
                    let checksums = Checksums::of(&key(round, block), self.checksums.iter().copied());
                    let source = Source { place: self.place(block), checksums };
                    tier.write(WriteOrder::new(FINGERPRINT, chunk(round, block), vec![source])?)
                        .ok()
                        .context("refused")
                },
                |answer| *answer == WriteAnswer::Durable,
            )
        })?;
        let read = self.rate(|| {
            self.pipeline(
                |block| {
                    let order = ReadOrder::new(FINGERPRINT, chunk(round, block), vec![self.place(block)])?;
                    tier.read(order).ok().context("refused")
                },
                |answer| matches!(answer, ReadAnswer::Here { .. }),
            )
        })?;
        Ok(Rates { write, read })
    }

    /// Orders one block after the other, some of them at a time.
    fn pipeline<A: std::fmt::Debug>(
        &self,
        order: impl Fn(u64) -> Result<oneshot::Receiver<A>>,
        is_right: impl Fn(&A) -> bool,
    ) -> Result<()> {
        let mut waiting = VecDeque::new();
        for block in 0..self.blocks + AT_A_TIME {
            if waiting.len() as u64 == AT_A_TIME || block >= self.blocks {
                let Some(answer) = waiting.pop_front() else { break };
                let answer: A = oneshot::Receiver::blocking_recv(answer)?;
                ensure!(is_right(&answer), "{answer:?}");
            }
            if block < self.blocks {
                waiting.push_back(order(block)?);
            }
        }
        Ok(())
    }

    fn place(&self, block: u64) -> BlockPlace {
        BlockPlace {
            slice: 0,
            pool: 0,
            memory: Arc::clone(&self.memory),
            offset: block % SLOTS * BLOCK_BYTES,
            bytes: BLOCK_BYTES,
            range_bytes: RANGE_BYTES,
        }
    }
}

fn chunk(round: u32, block: u64) -> ChunkRef {
    let hash = key(round, block).hash;
    ChunkRef { hash, parent: hash, index: 0, anchor: hash }
}

/// A key that differs in each run: objects of an earlier run may still be there.
fn key(round: u32, block: u64) -> BlockKey {
    static RUN: LazyLock<u64> = LazyLock::new(|| fastrand::u64(..));
    let mut hash = [round as u8; 32];
    hash[8..16].copy_from_slice(&RUN.to_le_bytes());
    hash[..8].copy_from_slice(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey { fingerprint: FINGERPRINT, hash: ChunkHash(hash), slice: 0, pool: 0 }
}

const FINGERPRINT: Fingerprint = Fingerprint([1; 32]);
const BLOCK_BYTES: u64 = 4 << 20;
const RANGE_BYTES: u64 = 1 << 20;

/// Blocks in memory: more than are under way.
const SLOTS: u64 = 32;
const AT_A_TIME: u64 = 16;
const ROUNDS: u32 = 3;
