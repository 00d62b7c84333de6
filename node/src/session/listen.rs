//! One socket a tenant: whoever can open it is that tenant.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use actix::Addr;
use actix_rt::ArbiterHandle;
use larder_client::trace::Sampler;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};

use super::hello;
use crate::actor::GpuActor;
use crate::metrics::SharedMetrics;
use crate::processes::Processes;
use crate::store::ids::TenantId;

/// What all sessions of a node share. Lives on the thread that accepts.
#[derive(Clone)]
pub struct SessionSettings {
    /// The node's name.
    pub node: String,
    /// Its actors, by device number.
    pub actors: Vec<SessionActor>,
    /// The largest write window.
    pub max_window_bytes: u64,
    /// Whether engines write straight into the arena.
    pub trust_engines: bool,
    /// Sessions of one tenant at a time.
    pub max_sessions: u32,
    /// Who is behind them.
    pub processes: Processes,
    /// Where they are counted.
    pub metrics: SharedMetrics,
    /// Which of their requests are traced.
    pub sampler: Sampler,
    /// Turns true when the node stops.
    pub stopping: watch::Receiver<bool>,
}

/// An actor as sessions see it.
#[derive(Clone)]
pub struct SessionActor {
    /// Its mailbox.
    pub address: Addr<GpuActor>,
    /// Its thread, on which its sessions run.
    pub arbiter: ArbiterHandle,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// Changes when a fault ended all of its sessions.
    pub lives: watch::Receiver<u64>,
    /// Its open sessions.
    pub sessions: Arc<AtomicU32>,
}

/// A tenant's socket.
pub struct Listener {
    tenant: TenantId,
    name: String,
    path: PathBuf,
    socket: UnixListener,
}

/// A socket that is being listened on; dropping it takes the socket's file away.
pub struct Listening {
    path: PathBuf,
    task: actix_rt::task::JoinHandle<()>,
}

impl Listener {
    /// Binds a tenant's socket. Needs a tokio runtime.
    ///
    /// # Errors
    /// Where another node listens there, or the folder cannot be written.
    pub fn bind(tenant: TenantId, name: &str, path: &Path) -> io::Result<Self> {
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node serves this socket"));
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))?;
        Ok(Self { tenant, name: name.to_owned(), path: path.to_owned(), socket })
    }

    /// Starts to accept, on the thread of the caller.
    #[must_use]
    pub fn start(self, settings: SessionSettings) -> Listening {
        let path = self.path.clone();
        Listening { path, task: actix_rt::spawn(self.accept(settings)) }
    }

    async fn accept(self, settings: SessionSettings) {
        let tenant: Arc<str> = self.name.into();
        let sessions = Arc::new(Semaphore::new(settings.max_sessions as usize));
        let greetings = Arc::new(Semaphore::new(MOST_GREETINGS));
        loop {
            let Ok(greeting) = Arc::clone(&greetings).acquire_owned().await else { return };
            match self.socket.accept().await {
                Ok((socket, _)) => {
                    let opening = hello::open(
                        socket,
                        self.tenant,
                        Arc::clone(&tenant),
                        Arc::clone(&sessions),
                        settings.clone(),
                    );
                    actix_rt::spawn(async move {
                        opening.await;
                        drop(greeting);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, socket = %self.path.display(), "cannot accept a session");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, socket = %self.path.display(), "the socket's file was gone already");
        }
    }
}

/// The owner and its group may connect.
const SOCKET_MODE: u32 = 0o660;

/// Connections that have not said hello yet.
const MOST_GREETINGS: usize = 64;

/// After a failed accept (no descriptor left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
