//! A drive with sectors that cannot be read, for the release build: a library that takes the place of the C library's reads.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

/// The variables that a node's environment needs for this drive. Sectors are drawn from the first `bytes` of its file.
///
/// # Errors
/// Fails if there is no C compiler here, or it refuses.
pub(super) fn environment(
    folder: &Path,
    rng: &mut fastrand::Rng,
    bytes: u64,
) -> anyhow::Result<Vec<(String, String)>> {
    let (source, library) = (folder.join("read_errors.c"), folder.join("read_errors.so"));
    std::fs::write(&source, SOURCE)?;
    let compiler = std::env::var("CC").unwrap_or_else(|_| "gcc".into());
    let output = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source)
        .arg("-ldl")
        .output()
        .with_context(|| format!("no C compiler `{compiler}`"))?;
    ensure!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
    let sectors: Vec<String> =
        (0..SECTORS).map(|_| (rng.u64(..bytes / SECTOR_BYTES) * SECTOR_BYTES).to_string()).collect();
    Ok(vec![
        ("LD_PRELOAD".into(), library.to_str().context("the folder's path is not UTF-8")?.to_owned()),
        ("LARDER_SOAK_BAD".into(), sectors.join(",")),
    ])
}

const SOURCE: &str = include_str!("read_errors.c");

/// Sectors that cannot be read; each can be read for a minute after it was written. A drive that loses more sectors is broken,
/// and its tier closes itself, which is no fault of the node's.
const SECTORS: usize = 8;
const SECTOR_BYTES: u64 = 4_096;
