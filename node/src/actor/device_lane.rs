//! What sessions ask of the device lane: tensors to be known, loads and saves to be made, news of them.
//!
//! The store says which blocks and keeps them in place, the lane's account says who hears what, the device's thread copies. What a
//! save brought is summed here, from the node's own memory, before it counts as handed over.

mod ends;
mod tier;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use actix::prelude::*;
use larder_core::store::ids::{OrderId, SessionId};
use larder_core::store::policy::Facts;
use larder_core::store::{BlockMove, LoadBlock, Refused, TierUsage};
use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::slots::SlotId;
use larder_device::thread::Report;
use larder_device::{
    DeviceError, Direction, EngineMemory, Flag, Order, PageCopy, PagedLayout, Place, TensorsId, Ticket, Work,
};
use larder_protocol::checksum::BlockKey;
use larder_protocol::handoff::HandOver;
use larder_protocol::lane::{
    AskCopy, CopyWords, IpcMemory, LoadPages, RegisterTensors, SavePages, TensorDim, TensorLayout,
    TensorMemory, TensorPlane, TensorsRegistered,
};
use larder_protocol::limits::{MAX_COPY_PAGES, MAX_SESSION_COPIES, MAX_SESSION_TENSORS, MAX_TENSOR_REGIONS};
use larder_protocol::session::{Response, Scarce};

use super::answer::Asked;
use super::{Answer, GpuActor};
use crate::arena::ExtentMemory;
use crate::copy::CopyOrder;
use crate::device_lane::{
    Account, DeviceLane, DeviceLimits, DevicePlace, DeviceTier, LaneRefused, Regions, Tensors, WORD_BYTES,
    Words,
};
use crate::metrics::LaneCopy;

/// An actor's device lane.
pub(super) struct Lane {
    lane: DeviceLane,
    account: Account<Held, Asked>,
    /// The node's own memory on the GPU.
    tier: DeviceTier,
    /// What was saved, and waits for the copy threads to sum it.
    unsummed: Vec<Saved>,
    /// What the device says; taken when the actor starts.
    pub(super) reports: Option<tokio::sync::mpsc::UnboundedReceiver<Report>>,
}

/// What a copy keeps from reuse.
struct Held {
    what: HeldBy,
    bytes: u64,
}

enum HeldBy {
    /// The load of this number in the store, and what of it the tier wants when it went well.
    Load(u64, Vec<Wanted>),
    /// The same load, whose blocks are being copied into the tier.
    Promotion(u64, Vec<(SlotId, Facts)>),
    Save(OrderId, Vec<BlockMove>),
}

/// A block that the tier wants.
struct Wanted {
    key: BlockKey,
    checksum: u64,
    range_bytes: u64,
    facts: Facts,
    memory: Arc<ExtentMemory>,
    offset: u64,
    bytes: u64,
}

/// Where a block stands.
enum BlockAt {
    Host(Arc<ExtentMemory>, u64),
    /// In the tier.
    Pool(u64),
}

/// A save whose bytes are in place.
struct Saved {
    ticket: Ticket,
    order: OrderId,
    bytes: u64,
    sums: CopyOrder,
}

/// What is copied between pages and blocks of chunks in a row.
struct Pages {
    direction: Direction,
    /// The block of each chunk.
    blocks: Vec<BlockAt>,
    /// Slots of the tier among them.
    slots: Vec<SlotId>,
    /// The first page's number, counted from the first of these chunks.
    first_page: u64,
    pages: Vec<u32>,
    layers: std::ops::Range<u32>,
    by_layer: bool,
    words: CopyWords,
}

impl Lane {
    pub(super) fn new(place: DevicePlace, limits: &DeviceLimits) -> Self {
        let (lane, reports) = DeviceLane::new(place, limits);
        let account = Account::new(limits.orders, MAX_SESSION_COPIES, limits.copy_deadline_ms);
        let tier = DeviceTier::new(limits.tier_bytes, limits.tier_policy);
        Self { lane, account, tier, unsummed: Vec::new(), reports: Some(reports) }
    }

    /// Nothing that was saved is summed any more.
    pub(super) fn forget_saves(&mut self) {
        self.unsummed.clear();
    }

