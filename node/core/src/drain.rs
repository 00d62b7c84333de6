//! Drains: a node that leaves moves its warm chunks to others first.
//!
//! Chunks move in the order of their worth here, the last to be evicted first. A chunk stays if another node holds it too, as
//! long as that node does not leave; if the object store has it; or if it is on the disk of a node that comes back. The others
//! are offered in batches: the actor asks the directory who else has them, then asks the taker with the most room to keep the
//! rest, and waits for its answer. The taker fetches them like any other chunk ([`take`]), so the usual path checks names,
//! checksums and bounds. A taker that does not answer, or refuses all, is not asked again while another taker takes something; a
//! taker that refuses a namespace is not asked for this namespace. If no taker does, takers that refuse are asked a few more
//! times: they may not know yet who asks. Silent takers are asked for 5 seconds: they may stand still for a moment. A drain is
//! over when nothing is left to offer, when each taker's next victim is worth more than the chunks that are left, when no taker
//! takes anything, or when its time is up.
//!
//! While it drains, an actor serves reads and keeps nothing new: engines are told that there is nothing to write, and fetched
//! chunks pass.

mod queue;
pub mod take;
mod takers;

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::drain::{DrainCounts, TakeNamespace, Taken, WHOLE_RANK_PPM};
use larder_protocol::table::Holder;

use crate::Core;
use crate::directory::Holders;
use crate::effect::{Effect, TakeOrder};
use crate::event::{DrainOrder, OtherNodes, QuestionId, TakeNumber};
use crate::store::ids::ChunkId;
use queue::{Batch, Candidate, Queue};
use takers::Takers;

/// The progress of an actor's drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DrainProgress {
    /// The counts of its chunks.
    pub chunks: DrainCounts,
    /// Whether nothing more will move.
    pub is_over: bool,
}

/// A drain under way.
#[derive(Debug)]
pub(crate) struct Drain {
    order: DrainOrder,
    takers: Takers,
    queue: Queue,
    step: DrainStep,
    /// When the budget allows the next batch.
    not_before: Duration,
    /// How often takers may be asked for their room again.
    asks_left: u8,
    /// The end of the patience with silent takers; `None` before the first pause for them, and whenever chunks have moved.
    silent_until: Option<Duration>,
    /// Whether the pause before asking them again has begun.
    is_pausing: bool,
    counts: DrainCounts,
    is_over: bool,
}

/// What a drain waits for.
#[derive(Debug)]
enum DrainStep {
    /// The takers' room.
    Polling(BTreeMap<TakeNumber, Holder>, Duration),
    /// Nothing.
    Ready,
    /// The directory: who else has the batch.
    Asking(QuestionId, Batch),
    /// A taker's answer.
    Moving { take: TakeNumber, taker: Holder, batch: Batch, since: Duration },
}

impl Drain {
    /// The time of the next step that does not wait for a tick.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        match self.step {
            DrainStep::Ready if !self.is_over => Some(self.not_before.min(self.order.until)),
            _ => None,
        }
    }

    /// Ends the drain: chunks that are left do not move.
    fn end(&mut self) {
        if let DrainStep::Moving { batch, .. } | DrainStep::Asking(_, batch) =
            std::mem::replace(&mut self.step, DrainStep::Ready)
        {
            self.counts.left += batch.chunks.len() as u64;
        }
        self.counts.left += self.queue.clear();
        self.is_over = true;
    }
}

impl Core {
    /// Drains from now on. A drain that is under way goes on under this order.
    pub(crate) fn drain(&mut self, order: DrainOrder) {
        if let Some(drain) = &mut self.drain {
            drain.order = order;
            return;
        }
        let mut drain = Drain {
            order,
            takers: Takers::default(),
            queue: Queue::default(),
            step: DrainStep::Ready,
            not_before: self.now,
            asks_left: ASKS_AGAIN,
            silent_until: None,
            is_pausing: false,
            counts: DrainCounts::default(),
            is_over: false,
        };
        drain.takers.are(&self.others.takers);
        let polled: Vec<Holder> = drain.takers.all().take(MOST_POLLED).collect();
        self.drain = Some(drain);
        self.poll(polled);
        self.queue_leaving();
    }

    /// Asks takers for their room.
    fn poll(&mut self, takers: Vec<Holder>) {
        let mut polls = BTreeMap::new();
        for taker in takers {
            let take = TakeNumber(self.bring.next_number());
            polls.insert(take, taker);
            let order = TakeOrder { take, taker, namespace: None, chunks: Vec::new() };
            self.effects.push_back(Effect::AskToTake(order));
        }
        if let Some(drain) = self.drain.as_mut().filter(|_| !polls.is_empty()) {
            drain.step = DrainStep::Polling(polls, self.now + POLL_DEADLINE);
        }
    }

