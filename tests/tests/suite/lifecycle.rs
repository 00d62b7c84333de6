//! A node from its start to its end.

use std::fs::File;
use std::process::Command;

use larder_client::SessionError;
use larder_tests::content::prompt;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use rustix::io::ioctl_fionread;
use rustix::pipe::fcntl_setpipe_size;

use super::{Engine, LARDER};

#[test]
fn what_one_engine_puts_another_gets() {
    let node = NodeProcess::small(LARDER).unwrap();
    let hashes = prompt(b'a', 8);
    let writer = Engine::connect(&node.socket("default"));
    assert_eq!(writer.put(&hashes), 8);
    assert_eq!(writer.put(&hashes), 0, "putting what is there writes nothing");
    drop(writer);
    let reader = Engine::connect(&node.socket("default"));
    assert_eq!(reader.get(&hashes), 8);
    assert_eq!(reader.find(&hashes, 8 * 16), 7 * 16, "a token is left to compute");
    assert_eq!(reader.find(&prompt(b'b', 8), 130), 0);
    // No prompt with eight full chunks is so long: it counts with 144 tokens.
    assert_eq!(reader.find(&prompt(b'c', 8), 1_000), 0);
    let metrics = node.get("/metrics").unwrap();
    let rate = |name: &str| {
        let line =
            metrics.lines().find(|line| line.starts_with(name) && line.contains(r#"window="10m""#)).unwrap();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    // Of 128 + 130 + 144 requested tokens, 112 were hit. The missed chunks were requested once: an infinite cache would have hit
    // none of them either.
    assert!((rate("larder_hit_rate") - 112.0 / 402.0).abs() < 1e-9);
    assert!((rate("larder_infinite_hit_rate") - 112.0 / 402.0).abs() < 0.001);
    let asked = metrics.lines().find(|line| line.starts_with("larder_tokens_asked_total")).unwrap();
    assert!(asked.ends_with(" 402"), "{asked}");
}

#[test]
fn a_node_says_which_memory_cpus_and_pages_it_got() {
    let node = NodeProcess::small(LARDER).unwrap();
    let status: serde_json::Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
    let device = &status["hardware"]["devices"][0];
    let bytes = |kind: &str| device[kind].as_u64().unwrap();
    let pages = bytes("huge_bytes") + bytes("transparent_huge_bytes") + bytes("ordinary_bytes");
    assert_eq!(pages, 16 << 20, "{status}");
    assert!(!device["cpus"].as_str().unwrap().is_empty(), "{status}");
    let lines = node.log().lines().filter(|line| line.contains("memory and CPUs of a device")).count();
    assert_eq!(lines, 1, "{}", node.log());
    let metrics = node.get("/metrics").unwrap();
    assert!(
        metrics.contains(r#"larder_arena_placement_bytes{device="0",place="ordinary_pages"}"#),
        "{metrics}"
    );
}

/// The smallest size of a pipe.
const PIPE_BYTES: usize = 4_096;

#[test]
fn a_node_whose_log_nobody_reads_serves_and_stops() {
    let mut node = NodeProcess::small(LARDER).unwrap();
    let mut unread = None;
    node.restart(|dir| {
        let log = dir.join("node.log");
        std::fs::remove_file(&log).unwrap();
        assert!(Command::new("mkfifo").arg(&log).status().unwrap().success());
        let pipe = File::options().read(true).write(true).open(&log).unwrap();
        fcntl_setpipe_size(&pipe, PIPE_BYTES).unwrap();
        unread = Some(pipe);
    })
    .unwrap();
    for word in b'a'..=b'z' {
        // Each session writes two lines to the log.
        let engine = Engine::connect(&node.socket("default"));
        let hashes = prompt(word, 8);
        assert_eq!((engine.put(&hashes), engine.get(&hashes)), (8, 8));
        node.get("/healthz").unwrap();
    }
    let waiting = ioctl_fionread(unread.as_ref().unwrap()).unwrap();
    assert!(waiting + 200 > PIPE_BYTES as u64, "the pipe is full, not {waiting} bytes of it");
    assert_eq!(node.stop().unwrap().code(), Some(0));
}

#[test]
fn a_node_that_stops_tells_its_engines_and_takes_its_socket_away() {
    let node = NodeProcess::small(LARDER).unwrap();
    let socket = node.socket("default");
    let engine = Engine::connect(&socket);
    engine.put(&prompt(b'a', 2));
    assert!(socket.exists());
    let status = node.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    let chain = engine.namespace.chain(prompt(b'a', 2));
    let error = engine.session.lease(&engine.namespace, &chain).wait().map(drop).unwrap_err();
    assert!(matches!(error, SessionError::Closed { .. }), "{error:?}");
    assert_eq!(error.to_string(), "the node closed the session: the node is stopping");
}

#[test]
fn a_second_node_on_the_same_socket_does_not_start() {
    let node = NodeProcess::small(LARDER).unwrap();
    let tenant =
        format!("[[tenants]]\nname = \"default\"\nsocket = \"{}\"\n", node.socket("default").display());
    let error = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{tenant}")).map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("another process serves this socket"), "{error:#}");
}

#[test]
fn a_file_where_a_socket_is_to_be_is_refused_with_status_2_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (precious, config) = (dir.path().join("precious"), dir.path().join("node.toml"));
    std::fs::write(&precious, "notes").unwrap();
    let tenant = format!("[[tenants]]\nname = \"default\"\nsocket = \"{}\"\n", precious.display());
    std::fs::write(&config, format!("{SMALL_HOST}{tenant}")).unwrap();
    let config = config.to_str().unwrap();
    for arguments in [["node", "--config", config], ["config", "check", config]] {
        let output = Command::new(LARDER).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains("precious is a file, not a socket, and stays as it is"), "{text}");
    }
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "notes");
}

#[test]
fn what_took_the_place_of_the_socket_outlives_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("default.sock");
    let tenant = format!("[[tenants]]\nname = \"default\"\nsocket = \"{}\"\n", socket.display());
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{tenant}")).unwrap();
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "notes").unwrap();
    assert_eq!(node.stop().unwrap().code(), Some(0));
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "notes");
}

