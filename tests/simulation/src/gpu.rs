//! The GPU of an actor: engines' pages, the device tier's pool, and copies between them and blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_core::store::BlockFacts;
use larder_core::store::ids::SessionId;
use larder_core::{
    BlockAt, CopyDirection, DeviceCopyNumber, DeviceEvent, DeviceFailure, DeviceOrder, DeviceWork, Event,
    PagesCopy, Tensors,
};
use larder_node::arena::ExtentMemory;

use crate::bytes::Doing;
use crate::world::{ActorHappening, At, World};

/// A GPU.
#[derive(Default)]
pub(crate) struct Gpu {
    tensors: BTreeMap<u32, Pages>,
    pool: Vec<u8>,
    under_way: BTreeMap<DeviceCopyNumber, Copy>,
    last_tensors: u32,
}

/// The pages of an engine's tensors, layer by layer.
struct Pages {
    session: SessionId,
    facts: BlockFacts,
    pages: u32,
    pages_per_chunk: u32,
    bytes: Vec<u8>,
}

struct Copy {
    order: DeviceOrder,
    memory: BTreeMap<u32, Arc<ExtentMemory>>,
    life: u64,
}

/// A step of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Layer(DeviceCopyNumber, u32),
    End(DeviceCopyNumber),
    Gone,
}

impl Pages {
    fn page_bytes(&self) -> u64 {
        self.facts.layer_bytes() / u64::from(self.pages_per_chunk)
    }

    /// The offset of a layer of a page.
    fn at(&self, layer: u32, page: u32) -> usize {
        ((u64::from(layer) * u64::from(self.pages) + u64::from(page)) * self.page_bytes()) as usize
    }
}

impl Gpu {
    /// Registers an engine's pages. Returns the device's own number of them.
    pub(crate) fn know(
        &mut self,
        session: SessionId,
        facts: BlockFacts,
        namespace: u32,
        block: usize,
    ) -> Tensors {
        self.last_tensors += 1;
        let (pages, pages_per_chunk, id) = (PAGES, 2, self.last_tensors);
        let bytes = vec![0; (u64::from(pages) * u64::from(facts.layers) * facts.layer_bytes() / 2) as usize];
        self.tensors.insert(id, Pages { session, facts, pages, pages_per_chunk, bytes });
        Tensors { id, namespace, block, facts, pages, pages_per_chunk }
    }

    /// Writes a chunk's block into two of an engine's pages, as the engine does.
    pub(crate) fn fill(&mut self, id: u32, pages: &[u32], block: &[u8]) {
        let Some(tensors) = self.tensors.get_mut(&id) else { return };
        let (layers, page_bytes) = (tensors.facts.layers, tensors.page_bytes() as usize);
        let layer_bytes = tensors.facts.layer_bytes() as usize;
        for layer in 0..layers {
            for (number, &page) in pages.iter().enumerate() {
                let from = layer as usize * layer_bytes + number * page_bytes;
                let at = tensors.at(layer, page);
                tensors.bytes[at..at + page_bytes].copy_from_slice(&block[from..from + page_bytes]);
            }
        }
    }

    /// The content of two of an engine's pages.
    pub(crate) fn read(&self, id: u32, pages: &[u32]) -> Option<Vec<u8>> {
        let tensors = self.tensors.get(&id)?;
        let (page_bytes, mut block) = (tensors.page_bytes() as usize, Vec::new());
        for layer in 0..tensors.facts.layers {
            for &page in pages {
                let at = tensors.at(layer, page);
                block.extend_from_slice(&tensors.bytes[at..at + page_bytes]);
            }
        }
        Some(block)
    }

    pub(crate) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    fn carry_out(&mut self, Copy { order, memory, .. }: &Copy) {
        self.pool.resize(order.pool_bytes as usize, 0);
        match &order.work {
            DeviceWork::Promote(blocks) => {
                for block in blocks {
                    let Some(memory) = memory.get(&block.from.extent) else { continue };
                    let to = &mut self.pool[block.to as usize..][..block.bytes as usize];
                    let copied = memory.copy_out(block.from.offset, to);
                    debug_assert!(copied.is_ok(), "a block lies within its extent");
                }
            }
            DeviceWork::Pages(copy) => self.copy_pages(copy, memory),
        }
    }

    fn copy_pages(&mut self, copy: &PagesCopy, memory: &BTreeMap<u32, Arc<ExtentMemory>>) {
        let Some(tensors) = self.tensors.get_mut(&copy.tensors) else { return };
        let (page_bytes, layer_bytes) = (tensors.page_bytes(), tensors.facts.layer_bytes());
        for (number, &page) in (copy.first_page..).zip(&copy.pages) {
            let (chunk, within) =
                (number / u64::from(copy.pages_per_chunk), number % u64::from(copy.pages_per_chunk));
            for layer in copy.layers.clone() {
                let in_block = u64::from(layer) * layer_bytes + within * page_bytes;
                let at = tensors.at(layer, page);
                let bytes = &mut tensors.bytes[at..at + page_bytes as usize];
                match (copy.blocks[chunk as usize], copy.way) {
                    (BlockAt::Host(place), way) => {
                        let Some(memory) = memory.get(&place.extent) else { continue };
                        let copied = match way {
                            CopyDirection::Load => memory.copy_out(place.offset + in_block, bytes),
                            CopyDirection::Save => memory.copy_in(place.offset + in_block, bytes),
                        };
                        debug_assert!(copied.is_ok(), "a block lies within its extent");
                    }
                    (BlockAt::Pool(offset), _) => {
                        let from = (offset + in_block) as usize;
                        bytes.copy_from_slice(&self.pool[from..from + page_bytes as usize]);
                    }
                }
            }
        }
    }
}

