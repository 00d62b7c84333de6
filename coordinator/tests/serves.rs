//! The coordinator as its users see it: over HTTP, and over QUIC as nodes and watchers follow it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_coordinator::election::{Record, Version};
use larder_coordinator::membership::Patience;
use larder_coordinator::register::{Memory, Register, Trouble};
use larder_coordinator::{
    Config, ElectionConfig, HttpConfig, PeerConfig, Ready, ServeError, StateConfig, Status, run, run_elected,
    run_from,
};
use larder_net::coordinator_client::{Candidate, FollowAs, Known, MAX_ADDRESSES, NodeFacts, follow, who};
use larder_net::line_file::RecordConfig;
use larder_net::quic::ca::{Authority, Validity};
use larder_net::quic::{Credentials, Endpoint, TransportSettings, read_message, write_message};
use larder_net::trace::TracingConfig;
use larder_protocol::identity::{Identity, Role};
use larder_protocol::limits::MAX_NAME_BYTES;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, Join, Joined, Standing};
use larder_protocol::peer::{PeerRequest, PeerResponse, RowSpan, Rows};
use larder_protocol::purge::{PurgeCommand, PurgeReport};
use larder_protocol::table::{Epoch, Holder, Member, MemberState, NodeNumber, PARTITIONS, Table, pages};
use larder_protocol::v1::is_merged;
use larder_protocol::version::Version as ProtocolVersion;
use quinn::{RecvStream, SendStream};
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio::sync::{oneshot, watch};

/// A cluster's authority and the files of its coordinator.
struct Place {
    dir: TempDir,
    authority: Authority,
}

struct Coordinator {
    ready: Ready,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<(), ServeError>>,
}

/// A register in memory from which a coordinator can be cut off.
#[derive(Clone, Default)]
struct Cable {
    register: Memory,
    is_cut: Arc<AtomicBool>,
}

/// A follower that can be told to leave, or be dropped without a word.
struct Follower {
    known: watch::Receiver<Known>,
    leave: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (authority, files) = Authority::create(Validity::days(1)).unwrap();
        std::fs::write(dir.path().join("ca.pem"), files.certificate_pem).unwrap();
        let issued = authority.issue(&Identity::new(Role::Coordinator, "c"), Validity::days(1)).unwrap();
        std::fs::write(dir.path().join("c.pem"), issued.certificate_pem).unwrap();
        std::fs::write(dir.path().join("c.key"), issued.key_pem).unwrap();
        Self { dir, authority }
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn credentials(&self, identity: &Identity) -> Credentials {
        let issued = self.authority.issue(identity, Validity::days(1)).unwrap();
        let ca = std::fs::read(self.file("ca.pem")).unwrap();
        Credentials::from_pem(&ca, issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes()).unwrap()
    }

    /// An endpoint of a process of version 1.
    fn endpoint_of_v1(&self, identity: &Identity) -> Endpoint {
        let issued = self.authority.issue(identity, Validity::days(1)).unwrap();
        let ca = std::fs::read(self.file("ca.pem")).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let spoken = ProtocolVersion::FIRST..=ProtocolVersion::FIRST;
        let credentials = Credentials::speaking(spoken, &ca, certificate, key).unwrap();
        Endpoint::bind(any_port(), &credentials, &TransportSettings::default()).unwrap()
    }

    fn endpoint(&self, identity: &Identity) -> Endpoint {
        Endpoint::bind(any_port(), &self.credentials(identity), &TransportSettings::default()).unwrap()
    }

    /// Starts a coordinator, with the state that an earlier one left; on the same address if one is given.
    fn start(&self, peer: Option<SocketAddr>) -> Coordinator {
        let config = self.config("state.redb", peer);
        Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)))
    }

    /// Starts one of several coordinators, with a state of its own.
    fn start_elected(&self, state: &str, cable: Cable) -> Coordinator {
        let election = ElectionConfig {
            lease_ms: 900,
            renew_within_ms: 600,
            retry_ms: 100,
            ..ElectionConfig::default()
        };
        let mut config = Config { election, ..self.config(state, None) };
        // A busy machine may let nodes wait.
        config.membership.grace_ms = 2_000;
        Coordinator::start(move |ready, stop| {
            actix_rt::System::new().block_on(run_elected(config, cable, ready, stop))
        })
    }

    /// A coordinator's configuration with an audit log and a console whose admin has the token `secret`.
    fn config_with_console(&self) -> Config {
        let admin = self.authority.issue(&Identity::new(Role::Admin, "web"), Validity::days(1)).unwrap();
        std::fs::write(self.file("web.pem"), admin.certificate_pem).unwrap();
        std::fs::write(self.file("web.key"), admin.key_pem).unwrap();
        std::fs::write(self.file("token"), "secret").unwrap();
        let mut config = self.config("state.redb", None);
        config.audit = Some(RecordConfig::to(self.file("audit")));
        config.http.console_admin_token_file = Some(self.file("token"));
        config.http.console_admin_certificate = Some(self.file("web.pem"));
        config.http.console_admin_key = Some(self.file("web.key"));
        config
    }

    fn config(&self, state: &str, peer: Option<SocketAddr>) -> Config {
        Config {
            http: HttpConfig { listen: any_port(), ..HttpConfig::default() },
            peer: PeerConfig {
                listen: peer.unwrap_or_else(any_port),
                ca: self.file("ca.pem"),
                certificate: self.file("c.pem"),
                key: self.file("c.key"),
            },
            state: StateConfig { path: self.file(state) },
            membership: Patience {
                heartbeat_ms: 50,
                suspect_after_ms: 300,
                remove_after_ms: 1_500,
                remove_reported_after_ms: 1_000,
                grace_ms: 100,
                remember_lost_ms: 60_000,
            },
            election: ElectionConfig::default(),
            audit: None,
            tracing: TracingConfig::default(),
        }
    }

    /// Has an admin ask a coordinator to reload.
    async fn reload(&self, coordinator: &Coordinator, admin: &str) -> CoordinatorMessage {
        self.admin_asks(coordinator, admin, FollowerMessage::Reload).await
    }

    /// The endpoint of a node, and its stream, on which it has joined.
    async fn joined(&self, coordinator: &Coordinator) -> (Endpoint, SendStream, RecvStream) {
        let endpoint = self.endpoint(&Identity::new(Role::Node, "a"));
        let connection = endpoint.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, receive) = connection.quic().open_bi().await.unwrap();
        let (peer, http) = (any_port(), any_port());
        let join = Join { incarnation: 1, epoch: Epoch::default(), peer, http, devices: 1, weight: 1 };
        write_message(&mut send, &FollowerMessage::Join(join)).await.unwrap();
        (endpoint, send, receive)
    }

    async fn admin_asks(
        &self,
        coordinator: &Coordinator,
        admin: &str,
        message: FollowerMessage,
    ) -> CoordinatorMessage {
        let endpoint = self.endpoint(&Identity::new(Role::Admin, admin));
        let connection = endpoint.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, mut receive) = connection.quic().open_bi().await.unwrap();
        write_message(&mut send, &message).await.unwrap();
        read_message(&mut receive).await.unwrap().unwrap()
    }

    fn node(&self, name: &str, incarnation: u64, coordinator: &Coordinator) -> Follower {
        self.node_of(name, incarnation, vec![coordinator.ready.peer])
    }

    fn node_of(&self, name: &str, incarnation: u64, coordinators: Vec<SocketAddr>) -> Follower {
        self.node_that_knows(name, incarnation, coordinators, Known::default())
    }

    fn node_that_knows(
        &self,
        name: &str,
        incarnation: u64,
        coordinators: Vec<SocketAddr>,
        known: Known,
    ) -> Follower {
        self.node_at(self.endpoint(&Identity::new(Role::Node, name)), incarnation, coordinators, known)
    }

    fn node_at(
        &self,
        endpoint: Endpoint,
        incarnation: u64,
        coordinators: Vec<SocketAddr>,
        known: Known,
    ) -> Follower {
        let peer = endpoint.local_address();
        let facts = NodeFacts {
            candidate: Candidate { incarnation, peer, http: any_port(), devices: 1, weight: 1 },
            silent: Box::new(Vec::new),
            drains: watch::channel(false).1,
        };
        Follower::start_with(endpoint, coordinators, FollowAs::Node(facts), known)
    }
}

