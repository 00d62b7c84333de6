//! The checks: after every step, and once the faults have stopped.

use std::collections::BTreeSet;
use std::time::Duration;

use larder_protocol::checksum::BlockKey;
use larder_protocol::table::{Holder, RowKey};

use crate::world::{At, Life, World};

impl World {
    /// Checks a store after every step.
    pub(crate) fn check_store(&mut self, at: At) {
        let Some(actor) = self.actor(at) else { return };
        let usage = actor.core.store().usage();
        let bytes = usage.bytes;
        if bytes.free + bytes.used + bytes.quarantined != bytes.total {
            self.violate(|| format!("{at:?}: free + used + quarantined is not the total: {bytes:?}"));
        }
        if usage.misnamed > 0 {
            self.violate(|| format!("{at:?}: a chunk was to leave under another's name"));
        }
    }

    /// An alarm of an actor rings: it must be the one that was planned last, since at most one is set at a time.
    pub(crate) fn alarm_rings(&mut self, at: At, due: Duration) {
        let planned = self.actor(at).and_then(|actor| actor.planned_alarm.take());
        if planned != Some(due) {
            self.violate(|| format!("{at:?}: an alarm for {due:?} rings beside the one for {planned:?}"));
        }
    }

    /// Somebody received bytes with a wrong checksum: bits must have been flipped.
    pub(crate) fn saw_damage(&mut self, life: Life, from: usize) {
        if !self.flips_memory() {
            self.violate(|| {
                format!("{life:?}: damaged bytes came from host {from}, where nothing was flipped")
            });
        }
    }

    /// An actor dropped a chunk as damaged: bits must have been flipped.
    pub(crate) fn condemned(&mut self, at: At, keys: &[BlockKey]) {
        if !self.flips_memory() {
            let keys = keys.to_vec();
            self.violate(|| format!("{at:?}: a right chunk is dropped as damaged: {keys:?}"));
        }
    }

    pub(crate) fn flips_memory(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault.kind, crate::faults::Kind::FlipMemory(_)))
    }

    /// Whether all requests are answered in time.
    pub(crate) fn check_deadlines(&mut self) {
        (0..self.engines.len()).for_each(|engine| self.check_waiting(engine, LONGEST_REQUEST));
    }

    /// Checks the state after the faults have stopped and all engines are gone: nothing is kept for anybody.
    pub(crate) fn check_rest(&mut self) {
        for host in 0..self.hosts.len() {
            let Some(process) = &self.hosts[host].process else { continue };
            let life = process.life;
            let left = [
                ("calls of peers", process.asking.left()[0]),
                ("orders of peers", process.asking.left()[1]),
                ("batches of peers", process.asking.left()[2]),
                ("follows at peers", process.asking.left()[3]),
                ("requests of peers", process.serving.under_way() as u64),
                ("turns of the exchange", process.exchange.under_way() as u64),
                ("bytes that are being sent", process.outgoing.sending.under_way_bytes()),
                ("questions of the directory", process.directory.questions() as u64),
                ("silent peers", process.silent.len() as u64),
            ];
            self.nothing_is_left(life, None, &left);
            for actor in 0..self.settings.actors {
                self.check_actor_at_rest(At { life, actor });
            }
        }
    }

    /// Whether a node is waiting for another node's answer.
    pub(crate) fn asks_peers(&self) -> bool {
        let processes = self.hosts.iter().filter_map(|host| host.process.as_ref());
        processes.into_iter().any(|process| process.asking.under_way() > 0)
    }

    fn check_actor_at_rest(&mut self, at: At) {
        let Some(actor) = self.actor(at) else { return };
        let (store, core) = (actor.core.store().usage(), actor.core.usage());
        let left = [
            ("leases", store.leases),
            ("reservations", store.reservations),
            ("commits", store.commits_in_flight),
            ("fetches", store.fetches),
            ("passing bytes", store.passing_bytes),
            ("claimed chunks", actor.core.store().claimed_chunks() as u64),
            ("chunks that are about to move", actor.core.store().departing_chunks() as u64),
            ("grants", store.grants),
            ("follows", store.follows),
            ("pins", store.pins),
            ("sessions", store.sessions),
            ("processes", store.lingering_processes),
            ("quarantined bytes", store.bytes.quarantined),
            ("bytes in slots of no chunk", store.bytes.used.abs_diff(store.cached_bytes)),
            ("bytes that wait for the disk", store.disk.map_or(0, |disk| disk.waiting_bytes)),
            ("bytes that wait for the object store", store.object.map_or(0, |object| object.waiting_bytes)),
            ("copies of the device", core.device_copies),
            ("copies of the simulated device", actor.gpu.under_way() as u64),
            ("requests", actor.requests.len() as u64),
            ("peers that wait for blocks", actor.asks.len() as u64),
            ("peers that wait for chunks to be taken", actor.takes.len() as u64),
            ("takes", actor.core.takes_under_way() as u64),
            ("orders of the disk", actor.disk.as_ref().map_or(0, |disk| disk.waiting() as u64)),
        ];
        let secluded = actor.core.store().secluded().len() as u64;
        self.nothing_is_left(at.life, Some(at.actor), &left);
        self.nothing_is_left(at.life, Some(at.actor), &[("extents of earlier lives", secluded)]);
    }

    fn nothing_is_left(&mut self, life: Life, actor: Option<u16>, left: &[(&str, u64)]) {
        for &(what, count) in left {
            if count > 0 {
                self.violate(|| format!("{life:?}, actor {actor:?}: {count} {what} are left at rest"));
            }
        }
    }

    /// A row that is missing at its home, or should not be there.
    pub(crate) fn rows_that_differ(&mut self) -> Option<String> {
        let Some(table) = self.leaders_table() else {
            return Some("no coordinator leads, or several do".to_owned());
        };
        let (mut expected, mut found) = (BTreeSet::new(), BTreeSet::new());
        for host in 0..self.hosts.len() {
            let now = crate::directory::millis(self.local(host));
            let Some(process) = &self.hosts[host].process else { continue };
            let own = process.directory.own();
            if process.directory.table().epoch != table.epoch {
                return Some(format!("host {host} has another table than the leader"));
            }
            if table.member(own).is_none() {
                return Some(format!("host {host} is no member"));
            }
            for (device, actor) in (0..).zip(&process.actors) {
                let (held, _) = actor.core.store().held_from(0, usize::MAX);
                for (fingerprint, chunk) in held {
                    let row = RowKey::new(&fingerprint, &chunk);
                    let home = table.home(row.run.partition())?;
                    expected.insert((home, row.run.partition(), row.digest(), Holder { node: own, device }));
                }
            }
            let rows = process.directory.shard.rows(now);
            found
                .extend(rows.into_iter().map(|(partition, digest, holder)| (own, partition, digest, holder)));
        }
        let first = expected.symmetric_difference(&found).next()?;
        let side = if expected.contains(first) { "is missing" } else { "is of nobody" };
        let count = expected.symmetric_difference(&found).count();
        Some(format!("{count} rows of {} differ; {first:?} {side}", expected.len()))
    }
}

/// The longest wait of a request: everything that it waits for has a deadline. A process may stand still for eight seconds
/// meanwhile.
const LONGEST_REQUEST: Duration = Duration::from_secs(28);
