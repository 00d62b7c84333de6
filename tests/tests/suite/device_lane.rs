//! Engines whose GPU memory the node copies to and from, over devices of host memory and over a CUDA driver of host memory.

mod cuda;
mod faults;
mod tier;

use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use larder_client::device_lane::SavePages;
use larder_client::engine_lane::{CopyFlags, LoadPages};
use larder_client::{LookupOptions, Namespace, NodeCopy, NodeTensors, Session, SessionError, SessionOptions};
use larder_device::host::{Fault, HostControl, HostDevice};
use larder_device::layout::{Shape, VllmOrder, vllm};
use larder_device::{Device, EngineMemory, HostMemory, PagedLayout};
use larder_node::Config;
use larder_node::device_lane::Devices;
use larder_node::host::{HostFacts, PciDevice};
use larder_protocol::ChunkHash;
use larder_protocol::lane::{
    CopyEnd, CopyProgress, IpcMemory, RegisterTensors, TensorLayout, TensorMemory, TensorPlane,
};
use larder_protocol::session::{RefusalCode, Request, Response, Scarce, Tier};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, block, prompt};
use larder_tests::engine::EngineProcess;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::raw::RawSession;
use larder_tests::{server, wait};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::Value;
use tokio::sync::oneshot;

use super::gpu_pages::{GpuPages, LONG, SHAPE, layered, layout};
use super::{ENGINE, LARDER};

