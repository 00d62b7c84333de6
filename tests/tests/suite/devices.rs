//! A node with several GPUs: one actor each, each with its own store and arena; each actor gets the chunks of the others.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Barrier, mpsc};

use larder_client::{LookupOptions, Session, SessionError, SessionOptions};
use larder_net::quic::ca::{Authority, Validity};
use larder_node::host::{HostFacts, PciDevice};
use larder_node::limits::Limits;
use larder_node::{Config, ServeError};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::session::{RefusalCode, Tier, Wait};
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, block, namespace, prompt};
use larder_tests::{server, wait};
use serde_json::Value;
use tokio::sync::oneshot;

use super::Engine;

fn engine(socket: &Path, device: Option<u16>) -> Result<Engine, SessionError> {
    let options = SessionOptions { window_bytes: 1 << 20, device, ..SessionOptions::default() };
    let session = Session::connect(socket, options).wait()?;
    let namespace = session.register(&namespace(), &[0], &[BLOCK_BYTES as u64]).wait()?;
    Ok(Engine { session, namespace })
}

/// The cluster section for a coordinator that is not there, with a certificate for the node `a`.
fn cluster(dir: &Path) -> String {
    let (authority, ca) = Authority::create(Validity::days(1)).unwrap();
    let node = authority.issue(&Identity::new(Role::Node, "a"), Validity::days(1)).unwrap();
    let files = [("ca", &ca.certificate_pem), ("certificate", &node.certificate_pem), ("key", &node.key_pem)];
    let file = |(name, pem): (&str, &String)| {
        std::fs::write(dir.join(name), pem).unwrap();
        format!("{name} = \"{}\"\n", dir.join(name).display())
    };
    let files: String = files.into_iter().map(file).collect();
    format!("[cluster]\ncoordinator = \"127.0.0.1:1\"\nlisten = \"127.0.0.1:0\"\nshare = false\n{files}")
}

/// Limits of a node on this machine as if it had two GPUs, with these further sections.
fn limits(dir: &Path, sections: &str) -> Limits {
    let gpus = ["0000:65:00.0", "0000:66:00.0"];
    let config = format!(
        "name = \"a\"\n[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"32MiB\"\nextent_bytes = \"2MiB\"\n\
         [[gpus]]\npci = \"{}\"\n[[gpus]]\npci = \"{}\"\n\
         [[tenants]]\nname = \"default\"\nsocket = \"{}\"\n\
         [[tenants]]\nname = \"other\"\nsocket = \"{}\"\n{sections}",
        gpus[0],
        gpus[1],
        dir.join("default.sock").display(),
        dir.join("other.sock").display(),
    );
    let mut facts = HostFacts::read(Path::new("/")).unwrap();
    for address in gpus {
        facts.pci.insert(address.parse().unwrap(), PciDevice { is_display: true, ..PciDevice::default() });
    }
    Config::parse(&config).unwrap().resolve(&facts).unwrap()
}

/// A node in this process, on this machine as if it had two GPUs.
pub(super) struct Node {
    socket: PathBuf,
    pub(super) http: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    dir: tempfile::TempDir,
}

