//! One engine computes a prompt layer by layer while another one reads it, on the same node or another:
//! `cargo run -p larder-client --example prefill_to_decode PREFILL_SOCKET DECODE_SOCKET`.
#![expect(clippy::print_stdout, reason = "it says what it found")]

use std::time::Duration;

use larder_client::{FollowOptions, Namespace, Session, SessionError, SessionOptions};
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::{Chain, HitPolicy, NamespaceSpec, PoolSpec};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sockets: Vec<_> = std::env::args_os().skip(1).collect();
    let [prefill, decode] = sockets.as_slice() else {
        return Err("usage: prefill_to_decode PREFILL_SOCKET DECODE_SOCKET".into());
    };
    let (prefill, known) = open(prefill).await?;
    let (decode, namespace) = open(decode).await?;
    let tokens: Vec<u32> = (0..1_000).collect();
    let prompt = namespace.chain_of_tokens(&tokens, Default::default());

    // Decode names the writer that it follows; prefill writes meanwhile.
    let writer = Some((prefill.node().to_owned(), prefill.device()));
    let options = FollowOptions { writer, attempt: 0, patience: PATIENCE };
    tokio::try_join!(write(&prefill, &known, &prompt), read(&decode, &namespace, &prompt, options))?;
    Ok(())
}

async fn open(socket: &std::ffi::OsStr) -> Result<(Session, Namespace), SessionError> {
    let session = Session::connect(socket, SessionOptions::default()).await?;
    let namespace = session.register(&spec(), &[0], &[u64::from(LAYERS) * LAYER_BYTES]).await?;
    Ok((session, namespace))
}

/// Hands each layer over as soon as it is computed, and commits the chunks at the end.
async fn write(session: &Session, namespace: &Namespace, prompt: &Chain) -> Result<(), SessionError> {
    let reservation = session.reserve(namespace, prompt, 0).await?;
    let positions = reservation.chunks();
    for layer in 0..LAYERS {
        let mut staged = session.stage_layers(&reservation, positions, 0, layer..layer + 1).await?;
        for chunk in 0..positions.len() {
            staged.copy_from(chunk, 0, 0, &vec![layer as u8 + 1; LAYER_BYTES as usize]);
        }
        session.hand_over(staged).await?;
    }
    session.commit_handed_over(&reservation, positions).await?;
    Ok(())
}

/// Reads each layer when it has come.
async fn read(
    session: &Session,
    namespace: &Namespace,
    prompt: &Chain,
    options: FollowOptions,
) -> Result<(), SessionError> {
    let follow = session.follow(namespace, prompt, options).await?;
    let mut kv = vec![0; LAYER_BYTES as usize];
    for layer in 0..LAYERS {
        let in_place = session.wait_for_layers(&follow, layer + 1, PATIENCE).await?;
        let Some(lease) = follow.lease() else { break };
        for position in 0..in_place.chunks as usize {
            lease.copy_range(position, 0, u64::from(layer) * LAYER_BYTES, &mut kv)?;
        }
        println!("layer {layer} of {} chunks begins with {}", in_place.chunks, kv[0]);
    }
    Ok(())
}

fn spec() -> NamespaceSpec {
    NamespaceSpec {
        model: "example/model".into(),
        revision: String::new(),
        kv_dtype: "bfloat16".into(),
        layout: "example by layer".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: 256,
        engine_block_tokens: 16,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![PoolSpec {
            name: "kv".into(),
            layers: LAYERS,
            layer_bytes: LAYER_BYTES,
            hit: HitPolicy::All,
        }],
        flat: false,
    }
}

/// Layers of each chunk.
const LAYERS: u32 = 4;

/// Bytes of one layer of one chunk.
const LAYER_BYTES: u64 = 65_536;

/// How long each engine waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);
