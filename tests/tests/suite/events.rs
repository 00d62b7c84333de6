//! The events that a node sends to its followers.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use larder_protocol::ChunkHash;
use larder_protocol::describe::Described;
use larder_tests::content::prompt;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::{server, wait};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use zeromq::{Socket as _, SocketRecv as _, SubSocket};

use super::devices::Node;
use super::{Engine, LARDER};

/// A follower, as a router would be.
struct Follower {
    lines: std::io::Lines<BufReader<ureq::BodyReader<'static>>>,
    held: BTreeSet<String>,
    /// The sequence number that must come next; `None` before the first.
    next: Option<u64>,
}

impl Follower {
    fn new(node: &NodeProcess) -> Self {
        let response = ureq::get(format!("http://{}/events", node.http())).call().unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let lines = BufReader::new(response.into_body().into_reader()).lines();
        Self { lines, held: BTreeSet::new(), next: None }
    }

    /// Reads events until one of kind `last` was applied and `enough` accepts the held chunks.
    fn read_until(&mut self, last: &str, enough: impl Fn(&BTreeSet<String>) -> bool) {
        let mut event = String::new();
        loop {
            let line = self.lines.next().expect("the stream goes on").unwrap();
            if let Some(name) = line.strip_prefix("event: ") {
                name.clone_into(&mut event);
            } else if let Some(id) = line.strip_prefix("id: 0:") {
                let sequence = id.parse().unwrap();
                assert_eq!(self.next.unwrap_or(sequence), sequence, "no gaps");
                self.next = Some(sequence + 1);
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data: Value = serde_json::from_str(data).unwrap();
                let hash = data["hash"].as_str().unwrap_or_default().to_owned();
                match event.as_str() {
                    "held" | "admit" => _ = self.held.insert(hash),
                    "evict" => _ = self.held.remove(&hash),
                    _ => {}
                }
                if event == last && enough(&self.held) {
                    return;
                }
            }
        }
    }
}

fn texts(hashes: &[ChunkHash]) -> impl Iterator<Item = String> {
    hashes.iter().map(ToString::to_string)
}

#[test]
fn a_follower_knows_what_a_node_holds_from_its_snapshot_and_what_follows() {
    let host = format!("{SMALL_HOST}capacity_chunks = 6\npolicy = \"lru\"\n{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &host).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let [first, second] = [prompt(b'a', 4), prompt(b'b', 5)];
    engine.put(&first);
    let mut follower = Follower::new(&node);
    follower.read_until("live", |_| true);
    assert_eq!(follower.held, texts(&first).collect());
    engine.put(&second);
    let expected: BTreeSet<String> = texts(&first[..1]).chain(texts(&second)).collect();
    follower.read_until("admit", |held| *held == expected);
    let mut late = Follower::new(&node);
    late.read_until("live", |_| true);
    assert_eq!(late.held, expected, "whoever comes later gets the same as a snapshot");
}

#[test]
fn events_refuse_arguments_and_probes_and_scrapes_ignore_them() {
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}")).unwrap();
    let status = |path: &str| match ureq::get(format!("http://{}{path}?tenant=a", node.http())).call() {
        Err(ureq::Error::StatusCode(status)) => status,
        answered => answered.unwrap().status().as_u16(),
    };
    assert_eq!(["/events", "/healthz", "/readyz", "/metrics"].map(status), [400, 200, 200, 200]);
}

#[test]
fn the_followers_of_one_address_leave_places_to_others() {
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A stream and whether it has events.
    let follow = |last| {
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 0, last], 0).into()).unwrap();
            let mut stream = socket.connect(node.http().parse().unwrap()).await.unwrap();
            stream.write_all(b"GET /events HTTP/1.1\r\nhost: node\r\n\r\n").await.unwrap();
            let mut status = [0; 12];
            stream.read_exact(&mut status).await.unwrap();
            (stream, &status == b"HTTP/1.1 200")
        })
    };
    let followers: Vec<_> = (0..40).map(|_| follow(1)).collect();
    assert_eq!(followers.iter().filter(|(_, follows)| *follows).count(), 32);
    assert!(follow(2).1);
}

#[test]
fn a_stream_of_events_ends_in_order_when_its_node_stops() {
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}")).unwrap();
    let mut follower = Follower::new(&node);
    follower.read_until("live", |_| true);
    assert!(node.stop().unwrap().success());
    // A stream that is cut off ends with an error.
    follower.lines.for_each(|line| drop(line.unwrap()));
}

