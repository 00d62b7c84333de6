//! An engine in its own process: it does one deed at a node and then waits for its end.

mod trouble;

use std::any::Any;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use larder_ipc::Mapping;
use larder_protocol::lane::{
    CopyWords, LoadPages, RegisterTensors, SavePages, TensorLayout, TensorMemory, TensorPlane,
};
use larder_protocol::limits::SESSION_VERSION;
use larder_protocol::session::{Hello, Pin, Registered, Request, Response};
use larder_protocol::{Chain, ChunkHash};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use self::trouble::Trouble;
use crate::content::{BLOCK_BYTES, block, prompt};
use crate::raw::{RawSession, commit, hello, reserve};
use crate::server::Killed;

/// A running engine process. Dropping it kills it.
pub struct EngineProcess {
    child: Killed,
}

impl EngineProcess {
    /// Starts `program` (the binary `test-engine`) and waits until it has done `deed` to the node at `socket`.
    ///
    /// # Errors
    /// Fails if the program could not do the deed.
    pub fn start(program: &str, socket: &Path, deed: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .arg(socket)
            .arg(deed)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("the engine has no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        anyhow::ensure!(line == "done\n", "the engine could not {deed}");
        Ok(Self { child: Killed(child) })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Ends the process with SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// Fails if the process cannot be killed.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()
    }
}

/// The main function of the binary `test-engine`: it does one deed, reports it, and waits for the end of its input.
///
/// # Errors
/// Fails if the node does not allow the deed.
pub fn run(socket: &Path, deed: &str) -> anyhow::Result<()> {
    if deed == "greet and go" {
        // The node needs longer for this window than the process lives.
        let hello =
            Hello { version: SESSION_VERSION, client: "test".into(), device: None, window_bytes: 64 << 20 };
        RawSession::connect(socket)?.send(&Request::Hello(hello))?;
        return Ok(std::io::stdout().write_all(b"done\n")?);
    }
    let (mut session, registered, window) = RawSession::open(socket)?;
    let hashes = prompt(b'a', 4);
    let mut kept: Vec<Box<dyn Any>> = Vec::new();
    match deed {
        // Holds a reservation, and commits none of it.
        "write" => {
            session.ask(&reserve(&registered, &prompt(b'w', 4)))?;
        }
        // As `write`, but the session is closed and the process lives on.
        "write and close" => {
            let (reserved, memory) = session.ask(&reserve(&registered, &prompt(b'w', 4)))?;
            kept.push(Box::new((reserved, memory)));
            drop(session);
            return wait_for_the_end(&kept);
        }
        // Sends a commit and does not wait for its answer.
        "commit" => {
            let (reserved, _) = session.ask(&reserve(&registered, &prompt(b'w', 4)))?;
            let Response::Reserved(reserved) = reserved else { anyhow::bail!("not reserved: {reserved:?}") };
            session.send(&commit(reserved.reservation, 4))?;
        }
        // Fills the arena, then is idle.
        "fill" => {
            let window = Mapping::writable(window.context("the session has no window")?.as_fd(), 1 << 20)?;
            for name in 0..8 {
                put(&mut session, &registered, &window, &prompt(name, 128))?;
            }
        }
        // Leaves its memory to a child that outlives it.
        "bequeath" => {
            let lease = session.lease(&registered, &prompt(7, 4))?;
            let memory = lease.memory[0].try_clone()?;
            let heir = Command::new("sleep").arg("600").stdin(memory).spawn()?;
            std::fs::write(heir_file(socket), heir.id().to_string())?;
            kept.push(Box::new(lease));
        }
        // Has the node copy chunks between the arena and memory that stands for a GPU's.
        "load by gpu" => {
            let window = Mapping::writable(window.context("the session has no window")?.as_fd(), 1 << 20)?;
            put(&mut session, &registered, &window, &hashes[..2])?;
            load_by_gpu(&mut session, &registered, &hashes[..2])?;
        }
        "save by gpu" => save_by_gpu(&mut session, &registered, &hashes[..2])?,
        "lease" => kept.push(Box::new(session.lease(&registered, &hashes)?)),
        "pin" => {
            let chain = Chain::from_root(registered.root, hashes);
            session.ask(&Request::Pin(Pin {
                namespace: registered.namespace,
                chain,
                duration_ms: 60_000,
            }))?;
        }
        // Closes the session, but keeps the memory that it was given.
        "close" => {
            kept.push(Box::new(session.lease(&registered, &hashes)?));
            let mut other = RawSession::connect(socket)?;
            other.ask(&hello())?;
            drop(other);
            drop(session);
            return wait_for_the_end(&kept);
        }
        other => {
            kept.push(Trouble { session, registered, window }.run(other)?);
            return wait_for_the_end(&kept);
        }
    }
    kept.push(Box::new(session));
    wait_for_the_end(&kept)
}

/// Begins to load two chunks.
fn load_by_gpu(
    session: &mut RawSession,
    registered: &Registered,
    hashes: &[ChunkHash],
) -> anyhow::Result<()> {
    let lease = session.lease(registered, hashes)?;
    let tensors = register_gpu(session, registered)?;
    let load = LoadPages {
        lease: lease.lease,
        tensors,
        pages: vec![0, 1],
        first_page: 0,
        from_layer: 0,
        to_layer: 1,
        by_layer: false,
        words: CopyWords::default(),
    };
    begin_copy(session, &Request::LoadPages(load))
}

/// Begins to save two chunks.
fn save_by_gpu(
    session: &mut RawSession,
    registered: &Registered,
    hashes: &[ChunkHash],
) -> anyhow::Result<()> {
    let (Response::Reserved(reserved), _) = session.ask(&reserve(registered, hashes))? else {
        anyhow::bail!("there is no room")
    };
    let tensors = register_gpu(session, registered)?;
    let save = SavePages {
        reservation: reserved.reservation,
        chunks: vec![0, 1],
        tensors,
        pages: vec![0, 1],
        from_layer: 0,
        to_layer: 1,
        words: CopyWords::default(),
    };
    begin_copy(session, &Request::SavePages(save))
}

/// Registers two pages of one block each.
fn register_gpu(session: &mut RawSession, registered: &Registered) -> anyhow::Result<u32> {
    let bytes = 2 * BLOCK_BYTES as u64;
    let memory = memfd_create("gpu", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, bytes)?;
    let plane = TensorPlane { region: 0, offset: 0, page_stride: BLOCK_BYTES as u64 };
    let request = Request::RegisterTensors(RegisterTensors {
        namespace: registered.namespace,
        block: 0,
        layout: TensorLayout {
            planes: vec![plane],
            planes_per_layer: 1,
            pages: 2,
            pages_per_chunk: 1,
            dims: Vec::new(),
            run_bytes: BLOCK_BYTES as u64,
        },
        memory: vec![TensorMemory::Descriptor(bytes)],
    });
    match session.ask_with(&request, vec![memory])?.0 {
        Response::TensorsRegistered(known) => Ok(known.tensors),
        other => anyhow::bail!("the node does not know the tensors: {other:?}"),
    }
}

fn begin_copy(session: &mut RawSession, request: &Request) -> anyhow::Result<()> {
    match session.ask(request)?.0 {
        Response::Copying(_) => Ok(()),
        other => anyhow::bail!("no copy begins: {other:?}"),
    }
}

/// Stores chunks with their right bytes.
fn put(
    session: &mut RawSession,
    registered: &Registered,
    window: &Mapping,
    hashes: &[ChunkHash],
) -> anyhow::Result<()> {
    let (Response::Reserved(reserved), _) = session.ask(&reserve(registered, hashes))? else {
        anyhow::bail!("there is no room")
    };
    for (position, hash) in hashes.iter().enumerate() {
        window.copy_from((position * BLOCK_BYTES) as u64, &block(hash));
    }
    session.ask(&commit(reserved.reservation, hashes.len() as u32))?;
    Ok(())
}

/// The file to which `bequeath` writes the child's process id. The child's standard input is the memory.
pub fn heir_file(socket: &Path) -> PathBuf {
    socket.with_extension("heir")
}

fn wait_for_the_end<T>(_kept: &[T]) -> anyhow::Result<()> {
    std::io::stdout().write_all(b"done\n")?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
