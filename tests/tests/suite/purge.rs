//! Purges: chunks that an admin removes from memory, disk and object store.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, prompt};
use larder_tests::replay::write_generated;
use larder_tests::wait;
use serde_json::Value;

use super::drain::{admin, cluster, quick_times};
use super::{Engine, LARDER};

fn purge(cluster: &Cluster, more: &[&str]) -> Value {
    let (status, report, said) = admin(cluster, &[&["purge", "--tenant", "default"], more].concat());
    assert_eq!(status, Some(0), "{report} {said}");
    report
}

/// The sum of a field over all nodes.
fn sum(report: &Value, field: &str) -> u64 {
    report["nodes"].as_array().unwrap().iter().map(|node| node[field].as_u64().unwrap()).sum()
}

fn used_bytes(cluster: &Cluster, node: usize) -> u64 {
    let status: Value = serde_json::from_str(&cluster.node(node).get("/status").unwrap()).unwrap();
    status["actors"][0]["used_bytes"].as_u64().unwrap()
}

#[test]
fn a_tenant_is_purged_from_every_node_and_can_be_written_anew() {
    let cluster = cluster(2, "");
    let (one, other) = (Engine::connect(&cluster.socket(0)), Engine::connect(&cluster.socket(1)));
    let hashes = prompt(b'a', 40);
    one.put(&hashes);
    // The other node gets a copy, which it may keep.
    wait::until("the other node gets it", || (other.get(&hashes) == 40).then_some(()));
    other.put(&prompt(b'b', 10));
    let counted = purge(&cluster, &["--dry-run"]);
    assert!(sum(&counted, "memory_chunks") >= 50, "{counted}");
    assert_eq!(one.get(&hashes), 40, "to count takes nothing");
    let purged = purge(&cluster, &[]);
    assert_eq!(sum(&purged, "memory_chunks"), sum(&counted, "memory_chunks"), "{purged}");
    assert_eq!((one.get(&hashes), other.get(&hashes), one.get(&prompt(b'b', 10))), (0, 0, 0));
    assert_eq!((used_bytes(&cluster, 0), used_bytes(&cluster, 1)), (0, 0));
    assert_eq!(one.put(&hashes), 40);
    wait::until("the other node gets it anew", || (other.get(&hashes) == 40).then_some(()));
}

#[test]
fn a_purge_of_a_tenant_that_no_node_has_is_an_error() {
    let cluster = cluster(1, "");
    let (status, _, said) = admin(&cluster, &["purge", "--tenant", "defaults"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("no node has a tenant `defaults`; the tenants are: default"), "{said}");
}

#[test]
fn commands_for_all_nodes_name_a_lost_node_which_may_come_back_with_its_chunks() {
    let mut cluster = cluster(3, "");
    quick_times(&mut cluster);
    cluster.kill_node(2).unwrap();
    wait::until("it is lost", || {
        let status: Value = serde_json::from_str(&cluster.coordinator().get("/status").unwrap()).unwrap();
        (status["lost"][0]["name"] == "node-2").then_some(())
    });
    let (status, report, said) = admin(&cluster, &["purge", "--tenant", "default"]);
    assert_eq!((status, report["nodes"].as_array().unwrap().len()), (Some(1), 3), "{report}");
    assert!(said.contains("node-2: it is lost") && said.contains("purge again"), "{said}");
    for command in [&["policy", "sieve"][..], &["reload"]] {
        let (status, report, _) = admin(&cluster, command);
        let lost = &report["nodes"][2];
        assert_eq!((status, &lost["name"]), (Some(1), &"node-2".into()), "{report}");
        assert!(lost["error"].as_str().unwrap().starts_with("it is lost, not heard for "), "{report}");
    }
    let near = ["purge", "--tenant", "default", "--member", "node-0", "--member", "node-1"];
    assert_eq!(admin(&cluster, &near).0, Some(0), "whoever names members means these");
}

#[test]
fn leased_blocks_survive_a_purge_until_they_are_released() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'a', 8);
    engine.put(&hashes);
    let chain = engine.namespace.chain(hashes.clone());
    let lease = engine.session.lease(&engine.namespace, &chain).wait().unwrap();
    let purged = purge(&cluster, &[]);
    assert_eq!((sum(&purged, "memory_chunks"), sum(&purged, "read_chunks")), (8, 8), "{purged}");
    assert_eq!(engine.get(&hashes), 0);
    for (position, hash) in hashes.iter().enumerate() {
        let mut bytes = vec![0; BLOCK_BYTES];
        lease.copy_block(position, 0, &mut bytes).unwrap();
        assert!(bytes == larder_tests::content::block(hash), "a leased block is what it was");
    }
    drop(lease);
    wait::until("its memory is free", || (used_bytes(&cluster, 0) == 0).then_some(()));
    assert_eq!((engine.put(&hashes), engine.get(&hashes)), (8, 8));
}

