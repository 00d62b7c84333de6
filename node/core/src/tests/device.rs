//! Tests of copies by a device. The device answers early, late, twice or never. Each request is answered once, memory that the
//! device may touch is given to nobody, and only right bytes are handed out.

mod tier;

use larder_protocol::lane::{AskCopy, CopyEnd, CopyProgress, CopyWords, LoadPages, SavePages, Word};
use larder_protocol::limits::{MAX_COPY_PAGES, MAX_SESSION_TENSORS};
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::session::{Commit, Place, ReportDamage, Reserved, Scarce, Span, Tier};

use super::copies::ALONE;
use super::*;
use crate::event::PurgeStep;
use crate::{
    BlockAt, CopyAnswer, CopyDirection, CopyNumber, DeviceCopyNumber, DeviceEvent, DeviceFailure,
    DeviceOrder, DeviceWork, PagesCopy, Promoted, Tensors,
};

/// Blocks of four layers, each in two pages.
const LAYERS: u32 = 4;

/// The device's own number of the tensors.
const TENSORS: u32 = 70;

const ALL: u32 = u32::MAX;

impl World {
    /// A world whose device knows the engine's tensors, under number 1.
    fn with_device() -> Self {
        let mut w = Self::new(ALONE);
        w.layered();
        w.know_tensors();
        w
    }

    /// Registers a namespace whose blocks have layers.
    fn layered(&mut self) {
        let mut spec = spec(1);
        (spec.pools[0].layers, spec.pools[0].layer_bytes) = (LAYERS, BLOCK / u64::from(LAYERS));
        let registered = self.core.register(self.session, &spec, &[0], &[BLOCK]).unwrap();
        (self.namespace, self.fingerprint) = (registered.namespace, registered.fingerprint);
        self.root = registered.root;
    }

    fn know_tensors(&mut self) -> u32 {
        let facts = self.core.may_know_tensors(self.session, self.namespace, 0).unwrap();
        let (id, namespace) = (TENSORS, self.namespace);
        let tensors = Tensors { id, namespace, block: 0, facts, pages: 16, pages_per_chunk: 2 };
        self.core.know_tensors(self.session, tensors).unwrap()
    }

    fn lease_of(&mut self, word: &str) -> Leased {
        let request = self.lease(word);
        self.leased(request)
    }

    fn load_of(&self, lease: u64, chunks: usize) -> LoadPages {
        LoadPages {
            lease,
            tensors: 1,
            pages: (0..2 * chunks as u32).collect(),
            first_page: 0,
            from_layer: 0,
            to_layer: LAYERS,
            by_layer: true,
            words: CopyWords::default(),
        }
    }

    /// Leases all chunks of a word anew, and makes the device begin to load them.
    fn load(&mut self, word: &str) -> (DeviceCopyNumber, PagesCopy) {
        let leased = self.lease_of(word);
        let load = self.load_of(leased.lease, word.len());
        let request = self.asks(self.session, Request::LoadPages(load));
        self.begun(request)
    }

    /// Loads all chunks of a word, and ignores the effects that follow.
    fn loaded(&mut self, word: &str) -> Vec<BlockAt> {
        let (number, copy) = self.load(word);
        self.device_ended(number, Ok(()));
        copy.blocks
    }

    fn save_of(&self, reserved: &Reserved, layers: std::ops::Range<u32>) -> SavePages {
        SavePages {
            reservation: reserved.reservation,
            chunks: reserved.chunks.clone(),
            tensors: 1,
            pages: (0..2 * reserved.chunks.len() as u32).collect(),
            from_layer: layers.start,
            to_layer: layers.end,
            words: CopyWords::default(),
        }
    }

    /// Makes the device begin to save layers of reserved chunks.
    fn save(&mut self, reserved: &Reserved, layers: std::ops::Range<u32>) -> (DeviceCopyNumber, PagesCopy) {
        let request = self.asks(self.session, Request::SavePages(self.save_of(reserved, layers)));
        self.begun(request)
    }

    fn commit_saved(&mut self, Reserved { reservation, chunks, .. }: &Reserved) -> RequestId {
        let (reservation, chunks) = (*reservation, chunks.clone());
        self.asks(self.session, Request::Commit(Commit { reservation, chunks, sources: Vec::new() }))
    }

