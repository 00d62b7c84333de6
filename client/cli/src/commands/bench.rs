//! `larder bench`: measures Larder beside the yardsticks of the same run.

use std::hint::black_box;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use indicatif::ProgressBar;
use larder_client::Verify;
use larder_net::quic::TransportSettings;

use crate::bench::elsewhere::lookup_beside_a_ping;
use crate::bench::measure::{medians, timed};
use crate::bench::peer::NodeKind;
use crate::bench::placement::CpuPair;
use crate::bench::prefetch::prefetch_beside_its_slowest_tier;
use crate::bench::scale::scale;
use crate::bench::session::SessionBench;
use crate::bench::side_by_side::{COLUMNS, gets, peer_get};
use crate::bench::store::StoreBench;
use crate::bench::transfer::{Transfer, kind_beside_another, peer_get_beside_both, quinn_beside_tcp};
use crate::bench::yardsticks::Memcpy;
use crate::bench::{Measurement, load, table, timeline};
use crate::dev::{DevCluster, DevOptions, TENANT};
use crate::failure::Usage;
use crate::{content, heap, output};

/// Measure Larder beside the best that the machine can do
///
/// Every figure is a median. Beside it stands a yardstick that was measured in turns with it: compare ratios, since absolute
/// figures drift with the machine. The node is a separate process on another CPU than the engine. A yardstick's other side also
/// runs on another CPU.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder bench                  A table
  larder bench --filter store   Benches with `store` in their name
  larder bench --csv            Rows to compare with the rows of other stores
  larder bench --timeline       Where the time of a get from another node goes
  larder bench --load           Times of requests at higher and higher rates, until a node no longer keeps up
  larder bench --load --svg load.svg   The same, with a picture
  larder bench --scale          The store alone, with a million chunks and with ten million
  larder bench --json           An array of {name, value, unit, yardstick, yardstick_value, ratio}

Benches, each with its yardstick:
  lookup_100_chunks   a lookup of 100 chunks, engine to node and back  / a socket ping-pong of the same sizes
  ..._16_engines, _64_engines   the same lookup by so many engines of one actor at once: rate, median, 99th percentile
                      / as many ping-pongs at once
  ..._of_2_nodes, _4_nodes, _16_nodes   a lookup of 100 chunks that nobody has, whose homes are so many nodes  / a ping over bare QUIC
  lease_100_chunks    a lease of 100 chunks and its release, no copy   / the same
  ..._one_cpu         the same with both sides on one CPU, so that no other CPU has to wake up
  get_256KiB, _4MiB, _32MiB   lease, copy into the caller's memory, release     / one memcpy
  get_16x256KiB       the same for a prompt of 16 blocks of 256 KiB, leased at once   / one memcpy of 4 MiB
  ..._by_two_threads  the same, copied by two threads of the engine    / one memcpy
  put_4MiB            reserve, copy into the write window, commit      / one memcpy
  store_lookup_100    the same lookup in the store alone               / 100 hash-map probes
  store_hit           lease and release of one chunk, among a million  / one hash-map probe
  store_evict         an eviction of one chunk, among a million        / one hash-map probe
  store_remember      remembering an eviction, in 16 bytes             / one hash-map probe
  peer_quic_256KiB, _4MiB, _32MiB   blocks over QUIC with the nodes' settings, without Larder's work  / raw TCP
  peer_get_256KiB, _4MiB, _32MiB   leases of prompts of 4 MiB (or one block) from another node, four at a time  / raw TCP
  ..._of_quic         the gets of peer_get                             / bare QUIC
  ..._cpu             CPU seconds of both ends for each GB             / CPU seconds of the same yardstick
  peer_get_4MiB_2_block_threads   gets of one block, four at a time, by nodes with two block threads  / by nodes without
  peer_get_4MiB_N_block_threads_all_cpus   the same with 1, 2, 4, 8 block threads, four blocks at a time for each, on all CPUs;
                      only if there are more than two CPUs, and two for each thread   / the same
  peer_get_256KiB_over_tcp, _4MiB_over_tcp   leases of prompts of 4 MiB from another node, four at a time, over TCP  / over QUIC
  prefetch_spread     a prompt of 48 blocks of 4 MiB, a third each in memory, on disk and at a peer  / the slower of disk and peer alone
  ..._10Gbit          the same, with a peer that sends 1.2 GB/s        / the same
  replay_content      making the bytes of a replay's 4 MiB block       / one memcpy")]
