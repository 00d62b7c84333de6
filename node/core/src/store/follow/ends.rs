//! Ends of follows: the writing fails, nothing comes for too long, or the follower goes.

use super::{Follow, FollowNews, Followed, Follows, News, Reader, take_range};
use crate::Millis;
use crate::store::Store;
use crate::store::ids::{ChunkId, ProcessId, SessionId, Slot};

impl Store {
    /// Ends the writing of these slots of a chunk without a commit: its followers hear that the chunk is lost. The slots are free
    /// as soon as nobody may read them and no `writer` (that may still write) is left.
    pub(in crate::store) fn writing_failed(&mut self, id: ChunkId, slots: Vec<Slot>, writer: Option<Reader>) {
        self.follows.attempts.remove(&id);
        for (follow, position) in self.follows.followers(id) {
            self.lose(follow, position);
        }
        let mut holders = self.follows.take_holders(id);
        holders.extend(writer);
        if holders.is_empty() {
            return slots.into_iter().for_each(|slot| self.slab.free(slot));
        }
        slots.iter().for_each(|&slot| self.slab.quarantine(slot));
        self.follows.limbo.keep(slots, holders);
    }

    /// Notes that the chunk at a position of a follow will not come.
    pub(super) fn lose(&mut self, follow: u64, position: usize) {
        let Some(open) = self.follows.open.get_mut(&follow) else { return };
        let (was, fingerprint, is_peer) = (open.chunks[position], open.fingerprint, open.session.is_none());
        match was {
            Followed::Lost(_) | Followed::Here(_) => return,
            Followed::Awaited(hash) => {
                open.chunks[position] = Followed::Lost(None);
                self.follows.awaited.remove(&(fingerprint, hash, (follow, position)));
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

    /// Gives up the missing chunks of each follow that had no news for its patience.
    pub(in crate::store) fn expire_follows(&mut self, now: Millis) {
        let Follows { open, deadlines, moved, .. } = &mut self.follows;
        for follow in std::mem::take(moved) {
            let Some(open) = open.get_mut(&follow) else { continue };
            deadlines.remove(&(open.deadline, follow));
            open.deadline = now + open.patience_ms;
            deadlines.insert((open.deadline, follow));
        }
        let late = take_range(deadlines, ..=(now, u64::MAX)).into_iter().map(|(_, follow)| follow);
        let mut late: Vec<u64> = late.collect();
        late.sort_unstable();
        late.into_iter().for_each(|follow| self.lose_from(follow, 0));
    }

    /// Ends a follow, and its claims.
    pub(in crate::store) fn end_follow(&mut self, follow: u64) {
        let Some(open) = self.follows.open.remove(&follow) else { return };
        let Follow { session, tenant, fingerprint, chunks, deadline, leased_blocks, .. } = open;
        // An engine reads the last layer before the writer commits, and the next turn begins with these chunks.
        let is_in_place = session.is_some() && chunks.iter().all(|chunk| self.has_all_layers(chunk));
        match session {
            Some(session) => {
                if let Ok(held) = self.session_mut(session) {
                    held.leased_blocks -= leased_blocks;
                    held.follows.remove(&follow);
                }
            }
            None => self.follows.peer_chunks.give_back(tenant, chunks.len() as u64),
        }
        for (position, &chunk) in chunks.iter().enumerate().rev() {
            let reader = Reader::Follow(follow, position);
            match chunk {
                Followed::Awaited(hash) => {
                    self.follows.awaited.remove(&(fingerprint, hash, (follow, position)));
                }
                Followed::Coming(id) => {
                    if is_in_place {
                        self.gathers.is_in_place(id);
                    }
                    self.gathers.stop_waiting_for(id, follow);
                    self.follows.let_go(id, reader);
                }
                Followed::Lost(Some(id)) => {
                    self.follows.let_go(id, reader);
                    self.leave_limbo(reader);
                }
                Followed::Here(_) | Followed::Lost(None) => {}
            }
            if let Some(id) = chunk.id() {
                self.unclaim(&[id]);
            }
        }
        take_range(&mut self.follows.again, (follow, 0)..=(follow, usize::MAX));
        self.follows.progressed.remove(&follow);
        self.follows.moved.remove(&follow);
        self.follows.deadlines.remove(&(deadline, follow));
        self.evict_above_watermark();
    }

    /// Ends the follows of a session that ends. Slots that were shown to a process stay until the process is gone.
    pub(in crate::store) fn end_follows_of(&mut self, session: SessionId) {
        let of_session = self.sessions.get_mut(session).map(|session| std::mem::take(&mut session.follows));
        for follow in of_session.into_iter().flatten() {
            self.leave_to_process(session, follow);
            self.end_follow(follow);
        }
    }

    fn leave_to_process(&mut self, session: SessionId, follow: u64) {
        let Some(open) = self.follows.open.get(&follow).filter(|open| open.is_shown) else { return };
        let chunks =
            open.chunks.iter().enumerate().filter_map(|(position, chunk)| Some((position, chunk.id()?)));
        let chunks: Vec<(usize, ChunkId)> = chunks.collect();
        let Some(process) = self.sessions.get(session).map(|session| session.process) else { return };
        for (position, id) in chunks {
            let Some(living) = self.sessions.living(process) else { return };
            if living.orphaned.insert(id) {
                self.change(id, |chunk| chunk.claims += 1);
                self.orphan(id);
            }
            self.follows.hand_on(id, Reader::Follow(follow, position), Reader::Process(process));
        }
    }

    /// Notes that a process is gone: it reads no slot any more.
    pub(in crate::store) fn process_left_follows(&mut self, process: ProcessId) {
        let holder = Reader::Process(process);
        self.follows.holders.retain(|&(_, other)| other != holder);
        self.leave_limbo(holder);
    }

    /// Notes that a read of which [`Store::may_write_later`] said that it may still write to its slots is over.
    pub(crate) fn read_is_over(&mut self, read: u64) {
        self.leave_limbo(Reader::Drive(read));
    }

    fn leave_limbo(&mut self, holder: Reader) {
        for slot in self.follows.limbo.leave(holder) {
            self.slab.restore(slot);
            self.slab.free(slot);
        }
    }
}
