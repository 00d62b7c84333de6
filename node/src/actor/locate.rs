//! Where chunks are that this actor does not have: siblings, peers by the directory, then the object store for the rest.

use std::future::Future;

use actix::fut::{self, LocalBoxActorFuture};
use actix::prelude::*;
use larder_client::trace::{SpanKind, Trace};
use larder_core::directory::Holders;
use larder_core::store::{Source, Walk};
use larder_protocol::session::{Lookup, Tier};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{Chain, ChunkRef};

use super::GpuActor;
use crate::directory::AskHolders;

/// Positions of a chain that are not on this node, and who may be asked for them.
#[derive(Debug, Default)]
pub(super) struct Missing {
    positions: Vec<u32>,
    from_siblings: bool,
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
            if let Some(first) = holders.first() {
                let is_sibling = first.node == NodeNumber::THIS_NODE;
                sources[position as usize] = Some(if is_sibling { Source::Sibling } else { Source::Peer });
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
        let mut missing = self.missing(walk, chunks);
        missing.from_siblings &= may_ask(Tier::Host);
        missing.from_peers &= may_ask(Tier::Peer);
        missing.from_objects &= may_ask(Tier::Object);
        missing
    }

    /// What of a walk's first chunks is not here.
    pub(super) fn missing(&self, walk: &Walk, chunks: usize) -> Missing {
        let (from_siblings, from_peers) = (self.siblings.is_some(), self.peers.is_some());
        let from_objects = self.objects.is_some();
        let is_askable = from_siblings || from_peers || from_objects;
        let positions = if is_askable { walk.absent(chunks) } else { Vec::new() };
        Missing { positions, from_siblings, from_peers, from_objects }
    }

    /// Asks where the missing chunks are, one after the other: the map of this node, the directory for the rest, then the
    /// object store.
    pub(super) fn locate(
        &mut self,
        namespace: u32,
        chain: &Chain,
        missing: Missing,
        trace: &Trace,
    ) -> Locating {
        if missing.positions.is_empty() {
            return Locating::Known(Located::default());
        }
        let from_objects = missing.from_objects;
        let asking = self.ask_holders(namespace, chain, &missing, trace);
        let positions = missing.positions;
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

    /// Finds which actors have the missing chunks, of this node or others; `None` where it is known at once that none has.
    fn ask_holders(
        &self,
        namespace: u32,
        chain: &Chain,
        missing: &Missing,
        trace: &Trace,
    ) -> Option<impl Future<Output = Result<Vec<Holders>, MailboxError>> + use<>> {
        let siblings = self.siblings.as_ref().filter(|_| missing.from_siblings);
        if siblings.is_none() && !missing.from_peers {
            return None;
        }
        let fingerprint = self.store.fingerprint(namespace)?;
        let chunk = |&position: &u32| chain.chunk(position as usize);
        let chunks: Vec<ChunkRef> = missing.positions.iter().map(chunk).collect();
        let of_siblings = |chunk: &ChunkRef| match siblings {
            Some(siblings) => siblings.holders(&fingerprint, &chunk.hash),
            None => Holders::default(),
        };
        let mut holders: Vec<Holders> = chunks.iter().map(of_siblings).collect();
        let unheld: Vec<usize> = (0..chunks.len()).filter(|&at| holders[at].is_empty()).collect();
        let peers = self.peers.as_ref().filter(|_| missing.from_peers && !unheld.is_empty());
        if peers.is_none() && unheld.len() == chunks.len() {
            return None;
        }
        let asking = peers.map(|peers| {
            let chunks = unheld.iter().map(|&at| chunks[at]).collect();
            let trace = trace.child(SpanKind::Internal, "find_holders");
            peers.holders.send(AskHolders { fingerprint, chunks, trace })
        });
        Some(async move {
            if let Some(asking) = asking {
                unheld.into_iter().zip(asking.await?).for_each(|(at, others)| holders[at] = others);
            }
            Ok(holders)
        })
    }
}
