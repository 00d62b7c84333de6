//! The program as a shell sees it: output, errors, exit status, signals.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use larder_client::{Session, SessionOptions};
use larder_net::quic::{CredentialFiles, Credentials};
use larder_protocol::identity::Identity;
use rustix::process::{Pid, Signal, kill_process};

fn larder(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder")).args(args).env_remove("LARDER_LOG").output().unwrap()
}

fn refusal(args: &[&str]) -> (Option<i32>, String) {
    let output = larder(args);
    assert!(output.stdout.is_empty(), "errors go to standard error");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Starts a program and reads the first line that it prints.
fn start(command: &mut Command) -> (Child, BufReader<ChildStdout>, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    (child, stdout, line)
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), signal).unwrap();
}

/// A directory with a coordinator's config, certificate and state.
fn coordinator_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let larder = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        assert!(
            command.args(args).arg("--dir").arg(dir.path()).output().unwrap().status.success(),
            "{args:?}"
        );
    };
    larder(&["ca", "init"]);
    larder(&["ca", "issue", "coordinator", "c"]);
    let path = dir.path().display();
    let config = format!(
        "[http]\nlisten = \"127.0.0.1:0\"\n[peer]\nlisten = \"127.0.0.1:0\"\nca = \"{path}/ca.pem\"\n\
         certificate = \"{path}/c.pem\"\nkey = \"{path}/c.key\"\n[state]\npath = \"{path}/c.redb\"\n"
    );
    std::fs::write(dir.path().join("c.toml"), config).unwrap();
    dir
}

#[test]
fn help_goes_to_standard_output_and_is_no_error() {
    for args in [&["--help"][..], &["help", "replay"], &["dev", "--help"], &["--version"]] {
        let output = larder(args);
        assert!(output.status.success() && output.stderr.is_empty() && !output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn what_makes_no_sense_ends_with_status_2_and_says_what_would() {
    let (status, text) = refusal(&["replay", "/nowhere/trace.jsonl"]);
    assert_eq!(status, Some(2));
    assert!(text.starts_with("error: cannot play /nowhere/trace.jsonl: No such file"), "{text}");

    let trace = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trace.path(), r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}"#)
        .unwrap();
    let (status, text) = refusal(&["replay", trace.path().to_str().unwrap()]);
    assert_eq!(status, Some(2));
    assert!(text.contains("line 1: 600 tokens have 2 blocks of 512 tokens, but `hash_ids` has 1"), "{text}");

    let (status, text) = refusal(&["replay", "--in-flight", "1000"]);
    assert_eq!(status, Some(2));
    assert!(text.contains("1..=256"), "{text}");

    let (status, text) = refusal(&["replay", "--coordinator", "127.0.0.1:1", "--chunks-per-node", "5"]);
    assert_eq!(status, Some(2));
    assert!(text.contains("cannot be used with"), "{text}");

    let (status, text) = refusal(&["--log", "=", "status"]);
    assert_eq!(status, Some(2));
    assert!(text.contains("no log filter"), "{text}");

    let (status, text) = refusal(&["bench", "--load", "--svg", "/nowhere/load.svg"]);
    assert_eq!(status, Some(2));
    assert!(text.contains("cannot write /nowhere/load.svg; name another file with --svg"), "{text}");
}

#[test]
fn a_command_that_needs_one_of_two_choices_names_both() {
    for (args, choices) in [
        (&["purge"][..], "<--tenant <NAME>|--namespace-id <FINGERPRINT>>"),
        (&["restart"], "<NODE|--rolling>"),
        (&["dev", "2"], "for 2 nodes, say `larder dev --nodes 2`"),
        (&["purge", "--tenant", "a", "--namespace-id", "abababababababab"], "cannot be used with"),
        (&["purge", "--tenant", "a", "--chunk", &"ab".repeat(32)], "cannot be used with"),
        (&["bench", "--svg", "a.svg", "--filter", "store"], "cannot be used with"),
        (&["purge", "--namespace-id", "abab"], "a namespace's fingerprint has 16 to 64 hexadecimal digits"),
    ] {
        let (status, text) = refusal(args);
        assert!(status == Some(2) && text.contains(choices), "{args:?}: {text}");
    }
}

#[test]
fn a_context_that_is_named_and_missing_is_an_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["purge", "--tenant", "default"])
        .env("LARDER_CONTEXT", "/nowhere/context.toml")
        .env_remove("LARDER_COORDINATOR")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("error: LARDER_CONTEXT: cannot use the context file /nowhere/"), "{text}");
}

