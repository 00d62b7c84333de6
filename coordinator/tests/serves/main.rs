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

mod admins;
mod leaders;
mod members;
mod rivals;
mod versions;

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

const DEADLINE: Duration = Duration::from_secs(10);
