//! Where chunks are that are not on this node: peers, by the directory, then the object store for what no peer has.

use std::future::Future;

use actix::fut::{self, LocalBoxActorFuture};
use actix::prelude::*;
use larder_client::trace::{SpanKind, Trace};
use larder_protocol::Chain;
use larder_protocol::session::{Lookup, Tier};
use larder_protocol::table::Holder;

use super::GpuActor;
use crate::directory::{AskHolders, Holders};
use crate::store::{Source, Walk};

/// Positions of a chain that are not on this node, and who may be asked for them.
#[derive(Debug, Default)]
pub(super) struct Missing {
    positions: Vec<u32>,
    from_peers: bool,
    from_objects: bool,
}

/// Where chunks are that are not on this node.
#[derive(Debug, Default)]
pub(super) struct Located {
    /// Positions that were asked for, in order.
    positions: Vec<u32>,
    /// Who has each of them.
    holders: Vec<Holders>,
    /// Those of them that the object store has.
    pub(super) stored: Vec<u32>,
}

/// What is known of where chunks are.
pub(super) enum Locating {
    /// All that will be.
    Known(Located),
    /// Somebody was asked.
    Asked(LocalBoxActorFuture<GpuActor, Located>),
}

impl Located {
    /// By position in a chain of so many chunks, where each chunk comes from. Peers go first.
    pub(super) fn sources(&self, chunks: usize) -> Vec<Option<Source>> {
        let mut sources = vec![None; chunks];
        for &position in &self.stored {
            sources[position as usize] = Some(Source::Object);
        }
        for (&position, holders) in self.positions.iter().zip(&self.holders) {
            if !holders.is_empty() {
                sources[position as usize] = Some(Source::Peer);
            }
        }
        sources
    }

    /// The nodes that have the chunk at a position.
    pub(super) fn holders(&self, position: u32) -> Holders {
        let at = self.positions.binary_search(&position).ok();
        at.and_then(|at| self.holders.get(at)).cloned().unwrap_or_default()
    }

    /// The first of them.
    pub(super) fn first_holder(&self, position: u32) -> Option<Holder> {
        let at = self.positions.binary_search(&position).ok()?;
        self.holders.get(at)?.first().copied()
    }

    /// Positions that no node has.
    pub(super) fn unheld(&self) -> Vec<u32> {
        let is_held = |at: usize| self.holders.get(at).is_some_and(|holders| !holders.is_empty());
        let unheld = self.positions.iter().enumerate().filter(|&(at, _)| !is_held(at));
        unheld.map(|(_, &position)| position).collect()
    }
}

impl Locating {
    fn into_future(self) -> LocalBoxActorFuture<GpuActor, Located> {
        match self {
            Self::Known(located) => Box::pin(fut::ready(located)),
            Self::Asked(asked) => asked,
        }
    }
}

impl GpuActor {
    /// What a lookup could use and is not here, as far as its tiers allow to ask for it.
    pub(super) fn missing_for_lookup(&self, ask: &Lookup, walk: &Walk) -> Missing {
        if ask.skip_read {
            return Missing::default();
        }
        let may_ask = |tier| ask.tiers.is_empty() || ask.tiers.contains(&tier);
        let usable = self.store.usable(ask.namespace, &ask.chain, ask.prompt_tokens);
        let chunks = usable.map_or(0, |usable| usable.chunks);
        self.missing(walk, chunks, may_ask(Tier::Peer), may_ask(Tier::Object))
    }

    /// What of a walk's first chunks is not here.
    pub(super) fn missing(
        &self,
        walk: &Walk,
        chunks: usize,
        from_peers: bool,
        from_objects: bool,
    ) -> Missing {
        let (from_peers, from_objects) =
            (from_peers && self.peers.is_some(), from_objects && self.objects.is_some());
        let positions = if from_peers || from_objects { walk.absent(chunks) } else { Vec::new() };
        Missing { positions, from_peers, from_objects }
    }

    /// Asks where the missing chunks are, one after the other: the directory, then the object store for the rest.
    pub(super) fn locate(
        &mut self,
        namespace: u32,
        chain: &Chain,
        missing: Missing,
        trace: &Trace,
    ) -> Locating {
        let Missing { positions, from_peers, from_objects } = missing;
        let asking = if from_peers { self.ask_holders(namespace, chain, &positions, trace) } else { None };
        let mut located = Located { positions, ..Located::default() };
        let Some(asking) = asking else {
            return match from_objects {
                true => self.locate_stored(namespace, chain, located),
                false => Locating::Known(located),
            };
        };
        let chain = from_objects.then(|| chain.clone());
        let asked = asking.into_actor(self).then(move |holders, actor: &mut Self, _| {
            located.holders = holders.unwrap_or_default();
            match chain {
                Some(chain) => actor.locate_stored(namespace, &chain, located).into_future(),
                None => Locating::Known(located).into_future(),
            }
        });
        Locating::Asked(Box::pin(asked))
    }

    fn ask_holders(
        &self,
        namespace: u32,
        chain: &Chain,
        absent: &[u32],
        trace: &Trace,
    ) -> Option<impl Future<Output = Result<Vec<Holders>, MailboxError>> + use<>> {
        let peers = self.peers.as_ref().filter(|_| !absent.is_empty())?;
        let fingerprint = self.store.fingerprint(namespace)?;
        let chunks = absent.iter().map(|&position| chain.chunk(position as usize)).collect();
        let trace = trace.child(SpanKind::Internal, "find_holders");
        Some(peers.holders.send(AskHolders { fingerprint, chunks, trace }))
    }
}
