//! The processes of a cluster: they are started, watched, disturbed and started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use larder_net::quic::ca::{Authority, Validity};
use larder_protocol::identity::{Identity, Role};
use rustix::process::Signal;

use super::{Chaos, Cluster, DISK_TIMES, NodePlan};
use crate::cluster::{coordinator_config, credential_files, issue, members};
use crate::server::{Server, signal};
use crate::soak::deaths::PanicWatch;
use crate::soak::mixed::TENANTS;
use crate::soak::nodes::{Life, Node};
use crate::soak::tally::Tally;
use crate::wait::now;

/// A coordinator, nodes, and now and then the clone of a node.
pub(super) struct Processes {
    program: String,
    tally: Arc<Tally>,
    authority: Arc<Authority>,
    coordinator: Process,
    nodes: Vec<Process>,
    clone: Option<(Server, Instant)>,
}

/// One process, over all its lives.
struct Process {
    node: Arc<Node>,
    kind: &'static str,
    config: PathBuf,
    environment: Vec<(String, String)>,
    /// `None` while the process is down.
    server: Option<Server>,
    panics: PanicWatch,
    disturbed: Option<(What, Instant)>,
}

/// A disturbance of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// SIGKILL, and a new life later.
    Kill,
    /// A signal that stops the process, and SIGCONT later.
    Signal(Signal),
}

impl Processes {
    /// Starts all processes and waits until all nodes are members.
    pub(super) fn start(chaos: &Chaos) -> anyhow::Result<Self> {
        let program = chaos.program.to_str().context("the program's path is not UTF-8")?.to_owned();
        let folder = &chaos.folder;
        let (authority, files) = Authority::create(Validity::days(2))?;
        fs::write(folder.join("ca.pem"), files.certificate_pem)?;
        issue(&authority, folder, &Identity::new(Role::Admin, "admin"))?;
        issue(&authority, folder, &Identity::new(Role::Coordinator, "coordinator"))?;
        let config = folder.join("coordinator.toml");
        fs::write(&config, coordinator_config(folder, ANY_PORT, ANY_PORT))?;
        let mut coordinator =
            Process::new(Node::new("coordinator".into(), Vec::new()), "coordinator", config);
        coordinator.start(&program)?;
        let server = coordinator.server.as_ref().context("the coordinator was not started")?;
        let (http, peer) = (server.http().to_owned(), server.ready("peer").to_owned());
        fs::write(&coordinator.config, coordinator_config(folder, &http, &peer))?;
        let mut nodes = Vec::new();
        for number in 0..chaos.nodes {
            let plan = chaos.plan.nodes.get(usize::from(number)).cloned().unwrap_or_default();
            let name = format!("node-{number}");
            issue(&authority, folder, &Identity::new(Role::Node, &name))?;
            let config = folder.join(format!("{name}.toml"));
            fs::write(&config, node_config(folder, &name, &name, number, &peer, chaos.arena_bytes, &plan))?;
            let clone = folder.join(format!("{name}-clone.toml"));
            let text =
                node_config(folder, &name, &format!("{name}-clone"), number, &peer, chaos.arena_bytes, &plan);
            fs::write(clone, text)?;
            let sockets = TENANTS.iter().map(|tenant| socket(folder, &name, tenant)).collect();
            let mut process = Process::new(Node::new(name, sockets), "node", config);
            process.environment = plan.environment;
            process.start(&program)?;
            nodes.push(process);
        }
        let start = now();
        while members(&http).len() < nodes.len() {
            anyhow::ensure!(start.elapsed() < JOIN_DEADLINE, "only {:?} are members", members(&http));
            std::thread::sleep(Duration::from_millis(20));
        }
        let (tally, authority) = (Arc::clone(&chaos.tally), Arc::new(authority));
        Ok(Self { program, tally, authority, coordinator, nodes, clone: None })
    }

    /// The processes, and their authority.
    pub(super) fn cluster(&self) -> Cluster {
        Cluster {
            nodes: self.nodes.iter().map(|process| Arc::clone(&process.node)).collect(),
            coordinator: Arc::clone(&self.coordinator.node),
            authority: Arc::clone(&self.authority),
        }
    }

    /// Notes which processes died, and starts those that are due to come back.
    pub(super) fn watch(&mut self, now: Instant) {
        self.coordinator.watch(now, &self.program, &self.tally);
        for process in &mut self.nodes {
            process.watch(now, &self.program, &self.tally);
        }
        if self.clone.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.clone = None;
        }
    }

    /// Kills or stops a node until `until`. Returns whether it did: a node that is down or stopped stays so.
    pub(super) fn disturb(&mut self, number: usize, what: What, until: Instant) -> bool {
        let process = &mut self.nodes[number];
        let (Some(server), None) = (&mut process.server, process.disturbed) else { return false };
        if !matches!(server.ended(), Ok(None)) {
            return false;
        }
        process.node.disturb();
        let done = match what {
            What::Kill => server.kill(),
            What::Signal(signal) => server.signal(signal),
        };
        if what == What::Kill {
            process.server = None;
        }
        process.disturbed = Some((what, until));
        done.is_ok()
    }

    /// Starts another process with a node's identity, which lives until `until`. The result of the start does not matter.
    pub(super) fn start_clone(&mut self, number: usize, until: Instant) {
        let Process { config, node, environment, .. } = &self.nodes[number];
        let config = config.with_file_name(format!("{}-clone.toml", node.name));
        let started = Server::start_unready(&self.program, "node", &config, environment);
        self.clone = started.ok().map(|server| (server, until));
        self.tally.count(|counts| counts.clones += 1);
    }

    /// Stops the processes as an operator would.
    pub(super) fn stop(mut self) {
        self.clone = None;
        for process in self.nodes.iter_mut().chain([&mut self.coordinator]) {
            process.stop(&self.tally);
        }
    }
}