    /// What the tier holds.
    pub(super) fn tier(&self) -> TierUsage {
        self.tier.usage()
    }

    /// Copies that the device has not let go of.
    pub(super) fn under_way(&self) -> u64 {
        self.account.under_way() as u64
    }
}

impl GpuActor {
    /// Makes an engine's tensors known to the device.
    pub(super) fn register_tensors(
        &mut self,
        session: SessionId,
        ask: RegisterTensors,
        descriptors: Vec<OwnedFd>,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<(), Answer> {
        let RegisterTensors { namespace, block, layout, memory } = ask;
        let block = usize::from(block);
        let facts = self.core.store.block_facts(session, namespace, block).map_err(Answer::from)?;
        let lane = &mut self.device_lane.lane;
        let prepared = engine_memory(&memory, descriptors).and_then(|memory| {
            if lane.tensors_of(session) >= MAX_SESSION_TENSORS {
                return Err(LaneRefused::TooMany { what: "tensors", most: MAX_SESSION_TENSORS });
            }
            Ok((memory, lane.words(session)?))
        });
        let (memory, words) = match prepared {
            Ok(prepared) => prepared,
            Err(refused) => return Err(Answer::from(Response::from(refused))),
        };
        let shared = words.host_memory();
        let answered = lane.call(move |device, regions: &mut Regions| {
            let check = |bytes: &[u64]| {
                let layout = PagedLayout::new(layout_of(layout), bytes).map_err(DeviceError::from)?;
                let (pages_bytes, layers) = (layout.block_bytes(), layout.layers());
                if (pages_bytes, layers) == (facts.bytes, facts.layers) {
                    return Ok(layout);
                }
                let (block_bytes, block_layers) = (facts.bytes, facts.layers);
                Err(LaneRefused::Block { pages_bytes, layers, block_bytes, block_layers })
            };
            regions.register(device, session, shared, check, memory)
        });
        let Ok(answered) = answered else { return Err(Answer::from(TOO_MANY_COPIES)) };
        let finish = answered.into_actor(self).map(move |known, actor: &mut Self, _| {
            let lost = || LaneRefused::from(actor.device_lane.lane.why_lost());
            let answer = match known.unwrap_or_else(|_| Err(lost())) {
                Ok((id, layout)) => {
                    actor.know_tensors(session, Tensors { id, layout, namespace, block, facts }, &words)
                }
                Err(refused) => Answer::from(Response::from(refused)),
            };
            actor.reply(asked, answer);
        });
        self.spawn(ctx, finish);
        Ok(())
    }

    /// The device knows a session's tensors. Of one that ended meanwhile it was told behind this.
    fn know_tensors(&mut self, session: SessionId, tensors: Tensors, words: &Words) -> Answer {
        let descriptor = match words.descriptor().try_clone_to_owned() {
            Ok(descriptor) if self.core.store.tenant(session).is_ok() => descriptor,
            Ok(_) => return Answer::from(Refused::Internal),
            Err(error) => {
                tracing::error!(%error, "no descriptor left for words: raise the limit of open files");
                return Answer::from(Refused::Internal);
            }
        };
        let Lane { lane, account, tier, .. } = &mut self.device_lane;
        account.add_slots(tier.size_slots(tensors.facts.bytes));
        let tensors = lane.add(session, tensors);
        let known = TensorsRegistered { tensors, word_bytes: WORD_BYTES };
        Answer { response: Some(Response::TensorsRegistered(known)), descriptors: vec![descriptor] }
    }

    /// Begins to load leased chunks into pages.
    pub(super) fn load_pages(&mut self, session: SessionId, ask: LoadPages) -> Result<Answer, Refused> {
        let LoadPages { lease, tensors, pages, first_page, from_layer, to_layer, by_layer, words } = ask;
        let tensors = match self.checked(session, tensors, &pages, from_layer..to_layer, words) {
            Ok(tensors) => tensors,
            Err(refused) => return Ok(Answer::from(Response::from(refused))),
        };
        let per_chunk = u64::from(tensors.layout.spec().pages_per_chunk);
        let first = first_page / per_chunk;
        let end = first_page.saturating_add(pages.len() as u64).div_ceil(per_chunk);
        let order = self.core.store.begin_load(
            session,
            lease,
            (tensors.namespace, tensors.block),
            first as usize..end as usize,
        )?;
        let (mut blocks, mut slots, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let tier = &mut self.device_lane.tier;
        for LoadBlock { place, key, checksum, range_bytes, reads, facts } in order.blocks {
            if let Some(slot) = tier.find(&key) {
                tier.touch(slot);
                blocks.push(BlockAt::Pool(tier.offset(slot)));
                slots.push(slot);
                continue;
            }
            let memory = self.arena.extent(place.extent);
            let bytes = tensors.facts.bytes;
            if tier.wants(&key, bytes, reads) {
                let memory = Arc::clone(memory);
                let offset = place.offset;
                wanted.push(Wanted { key, checksum, range_bytes, facts, memory, offset, bytes });
            }
            blocks.push(BlockAt::Host(Arc::clone(memory), place.offset));
        }
        self.metrics.read_from_tier(slots.len() as u64 * tensors.facts.bytes);
        let copied = Pages {
            direction: Direction::Load,
            blocks,
            slots,
            first_page: first_page - first * per_chunk,
            pages,
            layers: from_layer..to_layer,
            by_layer,
            words,
        };
        self.begin_copy(session, &tensors, copied, HeldBy::Load(order.load, wanted))
    }

    /// Begins to save pages as reserved chunks.
    pub(super) fn save_pages(&mut self, session: SessionId, ask: SavePages) -> Result<Answer, Refused> {
        let SavePages { reservation, chunks, tensors, pages, from_layer, to_layer, words } = ask;
        let tensors = match self.checked(session, tensors, &pages, from_layer..to_layer, words) {
            Ok(tensors) => tensors,
            Err(refused) => return Ok(Answer::from(Response::from(refused))),
        };
        let wanted = chunks.len() as u64 * u64::from(tensors.layout.spec().pages_per_chunk);
        if pages.len() as u64 != wanted {
            let refused = LaneRefused::Beyond { what: "pages", found: pages.len() as u64, of: wanted };
            return Ok(Answer::from(Response::from(refused)));
        }
        let pool = tensors.facts.pool;
        let layers = HandOver { reservation, chunks, pool, from_layer, to_layer, sources: Vec::new() };
        let order = self.core.store.begin_save(session, &layers)?;
        let fingerprint = self.core.store.fingerprint(tensors.namespace);
        if order.moves.iter().any(|block| Some(block.key.fingerprint) != fingerprint) {
            self.core.store.postpone_commit(order.order);
            return Err(Refused::Unknown { what: "reservation", number: reservation });
        }
        // Pages know where their layers stand in a whole block.
        let skipped = u64::from(from_layer) * tensors.facts.bytes / u64::from(tensors.facts.layers.max(1));
        let block = |block: &BlockMove| {
            BlockAt::Host(Arc::clone(self.arena.extent(block.place.extent)), block.place.offset - skipped)
        };
        let copied = Pages {
            direction: Direction::Save,
            blocks: order.moves.iter().map(block).collect(),
            slots: Vec::new(),
            first_page: 0,
            pages,
            layers: from_layer..to_layer,
            by_layer: words.then.is_some(),
            words,
        };
        self.begin_copy(session, &tensors, copied, HeldBy::Save(order.order, order.moves))
    }

    /// Answers how far a copy is, now or when there are news.
    pub(super) fn ask_copy(&mut self, session: SessionId, ask: AskCopy, asked: Asked) {
        let now = self.clock.now().0;
        // A session that ends waits for its answers.
        let ask = AskCopy { wait_ms: ask.wait_ms.min(MOST_WAIT_MS), ..ask };
        let unknown = self.device_lane.account.ask(now, session, ask, asked).err();
        self.tell_of_copies();
        if let Some(asked) = unknown {
            let refused = LaneRefused::NoCopy { number: ask.copy };
            self.reply(asked, Answer::from(Response::from(refused)));
        }
    }

    /// An extent has new memory: the device is to let go of the old.
    pub(super) fn extent_changed(&self) {
        self.device_lane.lane.want_sweep();
    }

    /// Nobody asks for a copy any more.
    pub(super) fn forget_copy(&mut self, session: SessionId, copy: u64) {
        if self.device_lane.account.forget(session, Ticket(copy)) {
            self.device_lane.lane.cancel(Ticket(copy));
            self.tell_of_copies();
        }
    }

    /// A session ended. What the device does for it goes on; what has not begun is given up.
    pub(super) fn end_copies_of(&mut self, session: SessionId) {
        for ticket in self.device_lane.account.close(session) {
            self.device_lane.lane.cancel(ticket);
        }
        self.device_lane.lane.close_session(session);
    }

    /// What is to be done from time to time.
    pub(super) fn look_after_copies(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.now().0;
        for ticket in self.device_lane.account.overdue(now) {
            tracing::warn!(copy = ticket.0, "a GPU did not copy in time: what it touches is quarantined");
            let Lane { account, tier, .. } = &mut self.device_lane;
            match account.held(ticket).map(|held| &held.what) {
                Some(&HeldBy::Load(load, _)) => self.core.store.quarantine_load(load),
                Some(HeldBy::Promotion(load, slots)) => {
                    slots.iter().for_each(|&(slot, _)| tier.dropped(slot));
                    self.core.store.quarantine_load(*load);
                }
                Some(&HeldBy::Save(order, _)) => self.core.store.quarantine_save(order),
                None => {}
            }
            self.metrics.lane_copied(LaneCopy::Stalled, 0);
            self.device_lane.lane.cancel(ticket);
        }
        self.device_lane.account.answer_late(now);
        self.tell_of_copies();
        self.device_lane.lane.sweep();
        self.sum_saved(ctx);
    }

    fn begin_copy(
        &mut self,
        session: SessionId,
        tensors: &Tensors,
        mut copied: Pages,
        what: HeldBy,
    ) -> Result<Answer, Refused> {
        let layers = copied.layers.len() as u32;
        let page_bytes = tensors.layout.page_bytes() * u64::from(tensors.layout.spec().planes_per_layer);
        let bytes = page_bytes * u64::from(layers) * copied.pages.len() as u64;
        let now = self.clock.now().0;
        let (reads, held) = (std::mem::take(&mut copied.slots), Held { what, bytes });
        let ticket = match self.device_lane.account.begin(now, session, layers, reads, held) {
            Ok(ticket) => ticket,
            Err(held) => {
                self.not_begun(held);
                return Err(TOO_MANY_COPIES);
            }
        };
        let (tensors, per_chunk) = (tensors.id, tensors.layout.spec().pages_per_chunk);
        let pool_bytes = self.device_lane.tier.pool_bytes();
        let submitted = self.device_lane.lane.submit(ticket, move |device, regions| {
            let find = |block: &BlockAt| match *block {
                BlockAt::Host(ref memory, offset) => {
                    Ok::<_, DeviceError>(Place { region: regions.find(device, memory)?, offset })
                }
                BlockAt::Pool(offset) => Ok(Place { region: regions.pool(device, pool_bytes)?, offset }),
            };
            let places = copied.blocks.iter().map(find).collect::<Result<Vec<_>, DeviceError>>()?;
            let (after, then) =
                (regions.flag(session, copied.words.after)?, regions.flag(session, copied.words.then)?);
            Ok(copied.order(&places, per_chunk, tensors, after, then))
        });
        if submitted.is_err() {
            if let Some(held) = self.device_lane.account.withdraw(ticket) {
                self.not_begun(held);
            }
            return Err(TOO_MANY_COPIES);
        }
        Ok(Answer::from(Response::Copying(ticket.0)))
    }

    /// The tensors of a copy that asks for nothing that there is not.
    fn checked(
        &self,
        session: SessionId,
        number: u32,
        pages: &[u32],
        layers: std::ops::Range<u32>,
        words: CopyWords,
    ) -> Result<Tensors, LaneRefused> {
        let tensors = self.device_lane.lane.find(session, number)?;
        let beyond = |what, found: u64, of: u64| Err(LaneRefused::Beyond { what, found, of });
        if !(1..=MAX_COPY_PAGES).contains(&pages.len()) {
            return beyond("pages", pages.len() as u64, MAX_COPY_PAGES as u64);
        }
        let of = tensors.layout.spec().pages;
        if let Some(&page) = pages.iter().find(|&&page| page >= of) {
            return beyond("page", page.into(), of.into());
        }
        if layers.is_empty() || layers.end > tensors.layout.layers() {
            return beyond("layers", layers.end.into(), tensors.layout.layers().into());
        }
        let most_words = WORD_BYTES / 4;
        let words = [words.after, words.then].into_iter().flatten();
        match words.map(|word| u64::from(word.word)).find(|&word| word >= most_words) {
            Some(word) => beyond("word", word, most_words),
            None => Ok(tensors),
        }
    }

    fn not_begun(&mut self, held: Held) {
        match held.what {
            HeldBy::Load(load, _) => self.core.store.end_load(load),
            HeldBy::Promotion(load, slots) => {
                slots.iter().for_each(|&(slot, _)| self.device_lane.tier.dropped(slot));
                self.core.store.end_load(load);
            }
            HeldBy::Save(order, _) => self.core.store.postpone_commit(order),
        }
    }

    fn tell_of_copies(&mut self) {
        for (asked, progress) in self.device_lane.account.take_news() {
            self.reply(asked, Answer::from(Response::CopyProgress(progress)));
        }
    }
}

impl Pages {
    fn order(
        self,
        places: &[Place],
        per_chunk: u32,
        tensors: TensorsId,
        after: Option<Flag>,
        then: Option<Flag>,
    ) -> Order {
        let copy = |(number, page): (u64, u32)| PageCopy {
            block: places[(number / u64::from(per_chunk)) as usize],
            in_chunk: (number % u64::from(per_chunk)) as u32,
            page,
        };
        let Self { direction, first_page, pages, layers, by_layer, .. } = self;
        let pages = (first_page..).zip(pages).map(copy).collect();
        Order { direction, work: Work::Pages { tensors, pages, layers, by_layer }, after, then }
    }
}

/// An engine's memory, each piece with its bytes.
fn engine_memory(
    memory: &[TensorMemory],
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(EngineMemory, u64)>, LaneRefused> {
    if memory.len() > MAX_TENSOR_REGIONS {
        return Err(LaneRefused::TooMany { what: "regions of tensors", most: MAX_TENSOR_REGIONS });
    }
    let regions = memory.iter().filter(|memory| matches!(memory, TensorMemory::Descriptor(_))).count();
    if descriptors.len() != regions {
        return Err(LaneRefused::Descriptors { found: descriptors.len(), regions });
    }
    let mut descriptors = descriptors.into_iter();
    let one = |memory: &TensorMemory| match *memory {
        TensorMemory::Ipc(IpcMemory { handle, offset, bytes }) => {
            Some((EngineMemory::Ipc { handle, offset, bytes }, bytes))
        }
        TensorMemory::Descriptor(bytes) => {
            descriptors.next().map(|descriptor| (EngineMemory::Descriptor { descriptor, bytes }, bytes))
        }
    };
    Ok(memory.iter().filter_map(one).collect())
}

/// What a session's message says of a layout, which may be anything.
fn layout_of(message: TensorLayout) -> LayoutSpec {
    let TensorLayout { planes, planes_per_layer, pages, pages_per_chunk, dims, run_bytes } = message;
    let plane = |TensorPlane { region, offset, page_stride }| Plane { region, offset, page_stride };
    LayoutSpec {
        planes: planes.into_iter().map(plane).collect(),
        planes_per_layer,
        pages,
        pages_per_chunk,
        dims: dims.into_iter().map(|TensorDim { count, stride }| Dim { count, stride }).collect(),
        run_bytes,
    }
}

/// Asking again helps as soon as a copy has ended.
const TOO_MANY_COPIES: Refused = Refused::Busy { what: Scarce::Copies, retry_after_ms: COPIES_RETRY_MS };

/// The longest that an answer waits for news: whoever wants to wait longer asks again.
const MOST_WAIT_MS: u64 = 2_000;

/// About as long as one of many copies takes.
const COPIES_RETRY_MS: u64 = 5;
