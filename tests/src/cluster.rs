//! A cluster whose authority, config files and processes are all controlled by the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use anyhow::Context as _;
use larder_net::quic::Credentials;
use larder_net::quic::ca::{Authority, Issued, Validity};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::table::{Member, Table};
use serde_json::Value;
use tempfile::TempDir;

use crate::server::Server;
use crate::visitor::Visitor;
use crate::wait;

/// A coordinator and nodes. Dead processes are not started again; dropping the cluster kills the running ones.
pub struct Cluster {
    program: String,
    authority: Authority,
    /// The coordinator's addresses for HTTP and peers, in this and every later life.
    coordinator_http: String,
    coordinator_peer: String,
    coordinator: Option<Server>,
    nodes: Vec<Server>,
    visitor: Visitor,
    // Last: the directory is removed when no process writes there any more.
    dir: TempDir,
}

impl Cluster {
    /// Starts a coordinator and `nodes` nodes, `node-0` and so on, and waits until all of them are members.
    ///
    /// # Errors
    /// Fails if the processes do not come up.
    pub fn start(program: &str, nodes: usize) -> anyhow::Result<Self> {
        Self::start_with(program, nodes, 3_000, "")
    }

    /// As [`Self::start`], with room for `capacity_chunks` chunks in each node's memory, and more of its configuration: in the
    /// TOML `more`, `{name}` stands for the node's own folder.
    ///
    /// # Errors
    /// Fails if the processes do not come up.
    pub fn start_with(program: &str, nodes: usize, capacity_chunks: u64, more: &str) -> anyhow::Result<Self> {
        Self::start_all(program, nodes, capacity_chunks, more, "")
    }

    /// As [`Self::start_with`]; the TOML `tracing` is in the coordinator's configuration too.
    ///
    /// # Errors
    /// Fails if the processes do not come up.
    pub fn start_traced(program: &str, nodes: usize, tracing: &str) -> anyhow::Result<Self> {
        Self::start_all(program, nodes, 3_000, tracing, tracing)
    }

    fn start_all(
        program: &str,
        nodes: usize,
        capacity_chunks: u64,
        more: &str,
        more_coordinator: &str,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (authority, files) = Authority::create(Validity::days(1))?;
        fs::write(dir.path().join("ca.pem"), files.certificate_pem)?;
        fs::write(dir.path().join("ca.key"), files.key_pem)?;
        let config = dir.path().join("coordinator.toml");
        issue(&authority, dir.path(), &Identity::new(Role::Coordinator, "coordinator"))?;
        fs::write(&config, coordinator_config(dir.path(), ANY_PORT, ANY_PORT) + more_coordinator)?;
        let coordinator = Server::start(program, "coordinator", &config)?;
        let (http, peer) = (coordinator.http().to_owned(), coordinator.ready("peer").to_owned());
        fs::write(&config, coordinator_config(dir.path(), &http, &peer) + more_coordinator)?;
        let admin = authority.issue(&Identity::new(Role::Admin, "test"), Validity::days(1))?;
        let mut cluster = Self {
            program: program.to_owned(),
            visitor: Visitor::new(&credentials(authority.certificate_pem(), &admin)?)?,
            authority,
            coordinator_http: http,
            coordinator_peer: peer,
            coordinator: Some(coordinator),
            nodes: Vec::new(),
            dir,
        };
        for _ in 0..nodes {
            cluster.add_node(capacity_chunks, more)?;
        }
        cluster.wait_for_members(nodes);
        Ok(cluster)
    }

    /// Processes that are started from now on run this program.
    pub fn run(&mut self, program: &str) {
        program.clone_into(&mut self.program);
    }

    /// Starts one more node, with room and configuration as in [`Cluster::start_with`].
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn add_node(&mut self, capacity_chunks: u64, more: &str) -> anyhow::Result<()> {
        let name = format!("node-{}", self.nodes.len());
        issue(&self.authority, self.dir.path(), &Identity::new(Role::Node, &name))?;
        let config = self.dir.path().join(&name).with_extension("toml");
        let more = more.replace("{name}", &self.dir.path().join(&name).to_string_lossy());
        let text = node_config(self.dir.path(), &name, &self.coordinator_peer, capacity_chunks) + &more;
        fs::write(&config, &text)?;
        self.nodes.push(Server::start(&self.program, "node", &config)?);
        Ok(())
    }

