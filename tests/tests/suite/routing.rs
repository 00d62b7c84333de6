//! The requests of routers: where a prompt is cached, from its tokens alone.

use larder_client::{Session, SessionOptions};
use larder_protocol::namespace::{EngineHash, HashAlgorithm, NamespaceSpec};
use larder_protocol::sha256_cbor::{self, Lora, PromptExtra};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, namespace};
use larder_tests::wait;
use serde_json::{Value, json};

use super::{Engine, LARDER};

const BLOCK_TOKENS: u32 = 16;
const CHUNK_TOKENS: u32 = 32;

/// The namespace of an engine that hashes as vLLM does.
fn of_vllm() -> NamespaceSpec {
    let seed = format!("{}:0123456789abcdef", sha256_cbor::DEFAULT_SEED);
    NamespaceSpec {
        hash: HashAlgorithm::Engine(EngineHash { name: sha256_cbor::NAME.into(), seed }),
        engine_block_tokens: BLOCK_TOKENS,
        chunk_tokens: CHUNK_TOKENS,
        ..namespace()
    }
}

fn engine(cluster: &Cluster, node: usize) -> Engine {
    let options = SessionOptions { window_bytes: 1 << 20, ..SessionOptions::default() };
    let session = Session::connect(cluster.socket(node), options).wait().unwrap();
    let namespace = session.register(&of_vllm(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    Engine { session, namespace }
}

/// The namespace as a node describes it to routers.
fn told(cluster: &Cluster) -> Value {
    let namespaces: Value = serde_json::from_str(&cluster.node(0).get("/namespaces").unwrap()).unwrap();
    namespaces[0].clone()
}

fn ask(cluster: &Cluster, question: &Value) -> Result<Value, String> {
    let url = format!("http://{}/v1/prefix", cluster.coordinator_http());
    let request =
        ureq::post(url).content_type("application/json").config().http_status_as_error(false).build();
    let mut answer = request.send(question.to_string()).unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    serde_json::from_str(&text).map_err(|_| text)
}

#[test]
fn a_router_with_tokens_learns_which_node_holds_how_much_of_a_vllm_prompt() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (one, other) = (engine(&cluster, 0), engine(&cluster, 1));
    let tokens: Vec<u32> = (0..330).map(|i| i * 977 % 151_936).collect();
    let lora = Lora { name: "sql", path: "/adapters/sql" };
    let extra = PromptExtra { cache_salt: Some("alice"), lora: Some(lora) };
    let hash = |tokens, extra| {
        sha256_cbor::hash_prompt(sha256_cbor::DEFAULT_SEED, tokens, BLOCK_TOKENS, CHUNK_TOKENS, extra)
    };
    assert_eq!(one.put(&hash(&tokens, PromptExtra::default())), 10);
    assert_eq!(other.put(&hash(&tokens[..100], PromptExtra::default())), 3);
    assert_eq!(other.put(&hash(&tokens, extra)), 10);

    let told = told(&cluster);
    assert_eq!((&told["tenant"], &told["model"]), (&json!("default"), &json!("test")));
    assert_eq!((&told["sessions"], &told["chunks"]), (&json!(1), &json!(10)));
    let question = |hash: &Value| {
        json!({
            "fingerprint": told["fingerprint"], "chunk_tokens": told["chunk_tokens"], "tokens": tokens, "hash": hash,
        })
    };
    let held = |hash: &Value| {
        let answer = ask(&cluster, &question(hash)).unwrap();
        let of = |name: &str| {
            let nodes = answer["nodes"].as_array().unwrap();
            nodes.iter().find(|node| node["name"] == name).map_or(0, |node| node["tokens"].as_u64().unwrap())
        };
        (of("node-0"), of("node-1"))
    };
    wait::until("the directory has heard of all", || (held(&told["hash"]) == (320, 96)).then_some(()));
    let mut asked = question(&told["hash"]);
    asked["backlog_tokens"] = json!({"node-0": 500});
    let nodes = ask(&cluster, &asked).unwrap()["nodes"].clone();
    let costs =
        |node: &Value| (node["name"].clone(), node["held_tokens"].clone(), node["cost_tokens"].clone());
    let costs: Vec<_> = nodes.as_array().unwrap().iter().map(costs).collect();
    let (busy, idle) = ((json!("node-0"), json!(320), json!(510)), (json!("node-1"), json!(96), json!(32)));
    assert_eq!(costs, [busy, idle], "a transfer costs less than the backlog");
    let mut with_extra = told["hash"].clone();
    with_extra["cache_salt"] = json!("alice");
    assert_eq!(held(&with_extra), (0, 0), "a salt alone names another prompt");
    with_extra["lora"] = json!({"name": "sql", "path": "/adapters/sql"});
    wait::until("the directory has heard of this one too", || (held(&with_extra) == (0, 320)).then_some(()));
    assert_eq!(held(&json!({"name": "larder"})), (0, 0), "Larder's own hash is another");
}

#[test]
fn a_question_that_cannot_be_hashed_is_refused_with_what_is_wrong() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let refusal = |hash: Value| {
        let question = json!({
            "fingerprint": "ab".repeat(32), "chunk_tokens": 32, "tokens": [1, 2, 3], "hash": hash,
        });
        ask(&cluster, &question).unwrap_err()
    };
    let wrong = refusal(json!({"name": "sha256_cbor", "block_tokens": 24}));
    assert!(wrong.contains("hash.block_tokens"), "{wrong}");
    let wrong = refusal(json!({"name": "md5"}));
    assert!(wrong.contains("md5") && wrong.contains("sha256_cbor"), "{wrong}");
}