/// A subscriber of the events in vLLM's format.
struct Subscriber {
    runtime: tokio::runtime::Runtime,
    socket: SubSocket,
    /// The topic of all messages.
    topic: String,
    /// The held hashes with their holder's rank, by the messages so far.
    held: BTreeSet<(u16, u64)>,
    /// Number of the next message.
    next: Option<u64>,
}

impl Subscriber {
    /// Subscribes to the node that serves HTTP at `http`.
    fn connect(http: &str) -> Self {
        let status: Value = serde_json::from_str(&server::get(http, "/status").unwrap()).unwrap();
        let address = format!("tcp://{}", published_at(&status));
        let topic = format!("kv@{}@test", status["name"].as_str().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let socket = runtime.block_on(async {
            let mut socket = SubSocket::new();
            socket.connect(&address).await.unwrap();
            // Subscribes up to the model's name, as a router does that follows all models of a node.
            socket.subscribe(topic.strip_suffix("test").unwrap()).await.unwrap();
            socket
        });
        Self { runtime, socket, topic, held: BTreeSet::new(), next: None }
    }

    /// The events of the next message; `None` if none comes for a while.
    fn read(&mut self) -> Option<Vec<Value>> {
        let soon = std::time::Duration::from_millis(200);
        let socket = &mut self.socket;
        let message = self.runtime.block_on(async { tokio::time::timeout(soon, socket.recv()).await });
        let message = message.ok()?.unwrap();
        let [topic, number, payload] = &message.into_vec()[..] else { panic!("three frames") };
        assert_eq!(&topic[..], self.topic.as_bytes());
        let number = u64::from_be_bytes(number[..].try_into().unwrap());
        assert_eq!(self.next.unwrap_or(number), number, "no gaps");
        self.next = Some(number + 1);
        let (seconds, events, rank): (f64, Vec<Value>, u16) = rmp_serde::from_slice(payload).unwrap();
        assert!(seconds > 1.7e9);
        for event in &events {
            let hashes = event["block_hashes"].as_array().into_iter().flatten();
            let hashes = hashes.map(|hash| (rank, hash.as_u64().unwrap()));
            match event["type"].as_str().unwrap() {
                "BlockStored" => self.held.extend(hashes),
                "BlockRemoved" => hashes.for_each(|hash| _ = self.held.remove(&hash)),
                "AllBlocksCleared" => self.held.retain(|(of, _)| *of != rank),
                other => panic!("{other}"),
            }
        }
        Some(events)
    }
}

impl Subscriber {
    /// Reads until the first GPU holds exactly these chunks. Returns all events that were read.
    fn read_until_held(&mut self, hashes: &[ChunkHash]) -> Vec<Value> {
        let expected = held(0, hashes);
        let mut events = Vec::new();
        wait::until("it has heard of all", || {
            events.extend(self.read().into_iter().flatten());
            (self.held == expected).then_some(())
        });
        events
    }
}

/// The address on which a node publishes events, by its status.
fn published_at(status: &Value) -> &str {
    status["kv_events"].as_str().unwrap()
}

/// The expected hashes of chunks that a GPU holds.
fn held(rank: u16, hashes: &[ChunkHash]) -> BTreeSet<(u16, u64)> {
    hashes.iter().map(|hash| (rank, number(hash))).collect()
}

/// The last 64 bits of a hash.
fn number(hash: &ChunkHash) -> u64 {
    u64::from_be_bytes(hash.0[24..].try_into().unwrap())
}

#[test]
fn subscribers_of_vllm_s_kv_events_follow_a_node() {
    let kv_events = "[kv_events]\nlisten = \"127.0.0.1:0\"\n";
    let host = format!("{SMALL_HOST}capacity_chunks = 6\npolicy = \"lru\"\n{kv_events}{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &host).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let mut subscriber = Subscriber::connect(node.http());
    // A subscription takes effect after a while: earlier events do not come.
    let mut probes = (b'0'..=b'9').map(|name| prompt(name, 6));
    let events =
        std::iter::repeat_with(|| engine.put(&probes.next().unwrap())).find_map(|_| subscriber.read());
    assert!(events.is_some());
    // From here on the subscriber hears all events. Memory holds one prompt.
    engine.put(&prompt(b'z', 6));
    subscriber.read_until_held(&prompt(b'z', 6));
    let first = prompt(b'a', 6);
    engine.put(&first);
    let mut stored = subscriber.read_until_held(&first);
    stored.retain(|event| event["type"] == "BlockStored");
    let parents: Vec<&Value> = stored.iter().map(|event| &event["parent_block_hash"]).collect();
    assert_eq!(parents[0], &Value::Null);
    let told: Vec<Value> =
        stored.iter().flat_map(|event| event["block_hashes"].as_array().unwrap()).cloned().collect();
    assert_eq!(told, first.iter().map(|hash| json!(number(hash))).collect::<Vec<_>>());
    for event in &stored {
        assert_eq!((&event["block_size"], &event["medium"]), (&json!(16), &json!("CPU")));
        assert_eq!((&event["token_ids"], &event["lora_id"]), (&json!([]), &Value::Null));
    }
}

#[test]
fn the_kv_events_of_several_gpus_have_one_numbering_and_say_whose_they_are() {
    let node = Node::start(|_| "[kv_events]\nlisten = \"127.0.0.1:0\"\n".to_owned(), |_| ());
    let engines = [node.engine(0), node.engine(1)];
    let mut subscriber = Subscriber::connect(&node.http.to_string());
    let mut probes = (b'0'..=b'9').map(|name| prompt(name, 6));
    let heard = std::iter::repeat_with(|| engines[1].put(&probes.next().unwrap()));
    assert!(heard.map(|_| subscriber.read()).any(|events| events.is_some()));
    let [first, second] = [prompt(b'a', 6), prompt(b'b', 6)];
    for (one, other) in first.chunks(2).zip(second.chunks(2)) {
        // Prompts of two chunks, in turn.
        engines[0].put(one);
        engines[1].put(other);
    }
    let expected: BTreeSet<(u16, u64)> = held(0, &first).union(&held(1, &second)).copied().collect();
    // The subscriber checks that each message has the number after the one before.
    wait::until("it has heard of all", || {
        subscriber.read();
        subscriber.held.is_superset(&expected).then_some(())
    });
    assert!(subscriber.held.is_disjoint(&held(1, &first)) && subscriber.held.is_disjoint(&held(0, &second)));
}

/// A subscriber's greeting, with its command READY.
fn greeting() -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
    greeting
}

#[test]
fn a_subscriber_who_announces_a_terabyte_is_closed_and_those_who_are_silent_keep_nobody_out() {
    let kv_events = "[kv_events]\nlisten = \"127.0.0.1:0\"\n";
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{kv_events}{ONE_TENANT}")).unwrap();
    let status: Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
    let said = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(published_at(&status)).unwrap();
        socket.set_read_timeout(Some(wait::DEADLINE)).unwrap();
        socket.write_all(bytes).unwrap();
        socket
    };
    for bytes in [1_u64 << 40, u64::MAX / 2, u64::MAX] {
        let long = [&[2_u8][..], &bytes.to_be_bytes()].concat();
        for before in [Vec::new(), greeting()] {
            let mut heard = Vec::new();
            // The connection is closed, or reset if something was left unread.
            let _ = said(&[&before[..], &long, &[0; 64]].concat()).read_to_end(&mut heard);
        }
    }
    let silent: Vec<TcpStream> = (0..300).map(|_| said(b"")).collect();
    let engine = Engine::connect(&node.socket("default"));
    let mut names = b'a'..=b'z';
    wait::until("a subscriber finds a place", || {
        let mut socket = said(&greeting());
        socket.write_all(b"\0\x01\x01").ok()?;
        let mut heard = [0; 64 + 27];
        socket.read_exact(&mut heard).ok()?;
        engine.put(&prompt(names.next().unwrap(), 2));
        // The first frame of the message is its topic.
        socket.read_exact(&mut heard[..4]).ok().filter(|()| &heard[2..4] == b"kv")
    });
    drop(silent);
    assert_eq!(node.get("/healthz").unwrap(), "ok\n");
}

