//! Engines whose GPU copies straight from the node's memory, on a stand-in for a GPU.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use larder_client::engine_lane::{CopyFlags, EngineTensors, LoadPages};
use larder_client::{EngineLane, LeaseGuard, Session, SessionError, SessionOptions, Verify};
use larder_device::host::{HostControl, HostDevice};
use larder_device::layout::{LayoutSpec, Plane};
use larder_device::{Device, EngineMemory, HostMemory, PagedLayout};
use larder_protocol::lane::{CopyEnd, CopyProgress, TensorsRegistered};
use larder_protocol::session::{Extent, Leased, Place, Refusal, RefusalCode, Registered, Response};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec};
use rustix::fs::{MemfdFlags, fstat, memfd_create};

use crate::closing::is_mapped;
use crate::fake_node::{
    BLOCK_BYTES, FINGERPRINT, FakeNode, SLICES, chain, node, options, pattern, sealed, spec,
};

/// A block is one page of one layer.
const PAGE_BYTES: u64 = 256;

const LONG: Duration = Duration::from_secs(60);

/// Opens a session of a namespace with one block a chunk, and grants a lease of one chunk. Returns the number of its extent's
/// memory file.
fn grant(node: &mut FakeNode) -> u64 {
    node.welcome(0, false);
    let (namespace, fingerprint, root) = (7, FINGERPRINT, FINGERPRINT.root());
    node.answer_next(&Response::Registered(Registered { namespace, fingerprint, root }), Vec::new());
    let memory = sealed(&pattern(0, PAGE_BYTES));
    let inode = fstat(&memory).unwrap().st_ino;
    let leased = Leased {
        lease: 31,
        chunks: 1,
        places: vec![Place { extent: 1, offset: 0 }],
        checksums: vec![0],
        extents: vec![Extent { extent: 1, bytes: PAGE_BYTES }],
    };
    node.answer_next(&Response::Leased(leased), vec![memory]);
    inode
}

fn one_block() -> NamespaceSpec {
    let mut spec = spec();
    (spec.tensor_parallel, spec.slices) = (1, 1);
    spec.pools.truncate(1);
    spec.pools[0].layer_bytes = PAGE_BYTES;
    spec
}

fn layout() -> PagedLayout {
    let layout = LayoutSpec {
        planes: vec![Plane { region: 0, offset: 0, page_stride: PAGE_BYTES }],
        planes_per_layer: 1,
        pages: 4,
        pages_per_chunk: 1,
        dims: Vec::new(),
        run_bytes: PAGE_BYTES,
    };
    PagedLayout::new(layout, &[4_096]).unwrap()
}

fn gpu() -> (EngineLane, EngineTensors) {
    let control = HostControl::default();
    let memory = HostMemory::allocate(4_096).unwrap();
    control.share(memory);
    let open = move || Ok(Box::new(HostDevice::new(1, control)) as Box<dyn Device>);
    let lane = EngineLane::start(4, open).unwrap();
    let tensors = lane.register(layout(), vec![EngineMemory::Own { address: 0, bytes: 4_096 }]).unwrap();
    (lane, tensors)
}

fn load(lane: &EngineLane, tensors: &EngineTensors, lease: &Arc<LeaseGuard>) {
    let load = LoadPages { block: 0, pages: vec![2], first_page: 0, layers: 0..1, by_layer: false };
    let copy = lane.load(tensors, lease, &load, CopyFlags::default()).unwrap();
    assert_eq!(copy.wait(LONG), Some(Ok(())));
}