impl Register for Cable {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        self.passes().await;
        self.register.read().await
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        self.passes().await;
        self.register.write(record, over).await
    }
}

impl Cable {
    /// Another coordinator's cable to the same register.
    fn another(&self) -> Self {
        Self { register: self.register.clone(), is_cut: Arc::default() }
    }

    fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Relaxed);
    }

    async fn passes(&self) {
        if self.is_cut.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

impl Coordinator {
    fn start(
        serve: impl FnOnce(
            Box<dyn FnOnce(Ready)>,
            std::pin::Pin<Box<dyn Future<Output = ()>>>,
        ) -> Result<(), ServeError>
        + Send
        + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (ready, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let stop = async {
                let _ = stopped.await;
            };
            serve(Box::new(move |r| ready.send(r).unwrap()), Box::pin(stop))
        });
        Self { ready: told.recv().unwrap(), stop, thread }
    }

    fn status(&self) -> Status {
        serde_json::from_str(&self.get("/status")).unwrap()
    }

    fn get(&self, path: &str) -> String {
        let url = format!("http://{}{path}", self.ready.http);
        ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap()
    }

    /// The answer to a change that an admin of the console asks for.
    async fn change(&self, body: &str) -> (u16, String) {
        let (url, body) = (format!("http://{}/console/change", self.ready.http), body.to_owned());
        let change = move || {
            let request = ureq::post(&url).header("Authorization", "Bearer secret").config();
            let mut answer = request.http_status_as_error(false).build().send(body).unwrap();
            (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
        };
        tokio::task::spawn_blocking(change).await.unwrap()
    }

    fn stop(self) {
        self.stop.send(()).unwrap();
        self.thread.join().unwrap().unwrap();
    }

    /// Waits until a line is among the metrics.
    async fn counted(&self, line: &str) {
        until(line, || self.get("/metrics").contains(line)).await;
    }
}

impl Follower {
    fn start(endpoint: Endpoint, coordinator: SocketAddr, follow_as: FollowAs) -> Self {
        Self::start_with(endpoint, vec![coordinator], follow_as, Known::default())
    }

    fn start_with(
        endpoint: Endpoint,
        coordinators: Vec<SocketAddr>,
        follow_as: FollowAs,
        known: Known,
    ) -> Self {
        let coordinators = coordinators.iter().map(ToString::to_string).collect();
        let (known, knows) = watch::channel(known);
        let (leave, leaving) = oneshot::channel::<()>();
        let task = tokio::task::spawn_local(async move {
            let stop = async { drop(leaving.await) };
            follow(endpoint, coordinators, follow_as, known, stop).await;
        });
        Self { known: knows, leave: Some(leave), task }
    }

    /// Waits for a table of which `is_it` is true.
    async fn sees(&mut self, what: &str, is_it: impl Fn(&Known) -> bool) -> Known {
        let is_seen = tokio::time::timeout(DEADLINE, self.known.wait_for(is_it)).await.is_ok();
        let last = self.known.borrow().clone();
        assert!(is_seen, "never seen: {what}; last {last:?}");
        last
    }

    async fn leave(mut self) {
        drop(self.leave.take());
        self.task.await.unwrap();
    }
}

fn members(count: usize) -> impl Fn(&Known) -> bool {
    move |known| known.table.members.len() == count
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Runs a test on one thread, where followers are local tasks.
fn on_one_thread(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

#[expect(clippy::disallowed_methods, reason = "tests of whole servers live in real time")]
async fn until(what: &str, is_it: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_it() {
        assert!(start.elapsed() < DEADLINE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const DEADLINE: Duration = Duration::from_secs(10);

#[test]
fn a_coordinator_serves_health_metrics_and_status_until_it_is_told_to_stop() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        assert_eq!(coordinator.get("/healthz"), "ok\n");
        until("ready after the grace time", || {
            ureq::get(format!("http://{}/readyz", coordinator.ready.http)).call().is_ok()
        })
        .await;
        assert!(coordinator.get("/metrics").contains("larder_coordinator_members{state=\"alive\"} 0"));
        let mut node = place.node("node-0", 5, &coordinator);
        node.sees("itself", members(1)).await;
        let status: Status = serde_json::from_str(&coordinator.get("/status")).unwrap();
        let [shown] = &status.nodes[..] else { panic!("{status:?}") };
        assert_eq!(
            (shown.name.as_str(), shown.incarnation, shown.partitions),
            ("node-0", 5, usize::from(PARTITIONS))
        );
        let http = coordinator.ready.http;
        coordinator.stop();
        assert!(ureq::get(format!("http://{http}/healthz")).call().is_err());
    });
}

#[test]
fn nodes_and_watchers_see_who_joins_leaves_dies_and_comes_back() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, coordinator.ready.peer, FollowAs::Watcher);
        let mut nodes: Vec<Follower> =
            ["a", "b", "c"].map(|name| place.node(name, 1, &coordinator)).into_iter().collect();
        for node in &mut nodes {
            let known = node.sees("all three", members(3)).await;
            assert!(known.table.member(known.own).is_some() && known.table.is_consistent());
        }
        watcher.sees("all three", members(3)).await;
        nodes.pop().unwrap().leave().await;
        watcher.sees("two after one left", members(2)).await;

        // One dies without a word: its heartbeats end.
        let dead = nodes.pop().unwrap();
        let number = dead.known.borrow().own;
        dead.task.abort();
        let state = |known: &Known| known.table.member(number).map(|member| member.state);
        watcher.sees("a suspect", |known| state(known) == Some(MemberState::Suspect)).await;
        watcher.sees("its removal", |known| state(known).is_none()).await;
        let back = place.node("b", 2, &coordinator);
        watcher
            .sees("it back, with its number", |known| {
                known.table.member(number).is_some_and(|member| member.incarnation == 2)
            })
            .await;
        coordinator.counted("larder_coordinator_events_total{event=\"remove\"} 1").await;
        back.leave().await;
    });
}

