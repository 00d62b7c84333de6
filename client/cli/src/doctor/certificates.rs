//! The node's certificate: whether others will accept it, its validity, and the users that can read its key.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use larder_net::quic::{CredentialFiles, EXPIRES_SOON, InspectError, Inspected, inspect};
use larder_protocol::identity::Role;

use super::{Finding, Subject, ok, problem, warning};

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let Some(cluster) = &subject.config.cluster else {
        return vec![ok(CHECK, "not needed: the configuration has no [cluster]")];
    };
    let files = CredentialFiles {
        ca: cluster.ca.clone(),
        certificate: cluster.certificate.clone(),
        key: cluster.key.clone(),
    };
    vec![certificate(subject, &files), key(&files)]
}

fn certificate(subject: &Subject, files: &CredentialFiles) -> Finding {
    let days = |time: Duration| time.as_secs() / SECONDS_OF_A_DAY;
    let name = subject.config.name.as_deref().unwrap_or(&subject.host.name);
    let renew = format!(
        "issue a new certificate by `larder ca issue node {name}`; the node uses it without a restart"
    );
    let Inspected { identity, not_after } = match inspect(files, subject.now) {
        Ok(inspected) => inspected,
        Err(InspectError::Expired { not_after }) => {
            let since = subject.now.duration_since(not_after).unwrap_or_default();
            return problem(CHECK, format!("it expired {} days ago", days(since)), renew);
        }
        Err(InspectError::NotYet { not_before }) => {
            let until = not_before.duration_since(subject.now).unwrap_or_default();
            let found = format!("the certificate becomes valid in {} seconds", until.as_secs());
            return problem(
                CHECK,
                found,
                "correct the clock here, or on the machine that issued the certificate",
            );
        }
        Err(error) => {
            let source =
                std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            let advice = "check that [cluster] ca, certificate and key belong together: `larder ca issue node` makes certificate and key";
            return problem(CHECK, format!("{error}{source}"), advice);
        }
    };
    if identity.role != Role::Node || identity.name != name {
        let found = format!("the certificate belongs to {identity}, not to the node {name}");
        return problem(
            CHECK,
            found,
            format!("issue one by `larder ca issue node {name}`, or set the node's `name`"),
        );
    }
    let left = not_after.map(|not_after| not_after.duration_since(subject.now).unwrap_or_default());
    match left {
        Some(left) if left < EXPIRES_SOON => {
            warning(CHECK, format!("{identity} expires in {} days", days(left)), renew)
        }
        Some(left) => ok(CHECK, format!("{identity} for {} days", days(left))),
        None => ok(CHECK, format!("{identity} never expires")),
    }
}

/// Checks the key's permissions: a process that can read the key can act as the node.
fn key(files: &CredentialFiles) -> Finding {
    const CHECK: &str = "private key";
    let path = files.key.display();
    match std::fs::metadata(&files.key) {
        Err(error) => {
            problem(CHECK, format!("{path} cannot be read: {error}"), "run this as the node's user")
        }
        Ok(metadata) if metadata.mode() & OTHERS != 0 => problem(
            CHECK,
            format!(
                "everybody on this host can read {path}, and act as the node (mode {:o})",
                metadata.mode() & 0o777
            ),
            format!("`chmod 600 {path}`, for the node's user; better, issue a new one"),
        ),
        Ok(metadata) if metadata.mode() & GROUP_WRITES != 0 => {
            warning(CHECK, format!("the group can replace {path}"), format!("`chmod 640 {path}`"))
        }
        Ok(metadata) => ok(CHECK, format!("mode {:o}", metadata.mode() & 0o777)),
    }
}

const CHECK: &str = "certificate";
const OTHERS: u32 = 0o007;
const GROUP_WRITES: u32 = 0o020;
const SECONDS_OF_A_DAY: u64 = 86_400;
