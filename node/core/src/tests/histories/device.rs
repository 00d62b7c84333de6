//! The device of a history: engines load and save pages, blocks go into the device tier, copies succeed, fail, come late or never
//! end, and the device is lost.
//!
//! The tier's pool is one more extent of the model.

use larder_protocol::lane::{AskCopy, CopyWords, LoadPages, SavePages};

use super::*;
use crate::{
    BlockAt, CopyDirection, DeviceCopyNumber, DeviceEvent, DeviceFailure, DeviceOrder, DeviceWork, PagesCopy,
    Promoted, Tensors,
};

/// A copy that the device has taken.
pub(super) struct DeviceCopy {
    number: DeviceCopyNumber,
    reads: Vec<Reading>,
    writes: Vec<(Range, Name)>,
    /// Whether the copy's end was told, although the device may still touch the memory.
    is_told: bool,
}

impl DeviceCopy {
    /// Whether the copy's end was told, although the device may still touch the memory.
    pub(super) fn is_told(&self) -> bool {
        self.is_told
    }

    pub(super) fn ranges(&self) -> Vec<Range> {
        let read = self.reads.iter().map(|reading| reading.at);
        read.chain(self.writes.iter().map(|&(at, _)| at)).collect()
    }
}

impl History {
    /// Makes the device know the tensors of a session, for each of its namespaces.
    pub(super) fn know_tensors(&mut self, tenant: u16, session: SessionId) -> Vec<(Fingerprint, u32)> {
        let mut known = Vec::new();
        for &Space { fingerprint, namespace, .. } in self.spaces.iter().filter(|of| of.tenant == tenant) {
            let facts = self.core.may_know_tensors(session, namespace, 0).unwrap();
            self.last_tensors += 1;
            let (id, pages, pages_per_chunk) = (self.last_tensors, 16, 2);
            let tensors = Tensors { id, namespace, block: 0, facts, pages, pages_per_chunk };
            known.push((fingerprint, self.core.know_tensors(session, tensors).unwrap()));
        }
        known
    }

    /// Makes an engine load a lease, save reserved chunks, or ask for the progress of a copy.
    pub(super) fn copy_pages(&mut self, at: usize) {
        match self.random.u8(..5) {
            0..2 => self.load(at),
            2..4 => self.save(at),
            _ => self.ask_for_copy(at),
        }
    }

    fn load(&mut self, at: usize) {
        let Live { leases, tensors, .. } = &self.sessions[at];
        let Some((&lease, held)) = leases.iter().min_by_key(|(number, _)| **number) else { return };
        let Some(Reading { name: (fingerprint, _), .. }) = held.first() else { return };
        let Some(&(_, tensors)) = tensors.iter().find(|(of, _)| of == fingerprint) else { return };
        self.copied_names = held.iter().map(|reading| reading.name).collect();
        let pages = (0..2 * held.len() as u32).collect();
        let (from_layer, to_layer, words) = (self.random.u32(..2), 2, CopyWords::default());
        let by_layer = self.random.bool();
        let ask = LoadPages { lease, tensors, pages, first_page: 0, from_layer, to_layer, by_layer, words };
        self.asks_only(at, Request::LoadPages(ask));
    }

    /// Saves one layer, or all layers that were not given yet.
    fn save(&mut self, at: usize) {
        let Live { reservations, tensors, .. } = &mut self.sessions[at];
        let Some(reserved) = reservations.last_mut().filter(|reserved| reserved.given < 2) else { return };
        let fingerprint = reserved.names[0].0;
        let Some(&(_, tensors)) = tensors.iter().find(|(of, _)| *of == fingerprint) else { return };
        let from_layer = reserved.given;
        reserved.given = if self.random.bool() { 2 } else { from_layer + 1 };
        self.copied_names.clone_from(&reserved.names);
        let ask = SavePages {
            reservation: reserved.number,
            chunks: reserved.chunks.clone(),
            tensors,
            pages: (0..2 * reserved.chunks.len() as u32).collect(),
            from_layer,
            to_layer: reserved.given,
            words: CopyWords::default(),
        };
        self.asks_only(at, Request::SavePages(ask));
    }

    fn ask_for_copy(&mut self, at: usize) {
        let copies = &mut self.sessions[at].copies;
        if copies.is_empty() {
            return;
        }
        let copy = copies.swap_remove(self.random.usize(..copies.len()));
        if self.random.u8(..3) == 0 {
            return self.asks_only(at, Request::ForgetCopy(copy));
        }
        let (layers, wait_ms) = (self.random.u32(..=3), self.random.u64(..300));
        self.asks_only(at, Request::AskCopy(AskCopy { copy, layers, wait_ms }));
    }