#[test]
fn a_node_that_died_leaves_no_socket_in_the_way() {
    let node = NodeProcess::small(LARDER).unwrap();
    let socket = node.socket("default");
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().join("stale.sock");
    std::fs::rename(&socket, &kept).unwrap();
    drop(node);
    let tenant = format!("[[tenants]]\nname = \"default\"\nsocket = \"{}\"\n", kept.display());
    let again = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{tenant}")).unwrap();
    Engine::connect(&kept).put(&prompt(b'a', 1));
    drop(again);
}

#[test]
fn impossible_configurations_say_what_to_do_and_end_with_status_2() {
    let cases = [
        ("[host]\narena_byts = \"1GiB\"", "arena_bytes"),
        ("[host]\narena_bytes = \"900TiB\"", "or less"),
        ("[host]\narena_bytes = 0", "at least 1"),
        ("[host]\npolicy = \"lfru\"", "there are: adaptive, fifo, filo, lru"),
        ("[host]\nextent_bytes = 4096", "extent_bytes"),
        ("[host]\nhigh_watermark = 0.5\nlow_watermark = 0.6", "watermark"),
        ("[[gpus]]\npci = \"ffff:ff:1f.7\"", "no such device"),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (config, expected) in cases {
        let file = dir.path().join("node.toml");
        std::fs::write(&file, config).unwrap();
        let output = Command::new(LARDER).args(["node", "--config"]).arg(&file).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{config}: {text}");
        assert!(text.contains(expected), "{config}: {text}");
    }
}

#[test]
fn a_policy_may_be_named_in_the_configuration() {
    let config = format!("{SMALL_HOST}policy = \"fifo\"\n{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &config).unwrap();
    assert!(node.get("/status").unwrap().contains(r#""policy":"fifo""#));
}

#[test]
fn the_node_exports_where_the_kernel_says_its_memory_is() {
    let node = NodeProcess::small(LARDER).unwrap();
    let metrics = node.get("/metrics").unwrap();
    let placed: u64 = metrics
        .lines()
        .filter(|line| line.starts_with("larder_arena_placement_bytes{") && line.contains("numa_node_"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
        .sum();
    assert_eq!(
        placed,
        node.status("arena_bytes"),
        "every byte of the arena lies on some NUMA node: {metrics}"
    );
}

#[test]
fn a_trusted_engine_writes_straight_into_the_arena() {
    let node =
        NodeProcess::start(LARDER, &format!("trust_engines = true\n{SMALL_HOST}{ONE_TENANT}")).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    assert_eq!(engine.session.window_bytes(), 0);
    let hashes = prompt(b'a', 8);
    assert_eq!(engine.put(&hashes), 8);
    assert_eq!(Engine::connect(&node.socket("default")).get(&hashes), 8);
}

#[test]
fn lookups_are_recorded_where_asked_and_a_stop_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lookups.jsonl");
    let record = format!("[record]\npath = \"{}\"\n", path.display());
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}{record}")).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    engine.find(&prompt(b'a', 3), 50);
    drop(engine);
    assert_eq!(node.stop().unwrap().code(), Some(0));
    let text = std::fs::read_to_string(path).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
    assert_eq!((&line["input_length"], &line["chunk_tokens"]), (&50.into(), &16.into()));
    assert_eq!(line["hash_ids"].as_array().unwrap().len(), 3);
}
