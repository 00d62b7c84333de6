//! Frames of a session: a stream of bytes from an unknown process.

use std::os::fd::AsFd;

use larder_ipc::socket::{FrameReader, MAX_GREETING_BYTES};
use larder_protocol::frame::{FrameHeader, HEADER_BYTES};
use larder_protocol::handoff::{Follow, HandOver, Writer};
use larder_protocol::lane::{
    CopyWords, IpcMemory, LoadPages, RegisterTensors, TensorDim, TensorLayout, TensorMemory, TensorPlane,
    Word,
};
use larder_protocol::limits::{MAX_CHUNK_INDEX, MAX_FRAME_BYTES};
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::session::{
    Collect, Commit, Found, Hello, Lease, Leased, Lookup, Place, Refusal, RefusalCode, Register, Request,
    Reserve, Response, Span, Tier, Wait, decode_request, decode_response, encode_request, encode_response,
};
use larder_protocol::{Chain, ChunkHash, HitPolicy, NamespaceSpec, PoolRules, PoolSet, PoolSpec};
use rkyv::util::AlignedVec;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

use crate::message;

/// The whole frames that came, and whether the stream can be read on.
type Frames = (Vec<(FrameHeader, Vec<u8>)>, bool);

/// Tests the reader of frames and the messages in them.
///
/// - Through a socket, in pieces, exactly the frames in the bytes come, for a guest and for a stranger.
/// - No frame is longer than its limit.
/// - Messages have the properties of `message::hold`.
/// - A namespace that passes its check has rules that agree with each other; a chain that passes its check has chunks.
///
/// Returns whether the bytes are whole frames, each with a request or a response.
///
/// # Panics
/// Panics if a property does not hold.
pub fn session_frames(bytes: &[u8]) -> bool {
    let (frames, goes_on) = in_place(bytes, MAX_FRAME_BYTES as u32);
    assert_eq!(through_a_socket(bytes, FrameReader::new()), (frames.clone(), goes_on));
    let of_a_stranger = in_place(bytes, MAX_GREETING_BYTES);
    assert_eq!(through_a_socket(bytes, FrameReader::of_a_stranger()), of_a_stranger);

    let taken: usize = frames.iter().map(|(header, _)| HEADER_BYTES + header.padded_payload_bytes()).sum();
    let is_each_a_message = frames.iter().filter(|(_, payload)| is_message(payload)).count() == frames.len();
    goes_on && taken == bytes.len() && !frames.is_empty() && is_each_a_message
}

fn is_message(payload: &[u8]) -> bool {
    let request =
        message::hold(payload, decode_request, |request| encode_request(request, AlignedVec::new()));
    let response =
        message::hold(payload, decode_response, |response| encode_response(response, AlignedVec::new()));
    match &request {
        Some(Request::Register(Register { spec, .. })) => hold_namespace(spec),
        Some(Request::Lookup(Lookup { chain, .. }) | Request::Prefetch(Lookup { chain, .. })) => {
            hold_chain(chain)
        }
        Some(Request::Lease(Lease { chain, .. }) | Request::Reserve(Reserve { chain, .. })) => {
            hold_chain(chain)
        }
        _ => {}
    }
    request.is_some() || response.is_some()
}

fn hold_namespace(spec: &NamespaceSpec) {
    // Nodes compute a fingerprint only after the check, but this must not fail for others either.
    let fingerprint = spec.fingerprint("tenant");
    assert_ne!(fingerprint, spec.fingerprint("another"));
    if spec.check().is_ok() {
        let rules = PoolRules::new(&spec.pools);
        assert!(rules.every().has_all(rules.obligatory()));
        assert!(rules.needed(0, 1).has(0), "every chunk has the first pool");
    }
}

fn hold_chain(chain: &Chain) {
    for is_flat in [false, true] {
        if chain.check(ROOT, is_flat).is_err() {
            continue;
        }
        assert_eq!(chain.chunks().len(), chain.len());
        assert!(chain.chunks().all(|chunk| chunk.index <= MAX_CHUNK_INDEX));
        let tail = chain.tail(chain.len() / 2);
        assert!(
            chain.chunks().skip(chain.len() / 2).eq(tail.chunks()),
            "a part has the same chunks as the whole"
        );
    }
}

/// The frames in these bytes, one after the other. No descriptors are sent here.
fn in_place(bytes: &[u8], most: u32) -> Frames {
    let mut frames = Vec::new();
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = FrameHeader::decode(header) else { return (frames, false) };
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        if header.payload_bytes > most {
            return (frames, false);
        }
        let Some((payload, behind)) = behind.split_at_checked(header.padded_payload_bytes()) else { break };
        if header.descriptors > 0 {
            return (frames, false);
        }
        frames.push((header, payload[..header.payload_bytes as usize].to_vec()));
        rest = behind;
    }
    (frames, true)
}

/// The frames that a reader finds in these bytes, which come in pieces; the bytes themselves determine the size of the pieces.
fn through_a_socket(bytes: &[u8], mut reader: FrameReader) -> Frames {
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.expect("there are sockets");
    let mut frames = Vec::new();
    let piece_bytes = 1 + usize::from(bytes.first().copied().unwrap_or_default()) * 16 + bytes.len() / 64;
    for piece in bytes.chunks(piece_bytes.min(MOST_PIECE_BYTES)) {
        assert_eq!(send(&near, piece, SendFlags::DONTWAIT), Ok(piece.len()));
        let mut left = piece.len();
        while left > 0 {
            let Ok(received) = reader.receive_now(far.as_fd()) else { return (frames, false) };
            left -= received;
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => {
                        assert!(frame.payload.as_ptr().addr().is_multiple_of(16));
                        frames.push((frame.header, frame.payload.to_vec()));
                    }
                    Ok(None) => break,
                    Err(_) => return (frames, false),
                }
            }
        }
    }
    (frames, true)
}

