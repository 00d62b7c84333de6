//! The disk tier against a plain O_DIRECT loop over the same blocks: `cargo bench -p larder-node --bench disk`.
//!
//! `LARDER_BENCH_FOLDER` names the folder, on the drive to measure; `LARDER_BENCH_MIB` says how much is written.
//! Each figure is taken several times, tier and loop in turn, and the best is kept.

#![expect(clippy::print_stdout, reason = "a bench says what it measured")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use larder_core::store::Checksums;
use larder_node::arena::Binding;
use larder_node::arena::HugePages;
use larder_node::arena::{ExtentMemory, ExtentSpec};
use larder_node::clock::Clock;
use larder_node::disk::io::{Buffer, DiskFile, IoMethod};
use larder_node::disk::{
    BlockPlace, DEFAULT_SEGMENT_BYTES, DiskMetrics, DiskOptions, DiskTier, ReadAnswer, ReadOrder, Refused,
    Source, WriteAnswer, WriteOrder,
};
use larder_node::threads::pinned_to;
use larder_protocol::checksum::{BlockKey, range_checksum};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

fn main() -> Result<()> {
    let folder = std::env::var("LARDER_BENCH_FOLDER").map_or_else(|_| std::env::temp_dir(), PathBuf::from);
    let mib: u64 = std::env::var("LARDER_BENCH_MIB").map_or(Ok(2_048), |text| text.parse())?;
    let folder = tempfile::tempdir_in(folder)?;
    let blocks = (mib << 20) / BLOCK_BYTES;
    let bench = Bench::new(folder.path(), blocks)?;
    for lane in [None, Some(IoMethod::Plain)] {
        let mut best = Best::default();
        for round in 0..ROUNDS {
            let plain = bench.plain_loop(round)?;
            let tier = bench.tier(lane, round)?;
            println!(
                "round {round}: loop writes {:.2}, reads {:.2} GB/s; tier writes {:.2}, reads {:.2} GB/s",
                plain.write, plain.read, tier.write, tier.read
            );
            best.keep(plain, tier);
        }
        best.print(lane);
    }
    Ok(())
}

struct Bench {
    folder: PathBuf,
    blocks: u64,
    clock: Clock,
    memory: Arc<ExtentMemory>,
    checksums: Vec<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rates {
    write: f64,
    read: f64,
}

#[derive(Default)]
struct Best {
    plain: Rates,
    tier: Rates,
}

impl Bench {
    fn new(folder: &Path, blocks: u64) -> Result<Self> {
        let spec = ExtentSpec {
            bytes: SLOTS * BLOCK_BYTES,
            numa_node: None,
            binding: Binding::Strict,
            huge_pages: HugePages::Never,
            trust_engines: false,
        };
        let memory = Arc::new(spec.create()?);
        let mut content = vec![0; BLOCK_BYTES as usize];
        fastrand::Rng::with_seed(7).fill(&mut content);
        for slot in 0..SLOTS {
            memory.copy_in(slot * BLOCK_BYTES, &content)?;
        }
        let checksums = content.chunks(RANGE_BYTES as usize).map(range_checksum).collect();
        Ok(Self { folder: folder.to_owned(), blocks, clock: Clock::start(), memory, checksums })
    }

    fn rate(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let start = self.clock.elapsed();
        work()?;
        let seconds = (self.clock.elapsed() - start).as_secs_f64();
        Ok((self.blocks * BLOCK_BYTES) as f64 / seconds / 1e9)
    }

    /// Writes and reads blocks one after the other, from and to one buffer, and syncs as often as the tier does.
    fn plain_loop(&self, round: u32) -> Result<Rates> {
        let path = self.folder.join("loop");
        if round == 0 {
            let _ = std::fs::remove_file(&path);
            DiskFile::open(&path)?.allocate(self.blocks * BLOCK_BYTES)?;
        }
        let file: File =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path)?;
        let mut buffer = Buffer::new(BLOCK_BYTES as usize)?;
        self.memory.copy_out(0, buffer.bytes_mut())?;
        let write = self.rate(|| {
            for block in 0..self.blocks {
                file.write_all_at(buffer.bytes(), block * BLOCK_BYTES)?;
                if block % (SLOTS / 2) == SLOTS / 2 - 1 {
                    file.sync_data()?;
                }
            }
            Ok(file.sync_data()?)
        })?;
        let read = self.rate(|| {
            for block in 0..self.blocks {
                file.read_exact_at(buffer.bytes_mut(), block * BLOCK_BYTES)?;
            }
            Ok(())
        })?;
        Ok(Rates { write, read })
    }

