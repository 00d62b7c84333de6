//! Ends of follows: the writing fails, nothing comes for too long, or the follower goes.

use larder_protocol::{ChunkHash, Fingerprint};

use super::{Follow, FollowNews, Followed, Limbo, News, Reader};
use crate::Millis;
use crate::store::Store;
use crate::store::ids::{ChunkId, ProcessId, SessionId, Slot};

impl Store {
    /// Ends the writing of these slots of a chunk without a commit: its followers hear that the chunk is lost. The slots are free
    /// as soon as nobody may read them and no `writer` (that may still write) is left.
    pub(in crate::store) fn writing_failed(&mut self, id: ChunkId, slots: Vec<Slot>, writer: Option<Reader>) {
        self.follows.attempts.remove(&id);
        let hash = self.index.get(id).hash;
        for follow in self.follows.followers(id) {
            let position = self.follows.open.get(&follow).and_then(|open| open.coming(id, &hash));
            if let Some(position) = position {
                self.lose(follow, position);
            }
        }
        let mut holders = self.follows.holders.remove(&id).unwrap_or_default();
        if holders.is_empty() && writer.is_none() {
            return slots.into_iter().for_each(|slot| self.slab.free(slot));
        }
        slots.iter().for_each(|&slot| self.slab.quarantine(slot));
        holders.extend(writer);
        self.follows.limbo.push(Limbo { slots, holders });
    }

    /// Notes that the chunk at a position of a follow will not come.
    pub(super) fn lose(&mut self, follow: u64, position: usize) {
        let Some(open) = self.follows.open.get_mut(&follow) else { return };
        let (was, fingerprint, is_peer) = (open.chunks[position], open.fingerprint, open.session.is_none());
        match was {
            Followed::Lost(_) | Followed::Here(_) => return,
            Followed::Awaited(hash) => {
                open.chunks[position] = Followed::Lost(None);
                self.forget_awaited(follow, fingerprint, hash);
            }
            Followed::Coming(id) => {
                open.chunks[position] = Followed::Lost(Some(id));
                self.gathers.stop_waiting_for(id, follow);
            }
        }
        self.follows.lost += 1;
        self.moved(follow);
        if is_peer {
            self.follows.told.push(FollowNews { follow, position: position as u32, what: News::Lost });
        }
    }

    /// Notes that the chunk at a position of a follow will not come, if nobody has begun to write it.
    pub(super) fn lose_awaited(&mut self, follow: u64, position: usize) {
        let open = self.follows.open.get(&follow);
        if open.is_some_and(|open| matches!(open.chunks[position], Followed::Awaited(_))) {
            self.lose(follow, position);
        }
    }

    pub(super) fn lose_from(&mut self, follow: u64, first: usize) {
        let chunks = self.follows.open.get(&follow).map_or(0, |open| open.chunks.len());
        (first..chunks).for_each(|position| self.lose(follow, position));
    }

    pub(super) fn forget_awaited(&mut self, follow: u64, fingerprint: Fingerprint, hash: ChunkHash) {
        let key = (fingerprint, hash);
        let Some(waiting) = self.follows.awaited.get_mut(&key) else { return };
        waiting.retain(|&other| other != follow);
        if waiting.is_empty() {
            self.follows.awaited.remove(&key);
        }
    }

    /// Gives up the missing chunks of each follow that had no news for its patience.
    pub(in crate::store) fn expire_follows(&mut self, now: Millis) {
        let mut late = Vec::new();
        for (&follow, open) in &mut self.follows.open {
            if std::mem::take(&mut open.has_moved) {
                open.deadline = now + open.patience_ms;
            } else if open.deadline <= now {
                late.push(follow);
            }
        }
        late.sort_unstable();
        late.into_iter().for_each(|follow| self.lose_from(follow, 0));
    }

    /// Ends a follow, and its claims.
    pub(in crate::store) fn end_follow(&mut self, follow: u64) {
        let Some(open) = self.follows.open.remove(&follow) else { return };
        let Follow { session, fingerprint, chunks, leased_blocks, .. } = open;
        // An engine reads the last layer before the writer commits, and the next turn begins with these chunks.
        let is_in_place = session.is_some() && chunks.iter().all(|chunk| self.has_all_layers(chunk));
        match session {
            Some(session) => {
                if let Ok(held) = self.session_mut(session) {
                    held.leased_blocks -= leased_blocks;
                }
            }
            None => self.follows.peer_unfollowed(fingerprint, chunks.len() as u64),
        }
        for &chunk in chunks.iter().rev() {
            match chunk {
                Followed::Awaited(hash) => self.forget_awaited(follow, fingerprint, hash),
                Followed::Coming(id) => {
                    if is_in_place {
                        self.gathers.is_in_place(id);
                    }
                    self.gathers.stop_waiting_for(id, follow);
                    self.follows.let_go(id, Reader::Follow(follow));
                }
                Followed::Lost(Some(id)) => self.follows.let_go(id, Reader::Follow(follow)),
                Followed::Here(_) | Followed::Lost(None) => {}
            }
            if let Some(id) = chunk.id() {
                self.unclaim(&[id]);
            }
        }
        self.follows.progressed.remove(&follow);
        self.follows.again.retain(|&(of, _)| of != follow);
        self.leave_limbo(Reader::Follow(follow));
        self.evict_above_watermark();
    }

    /// Ends the follows of a session that ends. Slots that were shown to a process stay until the process is gone.
    pub(in crate::store) fn end_follows_of(&mut self, session: SessionId) {
        let of_session = self.follows.open.iter().filter(|(_, open)| open.session == Some(session));
        let mut of_session: Vec<u64> = of_session.map(|(&follow, _)| follow).collect();
        of_session.sort_unstable();
        for follow in of_session {
            self.leave_to_process(session, follow);
            self.end_follow(follow);
        }
    }

    fn leave_to_process(&mut self, session: SessionId, follow: u64) {
        let Some(open) = self.follows.open.get(&follow).filter(|open| open.is_shown) else { return };
        let ids: Box<[ChunkId]> = open.chunks.iter().filter_map(|chunk| chunk.id()).collect();
        let Some(id) = self.sessions.get(session).map(|session| session.process) else { return };
        let Some(process) = self.sessions.living(id) else { return };
        process.orphaned_leases.push(ids.clone());
        for &id in &ids {
            self.change(id, |chunk| chunk.claims += 1);
            self.orphan(id);
        }
        self.follows.hand_on(Reader::Follow(follow), Reader::Process(id));
    }

    /// Notes that a process is gone: it reads no slot any more.
    pub(in crate::store) fn process_left_follows(&mut self, process: ProcessId) {
        let holder = Reader::Process(process);
        self.follows.holders.retain(|_, holders| {
            holders.retain(|&other| other != holder);
            !holders.is_empty()
        });
        self.leave_limbo(holder);
    }

    /// Notes that a read of which [`Store::may_write_later`] said that it may still write to its slots is over.
    pub(crate) fn read_is_over(&mut self, read: u64) {
        self.leave_limbo(Reader::Drive(read));
    }

    fn leave_limbo(&mut self, holder: Reader) {
        let (slab, limbo) = (&mut self.slab, &mut self.follows.limbo);
        limbo.retain_mut(|limbo| {
            limbo.holders.retain(|&other| other != holder);
            if limbo.holders.is_empty() {
                limbo.slots.iter().for_each(|&slot| {
                    slab.restore(slot);
                    slab.free(slot);
                });
            }
            !limbo.holders.is_empty()
        });
    }
}
