//! `larder plan`: the hit rates of a trace by policy, capacity and number of nodes.

use std::fs;
use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use larder_protocol::limits::MAX_CHUNK_TOKENS;
use serde::Serialize;

use crate::failure::Usage;
use crate::plan::advice::Goal;
use crate::plan::cluster::MAX_CLUSTER_NODES;
use crate::plan::sweep::{self, Conditions, Grid};
use crate::plan::{
    Outcome, PlanPolicy, Prices, Scenario, Sharing, Speeds, Tiers, Workload, advice, html, table,
};
use crate::replay::MAX_REQUESTS_IN_FLIGHT;
use crate::size::measured::MeasuredSpeeds;
use crate::trace::history::{History, oldest_first};
use crate::trace::source;
use crate::{output, values};

/// Predict a trace's hit rates for policies, capacities and node counts
///
/// The command plays the trace through the production store, once for each policy, capacity and number of nodes. It also computes
/// the best possible rates, prints a table, and writes a report with charts.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder plan trace.jsonl                                  Everything, with a report in plan.html
  larder plan trace.jsonl --capacities 3k,10k,30k --policies lru,opt
  larder plan trace.jsonl --nodes 1,4,16 --policies lru    Clusters too: nodes apart, routed, sharing
  larder plan trace.jsonl --json > plan.json               One JSON array, rates as fractions, no report
  larder plan trace.jsonl --prefill-tokens-per-s 12000 --price-per-gpu-hour 3.20 --chunk-bytes 28MiB
  larder plan trace.jsonl.gz                               Packed by gzip or zstd, or `-` for standard input
  larder plan trace.jsonl --hit-rate 40                    The cheapest cluster that hits 40 % of all tokens
  larder plan trace.jsonl --budget 3 --price-per-gib-hour 0.004   The most hits for 3 an hour
  larder plan trace.jsonl --disk-chunks-per-node 0,100k --object-store   With and without disk and object store
  larder bench --filter get --json > bench.json && larder plan trace.jsonl --bench bench.json
  larder plan lookups.jsonl*                               The lookups of engines, as a node recorded them

