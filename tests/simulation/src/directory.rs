//! The directory of a node, over its real outbox, shard, cache and lookups.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_core::directory::cache::Cache;
use larder_core::directory::lookup::{HomeAsk, Lookup, View, row_keys};
use larder_core::directory::{Answered, BatchId, Changes, Moved, Outbox, Outgoing, Shard};
use larder_core::{Event, Millis, QuestionId};
use larder_protocol::peer::{Announce, Announced, Chunks, PeerRequest, PeerResponse, Repair, Rows};
use larder_protocol::table::{Holder, NodeNumber, RowKey, Table};
use larder_protocol::{ChunkRef, Fingerprint};

use crate::exchange::For;
use crate::world::{At, Life, World};

/// A node's part of the directory.
pub(crate) struct Directory {
    view: View,
    pub(crate) shard: Shard,
    outbox: Outbox,
    cache: Cache,
    finds: BTreeMap<u64, Finding>,
}

/// An actor asks for the holders of chunks.
#[derive(Debug)]
pub(crate) struct AskHolders {
    pub(crate) actor: u16,
    pub(crate) life: u64,
    pub(crate) question: QuestionId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) chunks: Vec<ChunkRef>,
}

/// A question whose homes have not all answered.
struct Finding {
    ask: AskHolders,
    lookup: Lookup,
    left: usize,
}

impl Directory {
    pub(crate) fn new() -> Self {
        Self {
            view: View::default(),
            shard: Shard::new(1 << 20),
            outbox: Outbox::default(),
            cache: Cache::default(),
            finds: BTreeMap::new(),
        }
    }

    pub(crate) fn take_table(&mut self, table: &Arc<Table>, own: NodeNumber, now: Duration) {
        self.cache.new_table(&self.view.table, table, own);
        self.shard.new_table(table, own);
        self.outbox.new_table(table, own, millis(now));
        (self.view.table, self.view.own) = (Arc::clone(table), own);
    }

    pub(crate) fn own(&self) -> NodeNumber {
        self.view.own
    }

    pub(crate) fn table(&self) -> &Arc<Table> {
        &self.view.table
    }

    /// Questions without a complete answer.
    pub(crate) fn questions(&self) -> usize {
        self.finds.len()
    }

    pub(crate) fn announces(&mut self, announces: &[Announce]) -> Vec<Announced> {
        announces.iter().map(|announce| self.shard.announce(announce)).collect()
    }

    /// Loses all work, except the table.
    fn begin_again(&mut self, now: Duration) {
        let (table, own) = (Arc::clone(&self.view.table), self.view.own);
        self.view = View::default();
        self.shard = Shard::new(1 << 20);
        self.outbox = self.outbox.begin_again();
        self.cache = Cache::default();
        self.take_table(&table, own, now);
    }
}

impl World {
    /// Sends batches that are due. Batches for this node as home go to its own shard at once.
    pub(crate) fn send_due(&mut self, life: Life) {
        loop {
            let now = self.local(life.host);
            let Some(process) = self.process(life) else { return };
            let directory = &mut process.directory;
            let mut has_own = false;
            for outgoing in directory.outbox.due(millis(now), |_| true) {
                if outgoing.home == self.own_number(life) {
                    has_own = true;
                    let Some(process) = self.process(life) else { return };
                    let answers = process.directory.announces(&outgoing.announces);
                    self.announced(life, &outgoing, answers);
                } else {
                    let request = PeerRequest::Announce(outgoing.announces.clone());
                    self.ask_peer(life, outgoing.home, request, ANNOUNCE_DEADLINE, For::Announce(outgoing));
                }
            }
            if !has_own {
                return;
            }
        }
    }

    fn own_number(&mut self, life: Life) -> NodeNumber {
        self.process(life).map(|process| process.directory.view.own).unwrap_or_default()
    }

    pub(crate) fn announced(&mut self, life: Life, message: &Outgoing, answers: Vec<Announced>) {
        let now = millis(self.local(life.host));
        let answers = answers.into_iter().map(Some).chain(std::iter::repeat(None));
        for (announce, answer) in message.announces.iter().zip(answers) {
            let batch = BatchId::new(message.home, announce);
            let Some(process) = self.process(life) else { return };
            if let Answered::Known { moved, .. } = process.directory.outbox.answered(&batch, answer, now) {
                for Moved { holder, fingerprint, hashes } in moved {
                    let chunks = Chunks { device: holder.device, fingerprint, hashes };
                    let request = PeerRequest::Moved(chunks);
                    self.ask_peer(life, holder.node, request, ANNOUNCE_DEADLINE, For::Nothing);
                }
            }
        }
    }

    pub(crate) fn directory_changed(&mut self, life: Life, actor: u16, mut changes: Changes) {
        let now = millis(self.local(life.host));
        let Some(process) = self.process(life) else { return };
        process.directory.cache.leave_out(&mut changes, now);
        process.directory.outbox.changed(actor, &changes, now);
        self.send_due(life);
    }

