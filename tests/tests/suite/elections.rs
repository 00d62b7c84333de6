//! Several coordinators: whole clusters whose leader dies, stands still or is left alone.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use larder_tests::api_server::Trouble::{
    AnswerLost, Conflict, Failure, Garbage, Late, Lost, Skewed, Stale, Timeout, TooMany,
};
use larder_tests::api_server::{ALL_RIGHTS, ApiServer, NAMESPACE};
use larder_tests::coordinators::Coordinators;
use larder_tests::etcd::Etcd;
use larder_tests::hosts::Hosts;
use larder_tests::real_api_server::RealApiServer;
use larder_tests::server::get;
use larder_tests::tls::Authority;
use larder_tests::wait;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::LARDER;
use super::cluster::well_ended;
use super::faults::replay_lasting;

/// An etcd, if this build and this machine have one.
pub(super) fn etcd() -> Option<Etcd> {
    if !cfg!(feature = "etcd") {
        larder_skips::skip("built without the feature `etcd`, which needs protoc");
        return None;
    }
    let started = Etcd::start().unwrap();
    if started.is_none() {
        larder_skips::skip("no etcd here: apt-get install etcd-server");
    }
    started
}

/// A stand-in for Kubernetes, and the folder of its kubeconfig; `None` if this build knows no Leases.
fn kubernetes() -> Option<(ApiServer, TempDir)> {
    if !cfg!(feature = "kubernetes") {
        larder_skips::skip("built without the feature `kubernetes`");
        return None;
    }
    Some((ApiServer::start().unwrap(), tempfile::tempdir().unwrap()))
}

/// The keys of `[election]` for etcd.
fn by_etcd(etcd: &Etcd, times: &str) -> String {
    format!("backend = \"etcd\"\nendpoints = [\"{}\"]\n{times}", etcd.url())
}

/// The keys of `[election]` for a Lease.
fn by_lease(kubeconfig: &Path, times: &str) -> String {
    format!("backend = \"kubernetes\"\nkubeconfig = \"{}\"\n{times}", kubeconfig.display())
}

fn kubeconfig((api, dir): &(ApiServer, TempDir)) -> PathBuf {
    api.kubeconfig(dir.path(), &ALL_RIGHTS, NAMESPACE).unwrap()
}

/// Times for a register that is near and quick.
const QUICK: &str = "lease_ms = 2000\nrenew_within_ms = 1400\nretry_ms = 300";

/// The default times.
const USUAL: &str = "lease_ms = 6000\nrenew_within_ms = 4000\nretry_ms = 1000";

#[expect(clippy::disallowed_methods, reason = "tests of whole processes live in real time")]
fn now() -> Instant {
    Instant::now()
}

/// The number of kills: a few, or as many as in heavy tests.
fn kills(usual: u64) -> u64 {
    if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { 20 } else { usual }
}

#[test]
fn leaders_that_are_killed_under_load_fail_no_request_and_move_no_partition() {
    let Some(etcd) = etcd() else { return };
    leaders_are_killed("etcd, lease 2 s", &by_etcd(&etcd, QUICK), kills(3), 6);
}

#[test]
fn leaders_with_the_usual_times_are_killed_and_followed_through_etcd() {
    let Some(etcd) = etcd() else { return };
    leaders_are_killed("etcd, lease 6 s", &by_etcd(&etcd, USUAL), kills(1), 8);
}

#[test]
fn leaders_with_the_usual_times_are_killed_and_followed_through_a_lease() {
    let Some(kubernetes) = kubernetes() else { return };
    leaders_are_killed("Lease, 6 s", &by_lease(&kubeconfig(&kubernetes), USUAL), kills(2), 8);
}

#[test]
fn leaders_are_killed_and_followed_through_a_lease_of_a_real_api_server() {
    if kubernetes().is_none() || std::env::var_os("LARDER_HEAVY_TESTS").is_none() {
        return larder_skips::skip("only heavy tests start a real API server");
    }
    let Some(server) = RealApiServer::start().unwrap() else {
        return larder_skips::skip("no API server here: tests/deploy/apiserver builds it");
    };
    leaders_are_killed("Lease of a real API server, 6 s", &by_lease(&server.admin().unwrap(), USUAL), 20, 8);
}

#[test]
fn leaders_are_killed_and_followed_while_the_api_server_does_all_that_it_seldom_does() {
    let Some(kubernetes) = kubernetes() else { return };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let usual = [Conflict, Failure, Lost, AnswerLost, Timeout, Stale, Skewed(-30), Skewed(30), Garbage];
    kubernetes.0.weather(seed, 15, &[&usual[..], &[Late(300), Late(2_500), TooMany(1)]].concat());
    leaders_are_killed("Lease in bad weather, 6 s", &by_lease(&kubeconfig(&kubernetes), USUAL), kills(1), 12);
    println!("{:?}", kubernetes.0.happened());
}

