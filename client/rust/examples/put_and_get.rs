//! Writes the KV of a prompt and reads it back: `cargo run -p larder-client --example put_and_get SOCKET`. No runtime
//! is needed.
#![expect(clippy::print_stdout, reason = "it says what it found")]

use std::path::PathBuf;

use larder_client::{LookupOptions, Session, SessionOptions};
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::{HitPolicy, NamespaceSpec, PoolSpec};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: put_and_get SOCKET")?);
    let session = Session::connect(socket, SessionOptions::default()).wait()?;
    let namespace = session.register(&spec(), &[0], &[BLOCK_BYTES]).wait()?;
    let tokens: Vec<u32> = (0..1_000).collect();
    let prompt = namespace.chain_of_tokens(&tokens, Default::default());

    // Asks how much of the prompt is cached.
    let options = LookupOptions { prompt_tokens: tokens.len() as u64, ..LookupOptions::default() };
    let found = session.lookup(&namespace, &prompt, options).wait()?;
    println!("{} of {} tokens are cached", found.tokens, tokens.len());

    // Reserves the chunks that the node lacks.
    let reservation = session.reserve(&namespace, &prompt, 0).wait()?;
    for &position in reservation.chunks() {
        let mut staged = session.stage(&reservation, position).wait()?;
        staged.copy_from(0, 0, &vec![position as u8 + 1; BLOCK_BYTES as usize]);
        session.commit(&reservation, vec![staged]).wait()?;
    }

    // Leases the longest cached prefix. It stays in place as long as the lease lives.
    let lease = session.lease(&namespace, &prompt).wait()?;
    let mut kv = vec![0; BLOCK_BYTES as usize];
    for position in 0..lease.chunks() {
        lease.copy_block(position, 0, &mut kv)?;
        println!("chunk {position} of {} begins with {}", lease.chunks(), kv[0]);
    }
    Ok(())
}

fn spec() -> NamespaceSpec {
    NamespaceSpec {
        model: "example/model".into(),
        revision: String::new(),
        kv_dtype: "bfloat16".into(),
        layout: "example".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: 256,
        engine_block_tokens: 16,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![PoolSpec { name: "kv".into(), layers: 4, layer_bytes: 65_536, hit: HitPolicy::All }],
        flat: false,
    }
}

/// Bytes of the block of one chunk: 4 layers.
const BLOCK_BYTES: u64 = 4 * 65_536;
