//! The authority is replaced while processes go on.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use larder_net::quic::{CredentialFiles, Credentials, Endpoint, TransportSettings, renew_when_changed};
use larder_protocol::identity::Role;
use serde_json::Value;

fn larder(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command
        .arg("ca")
        .args(args)
        .args(["--dir", dir.to_str().unwrap()])
        .env_remove("LARDER_LOG")
        .output()
        .unwrap()
}

fn done(dir: &Path, args: &[&str]) {
    let output = larder(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn stage(dir: &Path) -> String {
    let report: Value = serde_json::from_slice(&larder(dir, &["rotate", "--json"]).stdout).unwrap();
    report["stage"].as_str().unwrap().to_owned()
}

/// An authority with a node's and a coordinator's certificate.
fn authority() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    done(dir.path(), &["init"]);
    done(dir.path(), &["issue", "node", "a"]);
    done(dir.path(), &["issue", "coordinator", "c"]);
    dir
}

fn files(dir: &Path, name: &str) -> CredentialFiles {
    let [certificate, key] = ["pem", "key"].map(|ending| dir.join(format!("{name}.{ending}")));
    CredentialFiles { ca: dir.join("ca.pem"), certificate, key }
}

fn read(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap()))
        .collect();
    found.sort();
    found
}

#[test]
fn each_step_is_done_once_says_what_comes_next_and_comes_in_its_order() {
    let dir = authority();
    let dir = dir.path();
    let before = read(dir);
    assert_eq!(stage(dir), "settled");
    let early = larder(dir, &["rotate", "reissue"]);
    assert!(early.status.code() == Some(2) && read(dir) == before, "{early:?}");
    let mut stages = Vec::new();
    for step in ["start", "reissue", "finish"] {
        let output = larder(dir, &["rotate", step]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains("Next: copy"), "{text}");
        let after = read(dir);
        let again = String::from_utf8(larder(dir, &["rotate", step]).stdout).unwrap();
        assert!(again.contains("nothing has changed") && read(dir) == after, "{step} again: {again}");
        stages.push(stage(dir));
        if step == "start" {
            assert_eq!(larder(dir, &["rotate", "finish"]).status.code(), Some(2), "nothing is reissued");
        }
    }
    assert_eq!(stages, ["started", "reissued", "settled"]);
    let names = |files: Vec<(String, Vec<u8>)>| files.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(read(dir)), names(before.clone()), "nothing is left over");
    assert!(read(dir).iter().zip(&before).all(|(new, old)| new.1 != old.1), "every file is another one");
    done(dir, &["issue", "node", "b"]);
    Credentials::load(&files(dir, "b")).unwrap();
}

#[test]
fn certificates_elsewhere_are_reissued_too_and_finish_asks_for_folders_that_are_gone() {
    let dir = authority();
    let out = tempfile::tempdir().unwrap();
    let out = out.path().to_str().unwrap();
    done(dir.path(), &["issue", "engine", "e", "--tenant", "red", "--out", out]);
    for step in ["start", "reissue"] {
        done(dir.path(), &["rotate", step]);
    }
    let gone = tempfile::tempdir().unwrap();
    done(dir.path(), &["issue", "node", "b", "--out", gone.path().to_str().unwrap()]);
    gone.close().unwrap();
    let refused = larder(dir.path(), &["rotate", "finish"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("which is gone"));
    done(
        dir.path(),
        &["rotate", "finish", "--certificates", dir.path().to_str().unwrap(), "--certificates", out],
    );
    let engine = CredentialFiles { ca: dir.path().join("ca.pem"), ..files(Path::new(out), "e") };
    assert_eq!(Credentials::load(&engine).unwrap().identity().to_string(), "larder://engine/red/e");
}

#[test]
fn certificates_in_subfolders_are_reissued_and_without_any_certificate_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, nodes) = (dir.path(), dir.path().join("certificates/nodes"));
    done(dir, &["init"]);
    done(dir, &["rotate", "start"]);
    let started = read(dir);
    let refused = larder(dir, &["rotate", "reissue"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("--certificates"));
    assert_eq!((read(dir), stage(dir)), (started, "started".to_owned()));
    done(dir, &["issue", "node", "a", "--out", nodes.to_str().unwrap()]);
    // Another cluster's authority below this one, and certificates of it without the authority.
    let (other, strays) = (dir.join("other"), dir.join("strays"));
    done(&other, &["init"]);
    done(&other, &["issue", "node", "b"]);
    done(&other, &["issue", "node", "c", "--out", strays.to_str().unwrap()]);
    let before = (read(&other), read(&strays));
    let refused = larder(dir, &["rotate", "reissue"]);
    assert!(
        String::from_utf8(refused.stderr).unwrap().contains("c.pem has expired, or is of another authority")
    );
    assert_eq!((read(&other), read(&strays)), before);
    std::fs::remove_dir_all(&strays).unwrap();
    for step in ["reissue", "finish"] {
        done(dir, &["rotate", step]);
    }
    assert_eq!(read(&other), before.0);
    let node = CredentialFiles { ca: dir.join("ca.pem"), ..files(&nodes, "a") };
    assert_eq!(Credentials::load(&node).unwrap().identity().to_string(), "larder://node/a");
}