#[test]
fn a_chunk_is_purged_with_all_that_continue_it() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'a', 20);
    engine.put(&hashes);
    engine.put(&prompt(b'b', 5));
    let namespace = engine.namespace.fingerprint().to_string();
    let chunk = hashes[12].to_string();
    let (status, purged, said) = admin(&cluster, &["purge", "--namespace-id", &namespace, "--chunk", &chunk]);
    assert_eq!((status, sum(&purged, "memory_chunks")), (Some(0), 8), "{purged} {said}");
    assert_eq!((engine.get(&hashes), engine.get(&prompt(b'b', 5))), (12, 5));
    let (status, purged, said) = admin(&cluster, &["purge", "--namespace-id", "0123456789abcdef"]);
    assert_eq!((status, sum(&purged, "memory_chunks")), (Some(2), 0), "{said}");
    assert!(said.contains("no node has a namespace `0123456789abcdef`"), "{said}");
}

#[test]
fn a_chunk_is_purged_with_all_that_continue_it_in_the_object_store_alone() {
    let store = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1, &format!("[object]\nurl = \"file://{}\"\n", store.path().display()));
    let hashes = prompt(b'a', 20);
    let engine = Engine::connect(&cluster.socket(0));
    engine.put(&hashes);
    wait::until("all are uploaded", || (files(store.path()) == 20).then_some(()));
    let namespace = engine.namespace.fingerprint().to_string();
    drop(engine);
    let before = cluster.member("node-0").incarnation;
    cluster.restart_node(0).unwrap();
    wait::until("it is a member again", || (cluster.member("node-0").incarnation > before).then_some(()));
    let engine = Engine::connect(&cluster.socket(0));
    let chunk = hashes[12].to_string();
    let (status, purged, said) = admin(&cluster, &["purge", "--namespace-id", &namespace, "--chunk", &chunk]);
    assert_eq!((status, sum(&purged, "objects")), (Some(0), 8), "{purged} {said}");
    engine.put(&hashes[..13]);
    wait::until("what was kept is found, and nothing more", || (engine.get(&hashes) == 13).then_some(()));
}

#[test]
fn what_is_purged_from_a_disk_does_not_come_back_with_a_restart() {
    let disk = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n";
    let mut cluster = cluster(1, disk);
    let (hashes, kept) = (prompt(b'a', 100), prompt(b'k', 50));
    let on_disk = |cluster: &Cluster| {
        let status: Value = serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap();
        status["actors"][0]["disk"]["chunks"].as_u64().unwrap()
    };
    let engine = Engine::connect(&cluster.socket(0));
    engine.put(&hashes);
    engine.put(&kept);
    wait::until("all are on disk", || (on_disk(&cluster) == 150).then_some(()));
    let namespace = engine.namespace.fingerprint().to_string();
    let (status, purged, said) =
        admin(&cluster, &["purge", "--namespace-id", &namespace, "--chunk", &hashes[0].to_string()]);
    assert_eq!((status, sum(&purged, "disk_chunks")), (Some(0), 100), "{purged} {said}");
    drop(engine);
    cluster.restart_node(0).unwrap();
    wait::until("what was kept is found", || (on_disk(&cluster) == 50).then_some(()));
    let engine = Engine::connect(&cluster.socket(0));
    assert_eq!((engine.get(&hashes), engine.get(&kept)), (0, 50));
    assert_eq!(
        cluster.node(0).metric("larder_disk_checksum_failures_total"),
        0.0,
        "nothing counts as damaged"
    );
    assert_eq!((engine.put(&hashes), engine.get(&hashes)), (100, 100));
}

