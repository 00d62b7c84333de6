//! A node that says what a test tells it to.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use larder_client::SessionOptions;
use larder_ipc::Mapping;
use larder_ipc::socket::{FrameReader, FrameWriter};
use larder_protocol::HitPolicy;
use larder_protocol::PoolSpec;
use larder_protocol::checksum::{BlockKey, block_checksum, range_checksum};
use larder_protocol::limits::SESSION_VERSION;
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::session::{
    Extent, Found, Leased, Place, Prefetching, Registered, Request, Reserved, Response, Welcome,
    decode_request,
};
use larder_protocol::{Chain, ChunkHash, Fingerprint, NamespaceSpec};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The node's end of a session.
pub(crate) struct FakeNode {
    pub(crate) socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
}

/// Block sizes of the pools of [`spec`].
pub(crate) const BLOCK_BYTES: [u64; 2] = [300, 100];

/// The slices that the tests register.
pub(crate) const SLICES: [u16; 2] = [0, 1];

/// Bytes of a chunk's room in the window: two slices of 320 and 128 bytes.
pub(crate) const ROOM_BYTES: u64 = 896;

pub(crate) const FINGERPRINT: Fingerprint = Fingerprint([5; 32]);

/// Runs `script` as the node of a session; returns the client's end. Join the thread to see the script's failed assertions.
pub(crate) fn node<T: Send + 'static>(
    script: impl FnOnce(FakeNode) -> T + Send + 'static,
) -> (UnixStream, JoinHandle<T>) {
    let (client, socket) = UnixStream::pair().unwrap();
    let node = FakeNode::on(socket);
    (client, thread::spawn(move || script(node)))
}

pub(crate) fn options() -> SessionOptions {
    SessionOptions { window_bytes: 2_000, ..SessionOptions::default() }
}

pub(crate) fn spec() -> NamespaceSpec {
    let pool =
        |name: &str, layer_bytes| PoolSpec { name: name.into(), layers: 1, layer_bytes, hit: HitPolicy::All };
    NamespaceSpec {
        model: "m".into(),
        revision: String::new(),
        kv_dtype: "bfloat16".into(),
        layout: "NHD".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: 16,
        engine_block_tokens: 16,
        tensor_parallel: 2,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 2,
        pools: vec![pool("kv", BLOCK_BYTES[0]), pool("state", BLOCK_BYTES[1])],
        flat: false,
    }
}

/// A chain of `chunks` chunks in the namespace that the fake node registers.
pub(crate) fn chain(chunks: u8) -> Chain {
    Chain::from_root(FINGERPRINT.root(), (0..chunks).map(|i| ChunkHash([i; 32])).collect())
}

pub(crate) fn memory_file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let mut file =
        File::from(memfd_create("larder-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    file.write_all(bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

pub(crate) fn sealed(bytes: &[u8]) -> OwnedFd {
    memory_file(bytes, SealFlags::SHRINK | SealFlags::GROW)
}

/// `bytes` bytes that differ by `seed` and position.
pub(crate) fn pattern(seed: usize, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i as usize * 7 + seed * 31) as u8).collect()
}

/// The checksum of block `i` of [`chain`], counted over all chunks, slices and pools, whose bytes are `pattern(i, _)`.
pub(crate) fn checksum(i: usize) -> u64 {
    let (slice, pool) = (SLICES[i / 2 % 2], (i % 2) as u8);
    let key = BlockKey { fingerprint: FINGERPRINT, hash: ChunkHash([(i / 4) as u8; 32]), slice, pool };
    block_checksum(&key, &[range_checksum(&pattern(i, BLOCK_BYTES[i % 2]))])
}

/// Where each block of `chunks` chunks stands in an extent, one behind the other, and the extent's bytes: block `i` has
/// `pattern(i, _)`.
pub(crate) fn arena(extent: u32, chunks: usize) -> (Vec<Place>, Vec<u8>) {
    let (mut places, mut memory) = (Vec::new(), Vec::new());
    for i in 0..chunks * 4 {
        places.push(Place { extent, offset: memory.len() as u64 });
        memory.extend(pattern(i, BLOCK_BYTES[i % 2]));
    }
    (places, memory)
}

/// The answer to a lease of `chunks` chunks in a new extent, with the extent's memory.
pub(crate) fn leased(lease: u64, extent: u32, chunks: usize) -> (Response, Vec<OwnedFd>) {
    let (places, memory) = arena(extent, chunks);
    let extents = vec![Extent { extent, bytes: memory.len() as u64 }];
    let checksums = (0..chunks * 4).map(checksum).collect();
    let leased = Leased { lease, chunks: chunks as u32, places, checksums, extents };
    (Response::Leased(leased), vec![sealed(&memory)])
}

