//! The command line of the simulation.

mod plant;
mod report;

use std::alloc::System;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use larder_simulation::coverage::Coverage;
use larder_simulation::scale::Options;
use larder_simulation::{Outcome, run, shrink};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use report::{Failure, Report};

/// Counts allocations, so that the scale mode can report the memory of a node's parts.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Lives through whole clusters in virtual time, with every fault that they must endure.
///
/// A seed decides everything: five nodes of two actors each, the requests of engines, and at least four faults in a minute.
/// The invariants of a cluster are checked after every step. Once the faults have stopped, nothing may be left over. For a seed
/// that fails, the command that repeats it is printed, with the fewest faults that still make it fail.
///
/// Exit status: 0 if all is well, 1 if something failed, 2 for impossible arguments.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Number of seeds to simulate.
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    first: u64,
    /// Lives through this seed alone.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// The numbers of the seed's faults that happen; with an empty list, no fault happens.
    #[arg(long, value_delimiter = ',', requires = "seed", value_name = "NUMBERS", num_args = 0..)]
    only_faults: Option<Vec<usize>>,
    /// Prints everything that happens.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Ends after the seed during which this many seconds have passed.
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,
    /// Number of seeds or planted faults that run at a time.
    #[arg(long, global = true, default_value_t = 2, value_name = "COUNT")]
    jobs: usize,
    /// Does not search for the fewest faults that make a seed fail.
    #[arg(long)]
    no_shrinking: bool,
    /// Prints the report as JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Plants faults into a copy of the sources, and checks for each fault whether the simulation finds it.
    Planted {
        /// Limit of seeds for each fault.
        #[arg(long, default_value_t = 200, value_name = "COUNT")]
        seeds: u64,
        /// Plants only faults whose name contains this text.
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Ends after the fault during which this many seconds have passed.
        #[arg(long, value_name = "SECONDS")]
        within: Option<u64>,
        /// The folder of Larder's sources.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))]
        sources: PathBuf,
    },
    /// Plays large clusters without payload, and prints the costs of their directory, tables and coordinator.
    Scale(Options),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match &arguments.command {
        Some(Command::Planted { seeds, only, within, sources }) => {
            match plant::run_all(
                sources,
                *seeds,
                only.as_deref(),
                within.map(Duration::from_secs),
                arguments.jobs,
            ) {
                Ok(all) => report::print_planted(&all, arguments.json),
                Err(error) => {
                    eprintln!("{error:#}");
                    ExitCode::from(1)
                }
            }
        }
        Some(Command::Scale(options)) => match options.play(arguments.json, Some(allocated)) {
            Ok(text) => report::print_scale(&text),
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::from(1)
            }
        },
        None => live(&arguments),
    }
}

/// Bytes allocated at present.
fn allocated() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.wrapping_sub(stats.bytes_deallocated)
}

#[expect(clippy::disallowed_methods, reason = "how long seeds take is told, and decides nothing within them")]
fn live(arguments: &Arguments) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let started = Instant::now();
    let (first, count) = arguments.seed.map_or((arguments.first, arguments.seeds), |seed| (seed, 1));
    let within = arguments.within.map_or(Duration::MAX, Duration::from_secs);
    let (next, outcomes) = (AtomicU64::new(first), Mutex::new(Vec::<Outcome>::new()));
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                while started.elapsed() < within {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let outcome = run(seed, arguments.only_faults.as_deref(), arguments.trace);
                    let Ok(mut outcomes) = outcomes.lock() else { return };
                    if let Some(violation) = outcome.violation.as_ref().filter(|_| count > 1) {
                        eprintln!("seed {seed} fails: {violation}");
                    }
                    outcomes.push(outcome);
                    if outcomes.len().is_multiple_of(SEEDS_A_WORD) {
                        eprintln!(
                            "{} of {count} seeds, {:.0} s",
                            outcomes.len(),
                            started.elapsed().as_secs_f64()
                        );
                    }
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_default();
    outcomes.sort_by_key(|outcome| outcome.seed);
    let mut coverage = Coverage::default();
    outcomes.iter().for_each(|outcome| coverage.add(&outcome.coverage));
    let seconds = started.elapsed().as_secs_f64();
    let failing = outcomes.iter().filter_map(|outcome| Some((outcome, outcome.violation.clone()?)));
    let failures = failing.map(|(outcome, violation)| {
        let kept = match &arguments.only_faults {
            Some(only) => only.clone(),
            None if arguments.no_shrinking => outcome.faults.iter().map(|(number, _)| *number).collect(),
            None => shrink(outcome.seed, &outcome.faults),
        };
        let faults = outcome.faults.iter().filter(|(number, _)| kept.contains(number));
        let faults = faults.map(|(_, fault)| fault.clone()).collect();
        Failure { seed: outcome.seed, violation, only_faults: kept, faults }
    });
    let report = Report {
        seeds: outcomes.len() as u64,
        first,
        seconds,
        events: outcomes.iter().map(|outcome| outcome.events).sum(),
        hashes: outcomes.iter().map(|outcome| (outcome.seed, format!("{:016x}", outcome.hash))).collect(),
        failures: failures.collect(),
        // A single seed need not cover everything.
        missing: if outcomes.len() >= SEEDS_FOR_ALL { coverage.missing() } else { Vec::new() },
        coverage: coverage.counts().collect(),
    };
    report.print(arguments.json, arguments.seed.is_some())
}

/// This many seeds together cover every variant.
const SEEDS_FOR_ALL: usize = 1_000;

/// Seeds between two lines of progress.
const SEEDS_A_WORD: usize = 50;
