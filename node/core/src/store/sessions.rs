//! Sessions, the processes behind them, and the memory that vanished processes may still touch.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use larder_protocol::ChunkHash;

use super::ids::{ChunkId, NamespaceId, OrderId, ProcessId, SessionId, TenantId};
use crate::Millis;

/// Every open session and every process that is not known to be gone.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    open: BTreeMap<SessionId, Session>,
    processes: BTreeMap<ProcessId, Process>,
    next: u32,
}

/// One open session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) tenant: TenantId,
    pub(crate) process: ProcessId,
    pub(crate) window_bytes: u64,
    /// Whether it asks for an operator.
    pub(crate) is_observer: bool,
    pub(crate) namespaces: BTreeMap<NamespaceId, Box<[u16]>>,
    pub(crate) leases: BTreeMap<u64, Lease>,
    pub(crate) leased_blocks: u64,
    pub(crate) follows: BTreeSet<u64>,
    pub(crate) gathers: BTreeSet<u64>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) reserved_bytes: u64,
    /// Extents whose memory the session was given.
    pub(crate) extents: HashSet<u32>,
}

/// Chunks that a session may read.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) namespace: NamespaceId,
    pub(crate) chunks: Box<[ChunkId]>,
    /// The names under which the chunks were leased.
    pub(crate) hashes: Box<[ChunkHash]>,
    pub(crate) blocks: u64,
}

/// Room for chunks that a session means to write.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) namespace: NamespaceId,
    /// The slices that the session writes.
    pub(crate) slices: Box<[u16]>,
    pub(crate) deadline: Millis,
    /// The chunks to write, by position in the reserved chain.
    pub(crate) items: Vec<Item>,
    pub(crate) bytes: u64,
    /// Number of the attempt at a hand-over; 0 for ordinary writing.
    pub(crate) attempt: u64,
    /// Whether its chunks were purged meanwhile: committed chunks are not kept.
    pub(crate) is_void: bool,
}

/// One chunk of a reservation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Item {
    pub(crate) position: u32,
    pub(crate) chunk: ChunkId,
    pub(crate) state: ItemState,
}

/// The state of one reserved chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ItemState {
    /// The session may write and commit it.
    Reserved,
    /// The chunk's bytes are being copied.
    Copying(OrderId),
    /// The chunk is committed, or the copy failed.
    Done,
}

/// A process that has, or had, sessions.
#[derive(Debug, Default)]
pub(crate) struct Process {
    sessions: u32,
    is_gone: bool,
    /// Chunks of leases and follows whose session ended before they were released, each with one claim.
    pub(crate) orphaned: BTreeSet<ChunkId>,
    /// Extents whose memory it was given.
    extents: HashSet<u32>,
}

impl Sessions {
    /// An empty set, whose numbers continue from `before`.
    pub(crate) fn after(before: &Self) -> Self {
        Self { next: before.next, ..Self::default() }
    }

    /// The open sessions.
    pub(crate) fn ids(&self) -> Vec<SessionId> {
        self.open.keys().copied().collect()
    }

    /// Processes that were given an extent's memory and are not known to be gone.
    pub(crate) fn shown(&self, extent: u32) -> impl Iterator<Item = ProcessId> {
        let living = self.processes.iter().filter(|(_, process)| !process.is_gone);
        living.filter(move |(_, process)| process.extents.contains(&extent)).map(|(&id, _)| id)
    }

    /// Opens a session of `process`.
    pub(crate) fn open(&mut self, tenant: TenantId, process: ProcessId, window_bytes: u64) -> SessionId {
        self.next += 1;
        let id = SessionId(self.next);
        self.processes.entry(process).or_default().sessions += 1;
        let session = Session {
            tenant,
            process,
            window_bytes,
            is_observer: false,
            namespaces: BTreeMap::new(),
            leases: BTreeMap::new(),
            leased_blocks: 0,
            follows: BTreeSet::new(),
            gathers: BTreeSet::new(),
            reservations: BTreeMap::new(),
            reserved_bytes: 0,
            extents: HashSet::new(),
        };
        self.open.insert(id, session);
        id
    }

    /// An open session.
    pub(crate) fn get(&self, id: SessionId) -> Option<&Session> {
        self.open.get(&id)
    }

