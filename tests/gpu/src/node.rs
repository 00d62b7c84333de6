//! A node in another process, which copies between an engine's GPU memory and its arena, and is killed in between.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use larder_client::device_lane::SavePages;
use larder_client::engine_lane::{CopyFlags, LoadPages};
use larder_client::{Namespace, NodeCopy, NodeTensors, Session, SessionOptions};
use larder_device::{EngineMemory, PagedLayout};
use larder_node::host::HostFacts;
use larder_node::{Config, Ready};
use larder_protocol::lane::CopyEnd;
use larder_protocol::{Chain, HitPolicy, NamespaceSpec, PoolSpec};

/// The node; dropping it kills it.
struct Node {
    child: Child,
    socket: PathBuf,
    /// The address of its metrics.
    http: String,
}

/// An engine's session with the node.
struct Engine {
    session: Session,
    namespace: Namespace,
    tensors: NodeTensors,
    chain: Chain,
}

/// Runs as another process: a node with its files in this folder, until it is killed.
pub(crate) fn serve(folder: &str) -> anyhow::Result<()> {
    let config = format!(
        "name = \"gpu\"\n[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"64MiB\"\n[[tenants]]\nname = \"default\"\n\
         socket = \"{folder}/default.sock\"\n[disk]\nfolder = \"{folder}/disk\"\ncapacity_bytes = \"256MiB\"\n\
         segment_bytes = \"16MiB\"\n"
    );
    let limits = Config::parse(&config)?.resolve(&HostFacts::read(Path::new("/"))?)?;
    let ready = |node: Ready| drop(writeln!(std::io::stdout(), "{}", node.http));
    actix_rt::System::new().block_on(larder_node::run(limits, None, ready, std::future::pending()))?;
    Ok(())
}

/// Makes a node save the first chunks of an engine's memory from its first pages, and kills the node when they are on its disk.
/// Then makes the engine `forget` its bytes, and a new node load the chunks into the last pages.
pub(crate) fn there_and_back(
    layout: &PagedLayout,
    chunks: u32,
    memory: impl Fn() -> anyhow::Result<EngineMemory>,
    forget: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("larder-gpu-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("disk"))?;
    let went = || {
        let node = Node::start(&folder)?;
        Engine::open(&node, layout, chunks, memory()?)?.save(chunks)?;
        node.wait_for_disk(chunks)?;
        drop(node);
        forget()?;
        let node = Node::start(&folder)?;
        Engine::open(&node, layout, chunks, memory()?)?.load(layout, chunks)
    };
    let result = went();
    std::fs::remove_dir_all(&folder).ok();
    result
}

impl Node {
    fn start(folder: &Path) -> anyhow::Result<Self> {
        let socket = folder.join("default.sock");
        let mut child = Command::new(std::env::current_exe()?)
            .arg("node")
            .arg(folder)
            .stdout(Stdio::piped())
            .spawn()
            .context("this program cannot be run again")?;
        let output = child.stdout.take().context("no output")?;
        let mut node = Self { child, socket, http: String::new() };
        BufReader::new(output).read_line(&mut node.http)?;
        ensure!(!node.http.is_empty(), "the node does not start");
        Ok(node)
    }

    /// Waits until this number of chunks is on the node's disk.
    fn wait_for_disk(&self, chunks: u32) -> anyhow::Result<()> {
        let line = format!("larder_disk_records{{device=\"0\"}} {chunks}");
        for _ in 0..DISK_POLLS {
            if self.metrics()?.lines().any(|found| found == line) {
                return Ok(());
            }
            std::thread::sleep(DISK_POLL);
        }
        bail!("the chunks do not come to the node's disk")
    }

    fn metrics(&self) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.http.trim())?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // An error means that it has ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Engine {
    fn open(node: &Node, layout: &PagedLayout, chunks: u32, memory: EngineMemory) -> anyhow::Result<Self> {
        let session = Session::connect(&node.socket, SessionOptions::default()).wait()?;
        let pool = PoolSpec {
            name: "kv".into(),
            layers: layout.layers(),
            layer_bytes: layout.layer_bytes(),
            hit: HitPolicy::All,
        };
        let namespace = session.register(&spec(pool), &[0], &[layout.block_bytes()]).wait()?;
        let tokens: Vec<u32> = (0..chunks * CHUNK_TOKENS).collect();
        let chain = namespace.chain_of_tokens(&tokens, Default::default());
        let tensors = session.register_tensors(&namespace, 0, layout, vec![memory]).wait()?;
        Ok(Self { session, namespace, tensors, chain })
    }

    /// Saves the chunks from the first pages.
    fn save(&self, chunks: u32) -> anyhow::Result<()> {
        let reservation = self.session.reserve(&self.namespace, &self.chain, 0).wait()?;
        let positions = reservation.chunks().to_vec();
        let layers = 0..self.tensors.layout().layers();
        let save = SavePages { positions: positions.clone(), pages: (0..chunks).collect(), layers };
        self.end(&self.session.save_pages(&self.tensors, &reservation, &save, CopyFlags::default()).wait()?)?;
        let kept = self.session.commit_handed_over(&reservation, &positions).wait()?;
        ensure!(kept == chunks, "the node keeps {kept} of {chunks} chunks");
        Ok(())
    }

    /// Loads the chunks into the last pages.
    fn load(&self, layout: &PagedLayout, chunks: u32) -> anyhow::Result<()> {
        let lease = self.session.lease(&self.namespace, &self.chain).wait()?;
        ensure!(lease.chunks() == chunks as usize, "{} of {chunks} chunks are there again", lease.chunks());
        let all = layout.spec().pages;
        let pages = (all - chunks..all).collect();
        let load = LoadPages { block: 0, pages, first_page: 0, layers: 0..layout.layers(), by_layer: true };
        self.end(&self.session.load_pages(&self.tensors, &lease, &load, CopyFlags::default()).wait()?)
    }

    fn end(&self, copy: &NodeCopy) -> anyhow::Result<()> {
        let end = self.session.wait_for_copy(copy, u32::MAX, PATIENCE).wait()?.end;
        ensure!(end == Some(CopyEnd::Done), "a copy of the node's ended as {end:?}");
        Ok(())
    }
}

fn spec(pool: PoolSpec) -> NamespaceSpec {
    NamespaceSpec { pools: vec![pool], ..NamespaceSpec::of_blocks("check", CHUNK_TOKENS, 1) }
}

const CHUNK_TOKENS: u32 = 16;
const PATIENCE: Duration = Duration::from_secs(60);
const DISK_POLL: Duration = Duration::from_millis(10);
const DISK_POLLS: u32 = 3_000;
