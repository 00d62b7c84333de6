//! Hand-over: the requests by which layers are given and taken while their chunks are being written.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_protocol::handoff::{self, AskInPlace, Writer};
use larder_protocol::session::{Request, Reserve, Response};
use larder_protocol::{Chain, PoolSet};

use crate::call::Call;
use crate::error::SessionError;
use crate::follow::{Follow, FollowOptions, Followed, InPlace};
use crate::lease::LeaseGuard;
use crate::link::round_trip::RoundTrip;
use crate::lock;
use crate::namespace::Namespace;
use crate::options::millis;
use crate::reservation::{LayersPart, Reservation, StagedLayers};
use crate::session::Session;

impl Session {
    /// Asks for room as [`Session::reserve_pools`] does, in a numbered attempt at a hand-over. If `pools` is empty, asks for all
    /// pools. Reservations of earlier attempts for these chunks end: their holders can no longer write.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// As [`Session::reserve_pools`].
    pub fn reserve_attempt(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
        attempt: u64,
    ) -> Call<Reservation> {
        let (number, pools) = (namespace.number(), pools.to_vec());
        let request = Request::Reserve(Reserve {
            namespace: number,
            chain: self.link.chain(chain),
            priority,
            pools,
            attempt,
        });
        let (known, asked) = (namespace.clone(), chain.len());
        let call = self.ask(request, move |link, response, descriptors| match response {
            Response::Reserved(reserved) => Reservation::accept(link, known, asked, reserved, &descriptors),
            _ => Err(SessionError::wrong_answer("a reservation reserves")),
        });
        call.checked(self.check(namespace, chain))
    }

    /// Takes room in the write window for some layers of one pool of reserved chunks, to be filled. Waits until there is room.
    /// `positions` are the chunks' positions in the chain, ascending.
    ///
    /// Cancel safe: no room is taken.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` if no room became free in time.
    ///
    /// # Panics
    /// Panics if the reservation has no such chunk or does not write this pool of it, or if the namespace has no such layers.
    pub fn stage_layers(
        &self,
        reservation: &Reservation,
        positions: &[u32],
        pool: usize,
        layers: Range<u32>,
    ) -> Call<StagedLayers> {
        let needed = self.own(reservation).and_then(|()| reservation.layers_room(positions, pool, &layers));
        let staged = reservation.staged_layers(positions, pool, layers);
        self.take_room(needed, staged, |staged: &mut StagedLayers, ranges| {
            ranges.into_iter().for_each(|range| staged.put_into(range));
        })
    }

    /// Hands filled layers over. When the call returns, followers of the chunks may read the layers, and the layers' room is free
    /// again. When all layers of a chunk were handed over, [`Session::commit_handed_over`] commits the chunk.
    ///
    /// Cancel safe: layers whose message was sent are handed over nevertheless.
    ///
    /// # Errors
    /// `Refused` if the reservation ended, by its deadline or a later attempt; the general errors of [`SessionError`].
    pub fn hand_over(&self, staged: StagedLayers) -> Call<()> {
        self.hand_over_staged(&staged)
    }

    /// As [`Self::hand_over`], for layers that stay the caller's. After `Busy` nothing was done, and the caller may hand them over
    /// again. Their room is free when the node has answered and the caller has dropped them.
    ///
    /// Cancel safe: layers whose message was sent are handed over nevertheless.
    ///
    /// # Errors
    /// As [`Self::hand_over`]; `Busy` if the node copies too much at the moment.
    pub fn hand_over_staged(&self, staged: &StagedLayers) -> Call<()> {
        let is_own = self.link.check_own("room for layers", staged.session());
        let LayersPart { request, range } = staged.part();
        let call = self.ask(Request::HandOver(request), move |_, response, _| {
            // The node copies from the window until it answers.
            drop(range);
            match response {
                Response::HandedOver => Ok(()),
                _ => Err(SessionError::wrong_answer("layers are handed over")),
            }
        });
        call.checked(is_own)
    }

