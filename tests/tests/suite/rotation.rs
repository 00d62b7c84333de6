//! A cluster whose authority is replaced.
//!
//! Processes use new files within half a minute. `tests/run heavy` waits for that; otherwise the processes are started again one
//! after the other, and meet others that have not seen the change.

use std::process::Command;
use std::time::Duration;

use larder_net::quic::RENEWAL_CHECK;
use larder_tests::cluster::Cluster;
use larder_tests::content::{CHUNK_TOKENS, prompt};
use larder_tests::wait;

use super::{Engine, LARDER};

fn rotate(cluster: &Cluster, step: &str) {
    let output =
        Command::new(LARDER).args(["ca", "rotate", step, "--dir"]).arg(cluster.dir()).output().unwrap();
    assert!(output.status.success(), "{step}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Checks that another node finds the chunks that one node was given. `word` is new each time.
fn serves(cluster: &Cluster, word: u8) {
    let hashes = prompt(word, 4);
    wait::until("all are members", || (cluster.members().len() == 2).then_some(()));
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 4, "{}", cluster.node(0).log());
    let reader = Engine::connect(&cluster.socket(1));
    wait::until("the other node finds it", || {
        (reader.find(&hashes, 100) == 4 * u64::from(CHUNK_TOKENS)).then_some(())
    });
    assert_eq!(reader.get(&hashes), 4, "{}", cluster.node(1).log());
}

/// Makes every process use the present files.
fn spread(cluster: &mut Cluster, words: &mut impl Iterator<Item = u8>) {
    let mut word = || words.next().unwrap();
    if std::env::var_os("LARDER_HEAVY_TESTS").is_some() {
        serves(cluster, word());
        wait::through(RENEWAL_CHECK + Duration::from_secs(5), || {});
        return serves(cluster, word());
    }
    for node in [0, 1] {
        cluster.restart_node(node).unwrap();
        serves(cluster, word());
    }
    cluster.kill_coordinator();
    cluster.start_coordinator().unwrap();
    serves(cluster, word());
}

#[test]
fn a_cluster_serves_through_the_replacement_of_its_authority() {
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    let mut words = b'a'..=b'z';
    serves(&cluster, words.next().unwrap());
    for step in ["start", "reissue", "finish"] {
        rotate(&cluster, step);
        serves(&cluster, words.next().unwrap());
        spread(&mut cluster, &mut words);
    }
    // The process that is started now belongs to the new authority, and so do all others that it meets.
    cluster.restart_node(1).unwrap();
    serves(&cluster, words.next().unwrap());
}
