//! What a chunk's bookkeeping takes at a million chunks: index, policy and directory row, as the system counts memory.
//!
//! A chunk takes 211 (`lru`) to 245 bytes (`arc`), row and policy included: it keeps its own hash only.
//!
//! Each figure is taken in a process of its own, from the pages that are resident before and after. `cargo nextest run
//! -p larder-core --test memory --no-capture` prints them all.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::env;
use std::process::Command;
use std::sync::Arc;

use larder_core::Millis;
use larder_core::directory::{BatchId, Changes, Outbox, Shard};
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_core::store::{Change, ChangeKind, Checksums, Store, StoreLimits};
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, PARTITIONS, Table};
use larder_protocol::{Chain, ChunkHash, Fingerprint};

/// Chunks that are cached.
const CHUNKS: u64 = 1_000_000;

/// Chunks of a prompt.
const PROMPT: u64 = 100;

/// Chunks that came before and were evicted, so that policies have their ghosts.
const EVICTED: u64 = CHUNKS / 2;

/// The smallest slot.
const BLOCK_BYTES: u64 = 4_096;

/// Bytes of index, policy and directory row together.
const MOST_BYTES: f64 = 250.0;

/// Says to [`one_figure`] what it is to measure.
const FIGURE: &str = "LARDER_TEST_FIGURE";

#[test]
fn index_policy_and_directory_row_take_less_than_250_bytes_a_chunk() {
    let row = measured("directory");
    println!("{row:6.1} bytes a chunk for the directory: what its holder keeps and what its home keeps");
    let index = measured("index");
    println!("{index:6.1} bytes a chunk for index and slots");
    for (policy, store) in PolicyName::ALL.into_iter().zip(stores()) {
        let total = store + row;
        println!(
            "{total:6.1} bytes a chunk in all with {policy}, of which {:5.1} are its own",
            store - index
        );
        assert!(total < MOST_BYTES, "{policy} takes {total:.1} bytes a chunk");
    }
}

/// Bytes a chunk of a store with each policy, two at a time.
fn stores() -> Vec<f64> {
    let (first, second) = PolicyName::ALL.split_at(PolicyName::ALL.len() / 2);
    let half = |policies: &[PolicyName]| -> Vec<f64> {
        policies.iter().map(|policy| measured(policy.as_str())).collect()
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| half(second));
        [half(first), second.join().unwrap()].concat()
    })
}

/// Measures what another process asks for.
#[test]
fn one_figure() {
    let Ok(figure) = env::var(FIGURE) else { return };
    let before = resident();
    let bytes = match figure.as_str() {
        "directory" => {
            let kept = directory();
            let bytes = resident() - before;
            drop(kept);
            bytes
        }
        // Nothing leaves, so that the policy keeps only its list, of 16 bytes a chunk.
        "index" => {
            let kept = store(PolicyName::Fifo, 0);
            let bytes = resident() - before;
            drop(kept);
            bytes - 16 * CHUNKS
        }
        policy => {
            let kept = store(policy.parse().unwrap(), EVICTED);
            let bytes = resident() - before;
            drop(kept);
            bytes
        }
    };
    println!("figure: {bytes}");
}

/// Bytes a chunk, as a process of its own measures them.
fn measured(figure: &str) -> f64 {
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", "one_figure", "--nocapture"]).env(FIGURE, figure).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let bytes = text.lines().find_map(|line| line.split_once("figure: "));
    let (_, bytes) = bytes.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    bytes.parse::<f64>().unwrap() / CHUNKS as f64
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1_024
}

/// A store full of prompts, after `evicted` chunks have left it.
fn store(policy: PolicyName, evicted: u64) -> Store {
    let mut store = Store::new(limits(policy));
    let session = store.open_session(TenantId(0), ProcessId(0), 0);
    let registered = store
        .register(
            session,
            "default",
            &NamespaceSpec::of_blocks("bench", 16, BLOCK_BYTES),
            &[0],
            &[BLOCK_BYTES],
        )
        .unwrap();
    store.keep_journal();
    for prompt in 0..(CHUNKS + evicted) / PROMPT {
        let chain = chain(registered.root, prompt);
        put(&mut store, session, registered.namespace, &chain);
        // One prompt in four is used again.
        if prompt.is_multiple_of(4) {
            let lease = store.lease(session, registered.namespace, &chain).unwrap();
            store.release(session, lease.lease).unwrap();
        }
        drop(store.take_changes());
    }
    assert_eq!(store.usage().cached_chunks, CHUNKS);
    store
}

fn put(store: &mut Store, session: SessionId, namespace: u32, chain: &Chain) {
    let reserved = store.reserve(session, namespace, chain, 0, Millis(0)).unwrap();
    let order = store.begin_commit(session, reserved.reservation, &reserved.chunks, &[]).unwrap();
    let sums = vec![Checksums::default(); reserved.chunks.len()];
    assert_eq!(u64::from(store.finish_commit(order.order, Some(sums))), PROMPT);
}

/// What a node keeps of its own chunks to announce them, and of as many rows that it is home to.
fn directory() -> (Outbox, Shard) {
    let (own, incarnation) = (NodeNumber(0), 1);
    let address = ([127, 0, 0, 1], 1).into();
    let member = Member {
        number: own,
        name: "node".into(),
        incarnation,
        peer: address,
        http: address,
        devices: 1,
        weight: 1,
        state: MemberState::Alive,
    };
    let homes = vec![own; usize::from(PARTITIONS)];
    let table = Arc::new(Table { epoch: Epoch { term: 1, number: 1 }, members: vec![member], homes });
    let (mut outbox, mut shard) = (Outbox::default(), Shard::new(u64::MAX));
    outbox.new_table(&table, own, Millis(0));
    shard.new_table(&table, own);
    let (fingerprint, root) = (Fingerprint([7; 32]), ChunkHash([1; 32]));
    let mut now = Millis(0);
    for prompt in 0..CHUNKS / PROMPT {
        let chain = chain(root, prompt);
        let gained = |position| Change {
            fingerprint,
            chunk: chain.chunk(position),
            kind: ChangeKind::Gained,
            evicted: None,
        };
        outbox.changed(0, &Changes::Since((0..chain.len()).map(gained).collect()), now);
        loop {
            now = now + 1_000;
            let due = outbox.due(now, |_| true);
            if due.is_empty() {
                break;
            }
            for batch in due {
                for announce in &batch.announces {
                    let answer = shard.announce(announce);
                    outbox.answered(&BatchId::new(batch.home, announce), Some(answer), now);
                }
            }
            if outbox.waiting() == 0 {
                break;
            }
        }
    }
    assert_eq!((outbox.held() as u64, shard.len()), (CHUNKS, CHUNKS));
    (outbox, shard)
}

fn limits(policy: PolicyName) -> StoreLimits {
    StoreLimits { trust_engines: true, ..StoreLimits::of_chunks(128, 64 << 20, CHUNKS, policy) }
}

fn chain(root: ChunkHash, prompt: u64) -> Chain {
    let name = |number: u64| {
        let mut rng = fastrand::Rng::with_seed(number);
        ChunkHash(std::array::from_fn(|_| rng.u8(..)))
    };
    Chain::from_root(root, (prompt * PROMPT..(prompt + 1) * PROMPT).map(name).collect())
}
