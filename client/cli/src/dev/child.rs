//! One process of a development cluster.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{ChildStdout, Command};
use tokio::time::timeout;

use super::STOP_GRACE;
use super::error::{DevError, Died, LogTail};
use crate::output;

/// The one line that a server prints on standard output, when it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadyLine {
    /// Always true.
    pub(crate) ready: bool,
    /// The server's HTTP address.
    pub(crate) http: SocketAddr,
    /// The coordinator's address for nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<SocketAddr>,
    /// The node's session sockets, by tenant; the coordinator has none.
    #[serde(default)]
    pub(crate) sockets: BTreeMap<String, PathBuf>,
}

/// The line that a node prints when it has drained for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DrainedLine {
    /// Always true.
    pub(crate) drained: bool,
}

impl DrainedLine {
    /// Prints the line, so that the process that started this node does not start it again.
    pub(crate) fn print(self) {
        if let Err(error) = output::print_json_aside(&self) {
            tracing::warn!(%error, "cannot print that the node has drained");
        }
    }
}

impl ReadyLine {
    /// Prints the line for the process that started this server.
    pub(crate) fn print(&self) {
        if let Err(error) = output::print_json_aside(self) {
            tracing::warn!(%error, "cannot print that the server is ready");
        }
    }
}

/// A process that was ready once.
#[derive(Debug)]
pub(super) struct Child {
    spec: Spec,
    process: tokio::process::Child,
    /// Kept open, so that a process that prints more does not die.
    stdout: BufReader<ChildStdout>,
    /// Whether it has ended, and is not to be started again.
    has_left: bool,
}

/// The command line of a process, for each of its starts.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    /// The program.
    pub(super) program: PathBuf,
    /// `node` or `coordinator`.
    pub(super) server: &'static str,
    pub(super) name: String,
    pub(super) config: PathBuf,
    pub(super) log: PathBuf,
}

impl Child {
    /// Starts `PROGRAM SERVER --config CONFIG` and waits until it is ready.
    pub(super) async fn start(spec: Spec) -> Result<(Self, ReadyLine), DevError> {
        let spawn_error = |source| DevError::Spawn { name: spec.name.clone(), source };
        let log = File::options().create(true).append(true).open(&spec.log).map_err(spawn_error)?;
        let mut process = Command::new(&spec.program)
            .arg(spec.server)
            .arg("--config")
            .arg(&spec.config)
            .arg("--parent")
            .arg(std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            // Ctrl-C at a terminal goes to this process alone, which then stops its children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(spawn_error)?;
        let stdout =
            process.stdout.take().ok_or_else(|| spawn_error(std::io::ErrorKind::BrokenPipe.into()))?;
        let mut child = Self { spec, process, stdout: BufReader::new(stdout), has_left: false };
        match timeout(READY_TIMEOUT, child.ready_line()).await {
            Ok(ready) => Ok((child, ready?)),
            Err(_) => {
                let log = tail(&child.spec.log);
                Err(DevError::NotReady { name: child.spec.name, after: READY_TIMEOUT, log })
            }
        }
    }

    /// Starts the process again after its end.
    pub(super) async fn restart(&mut self) -> Result<(), DevError> {
        *self = Self::start(self.spec.clone()).await?.0;
        Ok(())
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    /// The process id, while it runs.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    pub(super) fn log(&self) -> &Path {
        &self.spec.log
    }

    /// Ready when the process has ended, unless it is a node that has drained for good.
    pub(super) async fn died(&mut self) -> Died {
        if self.has_left {
            return std::future::pending().await;
        }
        let status = self.process.wait().await.ok();
        if status.is_some_and(|status| status.success()) && self.says_drained().await {
            self.has_left = true;
            return std::future::pending().await;
        }
        Died { name: self.spec.name.clone(), status, log: tail(&self.spec.log) }
    }

    /// Sends SIGTERM.
    pub(super) fn ask_to_stop(&self) {
        let pid = self.process.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        // `None` or an error means that the process has ended already, and `stopped` will see that.
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            tracing::debug!(name = self.spec.name, %error, "no signal sent");
        }
    }

    /// Waits for the process to end, and kills it if it takes too long.
    pub(super) async fn stopped(&mut self) -> Result<(), DevError> {
        if timeout(STOP_GRACE, self.process.wait()).await.is_ok() {
            return Ok(());
        }
        // An error means that the process has ended in this very moment.
        let _ = self.process.kill().await;
        Err(DevError::Killed { name: self.spec.name.clone(), after: STOP_GRACE, log: tail(&self.spec.log) })
    }

    /// Whether the last line of a process that has ended says that it has drained.
    async fn says_drained(&mut self) -> bool {
        let mut line = String::new();
        let read = (&mut self.stdout).take(MAX_READY_LINE_BYTES).read_line(&mut line).await;
        read.is_ok() && serde_json::from_str::<DrainedLine>(&line).is_ok_and(|line| line.drained)
    }

    async fn ready_line(&mut self) -> Result<ReadyLine, DevError> {
        let mut line = String::new();
        let mut limited = (&mut self.stdout).take(MAX_READY_LINE_BYTES);
        let read = limited.read_line(&mut line).await;
        if line.is_empty() {
            tracing::debug!(name = self.spec.name, ?read, "it closed its standard output");
            return Err(self.died().await.into());
        }
        match serde_json::from_str(&line) {
            Ok(ready @ ReadyLine { ready: true, .. }) => Ok(ready),
            _ => Err(DevError::NotAReadyLine {
                name: self.spec.name.clone(),
                line: line.trim_end().to_owned(),
            }),
        }
    }
}

/// The last lines of a log; none if it cannot be read.
fn tail(log: &Path) -> LogTail {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let bytes = file.metadata()?.len();
        file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
        let mut text = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    LogTail { lines: lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n") }
}

/// Time in which a process must start: a large arena is faulted in page by page.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_READY_LINE_BYTES: u64 = 64 << 10;
const TAIL_BYTES: u64 = 4 << 10;
const TAIL_LINES: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let lines: Vec<String> = (0..10_000).map(|i| format!("line {i}")).collect();
        std::fs::write(log.path(), lines.join("\n")).unwrap();
        assert_eq!(tail(log.path()).lines, lines[9_980..].join("\n"));
        assert_eq!(tail(Path::new("/nowhere")).lines, "");
    }
}
