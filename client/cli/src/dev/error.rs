//! Why a development cluster does not run.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use super::runtime_dir::RuntimeDirError;
use crate::failure::TO_RESTART;

/// Why a development cluster does not run.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// The options are impossible.
    #[error("{what}")]
    Options {
        /// The fault and its remedy.
        what: String,
    },
    /// The system does not tell the path of this program.
    #[error("cannot find the file of this program, from which it starts the cluster's processes")]
    Program {
        /// The system's error.
        source: std::io::Error,
    },
    /// There is no directory of this user's own.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// A file of the cluster cannot be written or read.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The sockets' paths would be longer than the kernel allows.
    #[error(
        "{} is too long for the path of a socket ({} bytes, at most {MAX_SOCKET_PATH_BYTES}): choose a shorter --dir",
        path.display(), path.as_os_str().len()
    )]
    SocketPath {
        /// The path.
        path: PathBuf,
    },
    /// No development cluster is running, or it has not told its address.
    #[error("no development cluster is running: start one with `larder dev`, or name a server")]
    NotRunning,
    /// No certificate can be made.
    #[error("cannot make the cluster's certificates")]
    Certificate {
        /// Why.
        source: larder_net::quic::ca::AuthorityError,
    },
    /// The coordinator does not tell its address for nodes.
    #[error("the coordinator does not print its address for nodes")]
    NoPeerAddress,
    /// The nodes do not become members.
    #[error(
        "only {members} of {nodes} nodes are members after {after:?}; their logs say more: use --dir to keep them"
    )]
    NotJoined {
        /// Members.
        members: usize,
        /// Nodes.
        nodes: usize,
        /// Time that they had.
        after: Duration,
    },
    /// A process did not start.
    #[error("cannot start {name}")]
    Spawn {
        /// The process's name.
        name: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A process ended before it was ready, or later by itself.
    #[error(transparent)]
    Died(#[from] Died),
    /// A process takes too long to start.
    #[error("{name} is not ready after {after:?}; {log}")]
    NotReady {
        /// The process's name.
        name: String,
        /// Time that it had.
        after: Duration,
        /// The end of its log.
        log: LogTail,
    },
    /// A process printed something else than its ready line.
    #[error("{name} printed `{line}` instead of its addresses")]
    NotAReadyLine {
        /// The process's name.
        name: String,
        /// The printed line.
        line: String,
    },
    /// A process did not stop when told to.
    #[error("{name} did not stop within {after:?} and was killed; {log}")]
    Killed {
        /// The process's name.
        name: String,
        /// Time that it had.
        after: Duration,
        /// The end of its log.
        log: LogTail,
    },
    /// Another cluster uses the directory.
    #[error("another cluster runs in {}: choose another --dir, or stop it", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
}

/// A process of the cluster ended, though it was not told to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Died {
    /// The process's name.
    pub name: String,
    /// The exit status, if the system tells it.
    pub status: Option<ExitStatus>,
    /// The end of its log.
    pub log: LogTail,
}

/// A process of the cluster died after too many restarts, so that the cluster ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", died.followed_by(": it is not started again, since processes of the cluster were restarted too often in the last minute"))]
pub struct GaveUp {
    /// The last death.
    pub died: Died,
}

/// The last lines of a process's log. The log itself goes with the cluster's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogTail {
    /// The lines; empty if there are none.
    pub lines: String,
}

impl Died {
    /// Whether the process has drained, and asks to be started again.
    pub(crate) fn is_to_restart(&self) -> bool {
        self.status.and_then(|status| status.code()) == Some(TO_RESTART.into())
    }

    /// The death and its consequence, ahead of the log's many lines.
    pub(super) fn followed_by(&self, consequence: &str) -> String {
        let status = self.status.map(|status| format!(" ({status})")).unwrap_or_default();
        format!("{} died{status}{consequence}; {}", self.name, self.log)
    }
}

impl fmt::Display for Died {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.followed_by(""))
    }
}

impl fmt::Display for LogTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lines.is_empty() {
            return write!(f, "its log is empty");
        }
        write!(f, "its log ends:")?;
        self.lines.lines().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// The longest path of a Unix socket: `sun_path` less the final zero.
pub(super) const MAX_SOCKET_PATH_BYTES: usize = 107;