    /// From now on, the later lives of all nodes have the addresses of the present lives.
    ///
    /// # Errors
    /// Fails if a configuration cannot be written.
    pub fn keep_addresses(&self) -> anyhow::Result<()> {
        for (number, node) in self.nodes.iter().enumerate() {
            let config = self.dir.path().join(format!("node-{number}.toml"));
            let any = format!("[http]\nlisten = \"{ANY_PORT}\"");
            let here = format!("[http]\nlisten = \"{}\"", node.http());
            fs::write(&config, fs::read_to_string(&config)?.replace(&any, &here))?;
        }
        Ok(())
    }

    /// Waits until all nodes that run are members, and know all members.
    pub fn wait_for_members(&self, nodes: usize) {
        // The coordinator counts a member before it makes the table, and has the table before the nodes have it.
        wait::until("all nodes are in the table, and know it", || {
            let table = self.table().ok().filter(|table| table.members.len() == nodes)?;
            let knows = |node: &Server| members_known(node).is_some_and(|known| known == table.members.len());
            self.nodes.iter().all(knows).then_some(())
        });
    }

    /// A node, by the order in which they were started.
    pub fn node(&self, number: usize) -> &Server {
        &self.nodes[number]
    }

    /// Ends a node with SIGKILL and starts it again with the files that it had.
    ///
    /// # Errors
    /// Fails if the node does not come up.
    pub fn restart_node(&mut self, number: usize) -> anyhow::Result<()> {
        self.nodes[number].kill()?;
        let config = self.dir.path().join(format!("node-{number}.toml"));
        self.nodes[number] = Server::start(&self.program, "node", &config)?;
        Ok(())
    }

    /// Ends a node with SIGKILL.
    ///
    /// # Errors
    /// Fails if the node cannot be killed.
    pub fn kill_node(&mut self, number: usize) -> anyhow::Result<()> {
        self.nodes[number].kill()
    }

    /// Stops the last node as an operator would.
    ///
    /// # Errors
    /// Fails if there is no node, or it cannot be signalled.
    pub fn stop_last_node(&mut self) -> anyhow::Result<ExitStatus> {
        self.nodes.pop().context("there is no node")?.stop()
    }

    /// Waits until the last node ends by itself; returns how it ended.
    ///
    /// # Errors
    /// Fails if there is no node, or the system does not say how it ended.
    pub fn wait_for_end_of_last_node(&mut self) -> anyhow::Result<ExitStatus> {
        let mut node = self.nodes.pop().context("there is no node")?;
        wait::until("the node ends", || node.ended().transpose())
            .context("the system does not say how the node ended")
    }

    /// The folder of the authority's files, and of the certificates and keys of the processes.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The session socket of a node.
    pub fn socket(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("node-{number}.sock"))
    }

    /// The coordinator's HTTP address, even while it is down.
    pub fn coordinator_http(&self) -> &str {
        &self.coordinator_http
    }

    /// The coordinator's address for nodes.
    pub fn coordinator_peer(&self) -> &str {
        &self.coordinator_peer
    }

    /// The coordinator.
    ///
    /// # Panics
    /// Panics if it was killed.
    pub fn coordinator(&self) -> &Server {
        self.coordinator.as_ref().expect("the coordinator runs")
    }

    /// Ends the coordinator with SIGKILL.
    pub fn kill_coordinator(&mut self) {
        self.coordinator = None;
    }

    /// Starts the coordinator again with the files and addresses that it had.
    ///
    /// # Errors
    /// Fails if the coordinator does not come up.
    pub fn start_coordinator(&mut self) -> anyhow::Result<()> {
        let config = self.dir.path().join("coordinator.toml");
        self.coordinator = Some(Server::start(&self.program, "coordinator", &config)?);
        Ok(())
    }

    /// The members according to the coordinator's status; none while the coordinator does not answer.
    pub fn members(&self) -> Vec<Value> {
        members(&self.coordinator_http)
    }

    /// The present table, as the coordinator gives it to watchers.
    ///
    /// # Errors
    /// Fails if the coordinator gives no table.
    pub fn table(&self) -> anyhow::Result<Table> {
        self.visitor.watch(self.coordinator_peer.parse()?)
    }

    /// The table's entry of a member.
    ///
    /// # Panics
    /// Panics if the node does not become a member.
    pub fn member(&self, name: &str) -> Member {
        let find = || self.table().ok()?.members.into_iter().find(|member| member.name == name);
        wait::until(&format!("{name} is in the table"), find)
    }

    /// Credentials of an identity, issued by the cluster's own authority.
    ///
    /// # Errors
    /// Fails if no credentials can be made.
    pub fn credentials(&self, identity: &Identity, validity: Validity) -> anyhow::Result<Credentials> {
        let issued = self.authority.issue(identity, validity)?;
        credentials(self.authority.certificate_pem(), &issued)
    }

    /// Credentials of a stranger: they trust this cluster's authority, but another authority issued them.
    ///
    /// # Errors
    /// Fails if no credentials can be made.
    pub fn strange_credentials(&self, identity: &Identity) -> anyhow::Result<Credentials> {
        let (other, _) = Authority::create(Validity::days(1))?;
        credentials(self.authority.certificate_pem(), &other.issue(identity, Validity::days(1))?)
    }
}