    /// After a pause, asks the takers again that refused all or did not answer. Returns `false` if there are none, or if they
    /// were asked often enough.
    fn ask_the_unwilling(&mut self) -> bool {
        let Some(drain) = &mut self.drain else { return false };
        let unwilling: Vec<Holder> = drain.takers.unwilling().take(MOST_POLLED).collect();
        let waits_for_silent =
            drain.takers.has_silent() && self.now < *drain.silent_until.get_or_insert(self.now + SILENT_FOR);
        if unwilling.is_empty() || (drain.asks_left == 0 && !waits_for_silent) {
            return false;
        }
        drain.is_pausing = !drain.is_pausing;
        if drain.is_pausing {
            drain.not_before = self.now + ASK_AGAIN_AFTER;
        } else {
            drain.asks_left = drain.asks_left.saturating_sub(1);
            self.poll(unwilling);
        }
        true
    }

    /// Ends the drain early. Chunks that moved stay where they are.
    pub(crate) fn drain_cancelled(&mut self) {
        self.drain = None;
    }

    /// Sets the actors of other nodes that may keep this actor's chunks when it drains, in the order in which they are asked, and the
    /// nodes that stay.
    pub(crate) fn others_are(&mut self, others: OtherNodes) {
        self.others = others;
        let Some(drain) = &mut self.drain else { return };
        drain.takers.are(&self.others.takers);
        let again = drain.queue.forget_held_by_others(&self.others.stay);
        if again > 0 {
            drain.counts.elsewhere -= again;
            drain.counts.found -= again;
            drain.is_over = false;
            self.queue_leaving();
        }
    }

    /// The progress of the drain; `None` without a drain.
    pub fn drain_progress(&self) -> Option<DrainProgress> {
        self.drain.as_ref().map(|drain| DrainProgress { chunks: drain.counts, is_over: drain.is_over })
    }

