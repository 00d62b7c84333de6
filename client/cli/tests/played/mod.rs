//! A development cluster of two nodes that has played a few requests, and commands that find it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The cluster. Dropping it kills it.
pub(crate) struct Played {
    runtime: TempDir,
    child: Child,
    /// The addresses of its processes, as `larder dev --json` prints them.
    pub(crate) ready: Value,
}

impl Played {
    /// A cluster with these options of `larder dev`, after this number of requests with blocks of 4 KiB.
    pub(crate) fn new(options: &[&str], requests: &str) -> Self {
        let runtime = tempfile::tempdir().unwrap();
        let dev = [&["dev", "--json", "--nodes", "2"], options].concat();
        let mut child = command(&runtime, &dev).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let played = Self { runtime, child, ready: serde_json::from_str(&line).unwrap() };
        let replay = [
            "replay",
            "--coordinator",
            played.coordinator(),
            "--requests",
            requests,
            "--block-bytes",
            "4096",
        ];
        assert!(played.run(&replay).status.success());
        played
    }

    pub(crate) fn coordinator(&self) -> &str {
        self.ready["coordinator"].as_str().unwrap()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        command(&self.runtime, args)
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat());
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{args:?}: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The program with these arguments, which finds the cluster of this runtime directory and no other.
pub(crate) fn command(runtime: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command
        .args(args)
        .env("XDG_RUNTIME_DIR", runtime.path())
        .env_remove("LARDER_LOG")
        .env_remove("LARDER_COORDINATOR");
    command
}
