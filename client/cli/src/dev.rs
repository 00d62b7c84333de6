//! A cluster for development: a coordinator and nodes as processes of this machine.

pub mod error;
pub mod options;

mod arena;
mod child;
mod disk;
mod files;
mod runtime_dir;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::future::{join_all, select_all, try_join_all};
use larder_net::quic::CredentialFiles;
use larder_node::Status;
use larder_protocol::identity::Role;

pub use crate::cluster::TENANT;
pub use arena::DEFAULT_ARENA_BYTES;
pub(crate) use child::{DrainedLine, ReadyLine};
pub use disk::DevDisk;
pub use error::{DevError, Died, GaveUp, LogTail};
pub use files::Announcement;
pub use options::DevOptions;
pub use runtime_dir::{RuntimeDirError, runtime_dir};

use self::child::{Child, Spec};
use self::files::{Files, node_config};
use crate::clock::now;
use crate::cluster::{Addresses, NodeAddress};
use crate::http;

/// A running development cluster.
///
/// [`Self::stop`] ends its processes in order, and dropping it kills them. The kernel also kills them when the thread that
/// started them ends, for whatever reason.
#[derive(Debug)]
pub struct DevCluster {
    addresses: Addresses,
    children: Vec<Child>,
    announcement: Announcement,
    ready_after: Duration,
    // Last: the directory goes when nobody writes there any more.
    files: Files,
}

impl DevCluster {
    /// Starts the processes and waits until all of them are ready. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// [`DevError`]. No process is left, and files stay only in a directory that the options name.
    ///
    /// # Cancel safety
    /// If the future is dropped, it kills the processes that it had started.
    pub async fn start(options: DevOptions) -> Result<Self, DevError> {
        let started = now();
        options.check()?;
        let runtime_dir = match &options.runtime_dir {
            Some(dir) => {
                runtime_dir::make_private(dir)?;
                dir.clone()
            }
            None => runtime_dir()?,
        };
        let files = Files::create(options.dir.as_deref(), &runtime_dir)?;
        let (addresses, children) = start_processes(&options, &files).await?;
        let announcement = Announcement::publish(&runtime_dir, files.dir(), &addresses)?;
        Ok(Self { addresses, children, announcement, ready_after: now() - started, files })
    }

    /// An admin's certificate.
    pub fn admin(&self) -> CredentialFiles {
        admin_in(self.files.dir())
    }