#[test]
fn a_purge_of_a_tenant_names_a_namespace_on_disk_whose_tenant_nobody_knows() {
    let disk = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n";
    let mut cluster = cluster(1, disk);
    let engine = Engine::connect(&cluster.socket(0));
    engine.put(&prompt(b'a', 40));
    let cached = "larder_cached_chunks{device=\"0\",tier=\"disk\"}";
    wait::until("all are on disk", || (cluster.node(0).metric(cached) == 40.0).then_some(()));
    let namespace = engine.namespace.fingerprint().to_string();
    drop(engine);
    let description = cluster.dir().join("node-0.disk/device-0/namespaces").join(&namespace);
    std::fs::write(description, "damaged").unwrap();
    cluster.restart_node(0).unwrap();
    let expected = format!("namespace {namespace} on disk has no usable description");
    wait::until("the node is back, and names it", || {
        let (code, purged, _) = admin(&cluster, &["purge", "--tenant", "default"]);
        (code == Some(1) && purged.to_string().contains(&expected)).then_some(())
    });
    let (code, purged, said) = admin(&cluster, &["purge", "--namespace-id", &namespace]);
    assert_eq!((code, sum(&purged, "disk_chunks")), (Some(0), 40), "{purged} {said}");
    purge(&cluster, &[]);
}

#[test]
fn a_closed_disk_keeps_a_purge_from_nothing_else() {
    let disk = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n";
    let cluster = cluster(1, disk);
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'a', 40);
    engine.put(&hashes);
    let status = || -> Value { serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap() };
    let disk = || status()["actors"][0]["disk"].clone();
    wait::until("all are on disk", || (disk()["chunks"] == 40).then_some(()));
    std::fs::remove_dir_all(cluster.dir().join("node-0.disk")).unwrap();
    wait::until("the disk closes", || status()["actors"][0]["disk_trouble"].is_string().then_some(()));
    let (code, purged, said) = admin(&cluster, &["purge", "--tenant", "default"]);
    assert_eq!((code, sum(&purged, "memory_chunks")), (Some(1), 40), "{purged} {said}");
    assert!(
        purged.to_string().contains("disk tier is closed") || said.contains("disk tier is closed"),
        "{purged} {said}"
    );
    assert_eq!((engine.get(&hashes), used_bytes(&cluster, 0)), (0, 0));
}

#[test]
fn a_tier_that_could_not_be_opened_is_not_purged_and_the_purge_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "no folder").unwrap();
    let file = file.display();
    let disk = format!("[disk]\nfolder = \"{file}\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n");
    let objects = format!("[object]\nurl = \"file://{file}\"\n");
    for (tier, expected) in [(disk, "a disk tier is closed"), (objects, "the object store: it is not open")] {
        let cluster = cluster(1, &tier);
        let (code, purged, said) = admin(&cluster, &["purge", "--tenant", "default"]);
        assert_eq!(code, Some(1), "{purged} {said}");
        assert!(purged.to_string().contains(expected), "{purged} {said}");
    }
}

