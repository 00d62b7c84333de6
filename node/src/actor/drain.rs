//! The actor's part in drains: it asks others to keep its chunks, and keeps chunks of others.

use actix::prelude::*;
use larder_core::{Event, TakeNumber, TakeOrder, TakeReply};
use larder_protocol::drain::{Take, Taken};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use tokio::sync::oneshot;

use super::GpuActor;
use crate::exchange::{AskPeer, TakeChunks};
use larder_net::trace::Trace;
use std::time::Duration;

impl GpuActor {
    /// Asks an actor of another node to keep chunks; the core hears the answer.
    pub(super) fn ask_to_take(&mut self, order: TakeOrder, ctx: &mut Context<Self>) {
        let TakeOrder { take, taker, namespace, chunks } = order;
        let Some(peers) = &self.hands.peers else {
            return self.tell(Event::TakeAnswered { take, taken: None });
        };
        let request = Take { from: peers.device, to: taker.device, namespace, chunks };
        let ask = AskPeer {
            node: taker.node,
            request: PeerRequest::Take(Box::new(request)),
            deadline: TAKE_DEADLINE,
            trace: Trace::default(),
        };
        self.tell_when(ctx, peers.ask.send(ask), move |answer| {
            let taken = match answer {
                Ok(Ok(PeerResponse::Taken(taken))) => Some(taken),
                _ => None,
            };
            Event::TakeAnswered { take, taken }
        });
    }

    /// Answers a node that drains.
    pub(super) fn answer_take(&mut self, take: TakeNumber, taken: Taken) {
        // If nobody is there to tell, the asker went away.
        let _ = self.pending.takes.remove(&take).map(|answer| answer.send(taken));
    }

    fn take(&mut self, asked: TakeChunks, ctx: &mut Context<Self>) -> Response<Option<Taken>> {
        let TakeChunks { from, namespace, chunks } = asked;
        let now = self.hands.clock.elapsed();
        let reply = self.core.take(now, from, namespace.as_ref(), &chunks);
        let response = match reply {
            TakeReply::Now(taken) => Response::reply(Some(taken)),
            TakeReply::Busy => Response::reply(None),
            TakeReply::Later(take) => {
                let (answer, taken) = oneshot::channel();
                self.pending.takes.insert(take, answer);
                // An error: the actor is stopping, or its life ended.
                Response::fut(async move { taken.await.ok() })
            }
        };
        self.settle(ctx);
        response
    }
}

impl Handler<TakeChunks> for GpuActor {
    type Result = Response<Option<Taken>>;

    fn handle(&mut self, asked: TakeChunks, ctx: &mut Self::Context) -> Self::Result {
        self.guard(ctx, |actor, ctx| actor.take(asked, ctx)).unwrap_or_else(|| Response::reply(None))
    }
}

/// How long another node may take to fetch the chunks that it is asked to keep.
const TAKE_DEADLINE: Duration = Duration::from_secs(8);
