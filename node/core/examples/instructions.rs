//! One operation of the hot paths, for a tool that counts instructions: `tests/instructions` runs it and says what is counted.

#![expect(clippy::print_stdout, reason = "it is a program that prints the names of its operations")]

use std::hint::black_box;

use larder_core::Millis;
use larder_core::store::ids::{ProcessId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_core::store::{FollowRequest, LookupOptions};
use larder_protocol::lease::Leased;
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::peer::{Chunks, Class, Fetch, Message as _, PeerRequest};
use larder_protocol::session::{
    Lease, Request, Response, decode_request, decode_response, encode_request, encode_response,
};
use larder_protocol::{Chain, ChunkHash, Fingerprint};
use rkyv::util::AlignedVec;

use self::filled::{Filled, PROMPT};

#[path = "../benches/shared/filled.rs"]
mod filled;

fn main() {
    let names = || OPERATIONS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
    let wanted = std::env::args().nth(1).unwrap_or_default();
    match OPERATIONS.iter().find(|(name, _)| *name == wanted) {
        Some((_, operation)) => operation(),
        None => println!("{}", names()),
    }
}

/// The instructions of this function are counted, and nothing else.
#[inline(never)]
fn counted(work: &mut dyn FnMut()) {
    for _ in 0..TIMES {
        work();
    }
}

fn lookup() {
    let mut filled = Filled::new(CHUNKS, CHUNKS);
    let mut prompts = filled.random_prompts();
    let options =
        LookupOptions { elsewhere: &[], prompt_tokens: u64::MAX, skip_read: false, tiers: &[], pin_ms: None };
    let mut chains = (0..TIMES).map(|_| prompts()).collect::<Vec<_>>().into_iter();
    counted(&mut || {
        let Some(chain) = chains.next() else { return };
        let found = filled.store.lookup(filled.session, filled.namespace, &chain, options, Millis(0));
        black_box(found.expect("the chain is right"));
    });
}

fn lease() {
    let mut filled = Filled::new(CHUNKS, CHUNKS);
    let mut prompts = filled.random_prompts();
    let mut chains = (0..TIMES).map(|_| prompts()).collect::<Vec<_>>().into_iter();
    counted(&mut || {
        let Some(chain) = chains.next() else { return };
        lease_and_release(&mut filled, &chain);
    });
}

/// As many as between the times at which the policy learns, several times over: what learning costs is shared by all.
fn lease_by_adaptive() {
    let mut filled = Filled::by(PolicyName::Adaptive, CHUNKS, CHUNKS);
    let mut prompts = filled.random_prompts();
    for _ in 0..LEARNING {
        lease_and_release(&mut filled, &prompts());
    }
    let mut chains = (0..LEARNING).map(|_| prompts()).collect::<Vec<_>>().into_iter();
    counted(&mut || {
        for chain in chains.by_ref().take((LEARNING / TIMES) as usize) {
            lease_and_release(&mut filled, &chain);
        }
    });
}

fn lease_and_release(filled: &mut Filled, chain: &Chain) {
    let leased = filled.store.lease(filled.session, filled.namespace, chain).expect("it is there");
    filled.store.release(filled.session, leased.lease).expect("it was leased");
    black_box(leased);
}

fn commit() {
    put(Filled::new(CHUNKS, u64::MAX));
}

fn commit_and_evict() {
    put(Filled::new(CHUNKS, CHUNKS));
}

fn put(mut filled: Filled) {
    let mut prompts = filled.new_prompts();
    let mut chains = (0..TIMES).map(|_| prompts()).collect::<Vec<_>>().into_iter();
    counted(&mut || {
        let Some(chain) = chains.next() else { return };
        filled.put(&chain);
    });
}

/// Many sessions follow one chunk again and again. A part of the follows ends by patience, a part by the commit; those of another
/// chunk end with their sessions. The cost of each end must not grow with the number of the others.
fn end_follows() {
    let mut filled = Filled::new(0, u64::MAX);
    let mut prompts = filled.new_prompts();
    let (prompt, other) = (prompts(), prompts());
    let spec = NamespaceSpec::of_blocks("bench", 16, 4_096);
    let sessions = (0..SESSIONS).map(|process| {
        let session = filled.store.open_session(TenantId(0), ProcessId(process), 0);
        filled.store.register(session, "default", &spec, &[0], &[4_096]).expect("it is there");
        session
    });
    let mut sessions = sessions.collect::<Vec<_>>();
    counted(&mut || {
        if sessions.is_empty() {
            return;
        }
        for (chain, patience_ms) in [(&prompt, 100), (&prompt, 1_000), (&other, 1_000)] {
            let chain = &chain.part(0, 1);
            let namespace = filled.namespace;
            let ask = FollowRequest { namespace, chain, writer: None, attempt: 0, patience_ms };
            for &session in sessions.iter().flat_map(|session| [session; 300]) {
                filled.store.follow(session, ask, Millis(0)).expect("a session may follow so much");
            }
        }
        filled.store.tick(Millis(100));
        filled.put(&prompt);
        sessions.drain(..).for_each(|session| filled.store.close_session(session));
    });
}

fn encode_lease() {
    let request = lease_request();
    counted(&mut || drop(black_box(encode_request(black_box(&request), AlignedVec::new()))));
}

fn decode_lease() {
    let bytes = encode_request(&lease_request(), AlignedVec::new());
    counted(&mut || drop(black_box(decode_request(black_box(&bytes)).expect("it is a request"))));
}

fn encode_leased() {
    let response = leased_response();
    counted(&mut || drop(black_box(encode_response(black_box(&response), AlignedVec::new()))));
}

fn decode_leased() {
    let bytes = encode_response(&leased_response(), AlignedVec::new());
    counted(&mut || drop(black_box(decode_response(black_box(&bytes)).expect("it is a response"))));
}

fn encode_fetch() {
    let request = fetch_request();
    counted(&mut || drop(black_box(black_box(&request).encode())));
}

fn decode_fetch() {
    let bytes = fetch_request().encode();
    counted(&mut || drop(black_box(PeerRequest::decode(black_box(&bytes)).expect("it is a request"))));
}

fn lease_request() -> Request {
    let filled = Filled::new(PROMPT, PROMPT);
    let chain = filled.random_prompts()();
    Request::Lease(Lease { namespace: filled.namespace, chain })
}

fn leased_response() -> Response {
    let mut filled = Filled::new(PROMPT, PROMPT);
    let chain = filled.random_prompts()();
    let leased = filled.store.lease(filled.session, filled.namespace, &chain).expect("it is there");
    Response::Leased(Leased {
        lease: leased.lease,
        chunks: leased.chunks,
        places: leased.places,
        checksums: leased.checksums,
        extents: Vec::new(),
    })
}

fn fetch_request() -> PeerRequest {
    let hashes = (0..PROMPT as u8).map(|number| ChunkHash([number; 32])).collect();
    let chunks = Chunks { device: 0, fingerprint: Fingerprint([1; 32]), hashes };
    PeerRequest::Fetch(Fetch { chunks, block_bytes: vec![4_096], class: Class::Decode })
}

/// By name; each is of 100 chunks, but `end_follows`.
const OPERATIONS: [(&str, fn()); 12] = [
    ("lookup", lookup),
    ("lease_and_release", lease),
    ("lease_by_adaptive", lease_by_adaptive),
    ("commit", commit),
    ("commit_and_evict", commit_and_evict),
    ("encode_lease", encode_lease),
    ("decode_lease", decode_lease),
    ("encode_leased", encode_leased),
    ("decode_leased", decode_leased),
    ("encode_fetch", encode_fetch),
    ("decode_fetch", decode_fetch),
    ("end_follows", end_follows),
];

/// Chunks in the store.
const CHUNKS: u64 = 10_000;

/// How often the operation is done.
const TIMES: u64 = 10;

/// Leases among which the policy learns often enough.
const LEARNING: u64 = 1_000;

/// Sessions that follow.
const SESSIONS: u32 = 32;