impl World {
    /// Begins a copy on the GPU, or tells the core that the GPU is too busy.
    pub(crate) fn device_copy(&mut self, at: At, order: DeviceOrder) {
        let number = order.number;
        let is_stuck = self.hosts[at.life.host].stuck_gpu;
        let is_taken = !self.chance(self.hosts[at.life.host].busy_disk);
        self.tell_device(at, DeviceEvent::Took { number, is_taken });
        if !is_taken {
            return;
        }
        let Some(actor) = self.actor(at) else { return };
        let size = match &order.work {
            DeviceWork::Pages(copy) => actor
                .gpu
                .tensors
                .get(&copy.tensors)
                .map(|pages| (pages.facts.bytes, pages.facts.layer_bytes())),
            DeviceWork::Promote(_) => None,
        };
        let mut spans = Vec::new();
        let mut is_written = false;
        match &order.work {
            DeviceWork::Pages(copy) => {
                is_written = copy.way == CopyDirection::Save;
                let (_, layer_bytes) = size.unwrap_or_default();
                for block in &copy.blocks {
                    if let BlockAt::Host(place) = block {
                        let from = place.offset + u64::from(copy.layers.start) * layer_bytes;
                        let to = place.offset + u64::from(copy.layers.end) * layer_bytes;
                        spans.push((place.extent, from, to));
                    }
                }
            }
            DeviceWork::Promote(blocks) => {
                let span = |block: &larder_core::Promoted| {
                    (block.from.extent, block.from.offset, block.from.offset + block.bytes)
                };
                spans.extend(blocks.iter().map(span));
            }
        }
        let memory = spans
            .iter()
            .filter_map(|&(extent, ..)| Some((extent, Arc::clone(actor.memory[extent as usize].as_ref()?))));
        let memory = memory.collect();
        let life = actor.life;
        self.begin_spans(at, Doing::Device(number.0), &spans, is_written);
        let layers = match &order.work {
            DeviceWork::Pages(copy) if copy.by_layer => copy.layers.len() as u32,
            _ => 0,
        };
        if let Some(actor) = self.actor(at) {
            actor.gpu.under_way.insert(number, Copy { order, memory, life });
        }
        if is_stuck {
            return;
        }
        let mut after = Duration::ZERO;
        for layer in 1..=layers {
            after += self.some_us(20, 200);
            self.plan_actor(at, after, ActorHappening::Device(Step::Layer(number, layer)));
        }
        after += self.some_us(50, 1_000);
        self.plan_actor(at, after, ActorHappening::Device(Step::End(number)));
    }

    pub(crate) fn device_works(&mut self, at: At, step: Step) {
        let fails = self.chance(self.hosts[at.life.host].failing_copies);
        let Some(actor) = self.actor(at) else { return };
        match step {
            Step::Layer(number, done) => {
                if actor.gpu.under_way.contains_key(&number) {
                    self.tell_device(at, DeviceEvent::Layers { number, done });
                }
            }
            Step::End(number) => {
                let Some(copy) = actor.gpu.under_way.remove(&number) else { return };
                actor.gpu.carry_out(&copy);
                actor.uses.end(copy.life, Doing::Device(number.0));
                drop(copy);
                let result = if fails { Err(DeviceFailure::Failed) } else { Ok(()) };
                self.tell_device(at, DeviceEvent::Ended { number, result });
            }
            Step::Gone => {
                let copies = std::mem::take(&mut actor.gpu.under_way);
                copies.iter().for_each(|(number, copy)| actor.uses.end(copy.life, Doing::Device(number.0)));
                actor.gpu.tensors.clear();
                self.tell_device(at, DeviceEvent::Gone);
            }
        }
        self.tell(at, Event::Alarm);
    }

    /// Nobody waits for a copy any more: it may be stopped before it begins.
    pub(crate) fn cancel_device_copy(&mut self, at: At, number: DeviceCopyNumber) {
        let helps = self.random.bool();
        let Some(actor) = self.actor(at) else { return };
        if helps && let Some(copy) = actor.gpu.under_way.remove(&number) {
            actor.uses.end(copy.life, Doing::Device(number.0));
            self.tell_device(at, DeviceEvent::Ended { number, result: Err(DeviceFailure::Refused) });
        }
    }

    /// The GPU is lost; a little later it is closed.
    pub(crate) fn device_is_lost(&mut self, at: At) {
        if self.actor(at).is_none() {
            return;
        }
        self.tell_device(at, DeviceEvent::Lost);
        let numbers: Vec<DeviceCopyNumber> =
            self.actor(at).map(|actor| actor.gpu.under_way.keys().copied().collect()).unwrap_or_default();
        for number in numbers {
            self.tell_device(at, DeviceEvent::Ended { number, result: Err(DeviceFailure::Lost) });
        }
        self.tell(at, Event::Alarm);
        let after = self.some_us(1_000, 900_000);
        self.plan_actor(at, after, ActorHappening::Device(Step::Gone));
    }

    pub(crate) fn device_closes(&mut self, at: At, session: SessionId) {
        if let Some(actor) = self.actor(at) {
            let busy: Vec<u32> = actor.gpu.under_way.values().filter_map(Copy::tensors).collect();
            actor.gpu.tensors.retain(|id, pages| pages.session != session || busy.contains(id));
        }
    }

    fn tell_device(&mut self, at: At, event: DeviceEvent) {
        self.coverage.note(crate::coverage::device(&event));
        self.tell_at_once(at, Event::Device(event));
    }
}

impl Copy {
    fn tensors(&self) -> Option<u32> {
        if let DeviceWork::Pages(copy) = &self.order.work { Some(copy.tensors) } else { None }
    }
}

/// Pages of each engine.
pub(crate) const PAGES: u32 = 16;