#[test]
fn a_second_process_of_one_name_waits_until_the_first_is_silent_and_both_are_told() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let mut first = place.node("a", 1, &coordinator);
        let epoch = first.sees("itself", members(1)).await.table.epoch;
        let mut second = place.node("a", 2, &coordinator);
        let known = second.sees("why it may not join", |known| known.refused.is_some()).await;
        let address = first.known.borrow().table.members[0].peer.to_string();
        assert!(known.refused.as_ref().is_some_and(|reason| reason.contains(&address)), "{known:?}");
        // The second one asks again and again, in vain.
        coordinator.counted("larder_coordinator_rejected_total{reason=\"in_use\"} 3").await;
        assert_eq!(first.known.borrow().table.epoch, epoch, "the first one is not evicted");
        coordinator.counted("larder_coordinator_events_total{event=\"join\"} 1").await;

        // When the first one is killed, the next one gets its place within some heartbeats.
        first.task.abort();
        let known =
            second.sees("itself", |known| known.own != NodeNumber(0) && known.refused.is_none()).await;
        assert_eq!(known.incarnation, 2);
        second.sees("its table", members(1)).await;
        second.leave().await;
    });
}

#[test]
fn a_coordinator_that_comes_back_goes_on_where_it_was() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let peer = coordinator.ready.peer;
        let (mut a, mut b) = (place.node("a", 1, &coordinator), place.node("b", 1, &coordinator));
        let before = a.sees("both", members(2)).await;
        b.sees("both", members(2)).await;
        coordinator.stop();
        let coordinator = place.start(Some(peer));
        let after = a.sees("a new term", |known| known.table.epoch.term == 2).await;
        assert_eq!((after.own, &after.table.homes), (before.own, &before.table.homes));
        assert_eq!(after.table.members, before.table.members, "nobody was removed");
        coordinator.stop();

        // The coordinator's state is lost: the nodes tell how far it had come.
        std::fs::remove_file(place.file("state.redb")).unwrap();
        let _coordinator = place.start(Some(peer));
        a.sees("a later term", |known| known.table.epoch.term > 2 && known.table.members.len() == 2).await;
    });
}

#[test]
fn a_node_that_is_stopped_before_it_follows_a_coordinator_that_came_back_says_goodbye() {
    on_one_thread(async {
        let place = Place::new();
        let first = place.start(None);
        let address = first.ready.peer;
        let (mut stays, mut leaves) = (place.node("node-0", 1, &first), place.node("node-1", 2, &first));
        stays.sees("both", members(2)).await;
        leaves.sees("both", members(2)).await;
        first.stop();
        // The node has dialled in vain so often that it waits for a second before it dials again.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        let second = place.start(Some(address));
        leaves.leave().await;
        stays.sees("only itself", members(1)).await;
        assert!(second.status().lost.is_empty(), "{:?}", second.status());
    });
}

#[test]
fn who_may_not_follow_is_turned_away_and_counted() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let garbage = UdpSocket::bind(any_port()).await.unwrap();
        garbage.send_to(&[0x5a; 1_200], coordinator.ready.peer).await.unwrap();

        let stranger = Place::new().endpoint(&Identity::new(Role::Node, "a"));
        let dialled = stranger.connect(coordinator.ready.peer, Role::Coordinator, None).await;
        assert!(dialled.is_err(), "neither trusts the other");
        coordinator.counted("larder_coordinator_rejected_total{reason=\"certificate\"} 1").await;

        // An engine may watch, but not join.
        let engine = place.endpoint(&Identity::engine("red", "vllm-0"));
        let connection = engine.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, mut receive) = connection.quic().open_bi().await.unwrap();
        let join = Join {
            incarnation: 1,
            epoch: Epoch::default(),
            peer: any_port(),
            http: any_port(),
            devices: 1,
            weight: 1,
        };
        write_message(&mut send, &FollowerMessage::Join(join)).await.unwrap();
        let answer = read_message::<CoordinatorMessage>(&mut receive).await;
        assert!(!matches!(answer, Ok(Some(_))), "{answer:?}");
        coordinator.counted("larder_coordinator_rejected_total{reason=\"not_allowed\"} 1").await;

        let connection = engine.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, _receive) = connection.quic().open_bi().await.unwrap();
        send.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        coordinator.counted("larder_coordinator_rejected_total{reason=\"malformed\"} 1").await;
        let mut node = place.node("a", 1, &coordinator);
        node.sees("itself: the others did no harm", members(1)).await;
    });
}