    fn device_order(&mut self) -> DeviceOrder {
        match self.next() {
            Effect::DeviceCopy(order) => order,
            other => panic!("{other:?}"),
        }
    }

    fn took(&mut self, number: DeviceCopyNumber, is_taken: bool) {
        self.tell(Event::Device(DeviceEvent::Took { number, is_taken }));
    }

    /// Makes the device take the copy of a request. The request is answered then, and not before.
    fn begun(&mut self, request: RequestId) -> (DeviceCopyNumber, PagesCopy) {
        let DeviceOrder { number, work, .. } = self.device_order();
        self.is_idle();
        self.took(number, true);
        assert_eq!(self.answered(request), Response::Copying(number.0));
        let DeviceWork::Pages(copy) = work else { panic!("{work:?}") };
        (number, copy)
    }

    /// Makes the device take a copy into the device tier.
    fn promoting(&mut self) -> (DeviceCopyNumber, Vec<Promoted>) {
        let DeviceOrder { number, work, .. } = self.device_order();
        self.took(number, true);
        let DeviceWork::Promote(blocks) = work else { panic!("{work:?}") };
        (number, blocks)
    }

    /// Loads chunks that were read before, and brings them into the device tier.
    fn promote(&mut self, word: &str) -> Vec<Promoted> {
        self.loaded(word);
        let copy = self.copy(word.len());
        self.copied(copy, word.len());
        let (number, blocks) = self.promoting();
        self.device_ended(number, Ok(()));
        blocks
    }

    fn layers(&mut self, number: DeviceCopyNumber, done: u32) {
        self.tell(Event::Device(DeviceEvent::Layers { number, done }));
    }

    fn device_ended(&mut self, number: DeviceCopyNumber, result: Result<(), DeviceFailure>) {
        self.tell(Event::Device(DeviceEvent::Ended { number, result }));
    }

    fn ask_copy(&mut self, number: DeviceCopyNumber, layers: u32, wait_ms: u64) -> RequestId {
        self.asks(self.session, Request::AskCopy(AskCopy { copy: number.0, layers, wait_ms }))
    }

    fn is_told(&mut self, of: RequestId, layers: u32, end: Option<CopyEnd>) {
        assert_eq!(self.answered(of), Response::CopyProgress(CopyProgress { layers, end }));
    }

    fn is_unknown(&mut self, number: DeviceCopyNumber) {
        let request = self.ask_copy(number, ALL, 10);
        assert_eq!(self.refused(request), Refused::NoCopy { number: number.0 });
    }

    fn is_cancelled(&mut self, number: DeviceCopyNumber) {
        assert!(matches!(self.next(), Effect::CancelDeviceCopy(cancelled) if cancelled == number));
    }

    fn busy(&mut self, request: RequestId) {
        assert!(matches!(self.refused(request), Refused::Busy { what: Scarce::Copies, .. }));
    }

    fn quarantined(&self) -> u64 {
        self.core.store.usage().bytes.quarantined
    }

    fn by_device(&self) -> u64 {
        self.core.usage().device_copies
    }

    /// The spans that a lookup of a word finds in these tiers.
    fn spans(&mut self, word: &str, tiers: &[Tier]) -> Vec<Span> {
        let ask = Lookup { tiers: tiers.to_vec(), ..self.ask(word) };
        self.asks(self.session, Request::Lookup(ask));
        let Effect::Found { found, .. } = self.next() else { panic!("it is here") };
        found.spans
    }
}

fn on_host(places: &[Place]) -> Vec<BlockAt> {
    places.iter().map(|&place| BlockAt::Host(place)).collect()
}

fn span(from: u32, to: u32, tier: Tier) -> Span {
    Span { from, to, tier }
}

