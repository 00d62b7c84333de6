//! `larder explain` over a cluster that played a trace with too little memory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod played;

use std::fs;

use serde_json::Value;

use played::Played;

/// What `larder explain` prints about a cluster with too little memory.
fn explain(played: &Played, args: &[&str]) -> Vec<Value> {
    serde_json::from_value(played.json(&[&["explain"], args].concat())).unwrap()
}

fn runs(lookup: &Value) -> &[Value] {
    lookup["runs"].as_array().unwrap()
}

#[test]
fn a_miss_is_followed_from_the_list_to_its_reason() {
    let played = Played::new(&["--block-bytes", "4096", "--chunks-per-node", "60"], "120");
    let misses = explain(&played, &["--most", "500"]);
    let evicted = misses
        .iter()
        .find(|lookup| runs(lookup).iter().any(|run| run["outcome"] == "evicted"))
        .expect("memory was too small");
    let name = evicted["request"].as_str().unwrap();
    assert!(name.starts_with("replay-"), "{evicted}");

    let by_name = explain(&played, &[name]);
    let of_lookup = by_name.iter().find(|lookup| lookup["kind"] == "lookup").unwrap();
    assert_eq!(of_lookup["tenant"], "default");
    let run = runs(of_lookup).iter().find(|run| run["outcome"] == "evicted").unwrap();
    assert_eq!(run["evicted"]["rule"], "watermark");
    assert!(run["evicted"]["worth"].as_f64() > Some(0.0), "{run}");
    assert!(run["evicted"]["unix_ms"].as_u64() <= of_lookup["unix_ms"].as_u64(), "{run}");
    assert_eq!(
        of_lookup["hashes"].as_array().map(Vec::len),
        of_lookup["chunks"].as_u64().map(|n| n as usize)
    );

    let first = explain(&played, &["replay-1"]);
    assert!(first.iter().any(|lookup| runs(lookup)[0]["outcome"] == "never_stored"), "{first:?}");
    let table = String::from_utf8(played.run(&["explain", name]).stdout).unwrap();
    assert!(table.contains("by watermark") && table.contains("chunks could be used"), "{table}");

    let unknown = played.run(&["explain", "no-such-request"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8(unknown.stderr).unwrap().contains("no node knows the request"));

    // The prompt itself says the same of what the nodes have now.
    let dir = tempfile::tempdir().unwrap();
    let (namespace, hashes) = (dir.path().join("namespace.json"), dir.path().join("hashes.json"));
    let described = r#"{"model": "larder-replay", "kv_dtype": "bytes", "layout": "flat", "pools":
        [{"name": "kv", "layers": 1, "layer_bytes": 4096}]}"#;
    fs::write(&namespace, described).unwrap();
    fs::write(&hashes, of_lookup["hashes"].to_string()).unwrap();
    let held =
        explain(&played, &["--namespace", namespace.to_str().unwrap(), "--hashes", hashes.to_str().unwrap()]);
    assert_eq!(held.len(), 2, "each node answers");
    assert!(held.iter().all(|node| node["knows_namespace"] == false), "a namespace of another chunk size");
}
