//! A panic planted in an actor: its sessions hear of it, everybody else goes on, and no memory changes under a reader.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_client::engine_lane::{CopyFlags, LoadPages};
use larder_client::{LeaseGuard, Namespace, Session, SessionError, SessionOptions};
use larder_device::host::{HostControl, HostDevice};
use larder_device::layout::{Shape, VllmOrder, vllm};
use larder_device::{Device, EngineMemory, PagedLayout};
use larder_protocol::ChunkHash;
use larder_protocol::lane::CopyEnd;
use larder_protocol::namespace::NamespaceSpec;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::sync::oneshot;

use crate::config::Config;
use crate::device_lane::Devices;
use crate::host::HostFacts;

const BLOCK: usize = 4_096;

/// Pages of an engine: two of a chunk.
const SHAPE: Shape =
    Shape { layers: 1, pages: 0, heads: 2, tokens: 8, content_bytes: 128, pages_per_chunk: 2 };

/// A node with two actors, in this process.
struct Node {
    socket: PathBuf,
    http: std::net::SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Node {
    fn start(more: &str) -> Self {
        Self::with(Devices::cuda(), more)
    }

    fn with(devices: Devices, more: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = "name = \"a\"\n[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\n\
            extent_bytes = \"2MiB\"\n[[gpus]]\npci = \"0000:65:00.0\"\n[[gpus]]\npci = \"0000:66:00.0\"\n\
            [[tenants]]\nname = \"default\"\nsocket = \"{dir}/default.sock\"\n";
        let config = format!("{config}{more}").replace("{dir}", &dir.path().to_string_lossy());
        let mut facts = HostFacts::read(Path::new("/")).unwrap();
        for address in ["0000:65:00.0", "0000:66:00.0"] {
            let gpu = crate::host::PciDevice { is_display: true, ..Default::default() };
            facts.pci.insert(address.parse().unwrap(), gpu);
        }
        let limits = Config::parse(&config).unwrap().resolve(&facts).unwrap();
        let (ready, is_ready) = mpsc::channel();
        let (stop, stopping) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let on_ready = move |node| ready.send(node).unwrap();
                let stop = async { _ = stopping.await };
                crate::run_on(devices, limits, None, on_ready, stop).await.unwrap();
            });
        });
        let ready = is_ready.recv().unwrap();
        let socket = dir.path().join("default.sock");
        Self { socket, http: ready.http, stop: Some(stop), thread: Some(thread), _dir: dir }
    }

    fn engine(&self, device: u16) -> Engine {
        let options =
            SessionOptions { device: Some(device), window_bytes: 1 << 20, ..SessionOptions::default() };
        let session = Session::connect(&self.socket, options).wait().unwrap();
        let namespace = session.register(&spec(), &[0], &[BLOCK as u64]).wait().unwrap();
        Engine { session, namespace }
    }

    fn metric(&self, name: &str) -> f64 {
        let body = ureq::get(format!("http://{}/metrics", self.http)).call().unwrap();
        let text = body.into_body().read_to_string().unwrap();
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

struct Engine {
    session: Session,
    namespace: Namespace,
}

impl Engine {
    /// Stores chunks, as soon as there is room for them.
    fn put(&self, prompt: &[ChunkHash]) {
        let chain = self.namespace.chain(prompt.to_vec());
        let reservation = loop {
            match self.session.reserve(&self.namespace, &chain, 0).wait() {
                Ok(reservation) => break reservation,
                Err(SessionError::Busy { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        for &position in &reservation.chunks().to_vec() {
            let mut staged = self.session.stage(&reservation, position).wait().unwrap();
            staged.copy_from(0, 0, &block(&prompt[position as usize]));
            assert_eq!(self.session.commit(&reservation, vec![staged]).wait().unwrap(), 1);
        }
    }

    /// Has the node load a prompt into GPU memory; returns how that ends.
    fn load(&self, prompt: &[ChunkHash]) -> CopyEnd {
        let pages = prompt.len() as u32 * 2;
        let (spec, regions) = vllm(VllmOrder::Lhbnc, &Shape { pages, ..SHAPE });
        let (descriptor, bytes) = (memfd_create("gpu", MemfdFlags::CLOEXEC).unwrap(), regions[0]);
        ftruncate(&descriptor, bytes).unwrap();
        let layout = PagedLayout::new(spec, &regions).unwrap();
        let memory = vec![EngineMemory::Descriptor { descriptor, bytes }];
        let tensors = self.session.register_tensors(&self.namespace, 0, &layout, memory).wait().unwrap();
        let load =
            LoadPages { block: 0, pages: (0..pages).collect(), first_page: 0, layers: 0..1, by_layer: false };
        let flags = CopyFlags { after: None, then: None };
        let copy = self.session.load_pages(&tensors, &self.lease(prompt), &load, flags).wait().unwrap();
        self.session.wait_for_copy(&copy, u32::MAX, Duration::from_secs(60)).wait().unwrap().end.unwrap()
    }

    fn lease(&self, prompt: &[ChunkHash]) -> LeaseGuard {
        self.session.lease(&self.namespace, &self.namespace.chain(prompt.to_vec())).wait().unwrap()
    }

    /// Reads the chunks of a prompt that are here, checks every byte, and returns the number of chunks.
    fn get(&self, prompt: &[ChunkHash]) -> usize {
        let lease = self.lease(prompt);
        are_right(&lease, prompt);
        lease.chunks()
    }
}

fn are_right(lease: &LeaseGuard, prompt: &[ChunkHash]) {
    for (position, hash) in prompt.iter().enumerate().take(lease.chunks()) {
        let mut bytes = vec![0; BLOCK];
        lease.copy_block(position, 0, &mut bytes).unwrap();
        assert!(bytes == block(hash), "wrong bytes under {hash}");
    }
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::of_blocks("m", 16, BLOCK as u64)
}

fn prompt(name: u8, chunks: u16) -> Vec<ChunkHash> {
    let hash = |index: u16| {
        let [low, high] = index.to_le_bytes();
        ChunkHash(std::array::from_fn(|i| [name, low, high, 1][i % 4]))
    };
    (1..=chunks).map(hash).collect()
}

fn block(hash: &ChunkHash) -> Vec<u8> {
    hash.0.iter().copied().cycle().take(BLOCK).collect()
}

#[test]
fn a_node_that_starts_again_gives_no_pin_the_number_of_an_earlier_one() {
    let pinned = [(); 2].map(|()| {
        let node = Node::start("");
        let engine = node.engine(0);
        engine.put(&prompt(b'a', 2));
        let chain = engine.namespace.chain(prompt(b'a', 2));
        engine.session.pin(&engine.namespace, &chain, Duration::from_secs(60)).wait().unwrap().pin
    });
    assert!(pinned[0] > 0 && pinned[0] < pinned[1] && pinned[1] < 1 << 53, "{pinned:?}");
}

#[test]
fn a_panic_ends_the_sessions_of_one_actor_and_the_node_goes_on() {
    let node = Node::start("");
    let (first, other) = (node.engine(0), node.engine(1));
    first.put(&prompt(b'a', 8));
    other.put(&prompt(b'o', 8));
    let kept = first.lease(&prompt(b'a', 8));
    super::plant();
    let broken = first.session.lease(&first.namespace, &first.namespace.chain(prompt(b'a', 8))).wait();
    let told = |error: SessionError| error.to_string();
    let fault = "the node closed the session: a fault of Larder emptied the cache of this device";
    assert!(broken.err().map(told).is_some_and(|text| text.starts_with(fault)), "the engine hears why");
    let after = first.session.lease(&first.namespace, &first.namespace.chain(prompt(b'a', 8))).wait();
    assert!(after.err().map(told).is_some_and(|text| text.starts_with(fault)), "whenever it asks");
    assert_eq!(other.get(&prompt(b'o', 8)), 8, "another actor does not notice");
    let again = node.engine(0);
    assert_eq!(again.get(&prompt(b'a', 8)), 0, "it begins with nothing");
    assert_eq!(node.metric("larder_actor_restarts_total{device=\"0\"}"), 1.0);
    assert_eq!(node.metric("larder_session_ends_total{how=\"fault\""), 1.0);
    // All of the actor's memory is written again, while a lease of its earlier life is still being read.
    for name in 0..12 {
        again.put(&prompt(name, 400));
        are_right(&kept, &prompt(b'a', 8));
    }
    assert_eq!(again.get(&prompt(11, 400)), 400);
}

#[test]
fn a_panic_while_an_extent_gets_new_memory_ends_a_life_and_not_the_node() {
    let node = Node::start("");
    let engine = node.engine(0);
    engine.put(&prompt(b'a', 8));
    // The engine has mapped an extent, which gets new memory after the first panic.
    let _kept = engine.lease(&prompt(b'a', 8));
    super::plant();
    let chain = engine.namespace.chain(prompt(b'a', 8));
    assert!(engine.session.lease(&engine.namespace, &chain).wait().is_err());
    super::plant();
    while node.metric("larder_actor_restarts_total{device=\"0\"}") < 2.0 {
        std::thread::yield_now();
    }
    let again = node.engine(0);
    again.put(&prompt(b'a', 8));
    assert_eq!(again.get(&prompt(b'a', 8)), 8);
}

#[test]
fn extents_that_a_gpu_pinned_are_used_again_after_a_panic() {
    let open = |_| Ok(Box::new(HostDevice::new(1, HostControl::default())) as Box<dyn Device>);
    let node = Node::with(Devices::stand_in(open), "");
    let engine = node.engine(0);
    engine.put(&prompt(b'a', 8));
    assert_eq!(engine.load(&prompt(b'a', 8)), CopyEnd::Done);
    super::plant();
    assert!(
        engine.session.lease(&engine.namespace, &engine.namespace.chain(prompt(b'a', 8))).wait().is_err()
    );
    while node.metric("larder_arena_bytes{device=\"0\",state=\"quarantined\"}") > 0.0 {
        std::thread::yield_now();
    }
    let again = node.engine(0);
    again.put(&prompt(b'a', 8));
    assert_eq!(again.load(&prompt(b'a', 8)), CopyEnd::Done, "they are pinned anew");
}

#[test]
fn an_actor_that_begins_anew_finds_what_it_had_on_disk() {
    let node = Node::start(
        "[disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"4MiB\"\n",
    );
    let engine = node.engine(0);
    engine.put(&prompt(b'a', 8));
    while node.metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}") < 8.0 {
        std::thread::yield_now();
    }
    super::plant();
    assert!(
        engine.session.lease(&engine.namespace, &engine.namespace.chain(prompt(b'a', 8))).wait().is_err()
    );
    let again = node.engine(0);
    while again.get(&prompt(b'a', 8)) < 8 {
        std::thread::yield_now();
    }
}
