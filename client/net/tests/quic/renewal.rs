//! Certificates that change while a process runs.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_net::quic::{CredentialFiles, Credentials, Endpoint, renew_when_changed};
use larder_protocol::identity::{Identity, Role};

use super::{Ca, Validity, bind};

/// Writes the files that a process of this identity needs in a cluster of this authority.
fn write(ca: &Ca, identity: &Identity, files: &CredentialFiles) {
    let issued = ca.0.issue(identity, Validity::days(1)).unwrap();
    fs::write(&files.ca, &ca.1).unwrap();
    fs::write(&files.certificate, issued.certificate_pem).unwrap();
    fs::write(&files.key, issued.key_pem).unwrap();
}

#[tokio::test]
async fn an_own_certificate_that_has_expired_is_told_until_it_is_renewed() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, files) = (Ca::new(), files(dir.path()));
    let node = Identity::new(Role::Node, "node-0");
    let (begin, end) = (UNIX_EPOCH + Duration::from_secs(1_000), UNIX_EPOCH + Duration::from_secs(2_000));
    let issued = ca.0.issue(&node, Validity { not_before: begin, not_after: end }).unwrap();
    fs::write(&files.ca, &ca.1).unwrap();
    fs::write(&files.certificate, issued.certificate_pem).unwrap();
    fs::write(&files.key, issued.key_pem).unwrap();
    let credentials = Credentials::load(&files).unwrap();
    let (every, (tell, mut told)) = (Duration::from_millis(5), tokio::sync::mpsc::unbounded_channel());
    let expires = move |time| tell.send(time).unwrap();
    tokio::spawn(renew_when_changed(files.clone(), credentials, every, |_| (), expires));
    assert_eq!(told.recv().await, Some(Some(end)));
    write(&ca, &node, &files);
    let renewed = tokio::time::timeout(Duration::from_secs(10), told.recv()).await.unwrap();
    assert!(renewed.unwrap().is_some_and(|time| time > SystemTime::now()));
}

fn files(dir: &Path) -> CredentialFiles {
    CredentialFiles { ca: dir.join("ca.pem"), certificate: dir.join("node.pem"), key: dir.join("node.key") }
}

/// Whether a client of `ca` and the server accept each other within some time.
async fn is_taken(ca: &Ca, server: &Endpoint) -> bool {
    let client = ca.endpoint(Role::Admin, "me");
    let call = async {
        while client.connect(server.local_address(), Role::Node, Some("node-0")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(2), call).await.is_ok()
}

#[tokio::test]
async fn a_certificate_of_an_authority_that_is_not_trusted_waits_for_that_authority() {
    let dir = tempfile::tempdir().unwrap();
    let (own, stolen, other, files) = (Ca::new(), Ca::new(), Ca::new(), files(dir.path()));
    let node = Identity::new(Role::Node, "node-0");
    write(&own, &node, &files);
    fs::write(&files.ca, format!("{}{}", own.1, stolen.1)).unwrap();
    let credentials = Credentials::load(&files).unwrap();
    let server = bind(&credentials);
    let (every, (tell, mut told)) = (Duration::from_millis(5), tokio::sync::mpsc::unbounded_channel());
    let renewed = server.clone();
    let renew = move |new: &Credentials| {
        renewed.renew(new);
        tell.send(()).unwrap();
    };
    tokio::spawn(renew_when_changed(files.clone(), credentials, every, renew, |_| ()));
    accept_all(&server);
    assert!(is_taken(&own, &server).await);

    let issued = other.0.issue(&node, Validity::days(1)).unwrap();
    fs::write(&files.certificate, issued.certificate_pem).unwrap();
    fs::write(&files.key, issued.key_pem).unwrap();
    for _ in 0..20 {
        assert!(is_taken(&own, &server).await, "the certificate in use is fine");
    }
    assert!(told.try_recv().is_err());
    fs::write(&files.ca, &own.1).unwrap();
    told.recv().await.unwrap();
    assert!(is_taken(&own, &server).await, "the old certificate goes on, with the new authorities");
    fs::write(&files.ca, &other.1).unwrap();
    told.recv().await.unwrap();
    assert!(is_taken(&other, &server).await);
}

/// Lets in everybody that the server accepts.
fn accept_all(server: &Endpoint) {
    let accepting = server.clone();
    tokio::spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            tokio::spawn(async move {
                if let Ok(connection) = incoming.accept().await {
                    connection.quic().closed().await;
                }
            });
        }
    });
}

#[tokio::test]
async fn new_files_are_used_for_new_connections_and_bad_ones_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second, files) = (Ca::new(), Ca::new(), files(dir.path()));
    let node = Identity::new(Role::Node, "node-0");
    write(&first, &node, &files);
    let credentials = Credentials::load(&files).unwrap();
    let server = bind(&credentials);
    accept_all(&server);
    let every = Duration::from_millis(5);
    let renewed = server.clone();
    let renew = move |new: &Credentials| renewed.renew(new);
    tokio::spawn(renew_when_changed(files.clone(), credentials, every, renew, |_| ()));
    assert!(is_taken(&first, &server).await);

    fs::write(&files.certificate, "half a certificate").unwrap();
    assert!(is_taken(&first, &server).await, "a file that is half written changes nothing");
    write(&second, &Identity::new(Role::Node, "node-9"), &files);
    assert!(is_taken(&first, &server).await, "nor does somebody else's certificate");
    let (begin, end) = (UNIX_EPOCH + Duration::from_secs(1_000), UNIX_EPOCH + Duration::from_secs(2_000));
    let expired = first.0.issue(&node, Validity { not_before: begin, not_after: end }).unwrap();
    fs::write(&files.ca, &first.1).unwrap();
    fs::write(&files.certificate, expired.certificate_pem).unwrap();
    fs::write(&files.key, expired.key_pem).unwrap();
    for _ in 0..20 {
        assert!(is_taken(&first, &server).await, "nor does a certificate that has expired");
    }

    write(&second, &node, &files);
    assert!(is_taken(&second, &server).await, "the new authority's certificates count");
    assert!(!is_taken(&first, &server).await, "and those of the old one no more");
}
