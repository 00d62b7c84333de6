//! Hand-over: the requests by which layers are given and taken while their chunks are being written.

use std::ops::Range;
use std::time::Duration;

use larder_protocol::Chain;
use tokio::time::Instant;

use crate::blocking::BlockingSession;
use crate::error::SessionError;
use crate::exchange;
use crate::follow::{Follow, FollowOptions, InPlace};
use crate::namespace::Namespace;
use crate::reservation::{Reservation, StagedLayers};
use crate::session::{Session, within};

impl Session {
    /// Asks for room as [`Session::reserve`] does, in a numbered attempt at a hand-over: reservations of earlier attempts for
    /// these chunks end, and whoever holds them can write no more.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// As [`Session::reserve`].
    pub async fn reserve_attempt(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        priority: i8,
        attempt: u64,
    ) -> Result<Reservation, SessionError> {
        self.exchange(exchange::reserve(namespace, chain, &[], priority, attempt)?).await
    }

    /// Gives some layers of one pool of reserved chunks room to be filled; waits until the write window has some. `positions`
    /// are those of the chunks in the chain, ascending.
    ///
    /// Cancel safe: no room is taken.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` where no room was freed in time.
    ///
    /// # Panics
    /// Where the reservation has no such chunk, or the namespace no such layers.
    pub async fn stage_layers(
        &self,
        reservation: &Reservation,
        positions: &[u32],
        pool: usize,
        layers: Range<u32>,
    ) -> Result<StagedLayers, SessionError> {
        let range = match reservation.layers_room(positions, pool, &layers)? {
            Some((window, bytes)) => {
                let range = async { Ok(window.take(bytes).await) };
                Some(within(self.timeout(), range).await?)
            }
            None => None,
        };
        Ok(reservation.staged_layers(positions, pool, layers, range))
    }

    /// Hands filled layers over: whoever follows the chunks may read them when this has returned, and before. Their room is free
    /// again then. A chunk of which some layers were handed over is committed, by [`Session::commit_handed_over`], when
    /// all were.
    ///
    /// Cancel safe: layers whose message was sent are handed over nevertheless.
    ///
    /// # Errors
    /// `Refused` where the reservation ended, by its deadline or a later attempt; the general ones of [`SessionError`].
    pub async fn hand_over(&self, staged: StagedLayers) -> Result<(), SessionError> {
        self.exchange(exchange::hand_over(staged.into_part())).await
    }

    /// Commits chunks of which all layers were handed over, and returns how many the node keeps: others see them now.
    ///
    /// Cancel safe: chunks whose message was sent are committed nevertheless; the others are not.
    ///
    /// # Errors
    /// `Refused` where layers are missing, or the reservation ended; the general ones of [`SessionError`].
    pub async fn commit_handed_over(
        &self,
        reservation: &Reservation,
        positions: &[u32],
    ) -> Result<u32, SessionError> {
        let mut kept = 0;
        for part in reservation.handed_over_parts(positions) {
            kept += self.exchange(exchange::commit(part)).await?;
        }
        Ok(kept)
    }

    /// Follows chunks that are being written, here or on another node, or soon will be. Room for what comes from another node is
    /// taken at once, for all of it or for none.
    ///
    /// Cancel safe: what was taken is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub async fn follow(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        options: FollowOptions,
    ) -> Result<Follow, SessionError> {
        self.exchange(exchange::follow(namespace, chain, options)?).await
    }

    /// Waits until so many layers of what is followed are in place, or nothing more will come, or `patience` has passed, and
    /// says what is in place then.
    ///
    /// Cancel safe. One caller at a time waits for a follow: of two, one may wait until the other hears.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub async fn wait_for_layers(
        &self,
        follow: &Follow,
        layers: u32,
        patience: Duration,
    ) -> Result<InPlace, SessionError> {
        let until = Instant::now() + patience;
        loop {
            let known = follow.in_place();
            let left = until.saturating_duration_since(Instant::now());
            // The places come with the first news.
            if known.has(layers) && (follow.lease().is_some() || known.chunks == 0) {
                return Ok(known);
            }
            let wait = left.min(self.timeout() / 4);
            follow.heard(self.exchange(exchange::in_place(follow, known, wait)).await?)?;
            if left.is_zero() {
                return Ok(follow.in_place());
            }
        }
    }
}

impl BlockingSession {
    /// Gives some layers of one pool of reserved chunks room to be filled, as [`Session::stage_layers`] does; waits until other
    /// threads have freed enough of the write window.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` where no room was freed in time.
    ///
    /// # Panics
    /// Where the reservation has no such chunk, or the namespace no such layers.
    pub fn stage_layers(
        &self,
        reservation: &Reservation,
        positions: &[u32],
        pool: usize,
        layers: Range<u32>,
    ) -> Result<StagedLayers, SessionError> {
        let range = match reservation.layers_room(positions, pool, &layers)? {
            Some((window, bytes)) => Some(self.take_room(window, bytes)?),
            None => None,
        };
        Ok(reservation.staged_layers(positions, pool, layers, range))
    }

    /// Hands filled layers over, as [`Session::hand_over`] does.
    ///
    /// # Errors
    /// `Refused` where the reservation ended, by its deadline or a later attempt; the general ones of [`SessionError`].
    pub fn hand_over(&self, staged: StagedLayers) -> Result<(), SessionError> {
        self.exchange(exchange::hand_over(staged.into_part()))
    }
}
