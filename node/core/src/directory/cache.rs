//! Recent answers of homes.
//!
//! With these answers, no lookup asks again for the head of a system prompt, and a lease right after a lookup asks no home. Two
//! generations bound the cache by age and by number, without an ordered list.
//!
//! In a large cluster all nodes would ask the home of a common chunk, such as the head of a system prompt, and then announce that
//! they have the chunk too. So an answer that names as many holders as an answer can is valid for five minutes: one of these
//! holders will still have the chunk. Three nodes in four do not announce such a chunk, since its home knows enough other
//! holders.

use hashbrown::HashMap;
use larder_protocol::table::{Holder, NodeNumber, RowKey, Table};

use super::{Changes, Holders, MAX_FOUND_HOLDERS};
use crate::Millis;
use crate::store::{Change, ChangeKind};

/// Recent answers of homes.
#[derive(Debug, Default)]
pub struct Cache {
    recent: Generations,
    /// Answers about chunks that many nodes have, in a large cluster.
    common: Generations,
    is_large: bool,
    own: NodeNumber,
}

/// Answers in two generations, young and old.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<RowKey, CachedHolders>,
    old: HashMap<RowKey, CachedHolders>,
    turned_at: Millis,
}

#[derive(Debug)]
struct CachedHolders {
    holders: Holders,
    at: Millis,
}

impl Cache {
    /// The holders of a chunk, if its home answered lately; empty if the chunk has no holder.
    pub fn get(&self, key: &RowKey, now: Millis) -> Option<&Holders> {
        let lasts = |answer: &&CachedHolders, lasts_ms: u64| now.since(answer.at) < lasts_ms;
        let recent = self
            .recent
            .get(key)
            .filter(|answer| lasts(answer, if answer.holders.is_empty() { NOBODY_MS } else { HOLDERS_MS }));
        let common = || self.common.get(key).filter(|answer| lasts(answer, COMMON_MS));
        recent.or_else(common).map(|answer| &answer.holders)
    }

    /// Keeps an answer.
    pub fn insert(&mut self, key: RowKey, holders: Holders, now: Millis) {
        let is_common = self.is_large && holders.len() >= MAX_FOUND_HOLDERS;
        let (these, others) = match is_common {
            true => (&mut self.common, &mut self.recent),
            false => (&mut self.recent, &mut self.common),
        };
        others.remove(&key);
        let (turns_ms, most) = if is_common { (COMMON_MS, MAX_COMMON) } else { (HOLDERS_MS, MAX_ANSWERS) };
        these.insert(key, CachedHolders { holders, at: now }, turns_ms, most);
    }

    /// Removes gained chunks that need no announcement, since an answer named enough other holders. One node in four announces
    /// the chunk nevertheless, to replace holders that lose it.
    pub fn leave_out(&self, changes: &mut Changes, now: Millis) {
        let Changes::Since(changes) = changes else { return };
        if self.common.len() > 0 {
            changes
                .retain(|change| change.kind != ChangeKind::Gained || !self.is_known_of_others(change, now));
        }
    }

    /// Forgets that a holder has these chunks. Returns the chunks for which the home should be told: after an answer of some
    /// minutes ago, the home may no longer name this holder.
    pub fn not_held(&mut self, holder: Holder, keys: &[RowKey], now: Millis) -> Vec<RowKey> {
        let mut news = Vec::with_capacity(keys.len());
        for &key in keys {
            let is_old = |answer: &CachedHolders| {
                now.since(answer.at) >= HOLDERS_MS && answer.holders.contains(&holder)
            };
            if !self.common.get(&key).is_some_and(is_old) {
                news.push(key);
            }
            // An answer with too few holders left is dropped: the home may know other holders by now.
            self.recent.not_held(holder, &key, 1);
            self.common.not_held(holder, &key, MIN_COMMON);
        }
        news
    }

    /// Forgets the answers for partitions that have another home now, and the holders of common chunks that have left the
    /// cluster.
    pub fn new_table(&mut self, old: &Table, new: &Table, own: NodeNumber) {
        (self.is_large, self.own) = (new.members.len() >= LARGE, own);
        let stays = |key: &RowKey, _: &mut CachedHolders| {
            let partition = key.run.partition();
            old.home(partition) == new.home(partition)
        };
        let has_holders = |_: &RowKey, answer: &mut CachedHolders| {
            answer.holders.retain(|holder| new.member(holder.node).is_some());
            answer.holders.len() >= MIN_COMMON
        };
        self.recent.all().into_iter().for_each(|answers| answers.retain(stays));
        self.common.all().into_iter().for_each(|answers| answers.retain(has_holders));
    }

