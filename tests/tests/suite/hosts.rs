//! A cluster over two hosts, with the default addresses, as its operators see it.

use larder_skips::skip;
use larder_tests::hosts::Hosts;
use larder_tests::wait;
use serde_json::Value;

use super::LARDER;

/// Both hosts; `None` if the machine cannot make them.
fn hosts() -> Option<Hosts> {
    match Hosts::new(LARDER) {
        Ok(hosts) => Some(hosts),
        Err(error) => {
            skip(&format!("no network namespaces: {error:#}"));
            None
        }
    }
}

/// The JSON of a command, and its exit status.
fn json(hosts: &Hosts, host: usize, args: &[&str]) -> (Value, Option<i32>) {
    let output = hosts.run(host, &[args, &["--json"]].concat()).unwrap();
    let said = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{args:?}: {}", String::from_utf8_lossy(&output.stderr)));
    (said, output.status.code())
}

fn names(status: &Value) -> Vec<&str> {
    status["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap()).collect()
}

const QUICK: &str =
    "[membership]\nheartbeat_ms = 100\nsuspect_after_ms = 300\nremove_after_ms = 1500\ngrace_ms = 100\n";

#[test]
fn two_hosts_with_default_addresses_are_two_nodes_to_every_command() {
    let Some(hosts) = hosts() else { return };
    let _coordinator = hosts.start(0, "coordinator", QUICK).unwrap();
    let _nodes = [hosts.start(0, "node-0", "").unwrap(), hosts.start(1, "node-1", "").unwrap()];
    let coordinator = Hosts::address(0);
    for host in [0, 1] {
        let ask = ["--coordinator", &coordinator];
        wait::until("both are members", || {
            let (status, code) = json(&hosts, host, &[&["status"], &ask[..]].concat());
            (code == Some(0) && names(&status) == ["node-0", "node-1"]).then_some(())
        });
        let (top, _) = json(&hosts, host, &[&["top", "--interval", "10ms"], &ask[..]].concat());
        assert_eq!(top["total"]["arena_bytes"], 32 << 20, "each node counts once: {top}");
        let (health, code) = json(&hosts, host, &[&["health"], &ask[..]].concat());
        assert_eq!((&health["health"], code), (&"healthy".into(), Some(0)));
        let (tenants, _) = json(&hosts, host, &[&["list", "tenants"], &ask[..]].concat());
        assert_eq!(tenants.as_array().unwrap().len(), 2, "{tenants}");
    }
    std::fs::write(hosts.dir().join("context.toml"), format!("coordinator = \"{coordinator}\"")).unwrap();
    let (status, code) = json(&hosts, 1, &["status"]);
    assert_eq!((names(&status).len(), code), (2, Some(0)), "by the context file: {status}");
    let both = ["status", "--node", &coordinator, "--node", &format!("{coordinator}:9440")];
    assert_eq!(names(&json(&hosts, 1, &both).0), ["node-0"], "named twice, counted once");
    let wrong = hosts.run(1, &["status", "--coordinator", &format!("{coordinator}:9440")]).unwrap();
    let said = String::from_utf8(wrong.stderr).unwrap();
    assert!(said.contains("is a node, not a coordinator"), "{said}");
}

#[test]
fn a_node_that_registers_loopback_is_not_mistaken_for_the_asking_hosts_own() {
    let Some(hosts) = hosts() else { return };
    let _coordinator = hosts.start(0, "coordinator", QUICK).unwrap();
    let _near = hosts.start(0, "node-0", "").unwrap();
    let _far = hosts.start(1, "node-1", "[http]\nlisten = \"127.0.0.1:9440\"").unwrap();
    let address = Hosts::address(0);
    let (status, code) = wait::until("both are members", || {
        let asked = json(&hosts, 0, &["status", "--coordinator", &address]);
        (names(&asked.0).len() == 2).then_some(asked)
    });
    let text = status["nodes"][1]["error"].as_str().unwrap();
    assert!(text.starts_with("127.0.0.1:9440 is node-0, not node-1"), "{text}");
    assert_eq!((&status["health"], code), (&"degraded".into(), Some(1)));
    let (top, _) = json(&hosts, 0, &["top", "--interval", "10ms", "--coordinator", &address]);
    assert_eq!(top["total"]["arena_bytes"], 16 << 20, "what did not answer is not counted: {top}");
    assert_eq!(top["nodes"][1]["state"], "silent");
}

#[test]
fn a_killed_node_is_remembered_as_lost_until_it_comes_back() {
    let Some(hosts) = hosts() else { return };
    let _coordinator = hosts.start(0, "coordinator", QUICK).unwrap();
    let _near = hosts.start(0, "node-0", "").unwrap();
    let mut far = hosts.start(1, "node-1", "").unwrap();
    let ask = || json(&hosts, 0, &["status", "--coordinator", &Hosts::address(0)]);
    let healthy = || (ask().1 == Some(0) && names(&ask().0).len() == 2).then_some(());
    wait::until("both are members", healthy);
    far.kill().unwrap();
    let status = wait::until("it is lost", || {
        let (status, code) = ask();
        assert_eq!(code, Some(1), "from its death on: {status}");
        (status["coordinator"]["lost"][0]["name"] == "node-1").then_some(status)
    });
    let troubles = status["troubles"].to_string();
    assert!(troubles.contains("node-1 is lost") && troubles.contains("198.18.0.2:9440"), "{troubles}");
    let health = hosts.run(0, &["health", "--coordinator", &Hosts::address(0)]).unwrap();
    assert_eq!((&health.stdout[..], health.status.code()), (&b"degraded\n"[..], Some(1)));
    drop(far);
    let _far = hosts.start(1, "node-1", "").unwrap();
    wait::until("all is well", healthy);
}
