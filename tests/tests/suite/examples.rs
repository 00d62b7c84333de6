//! The examples of the client do what they say.

use std::ffi::OsStr;
use std::process::Command;

use larder_tests::cluster::Cluster;
use larder_tests::node::NodeProcess;

use super::LARDER;

#[test]
fn what_the_example_puts_it_gets() {
    let node = NodeProcess::small(LARDER).unwrap();
    let said = run(env!("CARGO_BIN_EXE_example-put-and-get"), &[node.socket("default")]);
    let mut lines = said.lines();
    assert_eq!(lines.next(), Some("0 of 1000 tokens are cached"));
    let expected: Vec<_> =
        (0..3).map(|chunk| format!("chunk {chunk} of 3 begins with {}", chunk + 1)).collect();
    assert_eq!(lines.collect::<Vec<_>>(), expected);
}

#[test]
fn the_example_of_prefill_and_decode_reads_on_one_node_what_it_writes_on_another() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let sockets = [cluster.socket(0), cluster.socket(1)];
    let said = run(env!("CARGO_BIN_EXE_example-prefill-to-decode"), &sockets);
    let expected: Vec<_> =
        (0..4).map(|layer| format!("layer {layer} of 3 chunks begins with {}", layer + 1)).collect();
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

/// The output of a program that succeeds.
fn run(program: &str, arguments: &[impl AsRef<OsStr>]) -> String {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}
