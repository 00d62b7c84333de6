//! Tracks the engine processes behind the sessions until their exit.
//!
//! A closed socket proves nothing: mappings and transfers may live on. Only the exit of the process proves that nobody
//! touches its memory, and its pidfd reports the exit. A process without a pidfd opens no session: memory that it held could
//! never be used again.

mod socket_process;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use actix::Addr;
use actix_rt::task::JoinHandle;
use larder_core::Event;
use larder_core::store::ids::{ProcessId, TenantId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::watch;

use crate::actor::GpuActor;
use crate::tell::tell_each;

use socket_process::Exit;
pub use socket_process::{Identity, PeerError, SocketProcess};

/// The processes that have or had a session and are not known to be gone. Stays on one thread.
#[derive(Clone)]
pub struct Processes {
    known: Rc<RefCell<KnownProcesses>>,
    actors: Rc<[Addr<GpuActor>]>,
    most_lingering: u32,
}

#[derive(Default)]
struct KnownProcesses {
    processes: HashMap<ProcessId, Process>,
    by_identity: HashMap<(TenantId, Identity), ProcessId>,
    last: u32,
}

struct Process {
    tenant: TenantId,
    pidfd: Arc<OwnedFd>,
    sessions: Arc<AtomicU32>,
    /// Waits for its exit.
    watch: JoinHandle<()>,
    /// Whether it may have the node's memory: it had a session, or nothing tells it from processes that had one.
    is_counted: Arc<AtomicBool>,
    gone: watch::Sender<bool>,
}

/// A session's share in its process.
pub struct ProcessShare {
    /// The process.
    pub process: ProcessId,
    /// Turns true when the process is gone.
    pub gone: watch::Receiver<bool>,
    sessions: Arc<AtomicU32>,
    is_counted: Arc<AtomicBool>,
}

/// Why a process gets no session.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// Too many processes of the tenant have closed their sessions but still run.
    #[error(
        "{lingering} processes of this tenant closed their session but still run, and keep memory out of use: end them"
    )]
    TooManyLinger {
        /// Number of these processes.
        lingering: u32,
    },
    /// The system can watch no more processes.
    #[error("the node cannot watch this engine's process now: try again")]
    Watch(#[source] io::Error),
}

impl Processes {
    /// Starts without processes. The actors are told when a process is gone.
    pub fn new(actors: Vec<Addr<GpuActor>>, most_lingering: u32) -> Self {
        Self { known: Rc::default(), actors: actors.into(), most_lingering }
    }

    /// Notes a session of the process behind a socket.
    ///
    /// # Errors
    /// [`EnterError`]: nothing is noted.
    pub fn enter(&self, tenant: TenantId, peer: SocketProcess) -> Result<ProcessShare, EnterError> {
        let mut known = self.known.borrow_mut();
        let same = peer.identity.and_then(|identity| known.by_identity.get(&(tenant, identity)).copied());
        let alive = |id: &ProcessId| known.processes.get(id).is_some_and(|process| !process.has_exited());
        if let Some(id) = same.filter(alive) {
            return Ok(known.processes[&id].member(id));
        }
        known.forget_strangers(tenant);
        let lingers = |process: &&Process| {
            process.tenant == tenant
                && process.is_counted.load(Ordering::Acquire)
                && process.sessions.load(Ordering::Acquire) == 0
        };
        let lingering = known.processes.values().filter(lingers).count() as u32;
        if lingering >= self.most_lingering {
            return Err(EnterError::TooManyLinger { lingering });
        }
        let (pidfd, (gone, _)) = (Arc::new(peer.pidfd), watch::channel(false));
        let exit = Exit::of(Arc::clone(&pidfd)).map_err(EnterError::Watch)?;
        known.last += 1;
        let id = ProcessId(known.last);
        let watch = actix_rt::spawn(self.clone().wait_for_exit(id, exit));
        let is_counted = Arc::new(AtomicBool::new(peer.identity.is_none()));
        if let Some(identity) = peer.identity {
            known.by_identity.insert((tenant, identity), id);
        }
        let process = Process { tenant, pidfd, sessions: Arc::default(), watch, is_counted, gone };
        let member = process.member(id);
        known.processes.insert(id, process);
        Ok(member)
    }

    async fn wait_for_exit(self, id: ProcessId, exit: Exit) {
        if let Err(error) = exit.wait().await {
            tracing::error!(process = id.0, %error, "cannot watch a process: its memory stays quarantined until the node starts again");
            return;
        }
        let process = {
            let mut known = self.known.borrow_mut();
            known.by_identity.retain(|_, other| *other != id);
            known.processes.remove(&id)
        };
        // The sessions hear of the exit first, then the actors free the memory. The store works with any order.
        if let Some(process) = process {
            process.gone.send_replace(true);
        }
        tell_each(self.actors.iter().map(|actor| (actor, Event::ProcessGone(id)))).await;
    }
}

impl KnownProcesses {
    /// Forgets the processes of a tenant that got no session when they asked for one: they have no memory of the node.
    fn forget_strangers(&mut self, tenant: TenantId) {
        let is_stranger = |process: &Process| {
            process.tenant == tenant
                && !process.is_counted.load(Ordering::Acquire)
                && process.sessions.load(Ordering::Acquire) == 0
        };
        for (_, stranger) in self.processes.extract_if(|_, process| is_stranger(process)) {
            stranger.watch.abort();
        }
        let Self { processes, by_identity, .. } = self;
        by_identity.retain(|_, id| processes.contains_key(id));
    }
}

impl Process {
    fn member(&self, process: ProcessId) -> ProcessShare {
        self.sessions.fetch_add(1, Ordering::AcqRel);
        let (sessions, is_counted) = (Arc::clone(&self.sessions), Arc::clone(&self.is_counted));
        ProcessShare { process, gone: self.gone.subscribe(), sessions, is_counted }
    }

    /// Whether the process has exited, even if its exit was not handled yet.
    fn has_exited(&self) -> bool {
        let mut polled = [PollFd::new(&*self.pidfd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}

impl ProcessShare {
    /// Notes that the process gets a session: from now on it may keep the node's memory until it ends.
    pub fn has_session(&self) {
        self.is_counted.store(true, Ordering::Release);
    }
}

impl Drop for ProcessShare {
    fn drop(&mut self) {
        self.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    const TENANT: TenantId = TenantId(0);

    fn process() -> (Child, impl Fn(&Child) -> SocketProcess) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let as_peer = |child: &Child| {
            let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
            let identity = Some(Identity::Inode(child.id().into()));
            SocketProcess { pid: None, identity, pidfd }
        };
        (child, as_peer)
    }

    #[actix::test]
    async fn only_a_process_that_had_a_session_lingers_and_its_sessions_are_of_one_process() {
        let processes = Processes::new(Vec::new(), 1);
        let ((mut first, peer), (mut second, _), (mut third, _)) = (process(), process(), process());
        drop(processes.enter(TENANT, peer(&first)).unwrap());
        drop(processes.enter(TENANT, peer(&second)).unwrap());
        let mut known = Vec::new();
        for _ in 0..3 {
            let member = processes.enter(TENANT, peer(&first)).unwrap();
            member.has_session();
            known.push(member.process);
        }
        assert_eq!(known, [known[0]; 3], "without a number here too");
        assert_eq!(processes.known.borrow().processes.len(), 1, "others got no session");
        let refused = processes.enter(TENANT, peer(&third)).map(|member| member.process);
        assert!(matches!(refused, Err(EnterError::TooManyLinger { lingering: 1 })), "{refused:?}");
        for child in [&mut first, &mut second, &mut third] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
