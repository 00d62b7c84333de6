//! Larder as its users see it: whole processes, over real sockets.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic, and say what it measured")]

mod architecture;
mod cluster;
mod device_lane;
mod devices;
mod disk;
mod drain;
mod edges;
mod elections;
mod engine_lane;
mod events;
mod examples;
mod faults;
mod gpu_pages;
mod handoff;
mod hostile;
mod hosts;
mod lifecycle;
mod metrics;
mod object;
mod peers;
mod pools;
mod prefetch;
mod purge;
mod registers;
mod reload;
mod replay;
mod rotation;
mod routing;
mod soak;
mod tenants;
mod tracing;
mod verify;
mod versions;
mod words;

use larder_client::{LookupOptions, Namespace, Session, SessionOptions};
use larder_protocol::{Chain, ChunkHash};
use larder_tests::content::{BLOCK_BYTES, block, namespace};

/// The `larder` command.
const LARDER: &str = env!("CARGO_BIN_EXE_larder-under-test");

/// The `test-engine` command: an engine process that does one thing.
const ENGINE: &str = env!("CARGO_BIN_EXE_test-engine");

/// A well-behaved engine.
struct Engine {
    session: Session,
    namespace: Namespace,
}

impl Engine {
    fn connect(socket: &std::path::Path) -> Self {
        let options = SessionOptions { window_bytes: 1 << 20, ..SessionOptions::default() };
        let session = Session::connect(socket, options).wait().unwrap();
        let namespace = session.register(&namespace(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
        Self { session, namespace }
    }

    /// Stores the missing chunks. Returns their number.
    fn put(&self, hashes: &[ChunkHash]) -> usize {
        self.put_chain(&self.namespace.chain(hashes.to_vec()))
    }

    /// As [`Self::put`], for chunks that may have others before them.
    fn put_chain(&self, chain: &Chain) -> usize {
        let reservation = self.session.reserve(&self.namespace, chain, 0).wait().unwrap();
        let positions = reservation.chunks().to_vec();
        for &position in &positions {
            let mut staged = self.session.stage(&reservation, position).wait().unwrap();
            staged.copy_from(0, 0, &block(&chain.hashes[position as usize]));
            assert_eq!(self.session.commit(&reservation, vec![staged]).wait().unwrap(), 1);
        }
        positions.len()
    }

    /// Reads the cached chunks of a prompt and checks every byte. Returns the number of chunks.
    fn get(&self, hashes: &[ChunkHash]) -> usize {
        let chain = self.namespace.chain(hashes.to_vec());
        let lease = self.session.lease(&self.namespace, &chain).wait().unwrap();
        for (position, hash) in hashes.iter().enumerate().take(lease.chunks()) {
            let mut bytes = vec![0; BLOCK_BYTES];
            lease.copy_block(position, 0, &mut bytes).unwrap();
            assert!(bytes == block(hash), "wrong bytes under {hash}");
        }
        lease.chunks()
    }

    /// Tokens of a prompt that could be served.
    fn find(&self, hashes: &[ChunkHash], prompt_tokens: u64) -> u64 {
        let chain = self.namespace.chain(hashes.to_vec());
        let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
        self.session.lookup(&self.namespace, &chain, options).wait().unwrap().tokens
    }
}
