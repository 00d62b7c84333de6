//! Small clusters with a generated trace.

use larder_protocol::table::PARTITIONS;

use super::*;

fn load(nodes: usize) -> Load {
    Load {
        seed: 3,
        nodes,
        players: nodes,
        chunks: 1_000,
        block_bytes: 1 << 20,
        rate: 2.0,
        warm_up: 0,
        seconds: 20,
        trace: Trace::generated(3),
    }
}

#[test]
fn the_same_load_gives_the_same_figures_and_another_seed_others() {
    let (first, second) = (run(&load(16), None).0, run(&load(16), None).0);
    assert_eq!(first, second);
    let other = Load { seed: 4, ..load(16) };
    assert_ne!(first, run(&other, None).0);
}

#[test]
fn a_cluster_under_load_shares_what_it_has_and_its_directory_is_right_after_each_change() {
    let (figures, _) = run(&load(48), None);
    assert!(figures.requests > 48 * 2 * 20 * 9 / 10, "{figures:?}");
    assert!(figures.hit_rate_shared > 2.0 * figures.hit_rate_local, "{figures:?}");
    assert!(figures.hit_rate_routed > figures.hit_rate_local, "{figures:?}");
    assert!(figures.homes_mean > 0.5 && figures.stale_share < 0.05, "{figures:?}");
    assert!(figures.connections_open > 10.0 && figures.connections_most <= 47, "one a pair: {figures:?}");
    assert!(figures.handshake_share < 0.2, "they stay open: {figures:?}");
    for change in [&figures.join, &figures.leave, &figures.crash] {
        assert_eq!(change.unknown_of_1000, 0, "{figures:?}");
        assert!(change.moved_partitions > 0 && change.told_rows > 0, "{figures:?}");
        assert!(change.repaired_after_seconds < 10.0, "{figures:?}");
    }
    assert!(figures.leave.moved_partitions < 2 * u64::from(PARTITIONS) / 48, "{figures:?}");
}

#[test]
fn a_trace_that_is_none_is_refused_by_its_line() {
    let file = std::env::temp_dir().join(format!("larder-scale-{}.jsonl", std::process::id()));
    std::fs::write(&file, "{\"timestamp\":1,\"input_length\":600,\"hash_ids\":[1,2]}\nno\n").unwrap();
    let error = format!("{:#}", Trace::read(std::slice::from_ref(&file)).unwrap_err());
    assert!(error.contains("line 2"), "{error}");
    std::fs::remove_file(file).unwrap();
}
