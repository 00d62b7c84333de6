//! Connections that send nothing useful: they keep no useful connection out.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use larder_client::{Session, SessionError, SessionOptions};
use larder_protocol::frame::FrameHeader;
use larder_protocol::session::{RefusalCode, Response};
use larder_tests::cluster::Cluster;
use larder_tests::content::prompt;
use larder_tests::engine::EngineProcess;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::raw::RawSession;
use larder_tests::wait;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{ENGINE, Engine, LARDER};

/// Lets this process open as many files as it may: each connection is one.
fn raise_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn thousands_of_silent_connections_keep_no_engine_out() {
    raise_open_files();
    let node = NodeProcess::small(LARDER).unwrap();
    let socket = node.socket("default");
    let before = open_files(node.pid());
    let mut silent = Vec::new();
    for _ in 0..4_200 {
        silent.push(UnixStream::connect(&socket).unwrap());
    }
    // An engine of the process that holds the silent connections, and an engine of another process.
    let engine = Engine::connect(&socket);
    assert_eq!(engine.put(&prompt(b'a', 4)), 4);
    drop(EngineProcess::start(ENGINE, &socket, "lease").unwrap());
    assert_eq!(engine.get(&prompt(b'a', 4)), 4);
    wait::until("silent connections to be closed", || (open_files(node.pid()) < before + 100).then_some(()));
    drop(silent);
}

#[test]
fn half_a_hello_and_a_long_one_take_little_and_are_told_why() {
    let node = NodeProcess::small(LARDER).unwrap();
    let header = |payload_bytes| FrameHeader { payload_bytes, descriptors: 0, request: 1 }.encode();
    let mut long = RawSession::connect(&node.socket("default")).unwrap();
    long.send_bytes(&header(1 << 20)).unwrap();
    let Some((Response::Refused(refusal), _)) = long.read().unwrap() else { panic!("it is told why") };
    assert_eq!(refusal.code, RefusalCode::Protocol);
    assert!(refusal.message.contains("before a session is open; at most 4096 are allowed"), "{refusal:?}");
    let mut half = RawSession::connect(&node.socket("default")).unwrap();
    half.send_bytes(&header(64)[..7]).unwrap();
    let Some((Response::Refused(refusal), _)) = half.read().unwrap() else { panic!("it is told why") };
    assert_eq!(refusal.message, "no hello came in time");
}

#[test]
fn write_windows_come_out_of_their_tenants_budget_and_go_back_to_it() {
    let config = format!("{SMALL_HOST}{ONE_TENANT}max_window_bytes = \"2MiB\"\n");
    let node = NodeProcess::start(LARDER, &config).unwrap();
    let held = || node.metric("larder_tenant_window_bytes{state=\"held\"");
    let connect = |window_bytes| {
        Session::connect(node.socket("default"), SessionOptions { window_bytes, ..SessionOptions::default() })
            .wait()
    };
    let (first, second) = (connect(1 << 20).unwrap(), connect(1 << 20).unwrap());
    assert_eq!(held(), f64::from(2 << 20));
    assert!(matches!(connect(1 << 20).map(drop), Err(SessionError::Busy { .. })));
    assert_eq!(connect(0).unwrap().window_bytes(), 0, "who does not write needs none");
    drop((first, second));
    wait::until("the windows to be given back", || (held() == 0.0).then_some(()));
    assert_eq!(connect(1 << 30).unwrap().window_bytes(), 2 << 20, "no window is larger than the budget");
}

