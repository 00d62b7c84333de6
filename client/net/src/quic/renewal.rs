//! Certificates that are renewed while a process runs: every [`RENEWAL_CHECK`] it looks for changed files.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::credentials::{Pem, digest};
use super::{CredentialFiles, Credentials, CredentialsError, InspectError, Inspected, inspect_pem};
use crate::blocking::blocking;

/// Calls `renew` with the certificates in `files` whenever they change. `credentials` are the credentials in use. Files that
/// cannot be used, such as half-written files or another identity's, cause a warning and are read again later. A certificate in
/// use that expires soon, or that others would refuse, causes a warning at once and then once a day. `expires` is told the
/// certificate's end, if it has one. The future never completes.
///
/// # Cancel safety
/// Safe.
pub async fn renew_when_changed(
    files: CredentialFiles,
    credentials: Credentials,
    every: Duration,
    renew: impl Fn(&Credentials),
    expires: impl Fn(Option<SystemTime>),
) {
    // The folder's drive or server may hang.
    let read = || {
        let files = files.clone();
        blocking(move || files.read())
    };
    renew_from(read, &files, credentials, every, renew, expires).await;
}

async fn renew_from<R: Future<Output = Result<Pem, CredentialsError>>>(
    read: impl Fn() -> R,
    files: &CredentialFiles,
    credentials: Credentials,
    every: Duration,
    renew: impl Fn(&Credentials),
    expires: impl Fn(Option<SystemTime>),
) {
    // The files may have changed since these were read, a moment ago.
    let mut in_use = credentials.pem();
    let mut files_in_use = files.read().ok().filter(|pem| is(pem, in_use));
    let mut refused = None;
    // The clock of the system may run ahead and be set back.
    let mut next_warning = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_warning
            && let Some(pem) = &files_in_use
        {
            judge(pem, SystemTime::now(), &expires);
            next_warning = now + WARNED_EVERY;
        }
        tokio::time::sleep(every).await;
        let pem = match read().await {
            Ok(pem) if is(&pem, in_use) => {
                refused = None;
                files_in_use = Some(pem);
                continue;
            }
            Ok(pem) => pem,
            Err(error) => {
                tracing::warn!(%error, ?files, "the certificates cannot be read: the old ones stay in use");
                continue;
            }
        };
        let pem = match better(&pem, files_in_use.as_ref(), SystemTime::now()) {
            Some((better, error)) => {
                if refused.as_ref() != Some(&pem) {
                    tracing::warn!(%error, "others would refuse the new certificate: the old one stays in use");
                    refused = Some(pem);
                }
                if is(&better, in_use) {
                    continue;
                }
                better
            }
            None => {
                refused = None;
                pem
            }
        };
        let [ca, certificate, key] = &pem;
        match Credentials::from_pem(ca, certificate, key) {
            Ok(new) if new.identity() == credentials.identity() => {
                renew(&new);
                in_use = new.pem();
                files_in_use = Some(pem);
                next_warning = Instant::now();
                tracing::info!(identity = %new.identity(), "the certificates are renewed");
            }
            Ok(new) => tracing::warn!(
                found = %new.identity(),
                expected = %credentials.identity(),
                "the new certificate has another identity: the old one stays in use"
            ),
            Err(error) => {
                tracing::warn!(%error, "the new certificates cannot be used: the old ones stay in use")
            }
        }
    }
}

/// What to use instead of new files whose certificate others would refuse, and why; `None` if nothing is better. If no authority
/// of the new files has issued their certificate, the one in use goes on with the new authorities, so that an authority that was
/// taken from them is trusted no more.
fn better(new: &Pem, in_use: Option<&Pem>, now: SystemTime) -> Option<(Pem, InspectError)> {
    let (in_use, error) = (in_use?, inspect_at(new, now).err()?);
    let better = match error {
        InspectError::Credentials(_) => return None,
        InspectError::Expired { .. } | InspectError::NotYet { .. } => in_use.clone(),
        InspectError::UnknownIssuer | InspectError::Refused { .. } => {
            let ([ca, ..], [_, certificate, key]) = (new.clone(), in_use.clone());
            [ca, certificate, key]
        }
    };
    inspect_at(&better, now).is_ok().then_some((better, error))
}