    fn tier(&self, lane: Option<IoMethod>, round: u32) -> Result<Rates> {
        let options = DiskOptions {
            folder: self.folder.join(format!("tier-{lane:?}")),
            // Room for little more than one round, so that later rounds give up segments as they go.
            capacity_bytes: self.blocks.div_ceil(63).saturating_add(5) * DEFAULT_SEGMENT_BYTES,
            segment_bytes: DEFAULT_SEGMENT_BYTES,
            queue_orders: SLOTS as usize,
            scrub_bytes_per_second: 0,
            silent_after: Duration::MAX,
            cpus: pinned_to()?,
            lane,
        };
        let metrics = DiskMetrics::new(&prometheus::Registry::new(), 0)?;
        let tier = DiskTier::open(&options, metrics, Box::new(|_| ()))?;
        let write = self.rate(|| self.write_all(&tier, round))?;
        let read = self.rate(|| self.read_all(&tier, round))?;
        Ok(Rates { write, read })
    }

    fn write_all(&self, tier: &DiskTier, round: u32) -> Result<()> {
        let mut waiting = std::collections::VecDeque::new();
        for block in 0..self.blocks {
            if waiting.len() as u64 == SLOTS - 1 {
                expect_durable(waiting.pop_front())?;
            }
            let key = key(round, block);
            let checksums = Checksums::of(&key, self.checksums.iter().copied());
            let source = Source { place: self.place(block % SLOTS), checksums };
            let order = WriteOrder::new(FINGERPRINT, chunk(round, block), vec![source])?;
            match tier.write(order) {
                Ok(answer) => waiting.push_back(answer),
                Err(Refused::Busy | Refused::Closed | Refused::Silent) => bail!("the tier refuses"),
            }
        }
        while !waiting.is_empty() {
            expect_durable(waiting.pop_front())?;
        }
        Ok(())
    }

    fn read_all(&self, tier: &DiskTier, round: u32) -> Result<()> {
        let mut waiting = std::collections::VecDeque::new();
        let expect_here = |waiting: &mut std::collections::VecDeque<_>| -> Result<()> {
            let answer: tokio::sync::oneshot::Receiver<ReadAnswer> =
                waiting.pop_front().context("nothing waits")?;
            match answer.blocking_recv()? {
                ReadAnswer::Here { .. } => Ok(()),
                other => bail!("a block does not come back: {other:?}"),
            }
        };
        for block in 0..self.blocks {
            if waiting.len() as u64 == READS_AHEAD {
                expect_here(&mut waiting)?;
            }
            match tier.read(ReadOrder::new(
                FINGERPRINT,
                chunk(round, block),
                vec![self.place(block % SLOTS)],
            )?) {
                Ok(answer) => waiting.push_back(answer),
                Err(Refused::Busy | Refused::Closed | Refused::Silent) => bail!("the tier refuses"),
            }
        }
        while !waiting.is_empty() {
            expect_here(&mut waiting)?;
        }
        Ok(())
    }

    fn place(&self, slot: u64) -> BlockPlace {
        BlockPlace {
            slice: 0,
            pool: 0,
            memory: Arc::clone(&self.memory),
            offset: slot * BLOCK_BYTES,
            bytes: BLOCK_BYTES,
            range_bytes: RANGE_BYTES,
        }
    }
}

impl Best {
    fn keep(&mut self, plain: Rates, tier: Rates) {
        for (best, new) in [(&mut self.plain, plain), (&mut self.tier, tier)] {
            best.write = best.write.max(new.write);
            best.read = best.read.max(new.read);
        }
    }

    fn print(&self, lane: Option<IoMethod>) {
        let Self { plain, tier } = self;
        for (what, tier, plain) in [("write", tier.write, plain.write), ("read", tier.read, plain.read)] {
            println!(
                "disk {what} of 4 MiB blocks ({lane:?}): tier {tier:.2} GB/s, O_DIRECT loop {plain:.2} GB/s, ratio {:.2}",
                tier / plain
            );
        }
    }
}

fn expect_durable(waiting: Option<tokio::sync::oneshot::Receiver<WriteAnswer>>) -> Result<()> {
    match waiting.context("nothing waits")?.blocking_recv()? {
        WriteAnswer::Durable => Ok(()),
        other => bail!("a block is not written: {other:?}"),
    }
}

fn chunk(round: u32, block: u64) -> ChunkRef {
    let hash = key(round, block).hash;
    ChunkRef { hash, parent: hash, index: 0, anchor: hash }
}

fn key(round: u32, block: u64) -> BlockKey {
    let mut hash = [round as u8; 32];
    hash[..8].copy_from_slice(&block.to_le_bytes());
    BlockKey { fingerprint: FINGERPRINT, hash: ChunkHash(hash), slice: 0, pool: 0 }
}

const FINGERPRINT: Fingerprint = Fingerprint([1; 32]);
const BLOCK_BYTES: u64 = 4 << 20;
const RANGE_BYTES: u64 = 1 << 20;

/// Blocks in memory: at most this many wait for their write.
const SLOTS: u64 = 32;

/// Reads that are ordered at the same time.
const READS_AHEAD: u64 = 16;

/// Rounds of each. The loop's first round, and the first two rounds of the tier, which has room for more, write where nothing was
/// written before; drives take longer for that. The other rounds are enough to find what each reaches on a shared machine.
const ROUNDS: u32 = 12;