/// Bytes that a socket takes at once.
const MOST_PIECE_BYTES: usize = 64 << 10;

const ROOT: ChunkHash = ChunkHash([9; 32]);

/// Streams of one message each, and one stream of all messages.
pub(crate) fn examples() -> Vec<Vec<u8>> {
    let requests = requests().into_iter().map(|request| encode_request(&request, AlignedVec::new()));
    let responses = responses().into_iter().map(|response| encode_response(&response, AlignedVec::new()));
    let mut streams: Vec<Vec<u8>> =
        requests.chain(responses).zip(1..).map(|(payload, number)| frame(&payload, number)).collect();
    streams.push(streams.concat());
    streams
}

fn frame(payload: &[u8], request: u64) -> Vec<u8> {
    let header = FrameHeader { payload_bytes: payload.len() as u32, descriptors: 0, request };
    let mut frame = [&header.encode(), payload].concat();
    frame.resize(HEADER_BYTES + header.padded_payload_bytes(), 0);
    frame
}

fn chain() -> Chain {
    Chain::from_root(ROOT, (1..4).map(|byte| ChunkHash([byte; 32])).collect())
}

fn namespace() -> NamespaceSpec {
    let pool = |name: &str, hit| PoolSpec { name: name.into(), layers: 4, layer_bytes: 4_096, hit };
    NamespaceSpec {
        model: "a model".into(),
        revision: "1".into(),
        kv_dtype: "bfloat16".into(),
        layout: "NHD".into(),
        hash: HashAlgorithm::Engine(EngineHash { name: "sha256_cbor".into(), seed: "0".into() }),
        chunk_tokens: 512,
        engine_block_tokens: 16,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![pool("kv", HitPolicy::All), pool("state", HitPolicy::Window(2))],
        flat: false,
    }
}

fn requests() -> Vec<Request> {
    let lookup = Lookup {
        namespace: 0,
        chain: chain(),
        prompt_tokens: 2_000,
        skip_read: false,
        preempted: false,
        tiers: vec![Tier::Host, Tier::Peer],
        pin_ms: Some(1_000),
        prefill_tokens_per_second: Some(1e4),
    };
    let plane = TensorPlane { region: 0, offset: 0, page_stride: 4_096 };
    let layout = TensorLayout {
        planes: vec![plane; 2],
        planes_per_layer: 1,
        pages: 8,
        pages_per_chunk: 2,
        dims: vec![TensorDim { count: 2, stride: 2_048 }],
        run_bytes: 1_024,
    };
    let memory = TensorMemory::Ipc(IpcMemory { handle: [3; 64], offset: 0, bytes: 1 << 16 });
    let words = CopyWords { after: Some(Word { word: 1, value: 2 }), then: None };
    vec![
        Request::Hello(Hello {
            version: 5,
            client: "a client".into(),
            device: Some(0),
            window_bytes: 1 << 20,
        }),
        Request::Register(Register { spec: namespace(), slices: vec![0], block_bytes: vec![16_384, 16_384] }),
        Request::Lookup(lookup),
        Request::Lease(Lease { namespace: 0, chain: Chain::flat(ROOT, vec![ChunkHash([4; 32])]) }),
        Request::Reserve(Reserve {
            namespace: 0,
            chain: chain(),
            priority: 1,
            pools: vec![PoolSet(1); 3],
            attempt: 0,
        }),
        Request::Commit(Commit { reservation: 1, chunks: vec![0, 1], sources: vec![0, 16_384] }),
        Request::Collect(Collect { ticket: 1, wait: Wait::TimeoutMs(50) }),
        Request::HandOver(HandOver {
            reservation: 1,
            chunks: vec![0],
            pool: 0,
            from_layer: 0,
            to_layer: 2,
            sources: vec![0],
        }),
        Request::Follow(Follow {
            namespace: 0,
            chain: chain(),
            writer: Some(Writer { node: "node-1".into(), device: 0 }),
            attempt: 1,
            patience_ms: 500,
        }),
        Request::RegisterTensors(RegisterTensors { namespace: 0, block: 0, layout, memory: vec![memory] }),
        Request::LoadPages(LoadPages {
            lease: 1,
            tensors: 0,
            pages: vec![0, 1],
            first_page: 0,
            from_layer: 0,
            to_layer: 2,
            by_layer: true,
            words,
        }),
        Request::Release(1),
    ]
}

fn responses() -> Vec<Response> {
    let span = Span { from: 0, to: 2, tier: Tier::Host };
    vec![
        Response::Found(Found { tokens: 1_024, spans: vec![span], pin: None }),
        Response::Leased(Leased {
            lease: 1,
            chunks: 2,
            places: vec![Place { extent: 0, offset: 4_096 }; 2],
            checksums: vec![5, 6],
            extents: Vec::new(),
        }),
        Response::Refused(Refusal { code: RefusalCode::Chain, message: "no".into() }),
        Response::Aborted,
    ]
}
