//! A tenant that gives the same hashes other parents on each node, then has both nodes evict.

use larder_cli::cluster::{Addresses, NodeAddress};
use larder_cli::content;
use larder_cli::dev::TENANT;
use larder_client::{LookupOptions, Namespace, Session, SessionError, SessionOptions};
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::session::RefusalCode;
use larder_protocol::{Chain, ChunkHash, NamespaceSpec};

use super::SoakRun;
use super::engine::with_causes;
use crate::wait::now;

/// Attacks once, with the hashes of this round.
pub(super) async fn attack(run: &SoakRun, addresses: &Addresses, round: u32) -> anyhow::Result<()> {
    let mut rng = fastrand::Rng::with_seed(run.options.seed.wrapping_add(round.into()));
    let mut sessions = Vec::new();
    for node in &addresses.nodes {
        match connect(node).await {
            Ok(session) => sessions.push(session),
            Err(error) => run.tally.failed(1, || format!("{}: {}", node.name, with_causes(&error))),
        }
    }
    let mut next_id = (run.options.seed << 32) ^ (u64::from(round) << 24) ^ (1 << 63);
    for _ in 0..FAMILIES {
        // On each node the same chunks come after another head, of another length, in another order.
        let shared = ids(&mut next_id, rng.usize(4..40));
        let mut chains = Vec::new();
        for (_, namespace) in &sessions {
            let head = ids(&mut next_id, rng.usize(0..6));
            let mut tail = shared.clone();
            let turned = rng.usize(..tail.len());
            tail.rotate_left(turned);
            chains.push(namespace.chain(head.into_iter().chain(tail).collect()));
        }
        for ((session, namespace), chain) in sessions.iter().zip(&chains) {
            ask(run, "put", put(session, namespace, chain).await);
        }
        // Each chain is also requested at the other node, where its chunks have other parents.
        for (session, namespace) in &sessions {
            for chain in &chains {
                ask(run, "get", get(run, session, namespace, chain).await);
            }
        }
    }
    for (session, namespace) in &sessions {
        for _ in 0..FILLERS {
            let chain = namespace.chain(ids(&mut next_id, FILLER_CHUNKS));
            ask(run, "fill", put(session, namespace, &chain).await);
        }
    }
    Ok(())
}

async fn connect(node: &NodeAddress) -> Result<(Session, Namespace), SessionError> {
    let options =
        SessionOptions { client: "soak".into(), window_bytes: 8 << 20, ..SessionOptions::default() };
    let session = Session::connect(&node.sockets[TENANT], options).await?;
    let namespace = session.register(&spec(), &[0], &[BLOCK_BYTES as u64]).await?;
    Ok((session, namespace))
}

/// Counts a request; a chain that is refused is the tenant's own fault.
fn ask(run: &SoakRun, what: &str, result: Result<(), SessionError>) {
    run.tally.count(|counts| counts.requests += 1);
    match result {
        Ok(()) => {}
        Err(SessionError::Refused(refusal)) if refusal.code == RefusalCode::Chain => {}
        Err(error) => run.tally.failed(1, || format!("{what}: {}", with_causes(&error))),
    }
}

/// Writes the missing chunks of a chain, as long as the node has room.
async fn put(session: &Session, namespace: &Namespace, chain: &Chain) -> Result<(), SessionError> {
    let start = now();
    loop {
        let result = write(session, namespace, chain).await;
        match result {
            Err(SessionError::Busy { retry_after, .. }) if start.elapsed() < BUSY_PATIENCE => {
                tokio::time::sleep(retry_after).await;
            }
            Err(SessionError::Busy { .. }) => return Ok(()),
            result => return result,
        }
    }
}

async fn write(session: &Session, namespace: &Namespace, chain: &Chain) -> Result<(), SessionError> {
    let reservation = session.reserve(namespace, chain, 0).await?;
    let mut bytes = vec![0; BLOCK_BYTES];
    for &position in reservation.chunks() {
        let mut chunk = session.stage(&reservation, position).await?;
        content::fill(&chain.hashes[position as usize], &mut bytes);
        chunk.copy_from(0, 0, &bytes);
        session.commit(&reservation, vec![chunk]).await?;
    }
    Ok(())
}

/// Reads the cached chunks of a chain and checks them.
async fn get(
    run: &SoakRun,
    session: &Session,
    namespace: &Namespace,
    chain: &Chain,
) -> Result<(), SessionError> {
    let prompt_tokens = chain.len() as u64 * u64::from(namespace.chunk_tokens()) + 1;
    let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
    session.lookup(namespace, chain, options).await?;
    let lease = match session.lease(namespace, chain).await {
        Err(SessionError::Busy { .. }) => return Ok(()),
        lease => lease?,
    };
    let mut bytes = vec![0; BLOCK_BYTES];
    for (position, hash) in chain.hashes.iter().enumerate().take(lease.chunks()) {
        // The session's own check also reports wrong bytes.
        let is_damaged = lease.copy_block(position, 0, &mut bytes).is_err();
        let wrong = (content::differences(hash, &bytes) as u64).max(is_damaged.into());
        if wrong > 0 {
            run.tally
                .wrong(wrong, || format!("{hash} at {}, of the tenant with two parents", session.node()));
        }
    }
    run.tally.count(|counts| {
        counts.chunks_asked += chain.len() as u64;
        counts.chunks_hit += lease.chunks() as u64;
        counts.bytes_checked += (lease.chunks() * BLOCK_BYTES) as u64;
    });
    Ok(())
}

fn ids(next: &mut u64, count: usize) -> Vec<ChunkHash> {
    let first = *next;
    *next += count as u64;
    (first..*next).map(content::chunk_hash).collect()
}

fn spec() -> NamespaceSpec {
    let hash = HashAlgorithm::Engine(EngineHash { name: "soak".into(), seed: String::new() });
    NamespaceSpec { hash, ..NamespaceSpec::of_blocks("soak parents", 16, BLOCK_BYTES as u64) }
}

const BLOCK_BYTES: usize = 64 << 10;

/// Sets of hashes that get two parents.
const FAMILIES: usize = 40;

/// Chains that fill a node of 256 MiB, in parts that a reservation may have.
const FILLERS: usize = 80;
const FILLER_CHUNKS: usize = 64;

/// How long a node may be busy.
const BUSY_PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);