/// Writes an admin's certificate and key into the cluster's folder.
///
/// # Errors
/// Fails if the files cannot be made.
pub fn issue_admin(cluster: &Cluster, name: &str) -> anyhow::Result<()> {
    issue(&cluster.authority, cluster.dir.path(), &Identity::new(Role::Admin, name))
}

/// The members of a cluster according to its coordinator's status; none while the coordinator does not answer.
pub fn members(coordinator_http: &str) -> Vec<Value> {
    let status = crate::server::get(coordinator_http, "/status").ok();
    let status = status.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    status.and_then(|mut status| Some(status["nodes"].as_array_mut()?.split_off(0))).unwrap_or_default()
}

/// The number of members that a node knows.
fn members_known(node: &Server) -> Option<usize> {
    let status: Value = serde_json::from_str(&node.get("/status").ok()?).ok()?;
    Some(status["cluster"]["members"].as_u64()? as usize)
}

pub(crate) fn credentials(ca_pem: &str, issued: &Issued) -> anyhow::Result<Credentials> {
    let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
    Credentials::from_pem(ca_pem.as_bytes(), certificate, key)
        .context("cannot use the test's own credentials")
}

/// Writes the certificate and key of a process.
pub(crate) fn issue(authority: &Authority, dir: &Path, identity: &Identity) -> anyhow::Result<()> {
    let issued = authority.issue(identity, Validity::days(1))?;
    fs::write(dir.join(format!("{}.pem", identity.name)), issued.certificate_pem)?;
    fs::write(dir.join(format!("{}.key", identity.name)), issued.key_pem)?;
    Ok(())
}

pub(crate) fn credential_files(dir: &Path, name: &str) -> String {
    let dir = dir.display();
    format!("ca = \"{dir}/ca.pem\"\ncertificate = \"{dir}/{name}.pem\"\nkey = \"{dir}/{name}.key\"\n")
}

pub(crate) fn coordinator_config(dir: &Path, http: &str, peer: &str) -> String {
    let files = credential_files(dir, "coordinator");
    let state = dir.join("coordinator.redb");
    format!(
        "[http]\nlisten = \"{http}\"\n[peer]\nlisten = \"{peer}\"\n{files}\
         [state]\npath = \"{}\"\n[membership]\ngrace_ms = 500\n",
        state.display()
    )
}

/// The configuration of a node with room for this many chunks of 4 KiB, and for the chunks that are being written or passed on.
pub(crate) fn node_config(dir: &Path, name: &str, coordinator: &str, capacity_chunks: u64) -> String {
    let files = credential_files(dir, name);
    format!(
        "name = \"{name}\"\n[http]\nlisten = \"{ANY_PORT}\"\n\
         [host]\narena_bytes = \"64MiB\"\nextent_bytes = \"2MiB\"\ncapacity_chunks = {capacity_chunks}\npolicy = \"lru\"\n\
         [[tenants]]\nname = \"default\"\nsocket = \"{}/{name}.sock\"\n\
         [cluster]\ncoordinator = \"{coordinator}\"\nlisten = \"{ANY_PORT}\"\nstaging_bytes = \"8MiB\"\n{files}",
        dir.display()
    )
}

const ANY_PORT: &str = "127.0.0.1:0";