#[test]
fn a_node_that_brings_a_table_unasked_is_turned_away() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (_endpoint, mut send, _receive) = place.joined(&coordinator).await;
        let page = pages(&Table::default(), &Table::default()).remove(0);
        write_message(&mut send, &FollowerMessage::Brings(page)).await.unwrap();
        coordinator.counted("larder_coordinator_rejected_total{reason=\"out_of_order\"} 1").await;
    });
}

#[test]
fn the_audit_log_says_who_changed_what() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let file = place.file("coordinator.toml");
        std::fs::write(&file, toml::to_string(&config).unwrap()).unwrap();
        let served = Some((file.clone(), config.clone()));
        // As `--advertise` does.
        let election = ElectionConfig { advertise: Some("127.0.0.1".to_owned()), ..config.election.clone() };
        let config = Config { election, ..config };
        let coordinator = Coordinator::start(move |ready, stop| {
            actix_rt::System::new().block_on(run_from(config, served, ready, stop))
        });
        let (drains, drained) = watch::channel(false);
        let candidate =
            Candidate { incarnation: 1, peer: any_port(), http: any_port(), devices: 1, weight: 1 };
        let facts = NodeFacts { candidate, silent: Box::new(Vec::new), drains: drained };
        let endpoint = place.endpoint(&Identity::new(Role::Node, "node-0"));
        let mut node = Follower::start(endpoint, coordinator.ready.peer, FollowAs::Node(facts));
        node.sees("itself", members(1)).await;
        drains.send_replace(true);
        let is_draining = |known: &Known| known.table.members[0].state == MemberState::Draining;
        node.sees("that it drains", is_draining).await;

        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("suspect_after_ms = 300", "suspect_after_ms = 400")).unwrap();
        let CoordinatorMessage::Reloaded(reloaded) = place.reload(&coordinator, "me").await else {
            panic!("it reloads");
        };
        assert_eq!(reloaded.at_restart, [""; 0], "only what changed in the file");
        std::fs::write(&file, "no configuration").unwrap();
        place.reload(&coordinator, "me").await;

        let policy = r#"{"action": "policy", "node": "node-0", "policy": "sieve"}"#;
        coordinator.change(policy).await;
        let unknown = coordinator.change(&policy.replace("node-0", "node-9")).await;
        assert_eq!(unknown, (400, "the coordinator knows no node `node-9`\n".to_owned()));
        node.leave().await;
        coordinator.stop();

        let text = std::fs::read_to_string(place.file("audit")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.iter().all(|line| line["coordinator"] == "c" && line["time"].is_string()), "{text}");
        let has = |by: &str, action: &str, what: &str, outcome: &str| {
            lines.iter().any(|line| {
                let outcome_is = line["outcome"].as_str().is_some_and(|said| said.contains(outcome));
                let what_is = line["what"].as_str().unwrap_or_default() == what;
                line["by"] == by && line["action"] == action && what_is && outcome_is
            })
        };
        assert!(has("node node-0", "drain", "node-0", "done"), "{text}");
        // The coordinator may have seen the changed file first.
        let new = "membership.suspect_after_ms = 400";
        assert!(lines.iter().any(|line| line["action"] == "reload" && line["what"] == new), "{text}");
        assert!(has("admin me", "reload", "", "coordinator.toml"), "{text}");
        assert!(has("console of admin web", "set_policy", "sieve at node-0", "does not reach"), "{text}");
    });
}

#[test]
fn the_audit_log_has_a_line_for_each_change_of_a_drain_however_often_the_node_says_it() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let (_endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        for drains in [false, true, true, false, false] {
            write_message(&mut send, &FollowerMessage::Drains(drains)).await.unwrap();
        }
        is_heard(&mut send, &mut receive).await;
        coordinator.stop();
        let audit = std::fs::read_to_string(place.file("audit")).unwrap();
        let lines = |action: &str| audit.matches(&format!(r#""action":"{action}""#)).count();
        assert_eq!((lines("drain"), lines("cancel_drain")), (1, 1), "{audit}");
    });
}

#[test]
fn a_coordinator_ends_although_its_audit_log_stalls() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let _reader = full_pipe(&place.file("audit"));
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        place.reload(&coordinator, "me").await;
        coordinator.stop();
    });
}

/// Makes a pipe that takes no byte more, and returns its reader.
fn full_pipe(path: &Path) -> std::fs::File {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut options = std::fs::File::options();
    let mut pipe = options.read(true).write(true).custom_flags(nonblocking).open(path).unwrap();
    while pipe.write(&[b'\n'; 4_096]).is_ok() {}
    pipe
}

#[test]
fn a_file_that_is_missing_may_come_and_a_wrong_one_must_be_changed() {
    let place = Place::new();
    let (config, missing) = (place.config("state.redb", None), place.file("missing/file"));
    let with = |certificate: &Path| PeerConfig { certificate: certificate.to_owned(), ..config.peer.clone() };
    let audit = Some(RecordConfig::to(missing.clone()));
    for (config, is_the_askers) in [
        (Config { audit, ..config.clone() }, false),
        (Config { peer: with(&missing), ..config.clone() }, false),
        (Config { peer: with(&place.file("ca.pem")), ..config.clone() }, true),
    ] {
        let error =
            actix_rt::System::new().block_on(run(config, |_| (), std::future::pending())).unwrap_err();
        assert_eq!(error.is_the_askers(), is_the_askers, "{error}");
    }
}

#[test]
fn purges_that_take_long_hold_up_no_other_change() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let endpoint = place.endpoint(&Identity::new(Role::Node, "node-0"));
        let (begun, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        tokio::task::spawn_local(purge_slowly(endpoint.clone(), (Arc::clone(&begun), Arc::clone(&is_over))));
        let mut node = place.node_at(endpoint, 1, vec![coordinator.ready.peer], Known::default());
        node.sees("itself", members(1)).await;
        let purge = r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#;
        let policy = async {
            until("four purges are under way", || begun.load(Ordering::Relaxed) == 4).await;
            let (_, fifth) = coordinator.change(purge).await;
            assert!(fifth.contains("other purges are under way"), "{fifth}");
            let changed = coordinator.change(r#"{"action": "policy", "policy": "sieve"}"#);
            let changed = tokio::time::timeout(DEADLINE, changed).await;
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(changed.unwrap().0, 200);
        };
        let purges = || coordinator.change(purge);
        tokio::join!(purges(), purges(), purges(), purges(), policy);
        node.leave().await;
        coordinator.stop();
    });
}