    /// Mutable access to an open session.
    pub(crate) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.open.get_mut(&id)
    }

    /// Takes a session out; its process stays until [`Sessions::process_gone`].
    pub(crate) fn close(&mut self, id: SessionId) -> Option<Session> {
        let session = self.open.remove(&id)?;
        if let Some(process) = self.processes.get_mut(&session.process) {
            process.sessions -= 1;
            if process.is_gone && process.sessions == 0 {
                self.processes.remove(&session.process);
            }
        }
        Some(session)
    }

    /// A process that may still touch its memory; `None` if it is known to be gone.
    pub(crate) fn living(&mut self, process: ProcessId) -> Option<&mut Process> {
        self.processes.get_mut(&process).filter(|process| !process.is_gone)
    }

    /// Notes that a process is gone, and returns the memory that it might have touched. Its open sessions stay until they are
    /// closed.
    pub(crate) fn process_gone(&mut self, process: ProcessId) -> Option<Process> {
        let known = self.processes.get_mut(&process)?;
        let sessions = known.sessions;
        let what_it_held = std::mem::take(known);
        if sessions == 0 {
            self.processes.remove(&process);
        } else {
            *known = Process { sessions, is_gone: true, ..Process::default() };
        }
        Some(what_it_held)
    }

    /// Notes that a session is about to be given an extent's memory; returns whether it is the first time.
    pub(crate) fn show_extent(&mut self, id: SessionId, extent: u32) -> bool {
        let Some(session) = self.open.get_mut(&id) else { return false };
        let is_new = session.extents.insert(extent);
        if is_new && let Some(process) = self.processes.get_mut(&session.process) {
            process.extents.insert(extent);
        }
        is_new
    }

    /// Notes that a session was not given an extent's memory after all. Its process may have the memory from another session.
    pub(crate) fn was_not_shown(&mut self, id: SessionId, extent: u32) {
        self.open.get_mut(&id).into_iter().for_each(|session| _ = session.extents.remove(&extent));
    }

    /// Takes out such orphaned chunks, once for each process.
    pub(crate) fn take_orphaned(&mut self, is_such: impl Fn(ChunkId) -> bool) -> Vec<ChunkId> {
        let mut taken = Vec::new();
        for process in self.processes.values_mut() {
            let first = taken.len();
            taken.extend(process.orphaned.iter().copied().filter(|&chunk| is_such(chunk)));
            taken[first..].iter().for_each(|chunk| _ = process.orphaned.remove(chunk));
        }
        taken
    }

    /// Whether every process that was given this extent's memory is gone.
    pub(crate) fn left_by_all(&self, extent: u32) -> bool {
        self.processes.values().all(|process| process.is_gone || !process.extents.contains(&extent))
    }

    /// Notes that the extent has new memory, which nobody was given yet.
    pub(crate) fn forget_extent(&mut self, extent: u32) {
        self.open.values_mut().for_each(|session| _ = session.extents.remove(&extent));
        self.processes.values_mut().for_each(|process| _ = process.extents.remove(&extent));
    }

    /// Reservations whose deadline has passed at `now`, the oldest first: their order decides which chunks are evicted. A session's
    /// earlier reservations have earlier deadlines; if a reload makes the time shorter, its later ones wait for them.
    pub(crate) fn lapsed(&self, now: Millis) -> Vec<(SessionId, u64)> {
        let lapsed_of = |(&id, session): (&SessionId, &'_ Session)| {
            let lapsed =
                session.reservations.iter().take_while(|(_, reservation)| reservation.deadline <= now);
            lapsed.map(|(&number, _)| (id, number)).collect::<Vec<_>>()
        };
        let mut lapsed: Vec<_> = self.open.iter().flat_map(lapsed_of).collect();
        lapsed.sort_unstable_by_key(|&(_, number)| number);
        lapsed
    }

    /// Reservations of numbered attempts before `attempt` that hold some of these chunks, the oldest first.
    pub(crate) fn earlier_attempts(&self, attempt: u64, chunks: &HashSet<ChunkId>) -> Vec<(SessionId, u64)> {
        let is_earlier = |held: &Reservation| {
            (1..attempt).contains(&held.attempt) && held.items.iter().any(|item| chunks.contains(&item.chunk))
        };
        let of_session = |(&id, session): (&SessionId, &Session)| {
            let earlier = session.reservations.iter().filter(|(_, held)| is_earlier(held));
            earlier.map(|(&number, _)| (id, number)).collect::<Vec<_>>()
        };
        let mut earlier: Vec<_> = self.open.iter().flat_map(of_session).collect();
        earlier.sort_unstable_by_key(|&(_, number)| number);
        earlier
    }

    /// Open sessions with their numbers.
    pub(crate) fn open_sessions(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        self.open.iter().map(|(&id, session)| (id, session))
    }

    /// Mutable access to all open sessions.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.open.values_mut()
    }

    /// Open sessions.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.open.values()
    }

    /// Processes that ended their last session and are not known to be gone.
    pub(crate) fn lingering(&self) -> usize {
        self.processes.values().filter(|process| process.sessions == 0).count()
    }
}
