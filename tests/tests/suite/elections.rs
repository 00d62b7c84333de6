//! Several coordinators: one contract for every register of an election, and whole clusters whose leader dies or stands still.

use std::time::{Duration, Instant};

use larder_coordinator::election::{Candidate, Record};
use larder_coordinator::register::{Memory, Register};
use larder_tests::coordinators::Coordinators;
use larder_tests::etcd::Etcd;
use larder_tests::wait;
use rustix::process::Signal;

use super::LARDER;
use super::cluster::well_ended;
use super::faults::replay_lasting;

/// Holds what an election needs of a register: two handles of one register that has no record yet.
async fn holds_the_contract<R: Register>(one: R, other: R) {
    let record = |life: u64, renewals| {
        let holder = Candidate { life, peer: format!("c-{life}:1"), http: format!("[::{life}]:2") };
        Record { holder, term: u64::MAX >> 2, renewals, lease_ms: 6_000 }
    };
    assert_eq!(one.read().await.unwrap(), None);
    let first = one.write(&record(1, 0), None).await.unwrap().expect("nobody has written");
    assert_eq!(other.read().await.unwrap(), Some((first.clone(), record(1, 0))));
    assert_eq!(other.write(&record(2, 0), None).await.unwrap(), None, "there is a record");
    let second = one.write(&record(1, 1), Some(&first)).await.unwrap().expect("nobody else has written");
    assert_ne!(first, second, "every write is a change that others see");
    assert_eq!(other.write(&record(2, 0), Some(&first)).await.unwrap(), None, "that is an old version");
    assert_eq!(other.read().await.unwrap(), Some((second.clone(), record(1, 1))));
    // The same record again is another version.
    let third = other.write(&record(1, 1), Some(&second)).await.unwrap().expect("nobody else has written");
    assert_ne!(second, third);
    let mut version = third;
    for round in 2..12 {
        let (mine, theirs) = (record(1, round), record(2, round));
        let (mine, theirs) =
            futures_util::join!(one.write(&mine, Some(&version)), other.write(&theirs, Some(&version)));
        let written = [mine.unwrap(), theirs.unwrap()];
        assert_eq!(written.iter().flatten().count(), 1, "of two writes over one version exactly one is done");
        let winner = if written[0].is_some() { 1 } else { 2 };
        let kept = one.read().await.unwrap().expect("there is a record");
        assert_eq!(Some(&kept.0), written.iter().flatten().next());
        assert_eq!(kept.1, record(winner, round));
        version = kept.0;
    }
}

#[test]
fn a_register_in_memory_holds_the_contract() {
    let register = Memory::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(holds_the_contract(register.clone(), register));
}

/// An etcd, if this build and this machine have one.
fn etcd() -> Option<Etcd> {
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

#[cfg(feature = "etcd")]
#[test]
fn a_key_in_etcd_holds_the_contract() {
    use larder_coordinator::register::etcd::Etcd as Key;

    let Some(etcd) = etcd() else { return };
    let endpoints = [etcd.url().to_owned()];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let key = async |name: &str| Key::new(&endpoints, name.to_owned()).await.unwrap();
        let (one, same) = (key("one").await, key("one").await);
        Box::pin(holds_the_contract(one, same)).await;
        let other = key("two").await;
        assert_eq!(other.read().await.unwrap(), None, "clusters with other names do not meet");
        // It dies: that is a failure, and no record that nobody wrote.
        drop(etcd);
        let read = tokio::time::timeout(Duration::from_secs(5), other.read()).await;
        assert!(!matches!(read, Ok(Ok(_))), "{read:?}");
    });
}

fn election(etcd: &Etcd) -> String {
    let times = "lease_ms = 2000\nrenew_within_ms = 1400\nretry_ms = 300";
    format!("backend = \"etcd\"\nendpoints = [\"{}\"]\n{times}", etcd.url())
}

#[expect(clippy::disallowed_methods, reason = "tests of whole processes live in real time")]
fn now() -> Instant {
    Instant::now()
}

/// A leader is killed, another one takes over, and the first one comes back.
const SECONDS_A_KILL: u64 = 6;

#[test]
fn leaders_that_are_killed_under_load_fail_no_request_and_move_no_partition() {
    let Some(etcd) = etcd() else { return };
    let kills = if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { 20 } else { 3 };
    let mut cluster = Coordinators::start(LARDER, 3, 3, &election(&etcd)).unwrap();
    let http = cluster.http();
    let arguments = ["--coordinator", &http, "--block-bytes", "4096"];
    let (mut replay, _) = replay_lasting(SECONDS_A_KILL * kills, &arguments);
    let before = cluster.table(cluster.leader().unwrap()).unwrap();
    let (mut elected, mut followed, mut under_load) = (Vec::new(), Vec::new(), 0);
    for _ in 0..kills {
        let leader = wait::until("one leads", || cluster.leader());
        let term = cluster.table(leader).unwrap().epoch.term;
        cluster.kill(leader);
        let killed = now();
        let next = wait::until("another one leads", || cluster.leader());
        elected.push(killed.elapsed());
        wait::until("all nodes follow it", || {
            let epochs = cluster.epochs_of_nodes();
            (epochs.len() == 3 && epochs.iter().all(|epoch| epoch.0 > term)).then_some(())
        });
        followed.push(killed.elapsed());
        let after = cluster.table(next).unwrap();
        assert_eq!((&after.homes, &after.members), (&before.homes, &before.members));
        cluster.start_again(leader).unwrap();
        under_load += u32::from(replay.is_under_way().unwrap());
    }
    for (what, times) in [("another leads", &mut elected), ("all nodes follow", &mut followed)] {
        times.sort();
        println!(
            "{what}: p50 {:?}, max {:?} after {kills} kills",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
    println!("{under_load} of {kills} kills under load");
    assert!(under_load > 0, "the replay was over too early to show anything");
    well_ended(replay);
}

#[test]
fn a_leader_that_stood_still_changes_nothing_when_it_wakes_up() {
    let Some(etcd) = etcd() else { return };
    let cluster = Coordinators::start(LARDER, 3, 3, &election(&etcd)).unwrap();
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
