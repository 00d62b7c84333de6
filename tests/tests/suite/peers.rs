//! Peers that break the rules: they are refused or their blocks are a miss; this is counted, and nobody else notices.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant, SystemTime};

use larder_net::quic::Credentials;
use larder_net::quic::ca::Validity;
use larder_protocol::identity::{Identity, Role};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Join};
use larder_protocol::peer::{Announce, Chunks, Class, Fetch, Find, PeerRequest, PeerResponse, Show};
use larder_protocol::pin::{PinCommand, PinStart};
use larder_protocol::table::{Epoch, Holder, NodeNumber, RowKey};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, prompt};
use larder_tests::impostor::{Impostor, Manners};
use larder_tests::visitor::Visitor;
use larder_tests::wait;
use serde_json::Value;

use super::{Engine, LARDER};

/// Checks that the cluster still serves: a chunk that is put on one node is found on another.
fn nothing_happened(cluster: &Cluster) {
    let hashes = prompt(b'z', 4);
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 4, "{}", cluster.node(0).log());
    let reader = Engine::connect(&cluster.socket(1));
    wait::until("the other node finds it", || {
        (reader.find(&hashes, 100) == 4 * u64::from(CHUNK_TOKENS)).then_some(())
    });
    assert_eq!(reader.get(&hashes), 4, "{}", cluster.node(1).log());
    assert_eq!(cluster.members().len(), 2);
}

fn node_rejections(cluster: &Cluster, reason: &str) -> f64 {
    cluster.node(0).metric(&format!("larder_peer_rejected_total{{reason=\"{reason}\"}}"))
}

fn coordinator_rejections(cluster: &Cluster) -> f64 {
    cluster.coordinator().metric("larder_coordinator_rejected_total")
}

fn coordinator_address(cluster: &Cluster) -> SocketAddr {
    cluster.coordinator_peer().parse().unwrap()
}

fn visitor(cluster: &Cluster, identity: &Identity) -> Visitor {
    Visitor::new(&cluster.credentials(identity, Validity::days(1)).unwrap()).unwrap()
}

/// Dials a node and the coordinator with these credentials; both turn the stranger away and count it.
fn is_turned_away(credentials: impl FnOnce(&Cluster) -> Credentials) {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let stranger = Visitor::new(&credentials(&cluster)).unwrap();
    assert!(stranger.is_turned_away(cluster.member("node-0").peer, Role::Node));
    wait::until("the node counts it", || (node_rejections(&cluster, "certificate") > 0.0).then_some(()));
    assert!(stranger.is_turned_away(coordinator_address(&cluster), Role::Coordinator));
    wait::until("the coordinator counts it", || (coordinator_rejections(&cluster) > 0.0).then_some(()));
    nothing_happened(&cluster);
}

#[test]
fn a_node_of_another_authority_is_turned_away() {
    is_turned_away(|cluster| cluster.strange_credentials(&Identity::new(Role::Node, "node-2")).unwrap());
}

#[test]
fn an_expired_certificate_is_turned_away() {
    let long_ago = SystemTime::now() - Duration::from_secs(7_200);
    let validity = Validity { not_before: long_ago, not_after: long_ago + Duration::from_secs(3_600) };
    is_turned_away(|cluster| cluster.credentials(&Identity::new(Role::Node, "node-2"), validity).unwrap());
}

#[test]
fn a_node_dialled_as_something_else_is_not_taken_for_it() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let admin = visitor(&cluster, &Identity::new(Role::Admin, "me"));
    assert!(admin.dial(cluster.member("node-0").peer, Role::Coordinator).is_err());
    assert!(admin.dial(coordinator_address(&cluster), Role::Node).is_err());
    nothing_happened(&cluster);
}

/// Every request of the peer protocol that is not for all roles.
fn requests(cluster: &Cluster) -> Vec<PeerRequest> {
    let engine = Engine::connect(&cluster.socket(0));
    let fingerprint = engine.namespace.fingerprint();
    let chunks = Chunks { device: 0, fingerprint, hashes: prompt(b'a', 4) };
    let holder = Holder { node: cluster.member("node-1").number, device: 0 };
    vec![
        PeerRequest::Fetch(Fetch {
            chunks: chunks.clone(),
            block_bytes: vec![BLOCK_BYTES as u64],
            class: Class::Decode,
        }),
        PeerRequest::Moved(chunks),
        PeerRequest::Announce(vec![announcement(cluster, holder)]),
        PeerRequest::Find(Find { epoch: cluster.table().unwrap().epoch, rows: Vec::new() }),
        PeerRequest::SetPolicy("fifo".to_owned()),
        PeerRequest::Show(Show { path: "/lookups".into(), body: Vec::new() }),
        // No chunk of this prompt is there to be pinned.
        PeerRequest::Pin(Box::new(PinCommand::Start(PinStart {
            fingerprint,
            hashes: prompt(b'z', 1),
            duration_ms: 1,
        }))),
    ]
}

