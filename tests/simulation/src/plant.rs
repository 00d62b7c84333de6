//! Looks for planted faults: one copy of the sources has all of them; each run of it has one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use larder_simulation::planted::{CHOSEN, Planted, all};
use serde::Serialize;

/// The result of a planted fault.
#[derive(Debug, Serialize)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) what: String,
    /// The violation that revealed the fault.
    pub(crate) by: Option<String>,
    /// Seconds until it was found.
    pub(crate) seconds: f64,
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is told, and decides nothing within a seed")]
pub(crate) fn run_all(
    sources: &Path,
    seeds: u64,
    only: Option<&str>,
    within: Option<Duration>,
    jobs: usize,
) -> Result<Vec<Found>> {
    let all = all(sources)?;
    let program = build(sources, &all)?;
    let chosen: Vec<&Planted> =
        all.iter().filter(|planted| only.is_none_or(|only| planted.name.contains(only))).collect();
    let (started, next, found) = (Instant::now(), AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while within.is_none_or(|within| started.elapsed() < within)
                    && let Some(planted) = chosen.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let looked = look_for(&program, planted, seeds);
                    if let Ok(mut found) = found.lock() {
                        found.push(looked);
                    }
                }
            });
        }
    });
    let found = found.into_inner().unwrap_or_default().into_iter().collect::<Result<Vec<Found>>>();
    let mut found = found?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is told, and decides nothing within a seed")]
fn look_for(program: &Path, planted: &Planted, seeds: u64) -> Result<Found> {
    let (started, mut by) = (Instant::now(), None);
    for seed in 1..=seeds {
        // A seed that also fails without the fault says nothing about it.
        if let Some(violation) = violation(program, &planted.name, seed)?
            && self::violation(program, "", seed)?.is_none()
        {
            by = Some(format!("seed {seed}: {violation}"));
            break;
        }
    }
    let (name, what) = (planted.name.clone(), planted.what.clone());
    eprintln!("{} {name}", if by.is_some() { "found    " } else { "NOT FOUND" });
    Ok(Found { name, what, by, seconds: started.elapsed().as_secs_f64() })
}

/// The violation in a seed with a fault, if any.
fn violation(program: &Path, fault: &str, seed: u64) -> Result<Option<String>> {
    let seed = seed.to_string();
    let arguments = ["--seed", &seed, "--no-shrinking", "--json"];
    let output = Command::new(program).args(arguments).env(CHOSEN, fault).output()?;
    if output.status.success() {
        return Ok(None);
    }
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok(Some(report["failures"][0]["violation"].as_str().unwrap_or("it crashed").to_owned()))
}

/// Builds a copy of the sources with all faults in it.
fn build(sources: &Path, all: &[Planted]) -> Result<PathBuf> {
    let (target, tree) = (sources.join("target/planted/build"), sources.join("target/planted/tree"));
    let listed = Command::new("git").args(["ls-files"]).current_dir(sources).output()?;
    for file in String::from_utf8(listed.stdout)?.lines() {
        let (from, to) = (sources.join(file), tree.join(file));
        let Ok(mut bytes) = std::fs::read(&from) else { continue };
        for planted in all.iter().filter(|planted| planted.file == Path::new(file)) {
            bytes = planted.apply(&String::from_utf8(bytes)?)?.into();
        }
        // An unchanged file keeps its time, so that it is not built again.
        if std::fs::read(&to).ok().as_ref() != Some(&bytes) {
            std::fs::create_dir_all(to.parent().context("the file has no folder")?)?;
            std::fs::write(&to, bytes)?;
        }
    }
    eprintln!("building the sources with {} faults in them", all.len());
    let built = Command::new("cargo")
        .args(["build", "--quiet", "--offline", "--profile", "simulation", "--workspace"])
        .args(["--bin", "larder-simulation"])
        .current_dir(&tree)
        .env("CARGO_TARGET_DIR", &target)
        .status()?;
    ensure!(built.success(), "the sources with the planted faults do not build");
    Ok(target.join("simulation/larder-simulation"))
}