/// A subscriber that asks a node for messages again.
struct Asker {
    socket: TcpStream,
    node: String,
}

impl Asker {
    fn connect(node: &NodeProcess) -> Self {
        let status: Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
        let mut socket = TcpStream::connect(status["kv_events_replay"].as_str().unwrap()).unwrap();
        socket.set_read_timeout(Some(wait::DEADLINE)).unwrap();
        let mut hello = greeting();
        hello.truncate(64);
        hello.extend(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
        socket.write_all(&hello).unwrap();
        let mut theirs = [0; 64 + 30];
        socket.read_exact(&mut theirs).unwrap();
        assert!(theirs.ends_with(b"\0\0\0\x06ROUTER"));
        Self { socket, node: status["name"].as_str().unwrap().to_owned() }
    }

    /// Asks for everything from a message on, or for a snapshot. Returns numbers and events.
    fn ask(&mut self, number: i64) -> Vec<(u64, Vec<Value>)> {
        let topic = format!("kv@{}@", self.node);
        let mut request = vec![1, 0, 1, 8];
        request.extend(number.to_be_bytes());
        request.extend([0, topic.len() as u8]);
        request.extend(topic.as_bytes());
        self.socket.write_all(&request).unwrap();
        let mut found = Vec::new();
        loop {
            let frames: Vec<Vec<u8>> = (0..4).map(|_| self.frame()).collect();
            assert!(frames[0].is_empty());
            let number = i64::from_be_bytes(frames[2][..].try_into().unwrap());
            if number == -1 {
                assert!(frames[1].is_empty() && frames[3].is_empty());
                return found;
            }
            assert!(frames[1].starts_with(topic.as_bytes()));
            let (_, events, _): (f64, Vec<Value>, u16) = rmp_serde::from_slice(&frames[3]).unwrap();
            found.push((number as u64, events));
        }
    }

    fn frame(&mut self) -> Vec<u8> {
        let mut head = [0; 2];
        self.socket.read_exact(&mut head).unwrap();
        let bytes = if head[0] & 2 == 0 {
            usize::from(head[1])
        } else {
            let mut rest = [0; 7];
            self.socket.read_exact(&mut rest).unwrap();
            rest.iter().fold(usize::from(head[1]), |sum, byte| sum << 8 | usize::from(*byte))
        };
        let mut body = vec![0; bytes];
        self.socket.read_exact(&mut body).unwrap();
        body
    }
}

/// The held chunks after these events, by hash, with their tokens.
fn applied<'a>(events: impl IntoIterator<Item = &'a Value>) -> std::collections::BTreeMap<u64, Vec<Value>> {
    let mut held = std::collections::BTreeMap::new();
    for event in events {
        let hashes: Vec<u64> = event["block_hashes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|hash| hash.as_u64().unwrap())
            .collect();
        match event["type"].as_str().unwrap() {
            "BlockStored" => {
                let tokens = event["token_ids"].as_array().unwrap();
                let each = tokens.len() / hashes.len();
                for (at, hash) in hashes.iter().enumerate() {
                    held.insert(*hash, tokens[at * each..(at + 1) * each].to_vec());
                }
            }
            "BlockRemoved" => hashes.iter().for_each(|hash| _ = held.remove(hash)),
            _ => held.clear(),
        }
    }
    held
}

/// Chunks of 16 tokens, each of two engine blocks, with their tokens as the engine describes them.
fn described(hashes: &[ChunkHash]) -> Vec<Described> {
    let block = |hash: &ChunkHash| ChunkHash(hash.0.map(|byte| byte ^ 0xff));
    (0..hashes.len())
        .map(|at| Described {
            blocks: vec![block(&hashes[at]), hashes[at]],
            parent: (at > 0).then(|| hashes[at - 1]),
            tokens: (0..16).map(|token| at as u32 * 16 + token).collect(),
            lora_id: Some(1),
            lora_name: Some("adapter".into()),
            extra_keys: r#"[["adapter","salt"],["adapter"]]"#.into(),
        })
        .collect()
}

#[test]
fn events_of_chunks_that_engines_describe_stand_alone_and_can_be_asked_for_again() {
    let kv_events =
        "[kv_events]\nlisten = \"127.0.0.1:0\"\ntokens = \"local\"\nreplay_listen = \"127.0.0.1:0\"\n";
    let host = format!("{SMALL_HOST}capacity_chunks = 8\npolicy = \"lru\"\n{kv_events}{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &host).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let [first, second] = [prompt(b'a', 3), prompt(b'b', 2)];
    engine.session.describe(&engine.namespace, described(&first));
    // Chunks of this namespace have 16 tokens, so this description is not told.
    let mut short = described(&second);
    short.iter_mut().for_each(|chunk| chunk.tokens.truncate(8));
    engine.session.describe(&engine.namespace, short);
    engine.put(&first);
    engine.put(&second);
    let mut asker = Asker::connect(&node);
    // The node publishes when it has made room and knows all tokens; a snapshot shows the result.
    let contents = |asker: &mut Asker| {
        let parts = asker.ask(-2);
        let last = parts.last().map_or(0, |(number, _)| *number);
        assert!(parts.iter().all(|(number, _)| *number == last), "a snapshot is of one moment");
        (last, applied(parts.iter().flat_map(|(_, events)| events)))
    };
    let tokens =
        |at: u64, of: std::ops::Range<u64>| of.map(|token| json!(at * 16 + token)).collect::<Vec<_>>();
    let (_, held) = wait::until("all of it is told", || {
        Some(contents(&mut asker)).filter(|(_, held)| held.len() == 3 * 2)
    });
    for (at, hash) in first.iter().enumerate() {
        let other = ChunkHash(hash.0.map(|byte| byte ^ 0xff));
        assert_eq!(held[&number(&other)], tokens(at as u64, 0..8));
        assert_eq!(held[&number(hash)], tokens(at as u64, 8..16));
    }
    // Nobody has described the tokens of the second prompt. Once somebody does, its chunks are published.
    engine.session.describe(&engine.namespace, described(&second));
    let (last, held) = wait::until("the rest is described", || {
        Some(contents(&mut asker)).filter(|(_, held)| held.len() == 5 * 2)
    });
    assert!(held.values().all(|tokens| tokens.len() == 8));
    let all = asker.ask(0);
    assert!(all.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0), "no gaps");
    assert_eq!(
        applied(all.iter().filter(|(number, _)| *number <= last).flat_map(|(_, events)| events)),
        held
    );
    let event =
        all.iter().flat_map(|(_, events)| events).find(|event| event["lora_name"] == "adapter").unwrap();
    assert_eq!(
        (&event["block_size"], &event["lora_id"], &event["medium"]),
        (&json!(8), &json!(1), &json!("CPU"))
    );
    assert_eq!(
        (&event["extra_keys"], &event["ownership"]),
        (&json!([["adapter", "salt"], ["adapter"]]), &json!("larder"))
    );
    // A removed chunk is announced by all hashes of its earlier event: the snapshot and the events after it add up to the later
    // contents.
    let third = prompt(b'c', 8);
    engine.session.describe(&engine.namespace, described(&third));
    engine.put(&third);
    let (now, later) = wait::until("both prompts have gone", || {
        Some(contents(&mut asker))
            .filter(|(_, later)| later.len() == 8 * 2 && held.keys().all(|hash| !later.contains_key(hash)))
    });
    let mut followed = vec![contents_as_event(&held)];
    followed.extend(
        asker
            .ask(last as i64 + 1)
            .into_iter()
            .filter(|(number, _)| *number <= now)
            .flat_map(|(_, events)| events),
    );
    assert_eq!(applied(&followed), later);
}

/// An event that stores these chunks.
fn contents_as_event(held: &std::collections::BTreeMap<u64, Vec<Value>>) -> Value {
    let tokens: Vec<&Value> = held.values().flatten().collect();
    json!({"type": "BlockStored", "block_hashes": held.keys().collect::<Vec<_>>(), "token_ids": tokens})
}

#[test]
fn an_engine_that_describes_chunks_wrongly_loses_its_session_and_tokens_are_not_for_other_hosts() {
    let kv_events = "[kv_events]\nlisten = \"127.0.0.1:0\"\ntokens = \"local\"\n";
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{kv_events}{ONE_TENANT}")).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let mut wrong = described(&prompt(b'a', 1));
    wrong[0].tokens.pop();
    engine.session.describe(&engine.namespace, wrong);
    wait::until("the session ends", || {
        let chain = engine.namespace.chain(prompt(b'a', 1));
        engine.session.lease(&engine.namespace, &chain).wait().err()
    });
    let public = kv_events.replace("127.0.0.1", "0.0.0.0");
    let error = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{public}{ONE_TENANT}")).err().unwrap();
    assert!(
        format!("{error:#}").contains("would send tokens of prompts to other hosts, from 0.0.0.0:0"),
        "{error:#}"
    );
}
