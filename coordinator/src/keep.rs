//! Keeps the tables: makes them, or takes the leader's, writes each down, and then publishes it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use larder_net::coordinator_client::Known;
use larder_net::failure::Failure;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::elect::followed;
use crate::published::Published;
use crate::shared::SharedMembership;
use crate::state::StateWriter;
use crate::uptime::Uptime;

/// Keeps the tables until writing fails. Publishes no table that this coordinator might forget, and no table of a leader whose time
/// is over.
pub(crate) async fn keep(
    membership: &SharedMembership,
    writer: &StateWriter,
    publish: &watch::Sender<Arc<Published>>,
    uptime: Uptime,
    mut leaders: watch::Receiver<Known>,
) -> Failure {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut refused = None;
    loop {
        let changed = tokio::select! {
            _ = ticks.tick() => membership.lock().tick(uptime.now()).map(|table| (table, true)),
            table = followed(&mut leaders, membership, publish, uptime, &mut refused) => Some((table, false)),
        };
        let is_unwritten = membership.lock().take_unwritten();
        if changed.is_some() || is_unwritten {
            let state = membership.lock().state();
            let mut writing = pin!(writer.write(state));
            let written = loop {
                tokio::select! {
                    written = &mut writing => break written,
                    _ = ticks.tick() => membership.lock().stays_awake(uptime.now()),
                }
            };
            if let Err(error) = written {
                return error;
            }
        }
        let Some((table, is_own)) = changed else { continue };
        if is_own && !membership.lock().may_publish(&table, uptime.now()) {
            tracing::warn!(epoch = %table.epoch, "a table was written too late: this coordinator no longer leads in its term");
            continue;
        }
        tracing::info!(epoch = %table.epoch, members = table.members.len(), "a new table");
        let published = Published::new(publish.borrow().table(), table);
        publish.send_replace(Arc::new(published));
    }
}

/// Pause between checks of silence and changes.
const TICK: Duration = Duration::from_millis(20);
