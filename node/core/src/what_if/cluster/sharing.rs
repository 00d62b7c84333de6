//! The work of a planned cluster's nodes for each other: fetches, forwards, and announcements.

use std::collections::BTreeMap;

use larder_protocol::Chain;
use larder_protocol::table::{Holder, NodeNumber};

use super::node::Sent;
use super::{Cluster, Hits, Prompt, directory};
use crate::store::{ChangeKind, Leased, Source, Wanted};

impl Cluster {
    /// Leases the prefix of a chain whose chunks are at a node or come from `elsewhere`.
    pub(super) fn bring(
        &mut self,
        prompt: &Prompt,
        node: usize,
        chain: &Chain,
        elsewhere: &[Option<Source>],
    ) -> (Leased, Hits) {
        let gathered = self.nodes[node].gather(chain, elsewhere);
        let mut hits = Hits::default();
        let mut by_holder = BTreeMap::<Holder, Vec<(Wanted, Vec<Holder>, usize)>>::new();
        let mut last = None;
        for wanted in gathered.wanted {
            match wanted.from {
                Source::Disk => {
                    hits.from_disk += 1;
                    self.nodes[node].read(&wanted, true);
                }
                Source::Object => {
                    hits.from_objects += 1;
                    self.nodes[node].read(&wanted, true);
                }
                Source::Peer | Source::Sibling => {
                    let row = self.directory.holders(prompt.blocks[wanted.position as usize]) & !(1 << node);
                    let mut holders: Vec<Holder> = directory::members(row).map(holder).collect();
                    self.nodes[node].order(&mut holders);
                    let copies = holders.len();
                    // As a real node does, asks the holder of the chunk before, or else the next holder.
                    let same = holders.iter().position(|&holder| Some(holder) == last);
                    let first = holders.remove(same.unwrap_or(0));
                    last = Some(first);
                    by_holder.entry(first).or_default().push((wanted, holders, copies));
                }
            }
        }
        for (first, chunks) in by_holder {
            // The holder counts the uses of a prompt's chunks from last to first.
            for (wanted, others, copies) in chunks.into_iter().rev() {
                let asked = std::iter::once(first).chain(others);
                let sent = self.fetch(node, &wanted, asked, copies);
                hits.from_peers += u64::from(sent.is_some());
                hits.from_disk += u64::from(sent.is_some_and(|sent| sent.was_on_disk_alone));
            }
        }
        (self.nodes[node].finish(gathered.gather), hits)
    }

    /// Tells a node how much room each other node has, as the answers of homes and holders would.
    pub(super) fn hear_all(&mut self, node: usize) {
        if self.shape.shares {
            for other in (0..self.nodes.len()).filter(|&other| other != node) {
                let room = self.nodes[other].room();
                self.nodes[node].hears(number(other), room);
            }
        }
    }

    /// Carries out the consequences of a change at a node: writes to the tiers below, forwards, and announcements.
    pub(super) fn settle(&mut self, node: usize) {
        let mut unsettled = vec![node];
        while let Some(node) = unsettled.pop() {
            self.tell();
            self.nodes[node].write_below(self.shape.has_objects.then_some(&mut self.objects));
            while let Some(offered) = self.nodes[node].next_offer() {
                let to = index(offered.to);
                let wanted: Vec<Option<Wanted>> = (offered.chunks.iter())
                    .map(|&chunk| self.nodes[to].take_in(chunk, offered.worth))
                    .collect();
                let is_wanted: Vec<bool> = wanted.iter().map(Option::is_some).collect();
                self.hear_from(node, to);
                self.nodes[node].offer_ended(offered.number, &is_wanted);
                for wanted in wanted.into_iter().flatten() {
                    let sent = self.fetch(to, &wanted, [holder(node)], 1);
                    self.counts.chunks_forwarded += u64::from(sent.is_some());
                }
                unsettled.push(to);
            }
            self.tell();
        }
    }

    /// Asks holders for a chunk, one after the other.
    fn fetch(
        &mut self,
        node: usize,
        wanted: &Wanted,
        holders: impl IntoIterator<Item = Holder>,
        copies: usize,
    ) -> Option<Sent> {
        for holder in holders {
            let from = index(holder.node);
            let Some(sent) = self.nodes[from].send(&wanted.chunk.hash) else { continue };
            self.nodes[node].fetched(wanted, holder, copies, Some(&sent));
            self.tell();
            self.nodes[from].was_sent(&sent);
            self.hear_from(node, from);
            return Some(sent);
        }
        self.nodes[node].fetched(wanted, holder(node), copies, None);
        None
    }

    fn hear_from(&mut self, node: usize, from: usize) {
        let room = self.nodes[from].room();
        self.nodes[node].hears(number(from), room);
    }

    /// Tells the directory the chunks that nodes have gained and lost, and holders the chunks that moved.
    fn tell(&mut self) {
        loop {
            let mut moved = Vec::new();
            for (node, store) in self.nodes.iter_mut().enumerate() {
                for change in store.take_changes() {
                    self.directory.set(&change.chunk.hash, node, change.kind != ChangeKind::Lost);
                    if let ChangeKind::MovedFrom(holder) = change.kind {
                        moved.push((holder, change.chunk.hash));
                    }
                }
            }
            if moved.is_empty() {
                return;
            }
            moved.into_iter().for_each(|(holder, hash)| self.nodes[index(holder.node)].gives_up(&hash));
        }
    }
}

fn number(node: usize) -> NodeNumber {
    NodeNumber(node as u16)
}

pub(super) fn holder(node: usize) -> Holder {
    Holder { node: number(node), device: 0 }
}

fn index(node: NodeNumber) -> usize {
    usize::from(node.0)
}
