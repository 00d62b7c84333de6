//! Pins: chunks that stay on request, until a deadline.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use larder_protocol::session::{Pinned, Scarce};
use larder_protocol::{Chain, Fingerprint};

use super::holdings::PinFacts;
use super::ids::{ChunkId, NamespaceId, SessionId, TenantId};
use super::lookup::Presence;
use super::shares::Shares;
use super::{Refused, Store};
use crate::Millis;
use crate::store::ChangeKind;

/// Every pin. A pin outlives its session: it belongs to the tenant.
#[derive(Debug, Default)]
pub(super) struct Pins {
    pins: BTreeMap<u64, Pin>,
    deadlines: BTreeSet<(Millis, u64)>,
    /// Bytes of pinned chunks by tenant; a chunk that is pinned twice counts twice.
    bytes: Shares,
}

#[derive(Debug)]
struct Pin {
    tenant: TenantId,
    chunks: Box<[ChunkId]>,
    deadline: Millis,
    bytes: u64,
}

impl Pins {
    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.total()
    }

    /// The pinned chunks, each with the milliseconds until its longest pin ends.
    pub(super) fn left_ms(&self, now: Millis) -> HashMap<ChunkId, u64> {
        let mut left = HashMap::new();
        for pin in self.pins.values() {
            for &chunk in &pin.chunks {
                let longest = left.entry(chunk).or_default();
                *longest = pin.deadline.since(now).max(*longest);
            }
        }
        left
    }

    pub(super) fn facts(&self, now: Millis) -> impl Iterator<Item = PinFacts> {
        self.pins.iter().map(move |(&pin, kept)| PinFacts {
            pin,
            tenant: kept.tenant,
            chunks: kept.chunks.len() as u64,
            bytes: kept.bytes,
            left_ms: kept.deadline.since(now),
        })
    }
}

impl Store {
    /// Keeps the longest prefix that is here from eviction, for `duration_ms`, at most as long as pins may last.
    ///
    /// # Errors
    /// [`Refused::Busy`] if no more may be pinned; also the errors of [`Store::lookup`].
    pub fn pin(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        duration_ms: u64,
        now: Millis,
    ) -> Result<Pinned, Refused> {
        let (number, _) = self.slices(session, namespace)?;
        let chunks = self.pinnable(number, chain)?;
        self.pin_chunks(session, number, chunks, duration_ms, now)
    }

    /// As [`Store::pin`], for an admin, who has no session. The pin belongs to the namespace's tenant. Nothing is pinned if the
    /// namespace is unknown.
    ///
    /// # Errors
    /// As [`Store::pin`].
    pub(crate) fn pin_for_admin(
        &mut self,
        fingerprint: &Fingerprint,
        chain: &Chain,
        duration_ms: u64,
        now: Millis,
    ) -> Result<Pinned, Refused> {
        let Some(number) = self.namespaces.of(fingerprint) else {
            return Ok(Pinned { pin: 0, chunks: 0, duration_ms });
        };
        let (tenant, chunks) = (self.namespaces.get(number).tenant, self.pinnable(number, chain)?);
        self.pin_of_tenant(tenant, number, chunks, duration_ms, now)
    }

    /// The longest prefix of a chain that is here and can be restored.
    fn pinnable(&self, number: NamespaceId, chain: &Chain) -> Result<Box<[ChunkId]>, Refused> {
        let mut chunks: Vec<ChunkId> =
            self.walk(number, chain)?.into_iter().map_while(Presence::here).collect();
        chunks.truncate(self.restorable(&self.namespaces.get(number).rules, &chunks));
        Ok(chunks.into())
    }

    /// Keeps chunks that can be read from eviction.
    pub(super) fn pin_chunks(
        &mut self,
        session: SessionId,
        number: NamespaceId,
        chunks: Box<[ChunkId]>,
        duration_ms: u64,
        now: Millis,
    ) -> Result<Pinned, Refused> {
        let tenant = self.session(session)?.tenant;
        self.pin_of_tenant(tenant, number, chunks, duration_ms, now)
    }

