//! A message of every kind that version 1 has, each with fields that distinguish it from the others.

use larder_protocol::chain::Chain;
use larder_protocol::chunk::ChunkHash;
use larder_protocol::frame::MalformedMessage;
use larder_protocol::handoff::{AskInPlace, Follow, HandOver, InPlace, LayersSum, Writer};
use larder_protocol::lane::{
    AskCopy, CopyEnd, CopyProgress, CopyWords, IpcMemory, LoadPages, RegisterTensors, SavePages, TensorDim,
    TensorLayout, TensorMemory, TensorPlane, TensorsRegistered, Word,
};
use larder_protocol::membership::{FollowerMessage, Heartbeat, InUse, Join, Joined};
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::peer::{
    Announce, Announced, BlockLayers, Chunks, Class, Fetch, FetchedChunk, Find, FollowChunks, FollowStep,
    Followed, HeldBlock, HeldChunk, Message, PeerRequest, PeerResponse, Repair, RetryAfter, RowChange,
    RowSpan, Rows,
};
use larder_protocol::session::{
    Busy, Checked, Collect, Commit, Extent, Found, Hello, Lease, Leased, Lookup, Pin, Pinned, Place,
    Prefetching, Progress, Refusal, RefusalCode, Register, Registered, ReportDamage, Request, Reserve,
    Reserved, Response, Scarce, Span, Tier, Wait, Welcome, decode_request, decode_response, encode_request,
    encode_response,
};
use larder_protocol::table::{Epoch, Holder, Member, MemberState, NodeNumber, RowKey, RunKey, Table};
use larder_protocol::v1::CoordinatorMessage;
use larder_protocol::{Fingerprint, HitPolicy, NamespaceSpec, PoolSet, PoolSpec, TraceContext};
use rkyv::util::AlignedVec;

/// Reads bytes, and returns whether they are the expected message.
type Reads = Box<dyn Fn(&[u8]) -> bool>;

/// A message as bytes, and a check that bytes are this message.
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) is: Reads,
}

pub(crate) fn sample<T: PartialEq + 'static>(
    name: String,
    message: T,
    encode: impl Fn(&T) -> AlignedVec,
    decode: impl Fn(&[u8]) -> Result<T, MalformedMessage> + 'static,
) -> Sample {
    let bytes = encode(&message).to_vec();
    Sample { name, bytes, is: Box::new(move |bytes| decode(bytes).is_ok_and(|read| read == message)) }
}

/// Messages of one type, named by that type and their number.
pub(crate) fn messages<M: Message + PartialEq + 'static>(of: &str, messages: Vec<M>) -> Vec<Sample> {
    let named = |(number, message)| sample(format!("{of}-{number:02}"), message, M::encode, M::decode);
    (1..).zip(messages).map(named).collect()
}

/// Requests of sessions.
pub(crate) fn requests(of: &str, requests: Vec<Request>) -> Vec<Sample> {
    let encode = |message: &Request| encode_request(message, AlignedVec::new());
    let named = |(number, message)| sample(format!("{of}-{number:02}"), message, encode, decode_request);
    (1..).zip(requests).map(named).collect()
}

fn hash(byte: u8) -> ChunkHash {
    ChunkHash([byte; 32])
}

pub(crate) fn spec() -> NamespaceSpec {
    let pool = |name: &str, hit| PoolSpec { name: name.into(), layers: 2, layer_bytes: 2_048, hit };
    NamespaceSpec {
        model: "model".into(),
        revision: "revision".into(),
        kv_dtype: "bfloat16".into(),
        layout: "layout".into(),
        hash: HashAlgorithm::Engine(EngineHash { name: "sha256_cbor".into(), seed: "0".into() }),
        chunk_tokens: 256,
        engine_block_tokens: 16,
        tensor_parallel: 2,
        pipeline_parallel: 3,
        context_parallel: 1,
        slices: 6,
        pools: vec![
            pool("kv", HitPolicy::All),
            pool("window", HitPolicy::Window(3)),
            pool("state", HitPolicy::Last),
        ],
        flat: false,
    }
}

pub(crate) fn member(number: u16, state: MemberState) -> Member {
    Member {
        number: NodeNumber(number),
        name: format!("node-{number}"),
        incarnation: 1_700_000_000_000_000,
        peer: ([10, 0, 0, 1], 9_441).into(),
        http: ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 9_440).into(),
        devices: 8,
        weight: 1_024,
        state,
    }
}

