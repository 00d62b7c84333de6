//! Chooses the next transfer in a line, by class and by waiting time.
//!
//! Transfers wait in three places. In each, a transfer that an engine waits for goes first, but not for ever:
//!
//! | where | what goes first | what keeps the others going |
//! | --- | --- | --- |
//! | reads before the disk or object store (`tiers/reads`), fetches before a peer's streams and credits (`exchange/gate`) | leases and collected tickets, then prefetches | 250 ms of waiting make up for the class |
//! | bytes that are being sent to peers (`exchange/sending`) | a quarter is kept from prefetches | the asker is told when to ask again |
//! | the disk's thread | reads, then writes, then freeing segments, then the scrubber | a read waits for one batch of writes at most, and a write for one batch of reads; the scrubber gets a turn after 10 s |
//!
//! On a connection, streams share evenly. QUIC's own priorities are strict: a stream of a lower priority could wait past every
//! deadline.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use larder_protocol::peer::Class;

use crate::store::ids::TenantId;

/// A line of waiting requests, each under a key of its own.
///
/// A class is a head start: a request of a more urgent class counts as having come earlier. So it passes requests that came
/// shortly before it, but none waits for ever, however many urgent requests follow.
#[derive(Debug)]
pub struct Turns<K> {
    line: BTreeMap<Turn, K>,
    waiting: HashMap<K, Waiting>,
    last_number: u64,
}

/// A place in the line: the time of its turn if nothing were scarce, then the order of arrival.
type Turn = (Duration, u64);

/// A line for each tenant. The next request is that of the tenant with the fewest bytes under way; of several, the one that is due
/// first. So a tenant that waits for much does not keep the others from theirs.
#[derive(Debug)]
pub(crate) struct TenantTurns<K> {
    tenants: BTreeMap<TenantId, OfTenant<K>>,
}

#[derive(Debug)]
struct OfTenant<K> {
    turns: Turns<K>,
    bytes_under_way: u64,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    since: Duration,
    turn: Turn,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self { line: BTreeMap::new(), waiting: HashMap::new(), last_number: 0 }
    }
}

impl<K> Default for TenantTurns<K> {
    fn default() -> Self {
        Self { tenants: BTreeMap::new() }
    }
}

impl<K> Default for OfTenant<K> {
    fn default() -> Self {
        Self { turns: Turns::default(), bytes_under_way: 0 }
    }
}

impl<K: Copy + Eq + Hash> Turns<K> {
    /// Lines up a key from `now` on. A key that waits already keeps its place.
    pub fn wait(&mut self, key: K, class: Class, now: Duration) {
        if self.waiting.contains_key(&key) {
            return;
        }
        self.last_number += 1;
        let turn = (due(class, now), self.last_number);
        self.waiting.insert(key, Waiting { since: now, turn });
        self.line.insert(turn, key);
    }

    /// Changes the class of a waiting request; its waiting time still counts.
    pub fn change_class(&mut self, key: K, class: Class) {
        let Some(waiting) = self.waiting.get_mut(&key) else { return };
        self.line.remove(&waiting.turn);
        waiting.turn.0 = due(class, waiting.since);
        self.line.insert(waiting.turn, key);
    }

    /// The key of the request whose turn it is.
    pub fn next(&self) -> Option<K> {
        self.line.first_key_value().map(|(_, &key)| key)
    }

    /// Takes a key out of the line; returns whether it was there.
    pub fn leave(&mut self, key: K) -> bool {
        let Some(waiting) = self.waiting.remove(&key) else { return false };
        self.line.remove(&waiting.turn);
        true
    }
}

impl<K: Copy + Eq + Hash> TenantTurns<K> {
    /// Lines up a tenant's request from `now` on. A request that waits already keeps its place.
    pub(crate) fn wait(&mut self, tenant: TenantId, key: K, class: Class, now: Duration) {
        self.tenants.entry(tenant).or_default().turns.wait(key, class, now);
    }

    /// Changes the class of a waiting request; its waiting time still counts.
    pub(crate) fn change_class(&mut self, key: K, class: Class) {
        self.tenants.values_mut().for_each(|line| line.turns.change_class(key, class));
    }

