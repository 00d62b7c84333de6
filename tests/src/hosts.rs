//! Hosts: network namespaces of this machine, joined by a switch.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use larder_net::quic::ca::{Authority, Validity};
use larder_protocol::identity::{Identity, Role};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;

use crate::cluster::{credential_files, issue};
use crate::server::Server;

/// Network namespaces, the last of them a switch; dropping them removes them.
pub struct Hosts {
    names: Vec<String>,
    programs: Vec<String>,
    // Last: the directory is removed when no process writes there any more.
    dir: TempDir,
}

impl Hosts {
    /// Makes two hosts, an authority, and certificates for a coordinator and for `node-0` and `node-1`.
    ///
    /// # Errors
    /// Fails if this process may make no network namespaces.
    pub fn new(program: &str) -> anyhow::Result<Self> {
        Self::of(2, program)
    }

    /// As [`Self::new`], with `count` hosts and as many certificates of nodes.
    ///
    /// # Errors
    /// Fails if this process may make no network namespaces.
    pub fn of(count: usize, program: &str) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (authority, files) = Authority::create(Validity::days(1))?;
        fs::write(dir.path().join("ca.pem"), files.certificate_pem)?;
        issue(&authority, dir.path(), &Identity::new(Role::Coordinator, "coordinator"))?;
        let group = GROUPS.fetch_add(1, Ordering::Relaxed);
        let name = |host| format!("larder-{}-{group}-{host}", std::process::id());
        let names = (0..=count).map(name).collect();
        let program_on = |host| dir.path().join(format!("on-host-{host}")).display().to_string();
        let programs = (0..count).map(program_on).collect();
        let hosts = Self { names, programs, dir };
        for host in 0..count {
            issue(&authority, hosts.dir.path(), &Identity::new(Role::Node, &format!("node-{host}")))?;
        }
        hosts.join(program)?;
        Ok(hosts)
    }

    fn join(&self, program: &str) -> anyhow::Result<()> {
        for name in &self.names {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        ip(&["-n", self.switch(), "link", "add", "switch", "type", "bridge"])?;
        ip(&["-n", self.switch(), "link", "set", "switch", "up"])?;
        for (host, script) in self.programs.iter().enumerate() {
            let (name, port) = (&self.names[host], port(host));
            fs::write(script, format!("#!/bin/sh\nexec ip netns exec {name} {program} \"$@\"\n"))?;
            fs::set_permissions(script, fs::Permissions::from_mode(0o755))?;
            let peer = ["type", "veth", "peer", "name", &port, "netns", self.switch()];
            ip(&[&["-n", name, "link", "add", "cable"], &peer[..]].concat())?;
            ip(&["-n", name, "address", "add", &format!("{}/24", Self::address(host)), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
            ip(&["-n", self.switch(), "link", "set", &port, "up"])?;
            self.plug_in(host)?;
        }
        Ok(())
    }

    fn switch(&self) -> &str {
        &self.names[self.programs.len()]
    }

    /// Disconnects a host from the switch: it reaches nobody and nobody reaches it. Its own end of the cable stays up.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub fn cut_off(&self, host: usize) -> anyhow::Result<()> {
        ip(&["-n", self.switch(), "link", "set", &port(host), "nomaster"])
    }

    /// Connects a host to the switch again.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub fn plug_in(&self, host: usize) -> anyhow::Result<()> {
        ip(&["-n", self.switch(), "link", "set", &port(host), "master", "switch"])
    }

    /// Does something on a host: sockets made by `act` belong to that host.
    ///
    /// # Errors
    /// Fails if this thread may not enter the host's namespace.
    ///
    /// # Panics
    /// Panics as `act` does.
    pub fn on<T: Send>(&self, host: usize, act: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        let space = File::open(format!("/run/netns/{}", self.names[host]))?;
        // A thread of its own enters the namespace and ends there.
        thread::scope(|scope| {
            let there = scope.spawn(move || {
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok(act())
            });
            there.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// The address of a host.
    pub fn address(host: usize) -> String {
        format!("198.18.0.{}", host + 1)
    }

    /// Starts a server on a host: the coordinator, or `node-0` and so on. Its configuration is that of the book, and `more`:
    /// certificates, names, folders, and the address of the coordinator on host 0 as the only address.
    ///
    /// # Errors
    /// Fails if the server does not come up.
    pub fn start(&self, host: usize, name: &str, more: &str) -> anyhow::Result<Server> {
        if name == "coordinator" {
            return self.start_coordinator(host, more);
        }
        self.start_node(host, name, &format!("{}:7601", Self::address(0)), more)
    }

    /// Starts a coordinator on a host, with more of its configuration.
    ///
    /// # Errors
    /// Fails if the coordinator does not come up.
    pub fn start_coordinator(&self, host: usize, more: &str) -> anyhow::Result<Server> {
        let (dir, files) = (self.dir.path(), credential_files(self.dir.path(), "coordinator"));
        let text =
            format!("[state]\npath = \"{}/state-{host}.redb\"\n{more}\n[peer]\n{files}", dir.display());
        self.start_with(host, "coordinator", &format!("coordinator-{host}"), &text)
    }

    /// Starts a node on a host. It looks for coordinators at `coordinators`.
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn start_node(
        &self,
        host: usize,
        name: &str,
        coordinators: &str,
        more: &str,
    ) -> anyhow::Result<Server> {
        let (dir, files) = (self.dir.path(), credential_files(self.dir.path(), name));
        let text = format!(
            "name = \"{name}\"\n{more}\n[host]\narena_bytes = \"16MiB\"\n\
             [[tenants]]\nname = \"default\"\nsocket = \"{}/{name}.sock\"\n\
             [cluster]\ncoordinator = \"{coordinators}\"\nstaging_bytes = \"2MiB\"\n{files}",
            dir.display(),
        );
        self.start_with(host, "node", name, &text)
    }

    fn start_with(&self, host: usize, kind: &str, name: &str, text: &str) -> anyhow::Result<Server> {
        let config = self.dir.path().join(name).with_extension("toml");
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

    /// The folder of the configuration files and of the commands' context file.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // An error: the namespace was never made.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip").args(args).output().context("there is no `ip`")?;
    ensure!(output.status.success(), "ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The port of the switch for a host.
fn port(host: usize) -> String {
    format!("port-{host}")
}

/// Groups of hosts that this process made.
static GROUPS: AtomicU32 = AtomicU32::new(0);
