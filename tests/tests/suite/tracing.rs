//! A request is one trace, whichever processes do a part of it. Nobody waits for the collector.

use std::net::TcpListener;
use std::process::Command;

use larder_protocol::TraceContext;
use larder_tests::cluster::Cluster;
use larder_tests::collector::{Collector, SpanSeen};
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, prompt};
use larder_tests::wait;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::json;

use super::{Engine, LARDER};

/// The engine's own span, as in the header of its request.
const ENGINE_SPAN: &str = "b7ad6b7169203331";

fn traceparent(trace: u8, flags: u8) -> TraceContext {
    format!("00-0af7651916cd43dd8448eb211c8031{trace:02x}-{ENGINE_SPAN}-{flags:02x}").parse().unwrap()
}

fn trace_id(trace: u8) -> String {
    traceparent(trace, 1).to_string()[3..35].to_owned()
}

/// A cluster that sends its spans to `endpoint`, and an engine at each node. The first engine has stored a prompt that the second
/// can find.
fn cluster(endpoint: &str, sample_ratio: f64) -> (Cluster, Engine, Engine) {
    let more = format!("[tracing]\nendpoint = \"{endpoint}\"\nsample_ratio = {sample_ratio:?}\n");
    let cluster = Cluster::start_traced(LARDER, 2, &more).unwrap();
    let (writer, reader) = (Engine::connect(&cluster.socket(0)), Engine::connect(&cluster.socket(1)));
    assert_eq!(writer.put(&prompt(b'a', CHUNKS)), CHUNKS as usize);
    // A lease does not look up again what a lookup has just found. This lookup leaves out the last chunk, which has the same home
    // as the chunk before it.
    let all_but_one = u64::from(CHUNKS - 1) * u64::from(CHUNK_TOKENS);
    wait::until("the other node finds it", || {
        (reader.find(&prompt(b'a', CHUNKS - 1), all_but_one + 1) == all_but_one).then_some(())
    });
    (cluster, writer, reader)
}

/// The same engine, for a request of this trace.
fn traced(engine: &Engine, context: TraceContext) -> Engine {
    Engine { session: engine.session.traced(context), namespace: engine.namespace.clone() }
}

fn named<'a>(spans: &'a [SpanSeen], name: &str) -> Vec<&'a SpanSeen> {
    spans.iter().filter(|span| span.name == name).collect()
}

/// The only span of that name, which is a part of `parent`.
fn child<'a>(spans: &'a [SpanSeen], parent: &SpanSeen, name: &str) -> &'a SpanSeen {
    let found = named(spans, name);
    let [child] = found.as_slice() else { panic!("one `{name}` in {spans:#?}") };
    assert_eq!(child.parent, parent.id, "{name} belongs to {}", parent.name);
    assert!(child.time.0 >= parent.time.0, "{name} begins after what caused it");
    child
}