    /// Goes on until the drain has to wait.
    pub(crate) fn go_on_draining(&mut self) {
        while let Some(drain) = self.drain.as_mut().filter(|drain| !drain.is_over) {
            if self.now >= drain.order.until {
                return drain.end();
            }
            match drain.step {
                DrainStep::Polling(_, until) if self.now >= until => drain.step = DrainStep::Ready,
                DrainStep::Moving { take, since, .. } if self.now >= since + TAKE_DEADLINE => {
                    self.take_answered(take, None)
                }
                DrainStep::Ready if self.now >= drain.not_before => {
                    if !self.offer_next() {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// Asks the directory who else has the next batch; returns whether there was anything to do.
    fn offer_next(&mut self) -> bool {
        let (Some(drain), store) = (&mut self.drain, &self.store) else { return false };
        let keeps_disk = drain.order.keeps_disk;
        let (batch, kept_below) = drain.queue.batch(&drain.takers, |id| store.leaving(id, keeps_disk));
        drain.counts.kept_below += kept_below;
        let Some(batch) = batch else {
            // Once nothing is left to offer, chunks that were committed since the start are queued.
            if drain.queue.is_stuck() && self.ask_the_unwilling() {
                return true;
            }
            if !self.queue_leaving() {
                self.drain.iter_mut().for_each(Drain::end);
            }
            return self.drain.as_ref().is_some_and(|drain| !drain.is_over);
        };
        let (fingerprint, chunks) = (batch.fingerprint, batch.chunks.iter().map(|(_, take, _)| take.chunk));
        let chunks = chunks.collect();
        let question = self.ask_for_drain(fingerprint, chunks);
        if let Some(drain) = &mut self.drain {
            drain.step = DrainStep::Asking(question, batch);
        }
        true
    }

    /// Queues all chunks that were not considered yet; returns whether there are any.
    fn queue_leaving(&mut self) -> bool {
        let Some(drain) = &mut self.drain else { return false };
        let order = self.store.by_worth();
        let all = order.len().max(1) as u64;
        let ranked = (0..).zip(order).map(|(rank, id): (u64, ChunkId)| {
            let rank_ppm = (rank * u64::from(WHOLE_RANK_PPM) / all) as u32;
            Candidate { id, rank_ppm, refusals: 0 }
        });
        let added = drain.queue.extend(ranked);
        drain.counts.found += added;
        added > 0
    }

    /// Takes the directory's answer: the batch's chunks that no other node has are offered.
    pub(crate) fn drain_located(&mut self, question: QuestionId, holders: &[Holders]) {
        let Some(drain) = &mut self.drain else { return };
        let step = std::mem::replace(&mut drain.step, DrainStep::Ready);
        let mut batch = match step {
            DrainStep::Asking(asked, batch) if asked == question => batch,
            // The answer belongs to a drain that was canceled.
            step => return drain.step = step,
        };
        let mut holders = holders.iter();
        let (queue, stay) = (&mut drain.queue, &self.others.stay);
        let all = batch.chunks.len();
        batch.chunks.retain(|(candidate, ..)| {
            let others = holders.next().into_iter().flat_map(|others| others.iter());
            let other = others.map(|holder| holder.node).find(|node| stay.contains(node));
            other.into_iter().for_each(|node| queue.is_held_by(node, candidate.id));
            other.is_none()
        });
        drain.counts.elsewhere += (all - batch.chunks.len()) as u64;
        if batch.chunks.is_empty() {
            return;
        }
        let Some((tenant, spec)) = self.store.described(&batch.fingerprint) else {
            drain.counts.left += batch.chunks.len() as u64;
            return;
        };
        let Some(taker) = drain.takers.best(&batch.fingerprint) else {
            // The takers are others meanwhile.
            let offered = batch.chunks.into_iter().rev();
            return offered.for_each(|(candidate, ..)| drain.queue.again(candidate));
        };
        let namespace = Some(TakeNamespace { tenant: tenant.to_owned(), spec: spec.clone() });
        let take = TakeNumber(self.bring.next_number());
        let chunks = batch.chunks.iter().map(|(_, take, _)| *take).collect();
        drain.step = DrainStep::Moving { take, taker, batch, since: self.now };
        self.effects.push_back(Effect::AskToTake(TakeOrder { take, taker, namespace, chunks }));
    }

    /// Takes a taker's answer; `None` if the taker could not be asked, or did not answer.
    pub(crate) fn take_answered(&mut self, number: TakeNumber, taken: Option<Taken>) {
        let Some(drain) = self.drain.as_mut().filter(|drain| !drain.is_over) else { return };
        match &mut drain.step {
            DrainStep::Polling(polls, _) => {
                match (polls.remove(&number), &taken) {
                    (Some(taker), Some(taken)) => drain.takers.answered(taker, taken),
                    (Some(taker), None) => drain.takers.failed(taker),
                    (None, _) => return,
                }
                if polls.is_empty() {
                    drain.step = DrainStep::Ready;
                }
            }
            DrainStep::Moving { take, .. } if *take == number => {
                let DrainStep::Moving { taker, batch, since, .. } =
                    std::mem::replace(&mut drain.step, DrainStep::Ready)
                else {
                    return;
                };
                let bytes = drain.moved(taker, batch, taken);
                drain.charge(since, bytes);
            }
            _ => {}
        }
    }

    /// Whether the actor drains, and so keeps nothing new.
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    /// Ends the drain because the store is new and has no warm chunks. Takes into the old store are not answered.
    pub(crate) fn drain_anew(&mut self) {
        self.takes = take::Takes::default();
        if let Some(drain) = &mut self.drain {
            drain.end();
            drain.queue = Queue::default();
        }
    }
}

impl Drain {
    /// Counts a batch that a taker answered. Chunks that the taker did not keep are offered to others. Returns the bytes of the
    /// kept chunks.
    fn moved(&mut self, taker: Holder, batch: Batch, taken: Option<Taken>) -> u64 {
        let Batch { fingerprint, chunks } = batch;
        let is_kept = taken.as_ref().map(|taken| taken.is_kept.clone()).unwrap_or_default();
        let is_kept = is_kept.into_iter().chain(std::iter::repeat(false));
        let (kept, others): (Vec<_>, Vec<_>) =
            chunks.into_iter().zip(is_kept).partition(|(_, is_kept)| *is_kept);
        let (moved, bytes) = (kept.len() as u64, kept.iter().map(|((.., bytes), _)| bytes).sum());
        self.counts.moved += moved;
        self.counts.moved_bytes += bytes;
        if moved > 0 {
            (self.silent_until, self.asks_left) = (None, ASKS_AGAIN);
        }
        let best_rank = others.first().map_or(WHOLE_RANK_PPM, |((candidate, ..), _)| candidate.rank_ppm);
        let refuses_all = match &taken {
            Some(taken) => self.takers.took(taker, fingerprint, taken, (moved, bytes), best_rank),
            None => {
                self.takers.failed(taker);
                false
            }
        };
        for ((mut candidate, ..), _) in others.into_iter().rev() {
            // A taker that does not answer, refuses a whole namespace, or keeps a part of the batch, says nothing of the chunk.
            candidate.refusals += u8::from(taken.is_some() && !refuses_all && moved == 0);
            if candidate.refusals < MOST_REFUSALS {
                self.queue.again(candidate);
            } else {
                self.counts.left += 1;
            }
        }
        bytes
    }

    /// Charges the budget for bytes that moved from `since` on. Chunks that were not kept cost nothing.
    fn charge(&mut self, since: Duration, bytes: u64) {
        if let Some(budget) = self.order.bytes_per_second {
            let takes = Duration::from_secs_f64(bytes as f64 / budget.max(1) as f64);
            self.not_before = self.not_before.max(since + takes);
        }
    }
}

/// Takers whose room is asked for at the start.
const MOST_POLLED: usize = 64;

/// How long the takers' room is waited for.
const POLL_DEADLINE: Duration = Duration::from_secs(1);

/// How often takers that refuse all are asked again, and the pause before each time: a node that joined just now hears of the
/// others within that time.
const ASKS_AGAIN: u8 = 4;
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// How long silent takers are asked again: by then, the coordinator calls a dead taker suspect.
const SILENT_FOR: Duration = Duration::from_secs(5);

/// How long a taker may take to fetch a batch.
const TAKE_DEADLINE: Duration = Duration::from_secs(8);

/// Takers that may refuse a chunk before it is left.
const MOST_REFUSALS: u8 = 3;