    /// The number of answers, with the outdated ones.
    pub fn len(&self) -> usize {
        self.recent.len() + self.common.len()
    }

    /// Whether the cache has no answers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn is_known_of_others(&self, gained: &Change, now: Millis) -> bool {
        let key = RowKey::new(&gained.fingerprint, &gained.chunk);
        let announces = key.digest().wrapping_add(u64::from(self.own.0)) % ANNOUNCES_ONE_IN == 0;
        !announces && self.common.get(&key).is_some_and(|answer| now.since(answer.at) < COMMON_MS)
    }
}

impl Generations {
    fn get(&self, key: &RowKey) -> Option<&CachedHolders> {
        self.young.get(key).or_else(|| self.old.get(key))
    }

    fn insert(&mut self, key: RowKey, answer: CachedHolders, turns_ms: u64, most: usize) {
        if answer.at.since(self.turned_at) >= turns_ms || self.young.len() >= most / 2 {
            self.old = std::mem::take(&mut self.young);
            self.turned_at = answer.at;
        }
        self.young.insert(key, answer);
    }

    /// Forgets that a holder has a chunk, and the whole answer if fewer than `least` holders are left.
    fn not_held(&mut self, holder: Holder, key: &RowKey, least: usize) {
        for answers in self.all() {
            if let Some(answer) = answers.get_mut(key) {
                answer.holders.retain(|other| *other != holder);
                if answer.holders.len() < least {
                    answers.remove(key);
                }
            }
        }
    }

    fn remove(&mut self, key: &RowKey) {
        // Most nodes know of no common chunks.
        self.all()
            .into_iter()
            .filter(|answers| !answers.is_empty())
            .for_each(|answers| drop(answers.remove(key)));
    }

    fn all(&mut self) -> [&mut HashMap<RowKey, CachedHolders>; 2] {
        [&mut self.young, &mut self.old]
    }

    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

/// Lifetime of an answer that names holders. A stale holder costs a round trip.
pub const HOLDERS_MS: u64 = 1_000;

/// Lifetime of the answer that nobody holds a chunk: the time from a lookup to its lease. A longer lifetime would miss chunks
/// that are computed meanwhile.
pub const NOBODY_MS: u64 = 20;

/// In clusters of at least this many members, answers about common chunks are kept longer.
pub const LARGE: usize = 64;

/// One in this many nodes that gain a common chunk announces it.
const ANNOUNCES_ONE_IN: u64 = 4;

/// Lifetime of an answer about a common chunk.
pub const COMMON_MS: u64 = 300_000;

/// If fewer holders of a common chunk are left, its home is asked again.
const MIN_COMMON: usize = MAX_FOUND_HOLDERS / 2;

/// Common chunks at a time: at about 100 bytes each, 400 KiB.
const MAX_COMMON: usize = 4_096;

/// Other answers at a time: at about 80 bytes each, 5 MiB.
pub const MAX_ANSWERS: usize = 65_536;

#[cfg(test)]
mod tests {
    use larder_protocol::table::{Member, MemberState, PARTITIONS, RunKey};
    use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
    use smallvec::smallvec;

    use super::*;

    const HOLDER: Holder = Holder { node: NodeNumber(1), device: 0 };
    const OTHER: Holder = Holder { node: NodeNumber(2), device: 0 };

    fn key(number: u64) -> RowKey {
        RowKey { run: RunKey(u128::from(number) << 116), chunk: number }
    }

