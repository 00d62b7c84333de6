//! `larder bench`: measures Larder beside the yardsticks of the same run.

use std::convert::Infallible;
use std::hint::black_box;
use std::process::ExitCode;

use crate::bench::yardsticks::Memcpy;
use crate::bench::{Measurement, interleave, table};
use crate::{content, output};

/// Measure Larder beside what the machine can do at best
///
/// Every figure comes with a yardstick of the same run: compare ratios, since absolute figures drift with the machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder bench               A table
  larder bench --json        An array of {name, value, unit, yardstick, yardstick_value, ratio}")]
pub(crate) struct Args {
    /// How often each side is measured, in turns; the medians count
    #[arg(long, value_name = "N", default_value_t = 101, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print JSON: one array
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let measurements = [content_fill(args.rounds.into())];
    if args.json {
        output::print_json(&measurements)?;
    } else {
        output::print(&table(&measurements).to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How fast a replay makes the bytes of its chunks: it must not be what a replay measures.
fn content_fill(rounds: usize) -> Measurement {
    let mut block = vec![0; BLOCK_BYTES];
    let hash = content::chunk_hash(1);
    let mut memcpy = Memcpy::new(BLOCK_BYTES);
    let fill = || {
        content::fill(&hash, black_box(&mut block));
        Ok::<(), Infallible>(())
    };
    let copy = || {
        memcpy.pass();
        Ok(())
    };
    let Ok(medians) = interleave(rounds, fill, copy);
    Measurement::throughput("replay content, 4 MiB", "memcpy, 4 MiB", BLOCK_BYTES as u64, medians)
}

const BLOCK_BYTES: usize = 4 << 20;