/// Answers an admin's requests as a node: purges are over when `is_over` says so.
async fn purge_slowly(endpoint: Endpoint, (begun, is_over): (Arc<AtomicU64>, Arc<AtomicBool>)) {
    while let Some(incoming) = endpoint.accept().await {
        let (begun, is_over) = (Arc::clone(&begun), Arc::clone(&is_over));
        tokio::task::spawn_local(async move {
            let connection = incoming.accept().await.unwrap();
            while let Ok((mut send, mut receive)) = connection.quic().accept_bi().await {
                let answer = match read_message::<PeerRequest>(&mut receive).await {
                    Ok(Some(PeerRequest::Purge(command))) => {
                        begun
                            .fetch_add(matches!(*command, PurgeCommand::Start(..)).into(), Ordering::Relaxed);
                        let is_over = is_over.load(Ordering::Relaxed);
                        PeerResponse::Purges(Box::new(PurgeReport { is_over, ..PurgeReport::default() }))
                    }
                    _ => PeerResponse::Done,
                };
                write_message(&mut send, &answer).await.unwrap();
                send.finish().unwrap();
            }
        });
    }
}

#[test]
fn the_console_changes_all_nodes_only_if_there_are_any() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        for change in [
            r#"{"action": "policy", "policy": "sieve"}"#,
            r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#,
        ] {
            let refused = (400, "the coordinator knows no nodes\n".to_owned());
            assert_eq!(coordinator.change(change).await, refused, "{change}");
        }
        coordinator.stop();
    });
}

/// Passes packets between a node and the coordinator, which sees the address of one of two sockets.
async fn relay(near: UdpSocket, far: [UdpSocket; 2], coordinator: SocketAddr, second: Arc<AtomicBool>) {
    let (mut node, mut packet) = (any_port(), [[0; 2_048]; 3]);
    let [from_node, from_first, from_second] = &mut packet;
    loop {
        let (bytes, is_from_node) = tokio::select! {
            Ok((bytes, from)) = near.recv_from(from_node) => {
                node = from;
                (&from_node[..bytes], true)
            }
            Ok((bytes, _)) = far[0].recv_from(from_first) => (&from_first[..bytes], false),
            Ok((bytes, _)) = far[1].recv_from(from_second) => (&from_second[..bytes], false),
        };
        let (through, to) = match is_from_node {
            true => (&far[usize::from(second.load(Ordering::Relaxed))], coordinator),
            false => (&near, node),
        };
        // A lost packet is sent again.
        let _ = through.send_to(bytes, to).await;
    }
}

#[test]
fn a_node_whose_host_has_another_address_is_a_member_at_that_address() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let near = UdpSocket::bind(any_port()).await.unwrap();
        let [first, second] =
            [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| UdpSocket::bind((IpAddr::from(ip), 0)));
        let (address, moved) = (near.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let far = [first.await.unwrap(), second.await.unwrap()];
        tokio::task::spawn_local(relay(near, far, coordinator.ready.peer, Arc::clone(&moved)));
        let anywhere = ([0, 0, 0, 0], 9_441).into();
        let facts = NodeFacts {
            candidate: Candidate { incarnation: 1, peer: anywhere, http: anywhere, devices: 1, weight: 1 },
            silent: Box::new(Vec::new),
            drains: watch::channel(false).1,
        };
        let endpoint = place.endpoint(&Identity::new(Role::Node, "a"));
        let mut node = Follower::start(endpoint, address, FollowAs::Node(facts));
        let is_at = |ip: [u8; 4]| {
            let at = SocketAddr::from((ip, 9_441));
            move |known: &Known| known.table.members.first().is_some_and(|member| member.peer == at)
        };
        node.sees("itself", is_at([127, 0, 0, 1])).await;
        moved.store(true, Ordering::Relaxed);
        let known = node.sees("its new address", is_at([127, 0, 0, 2])).await;
        assert_eq!((known.table.members[0].incarnation, known.refused), (1, None));
        assert!(coordinator.get("/metrics").contains("event=\"contest\"} 0"), "it is no rival of itself");
        node.leave().await;
        coordinator.stop();
    });
}

#[test]
fn a_purge_from_the_console_names_the_lost_nodes() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let mut node = place.node("node-0", 1, &coordinator);
        node.sees("itself", members(1)).await;
        node.task.abort();
        until("it is lost", || coordinator.status().lost.len() == 1).await;
        let purge = r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#;
        let (status, said) = coordinator.change(purge).await;
        assert!(status == 200 && said.contains("node-0") && said.contains("it is lost"), "{status} {said}");
        coordinator.stop();
    });
}

#[test]
fn an_admin_has_a_lost_node_forgotten_by_certificate_or_from_the_console() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let names = ["node-0", "node-1", "node-2"];
        let mut nodes = names.map(|name| place.node(name, 1, &coordinator));
        for node in &mut nodes {
            node.sees("all", members(3)).await;
        }
        nodes[1..].iter().for_each(|node| node.task.abort());
        until("two are lost", || coordinator.status().lost.len() == 2).await;
        let forget = |name: &str| FollowerMessage::Forget(name.to_owned());
        let answer = place.admin_asks(&coordinator, "me", forget("node-0")).await;
        assert!(matches!(answer, CoordinatorMessage::Refused(why) if why.contains("is a member")));
        let longest = "n".repeat(MAX_NAME_BYTES);
        for (name, was_lost) in [("node-1", true), ("node-1", false), ("node-9", false), (&longest, false)] {
            let answer = place.admin_asks(&coordinator, "me", forget(name)).await;
            assert_eq!(answer, CoordinatorMessage::Forgot(was_lost), "{name}");
        }
        let forget = |name: &str| format!(r#"{{"action": "forget", "node": "{name}"}}"#);
        assert_eq!(coordinator.change(&forget("node-2")).await, (200, "[]".to_owned()));
        let (status, said) = coordinator.change(&forget("node-9")).await;
        assert!(status == 400 && said.contains("no lost node `node-9`"), "{status} {said}");
        assert!(coordinator.status().lost.is_empty());
        coordinator.stop();
        let audit = std::fs::read_to_string(place.file("audit")).unwrap();
        let line = r#""by":"admin me","action":"forget","what":"node-1","outcome":"done""#;
        assert!(audit.contains(line), "{audit}");
    });
}