    /// Waits until every node has a table of all nodes.
    ///
    /// # Errors
    /// [`DevError::NotJoined`] if they take longer than [`JOIN_TIMEOUT`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn joined(&self) -> Result<(), DevError> {
        if self.addresses.coordinator.is_none() {
            return Ok(());
        }
        let (start, nodes) = (now(), self.addresses.nodes.len());
        loop {
            let seen = self.addresses.nodes.iter().map(|node| members_in_table_of(node.http));
            let members = join_all(seen).await.into_iter().min().unwrap_or(0);
            if members >= nodes {
                return Ok(());
            }
            if now() - start > JOIN_TIMEOUT {
                return Err(DevError::NotJoined { members, nodes, after: JOIN_TIMEOUT });
            }
            tokio::time::sleep(JOIN_POLL).await;
        }
    }

    /// The console's address, with the token that changes nodes; `None` if there is no coordinator.
    pub fn console(&self) -> Option<String> {
        let http = self.addresses.coordinator?;
        let token = std::fs::read_to_string(self.files.console_token()).ok()?;
        Some(format!("http://{http}/#token={token}"))
    }

    /// The addresses of its processes.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Time that the cluster took to start.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// The folder of its configuration files, sockets and logs.
    pub fn dir(&self) -> &Path {
        self.files.dir()
    }

    /// The log files of its processes.
    pub fn logs(&self) -> impl Iterator<Item = &Path> {
        self.children.iter().map(Child::log)
    }

    /// Restarts processes that die. Returns after too many restarts in a short time.
    ///
    /// # Cancel safety
    /// If the future is dropped while it restarts a process, this process stays out.
    pub async fn supervise(&mut self) -> GaveUp {
        let mut recent = Restarts::default();
        loop {
            let ended = self.children.iter_mut().map(|child| Box::pin(child.died()));
            let (died, number, _) = select_all(ended).await;
            let told = died.followed_by(": it is started again");
            if died.is_to_restart() {
                tracing::info!("{told}");
            } else {
                let Some(pause) = recent.next(now()) else { return GaveUp { died } };
                tracing::warn!("{told}");
                tokio::time::sleep(pause).await;
            }
            while let Err(error) = self.children[number].restart().await {
                let Some(pause) = recent.next(now()) else { return GaveUp { died } };
                tracing::warn!(%error, "a process of the cluster does not start again: the next attempt follows");
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Names and ids of the cluster's processes.
    pub fn pids(&self) -> Vec<(String, Option<u32>)> {
        self.children.iter().map(|child| (child.name().to_owned(), child.pid())).collect()
    }

    /// Tells all processes to stop, the coordinator after the nodes, so that each node leaves the cluster. Waits for them, and
    /// kills each process that takes longer than [`STOP_GRACE`].
    ///
    /// # Errors
    /// [`DevError::Killed`] names a process that had to be killed.
    ///
    /// # Cancel safety
    /// If the future is dropped, it kills the processes that still run.
    pub async fn stop(mut self) -> Result<(), DevError> {
        self.announcement.withdraw();
        let (coordinators, nodes) =
            self.children.split_at_mut(usize::from(self.addresses.coordinator.is_some()));
        let mut stopped = Vec::new();
        for children in [nodes, coordinators] {
            children.iter().for_each(Child::ask_to_stop);
            stopped.extend(join_all(children.iter_mut().map(Child::stopped)).await);
        }
        stopped.into_iter().collect()
    }
}

/// Time in which a process must stop.
pub const STOP_GRACE: Duration = Duration::from_secs(5);

/// Times of the latest restarts.
#[derive(Debug, Default)]
struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Pause before the next restart; `None` if there were too many.
    fn next(&mut self, now: Instant) -> Option<Duration> {
        while self.0.front().is_some_and(|&then| now - then > RESTART_MEMORY) {
            self.0.pop_front();
        }
        let lately = u32::try_from(self.0.len()).ok().filter(|&lately| lately < MAX_RESTARTS)?;
        self.0.push_back(now);
        Some(if lately == 0 { Duration::ZERO } else { RESTART_PAUSE * 2_u32.pow(lately - 1) })
    }
}

async fn start_processes(options: &DevOptions, files: &Files) -> Result<(Addresses, Vec<Child>), DevError> {
    let authority = files.create_authority()?;
    let spec = |server, name: &str, config| Spec {
        program: options.program.clone(),
        server,
        name: name.to_owned(),
        config,
        log: files.log(name),
    };
    files.issue(&authority, Role::Admin, ADMIN)?;
    files.create_console_token()?;
    let credentials = files.issue(&authority, Role::Coordinator, COORDINATOR)?;
    let config = files.write_config(COORDINATOR, &files.coordinator(credentials.clone(), None, options))?;
    files.forget_members()?;
    let (coordinator, ready) = Child::start(spec(COORDINATOR, COORDINATOR, config)).await?;
    files.write_config(COORDINATOR, &files.coordinator(credentials, Some(&ready), options))?;
    let peer = ready.peer.ok_or(DevError::NoPeerAddress)?;
    let starting = (0..options.nodes).map(async |number| {
        let name = format!("node-{number}");
        let socket = files.socket(&name)?;
        let credentials = files.issue(&authority, Role::Node, &name)?;
        let own = options.of_node(number);
        let file = |http| node_config(&name, &own, socket.clone(), peer, credentials.clone(), http);
        let config = files.write_config(&name, &file(None))?;
        let (child, ready) = Child::start(spec("node", &name, config)).await?;
        files.write_config(&name, &file(Some(ready.http)))?;
        Ok::<_, DevError>((child, ready))
    });
    let mut children = vec![coordinator];
    let mut addresses = Addresses { coordinator: Some(ready.http), nodes: Vec::new() };
    for (child, ready) in try_join_all(starting).await? {
        let name = child.name().to_owned();
        addresses.nodes.push(NodeAddress { name, http: ready.http, sockets: ready.sockets });
        children.push(child);
    }
    Ok((addresses, children))
}

/// The number of members in the partition table that a node follows; 0 if it does not answer yet.
async fn members_in_table_of(node: SocketAddr) -> usize {
    let asked = tokio::task::spawn_blocking(move || http::get_json::<Status>(&node, "/status"));
    let status = asked.await.ok().and_then(Result::ok);
    status.and_then(|status| status.cluster).map_or(0, |cluster| cluster.members)
}

/// The newest development cluster of this user on this machine.
///
/// # Errors
/// [`DevError`] if there is no cluster, or its file cannot be read.
pub fn newest() -> Result<Addresses, DevError> {
    Announcement::read(&runtime_dir()?)
}

/// An admin's certificate for the newest development cluster of this user on this machine.
///
/// # Errors
/// [`DevError`] if there is no cluster, or its file cannot be read.
pub fn newest_admin() -> Result<CredentialFiles, DevError> {
    let dir = Announcement::dir_of_newest(&runtime_dir()?)?;
    Ok(admin_in(&dir))
}

/// The admin's certificate in a cluster's folder.
fn admin_in(dir: &Path) -> CredentialFiles {
    let [ca, certificate, key] = ["ca.pem", "admin.pem", "admin.key"].map(|name| dir.join(name));
    CredentialFiles { ca, certificate, key }
}

/// Time in which nodes must become members.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(15);
const JOIN_POLL: Duration = Duration::from_millis(10);

/// Restarts within [`RESTART_MEMORY`]. After this number, a process that dies is not started again.
const MAX_RESTARTS: u32 = 5;
const RESTART_MEMORY: Duration = Duration::from_secs(60);
const RESTART_PAUSE: Duration = Duration::from_millis(250);

const COORDINATOR: &str = "coordinator";
const ADMIN: &str = "admin";

/// The program that starts itself again as a server.
fn this_program() -> Result<PathBuf, DevError> {
    std::env::current_exe().map_err(|source| DevError::Program { source })
}