/// An announcement that takes back all rows of `holder`.
fn announcement(cluster: &Cluster, holder: Holder) -> Announce {
    let member = cluster.table().unwrap().member(holder.node).unwrap().clone();
    Announce {
        holder,
        incarnation: member.incarnation,
        epoch: cluster.table().unwrap().epoch,
        stream: 0,
        sequence: 0,
        digest: None,
        changes: Vec::new(),
    }
}

#[test]
fn engines_and_admins_get_no_blocks_and_change_nothing_in_the_directory() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let address = cluster.member("node-0").peer;
    // Everybody but an engine may ask who holds which chunks. Only an admin sets the policy, and sees what engines asked for.
    for (identity, refusals) in [(Identity::engine("default", "e"), 7), (Identity::new(Role::Admin, "a"), 3)]
    {
        let before = node_rejections(&cluster, "not_allowed");
        let visitor = visitor(&cluster, &identity);
        let connection = visitor.dial(address, Role::Node).unwrap();
        let answers =
            requests(&cluster).into_iter().map(|request| visitor.ask(&connection, &request).unwrap());
        let refused = answers.filter(|answer| matches!(answer, PeerResponse::Refused(_))).count();
        assert_eq!(refused, refusals, "{identity}");
        assert_eq!(node_rejections(&cluster, "not_allowed") - before, refusals as f64);
    }
    nothing_happened(&cluster);
}

fn policy(cluster: &Cluster) -> Value {
    let status: Value = serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap();
    status["actors"][0]["policy"].clone()
}

#[test]
fn an_admin_alone_sets_the_policy_of_a_running_node() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let address = cluster.member("node-0").peer;
    let ask = |identity: &Identity, name: &str| {
        let visitor = visitor(&cluster, identity);
        let connection = visitor.dial(address, Role::Node).unwrap();
        visitor.ask(&connection, &PeerRequest::SetPolicy(name.to_owned())).unwrap()
    };
    let admin = Identity::new(Role::Admin, "me");
    for role in [Role::Node, Role::Coordinator] {
        let refused = ask(&Identity::new(role, "other"), "sieve");
        assert!(matches!(refused, PeerResponse::Refused(_)), "{refused:?}");
    }
    assert!(matches!(ask(&admin, "random"), PeerResponse::Refused(text) if text.contains("`random`")));
    assert_eq!(policy(&cluster), "lru");
    assert_eq!(ask(&admin, "sieve"), PeerResponse::Done);
    assert_eq!(policy(&cluster), "sieve");
}

#[test]
fn an_admin_pins_a_prompt_and_the_audit_log_says_who_did() {
    let cluster = super::drain::cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'a', 5);
    engine.put(&hashes);
    let admin = visitor(&cluster, &Identity::new(Role::Admin, "me"));
    let connection = admin.dial(cluster.member("node-0").peer, Role::Node).unwrap();
    let fingerprint = engine.namespace.fingerprint();
    let hashes = [hashes, prompt(b'z', 1)].concat();
    let ask = |command| admin.ask(&connection, &PeerRequest::Pin(Box::new(command))).unwrap();
    let start = PinCommand::Start(PinStart { fingerprint, hashes, duration_ms: 60_000 });
    let PeerResponse::Pinned(pins) = ask(start) else { panic!("no pin") };
    assert_eq!((pins.len(), pins[0].device, pins[0].chunks), (1, 0, 5), "the first five are there");
    let pinned = || {
        let status: Value = serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap();
        status["actors"][0]["pins"].clone()
    };
    assert_eq!(pinned(), 1);
    let end = PinCommand::End(0, pins[0].pin);
    assert_eq!(ask(end.clone()), PeerResponse::Done);
    assert!(matches!(ask(end), PeerResponse::Refused(_)), "it has ended");
    assert_eq!(pinned(), 0);
    wait::until("the audit log has both", || {
        let text = std::fs::read_to_string(cluster.dir().join("node-0.audit")).ok()?;
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let has = |action: &str, what: &str| {
            lines.iter().any(|line| {
                line["action"] == action
                    && line["by"] == "admin me"
                    && line["what"].as_str().unwrap().contains(what)
            })
        };
        (has("pin", "6 chunks for 60000 ms") && has("unpin", "of device 0")).then_some(())
    });
}