/// A table of version 1.
pub(crate) fn table() -> Table {
    Table {
        epoch: Epoch { term: 3, number: 9 },
        members: vec![member(1, MemberState::Alive), member(2, MemberState::Suspect)],
        homes: (0..4_096).map(|partition| NodeNumber(partition % 2 + 1)).collect(),
    }
}

fn lookup() -> Lookup {
    Lookup {
        namespace: 1,
        chain: Chain::from_root(hash(9), vec![hash(1), hash(2)]),
        prompt_tokens: 1_000,
        skip_read: true,
        preempted: false,
        tiers: vec![Tier::Device, Tier::Host, Tier::Disk, Tier::Peer, Tier::Object],
        pin_ms: Some(5_000),
        prefill_tokens_per_second: Some(12_345.5),
    }
}

fn session_requests() -> Vec<Request> {
    let flat = Chain::flat(hash(9), vec![hash(1), hash(2), hash(3)]);
    let trace = TraceContext { trace_id: [1; 16], span_id: [2; 8], flags: 1 };
    let mut all = vec![
        Request::Hello(Hello { version: 5, client: "golden".into(), device: Some(1), window_bytes: 1 << 20 }),
        Request::Register(Register { spec: spec(), slices: vec![0, 3], block_bytes: vec![4_096; 3] }),
        Request::Lookup(lookup()),
        Request::Reserve(Reserve {
            namespace: 1,
            chain: flat.clone(),
            priority: -3,
            pools: vec![PoolSet(1), PoolSet(7), PoolSet(3)],
            attempt: 4,
        }),
        Request::Commit(Commit { reservation: 5, chunks: vec![0, 2], sources: vec![4_096, 8_192] }),
        Request::Abort(6),
        Request::Lease(Lease { namespace: 1, chain: flat.clone() }),
        Request::Release(7),
        Request::Pin(Pin { namespace: 1, chain: flat.clone(), duration_ms: 9_000 }),
        Request::Unpin(8),
        Request::Prefetch(lookup()),
        Request::Progress(9),
        Request::Collect(Collect { ticket: 10, wait: Wait::BestEffort }),
        Request::Collect(Collect { ticket: 10, wait: Wait::Complete }),
        Request::Collect(Collect { ticket: 10, wait: Wait::TimeoutMs(77) }),
        Request::Cancel(11),
        Request::HandOver(HandOver {
            reservation: 12,
            chunks: vec![1],
            pool: 2,
            from_layer: 3,
            to_layer: 4,
            sources: vec![5],
        }),
        Request::Follow(Follow {
            namespace: 1,
            chain: flat,
            writer: Some(Writer { node: "node-1".into(), device: 2 }),
            attempt: 3,
            patience_ms: 4,
        }),
        Request::AskInPlace(AskInPlace { follow: 1, chunks: 2, layers: 3, wait_ms: 4 }),
        Request::Trace(trace),
    ];
    all.extend(lane_requests());
    all
}

fn lane_requests() -> Vec<Request> {
    let words = CopyWords { after: Some(Word { word: 1, value: 2 }), then: None };
    let ipc = IpcMemory { handle: [7; 64], offset: 8, bytes: 9 };
    vec![
        Request::RegisterTensors(RegisterTensors {
            namespace: 1,
            block: 2,
            layout: TensorLayout {
                planes: vec![TensorPlane { region: 0, offset: 1, page_stride: 2 }],
                planes_per_layer: 1,
                pages: 3,
                pages_per_chunk: 4,
                dims: vec![TensorDim { count: 5, stride: 6 }],
                run_bytes: 7,
            },
            memory: vec![TensorMemory::Ipc(ipc), TensorMemory::Descriptor(10)],
        }),
        Request::LoadPages(LoadPages {
            lease: 1,
            tensors: 2,
            pages: vec![3, 4],
            first_page: 5,
            from_layer: 6,
            to_layer: 7,
            by_layer: true,
            words,
        }),
        Request::SavePages(SavePages {
            reservation: 1,
            chunks: vec![2],
            tensors: 3,
            pages: vec![4],
            from_layer: 5,
            to_layer: 6,
            words,
        }),
        Request::AskCopy(AskCopy { copy: 1, layers: 2, wait_ms: 3 }),
        Request::ForgetCopy(13),
        Request::ReportDamage(ReportDamage { namespace: 1, hash: hash(4) }),
    ]
}

