//! Purges: an admin makes nodes remove a tenant, a namespace, or chunks of it. Until the end of the purge nothing of it may be
//! back.

use std::time::Duration;

use larder_core::{Event, PurgeStep};
use larder_protocol::purge::{NamespaceName, PurgeMode, PurgeScope};

use crate::serve::MAILBOX;
use crate::space::TENANTS;
use crate::world::{ActorHappening, At, World};

/// The planned end of a purge of one store.
pub(crate) struct PurgeEnd {
    purge: u64,
    /// The life of the store that began it.
    life: u64,
    scope: PurgeScope,
    /// When the admin asked for the purge.
    asked: Duration,
}

impl World {
    /// An admin purges a namespace, or some chunks of it, from a node or from all.
    pub(crate) fn purge(&mut self, space: usize) {
        let fingerprint = self.spaces[space].fingerprint;
        let name = NamespaceName(std::array::from_fn(|at| fingerprint.0[at]));
        let scope = match self.random.u8(..3) {
            0 => PurgeScope::Tenant(TENANTS[self.random.usize(..TENANTS.len())].to_owned()),
            1 => PurgeScope::Namespace(name),
            _ => PurgeScope::Chunks(name, self.spaces[space].prompt(&mut self.random).hashes),
        };
        let purge = self.random.u64(..);
        let only = self.random.bool().then(|| self.random.usize(..self.settings.nodes));
        for host in (0..self.settings.nodes).filter(|host| only.is_none_or(|only| only == *host)) {
            let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else { continue };
            let removes = MAILBOX + self.some_us(10, 100_000);
            let ends = removes + self.some_us(10, 100_000);
            for actor in 0..self.settings.actors {
                let at = At { life, actor };
                let Some(life) = self.actor(at).map(|actor| actor.life) else { continue };
                let begin = Event::Purge(PurgeStep::Begin(purge, scope.clone()));
                let page = PurgeStep::Page { purge, scope: scope.clone(), mode: PurgeMode::Remove, from: 0 };
                let end = PurgeEnd { purge, life, scope: scope.clone(), asked: self.now };
                self.plan_actor(at, MAILBOX, ActorHappening::InLife(life, begin));
                self.plan_actor(at, removes, ActorHappening::InLife(life, Event::Purge(page)));
                self.plan_actor(at, ends, ActorHappening::PurgeEnds(end));
            }
        }
    }

    /// From now on, chunks of a purge may come again. Until now the actor may hold only those of them that were reserved since
    /// the purge was requested. A store that did not know the contents of its disk yet may still learn of records that a real
    /// node's purge takes from the disk itself.
    pub(crate) fn purge_ends(&mut self, at: At, end: PurgeEnd) {
        let PurgeEnd { purge, life, scope, asked } = end;
        let covered = self
            .spaces
            .iter()
            .filter(|space| scope.covers(TENANTS[usize::from(space.tenant)], &space.fingerprint));
        let covered: Vec<_> = covered.map(|space| space.fingerprint).collect();
        let Some(actor) = self.actor(at).filter(|actor| actor.life == life) else { return };
        let knows_its_disk = actor.disk.is_none() || actor.recovered.is_some_and(|at| at < asked);
        let (held, _) = actor.core.store().held_from(0, usize::MAX);
        let held = if knows_its_disk { held } else { Vec::new() };
        let back = held.into_iter().find(|(fingerprint, chunk)| {
            covered.contains(fingerprint)
                && scope.chunks().is_none_or(|named| named.contains(&chunk.hash))
                && self.reserved.get(&chunk.hash).is_none_or(|&reserved| reserved < asked)
        });
        if let Some((_, chunk)) = back {
            self.violate(|| format!("{at:?}: {:?} is back before its purge has ended", chunk.hash));
        }
        self.tell(at, Event::Purge(PurgeStep::End(purge)));
    }
}