    /// Plays the device: takes an order, or has too much to do.
    pub(super) fn device_copy(&mut self, DeviceOrder { number, work, .. }: DeviceOrder) {
        let (reads, writes) = match work {
            DeviceWork::Pages(copy) => self.pages_copied(&copy),
            DeviceWork::Promote(blocks) => blocks.iter().map(|block| self.promoted(block)).unzip(),
        };
        reads.iter().for_each(|reading: &Reading| self.must_hold(reading.at, reading.name));
        writes.iter().for_each(|(to, _)| self.check_free(to));
        let is_taken = self.random.u8(..8) > 0;
        if is_taken {
            self.open.push(Open::Device(DeviceCopy { number, reads, writes, is_told: false }));
        }
        self.core.handle(self.now, Event::Device(DeviceEvent::Took { number, is_taken }));
    }

    fn pages_copied(&self, copy: &PagesCopy) -> (Vec<Reading>, Vec<(Range, Name)>) {
        let named = copy.blocks.iter().zip(&self.copied_names).map(|(&block, &name)| {
            let layer_bytes = self.block_bytes(name.0) / 2;
            let (extent, start) = match block {
                BlockAt::Host(Place { extent, offset }) => (extent, offset),
                BlockAt::Pool(offset) => (POOL, offset),
            };
            let (from, to) = (u64::from(copy.layers.start), u64::from(copy.layers.end));
            ((extent, start + from * layer_bytes, start + to * layer_bytes), name)
        });
        match copy.way {
            CopyDirection::Load => (named.map(|(at, name)| Reading { at, name }).collect(), Vec::new()),
            CopyDirection::Save => (Vec::new(), named.collect()),
        }
    }

    fn promoted(&self, &Promoted { from, to, bytes }: &Promoted) -> (Reading, (Range, Name)) {
        let at = (from.extent, from.offset, from.offset + bytes);
        let name = self.memory.name_at(at).expect("what is promoted is known");
        assert_eq!(self.block_bytes(name.0), bytes, "seed {}", self.seed);
        (Reading { at, name }, ((POOL, to, to + bytes), name))
    }

    /// Cancels a copy that nobody waits for any more, if the device has not begun it.
    pub(super) fn cancel_device_copy(&mut self, number: DeviceCopyNumber) {
        let is_it =
            |open: &Open| matches!(open, Open::Device(copy) if copy.number == number && !copy.is_told);
        if self.random.bool()
            && let Some(at) = self.open.iter().position(is_it)
        {
            self.open.swap_remove(at);
            let result = Err(DeviceFailure::Refused);
            self.core.handle(self.now, Event::Device(DeviceEvent::Ended { number, result }));
        }
    }

    /// Ends a copy, now and then after a report of a layer.
    pub(super) fn device_copy_ends(&mut self, copy: DeviceCopy, fails: bool) {
        let (number, is_told) = (copy.number, copy.is_told);
        if is_told {
            // The copy's writes may come until the device is gone.
            return self.open.push(Open::Device(copy));
        }
        if self.random.u8(..3) == 0 {
            self.core.handle(self.now, Event::Device(DeviceEvent::Layers { number, done: 1 }));
        }
        let result = match fails {
            true if self.random.bool() => Err(DeviceFailure::Refused),
            true => Err(DeviceFailure::Failed),
            false => Ok(()),
        };
        for reading in copy.reads.iter().filter(|_| result.is_ok()) {
            self.must_hold(reading.at, reading.name);
        }
        for (to, name) in copy.writes.into_iter().filter(|_| result != Err(DeviceFailure::Refused)) {
            self.put_in(to, name, result.is_ok());
        }
        let again = DeviceEvent::Ended { number, result: Err(DeviceFailure::Failed) };
        self.answered.push(Event::Device(again));
        self.tell(Event::Device(DeviceEvent::Ended { number, result }));
    }

    /// Makes the device lost: its copies end for the requests that wait, but the device may touch memory until it is gone.
    pub(super) fn device_is_lost(&mut self) {
        if self.open.iter().any(|open| matches!(open, Open::DeviceGone)) {
            return;
        }
        self.tell(Event::Device(DeviceEvent::Lost));
        let mut numbers = Vec::new();
        for open in &mut self.open {
            if let Open::Device(copy) = open
                && !std::mem::replace(&mut copy.is_told, true)
            {
                numbers.push(copy.number);
            }
        }
        for number in numbers {
            let result = Err(DeviceFailure::Lost);
            self.tell(Event::Device(DeviceEvent::Ended { number, result }));
        }
        self.sessions.iter_mut().for_each(|live| live.tensors.clear());
        self.open.push(Open::DeviceGone);
    }

    /// Makes the lost device gone: engines register their tensors again.
    pub(super) fn device_is_gone(&mut self) {
        for open in std::mem::take(&mut self.open) {
            match open {
                Open::Device(copy) => {
                    for (to, name) in copy.writes {
                        self.put_in(to, name, false);
                    }
                }
                other => self.open.push(other),
            }
        }
        self.tell(Event::Device(DeviceEvent::Gone));
        for tenant in 0..2 {
            let session = self.sessions[usize::from(tenant)].session;
            self.sessions[usize::from(tenant)].tensors = self.know_tensors(tenant, session);
        }
    }
}

/// The tier's pool, as an extent.
const POOL: u32 = u32::MAX;