impl Process {
    fn new(node: Node, kind: &'static str, config: PathBuf) -> Self {
        let panics = PanicWatch::new(config.with_extension("log"));
        Self {
            node: Arc::new(node),
            kind,
            config,
            environment: Vec::new(),
            server: None,
            panics,
            disturbed: None,
        }
    }

    fn start(&mut self, program: &str) -> anyhow::Result<()> {
        let server = Server::start_in(program, self.kind, &self.config, &self.environment)?;
        self.node.lives(Life { pid: server.pid(), http: server.http().to_owned() });
        self.server = Some(server);
        Ok(())
    }

    fn watch(&mut self, now: Instant, program: &str, tally: &Tally) {
        self.panics.look(now);
        let ended = self.server.as_mut().and_then(|server| server.ended().ok().flatten());
        if let Some(status) = ended {
            self.node.disturb();
            tally.died(&self.node.name, status.to_string(), self.panics.of_dead(now));
            self.server = None;
            self.disturbed = Some((What::Kill, now));
        } else if let Some(panic) = self.panics.outlived(now) {
            tally.died(&self.node.name, "a part of it ended, and it lives on".into(), Some(panic));
        }
        let Some((what, until)) = self.disturbed else { return };
        if now < until {
            return;
        }
        self.disturbed = None;
        match (what, &self.server) {
            (What::Kill, _) => {
                if let Err(error) = self.start(program) {
                    let panic = self.panics.of_dead(now);
                    tally.died(&self.node.name, format!("it did not come up: {error:#}"), panic);
                    self.disturbed = Some((What::Kill, now + AGAIN));
                    return;
                }
                self.node.settle(Duration::ZERO);
            }
            (What::Signal(_), Some(server)) => {
                // It fails only if the process has ended, which is seen next.
                let _ = signal(server.pid(), Signal::CONT);
                self.node.settle(STOPPED_SLACK);
            }
            (What::Signal(_), None) => self.node.settle(Duration::ZERO),
        }
    }

    /// Asks the process to end. Counts it as dead if it does not end, or not well.
    fn stop(&mut self, tally: &Tally) {
        let Some(mut server) = self.server.take() else { return };
        for signal in [Signal::CONT, Signal::TERM] {
            // It fails only if the process has ended, which is seen next.
            let _ = server.signal(signal);
        }
        let start = now();
        let ended = loop {
            match server.ended() {
                Ok(None) if start.elapsed() < END_DEADLINE => std::thread::sleep(Duration::from_millis(10)),
                Ok(ended) => break ended,
                Err(_) => break None,
            }
        };
        let how = match ended {
            Some(status) if status.success() => None,
            Some(status) => Some(format!("told to end: {status}")),
            None => Some(format!("told to end, it did not within {END_DEADLINE:?}")),
        };
        let panic = self.panics.of_dead(now());
        if how.is_some() || panic.is_some() {
            tally.died(&self.node.name, how.unwrap_or_else(|| "told to end".into()), panic);
        }
    }
}

fn socket(folder: &Path, name: &str, tenant: &str) -> PathBuf {
    folder.join(format!("{name}-{tenant}.sock"))
}

/// The configuration of a node called `name`, whose files begin with `files`. Nodes differ in when they write to disk and in the
/// number of their block threads.
fn node_config(
    folder: &Path,
    name: &str,
    files: &str,
    number: u16,
    coordinator: &str,
    arena_bytes: u64,
    plan: &NodePlan,
) -> String {
    let credentials = credential_files(folder, name);
    let tenants = TENANTS.map(|tenant| {
        format!(
            "[[tenants]]\nname = \"{tenant}\"\nsocket = \"{}\"\n",
            socket(folder, files, tenant).display()
        )
    });
    let write = WRITES[usize::from(number) % WRITES.len()];
    format!(
        "name = \"{name}\"\n[http]\nlisten = \"{ANY_PORT}\"\n\
         [host]\narena_bytes = {arena_bytes}\nextent_bytes = \"2MiB\"\n\
         [session]\nmax_window_bytes = \"4MiB\"\n{tenants}\
         [disk]\nfolder = \"{disk}\"\ncapacity_bytes = {disk_bytes}\nsegment_bytes = \"4MiB\"\nwrite = \"{write}\"\n\
         [cluster]\ncoordinator = \"{coordinator}\"\nlisten = \"{ANY_PORT}\"\nstaging_bytes = {staging}\n\
         block_threads = {block_threads}\nblocks_over_tcp = {blocks_over_tcp}\n{credentials}{more}",
        tenants = tenants.concat(),
        disk = folder.join(files).with_extension("disk").display(),
        disk_bytes = DISK_TIMES * arena_bytes,
        staging = arena_bytes / 8,
        block_threads = number % 3,
        blocks_over_tcp = number % 4 < 2,
        more = plan.config,
    )
}

const ANY_PORT: &str = "127.0.0.1:0";

/// When a node writes to its disk, by the node's number.
const WRITES: [&str; 4] = ["write_through", "write_through", "write_back", "write_through_selective"];

/// How long nodes may take to become members.
const JOIN_DEADLINE: Duration = Duration::from_secs(30);

/// How long a process may take to end.
const END_DEADLINE: Duration = Duration::from_secs(20);

/// Time after which a node that did not come up is started again.
const AGAIN: Duration = Duration::from_secs(5);

/// Time after a stop in which requests that were late meanwhile may still fail.
const STOPPED_SLACK: Duration = Duration::from_secs(1);