#[test]
fn a_router_is_told_how_much_of_a_prefix_each_node_holds() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let identity = Identity::new(Role::Node, "home");
        let home = place.endpoint(&identity);
        let peer = home.local_address();
        let facts = NodeFacts {
            candidate: Candidate { incarnation: 1, peer, http: any_port(), devices: 1, weight: 1 },
            silent: Box::new(Vec::new),
            drains: watch::channel(false).1,
        };
        let mut node = Follower::start(home.clone(), coordinator.ready.peer, FollowAs::Node(facts));
        let own = node.sees("itself", members(1)).await.own;
        // The home says that it holds the first two of three chunks.
        tokio::task::spawn_local(async move {
            let connection = home.accept().await.unwrap().accept().await.unwrap();
            let (mut send, mut receive) = connection.quic().accept_bi().await.unwrap();
            let Ok(Some(PeerRequest::Find(find))) = read_message(&mut receive).await else {
                panic!("a find")
            };
            assert_eq!(find.rows.len(), 3);
            let holder = Holder { node: own, device: 0 };
            let spans = vec![RowSpan { from: 0, to: 2, holder }];
            let rows = PeerResponse::Rows(Rows { epoch: find.epoch, spans });
            write_message(&mut send, &rows).await.unwrap();
            send.finish().unwrap();
            connection.quic().closed().await;
        });
        let url = format!("http://{}/v1/prefix", coordinator.ready.http);
        let ask = move |body: String| {
            let url = url.clone();
            tokio::task::spawn_blocking(move || {
                let mut answer = ureq::post(url)
                    .header("content-type", "application/json")
                    .config()
                    .http_status_as_error(false)
                    .build()
                    .send(body)
                    .unwrap();
                answer.body_mut().read_to_string().unwrap()
            })
        };
        let hash = |byte: &str| format!("\"{}\"", byte.repeat(32));
        let body = |fingerprint: &str| {
            let hashes = [hash("11"), hash("22"), hash("33")].join(",");
            format!("{{\"fingerprint\": {fingerprint}, \"chunk_tokens\": 256, \"hashes\": [{hashes}]}}")
        };
        let answer = ask(body(&hash("ab"))).await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["cluster"], serde_json::json!({"chunks": 2, "tokens": 512}));
        let held = serde_json::json!(
            [{"name": "home", "chunks": 2, "tokens": 512, "held_tokens": 512, "cost_tokens": 256}]
        );
        assert_eq!(answer["nodes"], held, "the third chunk must be computed");
        let wrong = ask(body("\"ab\"")).await.unwrap();
        assert!(wrong.contains("fingerprint: a chunk hash has 64"), "{wrong}");
        assert_ne!(own, NodeNumber(0));
    });
}

#[test]
fn of_three_coordinators_one_leads_and_the_others_answer_reads_and_name_it() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let all = ["1", "2", "3"].map(|state| place.start_elected(state, cable.another()));
        until("one leads", || all.iter().filter(|one| !one.status().follows).count() == 1).await;
        let leader = all.iter().find(|one| !one.status().follows).unwrap();
        let follower = all.iter().find(|one| one.status().follows).unwrap();
        until("it is named", || follower.status().leader == Some(leader.ready.http.to_string())).await;

        // A node that knows only the follower is sent to the leader; a watcher may stay.
        let mut node = place.node("a", 1, follower);
        node.sees("itself", members(1)).await;
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, follower.ready.peer, FollowAs::Watcher);
        let seen = watcher.sees("the node", members(1)).await.table;
        assert_eq!(seen, node.known.borrow().table);
        assert_eq!(follower.status().nodes[0].name, "a");
        assert!(follower.get("/metrics").contains("larder_coordinator_leads 0\n"));
        leader.counted("larder_coordinator_leads 1\n").await;
    });
}

#[test]
fn a_follower_that_starts_again_publishes_the_table_that_it_knows() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let all = ["1", "2"].map(|state| (state, place.start_elected(state, cable.another())));
        let mut node = place.node_of("a", 1, all.iter().map(|(_, one)| one.ready.peer).collect());
        node.sees("itself", members(1)).await;
        until("one follows", || all.iter().filter(|(_, one)| one.status().follows).count() == 1).await;
        let [first, second] = all;
        let ((state, follower), _leader) =
            if first.1.status().follows { (first, second) } else { (second, first) };
        until("it knows the node", || follower.status().nodes.len() == 1).await;
        follower.stop();
        let again = place.start_elected(state, cable.another());
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, again.ready.peer, FollowAs::Watcher);
        watcher.sees("the node, though no table has changed", members(1)).await;
        assert!(again.status().follows);
    });
}

#[test]
fn a_leader_that_is_cut_off_stops_and_the_next_one_moves_no_partition() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let cables = [(); 3].map(|()| cable.another());
        let all = [0, 1, 2].map(|at| place.start_elected(&at.to_string(), cables[at].clone()));
        let addresses: Vec<SocketAddr> = all.iter().map(|one| one.ready.peer).collect();
        let mut nodes = ["a", "b", "c"].map(|name| place.node_of(name, 1, addresses.clone()));
        let mut before = Known::default();
        for node in &mut nodes {
            before = node.sees("all three", members(3)).await;
        }
        let leader = all.iter().position(|one| !one.status().follows).unwrap();
        cables[leader].cut(true);
        for node in &mut nodes {
            let after =
                node.sees("a later term", |known| known.table.epoch.term > before.table.epoch.term).await;
            assert_eq!(
                (&after.table.homes, &after.table.members),
                (&before.table.homes, &before.table.members)
            );
        }
        assert!(all[leader].status().follows);
        cables[leader].cut(false);
        let epoch = nodes[0].known.borrow().table.epoch.to_string();
        until("it follows the new leader", || all[leader].status().epoch == epoch).await;
        let calm = all
            .iter()
            .map(|one| one.get("/metrics"))
            .filter(|text| text.contains("event=\"remove\"} 0") && text.contains("event=\"suspect\"} 0"));
        assert_eq!(calm.count(), 3, "nobody was removed or suspect");
    });
}

