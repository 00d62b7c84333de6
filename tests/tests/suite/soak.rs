//! `tests/soak` in its short form: each scenario for some seconds.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::LARDER;

/// Runs `tests/soak` with these arguments, and checks that all is right. Returns its report.
fn passes(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_soak"))
        .args(["--program", LARDER, "--json"])
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}");
    serde_json::from_str(&report).unwrap()
}

#[test]
fn replays_of_two_block_sizes_share_nodes_that_are_too_small_for_both() {
    let report = passes(&["sizes", "--rounds", "2", "--requests", "500"]);
    assert_eq!((&report["rounds"], &report["deaths"]), (&2.into(), &0.into()));
    assert!(report["bytes_checked"].as_u64() > Some(25 << 20), "{report}");
}

#[test]
fn traces_follow_each_other_on_the_same_nodes_and_chunks_of_two_parents_harm_nobody() {
    let report = passes(&["again", "--rounds", "1", "--requests", "1000"]);
    assert!(report["requests"].as_u64() > Some(1_500), "{report}");
}

#[test]
fn tenants_with_namespaces_of_three_block_sizes_outlive_nodes_that_are_killed() {
    let report =
        passes(&["mixed", "--minutes", "0.25", "--kill-every", "4", "--arena-mib", "16", "--nodes", "3"]);
    assert!(report["kills"].as_u64() >= Some(1), "{report}");
    assert!(report["chunks_hit"].as_u64() > Some(0), "{report}");
}

#[test]
fn engines_notice_no_stopped_nodes_clones_bad_sectors_hanging_stores_and_strangers() {
    let report =
        passes(&["faults", "--minutes", "0.3", "--kill-every", "5", "--arena-mib", "16", "--nodes", "3"]);
    assert!(report["stops"].as_u64() >= Some(1) && report["clones"].as_u64() >= Some(1), "{report}");
    assert!(report["hostile_connections"].as_u64() > Some(20), "{report}");
}

#[test]
fn arguments_that_make_no_sense_are_refused_and_the_help_teaches() {
    let run = |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_soak")).args(arguments).output().unwrap();
    let help = run(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(text.contains("tests/soak faults --minutes 20") && text.contains("failed requests"), "{text}");
    for wrong in [&["backwards"][..], &["--minutes", "-1"], &["--nodes", "1"], &["--rounds", "0"]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
