//! Answers the effects of a history: with success, with failure, in part, and some of them twice.

use super::*;

impl History {
    /// Answers any effect. With `always_well`, the answer is a success.
    pub(super) fn answer_effect(&mut self, at: usize, always_well: bool) {
        let open = self.open.swap_remove(at);
        let fails = !always_well && self.random.u8(..4) == 0;
        match open {
            Open::Siblings(question, chunks) => {
                let holders =
                    (0..chunks).map(|_| if self.random.u8(..4) == 0 { of_sibling(1) } else { of(&[]) });
                let event = Event::SiblingsFound { question, holders: holders.collect() };
                self.tell(event);
            }
            Open::Directory(question, chunks) => {
                let some: [&[u16]; 4] = [&[], &[2], &[3, 2], &[4]];
                let chunks = if fails { 0 } else { chunks };
                let holders = (0..chunks).map(|_| of(some[self.random.usize(..4)])).collect();
                self.answered.push(Event::HoldersFound { question, holders: Vec::new() });
                self.tell(Event::HoldersFound { question, holders });
            }
            Open::Objects(question, chunks) => {
                let found = (0..chunks)
                    .map(|_| self.random.choice([None, Some(false), Some(true)]).flatten())
                    .collect();
                self.answered.push(Event::StoredFound { question, found: vec![Some(true)] });
                self.tell(Event::StoredFound { question, found });
            }
            Open::Order(order, places) => self.order_ended(order, places, fails),
            Open::Follow(order, places) => self.followed(order, places, always_well),
            Open::Read(read, places) => {
                if fails && self.random.u8(..20) == 0 {
                    self.open.push(Open::Lost(places));
                    return self.tell(Event::ReadEnded { read, answer: ReadAnswer::Lost });
                }
                let failures = [ReadAnswer::Missing, ReadAnswer::Busy, ReadAnswer::Impossible];
                let answer = if fails { failures[self.random.usize(..3)].clone() } else { read_here() };
                places.into_iter().for_each(|(to, name)| self.put_in(to, name, !fails));
                self.answered.push(Event::ReadEnded { read, answer: answer.clone() });
                self.tell(Event::ReadEnded { read, answer });
            }
            Open::Copy(copy, moves) => self.copied(copy, &moves, fails),
            Open::Write(number, _) => {
                let answer = match self.random.u8(..8) {
                    _ if !fails => Written::There,
                    0..4 => Written::Busy,
                    4..7 => Written::Failed,
                    _ => Written::Closed,
                };
                self.answered.push(Event::WriteEnded { number, answer: Written::There });
                self.tell(Event::WriteEnded { number, answer });
            }
            Open::Describe(fingerprint) => {
                let description = if fails { Description::Failed } else { Description::There };
                self.tell(Event::Described { fingerprint, description });
            }
            Open::Forget(unused) => {
                for fingerprint in unused {
                    self.tell(Event::Described { fingerprint, description: Description::Gone });
                }
            }
            Open::Visit(visit, after) => self.visited(visit, after, fails),
            Open::Device(copy) => self.device_copy_ends(copy, fails),
            Open::DeviceGone => self.device_is_gone(),
            Open::Lost(_) => self.open.push(open),
        }
    }

    /// Tells the core that a segment of the disk was listed or purged.
    fn visited(&mut self, visit: SegmentVisit, after: u64, fails: bool) {
        let is_list = matches!(visit, SegmentVisit::List);
        let next = (after < 3 && self.random.bool()).then_some(after + 1);
        let result = match fails {
            true if self.random.bool() => Visited::Busy,
            true => Visited::Closed,
            false if is_list => Visited::Done { held: self.some_on_disk(), next },
            false => Visited::Done { held: Vec::new(), next },
        };
        let again = Visited::Done { held: Vec::new(), next: None };
        self.answered.push(Event::SegmentVisited { visit: visit.clone(), after, result: again });
        self.tell(Event::SegmentVisited { visit, after, result });
    }

