//! The path of a request: the node's own chunks, the homes, the holders, then computing the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use larder_core::directory::Holders;
use larder_core::directory::lookup::{HomeAsk, Lookup, row_keys};
use larder_core::placement::{Placement, Saves, place_by_worth};
use larder_core::store::ChangeKind;
use larder_protocol::peer::{Repair, Room, Rows};
use larder_protocol::table::{Holder, NodeNumber};

use super::arrivals::Arrival;
use super::blocks::{Id, STAKE};
use super::cluster::{Cluster, Happening, NAMESPACE, ONE_WAY, Player, gained, index};
use super::directory::SILENCE;
use super::tally::Kind;
use super::trace::CHUNK_TOKENS;
use crate::directory::millis;

/// A request under way.
pub(super) struct Asking {
    node: usize,
    tokens: u64,
    blocks: Vec<(Id, Id)>,
    lookup: Option<Lookup>,
    /// The chunks that the node lacks.
    absent: Vec<u32>,
    /// The holders of these chunks that were not asked yet.
    holders: Vec<Holders>,
    /// The number of holders that each chunk had.
    copies: Vec<usize>,
    /// For each chunk, whether the request has it.
    has: Vec<bool>,
    /// The number of answers that have not come.
    left: usize,
    /// Whether a holder lacked a requested chunk.
    was_stale: bool,
    /// The chunks for which the homes were asked a second time, since the holders lacked them.
    asked_again: BTreeSet<u32>,
}