#[test]
fn thousands_of_idle_http_connections_keep_no_health_check_out_and_are_closed() {
    raise_open_files();
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let (node, coordinator) = (cluster.node(0), cluster.coordinator_http().to_owned());
    let before = open_files(node.pid());
    let mut idle = Vec::new();
    for _ in 0..2_500 {
        idle.push(TcpStream::connect(node.http()).unwrap());
        idle.push(TcpStream::connect(&coordinator).unwrap());
    }
    for _ in 0..10 {
        assert_eq!(node.get("/healthz").unwrap(), "ok\n");
        assert_eq!(larder_tests::server::get(&coordinator, "/healthz").unwrap(), "ok\n");
    }
    assert!(open_files(node.pid()) < before + 1_200, "{} files", open_files(node.pid()));
    // The remaining connections are closed for their silence.
    let last = idle.last_mut().unwrap();
    last.set_read_timeout(Some(wait::DEADLINE)).unwrap();
    let mut said = Vec::new();
    last.read_to_end(&mut said).unwrap();
    wait::until("idle connections to be closed", || (open_files(node.pid()) < before + 50).then_some(()));
}

#[test]
fn bodies_that_do_not_end_keep_no_question_waiting() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let coordinator = cluster.coordinator_http();
    let head = "POST /v1/prefix HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    let unending: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut socket = TcpStream::connect(coordinator).unwrap();
            socket.write_all(format!("{head}16777216\r\n\r\n{{").as_bytes()).unwrap();
            socket
        })
        .collect();
    let fingerprint = "ab".repeat(32);
    let body = format!("{{\"fingerprint\": \"{fingerprint}\", \"chunk_tokens\": 1, \"tokens\": [1, 2]}}");
    let url = format!("http://{coordinator}/v1/prefix");
    let answer = ureq::post(&url).send(&body).unwrap().body_mut().read_to_string().unwrap();
    assert!(answer.contains("\"cluster\""), "{answer}");
    assert_eq!(larder_tests::server::get(coordinator, "/healthz").unwrap(), "ok\n");
    drop(unending);
    let mut long = TcpStream::connect(coordinator).unwrap();
    long.write_all(format!("{head}16777217\r\n\r\n").as_bytes()).unwrap();
    long.set_read_timeout(Some(wait::DEADLINE)).unwrap();
    let mut said = [0; 12];
    long.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"HTTP/1.1 413");
}

#[test]
fn bodies_that_never_come_keep_no_health_check_out() {
    raise_open_files();
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let coordinator = cluster.coordinator_http();
    let head = "POST /v1/prefix HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n";
    let silent: Vec<TcpStream> = (0..1_100)
        .map(|_| {
            let mut socket = TcpStream::connect(coordinator).unwrap();
            socket.write_all(head.as_bytes()).unwrap();
            socket
        })
        .collect();
    for _ in 0..10 {
        assert_eq!(larder_tests::server::get(coordinator, "/healthz").unwrap(), "ok\n");
    }
    drop(silent);
}

#[test]
fn a_client_that_sends_no_body_gets_the_status_408() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let mut silent = TcpStream::connect(cluster.node(0).http()).unwrap();
    silent.write_all(b"POST /explain HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").unwrap();
    silent.set_read_timeout(Some(wait::DEADLINE)).unwrap();
    let mut said = [0; 12];
    silent.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"HTTP/1.1 408");
}

#[test]
fn requests_that_are_sent_ahead_take_little_memory() {
    raise_open_files();
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let (node, coordinator) = (cluster.node(0), cluster.coordinator_http().to_owned());
    let before = memory_kib(node.pid());
    let requests = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2_000);
    let ahead: Vec<TcpStream> = (0..60)
        .flat_map(|_| [node.http().to_owned(), coordinator.clone()])
        .map(|address| {
            let mut socket = TcpStream::connect(address).unwrap();
            socket.set_nonblocking(true).unwrap();
            // Writes as much as the socket takes.
            let _ = socket.write_all(requests.as_bytes());
            socket
        })
        .collect();
    for mut socket in &ahead {
        let mut first = [0; 12];
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(wait::DEADLINE)).unwrap();
        socket.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
    }
    assert_eq!(node.get("/healthz").unwrap(), "ok\n");
    assert_eq!(larder_tests::server::get(&coordinator, "/healthz").unwrap(), "ok\n");
    // All requests that are sent would take 780 MB when decoded.
    let grown = memory_kib(node.pid()).saturating_sub(before);
    assert!(grown < 64 << 10, "{grown} KiB");
}

/// The most memory that a process ever had.
fn memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
