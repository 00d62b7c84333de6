//! Why a node does not serve.

use std::net::SocketAddr;
use std::path::PathBuf;

use larder_device::DeviceError;

use crate::arena::MemoryError;
use crate::cluster::ClusterError;
use crate::session::BindError;

/// Why the node does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be used.
    #[error("cannot listen on {listen}: does another process use it?")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// A tenant's socket cannot be used.
    #[error("cannot listen on the socket {} of tenant `{tenant}`", path.display())]
    Socket {
        /// The tenant.
        tenant: String,
        /// The tenant's socket.
        path: PathBuf,
        /// The reason.
        source: BindError,
    },
    /// The memory of an arena cannot be taken.
    #[error("cannot make the arena of device {device}")]
    Arena {
        /// The actor's device.
        device: u16,
        /// The reason.
        source: MemoryError,
    },
    /// The configuration takes memory of a GPU that cannot be used.
    #[error(
        "[gpu] device_bytes takes memory of the GPU of device {device}, which this process cannot use; a container needs the driver's library and the GPU from its host"
    )]
    Gpu {
        /// The actor's device.
        device: u16,
        /// The reason.
        source: DeviceError,
    },
    /// Copy threads cannot be started.
    #[error("cannot start the copy threads of device {device}")]
    CopyPool {
        /// The actor's device.
        device: u16,
        /// The reason.
        source: std::io::Error,
    },
    /// The thread of an actor cannot be started.
    #[error("cannot start the thread of device {device}")]
    Thread {
        /// The actor's device.
        device: u16,
        /// The reason.
        source: std::io::Error,
    },
    /// Events cannot be published.
    #[error("cannot publish events on {listen}: set [kv_events] listen and replay_listen to free addresses")]
    KvEvents {
        /// The address.
        listen: SocketAddr,
        /// The reason.
        source: std::io::Error,
    },
    /// The lookup log cannot be written.
    #[error("cannot write the lookup log {}: set [record] path to a file that this user may write and nobody else writes", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The audit log cannot be written.
    #[error("cannot write the audit log {}: set [audit] path to a file that this user may write and nobody else writes", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The node cannot be a member of its cluster.
    #[error("cannot be a member of the cluster")]
    Cluster(#[from] ClusterError),
    /// The metrics contradict each other.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    /// An actor ended while the node served.
    #[error("the actor of device {0} failed: the log says where; start the node again")]
    Actor(u16),
    /// Serving HTTP failed.
    #[error("cannot serve HTTP on {http}")]
    Serve {
        /// The address.
        http: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

impl ServeError {
    /// Whether another start fails until somebody changes the configuration or the files that it names.
    pub fn is_the_askers(&self) -> bool {
        match self {
            Self::Cluster(error) => {
                matches!(error, ClusterError::Credentials(_) | ClusterError::SomebodyElse { .. })
            }
            Self::Socket { source, .. } => matches!(source, BindError::NotASocket(_)),
            _ => false,
        }
    }
}
