//! Commands that look into a running cluster and change it: top, where, pin, unpin, policy.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod played;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

use played::{Played, command};

fn played() -> Played {
    Played::new(&["--arena-bytes", "16MiB"], "40")
}

/// Pins at each node.
fn pins(played: &Played) -> Vec<u64> {
    let status = played.json(&["status"]);
    let nodes = status["nodes"].as_array().unwrap();
    nodes.iter().map(|node| node["actors"][0]["pins"].as_u64().unwrap()).collect()
}

#[test]
fn a_pin_outlives_the_command_that_made_it_and_ends_by_its_number() {
    let played = played();
    let prompt = ["0", "1", "--block-bytes", "4096"];
    let pinned = played.json(&[&["pin", "--for", "5m"], &prompt[..]].concat());
    let made: Vec<&Value> = pinned.as_array().unwrap().iter().filter(|row| !row["pin"].is_null()).collect();
    assert!(!made.is_empty(), "{pinned}");
    assert_eq!(pins(&played).iter().sum::<u64>(), made.len() as u64);
    let listed = played.json(&["list", "pins"]);
    let name = |pin: &Value| (pin["node"].to_string(), pin["pin"].to_string());
    let listed: BTreeSet<_> = listed.as_array().unwrap().iter().map(name).collect();
    assert_eq!(listed, made.iter().map(|&pin| name(pin)).collect());
    for pin in made {
        assert_eq!(pin["seconds"], 300.0);
        assert!(pin["chunks"].as_u64().unwrap() > 0, "{pin}");
        let (number, socket) = (pin["pin"].to_string(), pin["socket"].as_str().unwrap());
        assert_eq!(played.run(&["unpin", &number]).status.code(), Some(2), "two nodes: which one's?");
        let unpinned = played.json(&["unpin", &number, "--socket", socket]);
        assert_eq!(unpinned["unpinned"].to_string(), number);
        let gone = played.run(&["unpin", &number, "--socket", socket]);
        assert_eq!(gone.status.code(), Some(1), "it is gone");
        let said = String::from_utf8(gone.stderr).unwrap();
        assert!(said.contains(&format!("this tenant has no pin {number} on this device")), "{said}");
    }
    assert_eq!(pins(&played), [0, 0]);

    let nothing = played.run(&["pin", "999999", "--block-bytes", "4096"]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(String::from_utf8(nothing.stdout).unwrap().contains("nothing to pin"));
}

#[test]
fn where_says_what_the_directory_knows_of_a_prompt() {
    let played = played();
    // The directory hears of commits within moments.
    let held = (0..1_000)
        .map(|_| played.json(&["where", "0", "1", "999999", "--block-bytes", "4096"]))
        .find(|held| held["cluster"]["chunks"].as_u64() > Some(0))
        .unwrap();
    assert_eq!((&held["prompt_chunks"], &held["chunk_tokens"]), (&3.into(), &512.into()));
    let nodes = held["nodes"].as_array().unwrap();
    assert!(nodes.iter().any(|node| node["chunks"].as_u64() > Some(0)), "{held}");
    let table = String::from_utf8(played.run(&["where", "0", "--block-bytes", "4096"]).stdout).unwrap();
    assert!(table.contains("all together") && table.contains("node-0"), "{table}");
    let stranger = played.json(&["where", "0", "--block-bytes", "4096", "--tenant", "red"]);
    assert_eq!(stranger["cluster"]["chunks"], 0, "another tenant's chunks have other names");
    assert_eq!(played.run(&["where", "0", "--tenant", "no/name"]).status.code(), Some(2));
}

#[test]
fn a_servers_reason_for_a_refusal_reaches_the_user() {
    let played = played();
    let many: Vec<String> = (0..8_193).map(|block: u32| block.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let address = played.ready["nodes"][0]["http"].as_str().unwrap();
    let coordinator = played.coordinator();
    for (args, reason) in [
        (&[&["where"], &many[..]].concat()[..], "a prompt has at most 8192 chunks".to_owned()),
        (&["explain", "--tenant", "nosuch"], "this node serves no such tenant".to_owned()),
        (&["metrics", "--node", coordinator], format!("ask it by --coordinator {coordinator}")),
        (&["metrics", "--coordinator", address], format!("ask it by --node {address}")),
        (
            &["purge", "--namespace-id", "0123456789abcdef"],
            "no node has a namespace `0123456789abcdef`".into(),
        ),
    ] {
        let output = played.run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(&reason), "{}: {said}", args[0]);
        assert!(!said.contains("not answer"), "{said}");
    }
    let of_coordinator = |named: &str| {
        let metrics = played.json(&["metrics", "--coordinator", named]);
        let metrics = metrics.as_array().unwrap();
        assert!(metrics.iter().any(|metric| !metric["samples"].as_array().unwrap().is_empty()), "{named}");
    };
    of_coordinator("dev");
    of_coordinator(&format!("127.0.0.1:9,{coordinator}"));
}

#[test]
fn arguments_that_a_path_does_not_take_are_refused() {
    let played = played();
    let node = played.ready["nodes"][0]["http"].as_str().unwrap();
    let coordinator = played.coordinator();
    let ask = |server: &str, path: &str| {
        let request = ureq::get(format!("http://{server}{path}")).config().http_status_as_error(false);
        let mut answer = request.build().call().unwrap();
        (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
    };
    for (server, path, takes) in [
        (node, "/what_if", "no arguments"),
        (node, "/prefixes", "no arguments"),
        (node, "/status", "no arguments"),
        (node, "/past", "`most_chunks`"),
        (node, "/lookups", "`request`, `trace`, `tenant`, `misses`, `most`"),
        (coordinator, "/status", "no arguments"),
        (coordinator, "/console/what_if", "no arguments"),
        (coordinator, "/console/history", "no arguments"),
    ] {
        let expected = format!("`nosuch` is no argument of {path}, which takes {takes}\n");
        assert_eq!(ask(server, &format!("{path}?nosuch=1")), (400, expected));
    }
    assert_eq!(ask(node, "/past?most_chunks=5").0, 200);
}

#[test]
fn the_console_refuses_to_purge_a_tenant_that_no_node_has() {
    let played = played();
    let token = played.ready["console"].as_str().unwrap().rsplit_once('=').unwrap().1;
    let purge = |tenant: &str| {
        let body = format!(r#"{{"action": "purge", "tenant": "{tenant}", "hashes": [], "dry_run": true}}"#);
        let url = format!("http://{}/console/change", played.coordinator());
        let request = ureq::post(url).header("Authorization", format!("Bearer {token}"));
        let mut answer = request.config().http_status_as_error(false).build().send(body).unwrap();
        (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
    };
    assert_eq!(purge("defaults"), (400, "no node has a tenant `defaults`\n".to_owned()));
    assert_eq!(purge("default").0, 200);
}

#[test]
fn lists_and_events_show_what_nodes_hold_as_lines_for_scripts() {
    let played = played();
    let text = |args: &[&str]| {
        let output = played.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let chunks: u64 = text(&["status", "-o", "tsv"])
        .lines()
        .skip(1)
        .map(|line| line.split('\t').nth(4).unwrap().parse::<u64>().unwrap())
        .sum();
    let held = text(&["events"]);
    assert_eq!(held.lines().filter(|line| line.contains("\theld\t")).count() as u64, chunks);
    let tenants = text(&["list", "tenants", "-o", "tsv"]);
    let tenants: Vec<Vec<&str>> = tenants.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!((tenants.len(), tenants[1][1], tenants[1].len()), (3, "default", 8), "{tenants:?}");
    let namespaces = played.json(&["list", "namespaces"]);
    assert_eq!(namespaces[0]["tenant"], "default", "{namespaces}");
    assert_eq!(played.json(&["list", "sessions"]), serde_json::json!([]), "the replay has ended");
    let plain = text(&["status"]);
    assert!(plain.is_ascii() && plain.lines().all(|line| line.len() <= 80), "{plain}");
}

#[test]
fn a_command_without_a_prompt_says_what_names_one() {
    let runtime = tempfile::tempdir().unwrap();
    for name in ["lookup", "where", "pin"] {
        let output = command(&runtime, &[name]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("name a prompt") && said.contains("--tokens FILE"), "{said}");
    }
}

#[test]
fn a_policy_is_set_on_running_nodes_by_an_admin() {
    let played = played();
    let policies = |report: &Value| -> Vec<String> {
        let nodes = report["nodes"].as_array().unwrap();
        nodes.iter().map(|node| node["policies"][0].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(policies(&played.json(&["policy"])), ["adaptive", "adaptive"]);
    assert_eq!(policies(&played.json(&["policy", "sieve"])), ["sieve", "sieve"]);
    assert_eq!(policies(&played.json(&["policy", "lru", "--member", "node-1"])), ["lru"]);
    assert_eq!(policies(&played.json(&["policy"])), ["sieve", "lru"]);

    let without = played.run(&["policy", "fifo", "--coordinator", played.coordinator()]);
    assert_eq!(without.status.code(), Some(2));
    assert!(String::from_utf8(without.stderr).unwrap().contains("larder ca issue admin"));
    let dir = std::path::Path::new(played.ready["nodes"][0]["sockets"]["default"].as_str().unwrap())
        .parent()
        .unwrap();
    let [ca, certificate, key] = ["ca.pem", "node-0.pem", "node-0.key"].map(|name| dir.join(name));
    let files = [
        "--ca",
        ca.to_str().unwrap(),
        "--certificate",
        certificate.to_str().unwrap(),
        "--key",
        key.to_str().unwrap(),
    ];
    let as_node = played.run(&[&["policy", "fifo"], &files[..]].concat());
    assert_eq!(as_node.status.code(), Some(2));
    assert!(String::from_utf8(as_node.stderr).unwrap().contains("only an admin may"));
    assert_eq!(played.run(&["policy", "fifo", "--member", "node-7"]).status.code(), Some(2));
}

#[test]
fn top_shows_one_interval_of_every_node() {
    let played = played();
    let view = played.json(&["top", "--interval", "50ms"]);
    let nodes = view["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), 2);
    assert!(view["seconds"].as_f64().unwrap() >= 0.05 && view["total"]["host_chunks"].as_u64() > Some(0));
    for node in nodes {
        assert_eq!(node["state"], "alive", "{node}");
        assert_eq!(node["hit_rate"], Value::Null, "nobody asked in this interval");
        assert_eq!(node["requests_per_second"], 0.0);
        assert_eq!(node["arena_bytes"], 16 << 20);
    }
    // Standard output is no terminal here: one interval as text.
    let address = played.ready["nodes"][0]["http"].as_str().unwrap();
    let output = played.run(&["top", "--node", address, "--interval", "50ms", "--sort", "memory"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("1 node, 1 alive") && text.contains("by memory") && !text.contains("quit"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
    let twice = played.json(&["top", "--interval", "50ms", "--node", address, "--node", address]);
    assert_eq!(
        (&twice["total"]["arena_bytes"], twice["nodes"].as_array().unwrap().len()),
        (&(16 << 20).into(), 1)
    );
    let silent = played.json(&["top", "--node", "127.0.0.1:9", "--interval", "1ms"]);
    assert_eq!(silent["nodes"][0]["state"], "silent");
}

/// A terminal of 24 rows: the user's side, and the program's side.
fn terminal() -> (File, File) {
    let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&near).unwrap();
    unlockpt(&near).unwrap();
    let far =
        open(ptsname(&near, Vec::new()).unwrap(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
    tcsetwinsize(&far, Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (near.into(), far.into())
}

/// Reads what is drawn until `part` is among it.
fn read_until(screen: &mut File, drawn: &mut String, part: &str) {
    let mut bytes = [0; 4096];
    while !drawn.contains(part) {
        let count = screen.read(&mut bytes).unwrap();
        *drawn += &String::from_utf8_lossy(&bytes[..count]);
    }
}

#[test]
fn a_lookup_prints_the_answers_of_the_nodes_that_answer() {
    let played = played();
    let socket = played.ready["nodes"][0]["sockets"]["default"].as_str().unwrap();
    std::fs::remove_file(socket).unwrap();
    let prompt = ["0", "1", "--block-bytes", "4096", "--prompt-tokens", "9999"];
    let output = played.run(&[&["lookup", "--json"], &prompt[..]].concat());
    let held: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((held.len(), &held[0]["node"], output.status.code()), (1, &"node-1".into(), Some(1)));
    assert_eq!(held[0]["tokens_possible"], 1_024, "its hashes have no more tokens");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(socket), "{said}");
}

/// A node that answers one sample of `top` and then none; each further question is told.
fn hanging_node() -> (String, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, asked) = channel();
    std::thread::spawn(move || {
        let (mut open, mut is_sampled) = (Vec::new(), false);
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let question = lines.next().unwrap().unwrap();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            if is_sampled {
                open.push(stream);
                sender.send(()).unwrap();
                continue;
            }
            is_sampled = question.contains("/metrics");
            let status = r#"{"name": "a", "ready": true, "uptime_seconds": 1.0, "actors": []}"#;
            let body = if is_sampled { "" } else { status };
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            stream.write_all((head + body).as_bytes()).unwrap();
        }
    });
    (address, asked)
}

#[test]
fn top_obeys_keys_while_a_node_hangs() {
    let (node, asked) = hanging_node();
    let (mut near, far) = terminal();
    let end = || Stdio::from(far.try_clone().unwrap());
    let mut top = command(&tempfile::tempdir().unwrap(), &["top", "--interval", "20ms", "--node", &node]);
    let mut top = top.stdin(end()).stdout(end()).stderr(Stdio::null()).spawn().unwrap();
    let mut drawn = String::new();
    read_until(&mut near, &mut drawn, "by name");
    asked.recv().unwrap();
    near.write_all(b"s").unwrap();
    read_until(&mut near, &mut drawn, "by hit");
    assert!(!drawn.contains("silent"), "the sample has ended: {drawn}");
    near.write_all(b"q").unwrap();
    assert!(top.wait().unwrap().success());
}

#[test]
fn on_a_terminal_top_redraws_obeys_keys_and_leaves_it_as_it_was() {
    let played = played();
    let (mut near, far) = terminal();
    let end = || Stdio::from(far.try_clone().unwrap());
    let mut top = played.command(&["top", "--interval", "20ms"]);
    let mut top = top.stdin(end()).stdout(end()).stderr(Stdio::null()).spawn().unwrap();
    let mut drawn = String::new();
    read_until(&mut near, &mut drawn, "by name");
    assert!(drawn.starts_with("\x1b[?1049h") && drawn.contains("\x1b[H"), "{drawn:?}");
    assert!(!tcgetattr(&far).unwrap().local_modes.contains(LocalModes::ECHO), "keys are not shown");
    near.write_all(b"s").unwrap();
    read_until(&mut near, &mut drawn, "by hit");
    near.write_all(b"r").unwrap();
    read_until(&mut near, &mut drawn, "by hit, reversed");
    drawn.clear();
    read_until(&mut near, &mut drawn, "node-1");
    near.write_all(b"q").unwrap();
    read_until(&mut near, &mut drawn, "\x1b[?1049l");
    assert!(top.wait().unwrap().success());
    assert!(tcgetattr(&far).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON));
}
