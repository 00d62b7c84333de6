//! Checks the copies of the GPU lane against a plain reference, and measures them against the machine's best.

mod check;
mod engine;
mod measure;
mod node;
mod report;
mod rig;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use larder_device::DeviceError;
use larder_device::cuda::{CudaDevice, CudaOptions, Form};

use report::Report;

/// The options of a run.
struct Options {
    /// Print JSON instead of a table.
    json: bool,
    /// Sizes with which a machine without a GPU takes seconds; the rates then mean nothing.
    small: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["node", folder] => node::serve(folder).map(|()| ExitCode::SUCCESS),
        ["busy", seconds, form] => {
            let named = |of: &Form| format!("{of:?}") == form;
            let form = Form::ALL.into_iter().find(named).context("there is no such form")?;
            measure::busy(seconds.parse()?, form).map(|()| ExitCode::SUCCESS)
        }
        _ => {
            let known = ["--json", "--small"];
            anyhow::ensure!(words.iter().all(|word| known.contains(word)), HELP);
            run(&Options { json: words.contains(&"--json"), small: words.contains(&"--small") })
        }
    }
}

fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let device = match CudaDevice::open(CudaOptions::default()) {
        Ok(device) => larder_device::Device::name(&device),
        Err(DeviceError::Absent(reason)) => {
            let report = Report { skipped: Some(reason), ..Report::default() };
            return print(&report, options).map(|()| ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    let mut report = Report { device: Some(device), seed: fastrand::u64(..), ..Report::default() };
    check::all(&mut report)?;
    engine::check(&mut report, options.small)?;
    measure::all(&mut report, options.small)?;
    print(&report, options)?;
    Ok(if report.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &Report, options: &Options) -> anyhow::Result<()> {
    let text = if options.json { serde_json::to_string(report)? } else { report.table() };
    writeln!(std::io::stdout(), "{text}").context("the report cannot be written")
}

const HELP: &str = "usage: larder-gpu [--json] [--small]";