#[test]
fn a_coordinator_config_with_an_unknown_key_ends_with_status_2_and_names_it() {
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), "[http]\nport = 5\n").unwrap();
    let (status, text) = refusal(&["coordinator", "--config", config.path().to_str().unwrap()]);
    assert_eq!(status, Some(2));
    assert!(text.contains("unknown field `port`"), "{text}");
}

#[test]
fn an_error_is_a_line_of_the_log_where_log_lines_are_json() {
    for (log, is_logged) in [("info", true), ("off", false)] {
        let args = ["--log-format", "json", "--log", log, "node", "--config", "/nowhere/node.toml"];
        let (status, error) = refusal(&args);
        assert_eq!(status, Some(2));
        let line: Result<serde_json::Value, _> = serde_json::from_str(error.trim_end());
        assert_eq!(line.is_ok(), is_logged, "{error}");
        if let Ok(line) = line {
            assert_eq!(line["level"], "ERROR");
        }
        assert!(error.contains("/nowhere/node.toml"), "{error}");
    }
}

#[test]
fn a_server_that_does_not_answer_ends_with_status_1() {
    let output = larder(&["status", "--node", "127.0.0.1:9"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("silent") && text.contains("no answer from http://127.0.0.1:9/status"), "{text}");
    let output = larder(&["status", "--node", "127.0.0.1:9", "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["health"], "down", "as `larder health` says");
    let output = larder(&["top", "--once", "--node", "127.0.0.1:9", "--interval", "1ms"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("no node answers"));
    let (status, text) = refusal(&["status", "--coordinator", "127.0.0.1:9"]);
    assert!(status == Some(1) && text.contains("no answer from http://127.0.0.1:9/status"), "{text}");
}

#[test]
fn without_a_cluster_status_says_how_to_start_one() {
    let empty = tempfile::tempdir().unwrap();
    let ask = |command: &str| {
        let mut larder = Command::new(env!("CARGO_BIN_EXE_larder"));
        larder.arg(command).env("XDG_RUNTIME_DIR", empty.path()).env("XDG_CONFIG_HOME", empty.path());
        larder.env_remove("LARDER_COORDINATOR").output().unwrap()
    };
    let output = ask("status");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("larder dev"));
    let health = ask("health");
    assert_eq!((health.status.code(), &*health.stdout), (Some(1), &b"down\n"[..]));
    assert!(String::from_utf8(health.stderr).unwrap().contains("larder dev"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_coordinator_says_when_it_is_ready_and_ends_well_on_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let dir = coordinator_dir();
        let (mut child, _stdout, line) = start(
            Command::new(env!("CARGO_BIN_EXE_larder"))
                .arg("coordinator")
                .arg("--config")
                .arg(dir.path().join("c.toml")),
        );
        assert!(line.starts_with(r#"{"ready":true,"http":"127.0.0.1:"#), "{line}");
        send(&child, signal);
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn changes_of_all_nodes_fail_at_a_coordinator_that_knows_none() {
    let dir = coordinator_dir();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let path = dir.path().display().to_string();
    assert!(larder(&["ca", "issue", "admin", "me", "--dir", &path]).status.success());
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    let (mut child, _stdout, line) = start(command.args(["coordinator", "--config", &file("c.toml")]));
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    let (ca, certificate, key) = (file("ca.pem"), file("me.pem"), file("me.key"));
    let whose = ["--coordinator", ready["http"].as_str().unwrap()];
    let whose = [&whose[..], &["--ca", &ca, "--certificate", &certificate, "--key", &key]].concat();
    for command in [&["purge", "--tenant", "chat"][..], &["policy", "sieve"], &["reload"]] {
        let output = larder(&[command, &whose].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        let expected = "the coordinator knows no nodes: see `larder status`";
        assert!(said.contains(expected), "{command:?}: {said}");
    }
    send(&child, Signal::TERM);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_coordinator_dies_with_the_process_that_started_it() {
    let dir = coordinator_dir();
    let (mut parent, mut stdout, line) = start(
        Command::new("sh")
            .arg("-c")
            .arg(r#""$0" coordinator --config "$1" --parent $$ & wait"#)
            .arg(env!("CARGO_BIN_EXE_larder"))
            .arg(dir.path().join("c.toml")),
    );
    assert!(line.contains("ready") && line.contains("peer"), "{line}");
    send(&parent, Signal::KILL);
    parent.wait().unwrap();
    // The coordinator alone holds the pipe now: it ends when the coordinator does.
    assert_eq!(stdout.read_to_end(&mut Vec::new()).unwrap(), 0);
}

#[test]
fn an_authority_issues_what_processes_connect_with_and_only_its_owner_reads_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, out) = (dir.path().join("ca"), dir.path().join("out"));
    let (ca, out) = (ca.to_str().unwrap(), out.to_str().unwrap());
    assert!(larder(&["ca", "init", "--dir", ca]).status.success());
    let issue = ["ca", "issue", "engine", "vllm-0", "--tenant", "red", "--days", "1", "--dir", ca];
    let output = larder(&[&issue[..], &["--out", out]].concat());
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("larder://engine/red/vllm-0 for 1 day"));

    let files = CredentialFiles {
        ca: format!("{ca}/ca.pem").into(),
        certificate: format!("{out}/vllm-0.pem").into(),
        key: format!("{out}/vllm-0.key").into(),
    };
    let credentials = Credentials::load(&files).unwrap();
    assert_eq!(*credentials.identity(), Identity::engine("red", "vllm-0"));
    for key in [format!("{ca}/ca.key"), format!("{out}/vllm-0.key")] {
        let mode = std::fs::metadata(&key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
}

#[test]
fn a_path_that_is_no_text_is_printed_as_json_nearly_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join(OsStr::from_bytes(b"\xff"));
    let json = |args: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_larder")).args(args).arg(&odd).arg("--json").output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    };
    let is_named = |path: &serde_json::Value| path.as_str().unwrap().contains('\u{fffd}');
    assert!(is_named(&json(&["ca", "init", "--dir"])["key"]));
    assert!(is_named(&json(&["ca", "issue", "node", "a", "--dir"])["certificate"]));
    std::fs::remove_dir_all(&odd).unwrap();
    std::fs::write(&odd, "[membership]\n").unwrap();
    assert!(is_named(&json(&["config", "check"])["file"]));
}

#[test]
fn an_authority_replaces_no_file_and_leaves_no_half_of_a_pair() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().to_str().unwrap();
    let issue = ["ca", "issue", "node", "a", "--dir", ca];
    assert!(larder(&["ca", "init", "--dir", ca]).status.success());
    assert!(larder(&issue).status.success());
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let before = ["ca.pem", "ca.key", "a.pem", "a.key"].map(read);
    for again in [&["ca", "init", "--dir", ca][..], &issue] {
        let (status, text) = refusal(again);
        assert!(status == Some(2) && text.contains("is not replaced"), "{text}");
    }
    assert_eq!(["ca.pem", "ca.key", "a.pem", "a.key"].map(read), before);

    std::fs::write(dir.path().join("b.pem"), "mine").unwrap();
    let (status, text) = refusal(&["ca", "issue", "node", "b", "--dir", ca]);
    assert!(status == Some(2) && text.contains("b.pem exists already"), "{text}");
    assert!(!dir.path().join("b.key").exists());
}

#[test]
fn certificates_that_make_no_sense_are_refused_with_what_would() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().to_str().unwrap();
    let issue = |rest: &[&str]| refusal(&[&["ca", "issue", "--dir", ca], rest].concat());
    let (status, text) = issue(&["node", "a"]);
    assert!(status == Some(2) && text.contains("`larder ca init` makes it"), "{text}");
    std::fs::write(dir.path().join("ca.pem"), "garbage").unwrap();
    std::fs::write(dir.path().join("ca.key"), "garbage").unwrap();
    for (rest, expected) in [
        (&["node", "a"][..], "no authority's certificate and key"),
        (&["king", "a"], "possible values: node, coordinator, admin, engine"),
        (&["engine", "a"], "--tenant <TENANT>"),
        (&["node", "a", "--tenant", "red"], "only engines have"),
        (&["node", "../a"], "A-Z a-z 0-9 . _ -"),
        (&["node", "."], "begin it with a letter or a digit"),
        (&["node", &"n".repeat(201)], "files are named after it: 200 at most"),
        (&["node", "ca"], "the authority's"),
        (&["node", "a", "--days", "0"], "1..=36500"),
    ] {
        let (status, text) = issue(rest);
        assert!(status == Some(2) && text.contains(expected), "{rest:?}: {text}");
    }
}

#[test]
fn the_bench_of_load_prints_each_rate_and_draws_them() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("load.svg");
    let output = larder(&["bench", "--load", "--quick", "--json", "--svg", svg.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let measured: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let steps = measured["steps"].as_array().unwrap();
    // A busy machine misses its limit twice before the third rate.
    assert!((2..=3).contains(&steps.len()), "{measured}");
    for step in steps {
        assert!(step["answered_a_second"].as_f64().unwrap() > 0.0, "{step}");
        assert_eq!(step["kinds"].as_object().unwrap().len(), 4, "{step}");
    }
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg "));
}

#[test]
fn benches_print_an_array_of_measurements() {
    // All of them: they share a node, and must not be in each other's way.
    let output = larder(&["bench", "--quick", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let measurements: Vec<larder_cli::bench::Measurement> = serde_json::from_slice(&output.stdout).unwrap();
    // A difference of two may be none on a busy machine.
    let is_measured = |m: &larder_cli::bench::Measurement| m.yardstick_value > 0.0 && m.ratio >= 0.0;
    assert!(!measurements.is_empty() && measurements.iter().all(is_measured));
}

#[test]
fn doctor_runs_on_this_machine_and_says_what_to_do_about_each_finding() {
    let output = larder(&["doctor", "--json", "--peer", "127.0.0.1:9", "--coordinator", "127.0.0.1:9"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.len() >= 15, "{report}");
    for finding in findings {
        assert_eq!(finding["level"] == "ok", finding["advice"].is_null(), "{finding}");
    }
    let silent = &findings[0]["found"];
    assert!(
        findings[0]["check"] == "coordinator" && silent.as_str().unwrap().contains("no answer"),
        "{silent}"
    );
    let problems = findings.iter().filter(|finding| finding["level"] == "problem").count();
    assert_eq!(report["problems"], problems);
    assert_eq!(output.status.code(), Some(i32::from(problems > 0)));

    let output = larder(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("io_uring") && !text.contains('\x1b'), "no colours in a file: {text}");
}

#[test]
fn doctor_finds_what_is_wrong_with_the_files_of_a_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display();
    let config = format!(
        "name = \"a\"\n[[tenants]]\nname = \"t\"\nsocket = \"{path}/t.sock\"\n[cluster]\n\
         coordinator = \"127.0.0.1:1\"\nca = \"{path}/ca.pem\"\ncertificate = \"{path}/a.pem\"\nkey = \"{path}/a.key\"\n"
    );
    let file = dir.path().join("node.toml");
    std::fs::write(&file, config).unwrap();
    let doctor =
        || larder(&["doctor", "--config", file.to_str().unwrap(), "--disk", dir.path().to_str().unwrap()]);
    let output = doctor();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("ca.pem: `larder ca init` and `larder ca issue` make such files"), "{text}");

    for args in [&["ca", "init"][..], &["ca", "issue", "node", "a"]] {
        assert!(larder(&[args, &["--dir", dir.path().to_str().unwrap()]].concat()).status.success());
    }
    let text = String::from_utf8(doctor().stdout).unwrap();
    assert!(text.contains("larder://node/a for 364 days"), "{text}");
    assert!(text.contains("t.sock of tenant t can be made") && text.contains("disk "), "{text}");

    std::fs::write(&file, "nonsense = 1").unwrap();
    assert_eq!(doctor().status.code(), Some(2));

    std::fs::write(&file, "[state]\npath = \"/nowhere/c.redb\"").unwrap();
    let output = doctor();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("node.toml is a coordinator's configuration, and a node's is needed"), "{text}");
}

#[test]
fn servers_whose_certificate_cannot_be_used_end_with_status_2() {
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().display(), dir.path().join("x.toml"));
    let file = file.to_str().unwrap();
    let files = format!("ca = \"{path}/ca.pem\"\ncertificate = \"{path}/a.pem\"\nkey = \"{path}/a.key\"\n");
    let node = format!(
        "name = \"a\"\n[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"4MiB\"\n[[tenants]]\nname = \"t\"\n\
         socket = \"{path}/t.sock\"\n[cluster]\nlisten = \"127.0.0.1:0\"\ncoordinator = \"127.0.0.1:1\"\n{files}"
    );
    let coordinator = format!(
        "[http]\nlisten = \"127.0.0.1:0\"\n[peer]\nlisten = \"127.0.0.1:0\"\n{files}[state]\npath = \"{path}/state\"\n"
    );
    let refuse = |expected: &str, statuses: [i32; 2]| {
        for (role, config, ends) in [("node", &node, statuses[0]), ("coordinator", &coordinator, statuses[1])]
        {
            std::fs::write(file, config).unwrap();
            let (status, text) = refusal(&[role, "--config", file]);
            assert!(status == Some(ends) && text.contains(expected), "{role}: {status:?} {text}");
        }
    };
    let both_refuse = |expected: &str| refuse(expected, [2, 2]);
    // The coordinator's supervisor starts it again: a file may come.
    refuse("cannot read", [2, 1]);
    for name in ["ca.pem", "a.pem", "a.key"] {
        std::fs::write(dir.path().join(name), "nonsense").unwrap();
    }
    both_refuse("PEM is expected");
    for name in ["ca.pem", "a.pem", "a.key"] {
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    for args in [&["ca", "init"][..], &["ca", "issue", "admin", "a"]] {
        assert!(larder(&[args, &["--dir", dir.path().to_str().unwrap()]].concat()).status.success());
    }
    both_refuse("the certificate belongs to larder://admin/a");
}

#[test]
fn config_check_shows_what_a_file_comes_to_and_refuses_what_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.toml");
    let check = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        larder(&[&["config", "check", file.to_str().unwrap()], more].concat())
    };
    let node = "name = \"a\"\n[host]\narena_bytes = \"16MiB\"\npolicy = \"sieve\"\n";
    let report: serde_json::Value = serde_json::from_slice(&check(node, &["--json"]).stdout).unwrap();
    assert_eq!((&report["role"], &report["values"]["name"]), (&"node".into(), &"a".into()));
    assert_eq!(report["values"]["device 0 arena bytes"], 16 << 20);
    let text = String::from_utf8(check(node, &[]).stdout).unwrap();
    assert!(text.contains("16.0 MiB") && text.contains("sieve"), "{text}");
    assert!(text.is_ascii(), "no borders in a pipe: {text}");

    let coordinator = "[membership]\nsuspect_after_ms = 4000\n";
    let report: serde_json::Value = serde_json::from_slice(&check(coordinator, &["--json"]).stdout).unwrap();
    assert_eq!(
        (&report["role"], &report["values"]["suspect after ms"]),
        (&"coordinator".into(), &4000.into())
    );

    for (text, part) in [
        ("[host]\narena_byte = 5\n", "line 2: unknown field `arena_byte`"),
        ("[host]\narena_bytes = \"900TiB\"\n", "or less"),
        ("[membership]\nheartbeat_ms = 0\n", "heartbeat_ms"),
        ("not toml", "line 1"),
        (
            "[audit]\npath = \"/log\"\n[record]\npath = \"/log\"\n",
            "[record] path is \"/log\", the path of another log",
        ),
        ("[membership]\n[audit]\npath = \"/\"\n", "[audit] path is \"/\", a folder"),
    ] {
        let output = check(text, &["--json"]);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(part), "{text}: {error}");
    }
    assert_eq!(check("[membership]\n", &["--role", "node"]).status.code(), Some(2));
    assert_eq!(larder(&["config", "check", "/nowhere/x.toml"]).status.code(), Some(2));
}

#[test]
fn config_check_warns_of_certificates_that_cannot_be_used_here() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, file) = (dir.path().join("ca"), dir.path().join("node.toml"));
    let path = |name: &str| ca.join(name).to_str().unwrap().to_owned();
    let files = format!(
        "ca = \"{}\"\ncertificate = \"{}\"\nkey = \"{}\"\n",
        path("ca.pem"),
        path("a.pem"),
        path("a.key")
    );
    let text = format!(
        "name = \"a\"\n[host]\narena_bytes = \"16MiB\"\n[cluster]\ncoordinator = \"127.0.0.1:7601\"\n{files}"
    );
    std::fs::write(&file, text).unwrap();
    let warnings = || {
        let checked = larder(&["config", "check", file.to_str().unwrap(), "--json"]);
        assert_eq!(checked.status.code(), Some(0), "{}", String::from_utf8_lossy(&checked.stderr));
        let report: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
        report["warnings"].to_string()
    };
    let said = warnings();
    assert!(said.contains("on this machine the server would not start") && said.contains("ca.pem"), "{said}");
    let ca = ca.to_str().unwrap();
    assert!(larder(&["ca", "init", "--dir", ca]).status.success());
    assert!(larder(&["ca", "issue", "node", "a", "--dir", ca]).status.success());
    let said = warnings();
    assert!(!said.contains("would not start"), "{said}");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("name = \"a\"", "name = \"b\"")).unwrap();
    let said = warnings();
    assert!(
        said.contains("would not start: the certificate belongs to larder://node/a, not to the node `b`"),
        "{said}"
    );
    std::fs::write(&file, format!("[peer]\n{files}")).unwrap();
    let said = warnings();
    assert!(
        said.contains("would not start: the certificate belongs to larder://node/a, not to a coordinator"),
        "{said}"
    );
}

#[test]
fn config_check_warns_of_files_that_are_missing_here() {
    let dir = tempfile::tempdir().unwrap();
    let (file, no_folder) = (dir.path().join("x.toml"), dir.path().join("tier"));
    std::fs::write(&no_folder, "").unwrap();
    let disk = format!("[disk]\nfolder = {no_folder:?}\ncapacity_bytes = \"1GiB\"\n");
    let node = format!("[host]\narena_bytes = \"16MiB\"\n{disk}");
    let coordinator = "[peer]\nca = \"/nowhere/ca.pem\"\n[http]\nconsole_token_file = \"/nowhere/token\"\n";
    let admin = "console_admin_token_file = \"/nowhere/token\"\nconsole_admin_key = \"/nowhere/admin.key\"\nconsole_admin_certificate = \"/nowhere/admin.pem\"\n";
    for (text, parts) in [
        (node, &["tier is no folder, and the node would serve without its disk tier"][..]),
        (
            coordinator.to_owned() + admin,
            &["/nowhere/ca.pem", "token in /nowhere/token", "certificate of the console's admin"],
        ),
    ] {
        std::fs::write(&file, &text).unwrap();
        let checked = larder(&["config", "check", file.to_str().unwrap()]);
        assert_eq!(checked.status.code(), Some(0), "{}", String::from_utf8_lossy(&checked.stderr));
        let said = String::from_utf8(checked.stdout).unwrap();
        for part in parts {
            assert!(said.contains(part), "{part} in {said}");
        }
    }
}

#[test]
fn config_check_refuses_what_the_program_was_built_without() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("coordinator.toml");
    let etcd = "backend = \"etcd\"\nendpoints = [\"http://127.0.0.1:1\"]\n".to_owned();
    for (is_built, text, feature) in [
        (cfg!(feature = "etcd"), format!("[election]\n{etcd}"), "etcd"),
        (cfg!(feature = "kubernetes"), "[election]\nbackend = \"kubernetes\"\n".to_owned(), "kubernetes"),
        (
            cfg!(feature = "tokenizers"),
            "[state]\n[http]\nconsole_tokenizers = \"/nowhere\"\n".to_owned(),
            "tokenizers",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let checked = larder(&["config", "check", file.to_str().unwrap()]);
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(if is_built { 0 } else { 2 }), "{said}");
        assert!(is_built || said.contains(&format!("--features {feature}")), "{said}");
    }
}

#[test]
fn the_configuration_that_a_server_prints_is_one_that_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    for role in ["node", "coordinator"] {
        let printed = larder(&[role, "--print-config"]);
        let file = dir.path().join(role);
        std::fs::write(&file, printed.stdout).unwrap();
        let checked = larder(&["config", "check", file.to_str().unwrap(), "--role", role]);
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }
}