    /// Commits chunks whose layers were all handed over, and returns the number of chunks that the node keeps. From now on others
    /// see these chunks.
    ///
    /// Cancel safe: chunks whose message was sent are committed nevertheless; the others are not.
    ///
    /// # Errors
    /// `Refused` if layers are missing, or the reservation ended; the general errors of [`SessionError`].
    pub fn commit_handed_over(&self, reservation: &Reservation, positions: &[u32]) -> Call<u32> {
        self.commit_parts(reservation.handed_over_parts(positions)).checked(self.own(reservation))
    }

    /// Follows chunks that are being written or soon will be, here or on another node. Of each chunk, it follows the pools that
    /// are needed to restore the whole `chain`. Room for chunks from another node is taken at once, for all of them or for none.
    /// If some pools are needed only of the last chunks, all chunks are lost when one chunk does not come.
    ///
    /// Cancel safe: the room is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`, also if the session has
    /// [1,024 follows](larder_protocol::limits::MAX_SESSION_FOLLOWS); the general errors of [`SessionError`].
    pub fn follow(&self, namespace: &Namespace, chain: &Chain, options: FollowOptions) -> Call<Follow> {
        let FollowOptions { writer, attempt, patience } = options;
        let request = Request::Follow(handoff::Follow {
            namespace: namespace.number(),
            chain: self.link.chain(chain),
            writer: writer.map(|(node, device)| Writer { node, device }),
            attempt,
            patience_ms: millis(patience),
        });
        let (known, asked) = (namespace.clone(), chain.hashes.as_slice().into());
        let call = self.ask(request, |link, response, _| match response {
            Response::Following(number) if number != 0 => Ok(Follow::new(link, known, asked, number)),
            _ => Err(SessionError::wrong_answer("a follow follows")),
        });
        call.checked(self.check(namespace, chain))
    }

    /// Waits until `layers` layers of the followed chunks are in place, or nothing more will come, or `patience` has passed since
    /// the call was made. The result says what is in place then.
    ///
    /// Cancel safe. One caller at a time should wait for a follow: a second caller may wait until the first one has its result.
    ///
    /// # Errors
    /// The general errors of [`SessionError`].
    pub fn wait_for_layers(&self, follow: &Follow, layers: u32, patience: Duration) -> Call<InPlace> {
        let (known, asked) = (Arc::clone(&follow.0), Arc::clone(&follow.0));
        let known = move || {
            let in_place = known.in_place();
            // The places come with the first news.
            let is_enough = in_place.has(layers) && (known.lease().is_some() || in_place.chunks == 0);
            is_enough.then_some(in_place)
        };
        let is_own = self.link.check_own("follow", follow.0.session());
        Call::until(&self.link, self.origin.clone(), patience, known, move |wait| news(&asked, wait))
            .checked(is_own)
    }
}

/// Asks for news of a follow. Each answer updates the follow itself; its lease comes with the first news that has one.
fn news(follow: &Arc<Followed>, wait: Duration) -> RoundTrip<InPlace> {
    let known = follow.in_place();
    let request = Request::AskInPlace(AskInPlace {
        follow: follow.number(),
        chunks: known.chunks,
        layers: known.layers,
        wait_ms: millis(wait),
    });
    // A request whose answer nobody receives must not keep the session open.
    let follow = Arc::downgrade(follow);
    RoundTrip::new(request, move |link, response, descriptors| {
        let Response::InPlace(news) = response else {
            return Err(SessionError::wrong_answer("a follow has layers in place"));
        };
        let handoff::InPlace { chunks, layers, is_whole, leased, sums, checksums } = news;
        let in_place = InPlace { chunks, layers, is_whole };
        let Some(follow) = Weak::upgrade(&follow) else {
            // The follow was dropped, but later answers name its extents too, and the node tells each extent only once.
            let shown = leased.map(|leased| leased.extents).unwrap_or_default();
            lock(&link.extents).add(&shown, &descriptors)?;
            return Ok(in_place);
        };
        let (namespace, asked) = (follow.namespace(), follow.hashes());
        if chunks as usize > asked.len() {
            return Err(SessionError::wrong_answer("a follow has chunks that were asked for"));
        }
        let accept =
            |leased| LeaseGuard::accept_followed(link, namespace.clone(), asked, leased, &descriptors);
        follow.heard(in_place, leased.map(accept).transpose()?, sums, checksums)?;
        Ok(in_place)
    })
}