#[test]
fn a_node_speaks_for_no_other_node() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let liar = visitor(&cluster, &Identity::new(Role::Node, "node-2"));
    let connection = liar.dial(cluster.member("node-0").peer, Role::Node).unwrap();
    let holder = Holder { node: cluster.member("node-1").number, device: 0 };
    let announce = PeerRequest::Announce(vec![announcement(&cluster, holder)]);
    let answer = liar.ask(&connection, &announce).unwrap();
    assert!(matches!(answer, PeerResponse::Refused(_)), "{answer:?}");
    assert_eq!(node_rejections(&cluster, "not_allowed"), 1.0);
    nothing_happened(&cluster);
}

#[test]
fn only_nodes_become_members() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    for identity in [Identity::engine("default", "node-2"), Identity::new(Role::Admin, "node-2")] {
        let before = coordinator_rejections(&cluster);
        let visitor = visitor(&cluster, &identity);
        let connection = visitor.dial(coordinator_address(&cluster), Role::Coordinator).unwrap();
        let join = Join {
            incarnation: u64::MAX / 2,
            epoch: Epoch::default(),
            peer: ([127, 0, 0, 1], 9).into(),
            http: ([127, 0, 0, 1], 9).into(),
            devices: 1,
            weight: 1,
        };
        let answer = visitor.tell_coordinator(&connection, &FollowerMessage::Join(join)).unwrap();
        assert!(!matches!(answer, Some(CoordinatorMessage::Joined(_))), "{identity}: {answer:?}");
        wait::until("it is counted", || (coordinator_rejections(&cluster) > before).then_some(()));
    }
    nothing_happened(&cluster);
}

#[test]
fn garbage_on_the_ports_disturbs_nobody() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for address in [cluster.member("node-0").peer, coordinator_address(&cluster)] {
        for _ in 0..500 {
            let length = random.usize(1..2_000);
            let mut bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
            // Half of the packets look like the first packet of a connection: a long header, version 1.
            if random.bool() && length >= 1_200 {
                bytes[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
            }
            socket.send_to(&bytes, address).unwrap();
        }
    }
    nothing_happened(&cluster);
}

#[test]
fn garbage_on_a_stream_is_counted_and_ends_that_stream_alone() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let node = visitor(&cluster, &Identity::new(Role::Node, "node-2"));
    let connection = node.dial(cluster.member("node-0").peer, Role::Node).unwrap();
    let garbage: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[255, 255, 255, 127, 0, 0, 0, 0],
        &[64, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3],
        &[8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ];
    for bytes in garbage {
        assert_eq!(node.send_bytes(&connection, bytes).unwrap(), 0);
    }
    let counted =
        || ["malformed", "too_long"].map(|reason| node_rejections(&cluster, reason)).iter().sum::<f64>();
    wait::until("all are counted", || (counted() == 4.0).then_some(()));
    assert_eq!(node.ask(&connection, &PeerRequest::Ping).unwrap(), PeerResponse::Done);

    let before = coordinator_rejections(&cluster);
    for bytes in garbage {
        let connection = node.dial(coordinator_address(&cluster), Role::Coordinator).unwrap();
        assert_eq!(node.send_bytes(&connection, bytes).unwrap_or_default(), 0);
    }
    wait::until("all are counted", || (coordinator_rejections(&cluster) - before == 4.0).then_some(()));
    nothing_happened(&cluster);
}

