//! `tests/soak`: attacks on a running cluster, with every byte checked, as one command.

mod chaos;
mod deaths;
mod engine;
mod faults;
mod guard;
mod mixed;
mod nodes;
mod options;
mod parents;
mod replays;
mod report;
mod request;
mod space;
mod tally;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser as _;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use self::options::{Options, Scenario};
use self::report::Report;
use self::tally::Tally;

/// Runs the command line `args`, whose first word is the program's name. The status is 0 if everything was right, 1 if something
/// was wrong, 2 if the arguments make no sense.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    if let Some(wrapped) = guard::wrapped(&args) {
        return failed(&guard::become_it(&wrapped));
    }
    let options = match Options::try_parse_from(args) {
        Ok(options) => options,
        Err(help_or_error) => {
            // If the output is closed, nobody is left to tell.
            let _ = help_or_error.print();
            return ExitCode::from(if help_or_error.use_stderr() { USAGE } else { 0 });
        }
    };
    match soak(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(error) => failed(&error),
    }
}

/// The things that the parts of one run share.
struct SoakRun {
    options: Options,
    /// The `larder` command.
    program: PathBuf,
    /// The folder of configuration files, logs and disks.
    folder: PathBuf,
    tally: Arc<Tally>,
}

/// Runs one scenario and prints its results. Returns whether all was right.
fn soak(options: &Options) -> anyhow::Result<bool> {
    let program = options.program()?;
    let (folder, removes) = folder(options)?;
    let tally = Arc::new(Tally::new());
    let run =
        SoakRun { options: options.clone(), program, folder: folder.clone(), tally: Arc::clone(&tally) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let scenario = async {
            match options.scenario {
                Scenario::Sizes => replays::two_sizes(&run).await,
                Scenario::Again => replays::again(&run).await,
                Scenario::Mixed | Scenario::Faults => mixed::run(&run).await,
            }
        };
        tokio::select! {
            ended = scenario => ended.map(|verdicts| (verdicts, false)),
            () = stop() => Ok((Vec::new(), true)),
            () = report::show_progress(&tally, options) => unreachable!("it shows progress until it is dropped"),
        }
    });
    drop(runtime);
    let (verdicts, interrupted) = ended?;
    let mut report = Report::new(options, tally.counts(), verdicts, interrupted);
    if !report.passed || options.keep {
        report.kept = Some(keep(removes, &folder));
    }
    report.print(options.json)?;
    Ok(report.passed)
}

/// The folder of the run; also the guard that removes the folder, if it is the run's own.
fn folder(options: &Options) -> anyhow::Result<(PathBuf, Option<TempDir>)> {
    if let Some(folder) = &options.folder {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        return Ok((folder.canonicalize()?, None));
    }
    let own = tempfile::Builder::new().prefix("larder-soak-").tempdir()?;
    Ok((own.path().to_owned(), Some(own)))
}

/// Keeps the folder with its logs, without the disks in it.
fn keep(removes: Option<TempDir>, folder: &Path) -> PathBuf {
    let disks = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for disk in disks.filter(|path| path.extension().is_some_and(|extension| extension == "disk")) {
        // The disks are large, and of no use without the processes that wrote them.
        let _ = std::fs::remove_dir_all(disk);
    }
    removes.map_or_else(|| folder.to_owned(), TempDir::keep)
}

/// Ready when the user stops the run.
async fn stop() {
    let both = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(mut interrupt), Ok(mut terminate)) = both else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::from(FAILED)
}

const FAILED: u8 = 1;
const USAGE: u8 = 2;