#[test]
fn manual_pages_are_written_where_they_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("man1");
    let output = larder(&["man", man.to_str().unwrap(), "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let pages: Vec<&str> =
        report["pages"].as_array().unwrap().iter().map(|page| page.as_str().unwrap()).collect();
    for page in ["larder.1", "larder-top.1", "larder-ca-rotate.1", "larder-config-check.1"] {
        assert!(pages.contains(&page) && man.join(page).exists(), "{page} is not among {pages:?}");
    }
    let (status, text) = refusal(&["man", "/proc/nowhere"]);
    assert!(status == Some(2) && text.contains("cannot write to /proc/nowhere"), "{text}");
}

#[test]
fn a_reader_of_errors_that_has_gone_changes_no_status() {
    let nobody = ["status", "--coordinator", "127.0.0.1:1"];
    for (args, status) in [(&nobody[..], 1), (&["config", "check", "/nowhere/node.toml"], 2)] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        let ended = command.args(args).env_remove("LARDER_LOG").stderr(writer).status().unwrap();
        assert_eq!(ended.code(), Some(status), "{args:?}");
    }
}

#[test]
fn a_node_whose_outputs_nobody_reads_serves_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("default.sock");
    let config = format!(
        "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"4MiB\"\nextent_bytes = \"2MiB\"\n\
         [[tenants]]\nname = \"default\"\nsocket = {socket:?}\n"
    );
    std::fs::write(dir.path().join("node.toml"), config).unwrap();
    let (_reader, mut writer) = std::io::pipe().unwrap();
    let bytes = rustix::pipe::fcntl_setpipe_size(&writer, 4_096).unwrap();
    std::io::Write::write_all(&mut writer, &vec![b' '; bytes]).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["-vvv", "node", "--config"]).arg(dir.path().join("node.toml"));
    let mut child = command.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    let opens = || Session::connect(&socket, SessionOptions::default()).wait().is_ok();
    assert!((0..400).any(|_| opens() || wait_a_moment()), "engines are served");
    send(&child, Signal::TERM);
    let ends = (0..400).any(|_| child.try_wait().unwrap().is_some() || wait_a_moment());
    assert!(ends || child.kill().is_err(), "the node ends");
    assert!(child.wait().unwrap().success());
}