#[test]
fn a_reissue_that_was_cut_short_between_key_and_certificate_is_ended_by_the_next() {
    let dir = authority();
    let dir = dir.path();
    done(dir, &["rotate", "start"]);
    let old = std::fs::read(dir.join("a.pem")).unwrap();
    done(dir, &["rotate", "reissue"]);
    // As if it had ended after the key was renamed, before the certificate was.
    std::fs::rename(dir.join("a.pem"), dir.join("a.pem.new")).unwrap();
    std::fs::write(dir.join("a.pem"), old).unwrap();
    assert!(Credentials::load(&files(dir, "a")).is_err());
    done(dir, &["rotate", "reissue"]);
    done(dir, &["rotate", "finish"]);
    assert_eq!(Credentials::load(&files(dir, "a")).unwrap().identity().to_string(), "larder://node/a");
}

#[test]
fn a_start_that_was_cut_short_before_ca_pem_trusts_the_new_authority_begins_again() {
    let dir = authority();
    let dir = dir.path();
    let settled = std::fs::read(dir.join("ca.pem")).unwrap();
    done(dir, &["rotate", "start"]);
    std::fs::write(dir.join("ca.pem"), settled).unwrap();
    let before = read(dir);
    let refused = larder(dir, &["rotate", "reissue"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("`larder ca rotate start` begins one") && read(dir) == before, "{text}");
    for step in ["start", "reissue", "finish"] {
        done(dir, &["rotate", step]);
    }
    Credentials::load(&files(dir, "a")).unwrap();
}

#[test]
fn files_keep_their_owner_and_mode_when_they_are_replaced() {
    let dir = authority();
    let dir = dir.path();
    let mode = |name: &str| std::fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
    std::fs::set_permissions(dir.join("a.key"), Permissions::from_mode(0o640)).unwrap();
    let is_owned = rustix::process::geteuid().is_root();
    if is_owned {
        std::os::unix::fs::chown(dir.join("a.key"), Some(7), Some(8)).unwrap();
    }
    for step in ["start", "reissue", "finish"] {
        done(dir, &["rotate", step]);
    }
    assert_eq!(["a.key", "c.key", "ca.key", "ca.pem"].map(mode), [0o640, 0o600, 0o600, 0o644]);
    let key = std::fs::metadata(dir.join("a.key")).unwrap();
    assert!(!is_owned || (key.uid(), key.gid()) == (7, 8));
}

fn endpoint(dir: &Path, name: &str) -> Endpoint {
    let files = files(dir, name);
    let credentials = Credentials::load(&files).unwrap();
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let endpoint = Endpoint::bind(any, &credentials, &TransportSettings::default()).unwrap();
    let renewed = endpoint.clone();
    let renew = move |new: &Credentials| renewed.renew(new);
    tokio::spawn(renew_when_changed(files, credentials, Duration::from_millis(5), renew, |_| ()));
    endpoint
}

/// Whether a new connection opens, and both sides accept each other.
async fn connects(from: &Endpoint, to: &Endpoint, role: Role) -> bool {
    let accept = async { to.accept().await.unwrap().accept().await.is_ok() };
    let connect = async { from.connect(to.local_address(), role, None).await.is_ok() };
    let (accepted, connected) = tokio::join!(accept, connect);
    accepted && connected
}

#[tokio::test]
async fn certificates_that_change_between_their_first_use_and_the_first_look_are_noticed() {
    let dir = authority();
    let dir = dir.path();
    // The tasks that look have not run yet when the files change.
    let (node, coordinator) = (endpoint(dir, "a"), endpoint(dir, "c"));
    for step in ["start", "reissue", "finish"] {
        done(dir, &["rotate", step]);
    }
    let renewed = endpoint(dir, "a");
    let mut tries = 0..400;
    while !connects(&renewed, &coordinator, Role::Coordinator).await
        || !connects(&renewed, &node, Role::Node).await
    {
        assert!(tries.next().is_some(), "they use the certificates that they began with");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn new_connections_come_about_at_every_step_of_a_rotation() {
    let dir = authority();
    let dir = dir.path();
    let (node, coordinator) = (endpoint(dir, "a"), endpoint(dir, "c"));
    // A process with the old authority's files, which never gets the new ones.
    let outdated = tempfile::tempdir().unwrap();
    for name in ["ca.pem", "a.pem", "a.key"] {
        std::fs::copy(dir.join(name), outdated.path().join(name)).unwrap();
    }
    let stranger = endpoint(outdated.path(), "a");
    for step in ["start", "reissue", "finish"] {
        done(dir, &["rotate", step]);
        // Also while only one side has seen the change.
        for _ in 0..20 {
            assert!(connects(&node, &coordinator, Role::Coordinator).await, "{step}");
            assert!(connects(&coordinator, &node, Role::Node).await, "{step}");
        }
    }
    let start = now();
    while connects(&stranger, &coordinator, Role::Coordinator).await {
        assert!(start.elapsed() < DEADLINE, "the old authority is trusted still");
        tokio::task::yield_now().await;
    }
    assert!(connects(&node, &coordinator, Role::Coordinator).await);
}

#[expect(clippy::disallowed_methods, reason = "a test of what happens in real time")]
fn now() -> Instant {
    Instant::now()
}

const DEADLINE: Duration = Duration::from_secs(30);