pub(crate) fn prefetching(ticket: u64) -> Response {
    let Response::Found(found) = found(16, None) else { unreachable!("found is found") };
    Response::Prefetching(Prefetching { ticket, found, tokens: 16, tokens_to_recompute: 0 })
}

pub(crate) fn reserved(reservation: u64, chunks: impl IntoIterator<Item = u32>) -> Response {
    let chunks = chunks.into_iter().collect();
    let (places, extents) = (Vec::new(), Vec::new());
    Response::Reserved(Reserved {
        reservation,
        chunks,
        pools: Vec::new(),
        places,
        deadline_ms: 5_000,
        extents,
    })
}

pub(crate) fn found(tokens: u64, pin: Option<u64>) -> Response {
    Response::Found(Found { tokens, spans: Vec::new(), pin })
}

impl FakeNode {
    /// The next request and its number; `None` at the end of the stream.
    pub(crate) fn next(&mut self) -> Option<(u64, Request)> {
        loop {
            if let Some(frame) = self.reader.next_frame().unwrap() {
                assert!(frame.descriptors.is_empty());
                return Some((frame.header.request, decode_request(frame.payload).unwrap()));
            }
            // A client that closes with answers unread resets the connection.
            if self.reader.receive(self.socket.as_fd()).unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// How many more requests have come by now.
    pub(crate) fn count_now(&mut self) -> usize {
        let mut requests = 0;
        loop {
            while self.reader.next_frame().unwrap().is_some() {
                requests += 1;
            }
            if self.reader.receive_now(self.socket.as_fd()).is_err() {
                return requests;
            }
        }
    }

    /// The number of the next request, which must be `request`.
    pub(crate) fn expect(&mut self, request: &Request) -> u64 {
        let (number, found) = self.next().unwrap();
        assert_eq!(found, *request);
        number
    }

    pub(crate) fn answer(&mut self, number: u64, response: &Response, descriptors: Vec<OwnedFd>) {
        self.writer.push_response(number, response, descriptors).unwrap();
        assert!(self.writer.flush(self.socket.as_fd()).unwrap());
    }

    /// Answers the next request.
    pub(crate) fn answer_next(&mut self, response: &Response, descriptors: Vec<OwnedFd>) -> Request {
        let (number, request) = self.next().unwrap();
        self.answer(number, response, descriptors);
        request
    }

    /// The node's end of this connection.
    pub(crate) fn on(socket: UnixStream) -> Self {
        Self { socket, reader: FrameReader::new(), writer: FrameWriter::new() }
    }

    /// Opens a session of this version without a window.
    pub(crate) fn welcome_to(&mut self, hello: u64, version: u16) {
        let (node, tenant) = ("node-1".into(), "acme".into());
        let welcome = Welcome { version, node, tenant, device: 3, window_bytes: 0, trusted: false };
        self.answer(hello, &Response::Welcome(welcome), Vec::new());
    }

    /// Opens the session, with a write window of so many bytes; returns the node's view of the window.
    pub(crate) fn welcome(&mut self, window_bytes: usize, trusted: bool) -> Option<Mapping> {
        let window = sealed(&vec![0; window_bytes]);
        let view = Mapping::read_only(window.as_fd(), window_bytes as u64).ok();
        let welcome = Response::Welcome(Welcome {
            version: SESSION_VERSION,
            node: "node-1".into(),
            tenant: "acme".into(),
            device: 3,
            window_bytes: window_bytes as u64,
            trusted,
        });
        let descriptors = if window_bytes > 0 { vec![window] } else { Vec::new() };
        let hello = self.answer_next(&welcome, descriptors);
        assert!(matches!(hello, Request::Hello(hello) if hello.version == SESSION_VERSION));
        view
    }

    /// Opens the session and registers the namespace [`spec`] as number 7.
    pub(crate) fn open(&mut self, window_bytes: usize) -> Option<Mapping> {
        let window = self.welcome(window_bytes, false);
        self.register();
        window
    }

    pub(crate) fn register(&mut self) {
        let registered = Response::Registered(Registered {
            namespace: 7,
            fingerprint: FINGERPRINT,
            root: FINGERPRINT.root(),
        });
        let request = self.answer_next(&registered, Vec::new());
        assert!(matches!(request, Request::Register(register) if register.spec == spec()));
    }
}
