//! `larder replay` as a process, and the cluster that it starts.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::Context as _;
use larder_cli::generator::Generator;
use serde_json::Value;
use tempfile::TempDir;

use crate::wait;

/// A replay under way. Dropping it kills the replay and the processes that the replay started.
pub struct Replay {
    child: Option<Child>,
    // Last: the files of its cluster and its output are here.
    dir: TempDir,
}

/// A server that a replay started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// `coordinator`, `node-0` and so on.
    pub name: String,
    /// The server's process id.
    pub pid: u32,
}

impl Replay {
    /// Starts `program replay --json` with these arguments.
    ///
    /// # Errors
    /// Fails if the replay cannot be started.
    pub fn start(program: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let child = Command::new(program)
            .args(["replay", "--json", "--quiet"])
            .args(arguments)
            // The replay's cluster announces itself here; the paths of its sockets are short.
            .env("XDG_RUNTIME_DIR", dir.path())
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("report.json"))?)
            .stderr(File::create(dir.path().join("log"))?)
            .spawn()?;
        Ok(Self { child: Some(child), dir })
    }

    /// Waits until the replay's cluster is up. Returns its HTTP addresses: the coordinator's, then the nodes' by number.
    pub fn addresses(&self) -> Vec<String> {
        let announced = self.dir.path().join("larder/dev.json");
        let file: Value = wait::until("the replay's cluster is announced", || {
            serde_json::from_slice(&std::fs::read(&announced).ok()?).ok()
        });
        let nodes = file["nodes"].as_array().into_iter().flatten().map(|node| &node["http"]);
        std::iter::once(&file["coordinator"])
            .chain(nodes)
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    }

    /// The server of this name in its present life; `None` while it is down.
    #[must_use]
    pub fn server(&self, name: &str) -> Option<Started> {
        let parent = self.child.as_ref()?.id().to_string();
        let processes = std::fs::read_dir("/proc").ok()?.flatten();
        let started = processes.filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
            let words: Vec<&str> = line.split('\0').collect();
            let after = |flag| words.iter().skip_while(|&&word| word != flag).nth(1);
            let config = PathBuf::from(after("--config")?);
            let ours = after("--parent").is_some_and(|&found| found == parent);
            ours.then_some(Started { name: config.file_stem()?.to_str()?.to_owned(), pid })
        });
        started.into_iter().find(|started| started.name == name)
    }

    /// Whether the replay is still playing.
    ///
    /// # Errors
    /// Fails if the system does not say.
    pub fn is_under_way(&mut self) -> anyhow::Result<bool> {
        let child = self.child.as_mut().context("the replay has ended already")?;
        Ok(child.try_wait()?.is_none())
    }

    /// Waits for the replay's end. Returns its report and its exit status.
    ///
    /// # Errors
    /// Fails if the replay printed no report.
    pub fn finish(mut self) -> anyhow::Result<(Value, Option<i32>)> {
        let child = self.child.take().context("the replay has ended already")?;
        let Output { status, .. } = child.wait_with_output()?;
        let said = std::fs::read_to_string(self.dir.path().join("log"))?;
        let report = std::fs::read(self.dir.path().join("report.json"))?;
        let report = serde_json::from_slice(&report).with_context(|| format!("no report: {said}"))?;
        Ok((report, status.code()))
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Both fail only if the replay has ended already.
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// Writes a generated trace in the format of trace files.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn write_generated(path: &Path, seed: u64, requests: usize) -> anyhow::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for request in Generator::new(seed).take(requests) {
        let line = serde_json::json!({
            "timestamp": request.timestamp_ms,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.block_ids,
        });
        writeln!(file, "{line}")?;
    }
    Ok(file.flush()?)
}