    #[test]
    fn an_answer_is_good_for_a_moment() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER], Millis(5));
        assert_eq!(cache.get(&key(1), Millis(4 + HOLDERS_MS)).map(|found| found[0]), Some(HOLDER));
        assert_eq!(cache.get(&key(1), Millis(5 + HOLDERS_MS)), None);
        assert_eq!(cache.get(&key(2), Millis(5)), None);
    }

    #[test]
    fn an_answer_without_holders_is_soon_forgotten() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![], Millis(0));
        assert_eq!(cache.get(&key(1), Millis(NOBODY_MS - 1)).map(|found| found.len()), Some(0));
        assert_eq!(cache.get(&key(1), Millis(NOBODY_MS)), None);
    }

    #[test]
    fn a_holder_that_has_nothing_is_forgotten_at_once() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER, OTHER], Millis(0));
        cache.insert(key(2), smallvec![HOLDER], Millis(0));
        let news = cache.not_held(HOLDER, &[key(1), key(2)], Millis(0));
        assert_eq!(news, [key(1), key(2)]);
        assert_eq!(cache.get(&key(1), Millis(0)).map(|found| found.to_vec()), Some(vec![OTHER]));
        assert_eq!(cache.get(&key(2), Millis(0)), None);
    }

    #[test]
    fn the_cache_never_grows_past_its_bound() {
        let mut cache = Cache::default();
        for number in 0..3 * MAX_ANSWERS as u64 {
            cache.insert(key(number), smallvec![HOLDER], Millis(number / 1_000));
        }
        assert!(cache.len() <= MAX_ANSWERS);
    }

    /// A cache in a cluster of so many nodes; the first node is the home of all partitions.
    fn in_cluster(members: usize) -> (Cache, Table) {
        let member = |number| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1,
            peer: ([127, 0, 0, 1], 1).into(),
            http: ([127, 0, 0, 1], 2).into(),
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        let members = (1..=members as u16).map(member).collect();
        let homes = vec![NodeNumber(1); usize::from(PARTITIONS)];
        let table = Table { members, homes, ..Table::default() };
        let mut cache = Cache::default();
        cache.new_table(&Table::default(), &table, NodeNumber(9));
        (cache, table)
    }

    fn many(count: u16) -> Holders {
        (1..=count).map(|number| Holder { node: NodeNumber(number), device: 0 }).collect()
    }

    #[test]
    fn the_holders_of_a_common_chunk_are_good_for_minutes_in_a_large_cluster() {
        let (all, fewer) = (MAX_FOUND_HOLDERS as u16, MAX_FOUND_HOLDERS as u16 - 1);
        let lasts = |members, holders| {
            let (mut cache, _) = in_cluster(members);
            cache.insert(key(1), many(holders), Millis(7));
            let until = |ms: u64| cache.get(&key(1), Millis(7 + ms)).is_some();
            assert!(until(HOLDERS_MS - 1) && !until(COMMON_MS));
            until(COMMON_MS - 1)
        };
        assert_eq!([lasts(LARGE, all), lasts(LARGE, fewer), lasts(LARGE - 1, all)], [true, false, false]);
    }

    #[test]
    fn a_newer_answer_takes_the_place_of_an_older_one() {
        let (mut cache, _) = in_cluster(LARGE);
        let all = MAX_FOUND_HOLDERS as u16;
        for (holders, at) in [(all, 0), (2, 10), (all, 20), (1, 30)] {
            cache.insert(key(1), many(holders), Millis(at));
            assert_eq!(cache.get(&key(1), Millis(at)), Some(&many(holders)));
        }
        assert_eq!(cache.get(&key(1), Millis(30 + HOLDERS_MS)), None);
    }

    #[test]
    fn the_home_of_a_common_chunk_is_asked_again_once_half_of_its_holders_do_not_have_it() {
        let (mut cache, _) = in_cluster(LARGE);
        let holders = many(MAX_FOUND_HOLDERS as u16);
        cache.insert(key(1), holders.clone(), Millis(0));
        let later = Millis(HOLDERS_MS);
        for (gone, &holder) in (1..).zip(&holders[..MAX_FOUND_HOLDERS - MIN_COMMON]) {
            assert_eq!(cache.not_held(holder, &[key(1)], later), [], "the answer is old");
            let left = cache.get(&key(1), later).map(|left| left.len());
            assert_eq!(left, Some(MAX_FOUND_HOLDERS - gone));
        }
        cache.not_held(*holders.last().unwrap(), &[key(1)], later);
        assert_eq!(cache.get(&key(1), later), None);
    }

    #[test]
    fn holders_of_common_chunks_that_left_are_forgotten_whoever_is_home() {
        let (mut cache, mut table) = in_cluster(LARGE);
        cache.insert(key(1), many(MAX_FOUND_HOLDERS as u16), Millis(0));
        let mut leave = |count: usize, home| {
            let before = table.clone();
            table.members.drain(..count);
            table.homes.fill(NodeNumber(home));
            table.members.extend(before.members[..count].iter().cloned().map(|mut member| {
                member.number = NodeNumber(member.number.0 + 1_000);
                member
            }));
            cache.new_table(&before, &table, NodeNumber(9));
            cache.get(&key(1), Millis(COMMON_MS - 1)).map(|holders| holders.len())
        };
        assert_eq!(leave(MAX_FOUND_HOLDERS - MIN_COMMON, 20), Some(MIN_COMMON));
        assert_eq!(leave(1, 21), None);
    }

    #[test]
    fn one_node_in_four_announces_a_common_chunk() {
        let gained = |number: u64, kind| {
            let hash = ChunkHash([number as u8; 32]);
            let chunk = ChunkRef { hash, parent: ChunkHash([0; 32]), index: 0, anchor: hash };
            Change { fingerprint: Fingerprint([1; 32]), chunk, kind, evicted: None }
        };
        let row = |change: &Change| RowKey::new(&change.fingerprint, &change.chunk);
        let moved = ChangeKind::MovedFrom(HOLDER);
        let mut announced = 0;
        for number in 0..100 {
            let (mut cache, _) = in_cluster(LARGE);
            let changes = [ChangeKind::Gained, ChangeKind::Lost, moved].map(|kind| gained(number, kind));
            let told = |cache: &Cache, at| {
                let mut told = Changes::Since(changes.to_vec());
                cache.leave_out(&mut told, at);
                let Changes::Since(told) = told else { panic!("{told:?}") };
                assert_eq!(told[told.len() - 2..], changes[1..], "losses and moves are always announced");
                told.len() == 3
            };
            cache.insert(row(&changes[0]), many(MAX_FOUND_HOLDERS as u16 - 1), Millis(0));
            assert!(told(&cache, Millis(0)), "the home does not know enough holders");
            cache.insert(row(&changes[0]), many(MAX_FOUND_HOLDERS as u16), Millis(0));
            announced += usize::from(told(&cache, Millis(COMMON_MS - 1)));
            assert!(told(&cache, Millis(COMMON_MS)), "the answer is too old");
        }
        assert!((10..40).contains(&announced), "{announced} of 100");
    }

    #[test]
    fn each_common_chunk_is_announced_by_some_nodes_of_the_cluster() {
        for number in 0..8 {
            let hash = ChunkHash([number; 32]);
            let chunk = ChunkRef { hash, parent: ChunkHash([0; 32]), index: 0, anchor: hash };
            let kind = ChangeKind::Gained;
            let gained = Change { fingerprint: Fingerprint([1; 32]), chunk, kind, evicted: None };
            let row = RowKey::new(&gained.fingerprint, &gained.chunk);
            let announces = |own: &u16| {
                let (mut cache, table) = in_cluster(LARGE);
                cache.new_table(&table, &table, NodeNumber(*own));
                cache.insert(row, many(MAX_FOUND_HOLDERS as u16), Millis(0));
                let mut told = Changes::Since(vec![gained]);
                cache.leave_out(&mut told, Millis(0));
                matches!(told, Changes::Since(told) if told.len() == 1)
            };
            assert_eq!((1..=40).filter(announces).count(), 10);
        }
    }

    #[test]
    fn a_holder_is_forgotten_in_older_answers_too() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER], Millis(HOLDERS_MS - 1));
        cache.insert(key(2), smallvec![HOLDER], Millis(HOLDERS_MS));
        let now = Millis(HOLDERS_MS + 1);
        assert!(cache.get(&key(1), now).is_some() && cache.get(&key(2), now).is_some());
        cache.not_held(HOLDER, &[key(1), key(2)], now);
        assert!(cache.get(&key(1), now).is_none() && cache.get(&key(2), now).is_none());
    }

    #[test]
    fn a_new_table_clears_what_moved() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER], Millis(0));
        cache.insert(key(2), smallvec![HOLDER], Millis(0));
        let old = Table { homes: vec![NodeNumber(1); usize::from(PARTITIONS)], ..Table::default() };
        let mut new = old.clone();
        new.homes[usize::from(key(2).run.partition())] = NodeNumber(2);
        cache.new_table(&old, &new, NodeNumber(1));
        assert!(cache.get(&key(1), Millis(0)).is_some());
        assert_eq!(cache.get(&key(2), Millis(0)), None);
    }
}