    fn pin_of_tenant(
        &mut self,
        tenant: TenantId,
        number: NamespaceId,
        chunks: Box<[ChunkId]>,
        duration_ms: u64,
        now: Millis,
    ) -> Result<Pinned, Refused> {
        let duration_ms = duration_ms.min(self.limits.max_pin_ms);
        if chunks.is_empty() {
            return Ok(Pinned { pin: 0, chunks: 0, duration_ms });
        }
        let bytes = chunks.len() as u64 * self.whole_chunk_bytes(number);
        let (most, tenants) = (self.limits.max_pinned_bytes, &self.limits.tenant_bytes);
        if !self.pins.bytes.may_add(tenant, bytes, most, tenants) {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: PIN_RETRY_MS });
        }
        // All chunks are pinned before room is made for those that were only passing: making room may take any unclaimed chunk.
        chunks.iter().rev().for_each(|&chunk| self.change(chunk, |chunk| chunk.pins += 1));
        chunks.iter().rev().for_each(|&chunk| self.admit(chunk, ChangeKind::Gained));
        let (pin, deadline) = (self.next_number(), now + duration_ms);
        let pinned = Pinned { pin, chunks: chunks.len() as u32, duration_ms };
        self.pins.bytes.add(tenant, bytes);
        self.pins.deadlines.insert((deadline, pin));
        self.pins.pins.insert(pin, Pin { tenant, chunks, deadline, bytes });
        Ok(pinned)
    }

    /// Ends a pin before its deadline. Any session of the tenant may do so.
    ///
    /// # Errors
    /// [`Refused::UnknownPin`] for a pin that the tenant does not have.
    pub fn unpin(&mut self, session: SessionId, pin: u64) -> Result<(), Refused> {
        let tenant = self.session(session)?.tenant;
        if self.pins.pins.get(&pin).is_none_or(|known| known.tenant != tenant) {
            return Err(Refused::UnknownPin(pin));
        }
        self.end_pin(pin);
        self.evict_above_watermark();
        Ok(())
    }

    /// As [`Store::unpin`], for an admin, who may end any tenant's pin.
    ///
    /// # Errors
    /// [`Refused::UnknownPin`] for a pin that does not exist.
    pub(crate) fn unpin_for_admin(&mut self, pin: u64) -> Result<(), Refused> {
        if !self.pins.pins.contains_key(&pin) {
            return Err(Refused::UnknownPin(pin));
        }
        self.end_pin(pin);
        self.evict_above_watermark();
        Ok(())
    }

    /// Ends the pins whose deadline is not after `now`.
    pub(super) fn expire_pins(&mut self, now: Millis) {
        let mut ended = false;
        while let Some(&(deadline, pin)) = self.pins.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end_pin(pin);
            ended = true;
        }
        if ended {
            self.evict_above_watermark();
        }
    }

    /// Takes these chunks out of all pins.
    pub(super) fn end_pins_of(&mut self, ids: &[ChunkId]) {
        let pinned: Vec<ChunkId> = ids.iter().copied().filter(|&id| self.index.get(id).pins > 0).collect();
        if pinned.is_empty() {
            return;
        }
        let bytes_of = |&id: &ChunkId| (id, self.whole_chunk_bytes(self.index.get(id).namespace));
        let bytes_of: HashMap<ChunkId, u64> = pinned.iter().map(bytes_of).collect();
        for pin in self.pins.pins.values_mut() {
            let bytes: u64 = pin.chunks.iter().filter_map(|chunk| bytes_of.get(chunk)).sum();
            if bytes > 0 {
                pin.chunks =
                    pin.chunks.iter().copied().filter(|chunk| !bytes_of.contains_key(chunk)).collect();
                pin.bytes -= bytes;
                self.pins.bytes.take(pin.tenant, bytes);
            }
        }
        pinned.into_iter().for_each(|id| self.change(id, |chunk| chunk.pins = 0));
    }

    /// Ends all pins of a tenant.
    pub(super) fn end_pins_of_tenant(&mut self, tenant: TenantId) {
        let its = self.pins.pins.iter().filter(|(_, pin)| pin.tenant == tenant);
        let its: Vec<u64> = its.map(|(&number, _)| number).collect();
        its.into_iter().for_each(|number| self.end_pin(number));
    }

    fn end_pin(&mut self, pin: u64) {
        let Some(Pin { tenant, chunks, deadline, bytes }) = self.pins.pins.remove(&pin) else { return };
        self.pins.deadlines.remove(&(deadline, pin));
        self.pins.bytes.take(tenant, bytes);
        for &chunk in chunks.iter().rev() {
            self.change(chunk, |chunk| chunk.pins -= 1);
        }
    }
}

/// The pause for a request that finds too much pinned: pins last long.
const PIN_RETRY_MS: u64 = 1_000;