#[test]
fn a_leader_without_any_state_goes_on_from_the_table_that_nodes_bring() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let first = place.start_elected("first", cable.another());
        // The second coordinator takes the first one's place, and was never told a table.
        let second = place.start_elected("second", cable.another());
        let addresses = vec![first.ready.peer, second.ready.peer];
        let mut nodes = ["a", "b", "c"].map(|name| place.node_of(name, 1, addresses.clone()));
        for node in &mut nodes {
            node.sees("all three", members(3)).await;
        }
        let before = nodes[0].known.borrow().clone();
        first.stop();
        second.stop();
        let third = place.start_elected("third", cable.another());
        let mut addresses = addresses;
        addresses[0] = third.ready.peer;
        for node in &nodes {
            node.task.abort();
        }
        let mut late = place.node_of("d", 9, addresses.clone());
        // Followers live as long as they are kept.
        let mut back = Vec::new();
        for (name, node) in ["a", "b", "c"].iter().zip(&nodes) {
            back.push(place.node_that_knows(name, 1, addresses.clone(), node.known.borrow().clone()));
        }
        let after = late.sees("all four", members(4)).await.table;
        for member in &before.table.members {
            let again = after.member(member.number).unwrap();
            assert_eq!(again, &Member { peer: again.peer, ..member.clone() }, "numbers stay with names");
        }
        let moved = before.table.homes.iter().zip(&after.homes).filter(|(then, now)| then != now).count();
        assert!(moved <= usize::from(PARTITIONS) / 4 + 1, "{moved} partitions moved for one new node");
    });
}

#[test]
fn a_new_leader_asks_a_node_for_its_table_although_nodes_of_version_1_came_first() {
    on_one_thread(async {
        let place = Place::new();
        let leader = place.start_elected("leader", Cable::default());
        let at = vec![leader.ready.peer];
        let number = NodeNumber(77);
        let member = Member {
            number,
            name: "late".to_owned(),
            incarnation: 1,
            peer: any_port(),
            http: any_port(),
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        let epoch = Epoch { term: 0, number: 5 };
        let table = Table { epoch, members: vec![member], homes: vec![number; usize::from(PARTITIONS)] };
        let before = Known { table: Arc::new(table), ..Known::default() };
        let early = ["a", "b", "c"].map(|name| {
            let endpoint = place.endpoint_of_v1(&Identity::new(Role::Node, name));
            place.node_at(endpoint, 1, at.clone(), before.clone())
        });
        until("those of version 1 have joined", || leader.status().nodes.len() == 3).await;
        let mut late = place.node_that_knows("late", 1, at, before);
        let after = late.sees("all four", members(4)).await;
        assert_eq!(after.own, number, "it keeps its number, which only its table says");
        drop(early);
        leader.stop();
    });
}

#[test]
fn two_coordinators_that_do_not_know_of_each_other_are_noticed_and_the_lower_one_stops() {
    on_one_thread(async {
        let place = Place::new();
        let first = place.start(None);
        let mut node = place.node("a", 1, &first);
        node.sees("itself", members(1)).await;
        node.leave().await;
        first.stop();
        std::fs::copy(place.file("state.redb"), place.file("copied.redb")).unwrap();
        let copied = place.config("copied.redb", None);
        let [one, other] = [
            place.start(None),
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(copied, ready, stop))),
        ];
        let addresses = vec![one.ready.peer, other.ready.peer];
        let mut node = place.node_of("a", 2, addresses);
        node.sees("itself", members(1)).await;
        until("one of them stops", || one.thread.is_finished() || other.thread.is_finished()).await;
        let (lower, higher) = if one.thread.is_finished() { (one, other) } else { (other, one) };
        let error = lower.thread.join().unwrap().unwrap_err();
        assert!(error.is_the_askers() && error.to_string().contains("another coordinator leads"), "{error}");
        node.sees("the other one's table", |known| {
            known.table.epoch.to_string() == higher.status().epoch && known.table.members.len() == 1
        })
        .await;
        higher.stop();
    });
}

#[test]
fn a_node_that_dials_all_addresses_of_a_coordinator_keeps_its_stream() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        let mut others = Vec::new();
        for _ in 0..MAX_ADDRESSES {
            let other = endpoint.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
            others.push(other);
        }
        is_heard(&mut send, &mut receive).await;
    });
}

#[test]
fn a_node_that_follows_a_coordinator_gives_up_its_other_dials() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let slow = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        let addresses = vec![coordinator.ready.peer, slow.local_address()];
        let mut node = place.node_of("a", 1, addresses);
        let dialled = slow.accept().await.unwrap();
        node.sees("itself", members(1)).await;
        let given_up = async {
            if let Ok(connection) = dialled.accept().await {
                connection.quic().closed().await;
            }
        };
        tokio::time::timeout(DEADLINE, given_up).await.unwrap();
    });
}

#[test]
fn a_node_is_heard_while_the_coordinator_meets_a_rival() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (_endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        let rival = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        write_message(&mut send, &FollowerMessage::Rival(rival.local_address())).await.unwrap();
        // The rival lets the question wait.
        let met = rival.accept().await.unwrap().accept().await.unwrap();
        is_heard(&mut send, &mut receive).await;
        assert!(met.quic().close_reason().is_none());
    });
}

/// Sends a heartbeat, and waits for the answer.
async fn is_heard(send: &mut SendStream, receive: &mut RecvStream) {
    let beat = Heartbeat { epoch: Epoch::default(), silent: Vec::new() };
    write_message(send, &FollowerMessage::Heartbeat(beat)).await.unwrap();
    let heard = async {
        while read_message::<CoordinatorMessage>(receive).await.unwrap().unwrap() != CoordinatorMessage::Heard
        {
        }
    };
    tokio::time::timeout(DEADLINE, heard).await.unwrap();
}

#[test]
fn a_node_that_names_the_coordinators_of_two_clusters_ends_neither() {
    on_one_thread(async {
        let place = Place::new();
        let other = place.config("other.redb", None);
        let [one, other] = [
            place.start(None),
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(other, ready, stop))),
        ];
        let mut nodes = Vec::new();
        for (name, coordinator) in [("a", &one), ("b", &one), ("c", &other), ("d", &other)] {
            nodes.push(place.node(name, 1, coordinator));
        }
        for node in &mut nodes {
            node.sees("both nodes of its cluster", members(2)).await;
        }
        let mut strange = place.node_of("e", 1, vec![one.ready.peer, other.ready.peer]);
        strange.sees("a cluster", members(3)).await;
        // It looks for other leaders at once, and its coordinator asks these at once.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!one.thread.is_finished() && !other.thread.is_finished());
        one.stop();
        other.stop();
    });
}

