//! Opens the disk tiers when a node starts.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::actor::DiskParts;
use crate::disk::namespaces::NamespaceFolder;
use crate::disk::{DiskMetrics, DiskOptions, DiskTier, OpenError};
use crate::limits::DiskLimits;
use crate::metrics::SharedMetrics;

/// Opens an actor's disk tier. One that cannot be opened is left out, and said why: memory serves without it.
pub(super) async fn start(
    device: u16,
    limits: Option<&DiskLimits>,
    metrics: &SharedMetrics,
) -> (Option<DiskParts>, Option<String>) {
    let Some(limits) = limits.cloned() else { return (None, None) };
    let disk_metrics = metrics.disk(device);
    let closed = disk_metrics.closed.clone();
    let open = move || open(limits, disk_metrics);
    let opened = tokio::task::spawn_blocking(open).await;
    match opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
        Ok(parts) => {
            tracing::info!(device, lane = ?parts.tier.lane(), "the disk tier is open");
            (Some(parts), None)
        }
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            tracing::error!(device, %error, source, "the node serves without its disk tier");
            closed.set(1);
            (None, Some(error.to_string()))
        }
    }
}

fn open(limits: DiskLimits, metrics: DiskMetrics) -> Result<DiskParts, OpenError> {
    let DiskLimits { folder, namespaces, read_deadline: deadline, .. } = limits;
    let (sender, gone) = mpsc::unbounded_channel();
    // Where nobody listens, nobody needs to know.
    let on_gone = Box::new(move |gone| _ = sender.send(gone));
    let options = DiskOptions {
        folder,
        capacity_bytes: limits.capacity_bytes,
        segment_bytes: limits.segment_bytes,
        queue_orders: limits.queue_orders,
        scrub_bytes_per_second: limits.scrub_bytes_per_second,
        cpus: limits.cpus,
        lane: None,
    };
    let tier = DiskTier::open(&options, metrics, on_gone)?;
    let opened = NamespaceFolder::open(&namespaces, tier.namespaces_at_start());
    let (folder, known) = opened.map_err(|source| OpenError::Device { path: namespaces, source })?;
    Ok(DiskParts { tier, gone, folder: Arc::new(folder), known, deadline })
}