#[test]
fn whoever_asks_behind_another_waiter_hears_too_how_a_copy_ended() {
    let (socket, node) = node(move |mut node| {
        grant(&mut node);
        let known = TensorsRegistered { tensors: 1, word_bytes: 4_096 };
        node.answer_next(&Response::TensorsRegistered(known), vec![sealed(&[0; 4_096])]);
        node.answer_next(&Response::Copying(5), Vec::new());
        let done = CopyProgress { layers: 1, end: Some(CopyEnd::Done) };
        node.answer_next(&Response::CopyProgress(done), Vec::new());
        let unknown = Refusal { code: RefusalCode::Unknown, message: "there is no copy 5".into() };
        node.answer_next(&Response::Refused(unknown), Vec::new());
    });
    let session = Session::open(socket, SessionOptions { verify: Verify::Off, ..options() }).wait().unwrap();
    let namespace = session.register(&one_block(), &[0], &[PAGE_BYTES]).wait().unwrap();
    let asked: Chain = Chain { hashes: vec![ChunkHash([0; 32])], ..chain(1) };
    let lease = session.lease(&namespace, &asked).wait().unwrap();
    let memory = EngineMemory::Ipc { handle: [0; 64], offset: 0, bytes: 4_096 };
    let tensors = session.register_tensors(&namespace, 0, &layout(), vec![memory]).wait().unwrap();
    let load = LoadPages { block: 0, pages: vec![2], first_page: 0, layers: 0..1, by_layer: false };
    let copy = session.load_pages(&tensors, &lease, &load, CopyFlags::default()).wait().unwrap();
    // A waiter has not seen the end when it makes its call.
    let [first, second] = [(); 2].map(|()| session.wait_for_copy(&copy, 1, LONG));
    assert_eq!(first.wait().unwrap().end, Some(CopyEnd::Done));
    assert_eq!(second.wait().unwrap().end, Some(CopyEnd::Done));
    node.join().unwrap();
}

#[test]
fn memory_by_too_many_descriptors_is_refused_and_the_session_goes_on() {
    let (socket, node) = node(|mut node| {
        node.open(0);
        node.answer_next(&Response::Unpinned, Vec::new());
    });
    let session = Session::open(socket, options()).wait().unwrap();
    let namespace = session.register(&spec(), &SLICES, &BLOCK_BYTES).wait().unwrap();
    let descriptor = || memfd_create("gpu", MemfdFlags::CLOEXEC).unwrap();
    let memory = (0..129).map(|_| EngineMemory::Descriptor { descriptor: descriptor(), bytes: 4_096 });
    let refused = session.register_tensors(&namespace, 0, &layout(), memory.collect()).wait();
    assert!(matches!(refused, Err(SessionError::TooManyDescriptors { found: 129 })), "{refused:?}");
    session.unpin(1).wait().unwrap();
    node.join().unwrap();
}

#[test]
fn the_end_of_a_session_unpins_its_memory_and_that_of_leases_when_they_end() {
    let lanes = [gpu(), gpu()];
    // Also waits for what the devices were asked before.
    let wait = || lanes.iter().for_each(|(lane, _)| drop(lane.device_name().unwrap()));
    for is_leased_on in [false, true] {
        let (tell, told) = mpsc::channel();
        let (socket, node) = node(move |mut node| tell.send(grant(&mut node)).unwrap());
        let unverified = SessionOptions { verify: Verify::Off, ..options() };
        let session = Session::open(socket, unverified).wait().unwrap();
        let namespace = session.register(&one_block(), &[0], &[PAGE_BYTES]).wait().unwrap();
        let asked: Chain = Chain { hashes: vec![ChunkHash([0; 32])], ..chain(1) };
        let lease = Arc::new(session.lease(&namespace, &asked).wait().unwrap());
        lanes.iter().for_each(|(lane, tensors)| load(lane, tensors, &lease));
        let memory = told.recv().unwrap();
        node.join().unwrap();
        let lease = is_leased_on.then_some(lease);
        assert!(!session.is_open());
        wait();
        assert_eq!(is_mapped(memory), is_leased_on, "a lease reads it");
        drop(lease);
        wait();
        assert!(!is_mapped(memory), "a handle of the session does not read it");
        drop(session);
    }
}