#[test]
fn a_fetch_for_a_device_or_namespace_that_is_not_there_holds_nothing() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let peer = visitor(&cluster, &Identity::new(Role::Node, "node-2"));
    let connection = peer.dial(cluster.member("node-0").peer, Role::Node).unwrap();
    let unknown = larder_protocol::Fingerprint([9; 32]);
    for device in [0, 7, u16::MAX] {
        for (count, block_bytes) in [(2_u8, vec![1, 2, 3]), (1, vec![1, 2, u64::MAX])] {
            let chunks = Chunks { device, fingerprint: unknown, hashes: prompt(b'a', count) };
            let fetch = PeerRequest::Fetch(Fetch { chunks, block_bytes, class: Class::Decode });
            let not_held = vec![larder_protocol::peer::FetchedChunk::NotHeld; usize::from(count)];
            assert_eq!(peer.ask(&connection, &fetch).unwrap(), PeerResponse::Fetched(not_held));
        }
    }
    nothing_happened(&cluster);
}

/// A member announces chunks that it does not have and behaves as `manners` says: its chunks are found, cannot be read, are
/// counted, and can be computed as if they had never been announced. Returns the tokens that the engine finds after the failed
/// read and before it computes the chunks.
fn comes_to_nothing(manners: Manners, outcome: &str) -> u64 {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let node = cluster.node(0);
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = prompt(b'x', 4);
    let chain = engine.namespace.chain(hashes.clone());
    let fingerprint = engine.namespace.fingerprint();
    let rows = (0..hashes.len()).map(|position| RowKey::new(&fingerprint, &chain.chunk(position))).collect();
    let impostor = Impostor::join(&cluster, "impostor", rows, manners).unwrap();
    assert_ne!(impostor.number(), NodeNumber(0));
    let tokens = 4 * u64::from(CHUNK_TOKENS);
    wait::until("the claim is believed", || (engine.find(&hashes, tokens + 1) == tokens).then_some(()));
    assert_eq!(engine.get(&hashes), 0, "{}", node.log());
    let counted = node.metric(&format!("larder_peer_fetches_total{{outcome=\"{outcome}\"}}"));
    assert!(counted > 0.0, "{}", node.get("/metrics").unwrap());
    assert_eq!(node.metric("larder_peer_fetches_total{outcome=\"here\"}"), 0.0);

    let found = engine.find(&hashes, tokens + 1);
    assert_eq!(engine.put(&hashes), 4, "{}", node.log());
    assert_eq!(engine.get(&hashes), 4, "{}", node.log());
    let status: Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
    let actor = &status["actors"][0];
    assert_eq!((&actor["chunks"], &actor["used_bytes"]), (&4.into(), &(4 * BLOCK_BYTES).into()), "{status}");
    found
}

#[test]
fn a_peer_that_announces_what_it_does_not_have_is_a_miss_and_its_rows_go() {
    assert_eq!(comes_to_nothing(Manners::HasNothing, "not_held"), 0);
}

#[test]
fn bytes_with_a_flipped_bit_are_a_miss() {
    comes_to_nothing(Manners::FlipsABit, "checksum");
}

#[test]
fn the_right_bytes_of_another_chunk_are_a_miss() {
    comes_to_nothing(Manners::SendsAnother, "checksum");
}

#[test]
fn blocks_that_end_early_are_a_miss() {
    comes_to_nothing(Manners::StopsHalfway, "malformed");
}

#[test]
fn blocks_of_another_size_are_a_miss() {
    comes_to_nothing(Manners::SendsTwice, "malformed");
}

#[test]
fn an_answer_that_is_no_message_is_a_miss() {
    comes_to_nothing(Manners::TalksGarbage, "malformed");
}

#[test]
fn a_peer_that_never_answers_is_a_miss_at_the_deadline() {
    comes_to_nothing(Manners::SaysNothing, "deadline");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how fast a node sends is what is tested")]
fn a_node_sends_no_faster_than_it_is_told() {
    let hashes = prompt(b'p', 100);
    let in_half_a_second = format!("send_bytes_per_second = {}\n", 2 * hashes.len() * BLOCK_BYTES);
    let cluster = Cluster::start_with(LARDER, 2, 1_000, &in_half_a_second).unwrap();
    assert_eq!(Engine::connect(&cluster.socket(1)).put(&hashes), 100);
    let reader = Engine::connect(&cluster.socket(0));
    wait::until("the first node finds it", || {
        (reader.find(&hashes, 10_000) == 100 * u64::from(CHUNK_TOKENS)).then_some(())
    });
    let start = Instant::now();
    assert_eq!(reader.get(&hashes), 100, "{}", cluster.node(0).log());
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(480), "half a second's worth of bytes came in {took:?}");
}