#[test]
fn a_coordinator_that_starts_again_waits_for_its_nodes_before_it_yields_to_another_clusters() {
    on_one_thread(async {
        let place = Place::new();
        let stranger = place.endpoint(&Identity::new(Role::Coordinator, "other"));
        let standing = Standing { term: 99, life: 7, leads: true, leader: None };
        let start = |grace_ms| {
            let mut config = place.config("state.redb", None);
            config.membership.grace_ms = grace_ms;
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)))
        };
        // A busy machine may let nodes wait.
        let grace_ms = 2_000;
        let again = start(grace_ms);
        who(&stranger, again.ready.peer, Some(standing.clone())).await.unwrap();
        let mut node = place.node("a", 1, &again);
        node.sees("itself", members(1)).await;
        tokio::time::sleep(Duration::from_millis(grace_ms)).await;
        assert!(!again.thread.is_finished());
        node.leave().await;
        again.stop();

        let alone = start(0);
        who(&stranger, alone.ready.peer, Some(standing)).await.unwrap();
        until("without nodes it yields", || alone.thread.is_finished()).await;
    });
}

#[test]
fn a_node_obeys_no_coordinator_of_an_earlier_term() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let mut node = place.node("a", 1, &coordinator);
        let before = node.sees("itself", members(1)).await;
        node.task.abort();
        // A coordinator that stood still since an earlier term.
        let old = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        let address = old.local_address();
        let (told, mut tells) = tokio::sync::mpsc::channel(1);
        tokio::task::spawn_local(async move {
            while let Some(incoming) = old.accept().await {
                let connection = incoming.accept().await.unwrap();
                let Ok((mut send, mut receive)) = connection.quic().accept_bi().await else { continue };
                let _: Result<Option<FollowerMessage>, _> = read_message(&mut receive).await;
                let standing = Standing { term: 0, life: 1, leads: true, leader: None };
                let joined = Joined { number: NodeNumber(77), heartbeat_ms: 1 };
                for message in [CoordinatorMessage::Standing(standing), CoordinatorMessage::Joined(joined)] {
                    let _ = write_message(&mut send, &message).await;
                }
                connection.quic().closed().await;
                let _ = told.send(()).await;
            }
        });
        let node = place.node_that_knows("a", 1, vec![address], before.clone());
        for _ in 0..3 {
            tells.recv().await.unwrap();
        }
        assert_eq!(node.known.borrow().own, before.own);
    });
}

#[test]
fn a_certificate_of_another_role_is_no_coordinators() {
    let place = Place::new();
    let issued = place.authority.issue(&Identity::new(Role::Node, "n"), Validity::days(1)).unwrap();
    std::fs::write(place.file("n.pem"), issued.certificate_pem).unwrap();
    std::fs::write(place.file("n.key"), issued.key_pem).unwrap();
    let config = |certificate: &Path, key: &Path| Config {
        http: HttpConfig { listen: any_port(), ..HttpConfig::default() },
        peer: PeerConfig {
            listen: any_port(),
            ca: place.file("ca.pem"),
            certificate: certificate.to_owned(),
            key: key.to_owned(),
        },
        ..Config::default()
    };
    let start = |config| actix_rt::System::new().block_on(run(config, |_| {}, async {})).unwrap_err();
    let error = start(config(&place.file("n.pem"), &place.file("n.key"))).to_string();
    assert!(error.contains("larder://node/n") && error.contains("larder ca issue coordinator"), "{error}");
    let missing = start(config(&place.file("nowhere.pem"), &place.file("n.key")));
    let source = std::error::Error::source(&missing).unwrap().to_string();
    assert!(source.contains("nowhere.pem") && source.contains("larder ca"), "{source}");
}

#[test]
fn nodes_of_version_1_and_2_are_members_of_one_cluster_whose_homes_both_know() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let before = place.endpoint_of_v1(&Identity::new(Role::Node, "before"));
        let at = vec![coordinator.ready.peer];
        let mut before = place.node_at(before, 5, at, Known::default());
        let mut others = [place.node("one", 6, &coordinator), place.node("other", 7, &coordinator)];
        let seen = before.sees("all three", members(3)).await;
        assert!(seen.table.is_consistent() && is_merged(&seen.table.homes));
        assert!(seen.lacks_drains, "its coordinator would not hear of drains");
        let is_same = |known: &Known| known.table == seen.table;
        others[0].sees("the same table", is_same).await;
        let watcher = place.endpoint_of_v1(&Identity::new(Role::Admin, "watcher"));
        let mut watcher = Follower::start(watcher, coordinator.ready.peer, FollowAs::Watcher);
        watcher.sees("the same table", is_same).await;
        let protocols = |coordinator: &Coordinator| -> Vec<(String, u8)> {
            coordinator.status().nodes.into_iter().map(|node| (node.name, node.protocol)).collect()
        };
        let shown = protocols(&coordinator);
        assert!(shown.contains(&("before".into(), 1)) && shown.contains(&("one".into(), 2)), "{shown:?}");

        before.leave().await;
        let is_fine = |known: &Known| members(2)(known) && !is_merged(&known.table.homes);
        for node in &mut others {
            node.sees("all partitions, since nobody needs the old ones", is_fine).await;
        }
        watcher.sees("both nodes", members(2)).await;
        coordinator.stop();
    });
}

#[test]
fn a_coordinator_that_starts_again_keeps_the_homes_that_nodes_of_version_1_may_know() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let peer = coordinator.ready.peer;
        let endpoint = place.endpoint_of_v1(&Identity::new(Role::Node, "before"));
        let mut before = place.node_at(endpoint, 5, vec![peer], Known::default());
        let mut others = [place.node("one", 6, &coordinator), place.node("other", 7, &coordinator)];
        let seen = before.sees("all three", members(3)).await;
        others[0].sees("the same", |known| known.table == seen.table).await;
        coordinator.stop();
        let coordinator = place.start(Some(peer));
        let later = |known: &Known| known.table.epoch.term > seen.table.epoch.term && members(3)(known);
        for node in others.iter_mut().chain([&mut before]) {
            let known = node.sees("a later term", later).await;
            assert_eq!(known.table.homes, seen.table.homes);
        }
        coordinator.stop();
    });
}