Trace: Mooncake's JSON lines, one id for each 512 tokens of the prompt, or for each --block-tokens:
  {\"timestamp\": MS, \"input_length\": TOKENS, \"output_length\": TOKENS, \"hash_ids\": [...]}
or Bailian's, with `chat_id`, times in seconds and one id for each 16 tokens;
or an input of AIPerf: an id names one block, and a turn of a session continues the turns before;
or the lookup log of `larder node --record FILE`, with its rotated files in any order.
The requests of a trace are played in the order of their times.

Bounds: `opt` is a cache of the same size that knows the future (several nodes: one pool of the summed size),
`infinite` a cache that never evicts.

Sharing: `local` nodes share nothing, and each request goes to the node that recomputed the fewest tokens
lately. `routed` nodes share nothing either, but the tokens that the request itself would recompute count too.
`shared` nodes read the chunks of all others, and a copy stays where it earns its place (as `larder replay`
plays it). `routed-shared` nodes do the same, and each request goes where it costs least (`larder replay --route
cache`).

Prices and speeds of disks and object stores are assumptions: set your own.")]
pub(crate) struct Args {
    /// The trace or lookup log, plain or packed by gzip or zstd; `-` for standard input; several files are read as one
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Use only this namespace's lookups of a log
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Option<String>,

    /// Tokens of one block of a trace [default: 512, or 16 in Bailian's traces]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CHUNK_TOKENS)))]
    block_tokens: Option<u32>,

    /// Read each id as the name of one block's tokens, not of the whole prefix up to the block, as in AIPerf's inputs [default:
    /// if rows have sessions, delays or no times]
    #[arg(long)]
    content_ids: bool,

    /// Policies to try [default: all, and the bounds `opt` and `infinite`; on several nodes the best policy]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<PlanPolicy>,

    /// Chunks that each node keeps in memory, such as 3000 or 3k [default: six sizes up to the whole trace]
    #[arg(long, value_name = "CHUNKS", value_delimiter = ',', value_parser = chunks)]
    capacities: Vec<u64>,

    /// Node counts to try
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,2,4,8,16",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_CLUSTER_NODES)))]
    nodes: Vec<u16>,

    /// Ways in which several nodes work together
    #[arg(
        long,
        value_name = "KINDS",
        value_delimiter = ',',
        value_enum,
        default_value = "local,routed,shared,routed-shared"
    )]
    sharing: Vec<Sharing>,

    /// Sizes of each node's disk to try, in chunks; 0 stands for no disk
    #[arg(long, value_name = "CHUNKS", value_delimiter = ',', default_value = "0", value_parser = disk_chunks)]
    disk_chunks_per_node: Vec<u64>,

    /// Try each cluster also with an object store, which all nodes share and which keeps everything
    #[arg(long)]
    object_store: bool,

    /// Limit of requests in flight, with at most one at each node. A request's chunks are found only once it is done
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_REQUESTS_IN_FLIGHT)))]
    in_flight: u16,

    /// Cache full blocks only, and compute at least one token of each prompt, as a node does [default: partial last blocks
    /// count as blocks, as in published simulations]
    #[arg(long)]
    full_blocks_only: bool,

    /// Tokens that one GPU computes in a second of prefill
    #[arg(long, value_name = "N", default_value_t = USUAL.prefill_tokens_per_s, value_parser = positive)]
    prefill_tokens_per_s: f64,

    /// GPUs of one engine, which compute a prompt together: for the times to the first token
    #[arg(long, value_name = "N", default_value_t = USUAL.engine_gpus, value_parser = clap::value_parser!(u16).range(1..))]
    gpus: u16,

    /// Price of one GPU for an hour, in any currency
    #[arg(long, value_name = "PRICE", default_value_t = USUAL.price_per_gpu_hour, value_parser = positive)]
    price_per_gpu_hour: f64,

    /// Price of one GiB of memory for an hour
    #[arg(long, value_name = "PRICE", default_value_t = USUAL.price_per_gib_hour, value_parser = positive)]
    price_per_gib_hour: f64,

    /// Price of one GiB of disk for an hour
    #[arg(long, value_name = "PRICE", default_value_t = USUAL.price_per_disk_gib_hour, value_parser = positive)]
    price_per_disk_gib_hour: f64,

    /// Price of one GiB in the object store for an hour, without requests and traffic
    #[arg(long, value_name = "PRICE", default_value_t = USUAL.price_per_object_gib_hour, value_parser = positive)]
    price_per_object_gib_hour: f64,

    /// Output of `larder bench --filter get --json`: how fast chunks move from memory and from other nodes
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,

    /// Bytes a second that a node reads from its disk
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value = "3GB")]
    disk_bytes_per_s: u64,

    /// Bytes a second that a node reads from the object store
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value = "1GB")]
    object_bytes_per_s: u64,

    /// Recommend the cheapest cluster that hits this percentage of all tokens [default: 90 % of an infinite cache's hits]
    #[arg(long, value_name = "PERCENT", value_parser = percent, conflicts_with = "budget")]
    hit_rate: Option<f64>,

    /// Recommend the cluster with the most hits whose memory, disks and objects cost at most this price in an hour
    #[arg(long, value_name = "PRICE", value_parser = positive)]
    budget: Option<f64>,

    /// Bytes of one chunk over all ranks; `larder size` computes it [default: 128 KiB a token, Llama 3 8B in bf16]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    chunk_bytes: Option<u64>,

    /// File for the report [default: plan.html, none with --json]
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Play only the first N requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,

    /// Print one JSON array instead of the table
    #[arg(long)]
    json: bool,
}

