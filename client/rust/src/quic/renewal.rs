//! Certificates that are renewed while a process runs.

use std::io;
use std::time::Duration;

use super::{CredentialFiles, Credentials, Endpoint};

/// Has `endpoint` use what is in `files` whenever that changes, for connections made from then on. `credentials` are those
/// in use. Files that cannot be used, as those that are half written, and those of somebody else, are warned of and looked
/// at again. Never ready.
///
/// # Cancel safety
/// Safe.
pub async fn renew_when_changed(
    endpoint: Endpoint,
    files: CredentialFiles,
    credentials: Credentials,
    every: Duration,
) {
    // An error: they have gone since they were read, and count as changed when they are back.
    let mut in_use = contents(&files).unwrap_or_default();
    loop {
        tokio::time::sleep(every).await;
        let now = match contents(&files) {
            Ok(now) if now != in_use => now,
            Ok(_) => continue,
            Err(error) => {
                tracing::warn!(%error, ?files, "the certificates cannot be read: those in use stay");
                continue;
            }
        };
        match Credentials::load(&files) {
            Ok(new) if new.identity() == credentials.identity() => {
                endpoint.renew(&new);
                in_use = now;
                tracing::info!(identity = %new.identity(), "the certificates are renewed");
            }
            Ok(new) => tracing::warn!(
                found = %new.identity(),
                expected = %credentials.identity(),
                "the new certificate is somebody else's: the one in use stays"
            ),
            Err(error) => tracing::warn!(%error, "the new certificates cannot be used: those in use stay"),
        }
    }
}

/// How often a process looks whether its certificates have changed.
pub const RENEWAL_CHECK: Duration = Duration::from_secs(30);

fn contents(files: &CredentialFiles) -> io::Result<[Vec<u8>; 3]> {
    Ok([std::fs::read(&files.ca)?, std::fs::read(&files.certificate)?, std::fs::read(&files.key)?])
}