pub(crate) struct Args {
    /// Measure only the benches with this text in their name
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,

    /// Run fewer rounds with a tenth of the chunks: for a quick look, not for published figures
    #[arg(long)]
    quick: bool,

    /// Print JSON: one array
    #[arg(long)]
    json: bool,

    /// Print gets from another node as comma-separated rows, with the columns that comparisons of stores use. Each row has one
    /// block size and one number of blocks at a time. A lease has one block; in rows `peer_get_batch`, it has all blocks of the
    /// row
    #[arg(long, conflicts_with_all = ["json", "filter"])]
    csv: bool,

    /// Print the time that each stage of a get from another node takes, for small and large blocks. Beside it stand the times of
    /// a block over bare QUIC and over raw TCP
    #[arg(long, conflicts_with_all = ["csv", "filter"])]
    timeline: bool,

    /// Print what the store alone costs with a million chunks and with ten million: times of lookup, hit and eviction, and bytes
    /// of heap a chunk, beside a hash map with as many entries
    ///
    /// More entries fit less into the CPU's caches, so costs grow, as those of the hash map do: compare the ratios. Takes 6 GiB
    /// of memory; with `--quick` it measures only a million chunks, and takes 1 GiB
    #[arg(long, conflicts_with_all = ["csv", "filter", "timeline", "load"])]
    scale: bool,

    /// Raise the rate of requests until a node no longer answers 99 % of them within 10 ms, and print their times at each rate
    ///
    /// Sixteen engines ask one of two nodes. A request is sent when it is due, even if earlier requests have no answer yet, and
    /// its time counts from that moment. Of ten requests six are lookups of 100 chunks, two are leases, one saves a block of 64
    /// KiB and one gets such a block from the other node. `not done` counts requests that the node turned away, and requests
    /// without an answer. All engines run on one thread of this process: if this thread uses a whole CPU, the rate is its limit,
    /// not the node's
    #[arg(long, conflicts_with_all = ["csv", "filter", "timeline"])]
    load: bool,

    /// Draw a chart of `--load` into this file: times by rate, as SVG
    #[arg(long, value_name = "FILE", requires = "load", conflicts_with_all = ["csv", "filter", "timeline"])]
    svg: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // The yardsticks run in this process, and get the allocator settings of a node.
    heap::keep_freed_memory();
    let wanted = |name: &str| args.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()));
    let rounds = if args.quick { QUICK_ROUNDS } else { ROUNDS };
    if args.csv {
        return side_by_side(args.quick);
    }
    if args.timeline {
        return print_timeline(args);
    }
    if args.load {
        return print_load(args);
    }
    if args.scale {
        let sizes = if args.quick { &MILLIONS[..1] } else { &MILLIONS[..] };
        let rows: Vec<_> = sizes.iter().map(|&millions| scale(millions, rounds)).collect::<Result<_, _>>()?;
        return print_rows(args, &rows.concat());
    }
    let mut measurements = Vec::new();
    if SESSION_BENCHES.iter().any(|(name, _)| wanted(name))
        || MANY_BENCHES.iter().any(|(name, _)| wanted(name))
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let placement = CpuPair::choose()?;
        placement.be_answerer()?;
        let cluster = runtime.block_on(DevCluster::start(node_options()?))?;
        placement.be_engine()?;
        let sockets = &cluster.addresses().nodes.first().context("the cluster has no node")?.sockets;
        let socket = sockets.get(TENANT).context("the node has no socket")?;
        let engine = SessionBench::connect(socket, &placement, rounds)?;
        for (name, bench) in SESSION_BENCHES.iter().filter(|(name, _)| wanted(name)) {
            measurements.push(bench(&engine, name).with_context(|| format!("cannot measure {name}"))?);
        }
        for (name, engines) in MANY_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
            measurements.extend(engine.lookup_by_many(name, engines)?);
        }
        drop(engine);
        placement.be_anywhere()?;
        runtime.block_on(cluster.stop())?;
    }
    for (name, nodes) in HOMES_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
        measurements.push(lookup_beside_a_ping(name, nodes, rounds, &CpuPair::choose()?)?);
    }
    if STORE_BENCHES.iter().any(|name| wanted(name)) {
        store_benches(
            rounds,
            if args.quick { STORE_CHUNKS / 10 } else { STORE_CHUNKS },
            &wanted,
            &mut measurements,
        )?;
    }
    peer_benches(rounds, &wanted, &mut measurements)?;
    for (name, send_bytes_per_second) in PREFETCH_BENCHES {
        if wanted(name) {
            let measured = prefetch_beside_its_slowest_tier(name, PREFETCH_ROUNDS, send_bytes_per_second)?;
            measurements.push(measured);
        }
    }
    if wanted(CONTENT_BENCH) {
        measurements.push(content_fill(rounds)?);
    }
    if measurements.is_empty() {
        return Err(Usage(
            "no bench that this machine can run has this text in its name: see `larder help bench`".into(),
        )
        .into());
    }
    print_rows(args, &measurements)
}

