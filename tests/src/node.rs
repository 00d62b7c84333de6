//! A node as a process of its own.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use serde_json::Value;
use tempfile::TempDir;

use crate::server::Server;
use crate::wait;

/// A running node. Dropping it kills it.
pub struct NodeProcess {
    program: String,
    server: Server,
    dir: TempDir,
}

impl NodeProcess {
    /// Starts `program node` and waits until it serves. `config` is TOML in which `{dir}` stands for a fresh directory.
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn start(program: &str, config: &str) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("node.toml");
        let config = format!("name = \"test\"\n{config}").replace("{dir}", &dir.path().to_string_lossy());
        std::fs::write(&file, config)?;
        Ok(Self { program: program.to_owned(), server: Server::start(program, "node", &file)?, dir })
    }

    /// Ends the node with SIGKILL, lets `meanwhile` look at its directory, and starts it again with the same files.
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn restart(&mut self, meanwhile: impl FnOnce(&Path)) -> anyhow::Result<()> {
        self.server.kill()?;
        meanwhile(self.dir.path());
        self.server = Server::start(&self.program, "node", &self.dir.path().join("node.toml"))?;
        Ok(())
    }

    /// Starts a node with one tenant and an arena of 16 MiB in extents of 2 MiB.
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn small(program: &str) -> anyhow::Result<Self> {
        Self::start(program, &format!("{SMALL_HOST}\n{ONE_TENANT}"))
    }

    /// The socket of tenant `name`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// The directory that `{dir}` stands for.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A field of the first actor's status.
    ///
    /// # Panics
    /// Panics if the node does not answer, or its status has no such field.
    pub fn status(&self, field: &str) -> u64 {
        let text = self.get("/status").expect("the node answers");
        let status: Value = serde_json::from_str(&text).expect("the status is JSON");
        status["actors"][0][field].as_u64().unwrap_or_else(|| panic!("no `{field}` in {text}"))
    }

    /// Waits until a field of the first actor's status has a value.
    pub fn wait_for(&self, field: &str, value: u64) {
        wait::until(&format!("{field} = {value}"), || (self.status(field) == value).then_some(()));
    }

    /// Stops the node as an operator would.
    ///
    /// # Errors
    /// Fails if the node cannot be signalled.
    pub fn stop(self) -> anyhow::Result<ExitStatus> {
        self.server.stop()
    }
}

impl Deref for NodeProcess {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// HTTP on a free port and a small arena.
pub const SMALL_HOST: &str =
    "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\n";

/// The tenant `default`.
pub const ONE_TENANT: &str = "[[tenants]]\nname = \"default\"\nsocket = \"{dir}/default.sock\"\n";