    pub(crate) fn directory_slow_tick(&mut self, life: Life) {
        let now = millis(self.local(life.host));
        if let Some(process) = self.process(life) {
            process.directory.shard.tick(now);
        }
    }

    /// Asks the homes in parallel for rows that are not known here.
    pub(crate) fn look_up(&mut self, life: Life, ask: AskHolders) {
        let now = millis(self.local(life.host));
        let number = self.next_number();
        let Some(process) = self.process(life) else { return };
        let silent = process.silent.clone();
        let directory = &mut process.directory;
        directory.view.silent = silent;
        let mut lookup = Lookup::new(&ask.fingerprint, &ask.chunks, &directory.view, &directory.cache, now);
        let own = directory.view.own;
        let (at_home, others): (Vec<_>, Vec<_>) =
            lookup.take_asks().into_iter().partition(|ask| ask.home == own);
        for HomeAsk { find, positions, .. } in at_home {
            let rows = directory.shard.find(&find, now);
            lookup.fill(&positions, &rows, &directory.view, None, now);
        }
        directory.finds.insert(number, Finding { ask, lookup, left: others.len() });
        for HomeAsk { home, find, positions } in others {
            let then = For::Find(number, positions);
            self.ask_peer(life, home, PeerRequest::Find(find), FIND_DEADLINE, then);
        }
        self.finish_find(life, number);
    }

    /// Takes a home's answer to a question, or the lack of one.
    pub(crate) fn home_answers(
        &mut self,
        life: Life,
        home: NodeNumber,
        (number, positions): (u64, Vec<u32>),
        answer: Option<PeerResponse>,
    ) {
        let now = millis(self.local(life.host));
        let Some(process) = self.process(life) else { return };
        let Directory { view, cache, finds, .. } = &mut process.directory;
        match &answer {
            None => view.is_late(home, now),
            Some(_) => view.answers(home),
        }
        let Some(finding) = finds.get_mut(&number) else { return };
        finding.left -= 1;
        if let Some(PeerResponse::Rows(rows)) = answer {
            finding.lookup.fill(&positions, &rows, view, Some(cache), now);
        }
        self.finish_find(life, number);
    }

    fn finish_find(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let directory = &mut process.directory;
        if directory.finds.get(&number).is_none_or(|finding| finding.left > 0) {
            return;
        }
        let Some(Finding { ask, lookup, .. }) = directory.finds.remove(&number) else { return };
        let holders = lookup.finish(&directory.view);
        let at = At { life, actor: ask.actor };
        self.tell_soon(at, ask.life, Event::HoldersFound { question: ask.question, holders });
    }

    pub(crate) fn find(&mut self, life: Life, find: &larder_protocol::peer::Find) -> Option<Rows> {
        let now = millis(self.local(life.host));
        Some(self.process(life)?.directory.shard.find(find, now))
    }

    pub(crate) fn repair(&mut self, life: Life, holder: Holder, rows: &[RowKey]) {
        let now = millis(self.local(life.host));
        if let Some(process) = self.process(life) {
            process.directory.shard.not_held(holder, rows, now);
        }
    }

    pub(crate) fn stale(
        &mut self,
        life: Life,
        holder: Holder,
        fingerprint: &Fingerprint,
        chunks: &[ChunkRef],
    ) {
        let now = millis(self.local(life.host));
        let rows = row_keys(fingerprint, chunks);
        let Some(process) = self.process(life) else { return };
        let Directory { view, shard, cache, .. } = &mut process.directory;
        let rows = cache.not_held(holder, &rows, now);
        let mut by_home = BTreeMap::<NodeNumber, Vec<RowKey>>::new();
        for row in rows {
            if let Some(home) = view.table.home(row.run.partition()) {
                by_home.entry(home).or_default().push(row);
            }
        }
        let mut repairs = Vec::new();
        for (home, rows) in by_home {
            if home == view.own {
                shard.not_held(holder, &rows, now);
            } else if view.may_ask(home, now) {
                repairs.push((home, PeerRequest::Repair(Repair { holder, rows })));
            }
        }
        for (home, repair) in repairs {
            self.ask_peer(life, home, repair, ANNOUNCE_DEADLINE, For::Nothing);
        }
    }

    /// A fault ends all knowledge of a directory.
    pub(crate) fn directory_panics(&mut self, host: usize) {
        let now = self.local(host);
        let Some(process) = &mut self.hosts[host].process else { return };
        process.directory.begin_again(now);
        process.actors.iter_mut().for_each(|actor| actor.core.directory_began_again());
    }
}

pub(crate) fn millis(now: Duration) -> Millis {
    Millis(now.as_millis() as u64)
}

const FIND_DEADLINE: Duration = Duration::from_millis(250);
const ANNOUNCE_DEADLINE: Duration = Duration::from_secs(1);