    /// The key of the request whose turn it is.
    pub(crate) fn next(&self) -> Option<K> {
        let first = |line: &OfTenant<K>| {
            let (&turn, &key) = line.turns.line.first_key_value()?;
            Some(((line.bytes_under_way, turn), key))
        };
        self.tenants.values().filter_map(first).min_by_key(|&(order, _)| order).map(|(_, key)| key)
    }

    /// Takes a key out of its line; returns whether it was there.
    pub(crate) fn leave(&mut self, key: K) -> bool {
        self.tenants.values_mut().any(|line| line.turns.leave(key))
    }

    /// Notes that a tenant's request for `bytes` bytes is under way.
    pub(crate) fn began(&mut self, tenant: TenantId, bytes: u64) {
        self.tenants.entry(tenant).or_default().bytes_under_way += bytes;
    }

    /// Notes that a tenant's request for `bytes` bytes has ended.
    pub(crate) fn ended(&mut self, tenant: TenantId, bytes: u64) {
        self.tenants.entry(tenant).or_default().bytes_under_way -= bytes;
    }

    /// Bytes of the requests of all tenants that are under way.
    pub(crate) fn bytes_under_way(&self) -> u64 {
        self.tenants.values().map(|line| line.bytes_under_way).sum()
    }
}

fn due(class: Class, since: Duration) -> Duration {
    since + (MOST_HEAD_START - head_start(class))
}

/// The head start of a class: its requests pass others that came earlier by less than this time.
const fn head_start(class: Class) -> Duration {
    match class {
        Class::Decode => MOST_HEAD_START,
        Class::Prefetch => Duration::ZERO,
    }
}

/// Long compared with one transfer, and short compared with an engine's wait for a prefetch.
const MOST_HEAD_START: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn drain(turns: &mut Turns<u32>) -> Vec<u32> {
        std::iter::from_fn(|| {
            let key = turns.next()?;
            turns.leave(key);
            Some(key)
        })
        .collect()
    }

    #[test]
    fn what_is_decoded_goes_before_what_is_prefetched() {
        let mut turns = Turns::default();
        turns.wait(1, Class::Prefetch, at(0));
        turns.wait(2, Class::Prefetch, at(1));
        turns.wait(3, Class::Decode, at(2));
        turns.wait(4, Class::Decode, at(3));
        assert_eq!(drain(&mut turns), [3, 4, 1, 2]);
    }

    #[test]
    fn a_prefetch_that_has_waited_goes_before_a_decode_that_comes_later() {
        let mut turns = Turns::default();
        turns.wait(1, Class::Prefetch, at(0));
        turns.wait(2, Class::Decode, at(249));
        turns.wait(3, Class::Decode, at(251));
        assert_eq!(drain(&mut turns), [2, 1, 3]);
    }

    #[test]
    fn another_class_counts_from_when_waiting_began() {
        let mut turns = Turns::default();
        turns.wait(1, Class::Prefetch, at(0));
        turns.wait(2, Class::Decode, at(10));
        turns.wait(1, Class::Prefetch, at(11));
        turns.change_class(1, Class::Decode);
        turns.change_class(7, Class::Decode);
        assert_eq!(drain(&mut turns), [1, 2]);
        assert!(turns.next().is_none() && !turns.leave(1));
    }

    /// Two requests come in each millisecond and one is served: the line grows, and nine of ten requests are urgent.
    #[test]
    fn nobody_is_passed_by_what_comes_later_than_the_head_start() {
        let seed = 0x7a12;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut turns = Turns::default();
        let mut youngest_served = 0;
        let mut prefetches = 0;
        for millisecond in 0..4_000_u32 {
            for key in [2 * millisecond, 2 * millisecond + 1] {
                let is_urgent = random.u8(..10) > 0;
                prefetches += u32::from(!is_urgent);
                turns.wait(
                    key,
                    if is_urgent { Class::Decode } else { Class::Prefetch },
                    at((key / 2).into()),
                );
            }
            let served = turns.next().unwrap();
            turns.leave(served);
            youngest_served = youngest_served.max(served / 2);
            assert!(youngest_served <= served / 2 + 250, "seed {seed}: {served} in {millisecond}");
        }
        assert!(prefetches > 100);
    }
}