/// An element of the output of `--json`.
#[derive(Serialize)]
struct PlannedRow<'a> {
    #[serde(flatten)]
    outcome: &'a Outcome,
    /// Whether this is the recommended size, and reaches the goal.
    recommended: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let workload = args.workload()?;
    let prices = args.prices(&workload)?;
    let report = args.report();
    if let Some(path) = report {
        output::check_writable(path, "--out")?;
    }
    let outcomes = args.outcomes(&workload, &prices);
    if args.json {
        let infinite = advice::infinite_rate(&outcomes, &workload);
        let advice = advice::advice(&outcomes, infinite, &prices).filter(|advice| advice.is_enough);
        let choice = advice.map(|advice| advice.choice.scenario);
        let row = |outcome| PlannedRow { outcome, recommended: Some(outcome.scenario) == choice };
        output::print_json(&outcomes.iter().map(row).collect::<Vec<_>>())?;
    } else {
        output::print(&table::tables(&workload, &outcomes, &prices))?;
    }
    if let Some(path) = report {
        let name = args.files.last().and_then(|file| file.file_name());
        let trace = name.map_or_else(|| "trace".into(), |name| name.to_string_lossy());
        let text = html::report(&trace, &workload, &outcomes, &prices);
        fs::write(path, text).with_context(|| format!("cannot write the report {}", path.display()))?;
        if !args.json {
            output::print(&format!("Report: {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a file is the lookup log of a node, as far as its first line tells.
fn is_log(file: &Path) -> bool {
    let Ok(lines) = source::open(file) else { return false };
    let mut first = String::new();
    lines.take(LONGEST_LINE).read_line(&mut first).is_ok_and(|_| first.contains("\"chunk_tokens\""))
}

/// Bytes of a line that are looked at.
const LONGEST_LINE: u64 = 16 << 20;

impl Args {
    fn workload(&self) -> anyhow::Result<Workload> {
        let limit = self.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        let history = History::new(self.namespace.clone(), self.block_tokens);
        let mut history = if self.content_ids { history.with_content_ids() } else { history };
        for file in oldest_first(self.files.clone(), is_log) {
            let wrong = || Usage(format!("cannot plan with {}", file.display()));
            let lines = source::open(&file).with_context(wrong)?;
            history.read(lines, limit).with_context(wrong)?;
        }
        let nothing = || Usage(format!("cannot plan with {}", self.files[0].display()));
        let history = history.finish().with_context(nothing)?;
        note_unordered(history.unordered(), history.requests().len());
        if history.untimed() > 0 {
            let (untimed, all) = (history.untimed(), history.requests().len());
            output::note(format_args!(
                "{untimed} of {all} requests have no time: each is played at the time of the one before"
            ));
        }
        Ok(Workload::of_history(&history, !self.full_blocks_only))
    }

    /// Runs named policies on all node counts and tiers; otherwise all policies on one node's memory, and the best on the others.
    fn outcomes(&self, workload: &Workload, prices: &Prices) -> Vec<Outcome> {
        let capacities = if self.capacities.is_empty() {
            default_capacities(workload.distinct_blocks)
        } else {
            distinct(&self.capacities)
        };
        let (policies, nodes) = (distinct(&self.policies), distinct(&self.nodes));
        let named = !policies.is_empty();
        let tiers = self.tiers();
        let mut grid = Grid {
            cluster_policies: policies.clone(),
            policies: if named { policies } else { PlanPolicy::all().collect() },
            capacities,
            nodes: if named { nodes.clone() } else { vec![1] },
            sharing: distinct(&self.sharing),
            tiers: if named { tiers.clone() } else { vec![Tiers::default()] },
        };
        let conditions = Conditions { in_flight: self.in_flight, prices: *prices, quiet: self.quiet };
        let run = |scenarios: &[Scenario]| sweep::run(workload, scenarios, &conditions);
        let mut outcomes = run(&grid.scenarios(workload.distinct_blocks));
        if !named {
            grid.cluster_policies =
                advice::best_policy(&outcomes).into_iter().chain([PlanPolicy::Opt]).collect();
            (grid.policies, grid.nodes, grid.tiers) = (grid.cluster_policies.clone(), nodes, tiers);
            let mut further = grid.scenarios(workload.distinct_blocks);
            further.retain(|scenario| outcomes.iter().all(|known| known.scenario != *scenario));
            outcomes.extend(run(&further));
        }
        outcomes.retain(|outcome| {
            outcome.scenario.policy == PlanPolicy::Infinite || self.nodes.contains(&outcome.scenario.nodes)
        });
        outcomes
    }

    /// The tiers to try below memory. With an object store, each disk is tried with and without it.
    fn tiers(&self) -> Vec<Tiers> {
        let stores = if self.object_store { &[false, true][..] } else { &[false] };
        let disks = distinct(&self.disk_chunks_per_node).into_iter();
        let tiers = disks.flat_map(|disk_chunks| {
            stores.iter().map(move |&object_store| Tiers { disk_chunks, object_store })
        });
        tiers.collect()
    }

    fn prices(&self, workload: &Workload) -> anyhow::Result<Prices> {
        let chunk_bytes = self.chunk_bytes.unwrap_or(workload.chunk_tokens * LLAMA_3_8B_TOKEN_BYTES);
        let speeds = Speeds {
            disk: self.disk_bytes_per_s as f64,
            object: self.object_bytes_per_s as f64,
            ..Speeds::USUAL
        };
        let speeds = match &self.bench {
            Some(file) => {
                let wrong = || Usage(format!("cannot read {}", file.display()));
                speeds.measured(&MeasuredSpeeds::read(file).with_context(wrong)?, chunk_bytes)
            }
            None => speeds,
        };
        Ok(Prices {
            prefill_tokens_per_s: self.prefill_tokens_per_s,
            engine_gpus: self.gpus,
            price_per_gpu_hour: self.price_per_gpu_hour,
            price_per_gib_hour: self.price_per_gib_hour,
            price_per_disk_gib_hour: self.price_per_disk_gib_hour,
            price_per_object_gib_hour: self.price_per_object_gib_hour,
            chunk_bytes,
            speeds,
            goal: match (self.hit_rate, self.budget) {
                (Some(rate), _) => Goal::HitRate(rate / 100.0),
                (None, Some(most)) => Goal::Budget(most),
                (None, None) => Goal::Enough,
            },
        })
    }

    fn report(&self) -> Option<&Path> {
        match &self.out {
            Some(path) => Some(path),
            None if self.json => None,
            None => Some(Path::new("plan.html")),
        }
    }
}

/// The default prices and speeds.
const USUAL: Prices = Prices::of(0);

/// Bytes of one token's KV of Llama 3 8B in bf16: 32 layers of 8 heads of 128 elements, keys and values.
const LLAMA_3_8B_TOKEN_BYTES: u64 = 128 << 10;

/// Six sizes of the series 1, 3, 10, 30, ...; the last holds `distinct_blocks`.
fn default_capacities(distinct_blocks: u64) -> Vec<u64> {
    let series = |step: u32| 10_u64.pow(step / 2) * if step.is_multiple_of(2) { 1 } else { 3 };
    let last = (0..MOST_STEPS).find(|&step| series(step) >= distinct_blocks).unwrap_or(MOST_STEPS);
    (last.saturating_sub(5)..=last).map(series).collect()
}

/// Steps up to 10^18, beyond any trace.
const MOST_STEPS: u32 = 36;

/// Chunks as people write them: `3000`, `3k`, `1M`.
fn chunks(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1_000),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    let number: u64 =
        digits.parse().map_err(|_| "not a number of chunks such as 3000, 3k or 1M".to_owned())?;
    match number.checked_mul(unit) {
        Some(0) => Err("a cache of no chunks hits nothing; the least is 1".into()),
        Some(chunks) if chunks <= MAX_CAPACITY_CHUNKS => Ok(chunks),
        _ => Err(format!("at most {MAX_CAPACITY_CHUNKS} chunks")),
    }
}

/// Chunks of a disk, as people write them; 0 for no disk.
fn disk_chunks(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { chunks(text) }
}

/// Chunks of one node: a thousand million are more than any memory holds.
const MAX_CAPACITY_CHUNKS: u64 = 1_000_000_000;

/// Says that requests of a trace were out of order, if some were.
pub(super) fn note_unordered(unordered: usize, all: usize) {
    if unordered > 0 {
        output::note(format_args!(
            "{unordered} of {all} requests stood behind requests of a later time: all are played by their times"
        ));
    }
}

/// A number above 0.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("not a number above 0".into()),
    }
}

/// A percentage above 0.
fn percent(text: &str) -> Result<f64, String> {
    positive(text).ok().filter(|&rate| rate <= 100.0).ok_or_else(|| "not a percentage above 0".into())
}

/// The values without repetitions.
fn distinct<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut distinct = Vec::new();
    for &value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_sizes_lead_up_to_the_whole_trace() {
        assert_eq!(default_capacities(182_790), [1_000, 3_000, 10_000, 30_000, 100_000, 300_000]);
        assert_eq!(default_capacities(43_924), [300, 1_000, 3_000, 10_000, 30_000, 100_000]);
        assert_eq!(default_capacities(2), [1, 3]);
    }

    #[test]
    fn chunks_are_read_as_people_write_them() {
        assert_eq!((chunks("3000"), chunks("3k"), chunks("1M")), (Ok(3_000), Ok(3_000), Ok(1_000_000)));
        assert!(chunks("0").unwrap_err().contains("the least is 1"));
        assert!(chunks("").is_err() && chunks("-1").is_err() && chunks("9999999999").is_err());
    }

    #[test]
    fn prices_are_above_zero() {
        assert_eq!(positive("2.5"), Ok(2.5));
        assert!(["0", "-1", "inf", "NaN", "x"].iter().all(|text| positive(text).is_err()));
        assert_eq!(percent("40"), Ok(40.0));
        assert!(percent("101").is_err() && percent("0").is_err());
    }
}