#[test]
fn objects_are_purged_too() {
    let dir = tempfile::tempdir().unwrap();
    let objects = format!("[object]\nurl = \"file://{}/store\"\n", dir.path().display());
    let cluster = cluster(2, &objects);
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'a', 30);
    engine.put(&hashes);
    wait::until("all are uploaded", || (files(dir.path()) == 30).then_some(()));
    assert_eq!(sum(&purge(&cluster, &["--dry-run", "--member", "node-0"]), "objects"), 30);
    assert_eq!(files(dir.path()), 30);
    let purged = purge(&cluster, &[]);
    assert_eq!(sum(&purged, "objects"), 30, "{purged}");
    assert_eq!(files(dir.path()), 0);
    let other = Engine::connect(&cluster.socket(1));
    assert_eq!((engine.get(&hashes), other.get(&hashes)), (0, 0));
    engine.put(&hashes);
    wait::until("all are uploaded anew", || (files(dir.path()) == 30).then_some(()));
}

#[test]
fn a_node_that_shares_no_chunks_carries_out_an_admins_commands() {
    let cluster = cluster(2, "share = false\n");
    let [one, other] = [0, 1].map(|node| Engine::connect(&cluster.socket(node)));
    let hashes = prompt(b'a', 40);
    one.put(&hashes);
    assert_eq!(other.get(&hashes), 0, "nothing is shared");
    assert_eq!(sum(&purge(&cluster, &[]), "memory_chunks"), 40);
    assert_eq!(one.get(&hashes), 0);
    let (status, _, said) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(0), "{said}");
    let (status, report, said) = admin(&cluster, &["drain", "node-0"]);
    assert!(status != Some(0) && said.contains("shares no chunks"), "{status:?} {report} {said}");
}

/// Objects below a folder.
fn files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let count = |path: &Path| match path.is_dir() {
        true => files(path),
        false => usize::from(path.file_name().is_some_and(|name| name.len() > 64)),
    };
    entries.map(|entry| count(&entry.path())).sum()
}

#[test]
fn a_replay_that_is_purged_again_and_again_gets_no_wrong_byte_and_fails_no_request() {
    let cluster = cluster(3, "");
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    write_generated(&trace, 11, 1_500).unwrap();
    let arguments =
        [trace.to_str().unwrap(), "--coordinator", cluster.coordinator_http(), "--block-bytes", "4096"];
    let is_over = AtomicBool::new(false);
    let (purges, removed, report) = std::thread::scope(|scope| {
        let purging = scope.spawn(|| {
            let (mut purges, mut removed) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                let (_, report, said) = admin(&cluster, &["purge", "--tenant", "default"]);
                assert!(report["nodes"].is_array(), "{said}");
                (purges, removed) = (purges + 1, removed + sum(&report, "memory_chunks"));
            }
            (purges, removed)
        });
        let replay = larder_tests::replay::Replay::start(LARDER, &arguments).unwrap();
        let report = replay.finish();
        is_over.store(true, Ordering::Relaxed);
        let (purges, removed) = purging.join().unwrap();
        (purges, removed, report.unwrap().0)
    });
    println!("{purges} purges removed {removed} chunks: {report}");
    assert!(purges > 0 && removed > 0);
    assert_eq!((&report["wrong_bytes"], &report["failed_requests"]), (&0.into(), &0.into()), "{report}");
}

#[test]
fn only_an_admin_purges_and_the_audit_log_says_who_did() {
    let cluster = cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    Engine::connect(&cluster.socket(0)).put(&prompt(b'a', 5));
    purge(&cluster, &["--dry-run"]);
    purge(&cluster, &[]);
    let line = wait::until("the audit log has it", || {
        let text = std::fs::read_to_string(cluster.dir().join("node-0.audit")).ok()?;
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .find(|line| line["action"] == "purge")
    });
    assert_eq!((&line["by"], &line["what"]), (&"admin admin".into(), &"tenant default".into()));
    let file = |ending: &str| cluster.dir().join(ending).display().to_string();
    let output = std::process::Command::new(LARDER)
        .args(["purge", "--tenant", "default", "--coordinator", cluster.coordinator_http()])
        .args(["--ca", &file("ca.pem"), "--certificate", &file("node-0.pem"), "--key", &file("node-0.key")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("only an admin may do this"));
}