/// Judges the certificate in use as others would.
fn judge(pem: &Pem, now: SystemTime, expires: &impl Fn(Option<SystemTime>)) {
    let days = |time: Duration| time.as_secs() / SECONDS_OF_A_DAY;
    let remedy = "`larder ca issue` makes a new one, which is used without a restart";
    match inspect_at(pem, now) {
        Ok(Inspected { identity, not_after }) => {
            expires(not_after);
            let left = not_after.map(|end| end.duration_since(now).unwrap_or_default());
            if let Some(left) = left.filter(|left| *left < EXPIRES_SOON) {
                tracing::warn!(%identity, days = days(left), remedy, "the own certificate expires soon");
            }
        }
        Err(InspectError::Expired { not_after }) => {
            expires(Some(not_after));
            let days = days(now.duration_since(not_after).unwrap_or_default());
            tracing::error!(days, remedy, "the own certificate has expired: others turn this process away");
        }
        Err(error @ InspectError::NotYet { .. }) => {
            let remedy = "check this host's clock";
            tracing::error!(%error, remedy, "others turn this process away: its certificate is not accepted");
        }
        Err(error) => {
            tracing::error!(%error, remedy, "others turn this process away: its certificate is not accepted");
        }
    }
}

/// How often a process looks whether its certificates have changed.
pub const RENEWAL_CHECK: Duration = Duration::from_secs(30);

/// How often the warning about a certificate that needs renewal is repeated.
const WARNED_EVERY: Duration = Duration::from_secs(SECONDS_OF_A_DAY);

/// A certificate that expires within this time causes a warning: time enough to issue another.
pub const EXPIRES_SOON: Duration = Duration::from_secs(7 * SECONDS_OF_A_DAY);

const SECONDS_OF_A_DAY: u64 = 86_400;

/// Whether the credentials in use were made of these files.
fn is([ca, certificate, key]: &Pem, in_use: u64) -> bool {
    digest([ca, certificate, key]) == in_use
}

fn inspect_at([ca, certificate, key]: &Pem, now: SystemTime) -> Result<Inspected, InspectError> {
    inspect_pem(ca, certificate, key, now)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use larder_protocol::identity::{Identity, Role};
    use tokio::time::timeout;

    use super::*;
    use crate::quic::ca::{Authority, Validity};

    #[tokio::test(start_paused = true)]
    async fn the_warning_comes_once_a_day_whatever_the_systems_clock_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let (authority, own) = Authority::create(Validity::days(1)).unwrap();
        let issued = authority.issue(&Identity::new(Role::Node, "n"), Validity::days(1)).unwrap();
        std::fs::write(file("ca.pem"), own.certificate_pem).unwrap();
        std::fs::write(file("n.pem"), issued.certificate_pem).unwrap();
        std::fs::write(file("n.key"), issued.key_pem).unwrap();
        let (ca, certificate, key) = (file("ca.pem"), file("n.pem"), file("n.key"));
        let files = CredentialFiles { ca, certificate, key };
        let (credentials, judged) = (Credentials::load(&files).unwrap(), Cell::new(0));
        let expires = |_| judged.set(judged.get() + 1);
        let hour = Duration::from_secs(3_600);
        // Only the time of tokio passes.
        let read = || std::future::ready(files.read());
        timeout(hour * 49, renew_from(read, &files, credentials, hour, |_| {}, expires)).await.unwrap_err();
        assert_eq!(judged.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn bad_files_that_come_again_after_good_ones_are_warned_of_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = tracing_subscriber::fmt().with_writer(file.reopen().unwrap()).finish();
        let _logs = tracing::subscriber::set_default(log);
        let folder = tempfile::tempdir().unwrap();
        let [ca, certificate, key] = ["ca.pem", "n.pem", "n.key"].map(|name| folder.path().join(name));
        let files = CredentialFiles { ca, certificate, key };
        let (authority, own) = Authority::create(Validity::days(9)).unwrap();
        let issue = |validity| {
            let issued = authority.issue(&Identity::new(Role::Node, "n"), validity).unwrap();
            std::fs::write(&files.ca, &own.certificate_pem).unwrap();
            std::fs::write(&files.certificate, issued.certificate_pem).unwrap();
            std::fs::write(&files.key, issued.key_pem).unwrap();
            files.read().unwrap()
        };
        let now = SystemTime::now();
        let day = Duration::from_secs(SECONDS_OF_A_DAY);
        let bad = issue(Validity { not_before: now - 2 * day, not_after: now - day });
        let [new, old] = [(); 2].map(|()| issue(Validity::days(9)));
        let found = [&bad, &bad, &old, &bad, &bad, &new, &bad, &bad].map(Clone::clone);
        let count = found.len() as u32;
        let next = Cell::new(0);
        let read = || std::future::ready(Ok(found[next.replace(next.get() + 1)].clone()));
        let credentials = Credentials::load(&files).unwrap();
        let renewed = renew_from(read, &files, credentials, day, |_| {}, |_| {});
        timeout(day * count + day / 2, renewed).await.unwrap_err();
        let lines = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(lines.matches("others would refuse the new certificate").count(), 3, "{lines}");
    }
}
