//! A node or a coordinator as a process of its own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A process. Dropping it kills it, and waits until it is gone.
pub(crate) struct Killed(pub(crate) Child);

/// A running server. Dropping it kills it.
pub struct Server {
    child: Killed,
    log: PathBuf,
    ready: Value,
}

impl Killed {
    /// Ends the process with SIGKILL and waits until it is gone.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It fails only if the process has ended already.
        _ = self.kill();
    }
}

impl Server {
    /// Starts `program kind --config config`, where `kind` is `node` or `coordinator`, and waits until it serves. Its log
    /// grows beside its config file.
    ///
    /// # Errors
    /// Fails if the server does not come up.
    pub fn start(program: &str, kind: &str, config: &Path) -> anyhow::Result<Self> {
        Self::start_in(program, kind, config, &[])
    }

    /// As [`Self::start`], with these variables in the server's environment.
    ///
    /// # Errors
    /// Fails if the server does not come up.
    pub fn start_in(
        program: &str,
        kind: &str,
        config: &Path,
        environment: &[(String, String)],
    ) -> anyhow::Result<Self> {
        let mut started = Self::spawn(program, kind, config, environment, Stdio::piped())?;
        let stdout = started.child.0.stdout.take().context("the server has no standard output")?;
        let (said, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            // Nobody listens any more if this took too long.
            let _ = said.send(BufReader::new(stdout).read_line(&mut line).map(|_| line));
        });
        let line = line.recv_timeout(READY).with_context(|| format!("not ready: {}", started.log()))??;
        let ready = serde_json::from_str(&line);
        started.ready = ready.with_context(|| format!("no ready line: {}", started.log()))?;
        Ok(started)
    }

    /// Starts the server and does not wait: it may never serve.
    ///
    /// # Errors
    /// Fails if the system does not start the server.
    pub fn start_unready(
        program: &str,
        kind: &str,
        config: &Path,
        environment: &[(String, String)],
    ) -> anyhow::Result<Self> {
        Self::spawn(program, kind, config, environment, Stdio::null())
    }

    fn spawn(
        program: &str,
        kind: &str,
        config: &Path,
        environment: &[(String, String)],
        stdout: Stdio,
    ) -> anyhow::Result<Self> {
        let log = config.with_extension("log");
        let child = Command::new(program)
            .args([kind, "--config"])
            .arg(config)
            .args(["--parent", &std::process::id().to_string()])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdout(stdout)
            .stderr(File::options().create(true).append(true).open(&log)?)
            // Ctrl-C at a terminal goes only to the test, which then ends the processes that it started.
            .process_group(0)
            .spawn()?;
        Ok(Self { child: Killed(child), log, ready: Value::Null })
    }

    /// How the server ended; `None` while it runs.
    ///
    /// # Errors
    /// Fails if the system does not say.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.0.try_wait()?)
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// The server's log so far, including that of earlier processes with the same config file.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A text field of the line with which the server said that it is ready.
    ///
    /// # Panics
    /// Panics if the line had no such field.
    pub fn ready(&self, field: &str) -> &str {
        self.ready[field].as_str().unwrap_or_else(|| panic!("no `{field}` in {}", self.ready))
    }

    /// The address on which the server serves HTTP.
    ///
    /// # Panics
    /// Panics if the server did not say it.
    pub fn http(&self) -> &str {
        self.ready("http")
    }

    /// The body at an HTTP path.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub fn get(&self, path: &str) -> anyhow::Result<String> {
        get(self.http(), path)
    }

    /// The sum of all samples in the server's metrics whose line begins with `beginning`.
    ///
    /// # Panics
    /// Panics if the server does not answer.
    pub fn metric(&self, beginning: &str) -> f64 {
        sum(&self.get("/metrics").expect("the server answers"), beginning)
    }

    /// Sends the server a signal.
    ///
    /// # Errors
    /// Fails if the server has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self::signal(self.pid(), signal)
    }

    /// Ends the server with SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// Fails if the server cannot be killed.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()
    }

    /// Stops the server as an operator would.
    ///
    /// # Errors
    /// Fails if the server cannot be signalled.
    pub fn stop(mut self) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        Ok(self.child.0.wait()?)
    }
}

/// The sum of all samples in a metrics text whose line begins with `beginning`.
pub fn sum(metrics: &str, beginning: &str) -> f64 {
    let samples = metrics.lines().filter(|line| line.starts_with(beginning));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// The body at a path of an HTTP server.
///
/// # Errors
/// Fails if the server does not answer within a few seconds.
pub fn get(http: &str, path: &str) -> anyhow::Result<String> {
    let limited = ureq::get(format!("http://{http}{path}")).config().timeout_global(Some(ANSWER)).build();
    Ok(limited.call()?.body_mut().read_to_string()?)
}

/// Sends a signal to a process.
///
/// # Errors
/// Fails if there is no such process.
pub fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("the process has no number")?;
    Ok(kill_process(pid, signal)?)
}

const ANSWER: Duration = Duration::from_secs(5);

/// How long a server may take to start.
const READY: Duration = Duration::from_secs(60);