/// Kills the leader `kills` times under a replay, starts it again each time, and prints the times until it was replaced.
fn leaders_are_killed(what: &str, election: &str, kills: u64, seconds_a_kill: u64) {
    let mut cluster = Coordinators::start(LARDER, 3, 3, election).unwrap();
    let leader_and_table = |cluster: &Coordinators| {
        let leader = cluster.leader()?;
        Some((leader, cluster.table(leader).ok()?))
    };
    let (_, before) = wait::until("one leads", || leader_and_table(&cluster));
    // Begins after this: `replay_lasting` first plays a trial replay, which would take long without a leader.
    let http = cluster.http();
    let arguments = ["--coordinator", &http, "--block-bytes", "4096"];
    let (mut replay, _) = replay_lasting(seconds_a_kill * kills, &arguments);
    let (mut elected, mut followed, mut under_load) = (Vec::new(), Vec::new(), 0);
    for _ in 0..kills {
        let (leader, table) = wait::until("one leads", || leader_and_table(&cluster));
        cluster.kill(leader);
        let killed = now();
        wait::until("another one leads", || cluster.leader());
        elected.push(killed.elapsed());
        wait::until("all nodes follow it", || {
            let epochs = cluster.epochs_of_nodes();
            (epochs.len() == 3 && epochs.iter().all(|epoch| epoch.0 > table.epoch.term)).then_some(())
        });
        followed.push(killed.elapsed());
        let (_, after) = wait::until("one leads", || leader_and_table(&cluster));
        assert_eq!((&after.homes, &after.members), (&before.homes, &before.members));
        cluster.start_again(leader).unwrap();
        under_load += u32::from(replay.is_under_way().unwrap());
    }
    for (done, times) in [("another leads", &mut elected), ("all nodes follow", &mut followed)] {
        times.sort();
        let (middle, last) = (times[times.len() / 2], times[times.len() - 1]);
        println!("{what}: {done}: p50 {middle:.2?}, max {last:.2?} after {kills} kills");
    }
    println!("{under_load} of {kills} kills under load");
    assert!(under_load > 0, "the replay was over too early to show anything");
    well_ended(replay);
}

#[test]
fn a_leader_that_stood_still_changes_nothing_when_it_wakes_up() {
    let Some(etcd) = etcd() else { return };
    let cluster = Coordinators::start(LARDER, 3, 3, &by_etcd(&etcd, QUICK)).unwrap();
    let old = cluster.leader().unwrap();
    let before = cluster.table(old).unwrap();
    cluster.coordinator(old).signal(Signal::STOP).unwrap();
    let follows =
        |epochs: &[(u64, u64)]| epochs.len() == 3 && epochs.iter().all(|epoch| epoch.0 > before.epoch.term);
    wait::until("all nodes follow another one", || follows(&cluster.epochs_of_nodes()).then_some(()));
    cluster.coordinator(old).signal(Signal::CONT).unwrap();
    wait::through(Duration::from_secs(4), || {
        assert!(follows(&cluster.epochs_of_nodes()), "no node goes back to an earlier term");
        if let Some(status) = cluster.status(old) {
            assert_eq!(status["follows"], true, "{status}");
        }
    });
    let leader = cluster.leader().unwrap();
    let after = cluster.table(leader).unwrap();
    assert_eq!((&after.homes, &after.members), (&before.homes, &before.members));
    wait::until("the old one follows too", || {
        (cluster.table(old).ok()?.epoch == cluster.table(leader).ok()?.epoch).then_some(())
    });
}

#[test]
fn a_coordinator_says_that_the_leader_of_its_key_is_of_another_cluster() {
    let Some(etcd) = etcd() else { return };
    let one = Coordinators::start(LARDER, 1, 1, &by_etcd(&etcd, QUICK)).unwrap();
    wait::until("one leads", || one.leader());
    let other = Coordinators::start(LARDER, 1, 0, &by_etcd(&etcd, QUICK)).unwrap();
    wait::until("the other cluster's coordinator names the fault", || {
        let said = other.coordinator(0).log();
        (said.contains("cannot be followed") && said.contains("certificate")).then_some(())
    });
    assert_eq!(other.leader(), None);
}