/// Waits before another try; false.
fn wait_a_moment() -> bool {
    std::thread::sleep(std::time::Duration::from_millis(50));
    false
}

#[test]
fn a_help_that_cannot_be_written_fails_and_a_reader_that_has_gone_is_no_error() {
    for args in [&["help"][..], &["--help"], &["help", "node"], &["--version"], &["node", "--print-config"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        let ended = command.args(args).stdout(full).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(
            (ended.status.code(), said.starts_with("error: cannot write to standard output")),
            (Some(1), true),
            "{args:?}: {said}"
        );
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        let ended = command.args(args).stdout(writer).output().unwrap();
        assert_eq!((ended.status.code(), ended.stderr.len()), (Some(0), 0), "{args:?}");
    }
}

#[test]
fn a_server_that_gets_no_thread_names_the_limits_and_does_not_panic() {
    for server in ["node", "coordinator"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        // No address space has room for such a stack.
        let ended = command.arg(server).env("RUST_MIN_STACK", (1_u64 << 60).to_string()).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("pids.max, TasksMax=") && !said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_node_that_gets_only_some_of_its_threads_names_the_limits() {
    let program = env!("CARGO_BIN_EXE_larder");
    let nobody = 54_321;
    if !Command::new(program)
        .arg("--version")
        .uid(nobody)
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return larder_skips::skip(
            "needs root, and a program that other users may run: root has no limit of threads",
        );
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (file, socket) = (dir.path().join("node.toml"), dir.path().join("a.sock"));
    let config = format!(
        "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"4MiB\"\nextent_bytes = \"2MiB\"\n[[tenants]]\nname = \"a\"\nsocket = {socket:?}\n"
    );
    std::fs::write(&file, config).unwrap();
    let serves = |threads: u32| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nproc={threads}")).args([program, "node", "--config"]).arg(&file).uid(nobody);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let serves = !ready.is_empty();
        if serves {
            child.kill().unwrap();
        }
        let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
        let names_limits = said.contains("pids.max, TasksMax=") && !said.contains("panicked");
        assert!(serves || names_limits, "with {threads} threads: {said}");
        serves
    };
    assert!((1..200).any(serves));
}

#[test]
fn a_command_without_memory_says_so_and_does_not_abort() {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let requests: String = (0..200_000)
        .map(|n| {
            format!("{{\"timestamp\":{n},\"input_length\":512,\"output_length\":1,\"hash_ids\":[{n}]}}\n")
        })
        .collect();
    std::fs::write(trace.path(), requests).unwrap();
    let within = |address_space_kib: u32| {
        let script = format!("ulimit -c 0; ulimit -v {address_space_kib}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_larder"), "plan", trace.path().to_str().unwrap()]);
        command.args("--policies lru --capacities 1000 --nodes 1 --sharing local".split(' '));
        command.env_remove("LARDER_LOG").output().unwrap()
    };
    // The first limits are too low to load the program, the last ones are too high for this test to end.
    let is_refused = (40_000..100_000).step_by(4_000).any(|address_space_kib| {
        let output = within(address_space_kib);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!text.contains("memory allocation of"), "with {address_space_kib} KiB: {text}");
        let is_refused = text.contains("error: the system refuses") && text.contains("ulimit -v");
        assert!(
            !is_refused || output.status.code() == Some(1),
            "with {address_space_kib} KiB: {:?}",
            output.status
        );
        is_refused
    });
    assert!(is_refused, "no limit was between too little to begin and enough to end");
}

#[test]
fn a_node_whose_disk_tier_is_beyond_the_limit_of_file_sizes_serves_without_the_tier() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"4MiB\"\nextent_bytes = \"2MiB\"\n\
        [disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n\
        [[tenants]]\nname = \"default\"\nsocket = \"{dir}/default.sock\"\n";
    let config = config.replace("{dir}", dir.path().to_str().unwrap());
    std::fs::write(dir.path().join("node.toml"), config).unwrap();
    // In units of 512 bytes: 16 MiB.
    let script = "ulimit -f 32768; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_larder"), "node", "--config"]);
    let (mut child, _stdout, ready) = start(command.arg(dir.path().join("node.toml")));
    let ready: serde_json::Value = serde_json::from_str(&ready).expect("the node serves");
    let metrics = format!("http://{}/metrics", ready["http"].as_str().unwrap());
    let metrics = ureq::get(metrics).call().unwrap().into_body().read_to_string().unwrap();
    let closed = metrics.lines().find(|line| line.starts_with("larder_disk_closed"));
    assert!(closed.is_some_and(|line| line.ends_with(" 1")), "{closed:?}");
    send(&child, Signal::TERM);
    assert!(child.wait().unwrap().success());
}