fn responses() -> Vec<Response> {
    let found = Found { tokens: 512, spans: vec![Span { from: 0, to: 2, tier: Tier::Host }], pin: Some(3) };
    let leased = Leased {
        lease: 1,
        chunks: 2,
        places: vec![Place { extent: 3, offset: 4 }],
        checksums: vec![5, 6],
        extents: vec![Extent { extent: 7, bytes: 8 }],
    };
    let codes = [
        RefusalCode::Version,
        RefusalCode::Protocol,
        RefusalCode::Namespace,
        RefusalCode::Chain,
        RefusalCode::Unknown,
        RefusalCode::Place,
        RefusalCode::TooLarge,
        RefusalCode::Stopping,
        RefusalCode::Internal,
        RefusalCode::Device,
    ];
    let refused = codes.map(|code| Response::Refused(Refusal { code, message: "why".into() }));
    let scarce = [Scarce::Memory, Scarce::Claims, Scarce::Sessions, Scarce::Copies];
    let busy = scarce.map(|what| Response::Busy(Busy { what, retry_after_ms: 20 }));
    let ends = [CopyEnd::Done, CopyEnd::Refused, CopyEnd::Failed, CopyEnd::Stalled, CopyEnd::Lost];
    let ended = ends.map(|end| Response::CopyProgress(CopyProgress { layers: 3, end: Some(end) }));
    let checked = [Checked::Damaged, Checked::Right, Checked::Nothing].map(Response::Checked);
    let mut all = vec![
        Response::Welcome(Welcome {
            version: 5,
            node: "node-1".into(),
            tenant: "chat".into(),
            device: 1,
            window_bytes: 1 << 20,
            trusted: true,
        }),
        Response::Registered(Registered { namespace: 1, fingerprint: Fingerprint([5; 32]), root: hash(9) }),
        Response::Found(found.clone()),
        Response::Reserved(Reserved {
            reservation: 1,
            chunks: vec![0, 2],
            pools: vec![PoolSet(1), PoolSet(3)],
            places: vec![Place { extent: 1, offset: 2 }],
            deadline_ms: 30_000,
            extents: vec![Extent { extent: 1, bytes: 2 }],
        }),
        Response::Committed(2),
        Response::Aborted,
        Response::Leased(leased.clone()),
        Response::Pinned(Pinned { pin: 1, chunks: 2, duration_ms: 3 }),
        Response::Unpinned,
        Response::Prefetching(Prefetching { ticket: 1, found, tokens: 2, tokens_to_recompute: 3 }),
        Response::Progress(Progress { tokens_in_place: 1, tokens_expected: 2, is_done: true }),
        Response::HandedOver,
        Response::Following(4),
        Response::InPlace(InPlace {
            chunks: 1,
            layers: 2,
            is_whole: true,
            leased: Some(leased),
            sums: vec![LayersSum { chunk: 1, block: 2, from_layer: 3, to_layer: 4, checksum: 5 }],
            checksums: vec![6],
        }),
        Response::TensorsRegistered(TensorsRegistered { tensors: 1, word_bytes: 4_096 }),
        Response::Copying(5),
    ];
    all.extend(refused.into_iter().chain(busy).chain(ended).chain(checked));
    all
}

fn chunks() -> Chunks {
    Chunks { device: 1, fingerprint: Fingerprint([5; 32]), hashes: vec![hash(1), hash(2)] }
}

fn row(byte: u8) -> RowKey {
    RowKey { run: RunKey(u128::from(byte) << 120 | 7), chunk: 8 }
}