impl Cluster<'_> {
    /// A request comes to a node.
    pub(super) fn arrives(&mut self, number: u64, arrival: Arrival) {
        let Arrival { node, tokens, blocks, .. } = arrival;
        let Some(player) = &mut self.nodes[node].player else { return };
        let has: Vec<bool> = blocks.iter().map(|(id, _)| player.blocks.has(*id)).collect();
        let absent: Vec<u32> = (0..).zip(&has).filter(|(_, has)| !**has).map(|(at, _)| at).collect();
        self.tally.local_chunks += (blocks.len() - absent.len()) as u64;
        let asking = Asking {
            node,
            tokens,
            blocks,
            lookup: None,
            holders: Vec::new(),
            copies: Vec::new(),
            absent,
            has,
            left: 0,
            was_stale: false,
            asked_again: BTreeSet::new(),
        };
        self.asking.insert(number, asking);
        self.look_up(number);
    }

    /// Asks the homes for the chunks that the node lacks.
    fn look_up(&mut self, number: u64) {
        let now = millis(self.now);
        let Some(asking) = self.asking.get_mut(&number) else { return };
        let (node, has) = (asking.node, &asking.has);
        asking.absent.retain(|&at| !has[at as usize]);
        let Some(player) = &mut self.nodes[node].player else { return };
        let chunks: Vec<_> = asking.absent.iter().map(|&at| asking.blocks[at as usize]).collect();
        let chunks: Vec<_> = chunks.into_iter().map(|(id, anchor)| id.chunk(anchor)).collect();
        if chunks.is_empty() {
            return self.is_there(number);
        }
        let mut lookup = Lookup::new(&NAMESPACE, &chunks, &player.view, &player.cache, now);
        let own = player.view.own;
        let (at_home, others): (Vec<_>, Vec<_>) =
            lookup.take_asks().into_iter().partition(|ask| ask.home == own);
        let waits = others.iter().any(|ask| self.is_far(node, ask.home));
        self.tally.lookup(others.len(), waits);
        for HomeAsk { find, positions, .. } in at_home {
            let rows = self.nodes[node].shard.find(&find, now);
            let Some(player) = &mut self.nodes[node].player else { return };
            lookup.fill(&positions, &rows, &player.view, None, now);
        }
        let left = others.len();
        let Some(asking) = self.asking.get_mut(&number) else { return };
        (asking.left, asking.lookup) = (left, Some(lookup));
        for ask in others {
            let took = self.send(node, ask.home, false);
            self.plan(took, Happening::Find(number, ask));
        }
        if left == 0 {
            self.located(number);
        }
    }

    /// A question comes to a home.
    pub(super) fn finds(&mut self, number: u64, HomeAsk { home, find, positions }: HomeAsk) {
        let now = millis(self.now);
        let Some(asking) = self.asking.get(&number) else { return };
        let asker = asking.node;
        let rows = self.node(home).map(|home| home.shard.find(&find, now));
        let spans = rows.as_ref().map_or(0, |rows| rows.spans.len());
        let bytes = self.sizes.find.of(find.rows.len()) + self.sizes.rows.of(spans);
        self.tell(asker, home, Kind::Find, bytes);
        let after = if rows.is_some() { ONE_WAY } else { FIND_DEADLINE };
        if rows.is_none() {
            // The first question is too short to show silence; the sign of life that is then requested shows it.
            self.unanswered(asker, home, FIND_DEADLINE + SILENCE);
        }
        let room = self.room(home);
        self.plan(after, Happening::Found(number, home, positions, rows, room));
    }

    /// Takes what a node tells about itself in an answer.
    pub(super) fn hears(&mut self, number: u64, from: NodeNumber, room: Option<Room>) {
        let Some(asker) = self.asking.get(&number).map(|asking| asking.node) else { return };
        if let (Some(room), Some(player)) = (room, &mut self.nodes[asker].player) {
            player.neighbours.heard(from, room, self.now);
            player.neighbours.this_node_serves(player.served.bytes_a_second(millis(self.now).0));
        }
    }

    /// A home has answered, or has not.
    pub(super) fn found(&mut self, number: u64, home: NodeNumber, positions: &[u32], rows: Option<Rows>) {
        let now = millis(self.now);
        let Some(asking) = self.asking.get_mut(&number) else { return };
        let Some(player) = &mut self.nodes[asking.node].player else { return };
        match &rows {
            None => player.view.is_late(home, now),
            Some(_) => player.view.answers(home),
        }
        if let (Some(rows), Some(lookup)) = (rows, &mut asking.lookup) {
            lookup.fill(positions, &rows, &player.view, Some(&mut player.cache), now);
        }
        asking.left -= 1;
        if asking.left == 0 {
            self.located(number);
        }
    }

    /// All homes have answered. Asks for the chunks up to the first that nobody has, as many as possible from each holder.
    fn located(&mut self, number: u64) {
        let Some(asking) = self.asking.get_mut(&number) else { return };
        let Some(player) = &mut self.nodes[asking.node].player else { return };
        if let Some(lookup) = asking.lookup.take() {
            asking.holders = lookup.finish(&player.view);
            asking.copies = asking.holders.iter().map(Holders::len).collect();
        }
        let mut by_holder = BTreeMap::<NodeNumber, Vec<u32>>::new();
        let (mut last, mut is_lost) = (None, false);
        for (place, &at) in asking.absent.iter().enumerate() {
            if asking.has[at as usize] {
                continue;
            }
            let holders = &mut asking.holders[place];
            holders.retain(|holder| !player.view.silent.contains(&holder.node));
            if holders.is_empty() {
                // The known holders no longer have the chunk; others may have it.
                if asking.copies[place] > 0 && asking.asked_again.insert(at) {
                    is_lost = true;
                    continue;
                }
                break;
            }
            // As the real exchange does: the last holder again, or else all holders in turn.
            player.neighbours.order(holders, player.turn);
            let again = holders.iter().position(|holder| Some(*holder) == last).unwrap_or(0);
            last = Some(holders.remove(again));
            by_holder.entry(holders_node(last)).or_default().push(place as u32);
        }
        let node = asking.node;
        player.turn += 1;
        asking.left = by_holder.len();
        if is_lost {
            return self.look_up(number);
        }
        if by_holder.is_empty() {
            return self.is_there(number);
        }
        for (holder, places) in by_holder {
            let took = self.send(node, holder, false);
            self.plan(took, Happening::Fetch(number, holder, places));
        }
    }

    /// A request for blocks comes to a holder.
    pub(super) fn fetches(&mut self, number: u64, holder: NodeNumber, places: Vec<u32>) {
        let Some(asking) = self.asking.get(&number) else { return };
        let (asker, block_bytes) = (asking.node, self.load.block_bytes);
        let ids: Vec<Id> =
            places.iter().map(|&place| asking.blocks[asking.absent[place as usize] as usize].0).collect();
        let (bytes, now_ms) = (self.sizes.fetch.of(ids.len()), millis(self.now).0);
        self.tell(asker, holder, Kind::Fetch, bytes);
        let Some(player) = self.node(holder).and_then(|node| node.player.as_mut()) else {
            self.unanswered(asker, holder, SILENCE);
            let nothing = places.into_iter().map(|place| (place, None)).collect();
            return self.plan(SILENCE, Happening::Fetched(number, holder, nothing, None));
        };
        let reads: Vec<Option<u32>> = ids.iter().map(|&id| player.blocks.touch(id, now_ms)).collect();
        let sent = reads.iter().flatten().count() as u64 * block_bytes;
        player.served.sent(sent, now_ms);
        self.tally.served(index(holder), sent);
        let took = ONE_WAY + Duration::from_secs_f64(sent as f64 / BLOCK_BYTES_A_SECOND);
        let chunks = places.into_iter().zip(reads).collect();
        let room = self.room(holder);
        self.plan(took, Happening::Fetched(number, holder, chunks, room));
    }

    /// Blocks have come. Placement decides where they stay.
    pub(super) fn fetched(&mut self, number: u64, holder: NodeNumber, chunks: &[(u32, Option<u32>)]) {
        let (from, now_ms) = (Holder { node: holder, device: 0 }, millis(self.now).0);
        let Some(asking) = self.asking.get_mut(&number) else { return };
        let (node, mut changes, mut stale) = (asking.node, Vec::new(), Vec::new());
        let Some(player) = &mut self.nodes[node].player else { return };
        // The last first, so that no chunk is evicted before the chunks after it.
        for &(at_absent, reads) in chunks.iter().rev() {
            let at_absent = at_absent as usize;
            let at = asking.absent[at_absent] as usize;
            let (id, anchor) = asking.blocks[at];
            let Some(_) = reads else {
                stale.push(id.chunk(anchor));
                continue;
            };
            asking.has[at] = true;
            if place(player, id, holder, now_ms) == Placement::Replicate && !player.blocks.has(id) {
                let gone = player.blocks.insert(id, anchor, now_ms);
                player.blocks.is_copy(id, now_ms);
                changes.push(gained(id, anchor, ChangeKind::Gained));
                changes.extend(gone.map(|(id, anchor)| gained(id, anchor, ChangeKind::Lost)));
            }
        }
        asking.left -= 1;
        asking.was_stale |= !stale.is_empty();
        let is_last = asking.left == 0;
        let was_stale = is_last && std::mem::take(&mut asking.was_stale);
        self.tally.fetched += (chunks.len() - stale.len()) as u64;
        self.tally.stale += stale.len() as u64;
        self.changed(node, changes);
        if !stale.is_empty() {
            self.repair(node, from, &stale);
        }
        if is_last {
            if was_stale { self.located(number) } else { self.is_there(number) }
        }
    }

    /// Tells the homes that a holder lacks these chunks.
    fn repair(&mut self, node: usize, holder: Holder, chunks: &[larder_protocol::ChunkRef]) {
        let now = millis(self.now);
        let rows = row_keys(&NAMESPACE, chunks);
        let Some(player) = &mut self.nodes[node].player else { return };
        let rows = player.cache.not_held(holder, &rows, now);
        let mut by_home = BTreeMap::<NodeNumber, Vec<_>>::new();
        for row in rows {
            let home = player.view.table.home(row.run.partition());
            home.into_iter().for_each(|home| by_home.entry(home).or_default().push(row));
        }
        for (home, rows) in by_home {
            if home == self.nodes[node].number {
                self.nodes[node].shard.not_held(holder, &rows, now);
            } else {
                let bytes = self.sizes.repair.of(rows.len()) + self.sizes.announced;
                self.tell(node, home, Kind::Repair, bytes);
                let took = self.send(node, home, false);
                self.plan(took, Happening::Repair(home, Repair { holder, rows }));
            }
        }
    }

    /// The node has all chunks that it can get; the engine computes the rest.
    fn is_there(&mut self, number: u64) {
        let Some(asking) = self.asking.get(&number) else { return };
        let hit = asking.has.iter().take_while(|has| **has).count();
        self.tally.rate.add(hit, asking.tokens);
        self.tally.chunks += asking.blocks.len() as u64;
        self.tally.requests += 1;
        let tokens = asking.tokens.saturating_sub(hit as u64 * CHUNK_TOKENS);
        let took = Duration::from_secs_f64(tokens as f64 / TOKENS_A_SECOND);
        self.plan(took, Happening::Computed(number));
    }

    /// Commits the computed chunks.
    pub(super) fn computed(&mut self, number: u64) {
        let Some(asking) = self.asking.remove(&number) else { return };
        let Some(player) = &mut self.nodes[asking.node].player else { return };
        let hit = asking.has.iter().take_while(|has| **has).count();
        let (mut changes, now_ms) = (Vec::new(), millis(self.now).0);
        for (at, &(id, anchor)) in asking.blocks.iter().enumerate().rev() {
            if player.blocks.touch(id, now_ms).is_none() && at >= hit {
                let gone = player.blocks.insert(id, anchor, now_ms);
                changes.push(gained(id, anchor, ChangeKind::Gained));
                changes.extend(gone.map(|(id, anchor)| gained(id, anchor, ChangeKind::Lost)));
            }
        }
        self.changed(asking.node, changes);
    }
}

/// The place of a chunk that came from a holder, by the real placement.
fn place(player: &mut Player, id: Id, holder: NodeNumber, now_ms: u64) -> Placement {
    let gap_ms = player.gaps.read(&id.hash(), now_ms);
    let every_ms = gap_ms.unwrap_or_else(|| player.blocks.keeps_ms(now_ms));
    let copy = STAKE.worth(Saves::Transfer, every_ms / player.neighbours.transfer_weight(holder));
    place_by_worth(Some(copy), player.blocks.least(now_ms))
}

fn holders_node(holder: Option<Holder>) -> NodeNumber {
    holder.map(|holder| holder.node).unwrap_or_default()
}

/// How long a question waits for its answer, by default.
const FIND_DEADLINE: Duration = Duration::from_millis(250);

/// The rate at which blocks come from one holder.
const BLOCK_BYTES_A_SECOND: f64 = 5e9;

/// The rate at which a node's engines compute a prompt.
const TOKENS_A_SECOND: f64 = 40_000.0;