/// A node in this process; its two GPUs are host memory.
struct Node {
    socket: PathBuf,
    http: SocketAddr,
    /// The controls of the devices, by number.
    controls: [HostControl; 2],
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Node {
    fn start() -> Self {
        Self::with(LONG, 0)
    }

    /// A node whose copies may take as long as `deadline`.
    fn patient(deadline: Duration) -> Self {
        Self::with(deadline, 0)
    }

    /// A node with a device tier of `blocks` blocks.
    fn tiered(blocks: u64) -> Self {
        Self::with(LONG, blocks)
    }

    fn with(deadline: Duration, blocks: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = format!(
            "name = \"a\"\n{SMALL_HOST}[[gpus]]\npci = \"0000:65:00.0\"\n[[gpus]]\npci = \"0000:66:00.0\"\n{ONE_TENANT}"
        );
        let config = config.replace("{dir}", &dir.path().to_string_lossy());
        let mut facts = HostFacts::read(Path::new("/")).unwrap();
        for address in ["0000:65:00.0", "0000:66:00.0"] {
            let gpu = PciDevice { is_display: true, ..PciDevice::default() };
            facts.pci.insert(address.parse().unwrap(), gpu);
        }
        let mut limits = Config::parse(&config).unwrap().resolve(&facts).unwrap();
        for actor in &mut limits.actors {
            actor.device.copy_deadline_ms = deadline.as_millis() as u64;
            actor.device.tier_bytes = blocks * BLOCK_BYTES as u64;
        }
        let controls = [HostControl::default(), HostControl::default()];
        let (of_devices, seed) = (controls.clone(), fastrand::u64(..));
        println!("seed {seed}");
        let open = move |device: u16| {
            let control = of_devices[usize::from(device)].clone();
            Ok(Box::new(HostDevice::new(seed, control)) as Box<dyn Device>)
        };
        let (ready, is_ready) = mpsc::channel();
        let (stop, stopping) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let on_ready = move |node| ready.send(node).unwrap();
                let stop = async { _ = stopping.await };
                larder_node::run_on(Devices::stand_in(open), limits, None, on_ready, stop).await.unwrap();
            });
        });
        let ready = is_ready.recv().unwrap();
        let (socket, http) = (dir.path().join("default.sock"), ready.http);
        Self { socket, http, controls, stop: Some(stop), thread: Some(thread), _dir: dir }
    }

    fn engine(&self, device: u16) -> GpuEngine {
        GpuEngine::connect(&self.socket, device)
    }

    fn get(&self, path: &str) -> String {
        server::get(&self.http.to_string(), path).unwrap()
    }

    /// A field of the status of actor number `device`.
    fn status(&self, device: usize, field: &str) -> u64 {
        let status: Value = serde_json::from_str(&self.get("/status")).unwrap();
        status["actors"][device][field].as_u64().unwrap()
    }

    fn wait_for(&self, field: &str, value: u64) {
        wait::until(&format!("{field} = {value}"), || (self.status(0, field) == value).then_some(()));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.controls.iter().for_each(HostControl::release_calls);
        drop(self.stop.take());
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

/// An engine whose pages the node knows.
struct GpuEngine {
    session: Session,
    namespace: Namespace,
    tensors: NodeTensors,
    pages: GpuPages,
}

/// Copies that wait for no flag and raise none.
const NO_FLAGS: CopyFlags = CopyFlags { after: None, then: None };

/// Memory as an engine exports it, and as this process sees it.
fn gpu_memory(bytes: u64) -> (OwnedFd, HostMemory) {
    let file = memfd_create("gpu", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    let memory = HostMemory::map(file.as_fd(), bytes).unwrap();
    (file, memory)
}

impl GpuEngine {
    fn connect(socket: &Path, device: u16) -> Self {
        let options =
            SessionOptions { window_bytes: 1 << 20, device: Some(device), ..SessionOptions::default() };
        let session = Session::connect(socket, options).wait().unwrap();
        let namespace = session.register(&layered(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
        let (layout, bytes) = layout();
        let (descriptor, memory) = gpu_memory(bytes);
        let shared = EngineMemory::Descriptor { descriptor, bytes };
        let tensors = session.register_tensors(&namespace, 0, &layout, vec![shared]).wait().unwrap();
        Self { session, namespace, tensors, pages: GpuPages(memory) }
    }

    /// Saves and commits the chunks that are missing, all in one copy.
    fn put(&self, hashes: &[ChunkHash]) -> CopyEnd {
        let chain = self.namespace.chain(hashes.to_vec());
        let reservation = self.session.reserve(&self.namespace, &chain, 0).wait().unwrap();
        let positions = reservation.chunks().to_vec();
        positions.iter().for_each(|&position| self.compute(position, &hashes[position as usize]));
        let pages = positions.iter().flat_map(|&position| GpuPages::of(position)).collect();
        let save = SavePages { positions: positions.clone(), pages, layers: 0..SHAPE.layers };
        let copy = self.session.save_pages(&self.tensors, &reservation, &save, NO_FLAGS).wait().unwrap();
        let end = self.end(&copy);
        let committed = self.session.commit_handed_over(&reservation, &positions).wait();
        match end {
            CopyEnd::Done => assert_eq!(committed.unwrap(), positions.len() as u32),
            _ => assert!(matches!(committed, Err(SessionError::Refused(_))), "{committed:?}"),
        }
        end
    }

    /// Stores chunks through the write window, as an engine without a GPU does.
    fn put_by_window(&self, hashes: &[ChunkHash]) {
        let chain = self.namespace.chain(hashes.to_vec());
        let reservation = self.session.reserve(&self.namespace, &chain, 0).wait().unwrap();
        for &position in reservation.chunks() {
            let mut staged = self.session.stage(&reservation, position).wait().unwrap();
            staged.copy_from(0, 0, &block(&hashes[position as usize]));
            self.session.commit(&reservation, vec![staged]).wait().unwrap();
        }
    }

    /// Reads the cached chunks from the arena, and checks every byte. Returns the number of chunks.
    fn get_from_arena(&self, hashes: &[ChunkHash]) -> usize {
        let lease =
            self.session.lease(&self.namespace, &self.namespace.chain(hashes.to_vec())).wait().unwrap();
        for (position, hash) in hashes.iter().enumerate().take(lease.chunks()) {
            let mut bytes = vec![0; BLOCK_BYTES];
            lease.copy_block(position, 0, &mut bytes).unwrap();
            assert!(bytes == block(hash), "wrong bytes under {hash}");
        }
        lease.chunks()
    }

    /// Begins to load these chunks, giving the lease back at once.
    fn load(&self, hashes: &[ChunkHash], flags: CopyFlags) -> Result<NodeCopy, SessionError> {
        let lease =
            self.session.lease(&self.namespace, &self.namespace.chain(hashes.to_vec())).wait().unwrap();
        assert_eq!(lease.chunks(), hashes.len());
        self.session.load_pages(&self.tensors, &lease, &GpuPages::load(hashes.len() as u32), flags).wait()
    }

    /// The tiers in which a lookup finds these chunks.
    fn tiers(&self, hashes: &[ChunkHash]) -> Vec<(Tier, u32)> {
        self.tiers_among(hashes, Vec::new())
    }

    /// As [`Self::tiers`], with only these tiers searched.
    fn tiers_among(&self, hashes: &[ChunkHash], tiers: Vec<Tier>) -> Vec<(Tier, u32)> {
        let options = LookupOptions { prompt_tokens: 1_000, tiers, ..LookupOptions::default() };
        let chain = self.namespace.chain(hashes.to_vec());
        let found = self.session.lookup(&self.namespace, &chain, options).wait().unwrap();
        found.spans.iter().map(|span| (span.tier, span.to - span.from)).collect()
    }

    /// Loads these chunks whole, into pages that held something else, and checks every byte.
    fn load_and_check(&self, hashes: &[ChunkHash]) {
        (0..hashes.len() as u32).for_each(|position| self.compute(position, &ChunkHash([0xEE; 32])));
        assert_eq!(self.end(&self.load(hashes, NO_FLAGS).unwrap()), CopyEnd::Done);
        for (position, hash) in (0..).zip(hashes) {
            assert!(
                self.has(position, hash, 0..SHAPE.layers),
                "wrong bytes in the pages of chunk {position}"
            );
        }
    }

    fn progress(&self, copy: &NodeCopy, layers: u32, patience: Duration) -> CopyProgress {
        self.session.wait_for_copy(copy, layers, patience).wait().unwrap()
    }

    fn end(&self, copy: &NodeCopy) -> CopyEnd {
        self.progress(copy, u32::MAX, LONG).end.expect("the copy ends")
    }
}

impl Deref for GpuEngine {
    type Target = GpuPages;

    fn deref(&self) -> &GpuPages {
        &self.pages
    }
}

fn refused_as<T: std::fmt::Debug>(result: Result<T, SessionError>) -> RefusalCode {
    match result {
        Err(SessionError::Refused(refusal)) => refusal.code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_an_engine_saves_from_its_gpu_is_read_on_the_host_and_what_the_host_has_is_loaded() {
    let node = Node::start();
    let gpu = node.engine(0);
    assert_eq!(gpu.put(&prompt(b'a', 6)), CopyEnd::Done);
    assert_eq!(gpu.get_from_arena(&prompt(b'a', 6)), 6);
    let hashes = prompt(b'b', 6);
    gpu.put_by_window(&hashes);
    let copy = gpu.load(&hashes, NO_FLAGS).unwrap();
    assert_eq!(gpu.end(&copy), CopyEnd::Done);
    assert_eq!(copy.progress().layers, SHAPE.layers);
    for (position, hash) in (0..).zip(&hashes) {
        assert!(gpu.has(position, hash, 0..SHAPE.layers), "wrong bytes in the pages of chunk {position}");
    }
    let metrics = node.get("/metrics");
    for line in [
        r#"larder_device_copies_total{device="0",how="loaded"} 1"#,
        r#"larder_device_copies_total{device="0",how="saved"} 1"#,
        r#"larder_device_copied_bytes_total{device="0",direction="load"} 24576"#,
        r#"larder_device_copied_bytes_total{device="0",direction="save"} 24576"#,
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    node.wait_for("leases", 0);
    assert_eq!((node.status(0, "device_copies"), node.status(0, "quarantined_bytes")), (0, 0));
}

#[test]
fn a_part_of_a_prompts_pages_and_layers_is_loaded_and_nothing_else_is_touched() {
    let node = Node::start();
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 4);
    gpu.put_by_window(&hashes);
    let lease = gpu.session.lease(&gpu.namespace, &gpu.namespace.chain(hashes.clone())).wait().unwrap();
    // From the middle of the second chunk to the end of the third.
    let load = LoadPages {
        pages: [GpuPages::of(1), GpuPages::of(2)].concat()[1..].to_vec(),
        first_page: 3,
        layers: 1..3,
        ..GpuPages::load(1)
    };
    let copy = gpu.session.load_pages(&gpu.tensors, &lease, &load, NO_FLAGS).wait().unwrap();
    assert_eq!(gpu.end(&copy), CopyEnd::Done);
    assert!(gpu.has(2, &hashes[2], 1..3) && !gpu.has(2, &hashes[2], 0..1) && !gpu.has(2, &hashes[2], 3..4));
    assert!(!gpu.has(1, &hashes[1], 1..3), "its first page was not asked for");
}

#[test]
fn layers_that_are_told_can_be_used_while_the_others_never_come_and_the_caller_hears_of_it() {
    let node = Node::patient(Duration::from_millis(300));
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 3);
    gpu.put_by_window(&hashes);
    // One layer of three chunks has six pages.
    node.controls[0].fail_next(Fault::Stall { after: 7 });
    let copy = gpu.load(&hashes, CopyFlags { after: None, then: Some((5, 100)) }).unwrap();
    let progress = gpu.progress(&copy, 1, LONG);
    assert_eq!(progress, CopyProgress { layers: 1, end: None });
    for (position, hash) in (0..).zip(&hashes) {
        assert!(gpu.has(position, hash, 0..1), "layer 0 of chunk {position} is not whole");
    }
    assert_eq!(gpu.tensors.words().word(5 * 4), 101, "the engine's stream would go on with layer 0");
    assert_eq!(gpu.end(&copy), CopyEnd::Stalled);
    assert_eq!(copy.progress().layers, 1, "the layers that did not come are not told");
    node.wait_for("leases", 0);
    assert_eq!(node.status(0, "device_copies"), 1);
    assert!(node.status(0, "quarantined_bytes") >= 3 * BLOCK_BYTES as u64);
}

#[test]
fn layers_are_saved_one_by_one_and_committed_when_none_is_missing() {
    let node = Node::start();
    let gpu = node.engine(0);
    let hashes = prompt(b'a', 2);
    let reservation =
        gpu.session.reserve(&gpu.namespace, &gpu.namespace.chain(hashes.clone()), 0).wait().unwrap();
    (0..).zip(&hashes).for_each(|(position, hash)| gpu.compute(position, hash));
    let pages: Vec<u32> = (0..2).flat_map(GpuPages::of).collect();
    for layers in [2..4, 0..1, 1..2] {
        assert_eq!(
            refused_as(gpu.session.commit_handed_over(&reservation, &[0, 1]).wait()),
            RefusalCode::Place
        );
        let save = SavePages { positions: vec![0, 1], pages: pages.clone(), layers };
        let copy = gpu.session.save_pages(&gpu.tensors, &reservation, &save, NO_FLAGS).wait().unwrap();
        assert_eq!(gpu.end(&copy), CopyEnd::Done);
    }
    assert_eq!(gpu.session.commit_handed_over(&reservation, &[0, 1]).wait().unwrap(), 2);
    assert_eq!(gpu.get_from_arena(&hashes), 2);
}

#[test]
fn a_copy_begins_when_the_engines_stream_says_so_and_its_stream_waits_for_each_layer() {
    let node = Node::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let gpu = node.engine(0);
    gpu.put_by_window(&prompt(b'a', 2));
    runtime.block_on(async {
        let options = SessionOptions { device: Some(0), ..SessionOptions::default() };
        let session = Session::connect(&node.socket, options).await.unwrap();
        let namespace = session.register(&layered(), &[0], &[BLOCK_BYTES as u64]).await.unwrap();
        let (layout, bytes) = layout();
        let (descriptor, _memory) = gpu_memory(bytes);
        let shared = vec![EngineMemory::Descriptor { descriptor, bytes }];
        let tensors = session.register_tensors(&namespace, 0, &layout, shared).await.unwrap();
        let lease = session.lease(&namespace, &namespace.chain(prompt(b'a', 2))).await.unwrap();
        let flags = CopyFlags { after: Some((0, 7)), then: Some((1, u32::MAX - 1)) };
        tensors.words().set_word(4, u32::MAX - 1);
        let copy = session.load_pages(&tensors, &lease, &GpuPages::load(2), flags).await.unwrap();
        let waited = session.wait_for_copy(&copy, 1, Duration::from_millis(20)).await.unwrap();
        assert_eq!(waited, CopyProgress { layers: 0, end: None }, "the pages are still in use");
        tensors.words().set_word(0, 8);
        let ended = session.wait_for_copy(&copy, u32::MAX, LONG).await.unwrap();
        assert_eq!(ended, CopyProgress { layers: SHAPE.layers, end: Some(CopyEnd::Done) });
        assert_eq!(tensors.words().word(4), 2, "words may wrap");
    });
}

#[test]
fn what_an_engine_says_of_its_memory_and_pages_is_checked() {
    let node = Node::start();
    let gpu = node.engine(0);
    gpu.put_by_window(&prompt(b'a', 2));
    let (right, bytes) = layout();
    let register = |layout: &PagedLayout, bytes| {
        let (descriptor, _) = gpu_memory(4_096);
        let shared = EngineMemory::Descriptor { descriptor, bytes };
        gpu.session.register_tensors(&gpu.namespace, 0, layout, vec![shared]).wait()
    };
    assert_eq!(refused_as(register(&right, bytes)), RefusalCode::Device, "the file is shorter");
    assert_eq!(refused_as(register(&right, 4_096)), RefusalCode::Device, "the layout reaches beyond it");
    let (spec, regions) = vllm(VllmOrder::Lbhnc, &Shape { layers: 2, ..SHAPE });
    let other = PagedLayout::new(spec, &regions).unwrap();
    assert_eq!(refused_as(register(&other, regions[0])), RefusalCode::Namespace);
    let own = EngineMemory::Own { address: 4_096, bytes };
    let not_shared = gpu.session.register_tensors(&gpu.namespace, 0, &right, vec![own]).wait();
    assert!(matches!(not_shared, Err(SessionError::NotShared)));

    let lease = gpu.session.lease(&gpu.namespace, &gpu.namespace.chain(prompt(b'a', 2))).wait().unwrap();
    let load = |load: LoadPages, flags| gpu.session.load_pages(&gpu.tensors, &lease, &load, flags).wait();
    let all = GpuPages::load;
    for (wrong, flags) in [
        (all(3), NO_FLAGS),
        (LoadPages { first_page: u64::MAX, ..all(2) }, NO_FLAGS),
        (LoadPages { pages: vec![SHAPE.pages], ..all(1) }, NO_FLAGS),
        (LoadPages { pages: vec![], ..all(1) }, NO_FLAGS),
        (LoadPages { layers: 3..5, ..all(1) }, NO_FLAGS),
        (LoadPages { layers: 2..2, ..all(1) }, NO_FLAGS),
        (all(1), CopyFlags { after: Some((1_024, 0)), then: None }),
    ] {
        assert_eq!(refused_as(load(wrong, flags)), RefusalCode::Place);
    }
    let twice = LoadPages { pages: vec![3, 3], ..all(1) };
    assert_eq!(gpu.end(&load(twice, NO_FLAGS).unwrap()), CopyEnd::Refused);
    let foreign = node.engine(0);
    let its =
        foreign.session.lease(&foreign.namespace, &foreign.namespace.chain(prompt(b'a', 1))).wait().unwrap();
    for (session, what) in [(&gpu.session, "lease"), (&foreign.session, "memory")] {
        let not_its = session.load_pages(&gpu.tensors, &its, &all(1), NO_FLAGS).wait();
        assert!(matches!(not_its, Err(SessionError::OtherSession { what: of }) if of == what), "{not_its:?}");
    }
    node.wait_for("device_copies", 0);
    assert_eq!(gpu.end(&load(all(2), NO_FLAGS).unwrap()), CopyEnd::Done);
}

#[test]
fn descriptors_that_are_not_those_of_the_regions_are_refused_and_the_session_goes_on() {
    let node = Node::start();
    let (mut session, registered, _) = RawSession::open(&node.socket).unwrap();
    let plane = TensorPlane { region: 0, offset: 0, page_stride: BLOCK_BYTES as u64 };
    let layout = TensorLayout {
        planes: vec![plane],
        planes_per_layer: 1,
        pages: 1,
        pages_per_chunk: 1,
        dims: Vec::new(),
        run_bytes: BLOCK_BYTES as u64,
    };
    let mut register = |memory: Vec<TensorMemory>, descriptors: usize| {
        let (namespace, layout) = (registered.namespace, layout.clone());
        let request = Request::RegisterTensors(RegisterTensors { namespace, block: 0, layout, memory });
        let descriptors = (0..descriptors).map(|_| gpu_memory(BLOCK_BYTES as u64).0).collect();
        match session.ask_with(&request, descriptors).unwrap().0 {
            Response::Refused(refusal) => Some(refusal.code),
            Response::TensorsRegistered(_) => None,
            other => panic!("{other:?}"),
        }
    };
    let region = || TensorMemory::Descriptor(BLOCK_BYTES as u64);
    assert_eq!(register(vec![region()], 0), Some(RefusalCode::Place));
    assert_eq!(register(vec![region()], 2), Some(RefusalCode::Place));
    let handle = IpcMemory { handle: [7; 64], offset: 0, bytes: BLOCK_BYTES as u64 };
    assert_eq!(register(vec![TensorMemory::Ipc(handle)], 0), Some(RefusalCode::Device), "of no memory");
    assert_eq!(register(Vec::new(), 0), Some(RefusalCode::Device), "no memory at all");
    for _ in 0..64 {
        assert_eq!(register(vec![region()], 1), None);
    }
    assert_eq!(register(vec![region()], 1), Some(RefusalCode::TooLarge), "more than a session may have");
}
