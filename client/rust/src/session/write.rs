//! The requests that put chunks.

use std::sync::Arc;

use larder_protocol::session::{Commit, Request, Response};
use larder_protocol::{Chain, PoolSet};

use super::Session;
use crate::call::{Call, RoomFor, Step};
use crate::error::SessionError;
use crate::link::round_trip::RoundTrip;
use crate::namespace::Namespace;
use crate::reservation::{CommitPart, Reservation, RoomNeeded, StagedChunk};
use crate::window::WindowRange;

impl Session {
    /// Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; chunks of a higher
    /// priority stay longer under the `priority` policy.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general errors of [`SessionError`].
    pub fn reserve(&self, namespace: &Namespace, chain: &Chain, priority: i8) -> Call<Reservation> {
        self.reserve_attempt(namespace, chain, &[], priority, 0)
    }

    /// As [`Self::reserve`], for an engine that does not have all pools of each chunk. `pools` says, by position in the chain,
    /// which pools the engine will write. Pools that every chunk has are written whether named or not; a pool that a chunk lacks
    /// may be added later. [`StagedChunk::blocks`] lists the blocks to write.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// As [`Self::reserve`]; `Refused` if there is not one set of pools of the namespace for each chunk.
    pub fn reserve_pools(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
    ) -> Call<Reservation> {
        self.reserve_attempt(namespace, chain, pools, priority, 0)
    }

    /// Gives the reserved chunk at `position` (in the chain) room to be filled; waits until the write window has some.
    ///
    /// Tasks get room in the order in which they asked, threads in no particular order. A caller that keeps staged chunks without
    /// committing them waits for itself until the timeout.
    ///
    /// Cancel safe: no room is taken.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` if no room was freed in time.
    ///
    /// # Panics
    /// Panics if the reservation has no chunk there.
    pub fn stage(&self, reservation: &Reservation, position: u32) -> Call<StagedChunk> {
        let staged = reservation.staged(position);
        let needed = self.own(reservation).and_then(|()| reservation.room_needed(&[position]));
        self.take_room(needed, staged, |staged: &mut StagedChunk, ranges| {
            ranges.into_iter().for_each(|range| staged.put_into(range));
        })
    }

    /// Gives the reserved chunks at `positions` (in the chain) room as [`Self::stage`] does, to all of them at once: two callers
    /// that each need most of the window do not wait for each other.
    ///
    /// Cancel safe: no room is taken.
    ///
    /// # Errors
    /// `WindowTooSmall` if the chunks together are larger than the window; `Timeout` if not enough room was freed in time.
    ///
    /// # Panics
    /// Panics if the reservation has no chunk there.
    pub fn stage_chunks(&self, reservation: &Reservation, positions: &[u32]) -> Call<Vec<StagedChunk>> {
        let staged = positions.iter().map(|&position| reservation.staged(position)).collect();
        let needed = self.own(reservation).and_then(|()| reservation.room_needed(positions));
        self.take_room(needed, staged, |staged: &mut Vec<StagedChunk>, ranges| {
            staged.iter_mut().zip(ranges).for_each(|(chunk, range)| chunk.put_into(range));
        })
    }

    /// Hands filled chunks of one reservation over, and returns how many of them the node keeps. Their room is free again when
    /// the node has answered.
    ///
    /// Cancel safe: chunks whose message was sent are committed nevertheless; the others are not.
    ///
    /// # Errors
    /// `Refused` if the reservation's deadline passed; the general errors of [`SessionError`].
    ///
    /// # Panics
    /// Panics if a chunk belongs to another reservation.
    pub fn commit(&self, reservation: &Reservation, staged: Vec<StagedChunk>) -> Call<u32> {
        self.commit_parts(reservation.commit_parts(&staged)).checked(self.own(reservation))
    }

    /// As [`Self::commit`], for filled chunks that stay the caller's. After `Busy` nothing was done, and the caller may commit
    /// them again. Their room is free when the node has answered and the caller has dropped them.
    ///
    /// Cancel safe: chunks whose message was sent are committed nevertheless.
    ///
    /// # Errors
    /// As [`Self::commit`]; `Busy` if the node copies too much at the moment.
    ///
    /// # Panics
    /// Panics if a chunk belongs to another reservation, or there are more than [`Reservation::chunks_per_commit`].
    pub fn commit_staged(&self, reservation: &Reservation, staged: &[StagedChunk]) -> Call<u32> {
        let parts = reservation.commit_parts(staged);
        assert!(parts.len() <= 1, "{} chunks do not fit in one message", staged.len());
        self.commit_parts(parts).checked(self.own(reservation))
    }

    /// # Errors
    /// `OtherSession` if the reservation was not made by this session.
    pub(crate) fn own(&self, reservation: &Reservation) -> Result<(), SessionError> {
        self.link.check_own("reservation", reservation.session())
    }

    /// Commits the parts, one message after the other. Returns the number of chunks that the node keeps.
    pub(crate) fn commit_parts(&self, parts: Vec<CommitPart>) -> Call<u32> {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return self.call(Step::Done(Ok(0))) };
        let call = self.call(Step::Ask(commit(first)));
        if parts.len() == 0 {
            return call;
        }
        let mut kept = 0;
        call.then(move |more| {
            kept += more;
            parts.next().map_or(Step::Done(Ok(kept)), |part| Step::Ask(commit(part)))
        })
    }

    /// Takes the room in the write window that `value` needs, if it needs some: pieces of these sizes.
    pub(crate) fn take_room<T: Send + 'static>(
        &self,
        needed: Result<Option<RoomNeeded<'_>>, SessionError>,
        value: T,
        give: fn(&mut T, Vec<WindowRange>),
    ) -> Call<T> {
        let step = match needed {
            Ok(Some((window, sizes))) => {
                Step::TakeRoom(RoomFor { window: Arc::clone(window), sizes, value, give })
            }
            Ok(None) => Step::Done(Ok(value)),
            Err(error) => Step::Done(Err(error)),
        };
        self.call(step)
    }
}

fn commit(part: CommitPart) -> RoundTrip<u32> {
    let CommitPart { reservation, chunks, ranges, sources, under_way } = part;
    let committed = chunks.len();
    let request = Request::Commit(Commit { reservation, chunks, sources });
    RoundTrip::new(request, move |_, response, _| {
        // The node copies from the window until it answers.
        drop(ranges);
        match response {
            Response::Committed(chunks) if chunks as usize <= committed => {
                under_way.settle(committed);
                Ok(chunks)
            }
            _ => Err(SessionError::wrong_answer("a commit commits chunks that were named")),
        }
    })
}
