//! A node with several GPUs: one actor each, each with its own store and arena.

use std::path::Path;
use std::sync::mpsc;

use larder_client::quic::ca::{Authority, Validity};
use larder_client::{BlockingSession, SessionError, SessionOptions};
use larder_node::Config;
use larder_node::host::{HostFacts, PciDevice};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::session::RefusalCode;
use larder_tests::content::{BLOCK_BYTES, namespace, prompt};
use tokio::sync::oneshot;

use super::Engine;

fn engine(socket: &Path, device: Option<u16>) -> Result<Engine, SessionError> {
    let options = SessionOptions { window_bytes: 1 << 20, device, ..SessionOptions::default() };
    let session = BlockingSession::connect(socket, options)?;
    let namespace = session.register(&namespace(), &[0], &[BLOCK_BYTES as u64])?;
    Ok(Engine { session, namespace })
}

/// The section of a cluster that is not there, with a certificate for the node `a`.
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

#[test]
fn every_gpu_has_an_actor_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("default.sock");
    let config = format!(
        "name = \"a\"\n[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\n\
         [[gpus]]\npci = \"0000:65:00.0\"\n[[gpus]]\npci = \"0000:66:00.0\"\n\
         [[tenants]]\nname = \"default\"\nsocket = \"{}\"\n{}",
        socket.display(),
        cluster(dir.path())
    );
    // This machine, as if it had two GPUs.
    let mut facts = HostFacts::read(Path::new("/")).unwrap();
    for address in ["0000:65:00.0", "0000:66:00.0"] {
        facts.pci.insert(address.parse().unwrap(), PciDevice { is_display: true, ..PciDevice::default() });
    }
    let mut limits = Config::parse(&config).unwrap().resolve(&facts).unwrap();
    let cpus: Vec<u32> = facts.cpus.iter().collect();
    let (cpu_of_first, cpu_of_second) = (cpus[0], cpus[cpus.len() - 1]);
    limits.actors[0].cpus = [cpu_of_first].into_iter().collect();
    limits.actors[1].cpus = [cpu_of_second].into_iter().collect();
    limits.actors[1].copy.cpus = [cpu_of_second].into_iter().collect();
    limits.cluster.as_mut().unwrap().place.cpus = [cpu_of_second].into_iter().collect();
    let (ready, is_ready) = mpsc::channel();
    let (stop, stopping) = oneshot::channel::<()>();
    let node = std::thread::spawn(move || {
        actix_rt::System::new().block_on(async move {
            let on_ready = move |node| ready.send(node).unwrap();
            larder_node::run(limits, on_ready, async { _ = stopping.await }).await.unwrap();
        });
    });
    is_ready.recv().unwrap();

    let (first, second) = (engine(&socket, Some(0)).unwrap(), engine(&socket, Some(1)).unwrap());
    assert_eq!((first.session.device(), second.session.device()), (0, 1));
    first.put(&prompt(b'a', 4));
    assert_eq!(
        (first.get(&prompt(b'a', 4)), second.get(&prompt(b'a', 4))),
        (4, 0),
        "actors share nothing yet"
    );
    let another_first = engine(&socket, Some(0)).unwrap();
    let anywhere = engine(&socket, None).unwrap();
    assert_eq!(anywhere.session.device(), 1, "the one with the fewest sessions");
    let refused = engine(&socket, Some(7)).map(drop).unwrap_err();
    assert!(matches!(refused, SessionError::Refused(refusal) if refusal.code == RefusalCode::Unknown));

    assert_eq!(allowed_cpus("larder-gpu-0"), cpu_of_first.to_string(), "what the kernel says");
    for thread in ["larder-gpu-1", "larder-copy-1", "larder-peer"] {
        assert_eq!(allowed_cpus(thread), cpu_of_second.to_string(), "what the kernel says of {thread}");
    }

    drop((first, second, another_first, anywhere));
    stop.send(()).unwrap();
    node.join().unwrap();
}

/// The CPUs on which the kernel lets a thread of this process run.
fn allowed_cpus(thread: &str) -> String {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named =
        |path: &std::path::PathBuf| std::fs::read_to_string(path.join("comm")).unwrap().trim() == thread;
    let task = tasks.into_iter().find(named).unwrap_or_else(|| panic!("no thread {thread}"));
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}