#[test]
fn a_lease_from_a_peer_is_one_tree_over_three_processes() {
    let collector = Collector::start().unwrap();
    let (cluster, _writer, reader) = cluster(&collector.endpoint(), 0.0);
    let engine = traced(&reader, traceparent(1, 1));
    assert_eq!(engine.get(&prompt(b'a', CHUNKS)), CHUNKS as usize);
    let question = json!({
        "fingerprint": fingerprint_of(&cluster), "chunk_tokens": CHUNK_TOKENS,
        "hashes": prompt(b'a', CHUNKS).iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    let url = format!("http://{}/v1/prefix", cluster.coordinator_http());
    let asked = ureq::post(url).header("traceparent", traceparent(1, 1).to_string());
    asked.content_type("application/json").send(question.to_string()).unwrap();

    let spans = collector.until("all parts of the trace", |spans| {
        let has = |name| !named(spans, name).is_empty();
        ["lease", "gather", "fetch", "serve_fetch", "prefix"].into_iter().all(has)
            && named(spans, "serve_find").len() >= named(spans, "find").len()
    });
    assert!(spans.iter().all(|span| span.trace_id == trace_id(1)), "nothing else is recorded: {spans:#?}");

    let [lease] = named(&spans, "lease")[..] else { panic!("one lease in {spans:#?}") };
    assert_eq!((lease.parent.as_str(), lease.kind), (ENGINE_SPAN, SpanKind::Server));
    assert_eq!((lease.service.as_str(), lease.instance.as_str()), ("larder-node", "node-1"));
    assert_eq!(lease.attributes["larder.chunks"], CHUNKS.to_string());
    assert_eq!(lease.attributes["larder.chunks_here"], CHUNKS.to_string());
    assert_eq!(lease.attributes["larder.outcome"], "done");
    child(&spans, lease, "find_holders");
    let gather = child(&spans, lease, "gather");
    let fetch = child(&spans, gather, "fetch");
    assert_eq!(fetch.attributes["larder.bytes"], (u64::from(CHUNKS) * BLOCK_BYTES as u64).to_string());
    let batch = child(&spans, fetch, "fetch_batch");
    assert_eq!((batch.kind, batch.attributes["larder.peer"].as_str()), (SpanKind::Client, "node-0"));
    let served = child(&spans, batch, "serve_fetch");
    assert_eq!((served.kind, served.instance.as_str()), (SpanKind::Server, "node-0"));
    assert_eq!(served.attributes["larder.bytes"], fetch.attributes["larder.bytes"]);

    let [prefix] = named(&spans, "prefix")[..] else { panic!("one question in {spans:#?}") };
    assert_eq!((prefix.parent.as_str(), prefix.service.as_str()), (ENGINE_SPAN, "larder-coordinator"));
    for find in named(&spans, "serve_find") {
        let asked = spans.iter().find(|span| span.id == find.parent && span.name == "find");
        let asked = asked.unwrap_or_else(|| panic!("who asked {find:#?}?"));
        assert_ne!(asked.instance, find.instance, "a home is asked by another process");
    }
}

/// The namespace of the stored prompt, as in a node's events.
fn fingerprint_of(cluster: &Cluster) -> String {
    let engine = Engine::connect(&cluster.socket(0));
    engine.namespace.fingerprint().0.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_a_caller_does_not_record_is_not_recorded_though_others_would_be() {
    let collector = Collector::start().unwrap();
    let (_cluster, _writer, reader) = cluster(&collector.endpoint(), 1.0);
    traced(&reader, traceparent(2, 0)).get(&prompt(b'a', CHUNKS));
    // A process's spans come in order: after this span there is none to wait for.
    traced(&reader, traceparent(3, 1)).get(&prompt(b'a', CHUNKS));
    let spans = collector.until("the recorded one", |spans| {
        spans.iter().any(|span| span.trace_id == trace_id(3) && span.name == "lease")
    });
    assert!(spans.iter().all(|span| span.trace_id != trace_id(2)), "{spans:#?}");
    let roots = named(&spans, "lookup");
    assert!(
        !roots.is_empty() && roots.iter().all(|root| root.parent.is_empty()),
        "the others begin a trace each"
    );
}

#[test]
fn a_replay_is_traced_from_the_engine_on() {
    let collector = Collector::start().unwrap();
    // A prompt that grows: each node computes a part of it, and needs the parts of the other node.
    let requests = (1..=10_u64).map(|chunks| {
        let ids: Vec<u64> = (1..=chunks + 1).collect();
        let (timestamp, tokens) = (chunks * 200, chunks * 512 + 1);
        json!({ "timestamp": timestamp, "input_length": tokens, "output_length": 1, "hash_ids": ids })
    });
    let lines: Vec<String> = requests.map(|request| request.to_string()).collect();
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    std::fs::write(&trace, lines.join("\n")).unwrap();
    let replay = Command::new(LARDER)
        .arg("replay")
        .arg(trace)
        .args(["--dev", "2", "--speed", "1", "--quiet", "--json", "--trace-endpoint"])
        .arg(collector.endpoint())
        .output()
        .unwrap();
    assert!(replay.status.success(), "{}", String::from_utf8_lossy(&replay.stderr));
    let spans = collector.until("all processes have sent theirs", |spans| {
        named(spans, "replay_request").len() == 10 && !named(spans, "serve_fetch").is_empty()
    });
    let fetched = named(&spans, "serve_fetch");
    let [served, ..] = fetched.as_slice() else { panic!("something was fetched: {spans:#?}") };
    let mut path = vec![*served];
    while let Some(parent) = spans.iter().find(|span| span.id == path.last().unwrap().parent) {
        path.push(parent);
    }
    let names: Vec<&str> = path.iter().map(|span| span.name.as_str()).collect();
    let expected = ["serve_fetch", "fetch_batch", "fetch", "gather", "lease", "replay_request"];
    assert_eq!(names, expected);
    let processes: Vec<&str> = path.iter().map(|span| span.service.as_str()).collect();
    assert_eq!((processes[0], processes[3], processes[5]), ("larder-node", "larder-node", "larder-replay"));
    assert_ne!(path[0].instance, path[3].instance);
}

#[test]
fn a_collector_that_is_not_there_costs_spans_alone() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (cluster, _writer, reader) = cluster(&format!("http://{nobody}"), 1.0);
    assert_eq!(traced(&reader, traceparent(4, 1)).get(&prompt(b'a', CHUNKS)), CHUNKS as usize);
    let failed = "larder_trace_spans_total{outcome=\"failed\"}";
    wait::until("lost spans are counted", || (cluster.node(1).metric(failed) > 0.0).then_some(()));
    assert!(cluster.node(1).log().contains("spans did not get to the collector"));
}

#[test]
fn a_collector_that_hangs_costs_spans_alone_and_the_node_stops_in_time() {
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", hanging.local_addr().unwrap());
    let (mut cluster, _writer, reader) = cluster(&endpoint, 1.0);
    let dropped = "larder_trace_spans_total{outcome=\"dropped\"}";
    wait::until("the queue is full", || {
        (0..200).for_each(|_| assert_eq!(reader.get(&prompt(b'a', 1)), 1));
        (cluster.node(1).metric(dropped) > 0.0).then_some(())
    });
    assert!(cluster.stop_last_node().unwrap().success());
}

#[test]
fn a_config_whose_collector_cannot_be_used_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("node.toml");
    std::fs::write(&config, "[tracing]\nendpoint = \"collector:4317\"\n").unwrap();
    let node = Command::new(LARDER).args(["node", "--config"]).arg(&config).output().unwrap();
    assert_eq!(node.status.code(), Some(2));
    let said = String::from_utf8_lossy(&node.stderr).into_owned();
    assert!(said.contains("collector:4317") && said.contains("4318"), "{said}");
}

/// Chunks of the prompt that is stored.
const CHUNKS: u8 = 8;