/// A pod's view: the files of its service account at their usual place, and variables with the address of the API server.
#[test]
fn a_coordinator_in_a_pod_needs_no_configuration_but_the_backend() {
    if kubernetes().is_none() {
        return;
    }
    let files = Authority::create().unwrap().issue("server").unwrap();
    let api = ApiServer::start_on(TcpListener::bind("127.0.0.1:0").unwrap(), Some(&files)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [("token", ALL_RIGHTS.token), ("namespace", NAMESPACE), ("ca.crt", &files.ca_pem)]
    {
        fs::write(dir.path().join(name), content).unwrap();
    }
    let (program, account) = (dir.path().join("larder"), "/var/run/secrets/kubernetes.io/serviceaccount");
    let script = format!(
        "#!/bin/sh\nunset KUBECONFIG\nexport HOME=/nowhere KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT={}\n\
         exec unshare --mount sh -c 'mount -t tmpfs none /var/run/. && mkdir -p {account} && cp {}/* {account} && exec {LARDER} \"$@\"' sh \"$@\"\n",
        api.address().port(),
        dir.path().display()
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let probe =
        Command::new("unshare").args(["--mount", "mount", "-t", "tmpfs", "none", "/var/run/."]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        return larder_skips::skip("no mount namespaces here");
    }
    let program = program.to_str().unwrap();
    let election = format!("backend = \"kubernetes\"\n{QUICK}");
    let cluster = Coordinators::start(program, 2, 1, &election).unwrap();
    wait::until("one leads", || cluster.leader());
    let holder = api.lease("larder-coordinator").unwrap()["spec"]["holderIdentity"].clone();
    let leader = cluster.leader().unwrap();
    assert_eq!(holder, cluster.coordinator(leader).ready("peer"));
}

/// The leader and its node are taken off the network; the others go on. Nobody obeys a lower term, then or later.
#[test]
fn a_leader_that_is_left_alone_stops_and_nobody_obeys_it_then_or_later() {
    if kubernetes().is_none() {
        return;
    }
    let hosts = match Hosts::of(4, LARDER) {
        Ok(hosts) => hosts,
        Err(error) => return larder_skips::skip(&format!("no network namespaces: {error:#}")),
    };
    // Host 3 has only the register.
    let listener = hosts.on(3, || TcpListener::bind((Hosts::address(3), 0)).unwrap()).unwrap();
    let api = ApiServer::start_on(listener, None).unwrap();
    let kubeconfig = api.kubeconfig(hosts.dir(), &ALL_RIGHTS, NAMESPACE).unwrap();
    let times = "lease_ms = 6000\nrenew_within_ms = 4000\nretry_ms = 300";
    let election = |host| {
        format!("[election]\n{}\nadvertise = \"{}\"", by_lease(&kubeconfig, times), Hosts::address(host))
    };
    // So impatient that a leader that hears nobody removes the nodes before its right to lead is over.
    let patience = "[membership]\nheartbeat_ms = 100\nsuspect_after_ms = 300\nremove_after_ms = 900\nremove_reported_after_ms = 900\ngrace_ms = 100";
    let start = |host| hosts.start_coordinator(host, &format!("{patience}\n{}", election(host))).unwrap();
    let mut coordinators = [start(0), start(1), start(2)];
    let all = [0, 1, 2].map(|host| format!("{}:7601", Hosts::address(host))).join(",");
    let nodes = [0, 1, 2].map(|host| hosts.start_node(host, &format!("node-{host}"), &all, "").unwrap());
    let status = |host: usize, port: u16| -> Option<Value> {
        let asked = hosts.on(host, || get(&format!("127.0.0.1:{port}"), "/status")).unwrap();
        serde_json::from_str(&asked.ok()?).ok()
    };
    let epoch = |host: usize| -> Option<(u64, u64)> {
        let status = status(host, 9440)?;
        let (term, number) = status["cluster"]["epoch"].as_str()?.split_once('.')?;
        Some((term.parse().ok()?, number.parse().ok()?))
    };
    let members = |host: usize| status(host, 9440).map(|status| status["cluster"]["members"].clone());
    let leads = |host: &usize| status(*host, 7600).is_some_and(|status| status["follows"] == false);
    wait::until("all are members", || (0..3).all(|host| members(host) == Some(3.into())).then_some(()));
    let old = wait::until("one leads", || (0..3).find(leads));
    let others: Vec<usize> = (0..3).filter(|&host| host != old).collect();
    let before = epoch(old).unwrap();
    let mut last = [(0, 0); 3];
    let mut look = || {
        for (host, last) in last.iter_mut().enumerate() {
            let Some(now) = epoch(host) else { continue };
            assert!(now >= *last, "node {host} went back from {last:?} to {now:?}");
            *last = now;
        }
        last
    };

    hosts.cut_off(old).unwrap();

    let alone = wait::until("the old leader makes a table for its node alone", || {
        look();
        (members(old) == Some(1.into())).then(|| epoch(old).unwrap())
    });
    assert!(alone > before && alone.0 == before.0, "in its own term: {alone:?} after {before:?}");
    wait::until("the others follow another one", || {
        let last = look();
        (others.iter().all(|&host| last[host].0 > before.0) && !leads(&old)).then_some(())
    });
    assert_eq!(look()[old].0, before.0, "nobody told the node that was cut off");

    hosts.plug_in(old).unwrap();

    wait::until("all know one table, with all in it", || {
        let last = look();
        let is_one = last[0] == last[1] && last[1] == last[2] && last[0].0 > before.0;
        (is_one && (0..3).all(|host| members(host) == Some(3.into()))).then_some(())
    });
    wait::through(Duration::from_secs(3), || _ = look());
    assert_eq!((0..3).filter(leads).count(), 1);
    let said = coordinators[old].log();
    assert!(said.contains("this coordinator no longer leads"), "{said}");
    for server in coordinators.iter_mut().chain(&mut { nodes }) {
        assert_eq!(server.ended().unwrap(), None, "{}", server.log());
    }
}
