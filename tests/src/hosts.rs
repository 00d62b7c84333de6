//! Two hosts: network namespaces of this machine, joined by a cable.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, ensure};
use larder_net::quic::ca::{Authority, Validity};
use larder_protocol::identity::{Identity, Role};
use tempfile::TempDir;

use crate::cluster::{credential_files, issue};
use crate::server::Server;

/// Two network namespaces; dropping them removes them.
pub struct Hosts {
    names: [String; 2],
    programs: [String; 2],
    // Last: the directory goes when nobody writes there any more.
    dir: TempDir,
}

impl Hosts {
    /// Makes both hosts, an authority, and certificates for a coordinator and for `node-0` and `node-1`.
    ///
    /// # Errors
    /// Fails where this process may make no network namespaces.
    pub fn new(program: &str) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (authority, files) = Authority::create(Validity::days(1))?;
        fs::write(dir.path().join("ca.pem"), files.certificate_pem)?;
        issue(&authority, dir.path(), &Identity::new(Role::Coordinator, "coordinator"))?;
        issue(&authority, dir.path(), &Identity::new(Role::Node, "node-0"))?;
        issue(&authority, dir.path(), &Identity::new(Role::Node, "node-1"))?;
        let pair = PAIRS.fetch_add(1, Ordering::Relaxed);
        let names = [0, 1].map(|host| format!("larder-{}-{pair}-{host}", std::process::id()));
        let programs = [0, 1].map(|host| dir.path().join(format!("on-host-{host}")).display().to_string());
        let hosts = Self { names, programs, dir };
        hosts.join(program)?;
        Ok(hosts)
    }

    fn join(&self, program: &str) -> anyhow::Result<()> {
        let [one, other] = &self.names;
        for (name, script) in self.names.iter().zip(&self.programs) {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            fs::write(script, format!("#!/bin/sh\nexec ip netns exec {name} {program} \"$@\"\n"))?;
            fs::set_permissions(script, fs::Permissions::from_mode(0o755))?;
        }
        ip(&["-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other])?;
        for (host, name) in self.names.iter().enumerate() {
            ip(&["-n", name, "address", "add", &format!("{}/24", Self::address(host)), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
        }
        Ok(())
    }

    /// The address of a host.
    #[must_use]
    pub fn address(host: usize) -> String {
        format!("198.18.0.{}", host + 1)
    }

    /// Starts a server on a host. Its configuration is that of the book: certificates, names and places, no address but the
    /// coordinator's, and `more`.
    ///
    /// # Errors
    /// Fails if it does not come up.
    pub fn start(&self, host: usize, name: &str, more: &str) -> anyhow::Result<Server> {
        let dir = self.dir.path();
        let (config, files) = (dir.join(name).with_extension("toml"), credential_files(dir, name));
        let kind = if name == "coordinator" { "coordinator" } else { "node" };
        let text = if kind == "coordinator" {
            format!("[state]\npath = \"{}/state.redb\"\n{more}\n[peer]\n{files}", dir.display())
        } else {
            format!(
                "name = \"{name}\"\n{more}\n[host]\narena_bytes = \"16MiB\"\n\
                 [[tenants]]\nname = \"default\"\nsocket = \"{}/{name}.sock\"\n\
                 [cluster]\ncoordinator = \"{}:7601\"\nstaging_bytes = \"2MiB\"\n{files}",
                dir.display(),
                Self::address(0)
            )
        };
        fs::write(&config, text)?;
        Server::start(&self.programs[host], kind, &config)
    }

    /// Runs a command on a host to its end.
    ///
    /// # Errors
    /// Fails if the system does not start it.
    pub fn run(&self, host: usize, args: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new(&self.programs[host]);
        Ok(command.args(args).env("LARDER_CONTEXT", self.dir.path().join("context.toml")).output()?)
    }

    /// Where the configuration files are, and the context file of the commands.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // An error: it was never made.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip").args(args).output().context("there is no `ip`")?;
    ensure!(output.status.success(), "ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Pairs of hosts that this process made.
static PAIRS: AtomicU32 = AtomicU32::new(0);
