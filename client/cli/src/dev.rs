//! A cluster for development: a coordinator and nodes as processes of this machine.

pub mod error;
pub mod options;

mod arena;
mod child;
mod files;
mod runtime_dir;

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::{join_all, select_all, try_join_all};

pub use arena::DEFAULT_ARENA_BYTES;
pub(crate) use child::ReadyLine;
pub use error::{DevError, Died, LogTail};
pub use files::Announcement;
pub use options::{DevOptions, Policy};
pub use runtime_dir::{RuntimeDirError, runtime_dir};

use self::child::Child;
use self::files::{Files, NodeFile};
use crate::clock::now;
use crate::cluster::{Addresses, NodeAddress};

/// A running development cluster.
///
/// Its processes end with it: [`Self::stop`] ends them in order, dropping it kills them, and so does the kernel when the
/// thread that started them ends, however that comes.
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
    /// [`DevError`]; nothing runs on, and no file stays but in a directory that was asked for.
    ///
    /// # Cancel safety
    /// Dropped, it kills what it had started.
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

    /// Where its processes can be reached.
    #[must_use]
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// How long it took to start.
    #[must_use]
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// Where its config files, sockets and logs are.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.files.dir()
    }

    /// The log files of its processes.
    pub fn logs(&self) -> impl Iterator<Item = &Path> {
        self.children.iter().map(Child::log)
    }

    /// Ready when one of the processes ends, which none does by itself.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn died(&mut self) -> Died {
        let (died, ..) = select_all(self.children.iter_mut().map(|child| Box::pin(child.died()))).await;
        died
    }

    /// Tells all processes to stop, waits for them, and kills those that take longer than [`STOP_GRACE`].
    ///
    /// # Errors
    /// [`DevError::Killed`] names a process that had to be killed.
    ///
    /// # Cancel safety
    /// Dropped, it kills what still runs.
    pub async fn stop(mut self) -> Result<(), DevError> {
        self.announcement.withdraw();
        for child in &self.children {
            child.ask_to_stop();
        }
        let stopped = join_all(self.children.iter_mut().map(Child::stopped)).await;
        stopped.into_iter().collect()
    }
}

/// How long a process may take to stop.
pub const STOP_GRACE: Duration = Duration::from_secs(5);

async fn start_processes(options: &DevOptions, files: &Files) -> Result<(Addresses, Vec<Child>), DevError> {
    let starting = (0..options.nodes).map(async |number| {
        let name = format!("node-{number}");
        let socket = files.socket(&name)?;
        let config = files.write_config(&name, &NodeFile::new(&name, options, socket))?;
        Child::start(options, "node", &name, &config, files.log(&name)).await
    });
    let mut children = Vec::new();
    let mut addresses = Addresses::default();
    for (child, ready) in try_join_all(starting).await? {
        addresses.nodes.push(NodeAddress {
            name: child.name().to_owned(),
            http: ready.http,
            sockets: ready.sockets,
        });
        children.push(child);
    }
    let config = files.write_config(COORDINATOR, &files::coordinator_config(&addresses))?;
    let (coordinator, ready) =
        Child::start(options, COORDINATOR, COORDINATOR, &config, files.log(COORDINATOR)).await?;
    addresses.coordinator = Some(ready.http);
    children.push(coordinator);
    Ok((addresses, children))
}

/// The newest development cluster of this user on this machine.
///
/// # Errors
/// [`DevError`]: there is none, or what names it cannot be read.
pub fn newest() -> Result<Addresses, DevError> {
    Announcement::read(&runtime_dir()?)
}

const COORDINATOR: &str = "coordinator";

/// The tenant of a development cluster.
pub const TENANT: &str = "default";

/// The program that starts itself again as a server.
fn this_program() -> Result<PathBuf, DevError> {
    std::env::current_exe().map_err(|source| DevError::Program { source })
}