    pub(super) fn order_ended(&mut self, order: OrderNumber, places: Vec<Vec<(Range, Name)>>, fails: bool) {
        if fails && self.random.u8(..4) == 0 {
            return self.tell(Event::OrderRefused(order));
        }
        let (mut came, chunks) = (Vec::new(), places.len());
        let answered = if fails { self.random.usize(..=chunks) } else { chunks };
        for places in places.into_iter().take(answered) {
            let failures = [Arrival::NotHeld, Arrival::Busy { retry_after_ms: 5 }, Arrival::Damaged, FAILED];
            let is_here = !fails || self.random.bool();
            places.into_iter().for_each(|(to, name)| self.put_in(to, name, is_here));
            came.push(match is_here {
                true => here(self.random.u32(1..10)),
                false => failures[self.random.usize(..4)].clone(),
            });
        }
        self.answered.push(Event::OrderEnded { order, came: vec![here(1); chunks] });
        self.tell(Event::OrderEnded { order, came });
    }

    /// Plays a writer's node: sends a layer, or the rest of a chunk, or ends the order.
    pub(super) fn followed(&mut self, order: OrderNumber, mut places: Vec<Vec<(Range, Name)>>, ends: bool) {
        let chunk = self.random.usize(..places.len());
        match self.random.u8(..4) {
            end if ends || end == 0 => self.tell(Event::FollowEnded(order)),
            1 => {
                let is_here = self.random.u8(..4) > 0;
                let came = if is_here { here(1) } else { FAILED };
                let coming = std::mem::take(&mut places[chunk]);
                // Layers that were told are right already: later layers do not touch them.
                if is_here {
                    coming.into_iter().for_each(|(to, name)| self.put_in(to, name, true));
                }
                self.open.push(Open::Follow(order, places));
                self.answered.push(Event::FollowedCame { order, chunk, came: FAILED });
                self.tell(Event::FollowedCame { order, chunk, came });
            }
            _ => {
                let layer = self.random.u64(..2);
                if let Some(&((extent, from, to), name)) = places[chunk].first() {
                    let bytes = (to - from) / 2;
                    let offset = layer * bytes;
                    self.put_in((extent, from + offset, from + offset + bytes), name, true);
                    self.open.push(Open::Follow(order, places));
                    let layers = LayersArrived { block: 0, offset, bytes, checksum: 0 };
                    self.answered.push(Event::LayersCame { order, chunk, layers });
                    self.tell(Event::LayersCame { order, chunk, layers });
                } else {
                    self.open.push(Open::Follow(order, places));
                }
            }
        }
    }

    /// Ends a copy. A verification now and then finds wrong bytes.
    pub(super) fn copied(&mut self, copy: CopyNumber, moves: &[BlockMove], fails: bool) {
        let mut sums = vec![Checksums::default(); moves.len()];
        let answer = match self.random.u8(..3) {
            0 if fails => CopyAnswer::Busy,
            1 if fails => CopyAnswer::Failed,
            _ if fails => CopyAnswer::Impossible,
            _ => {
                for block in moves.iter().filter(|block| !block.is_in_place) {
                    self.put_in(range(block), (block.key.fingerprint, block.key.hash), true);
                }
                CopyAnswer::Done(sums.clone())
            }
        };
        let verifies = moves.iter().all(|block| block.is_in_place) && !fails;
        self.answered.push(Event::Copied { copy, answer: CopyAnswer::Failed });
        if verifies && self.random.u8(..4) == 0 {
            sums.iter_mut().for_each(|sums| sums.whole = 7);
            let damaged = self.core.store.usage().damaged;
            self.core.handle(self.now, Event::Copied { copy, answer: CopyAnswer::Done(sums) });
            if self.core.store.usage().damaged > damaged {
                moves.iter().for_each(|block| self.memory.condemn(range(block)));
            }
            return self.perform();
        }
        self.tell(Event::Copied { copy, answer });
    }

    /// Gives an earlier answer once more.
    pub(super) fn answer_again(&mut self) {
        if !self.answered.is_empty() {
            let event = self.answered.swap_remove(self.random.usize(..self.answered.len()));
            self.tell(event);
        }
    }
}
