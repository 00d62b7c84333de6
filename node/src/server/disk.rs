//! Opens the disk tiers when a node starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_net::blocking::blocking;
use larder_net::failure::Failure;
use tokio::sync::mpsc;

use crate::disk::drive::Drive;
use crate::disk::namespaces::NamespaceFolder;
use crate::disk::{DiskMetrics, DiskTier, unusable};
use crate::hands::DiskParts;
use crate::limits::{ActorLimits, DiskLimits};

/// Opens an actor's disk tier. If the tier cannot be opened, or its drive does not answer, the actor serves without it, and the
/// second value tells people why.
pub(super) async fn start(
    device: u16,
    limits: Option<(&DiskLimits, DiskMetrics)>,
) -> (Option<DiskParts>, Option<String>) {
    let Some((limits, metrics)) = limits else { return (None, None) };
    let (limits, closed, drive) = (limits.clone(), metrics.closed.clone(), Drive::new());
    let patience = limits.options.silent_after.max(PATIENCE);
    let path = limits.options.folder.clone();
    let opening = {
        let drive = drive.clone();
        blocking(move || open(limits, &drive, metrics))
    };
    let opened = tokio::select! {
        opened = opening => opened,
        () = silent(&drive, patience) => Err(Failure::new(format!(
            "the drive of the disk tier's {} has not answered for {} s: check the drive, then start the node again",
            path.display(),
            patience.as_secs()
        ))),
    };
    match opened {
        Ok(parts) => (Some(parts), None),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            tracing::error!(device, %error, source, "the node serves without its disk tier");
            closed.set(1);
            (None, Some(source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))))
        }
    }
}

/// Ready once one operation of the drive has had no answer for as long as `patience`.
async fn silent(drive: &Drive, patience: Duration) {
    while drive.silent_for() < patience {
        tokio::time::sleep(patience / 30).await;
    }
}

/// Warns of tiers of actors that the node had before: they keep their space, and a purge does not reach them.
pub(super) fn warn_of_leftovers(actors: &[ActorLimits]) {
    let Some(folder) = actors.first().and_then(|actor| actor.disk.as_ref()?.options.folder.parent()) else {
        return;
    };
    for left in leftovers(folder, actors.len()) {
        tracing::warn!(
            folder = %left.display(),
            "a disk tier of an actor that this node no longer has keeps its space, and no purge reaches it: remove the folder, unless the node gets this actor back"
        );
    }
}

/// The folders of tiers in `folder` whose actors are not among the first `actors`.
fn leftovers(folder: &Path, actors: usize) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let is_left = |path: &PathBuf| {
        let device = path.file_name()?.to_str()?.strip_prefix("device-")?.parse::<usize>().ok()?;
        Some(device >= actors)
    };
    let mut left: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    left.retain(|path| is_left(path) == Some(true));
    left.sort();
    left
}

fn open(limits: DiskLimits, drive: &Drive, metrics: DiskMetrics) -> Result<DiskParts, Failure> {
    let DiskLimits { options, read_deadline: deadline } = limits;
    let namespaces = options.folder.join("namespaces");
    let (sender, gone) = mpsc::unbounded_channel();
    // An error: nobody listens, so nobody needs to know.
    let on_gone = Box::new(move |gone| _ = sender.send(gone));
    let tier = DiskTier::open_on(drive, &options, metrics, on_gone)?;
    let asked = drive.asked();
    let opened = NamespaceFolder::open(&namespaces, tier.namespaces_at_start(), tier.found());
    drop(asked);
    let (folder, known) = opened.map_err(|error| unusable(&namespaces, error))?;
    Ok(DiskParts { tier, gone: Some(gone), folder: Arc::new(folder), known, deadline })
}

/// The shortest wait for one answer of the drive at the start: an idle drive may have to spin up, a busy one to write much.
const PATIENCE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drive_is_silent_once_one_operation_has_had_no_answer_for_long() {
        let (drive, patience) = (Drive::new(), Duration::from_millis(60));
        let waited = tokio::time::timeout(2 * patience, silent(&drive, patience)).await;
        assert!(waited.is_err(), "a drive that is asked for nothing is not silent");
        let _asked = drive.asked();
        silent(&drive, patience).await;
        assert!(drive.silent_for() >= patience);
    }

    #[test]
    fn tiers_of_actors_that_the_node_no_longer_has_are_named() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["device-0", "device-1", "device-4", "device-12", "device-x", "other"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let left = leftovers(folder.path(), 4);
        assert_eq!(left, ["device-12", "device-4"].map(|name| folder.path().join(name)));
        assert!(leftovers(&folder.path().join("nothing"), 1).is_empty());
    }
}
