//! The printed reports.
#![expect(clippy::print_stdout, reason = "this is what the command is for")]

use std::collections::BTreeMap;
use std::process::ExitCode;

use serde::Serialize;

use crate::plant::Found;

/// The results of all seeds.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) seeds: u64,
    pub(crate) first: u64,
    pub(crate) seconds: f64,
    pub(crate) events: u64,
    pub(crate) hashes: BTreeMap<u64, String>,
    pub(crate) failures: Vec<Failure>,
    /// Variants that never occurred.
    pub(crate) missing: Vec<&'static str>,
    pub(crate) coverage: BTreeMap<&'static str, u64>,
}

/// A seed that failed.
#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    pub(crate) seed: u64,
    pub(crate) violation: String,
    pub(crate) only_faults: Vec<usize>,
    pub(crate) faults: Vec<String>,
}

impl Report {
    /// Prints the report. Returns whether all is well.
    pub(crate) fn print(&self, as_json: bool, is_one: bool) -> ExitCode {
        let is_well = self.failures.is_empty() && self.missing.is_empty();
        if as_json {
            println!("{}", serde_json::to_string_pretty(self).unwrap_or_default());
            return if is_well { ExitCode::SUCCESS } else { ExitCode::from(1) };
        }
        if !is_one {
            for (name, count) in &self.coverage {
                println!("{count:>12}  {name}");
            }
        }
        for name in &self.missing {
            println!("never occurred: {name}");
        }
        for Failure { seed, violation, only_faults, faults } in &self.failures {
            let numbers: Vec<String> = only_faults.iter().map(ToString::to_string).collect();
            println!("seed {seed} fails: {violation}");
            faults.iter().for_each(|fault| println!("    with {fault}"));
            println!(
                "    cargo run --release -p larder-simulation -- --seed {seed} --only-faults {}",
                numbers.join(",")
            );
        }
        println!(
            "{} seeds, {} events, {:.1} seconds, {:.2} seeds a second, {} failed",
            self.seeds,
            self.events,
            self.seconds,
            self.seeds as f64 / self.seconds.max(1e-3),
            self.failures.len()
        );
        if is_one {
            self.hashes.iter().for_each(|(seed, hash)| println!("seed {seed} has history {hash}"));
        }
        if is_well { ExitCode::SUCCESS } else { ExitCode::from(1) }
    }
}

/// Prints the results of planted faults. Returns whether all were found.
pub(crate) fn print_planted(all: &[Found], as_json: bool) -> ExitCode {
    let found = all.iter().filter(|planted| planted.by.is_some()).count();
    if as_json {
        println!("{}", serde_json::to_string_pretty(all).unwrap_or_default());
    } else {
        for planted in all {
            match &planted.by {
                Some(by) => println!("found      {:<36} {:>7.1} s  {by}", planted.name, planted.seconds),
                None => {
                    println!("NOT FOUND  {:<36} {:>7.1} s  {}", planted.name, planted.seconds, planted.what)
                }
            }
        }
        println!("{found} of {} planted faults found", all.len());
    }
    if found == all.len() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

/// Prints the costs of large clusters.
pub(crate) fn print_scale(text: &str) -> ExitCode {
    println!("{text}");
    ExitCode::SUCCESS
}
