//! One socket per tenant: a process that can open the socket acts as that tenant.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::Addr;
use actix_rt::ArbiterHandle;
use larder_core::store::ids::TenantId;
use larder_net::lock;
use larder_net::seldom::Seldom;
use larder_net::trace::Sampler;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};

use super::connection::Connection;
use super::greetings::{Greetings, Source};
use super::hello::{self, Newcomer};
use super::socket_file::{self, BindError, SocketFile};
use crate::accept::NotAccepted;
use crate::actor::GpuActor;
use crate::clock::Clock;
use crate::described::Descriptions;
use crate::limits::SessionLimits;
use crate::metrics::SharedMetrics;
use crate::processes::Processes;
use crate::window::WindowBudget;

/// The settings of all sessions of a node. Stays on the thread that accepts.
#[derive(Clone)]
pub struct SessionSettings {
    /// The node's name.
    pub node: String,
    /// The node's actors, by device number.
    pub actors: Vec<SessionActor>,
    /// The limits of each session.
    pub limits: SessionLimits,
    /// The places of all tenants' sessions.
    pub places: Arc<Semaphore>,
    /// The processes behind the sessions.
    pub processes: Processes,
    /// The counters of sessions.
    pub metrics: SharedMetrics,
    /// Takes engines' descriptions of chunks.
    pub descriptions: Descriptions,
    /// Decides which requests are traced.
    pub sampler: Sampler,
    /// Turns true when the node stops.
    pub stopping: watch::Receiver<bool>,
}

/// An actor as sessions see it.
#[derive(Clone)]
pub struct SessionActor {
    /// The actor's mailbox.
    pub address: Addr<GpuActor>,
    /// The actor's thread, on which its sessions run.
    pub arbiter: ArbiterHandle,
    /// The actor's NUMA node.
    pub numa_node: Option<u32>,
    /// Changes when a fault ended all of the actor's sessions.
    pub lives: watch::Receiver<u64>,
    /// Number of the actor's sessions that are open or being opened.
    pub sessions: Arc<AtomicU32>,
}

/// Counts a session among its actor's sessions until it is dropped.
pub(super) struct CountedSession(Arc<AtomicU32>);

impl CountedSession {
    pub(super) fn of(actor: &SessionActor) -> Self {
        actor.sessions.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&actor.sessions))
    }
}

impl Drop for CountedSession {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The tenant that sessions are opened for.
#[derive(Clone)]
pub(super) struct Host {
    pub(super) tenant: TenantId,
    pub(super) name: Arc<str>,
    pub(super) places: Places,
    /// The budget of the tenant's write windows.
    pub(super) windows: WindowBudget,
    /// Turns true when the tenant leaves.
    pub(super) leaves: watch::Receiver<bool>,
}

/// The places of a tenant's sessions and other connections, and the lines about them. They are the same for each listener of the
/// tenant. Cloning shares.
#[derive(Clone)]
pub struct Places {
    pub(super) sessions: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    lines: Arc<Mutex<Lines>>,
}

/// The lines about a tenant's sessions in the log. A tenant can open and close thousands of sessions in a second.
struct Lines {
    clock: Clock,
    refused: Seldom,
    opened: Seldom,
    ended: Seldom,
}

impl Places {
    /// Makes a tenant's places.
    pub fn new(limits: &SessionLimits) -> Self {
        let (sessions, others) = (limits.max_sessions as usize, limits.max_other_connections as usize);
        Self {
            sessions: Arc::new(Semaphore::new(sessions)),
            connections: Arc::new(Semaphore::new(sessions + others)),
            lines: Arc::new(Mutex::new(Lines {
                clock: Clock::start(),
                refused: Seldom::new(QUIET),
                opened: Seldom::new(QUIET).after(LINES_A_MINUTE),
                ended: Seldom::new(QUIET).after(LINES_A_MINUTE),
            })),
        }
    }

    /// The number of refusals that were not logged before this one; `None` if this one is not logged either.
    pub(super) fn says_refused(&self) -> Option<u64> {
        self.says(|lines| &mut lines.refused)
    }

    /// As [`Self::says_refused`], of sessions that were opened.
    pub(super) fn says_opened(&self) -> Option<u64> {
        self.says(|lines| &mut lines.opened)
    }

    /// As [`Self::says_refused`], of sessions that ended.
    pub(super) fn says_ended(&self) -> Option<u64> {
        self.says(|lines| &mut lines.ended)
    }

    fn says(&self, which: impl Fn(&mut Lines) -> &mut Seldom) -> Option<u64> {
        let lines = &mut *lock(&self.lines);
        let now = lines.clock.elapsed();
        which(lines).says(now)
    }
}

/// A tenant's socket.
pub struct Listener {
    tenant: TenantId,
    name: String,
    socket: UnixListener,
    file: SocketFile,
}

/// A socket that accepts connections. Dropping it removes the socket's file.
pub struct Listening {
    file: SocketFile,
    task: actix_rt::task::JoinHandle<()>,
}

impl Listener {
    /// Binds a tenant's socket. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`]: the file at `path` is no socket, another process listens there, or the folder cannot be written.
    pub fn bind(tenant: TenantId, name: &str, path: &Path) -> Result<Self, BindError> {
        let (socket, file) = socket_file::bind(path)?;
        Ok(Self { tenant, name: name.to_owned(), socket, file })
    }

    /// The same listener, for the tenant with this number.
    #[must_use]
    pub fn of(self, tenant: TenantId) -> Self {
        Self { tenant, ..self }
    }

    /// Starts to accept, on the thread of the caller. The tenant's sessions take their `places`, and their windows from
    /// the budget `windows`; they end when `leaves` turns true.
    #[must_use]
    pub fn start(
        self,
        settings: SessionSettings,
        places: Places,
        windows: WindowBudget,
        leaves: watch::Receiver<bool>,
    ) -> Listening {
        let Self { tenant, name, socket, file } = self;
        let host = Host { tenant, name: name.into(), places, windows, leaves };
        Listening { file, task: actix_rt::spawn(accept(host, socket, settings)) }
    }
}

impl Listening {
    /// Whether the socket's file is still there, so that engines find it.
    pub(crate) fn is_there(&self) -> bool {
        self.file.is_there()
    }

    /// Leaves the socket's file alone from now on: another socket stands there.
    pub(crate) fn abandon(&mut self) {
        self.file.abandon();
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts connections forever.
async fn accept(host: Host, socket: UnixListener, settings: SessionSettings) {
    let (greetings, mut not_accepted) = (Greetings::default(), NotAccepted::new());
    loop {
        // Nothing ever closes the semaphore.
        let Ok(permit) = Arc::clone(&host.places.connections).acquire_owned().await else { return };
        let accepted = socket.accept().await;
        match accepted.and_then(|(accepted, _)| Ok((Connection::of(&accepted, permit)?, accepted))) {
            Ok((connection, socket)) => {
                not_accepted.accepted();
                let place = greetings.enter(Source::of(&socket));
                let newcomer = Newcomer { socket, connection, place, host: host.clone() };
                actix_rt::spawn(hello::open(newcomer, settings.clone()));
            }
            Err(error) => {
                tokio::time::sleep(not_accepted.failed(&format!("sessions of {}", host.name), error)).await;
            }
        }
    }
}

/// At most one session that is refused is logged in this time.
const QUIET: Duration = Duration::from_secs(1);

/// Lines of a tenant's opened sessions, and of its ended sessions, that are logged in each minute in any case.
const LINES_A_MINUTE: u64 = 100;
