//! Tests of a drive that hangs: it neither carries operations out nor fails them.

use std::sync::mpsc::Sender;

use larder_core::store::PurgedKeys;
use larder_protocol::purge::PurgeMode;

use super::behaviour::{GEOMETRY, STORAGE};
use super::faults::Platter;
use super::*;
use crate::disk::volume::Volume;

/// A tier whose drive answers no sync until the sender is dropped.
pub(crate) fn hanging() -> (DiskTier, DiskMetrics, Sender<()>) {
    let (platter, metrics) = (Platter::new(GEOMETRY.file_bytes(), 1), metrics());
    let volume = Volume::over(platter.device(), GEOMETRY, STORAGE, metrics.clone(), gone().0).unwrap();
    let (hold, gate) = channel();
    platter.state().gate = Some(gate);
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { silent_after: Duration::from_millis(20), ..options(folder.path()) };
    (DiskTier::start(volume, &options, metrics.clone()).unwrap(), metrics, hold)
}

pub(crate) fn everything() -> DiskPurge {
    DiskPurge { keys: Arc::new(PurgedKeys::default()), mode: PurgeMode::Remove }
}

fn wait_until(holds: impl Fn() -> bool) {
    while !holds() {
        std::thread::yield_now();
    }
}

#[test]
fn a_silent_drive_is_asked_for_nothing_until_it_answers() {
    let ((tier, metrics, hold), mut slots) = (hanging(), Slots::new());
    let written = tier.write(slots.write_order(TestChunk(1))).unwrap();
    wait_until(|| tier.look());
    assert_eq!(metrics.silent.get(), 1);
    let refused = [
        tier.read(slots.read_order(TestChunk(1))).map(drop),
        tier.write(slots.write_order(TestChunk(2))).map(drop),
        tier.purge(everything(), 0).map(drop),
        tier.snapshot(0).map(drop),
    ];
    assert_eq!(refused, [Err(Refused::Silent); 4]);
    assert_eq!(metrics.answers("silent"), 4);
    drop(hold);
    assert_eq!(written.blocking_recv(), Ok(WriteAnswer::Durable));
    wait_until(|| !tier.look());
    assert_eq!(metrics.silent.get(), 0);
    let read = tier.read(slots.read_order(TestChunk(1))).unwrap().blocking_recv().unwrap();
    slots.assert_right(TestChunk(1), &read);
}

#[test]
fn a_tier_ends_without_a_silent_drive_and_its_orders_keep_their_places() {
    let ((tier, _, hold), mut slots) = (hanging(), Slots::new());
    let mut written = tier.write(slots.write_order(TestChunk(1))).unwrap();
    drop(tier);
    assert_eq!(written.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    drop(hold);
    assert_eq!(written.blocking_recv(), Ok(WriteAnswer::Durable));
}