fn peer_requests() -> Vec<PeerRequest> {
    let (holder, epoch) = (Holder { node: NodeNumber(3), device: 1 }, Epoch { term: 3, number: 9 });
    let changes = vec![RowChange { row: row(1), is_held: true }, RowChange { row: row(2), is_held: false }];
    vec![
        PeerRequest::Find(Find { epoch, rows: vec![row(1), row(2)] }),
        PeerRequest::Announce(vec![Announce {
            holder,
            incarnation: 4,
            epoch,
            stream: 5,
            sequence: 6,
            digest: Some(7),
            changes,
        }]),
        PeerRequest::Repair(Repair { holder, rows: vec![row(3)] }),
        PeerRequest::Fetch(Fetch { chunks: chunks(), block_bytes: vec![4_096], class: Class::Prefetch }),
        PeerRequest::Fetch(Fetch { chunks: chunks(), block_bytes: vec![4_096], class: Class::Decode }),
        PeerRequest::Follow(FollowChunks { chunks: chunks(), order: 1, attempt: 2, patience_ms: 3 }),
        PeerRequest::Moved(chunks()),
        PeerRequest::Ping,
        PeerRequest::SetPolicy("lru".into()),
        PeerRequest::Trace(TraceContext { trace_id: [1; 16], span_id: [2; 8], flags: 1 }),
        PeerRequest::Damaged(chunks()),
    ]
}

fn peer_responses() -> Vec<PeerResponse> {
    let (holder, epoch) = (Holder { node: NodeNumber(3), device: 1 }, Epoch { term: 3, number: 9 });
    let step = |step| PeerResponse::Followed(Followed { order: 1, message: 2, chunk: 3, step });
    let held = HeldChunk {
        reads: 4,
        is_on_disk: true,
        pools: PoolSet(3),
        blocks: vec![HeldBlock { bytes: 4_096, checksum: 5 }],
    };
    let layers = BlockLayers { block: 1, offset: 2, bytes: 3, checksum: 4 };
    let retry = RetryAfter { retry_after_ms: 5 };
    vec![
        PeerResponse::Rows(Rows { epoch, spans: vec![RowSpan { from: 0, to: 2, holder }] }),
        PeerResponse::Announced(vec![
            Announced::Known(1),
            Announced::StartAnew,
            Announced::Later,
            Announced::OtherIncarnation(epoch),
        ]),
        PeerResponse::Fetched(vec![
            FetchedChunk::Held(held),
            FetchedChunk::NotHeld,
            FetchedChunk::Busy(retry),
        ]),
        step(FollowStep::Layers(layers)),
        step(FollowStep::Whole(vec![6])),
        step(FollowStep::Lost),
        PeerResponse::Done,
        PeerResponse::Busy(retry),
        PeerResponse::Refused("why".into()),
    ]
}

fn follower_messages() -> Vec<FollowerMessage> {
    let epoch = Epoch { term: 3, number: 9 };
    vec![
        FollowerMessage::Join(Join {
            incarnation: 1,
            epoch,
            peer: ([10, 0, 0, 1], 9_441).into(),
            http: ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 9_440).into(),
            devices: 8,
            weight: 1_024,
        }),
        FollowerMessage::Heartbeat(Heartbeat { epoch, silent: vec![NodeNumber(4)] }),
        FollowerMessage::Leave,
        FollowerMessage::Watch,
    ]
}

fn coordinator_messages() -> Vec<CoordinatorMessage> {
    vec![
        CoordinatorMessage::Joined(Joined { number: NodeNumber(3), heartbeat_ms: 1_000 }),
        CoordinatorMessage::Outdated(5),
        CoordinatorMessage::Removed,
        CoordinatorMessage::Table(Table { homes: vec![NodeNumber(1), NodeNumber(2)], ..table() }),
        CoordinatorMessage::Heard,
        CoordinatorMessage::InUse(InUse { address: ([10, 0, 0, 1], 1).into(), retry_after_ms: 2 }),
        CoordinatorMessage::Contested(([10, 0, 0, 1], 1).into()),
        CoordinatorMessage::Refused("why".into()),
    ]
}

/// All messages of version 1.
pub(crate) fn of_version_1() -> Vec<Sample> {
    let response = |(number, message)| {
        let encode = |message: &Response| encode_response(message, AlignedVec::new());
        sample(format!("response-{number:02}"), message, encode, decode_response)
    };
    let mut all = requests("request", session_requests());
    all.extend((1..).zip(responses()).map(response));
    all.extend(messages("peer-request", peer_requests()));
    all.extend(messages("peer-response", peer_responses()));
    all.extend(messages("follower", follower_messages()));
    all.extend(messages("coordinator-v1", coordinator_messages()));
    all
}
