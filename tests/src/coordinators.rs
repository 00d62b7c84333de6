//! A cluster with several coordinators that elect a leader.

use std::fs;
use std::path::{Path, PathBuf};

use larder_net::quic::ca::{Authority, Validity};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::table::Table;
use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{coordinator_config, credentials, issue, node_config};
use crate::server::Server;
use crate::visitor::Visitor;
use crate::wait;

/// Coordinators and nodes. Dead processes are not started again; dropping this kills the running ones.
pub struct Coordinators {
    program: String,
    all: Vec<Option<Server>>,
    http: Vec<String>,
    peer: Vec<String>,
    nodes: Vec<Server>,
    visitor: Visitor,
    // Last: the directory is removed when no process writes there any more.
    dir: TempDir,
}

impl Coordinators {
    /// Starts `coordinators` coordinators with these keys in `[election]`, and `nodes` nodes, and waits until all nodes are
    /// members.
    ///
    /// # Errors
    /// Fails if the processes do not come up.
    pub fn start(program: &str, coordinators: usize, nodes: usize, election: &str) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (authority, files) = Authority::create(Validity::days(1))?;
        fs::write(dir.path().join("ca.pem"), files.certificate_pem)?;
        let admin = authority.issue(&Identity::new(Role::Admin, "test"), Validity::days(1))?;
        let visitor = Visitor::new(&credentials(authority.certificate_pem(), &admin)?)?;
        let program = program.to_owned();
        let (all, http, peer) = (Vec::new(), Vec::new(), Vec::new());
        let mut cluster = Self { program, all, http, peer, nodes: Vec::new(), visitor, dir };
        issue(&authority, cluster.dir.path(), &Identity::new(Role::Coordinator, "coordinator"))?;
        for at in 0..coordinators {
            let config = |http: &str, peer: &str| {
                let text = coordinator_config(cluster.dir.path(), http, peer);
                let text = text.replace("coordinator.redb", &format!("coordinator-{at}.redb"));
                format!("{text}[election]\n{election}\n")
            };
            fs::write(cluster.config(at), config(ANY_PORT, ANY_PORT))?;
            let started = Server::start(&cluster.program, "coordinator", &cluster.config(at))?;
            let (http, peer) = (started.http().to_owned(), started.ready("peer").to_owned());
            fs::write(cluster.config(at), config(&http, &peer))?;
            cluster.all.push(Some(started));
            cluster.http.push(http);
            cluster.peer.push(peer);
        }
        for number in 0..nodes {
            let name = format!("node-{number}");
            issue(&authority, cluster.dir.path(), &Identity::new(Role::Node, &name))?;
            let config = cluster.dir.path().join(&name).with_extension("toml");
            fs::write(&config, node_config(cluster.dir.path(), &name, &cluster.peer.join(","), 3_000))?;
            cluster.nodes.push(Server::start(&cluster.program, "node", &config)?);
        }
        wait::until("all nodes know all nodes", || {
            let known =
                |node: &Server| status(node.http()).map(|status| status["cluster"]["members"].clone());
            cluster.nodes.iter().all(|node| known(node) == Some(nodes.into())).then_some(())
        });
        Ok(cluster)
    }

    /// The HTTP addresses of all coordinators, with commas between them.
    pub fn http(&self) -> String {
        self.http.join(",")
    }

    /// The number of the coordinator that leads, in the order in which they were started; `None` if none leads.
    pub fn leader(&self) -> Option<usize> {
        let leads = |http: &String| status(http).is_some_and(|status| status["follows"] == false);
        let is_asked = |at: &usize| self.all[*at].is_some();
        (0..self.all.len()).filter(is_asked).find(|&at| leads(&self.http[at]))
    }

    /// A coordinator's status; `None` while it does not answer.
    pub fn status(&self, at: usize) -> Option<Value> {
        status(&self.http[at])
    }

    /// A coordinator.
    ///
    /// # Panics
    /// Panics if the coordinator was killed.
    pub fn coordinator(&self, at: usize) -> &Server {
        self.all[at].as_ref().expect("it runs")
    }

    /// Ends a coordinator with SIGKILL.
    pub fn kill(&mut self, at: usize) {
        self.all[at] = None;
    }

    /// Starts a coordinator again with the files and addresses that it had.
    ///
    /// # Errors
    /// Fails if the coordinator does not come up.
    pub fn start_again(&mut self, at: usize) -> anyhow::Result<()> {
        self.all[at] = Some(Server::start(&self.program, "coordinator", &self.config(at))?);
        Ok(())
    }

    /// The table that a coordinator gives to watchers.
    ///
    /// # Errors
    /// Fails if the coordinator gives no table.
    pub fn table(&self, at: usize) -> anyhow::Result<Table> {
        self.visitor.watch(self.peer[at].parse()?)
    }

    /// The term and number of each node's table; nodes that do not answer are left out.
    pub fn epochs_of_nodes(&self) -> Vec<(u64, u64)> {
        let epoch = |node: &Server| {
            let status = status(node.http())?;
            let (term, number) = status["cluster"]["epoch"].as_str()?.split_once('.')?;
            Some((term.parse().ok()?, number.parse().ok()?))
        };
        self.nodes.iter().filter_map(epoch).collect()
    }

    fn config(&self, at: usize) -> PathBuf {
        Path::new(self.dir.path()).join(format!("coordinator-{at}.toml"))
    }
}

fn status(http: &str) -> Option<Value> {
    serde_json::from_str(&crate::server::get(http, "/status").ok()?).ok()
}

const ANY_PORT: &str = "127.0.0.1:0";