#[test]
fn a_load_is_told_layer_by_layer_to_who_waits_and_once_that_it_is_done() {
    let mut w = World::with_device();
    w.put("ab");
    let leased = w.lease_of("ab");
    let request = w.asks(w.session, Request::LoadPages(w.load_of(leased.lease, 2)));
    let (number, copy) = w.begun(request);
    let expected = PagesCopy {
        way: CopyDirection::Load,
        session: w.session,
        tensors: TENSORS,
        blocks: on_host(&leased.places),
        pages_per_chunk: 2,
        first_page: 0,
        pages: vec![0, 1, 2, 3],
        layers: 0..LAYERS,
        by_layer: true,
        words: CopyWords::default(),
    };
    assert_eq!(copy, expected);
    let asked = w.ask_copy(number, 2, 50);
    w.layers(number, 1);
    assert!(w.is_idle());
    w.layers(number, 2);
    w.is_told(asked, 2, None);
    let asked = w.ask_copy(number, 2, 50);
    w.is_told(asked, 2, None);
    let late = w.ask_copy(number, ALL, 20);
    w.pass(Duration::from_millis(19));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    w.is_told(late, 2, None);
    let first = w.ask_copy(number, ALL, 50);
    let second = w.ask_copy(number, ALL, 50);
    w.device_ended(number, Ok(()));
    w.is_told(first, LAYERS, Some(CopyEnd::Done));
    w.is_told(second, LAYERS, Some(CopyEnd::Done));
    w.is_unknown(number);
    assert_eq!(w.by_device(), 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_load_of_pages_in_the_middle_of_a_lease_is_of_their_chunks_alone() {
    let mut w = World::with_device();
    w.put("abcd");
    let leased = w.lease_of("abcd");
    let load = LoadPages { first_page: 3, pages: vec![9, 8, 7], ..w.load_of(leased.lease, 1) };
    let request = w.asks(w.session, Request::LoadPages(load));
    let (_, copy) = w.begun(request);
    assert_eq!((copy.blocks, copy.first_page), (on_host(&leased.places[1..3]), 1));
}

#[test]
fn what_asks_for_what_there_is_not_is_refused_and_begins_nothing() {
    let mut w = World::with_device();
    w.put("a");
    let lease = w.lease_of("a").lease;
    let good = w.load_of(lease, 1);
    let after = CopyWords { after: Some(Word { word: 1_024, value: 1 }), then: None };
    let beyond = |what, found, of| Refused::Beyond { what, found, of };
    for (load, refused) in [
        (LoadPages { pages: vec![], ..good.clone() }, beyond("pages", 0, MAX_COPY_PAGES as u64)),
        (LoadPages { pages: vec![16], ..good.clone() }, beyond("page", 16, 16)),
        (LoadPages { to_layer: 5, ..good.clone() }, beyond("layers", 5, 4)),
        (LoadPages { from_layer: 4, ..good.clone() }, beyond("layers", 4, 4)),
        (LoadPages { words: after, ..good.clone() }, beyond("word", 1_024, 1_024)),
        (LoadPages { tensors: 2, ..good.clone() }, Refused::NoTensors { number: 2 }),
        (LoadPages { pages: vec![0; 3], ..good.clone() }, Refused::NotLeased { from: 0, to: 2 }),
    ] {
        let request = w.asks(w.session, Request::LoadPages(load));
        assert_eq!(w.refused(request), refused);
    }
    let reserved = w.reserve("xy");
    let save = SavePages { pages: vec![0, 1, 2], ..w.save_of(&reserved, 0..LAYERS) };
    let request = w.asks(w.session, Request::SavePages(save));
    assert_eq!(w.refused(request), beyond("pages", 3, 4));
    let other = w.other_session();
    let request = w.asks(other, Request::LoadPages(good));
    assert_eq!(w.refused(request), Refused::NoTensors { number: 1 });
    assert_eq!(w.by_device(), 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_copy_too_many_is_refused_and_nothing_of_it_is_kept() {
    let mut w = World::with_device();
    w.put("a");
    let lease = w.lease_of("a").lease;
    let reserved = w.reserve("x");
    let load = Request::LoadPages(w.load_of(lease, 1));
    let save = Request::SavePages(w.save_of(&reserved, 0..LAYERS));
    for ask in [&load, &save] {
        let request = w.asks(w.session, ask.clone());
        let number = w.device_order().number;
        w.took(number, false);
        w.busy(request);
        assert_eq!(w.by_device(), 0);
    }
    let mut numbers = Vec::new();
    // The others are the other tenant's.
    for _ in 0..DEVICE.orders / 2 {
        let request = w.asks(w.session, load.clone());
        numbers.push(w.begun(request).0);
    }
    for ask in [&load, &save] {
        let request = w.asks(w.session, ask.clone());
        w.busy(request);
    }
    w.device_ended(numbers[0], Ok(()));
    let request = w.asks(w.session, save);
    w.begun(request);
}

#[test]
fn the_copies_of_a_tenant_leave_half_of_the_places_to_another() {
    let mut w = World::with_device();
    w.put("a");
    let lease = w.lease_of("a").lease;
    let load = Request::LoadPages(w.load_of(lease, 1));
    for _ in 0..DEVICE.orders / 2 {
        let request = w.asks(w.session, load.clone());
        w.begun(request);
    }
    let request = w.asks(w.session, load);
    w.busy(request);
    w.session = w.core.open_session(TenantId(1), ProcessId(9), 1 << 20);
    w.layered();
    let tensors = w.know_tensors();
    let reserved = w.reserve("x");
    let save = SavePages { tensors, ..w.save_of(&reserved, 0..LAYERS) };
    let request = w.asks(w.session, Request::SavePages(save));
    w.begun(request);
}

#[test]
fn a_copy_that_takes_too_long_is_told_so_and_what_it_touches_is_nobodys_until_it_ends() {
    let mut w = World::with_device();
    w.put("ab");
    let (load, _) = w.load("ab");
    let reserved = w.reserve("xy");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    let (of_load, of_save) = (w.ask_copy(load, ALL, 1_000), w.ask_copy(save, ALL, 1_000));
    w.pass(Duration::from_millis(99));
    assert!(w.is_idle());
    assert_eq!(w.quarantined(), 0);
    w.pass(Duration::from_millis(1));
    w.is_cancelled(load);
    w.is_cancelled(save);
    w.is_told(of_load, 0, Some(CopyEnd::Stalled));
    w.is_told(of_save, 0, Some(CopyEnd::Stalled));
    assert_eq!((w.quarantined(), w.by_device()), (4 * BLOCK, 2));
    w.pass(Duration::from_millis(500));
    assert!(w.is_idle(), "each is told once");
    w.device_ended(load, Ok(()));
    assert_eq!(w.quarantined(), 2 * BLOCK);
    w.device_ended(save, Ok(()));
    assert!(w.is_idle(), "what comes late is not summed");
    assert_eq!((w.quarantined(), w.by_device()), (0, 0));
    let request = w.commit_saved(&reserved);
    assert!(matches!(w.refused(request), Refused::Unknown { .. }));
    assert!(w.is_at_rest());
}

#[test]
fn what_a_device_does_for_a_session_that_ended_goes_on_and_is_given_to_nobody() {
    let mut w = World::with_device();
    w.put("ab");
    let (load, _) = w.load("ab");
    let reserved = w.reserve("xy");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    w.ask_copy(load, ALL, 1_000);
    w.tell(Event::Closed(w.session));
    w.is_cancelled(load);
    w.is_cancelled(save);
    w.tell(Event::ProcessGone(ProcessId(0)));
    assert!(w.is_idle(), "nobody is answered");
    assert_eq!((w.quarantined(), w.by_device()), (4 * BLOCK, 2));
    let request = w.asks(w.session, Request::LoadPages(w.load_of(1, 1)));
    assert_eq!(w.refused(request), Refused::NoTensors { number: 1 }, "its tensors went with it");
    w.session = w.core.open_session(TenantId(0), ProcessId(9), 1 << 20);
    w.layered();
    w.device_ended(load, Ok(()));
    w.device_ended(save, Ok(()));
    let copy = w.copy(2);
    w.copied(copy, 2);
    assert!(w.is_idle());
    assert_eq!((w.quarantined(), w.by_device()), (0, 0));
    assert_eq!(w.held("ab"), 2);
    assert_eq!(w.held("xy"), 0);
}

#[test]
fn what_was_saved_is_done_when_it_is_summed_however_long_the_sums_wait() {
    let mut w = World::with_device();
    let reserved = w.reserve("ab");
    let (number, order) = w.save(&reserved, 0..LAYERS);
    let asked = w.ask_copy(number, ALL, 1_000);
    w.device_ended(number, Ok(()));
    let Effect::Copy { copy, session: None, moves } = w.next() else { panic!("it is summed") };
    assert!(moves.iter().all(|block| block.is_in_place && block.source.is_none()));
    assert_eq!(on_host(&moves.iter().map(|block| block.place).collect::<Vec<_>>()), order.blocks);
    assert_eq!(order.way, CopyDirection::Save);
    w.tell(Event::Copied { copy, answer: CopyAnswer::Busy });
    assert!(w.is_idle(), "it waits for the next tick");
    w.pass(Duration::from_millis(200));
    let copy = w.copy(2);
    assert!(w.is_idle(), "the device has done its part in time");
    w.copied(copy, 2);
    w.is_told(asked, LAYERS, Some(CopyEnd::Done));
    assert_eq!(w.held("ab"), 0, "it is not committed");
    let request = w.commit_saved(&reserved);
    let copy = w.copy(2);
    w.copied(copy, 2);
    assert_eq!(w.answered(request), Response::Committed(2));
    assert_eq!(w.held("ab"), 2);
    assert!(w.is_at_rest());
}

#[test]
fn layers_are_saved_into_their_place_in_whole_blocks() {
    let mut w = World::with_device();
    let reserved = w.reserve("ab");
    let (first, whole) = w.save(&reserved, 0..1);
    w.device_ended(first, Ok(()));
    let copy = w.copy(2);
    w.copied(copy, 2);
    let (second, order) = w.save(&reserved, 1..LAYERS);
    let whole_block = whole.blocks[0];
    assert_eq!((order.blocks, order.layers), (whole.blocks, 1..LAYERS));
    w.device_ended(second, Ok(()));
    let Effect::Copy { moves, .. } = w.next() else { panic!("it is summed") };
    let part = moves[0].place;
    let start = Place { offset: part.offset - BLOCK / 4, ..part };
    assert_eq!((whole_block, moves[0].bytes), (BlockAt::Host(start), 3 * BLOCK / 4));
}

#[test]
fn a_save_that_failed_or_cannot_be_summed_cannot_be_committed() {
    for failure in [DeviceFailure::Failed, DeviceFailure::Refused] {
        let mut w = World::with_device();
        let reserved = w.reserve("ab");
        let (number, _) = w.save(&reserved, 0..LAYERS);
        let asked = w.ask_copy(number, ALL, 1_000);
        w.layers(number, 1);
        w.device_ended(number, Err(failure));
        let end = if failure == DeviceFailure::Failed { CopyEnd::Failed } else { CopyEnd::Refused };
        w.is_told(asked, 1, Some(end));
        let request = w.commit_saved(&reserved);
        assert!(matches!(w.refused(request), Refused::Unknown { .. }));
        assert_eq!(w.core.store.usage().bytes.used, 0);
    }
    for answer in [CopyAnswer::Failed, CopyAnswer::Impossible] {
        let mut w = World::with_device();
        let reserved = w.reserve("ab");
        let (number, _) = w.save(&reserved, 0..LAYERS);
        w.device_ended(number, Ok(()));
        let copy = w.copy(2);
        w.tell(Event::Copied { copy, answer });
        let asked = w.ask_copy(number, ALL, 1_000);
        w.is_told(asked, 0, Some(CopyEnd::Failed));
        let request = w.commit_saved(&reserved);
        assert!(matches!(w.refused(request), Refused::Unknown { .. }));
        assert!(w.is_at_rest());
    }
}

#[test]
fn a_session_that_ends_while_its_save_waits_for_sums_leaves_nothing() {
    let mut w = World::with_device();
    let reserved = w.reserve("ab");
    let (number, _) = w.save(&reserved, 0..LAYERS);
    w.device_ended(number, Ok(()));
    let copy = w.copy(2);
    w.tell(Event::Copied { copy, answer: CopyAnswer::Busy });
    w.tell(Event::Closed(w.session));
    assert_eq!(w.quarantined(), 2 * BLOCK, "what reads it is not told of");
    w.pass(Duration::from_millis(50));
    let copy = w.copy(2);
    w.copied(copy, 2);
    assert!(w.is_at_rest());
    assert_eq!((w.core.store.usage().bytes.used, w.by_device()), (0, 0));
}

#[test]
fn a_copy_that_is_forgotten_is_given_up_and_its_number_means_nothing() {
    let mut w = World::with_device();
    w.put("a");
    let (number, _) = w.load("a");
    let asked = w.ask_copy(number, ALL, 1_000);
    let other = w.other_session();
    w.asks(other, Request::ForgetCopy(number.0));
    assert!(w.is_idle(), "it is not the other session's");
    w.asks(w.session, Request::ForgetCopy(number.0));
    w.is_cancelled(number);
    w.is_told(asked, 0, None);
    w.is_unknown(number);
    assert_eq!(w.by_device(), 1, "the device has it still");
    w.device_ended(number, Err(DeviceFailure::Refused));
    assert!(w.is_at_rest());
    assert_eq!(w.by_device(), 0);
}

#[test]
fn what_a_lost_device_may_touch_stays_until_it_is_gone() {
    let mut w = World::with_device();
    w.put("ab");
    w.loaded("ab");
    w.promote("ab");
    let (load, _) = w.load("ab");
    let reserved = w.reserve("x");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    let asked = w.ask_copy(load, ALL, 1_000);
    w.tell(Event::Device(DeviceEvent::Lost));
    assert_eq!(w.spans("ab", &[]), [span(0, 2, Tier::Host)], "its memory went with it");
    w.device_ended(load, Err(DeviceFailure::Lost));
    w.is_told(asked, 0, Some(CopyEnd::Lost));
    w.device_ended(save, Err(DeviceFailure::Lost));
    let asked = w.ask_copy(save, ALL, 0);
    w.is_told(asked, 0, Some(CopyEnd::Lost));
    assert_eq!(w.by_device(), 2);
    let lease = w.lease_of("ab").lease;
    let request = w.asks(w.session, Request::LoadPages(w.load_of(lease, 2)));
    assert_eq!(w.refused(request), Refused::NoTensors { number: 1 });
    w.pass(Duration::from_millis(200));
    assert!(w.is_idle(), "they were told how they ended");
    w.tell(Event::Device(DeviceEvent::Gone));
    assert!(w.is_idle());
    assert_eq!(w.by_device(), 0);
    let request = w.commit_saved(&reserved);
    assert!(matches!(w.refused(request), Refused::Unknown { .. }));
    assert!(w.is_at_rest());
}

#[test]
fn a_device_that_is_gone_without_a_report_has_lost_all_its_copies() {
    let mut w = World::with_device();
    w.put("a");
    let (load, _) = w.load("a");
    let reserved = w.reserve("x");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    let (of_load, of_save) = (w.ask_copy(load, ALL, 1_000), w.ask_copy(save, ALL, 1_000));
    w.tell(Event::Device(DeviceEvent::Gone));
    w.is_told(of_load, 0, Some(CopyEnd::Lost));
    w.is_told(of_save, 0, Some(CopyEnd::Lost));
    w.tell(Event::Device(DeviceEvent::Gone));
    assert!(w.is_at_rest());
    assert_eq!(w.by_device(), 0);
}

#[test]
fn what_the_device_says_twice_late_or_of_nothing_changes_nothing() {
    let mut w = World::with_device();
    w.put("a");
    let (load, _) = w.load("a");
    w.took(load, true);
    w.layers(load, 1);
    w.device_ended(load, Ok(()));
    w.device_ended(load, Err(DeviceFailure::Failed));
    w.device_ended(load, Err(DeviceFailure::Lost));
    w.layers(load, 2);
    let asked = w.ask_copy(load, ALL, 0);
    w.is_told(asked, LAYERS, Some(CopyEnd::Done));
    w.took(load, false);
    let reserved = w.reserve("x");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    w.device_ended(save, Ok(()));
    let copy = w.copy(1);
    w.device_ended(save, Err(DeviceFailure::Failed));
    w.copied(CopyNumber(copy.0 + 1), 1);
    assert!(w.is_idle());
    w.copied(copy, 1);
    w.copied(copy, 1);
    let asked = w.ask_copy(save, ALL, 0);
    w.is_told(asked, LAYERS, Some(CopyEnd::Done));
    for number in [DeviceCopyNumber(99), DeviceCopyNumber(0)] {
        w.took(number, true);
        w.layers(number, 1);
        w.device_ended(number, Ok(()));
        w.is_unknown(number);
    }
    assert!(w.is_at_rest());
}

#[test]
fn after_a_fault_the_device_goes_on_and_what_it_did_means_nothing() {
    let mut w = World::with_device();
    w.put("ab");
    w.loaded("ab");
    w.promote("a");
    let (load, _) = w.load("ab");
    let reserved = w.reserve("x");
    let (save, _) = w.save(&reserved, 0..LAYERS);
    w.core.begin_anew();
    w.is_cancelled(load);
    w.is_cancelled(save);
    assert!(w.is_idle());
    assert_eq!(w.by_device(), 2);
    w.session = w.core.open_session(TenantId(0), ProcessId(9), 1 << 20);
    w.layered();
    w.device_ended(load, Ok(()));
    w.device_ended(save, Ok(()));
    assert!(w.is_idle(), "nothing is summed");
    assert_eq!((w.by_device(), w.core.usage().device_tier.blocks), (0, 1));
    w.core.store.assert_tree_is_whole();
}

#[test]
fn a_copy_that_was_not_begun_before_a_fault_is_not_begun_any_more() {
    let mut w = World::with_device();
    w.put("ab");
    let (load, _) = w.load("ab");
    let lease = w.lease_of("ab").lease;
    w.asks(w.session, Request::LoadPages(w.load_of(lease, 2)));
    assert_eq!(w.by_device(), 2);
    w.core.begin_anew();
    w.is_cancelled(load);
    assert!(w.is_idle());
    assert_eq!(w.by_device(), 1);
}

#[test]
fn pages_of_one_namespace_are_not_saved_as_chunks_of_another() {
    let mut w = World::with_device();
    let mut other = NamespaceSpec { model: "another".into(), ..spec(1) };
    (other.pools[0].layers, other.pools[0].layer_bytes) = (LAYERS, BLOCK / u64::from(LAYERS));
    let registered = w.core.register(w.session, &other, &[0], &[BLOCK]).unwrap();
    (w.namespace, w.root) = (registered.namespace, registered.root);
    let reserved = w.reserve("x");
    let request = w.asks(w.session, Request::SavePages(w.save_of(&reserved, 0..LAYERS)));
    assert!(matches!(w.refused(request), Refused::Unknown { what: "reservation", .. }));
    assert_eq!(w.by_device(), 0);
}

#[test]
fn memory_of_a_stalled_copy_whose_session_ends_is_free_when_the_device_lets_go() {
    let mut w = World::with_device();
    w.put("a");
    let (number, _) = w.load("a");
    w.pass(Duration::from_millis(100));
    w.is_cancelled(number);
    w.tell(Event::Closed(w.session));
    w.tell(Event::ProcessGone(ProcessId(0)));
    assert_eq!(w.quarantined(), BLOCK);
    w.device_ended(number, Ok(()));
    assert_eq!((w.quarantined(), w.by_device()), (0, 0));
}

#[test]
fn a_session_has_no_more_tensors_than_it_may_though_it_asked_for_them_together() {
    let mut w = World::with_device();
    let facts = w.core.may_know_tensors(w.session, w.namespace, 0).unwrap();
    let (id, namespace) = (TENSORS, w.namespace);
    let tensors = Tensors { id, namespace, block: 0, facts, pages: 16, pages_per_chunk: 2 };
    let session = w.session;
    let known =
        (0..2 * MAX_SESSION_TENSORS).filter(|_| w.core.know_tensors(session, tensors).is_ok()).count();
    assert_eq!(known, MAX_SESSION_TENSORS - 1, "it had one");
}
