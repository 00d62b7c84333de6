//! The `larder` command line: servers, development cluster, trace replay, benches.
#![warn(clippy::print_stderr)]

pub mod bench;
pub mod cluster;
pub mod content;
pub mod dev;
pub mod generator;
pub mod plan;
pub mod replay;
pub mod size;
pub mod trace;

mod address;
mod admin;
mod args;
mod clock;
mod commands;
mod config_report;
mod context;
mod doctor;
mod drain;
mod failure;
mod heap;
mod http;
mod listing;
mod logging;
mod namespace_file;
mod output;
mod parent;
mod prompt;
mod restart;
mod samples;
mod signals;
mod survey;
mod together;
mod top;
mod tracing;
mod values;
mod visit;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;

pub use crate::heap::Heap;

use crate::failure::Usage;

/// Runs the command line `args`, whose first word is the program's name.
///
/// Results go to standard output, logs and errors to standard error. The status is 0 after success, 1 after a failed run, 2
/// after wrong arguments.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match args::Larder::try_parse_from(args) {
        Ok(args) => args,
        Err(error) if error.use_stderr() => {
            // Standard error may be closed.
            let _ = error.print();
            return ExitCode::from(failure::USAGE);
        }
        Err(help) => {
            let printed = output::print_help(&help).map(|()| ExitCode::SUCCESS);
            return printed.map_err(anyhow::Error::from).unwrap_or_else(|error| report(&error));
        }
    };
    run_command(args).unwrap_or_else(|error| report(&error))
}

/// Tells people of an error. Returns the status of the command.
fn report(error: &anyhow::Error) -> ExitCode {
    output::note(format_args!("error: {}", failure::text(error)));
    failure::exit_code(error)
}

fn run_command(args: args::Larder) -> anyhow::Result<ExitCode> {
    let exporter = args.command.start_tracing().context(Usage("cannot send traces".into()))?;
    let _last_lines = args.logging.start(&args.command.default_log_filter(), exporter.as_ref())?;
    let ended = args.command.run().or_else(|error| args.logging.log_failure(error));
    if let Some(exporter) = exporter {
        exporter.stop(LAST_SPANS);
    }
    ended
}

/// Time in which the last spans must reach the collector.
const LAST_SPANS: Duration = Duration::from_secs(1);