fn print_rows(args: &Args, rows: &[Measurement]) -> anyhow::Result<ExitCode> {
    if args.json {
        output::print_json(&rows)?;
    } else {
        output::print(&table(rows).to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints each row as soon as it is measured.
fn side_by_side(quick: bool) -> anyhow::Result<ExitCode> {
    let placement = CpuPair::choose()?;
    output::print(COLUMNS)?;
    for gets in gets() {
        output::print(&peer_get(gets, if quick { 1 } else { CSV_REPETITIONS }, &placement)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one table of all transfers.
fn print_timeline(args: &Args) -> anyhow::Result<ExitCode> {
    let placement = CpuPair::choose()?;
    let rounds = if args.quick { 1 } else { TIMELINE_ROUNDS };
    let mut stages = Vec::new();
    for transfer in timeline::transfers() {
        stages.extend(timeline::timeline(transfer, rounds, &placement)?);
    }
    if args.json {
        output::print_json(&stages)?;
    } else {
        output::print(&timeline::table(&stages).to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows the current step on standard error, then prints the table and the knee.
fn print_load(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.svg {
        output::check_writable(file, "--svg")?;
    }
    let load = if args.quick { load::Load { steps: 3, step: QUICK_STEP, ..LOAD } } else { LOAD };
    let progress = ProgressBar::new_spinner();
    let steps = load::load(load, |step| {
        progress
            .set_message(format!("{:.0} requests a second: 99 % within {} us", step.rate, step.all.p99_us));
        progress.tick();
        Ok(())
    })?;
    progress.finish_and_clear();
    let knee = load::Knee::of(&steps);
    if let Some(file) = &args.svg {
        std::fs::write(file, load::svg(&steps, load.limit))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.json {
        output::print_json(&serde_json::json!({ "knee": knee, "steps": steps }))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print(&load::table(&steps).to_string())?;
    output::print(&match knee {
        Some(load::Knee { rate, at_the_end: false }) => {
            format!("knee: {} requests a second, 99 % of them within 10 ms", output::count(rate as u64))
        }
        Some(load::Knee { rate, .. }) => {
            format!("the knee is beyond {} requests a second", output::count(rate as u64))
        }
        None => "the slowest rate already takes more than 10 ms: is the machine busy?".to_owned(),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn store_benches(
    rounds: usize,
    chunks: u64,
    wanted: &impl Fn(&str) -> bool,
    measurements: &mut Vec<Measurement>,
) -> anyhow::Result<()> {
    let [lookup, hit, evict, remember] = STORE_BENCHES;
    let mut full = StoreBench::filled(chunks, chunks, 0)?;
    if wanted(lookup) {
        measurements.push(full.lookup(rounds)?);
    }
    if wanted(hit) {
        measurements.push(full.hit(rounds)?);
    }
    if wanted(evict) {
        let mut roomy = StoreBench::filled(chunks, 2 * chunks, 0)?;
        measurements.push(full.evict(&mut roomy, rounds)?);
    }
    if wanted(remember) {
        let mut remembering = StoreBench::filled(chunks, chunks, REMEMBERED)?;
        measurements.push(remembering.remember(&mut full, rounds)?);
    }
    Ok(())
}

/// Measures transfers between two nodes. Both run in this process, each on its own CPU.
fn peer_benches(
    rounds: usize,
    wanted: &impl Fn(&str) -> bool,
    measurements: &mut Vec<Measurement>,
) -> anyhow::Result<()> {
    let placement = CpuPair::choose()?;
    placement.be_engine()?;
    for (name, block_bytes) in PEER_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
        let settings = TransportSettings::default();
        let rows = quinn_beside_tcp(name, Transfer::of(block_bytes), &settings, rounds, &placement);
        measurements.extend(rows.with_context(|| format!("cannot measure {name}"))?);
    }
    for (name, block_bytes) in PEER_GET_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
        let rows = peer_get_beside_both(name, Transfer::of(block_bytes), rounds / 4, &placement);
        measurements.extend(rows.with_context(|| format!("cannot measure {name}"))?);
    }
    if wanted(BLOCK_THREADS_BENCH) {
        let (transfer, rounds) = (Transfer::of(4 << 20), rounds / 4);
        placement.be_anywhere()?;
        let names = (BLOCK_THREADS_BENCH, NO_BLOCK_THREAD);
        let kinds = with_and_without_block_threads(2);
        measurements.extend(kind_beside_another(names, (transfer, 1), rounds, kinds, Some(&placement))?);
    }
    for (name, block_bytes) in OVER_TCP_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
        let gets = (Transfer::of(block_bytes), (4 << 20) / block_bytes);
        let kinds = [true, false].map(|blocks_over_tcp| NodeKind { blocks_over_tcp, ..NodeKind::default() });
        placement.be_anywhere()?;
        let rows = kind_beside_another((name, "over QUIC"), gets, rounds / 4, kinds, Some(&placement))?;
        measurements.extend(rows);
    }
    placement.be_anywhere()?;
    for (name, threads) in ALL_CPUS_BENCHES.into_iter().filter(|(name, _)| wanted(name)) {
        if placement.cpus() >= 2 * usize::from(threads) && placement.cpus() > 2 {
            let transfer = Transfer { block_bytes: 4 << 20, in_flight: 4 * usize::from(threads) };
            let (names, kinds) = ((name, NO_BLOCK_THREAD), with_and_without_block_threads(threads));
            measurements.extend(kind_beside_another(names, (transfer, 1), rounds / 4, kinds, None)?);
        }
    }
    Ok(())
}

fn with_and_without_block_threads(threads: u8) -> [NodeKind; 2] {
    [threads, 0].map(|threads| NodeKind { block_threads: Some(threads), ..NodeKind::default() })
}

/// Measures how fast a replay makes the bytes of its chunks. This work must not dominate a replay's measurements.
fn content_fill(rounds: usize) -> anyhow::Result<Measurement> {
    let mut block = vec![0; 4 << 20];
    let hash = content::chunk_hash(1);
    let mut memcpy = Memcpy::new(block.len());
    let bytes = block.len() as u64;
    let mut fill = || {
        timed(|| {
            content::fill(&hash, black_box(&mut block));
            Ok(())
        })
    };
    let mut copy = || {
        timed(|| {
            memcpy.pass();
            Ok(())
        })
    };
    let [subject, yardstick] = medians(rounds, [&mut fill, &mut copy])?;
    Ok(Measurement::throughput(CONTENT_BENCH, "memcpy", bytes, subject, yardstick))
}

/// The options of a node with room for the blocks of every size, since each size has extents of its own.
fn node_options() -> anyhow::Result<DevOptions> {
    Ok(DevOptions { arena_bytes: Some(768 << 20), extent_bytes: Some(64 << 20), ..DevOptions::new()? })
}

type SessionMeasure = fn(&SessionBench, &str) -> anyhow::Result<Measurement>;

/// The benches of one engine's session, in the order in which they run.
const SESSION_BENCHES: [(&str, SessionMeasure); 17] = [
    ("lookup_100_chunks", |session, name| session.lookup(name)),
    ("lookup_100_chunks_one_cpu", |session, name| session.on_one_cpu(|session| session.lookup(name))),
    ("lease_100_chunks", |session, name| session.lease(name)),
    ("lease_100_chunks_one_cpu", |session, name| session.on_one_cpu(|session| session.lease(name))),
    ("get_256KiB", |session, name| session.get(name, 256 << 10, 1)),
    ("get_4MiB", |session, name| session.get(name, 4 << 20, 1)),
    ("get_32MiB", |session, name| session.get(name, 32 << 20, 1)),
    ("get_16x256KiB", |session, name| session.get(name, 256 << 10, 16)),
    ("get_32MiB_by_two_threads", |session, name| session.get_by_two_threads(name, 32 << 20, 1)),
    ("get_128x256KiB_by_two_threads", |session, name| session.get_by_two_threads(name, 256 << 10, 128)),
    ("get_4KiB_verify_sample", |session, name| session.get_verified(name, 4 << 10, Verify::Sample)),
    ("get_4KiB_verify_always", |session, name| session.get_verified(name, 4 << 10, Verify::Always)),
    ("get_256KiB_verify_sample", |session, name| session.get_verified(name, 256 << 10, Verify::Sample)),
    ("get_256KiB_verify_always", |session, name| session.get_verified(name, 256 << 10, Verify::Always)),
    ("get_4MiB_verify_sample", |session, name| session.get_verified(name, 4 << 20, Verify::Sample)),
    ("get_4MiB_verify_always", |session, name| session.get_verified(name, 4 << 20, Verify::Always)),
    ("put_4MiB", |session, name| session.put(name, 4 << 20)),
];

/// Benches by name, with their number of engines.
const MANY_BENCHES: [(&str, usize); 2] =
    [("lookup_100_chunks_16_engines", 16), ("lookup_100_chunks_64_engines", 64)];

/// Benches by name, with their number of nodes.
const HOMES_BENCHES: [(&str, u16); 3] = [
    ("lookup_100_chunks_of_2_nodes", 2),
    ("lookup_100_chunks_of_4_nodes", 4),
    ("lookup_100_chunks_of_16_nodes", 16),
];

const PEER_BENCHES: [(&str, usize); 3] =
    [("peer_quic_256KiB", 256 << 10), ("peer_quic_4MiB", 4 << 20), ("peer_quic_32MiB", 32 << 20)];

const PEER_GET_BENCHES: [(&str, usize); 3] =
    [("peer_get_256KiB", 256 << 10), ("peer_get_4MiB", 4 << 20), ("peer_get_32MiB", 32 << 20)];

const BLOCK_THREADS_BENCH: &str = "peer_get_4MiB_2_block_threads";

const NO_BLOCK_THREAD: &str = "no block thread";

const OVER_TCP_BENCHES: [(&str, usize); 2] =
    [("peer_get_256KiB_over_tcp", 256 << 10), ("peer_get_4MiB_over_tcp", 4 << 20)];

/// Benches by name, with the block threads of each node.
const ALL_CPUS_BENCHES: [(&str, u8); 4] = [
    ("peer_get_4MiB_1_block_threads_all_cpus", 1),
    ("peer_get_4MiB_2_block_threads_all_cpus", 2),
    ("peer_get_4MiB_4_block_threads_all_cpus", 4),
    ("peer_get_4MiB_8_block_threads_all_cpus", 8),
];

const STORE_BENCHES: [&str; 4] = ["store_lookup_100", "store_hit", "store_evict", "store_remember"];

/// Evictions that a node remembers.
const REMEMBERED: usize = 1 << 20;

/// Benches by name, with the most bytes that the peer sends in a second. Over loopback, sending alone keeps two processes busy;
/// at 10 Gbit/s it does not.
const PREFETCH_BENCHES: [(&str, Option<u64>); 2] =
    [("prefetch_spread", None), ("prefetch_spread_10Gbit", Some(1_200_000_000))];

const PREFETCH_ROUNDS: usize = 9;

/// Sizes of the stores of `--scale`, in millions of chunks.
const MILLIONS: [u64; 2] = [1, 10];

const CONTENT_BENCH: &str = "replay_content";

const ROUNDS: usize = 101;

const CSV_REPETITIONS: usize = 5;

/// Each round gets 128 MiB.
const TIMELINE_ROUNDS: usize = 4;

/// The rates begin where one CPU has little to do, and end beyond what two CPUs can do.
const LOAD: load::Load = load::Load {
    first_rate: 500.0,
    factor: 1.3,
    step: Duration::from_secs(2),
    limit: Duration::from_millis(10),
    steps: 20,
};

const QUICK_STEP: Duration = Duration::from_millis(500);

const QUICK_ROUNDS: usize = 11;

const STORE_CHUNKS: u64 = 1_000_000;
