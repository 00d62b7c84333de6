//! Planted faults: mutations of the sources, each applied alone to a copy of them, built, and looked for.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use larder_simulation::planted::{Planted, all};
use serde::Serialize;

/// What became of a planted fault.
#[derive(Debug, Serialize)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) what: String,
    /// The violation that showed it.
    pub(crate) by: Option<String>,
    /// Seconds until it was found, without the build.
    pub(crate) seconds: f64,
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is told, and decides nothing within a seed")]
pub(crate) fn run_all(
    sources: &Path,
    seeds: u64,
    only: Option<&str>,
    within: Option<Duration>,
) -> Result<Vec<Found>> {
    let (started, mut found) = (Instant::now(), Vec::new());
    let tree = copy(sources)?;
    for planted in all(sources)? {
        if only.is_some_and(|only| !planted.name.contains(only)) {
            continue;
        }
        if within.is_some_and(|within| started.elapsed() > within) {
            break;
        }
        let path = tree.join(&planted.file);
        let right = std::fs::read_to_string(&path)?;
        std::fs::write(&path, planted.apply(&right)?)?;
        let looked = look_for(&tree, &planted, seeds);
        std::fs::write(&path, right)?;
        found.push(looked?);
    }
    Ok(found)
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is told, and decides nothing within a seed")]
fn look_for(tree: &Path, planted: &Planted, seeds: u64) -> Result<Found> {
    eprintln!("planting {}", planted.name);
    let built = Command::new("cargo")
        .args(["build", "--quiet", "--offline", "--package", "larder-simulation"])
        .current_dir(tree)
        .env("CARGO_TARGET_DIR", tree.with_file_name("build"))
        .stderr(Stdio::null())
        .status()?;
    ensure!(built.success(), "with {} the sources do not build", planted.name);
    let program = tree.with_file_name("build").join("debug/larder-simulation");
    let started = Instant::now();
    let mut by = None;
    for seed in 1..=seeds {
        let all_faults: [&str; 2] = ["--seed", &seed.to_string()];
        let output = Command::new(&program).args(all_faults).args(["--no-shrinking", "--json"]).output()?;
        if !output.status.success() {
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let violation = report["failures"][0]["violation"].as_str().unwrap_or("it crashed");
            by = Some(format!("seed {seed}: {violation}"));
            break;
        }
    }
    let (name, what) = (planted.name.clone(), planted.what.clone());
    Ok(Found { name, what, by, seconds: started.elapsed().as_secs_f64() })
}

/// Copies the sources to where they can be changed.
fn copy(sources: &Path) -> Result<PathBuf> {
    let tree = sources.join("target/planted/tree");
    let listed = Command::new("git").args(["ls-files"]).current_dir(sources).output()?;
    for file in String::from_utf8(listed.stdout)?.lines() {
        let (from, to) = (sources.join(file), tree.join(file));
        let Ok(bytes) = std::fs::read(&from) else { continue };
        // What is the same keeps its time, so that it is not built again.
        if std::fs::read(&to).ok().as_ref() != Some(&bytes) {
            std::fs::create_dir_all(to.parent().context("a file has a folder")?)?;
            std::fs::write(&to, bytes)?;
        }
    }
    Ok(tree)
}
