//! Requests of sessions to a device: start loads and saves, and ask for news of them.

use std::ops::Range;

use larder_protocol::handoff::HandOver;
use larder_protocol::lane::{AskCopy, CopyWords, LoadPages, SavePages};
use larder_protocol::limits::MAX_COPY_PAGES;
use larder_protocol::session::Response;

use super::{CopyClaims, HeldBy, SESSION_WORDS, SlotId, TOO_MANY_COPIES, Tensors};
use crate::Core;
use crate::effect::{BlockAt, CopyDirection, Counted, DeviceOrder, DeviceWork, Effect, PagesCopy};
use crate::event::{DeviceCopyNumber, RequestId};
use crate::store::ids::SessionId;
use crate::store::{BlockMove, CommitOrder, Place, Refused};

impl Core {
    /// Begins to load leased chunks into pages.
    pub(crate) fn load_pages(&mut self, request: RequestId, ask: LoadPages) -> Result<(), Refused> {
        let LoadPages { lease, tensors, pages, first_page, from_layer, to_layer, by_layer, words } = ask;
        let layers = from_layer..to_layer;
        let Tensors { id: tensors, namespace, block, facts, pages_per_chunk, .. } =
            self.checked(request.session, tensors, &pages, &layers, words)?;
        let per_chunk = u64::from(pages_per_chunk);
        let first = first_page / per_chunk;
        let end = first_page.saturating_add(pages.len() as u64).div_ceil(per_chunk);
        let chunks = first as usize..end as usize;
        let order = self.store.begin_load(request.session, lease, (namespace, block), chunks)?;
        let (mut blocks, mut reads, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let tier = &mut self.device.tier;
        for block in order.blocks {
            if let Some(slot) = tier.find(&block.key) {
                tier.touch(slot);
                blocks.push(BlockAt::Pool(tier.offset(slot)));
                reads.push(slot);
                continue;
            }
            blocks.push(BlockAt::Host(block.place));
            if tier.wants(&block.key, block.bytes, block.reads) {
                wanted.push(block);
            }
        }
        self.count(Counted::ReadFromTier(reads.len() as u64 * facts.bytes));
        let (way, first_page) = (CopyDirection::Load, first_page - first * per_chunk);
        let copy = PagesCopy {
            way,
            session: request.session,
            tensors,
            blocks,
            pages_per_chunk,
            first_page,
            pages,
            layers,
            by_layer,
            words,
        };
        self.begin_copy(request, copy, reads, facts.layer_bytes(), HeldBy::Load(order.load, wanted))
    }

    /// Begins to save pages as reserved chunks.
    pub(crate) fn save_pages(&mut self, request: RequestId, ask: SavePages) -> Result<(), Refused> {
        let SavePages { reservation, chunks, tensors, pages, from_layer, to_layer, words } = ask;
        let layers = from_layer..to_layer;
        let Tensors { id: tensors, namespace, facts, pages_per_chunk, .. } =
            self.checked(request.session, tensors, &pages, &layers, words)?;
        let (found, of) = (pages.len() as u64, chunks.len() as u64 * u64::from(pages_per_chunk));
        if found != of {
            return Err(Refused::Beyond { what: "pages", found, of });
        }
        let pool = facts.pool;
        let saved = HandOver { reservation, chunks, pool, from_layer, to_layer, sources: Vec::new() };
        let CommitOrder { order, moves, .. } = self.store.begin_save(request.session, &saved)?;
        let fingerprint = self.store.fingerprint(namespace);
        if moves.iter().any(|block| Some(block.key.fingerprint) != fingerprint) {
            self.store.postpone_commit(order);
            return Err(Refused::Unknown { what: "reservation", number: reservation });
        }
        // The layout of the pages counts from the start of a whole block.
        let skipped = u64::from(from_layer) * facts.layer_bytes();
        let at = |&BlockMove { place: Place { extent, offset }, .. }: &BlockMove| {
            BlockAt::Host(Place { extent, offset: offset - skipped })
        };
        let copy = PagesCopy {
            way: CopyDirection::Save,
            session: request.session,
            tensors,
            blocks: moves.iter().map(at).collect(),
            pages_per_chunk,
            first_page: 0,
            pages,
            layers,
            by_layer: words.then.is_some(),
            words,
        };
        self.begin_copy(request, copy, Vec::new(), facts.layer_bytes(), HeldBy::Save(order, moves))
    }

    fn begin_copy(
        &mut self,
        request: RequestId,
        copy: PagesCopy,
        reads: Vec<SlotId>,
        layer_bytes: u64,
        what: HeldBy,
    ) -> Result<(), Refused> {
        let (session, layers) = (copy.session, copy.layers.len() as u32);
        let of_chunk = u64::from(layers) * layer_bytes;
        let bytes = copy.pages.len() as u64 * of_chunk / u64::from(copy.pages_per_chunk);
        let tenant = self.store.tenant(session).ok();
        let held = CopyClaims { what, tenant, bytes };
        // Half of the places is left to the other tenants.
        let begun = if self.store.has_several_tenants()
            && self.device.account.takes_half(|claims| claims.tenant == tenant)
        {
            Err(held)
        } else {
            self.device.account.begin(self.millis().0, session, layers, reads, held)
        };
        match begun {
            Ok(number) => {
                self.device.untaken.insert(number, request);
                self.order_device_copy(number, DeviceWork::Pages(copy));
                Ok(())
            }
            Err(held) => {
                self.not_begun(held);
                Err(TOO_MANY_COPIES)
            }
        }
    }

    pub(super) fn order_device_copy(&mut self, number: DeviceCopyNumber, work: DeviceWork) {
        let pool_bytes = self.device.tier.pool_bytes();
        self.effects.push_back(Effect::DeviceCopy(DeviceOrder { number, pool_bytes, work }));
    }

    /// Checks a request for a copy, and returns its tensors.
    fn checked(
        &self,
        session: SessionId,
        number: u32,
        pages: &[u32],
        layers: &Range<u32>,
        words: CopyWords,
    ) -> Result<Tensors, Refused> {
        let tensors = self.device.tensors.get(&(session, number)).ok_or(Refused::NoTensors { number })?;
        let beyond = |what, found: u64, of: u64| Err(Refused::Beyond { what, found, of });
        if !(1..=MAX_COPY_PAGES).contains(&pages.len()) {
            return beyond("pages", pages.len() as u64, MAX_COPY_PAGES as u64);
        }
        if let Some(&page) = pages.iter().find(|&&page| page >= tensors.pages) {
            return beyond("page", page.into(), tensors.pages.into());
        }
        if layers.is_empty() || layers.end > tensors.facts.layers {
            return beyond("layers", layers.end.into(), tensors.facts.layers.into());
        }
        let mut words = [words.after, words.then].into_iter().flatten().map(|word| u64::from(word.word));
        match words.find(|&word| word >= SESSION_WORDS) {
            Some(word) => beyond("word", word, SESSION_WORDS),
            None => Ok(*tensors),
        }
    }

    /// Answers with the progress of a copy, at once or when there is news.
    pub(crate) fn ask_copy(&mut self, request: RequestId, ask: AskCopy) -> Result<(), Refused> {
        // The end of a session waits for its answers.
        let ask = AskCopy { wait_ms: ask.wait_ms.min(MOST_WAIT_MS), ..ask };
        if self.device.account.ask(self.millis().0, ask, request) {
            return Ok(());
        }
        Err(Refused::NoCopy { number: ask.copy })
    }

    /// Forgets a copy: nobody will ask for it.
    pub(crate) fn forget_copy(&mut self, session: SessionId, copy: u64) {
        if self.device.account.forget(session, DeviceCopyNumber(copy)) {
            self.effects.push_back(Effect::CancelDeviceCopy(DeviceCopyNumber(copy)));
        }
    }

    /// Answers the requests that wait for news of a copy.
    pub(crate) fn tell_of_copies(&mut self) {
        for (request, progress) in self.device.account.take_news() {
            self.answer(request, Response::CopyProgress(progress));
        }
    }
}

/// The longest that an answer waits for news; a caller that wants to wait longer asks again.
const MOST_WAIT_MS: u64 = 2_000;