impl Node {
    /// Starts a node with these additional sections of configuration; `change` may change its limits.
    pub(super) fn start(sections: impl FnOnce(&Path) -> String, change: impl FnOnce(&mut Limits)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut limits = limits(dir.path(), &sections(dir.path()));
        change(&mut limits);
        let (ready, is_ready) = mpsc::channel();
        let (stop, stopping) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let on_ready = move |node| ready.send(node).unwrap();
                larder_node::run(limits, None, on_ready, async { _ = stopping.await }).await.unwrap();
            });
        });
        let http = is_ready.recv().unwrap().http;
        Self { socket: dir.path().join("default.sock"), http, stop: Some(stop), thread: Some(thread), dir }
    }

    pub(super) fn engine(&self, device: u16) -> Engine {
        engine(&self.socket, Some(device)).unwrap()
    }

    fn actors(&self) -> Vec<Value> {
        let status: Value =
            serde_json::from_str(&server::get(&self.http.to_string(), "/status").unwrap()).unwrap();
        status["actors"].as_array().unwrap().clone()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

#[test]
fn every_gpu_has_an_actor_of_its_own() {
    let cpus: Vec<u32> = HostFacts::read(Path::new("/")).unwrap().cpus.iter().collect();
    let (cpu_of_first, cpu_of_second) = (cpus[0], cpus[cpus.len() - 1]);
    let node = Node::start(cluster, |limits| {
        limits.actors[0].cpus = [cpu_of_first].into_iter().collect();
        limits.actors[1].cpus = [cpu_of_second].into_iter().collect();
        limits.actors[1].copy.cpus = [cpu_of_second].into_iter().collect();
        limits.cluster.as_mut().unwrap().place.cpus = [cpu_of_second].into_iter().collect();
    });
    let (first, second) = (node.engine(0), node.engine(1));
    assert_eq!((first.session.device(), second.session.device()), (0, 1));
    let _another_first = node.engine(0);
    let anywhere = engine(&node.socket, None).unwrap();
    assert_eq!(anywhere.session.device(), 1, "the one with the fewest sessions");
    let refused = engine(&node.socket, Some(7)).map(drop).unwrap_err();
    assert!(matches!(refused, SessionError::Refused(refusal) if refusal.code == RefusalCode::Unknown));

    assert_eq!(allowed_cpus("larder-gpu-0"), cpu_of_first.to_string(), "what the kernel says");
    for thread in ["larder-gpu-1", "larder-copy-1", "larder-peer"] {
        assert_eq!(allowed_cpus(thread), cpu_of_second.to_string(), "what the kernel says of {thread}");
    }
}

#[test]
fn a_node_that_cannot_use_a_gpu_of_which_it_takes_memory_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut limits = limits(dir.path(), "[gpu]\ndevice_bytes = \"1MiB\"\n");
    limits.actors[0].device.tier_bytes = 0;
    limits.actors[1].pci = Some("ffff:ff:1f.0".parse().unwrap());
    let node = larder_node::run(limits, None, |_| (), std::future::pending());
    let error = actix_rt::System::new().block_on(node).map(drop).unwrap_err();
    assert!(matches!(error, ServeError::Gpu { device: 1, .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.starts_with("[gpu] device_bytes takes memory of the GPU of device 1"), "{said}");
}

#[test]
fn engines_that_start_together_are_spread_over_the_gpus() {
    let node = Node::start(|_| String::new(), |_| ());
    let together = Barrier::new(8);
    let open = || {
        together.wait();
        engine(&node.socket, None).unwrap()
    };
    let engines: Vec<Engine> = std::thread::scope(|scope| {
        let opening: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        opening.into_iter().map(|engine| engine.join().unwrap()).collect()
    });
    let of_first = engines.iter().filter(|engine| engine.session.device() == 0).count();
    assert_eq!(of_first, 4);
}

#[test]
fn what_one_gpu_stored_another_of_the_node_finds_and_gets_and_keeps_a_copy_of_in_free_room() {
    let node = Node::start(|_| String::new(), |_| ());
    let (first, second) = (node.engine(0), node.engine(1));
    let hashes = prompt(b'a', 40);
    assert_eq!(first.put(&hashes), 40);
    let tokens = 40 * u64::from(CHUNK_TOKENS);
    wait::until("the other actor knows of it", || (second.find(&hashes, tokens + 1) == tokens).then_some(()));
    assert_eq!(second.get(&hashes), 40);
    // A copy costs nothing if there is free room, between actors as between nodes.
    wait::until("both have it", || {
        let chunks: Vec<u64> = node.actors().iter().map(|actor| actor["chunks"].as_u64().unwrap()).collect();
        (chunks == [40, 40]).then_some(())
    });
    assert_eq!((first.get(&hashes), second.get(&hashes)), (40, 40));
}

#[test]
fn what_all_gpus_read_again_and_again_each_has_at_last() {
    let node = Node::start(|_| String::new(), |_| ());
    let engines = [node.engine(0), node.engine(1)];
    let hashes = prompt(b'a', 4);
    engines[0].put(&hashes);
    wait::until("both have it", || {
        engines.iter().for_each(|engine| assert_eq!(engine.get(&hashes), 4));
        let chunks: Vec<u64> = node.actors().iter().map(|actor| actor["chunks"].as_u64().unwrap()).collect();
        (chunks == [4, 4]).then_some(())
    });
}

#[test]
fn a_prefetch_brings_what_a_sibling_has_in_memory_and_on_disk() {
    let disk = |dir: &Path| {
        let folder = dir.join("disk");
        format!(
            "[disk]\nfolder = \"{}\"\ncapacity_bytes = \"32MiB\"\nsegment_bytes = \"1MiB\"\n",
            folder.display()
        )
    };
    // Memory for 30 chunks an actor: the prompt's end goes to disk.
    let node = Node::start(disk, |limits| {
        limits.actors.iter_mut().for_each(|actor| actor.store.capacity_chunks = Some(30));
    });
    let (first, second) = (node.engine(0), node.engine(1));
    let hashes = prompt(b'a', 30);
    first.put(&hashes);
    wait::until("all of it is on disk", || (node.actors()[0]["disk"]["chunks"] == 30).then_some(()));
    first.put(&prompt(b'b', 20));
    wait::until("a part of it is on disk alone", || {
        let found = first
            .session
            .lookup(&first.namespace, &first.namespace.chain(hashes.clone()), all())
            .wait()
            .unwrap();
        let tiers: Vec<Tier> = found.spans.iter().map(|span| span.tier).collect();
        (tiers == [Tier::Host, Tier::Disk]).then_some(())
    });
    let chain = second.namespace.chain(hashes.clone());
    let ticket = second.session.prefetch(&second.namespace, &chain, all()).wait().unwrap();
    assert_eq!(ticket.tokens(), 30 * u64::from(CHUNK_TOKENS));
    let lease = second.session.collect(ticket, Wait::Complete).wait().unwrap();
    assert_eq!(lease.chunks(), 30);
    for (position, hash) in hashes.iter().enumerate() {
        let mut bytes = vec![0; BLOCK_BYTES];
        lease.copy_block(position, 0, &mut bytes).unwrap();
        assert!(bytes == block(hash), "wrong bytes under {hash}");
    }
}

#[test]
fn tenants_of_different_gpus_never_meet() {
    let node = Node::start(|_| String::new(), |_| ());
    let first = node.engine(0);
    let hashes = prompt(b'a', 4);
    first.put(&hashes);
    let tokens = 4 * u64::from(CHUNK_TOKENS);
    let second = node.engine(1);
    wait::until("the other actor knows of it", || (second.find(&hashes, tokens + 1) == tokens).then_some(()));
    let stranger = engine(&node.dir.path().join("other.sock"), Some(1)).unwrap();
    assert_eq!((stranger.find(&hashes, tokens + 1), stranger.get(&hashes)), (0, 0));
}

fn all() -> LookupOptions {
    LookupOptions { prompt_tokens: 10_000, ..LookupOptions::default() }
}

/// The CPUs on which the kernel lets a thread of this process run.
fn allowed_cpus(thread: &str) -> String {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named = |path: &PathBuf| std::fs::read_to_string(path.join("comm")).unwrap().trim() == thread;
    let task = tasks.into_iter().find(named).unwrap_or_else(|| panic!("no thread {thread}"));
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}
