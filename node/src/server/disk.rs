//! Opens the disk tiers when a node starts.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::actor::DiskParts;
use crate::disk::namespaces::NamespaceFolder;
use crate::disk::{DiskMetrics, DiskTier, OpenError};
use crate::limits::DiskLimits;
use crate::threads;

/// Opens an actor's disk tier. If the tier cannot be opened, the actor serves without it, and the second value tells people why.
pub(super) async fn start(
    device: u16,
    limits: Option<(&DiskLimits, DiskMetrics)>,
) -> (Option<DiskParts>, Option<String>) {
    let Some((limits, metrics)) = limits else { return (None, None) };
    let (limits, closed) = (limits.clone(), metrics.closed.clone());
    match threads::blocking(move || open(limits, metrics)).await {
        Ok(parts) => (Some(parts), None),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            tracing::error!(device, %error, source, "the node serves without its disk tier");
            closed.set(1);
            (None, Some(error.to_string()))
        }
    }
}

fn open(limits: DiskLimits, metrics: DiskMetrics) -> Result<DiskParts, OpenError> {
    let DiskLimits { options, read_deadline: deadline } = limits;
    let namespaces = options.folder.join("namespaces");
    let (sender, gone) = mpsc::unbounded_channel();
    // An error: nobody listens, so nobody needs to know.
    let on_gone = Box::new(move |gone| _ = sender.send(gone));
    let tier = DiskTier::open(&options, metrics, on_gone)?;
    let opened = NamespaceFolder::open(&namespaces, tier.namespaces_at_start());
    let (folder, known) = opened.map_err(|source| OpenError::Device { path: namespaces, source })?;
    Ok(DiskParts { tier, gone: Some(gone), folder: Arc::new(folder), known, deadline })
}
