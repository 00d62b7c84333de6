//! Blocks over a bare QUIC connection: the most that an exchange between nodes can reach.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use larder_net::quic::ca::{Authority, Validity};
use larder_net::quic::{Connection, Credentials, Endpoint, TransportSettings};
use larder_protocol::identity::{Identity, Role};
use quinn::{RecvStream, SendStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

use super::placement::CpuPair;
use super::transfer::{CpuMeter, REQUEST_BYTES, Source, Transfer};

/// One end asks and a thread answers, each on a current-thread runtime. Each block has a stream of its own.
#[derive(Debug)]
pub struct BareQuinn {
    transfer: Transfer,
    runtime: Runtime,
    endpoint: Endpoint,
    connection: Connection,
    targets: Vec<Vec<u8>>,
    meter: CpuMeter,
    /// Taken when dropped.
    peer: Option<JoinHandle<anyhow::Result<()>>>,
}

impl BareQuinn {
    /// Connects over loopback, with mutual TLS, to a thread that it starts on the answerer's CPU.
    ///
    /// # Errors
    /// The system gives no socket or no thread.
    pub fn start(
        transfer: Transfer,
        settings: &TransportSettings,
        placement: &CpuPair,
    ) -> anyhow::Result<Self> {
        let [asker, answerer] = credentials()?;
        let (tell, told) = mpsc::channel();
        let peer = std::thread::Builder::new().name("bare-quinn".into()).spawn({
            let (settings, placement) = (settings.clone(), placement.clone());
            move || {
                placement.be_answerer()?;
                let runtime = Builder::new_current_thread().enable_all().build()?;
                LocalSet::new().block_on(&runtime, answer(&answerer, &settings, transfer.source(), tell))
            }
        })?;
        let Ok(address) = told.recv() else {
            let failed = peer.join().ok().and_then(Result::err);
            return Err(failed
                .unwrap_or_else(|| anyhow::anyhow!("the answering thread ended"))
                .context("cannot start the answering side"));
        };
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (endpoint, connection) = runtime.block_on(connect(&asker, settings, address))?;
        let (targets, meter) = (transfer.targets(), CpuMeter::default());
        Ok(Self { transfer, runtime, endpoint, connection, targets, meter, peer: Some(peer) })
    }

    /// Reads the blocks of one pass.
    ///
    /// # Errors
    /// The connection broke.
    pub fn pass(&mut self) -> anyhow::Result<Duration> {
        self.blocks(self.transfer.blocks())
    }

    /// Reads this number of blocks.
    ///
    /// # Errors
    /// The connection broke.
    pub fn blocks(&mut self, blocks: usize) -> anyhow::Result<Duration> {
        let Self { transfer, runtime, connection, targets, meter, .. } = self;
        let bytes = blocks * transfer.block_bytes;
        meter.timed(bytes, || runtime.block_on(get(blocks, connection.quic(), targets)))
    }

    /// CPU seconds of both ends for 10^9 bytes, over all passes.
    pub fn cpu_s_per_gigabyte(&self) -> f64 {
        self.meter.per_gigabyte()
    }
}

impl Drop for BareQuinn {
    fn drop(&mut self) {
        // The end of the connection ends the peer's loop; the thread's result does not matter.
        self.runtime.block_on(self.endpoint.close());
        let _ = self.peer.take().map(JoinHandle::join);
    }
}

async fn connect(
    credentials: &Credentials,
    settings: &TransportSettings,
    address: SocketAddr,
) -> anyhow::Result<(Endpoint, Connection)> {
    let endpoint = Endpoint::bind(any_port(), credentials, settings)?;
    let connection = endpoint.connect(address, Role::Node, Some(ANSWERER)).await?;
    Ok((endpoint, connection))
}

/// Each target asks for the next block as soon as it has one.
async fn get(blocks: usize, connection: &quinn::Connection, targets: &mut [Vec<u8>]) -> anyhow::Result<()> {
    let left = Cell::new(blocks);
    try_join_all(targets.iter_mut().map(|target| async {
        while let Some(rest) = left.get().checked_sub(1) {
            left.set(rest);
            let (mut send, mut receive) = connection.open_bi().await?;
            send.write_all(&[1; REQUEST_BYTES]).await?;
            send.finish()?;
            receive.read_exact(target).await?;
        }
        anyhow::Ok(())
    }))
    .await?;
    Ok(())
}

async fn answer(
    credentials: &Credentials,
    settings: &TransportSettings,
    source: Source,
    tell: mpsc::Sender<SocketAddr>,
) -> anyhow::Result<()> {
    let endpoint = Endpoint::bind(any_port(), credentials, settings)?;
    tell.send(endpoint.local_address())?;
    let incoming = endpoint.accept().await.context("the other side does not connect")?;
    let connection = incoming.accept().await?;
    let source = Rc::new(RefCell::new(source));
    while let Ok((send, receive)) = connection.quic().accept_bi().await {
        // The settings limit how many streams the other end opens at a time. That end also notices a stream that breaks.
        drop(tokio::task::spawn_local(answer_one(send, receive, Rc::clone(&source))));
    }
    Ok(())
}

async fn answer_one(
    mut send: SendStream,
    mut receive: RecvStream,
    source: Rc<RefCell<Source>>,
) -> anyhow::Result<()> {
    receive.read_exact(&mut [0; REQUEST_BYTES]).await?;
    let block = source.borrow_mut().block();
    send.write_chunk(block).await?;
    Ok(send.finish()?)
}

fn credentials() -> anyhow::Result<[Credentials; 2]> {
    let (authority, files) = Authority::create(Validity::days(1))?;
    let issue = |name| {
        let issued = authority.issue(&Identity::new(Role::Node, name), Validity::days(1))?;
        let [ca, certificate, key] =
            [&files.certificate_pem, &issued.certificate_pem, &issued.key_pem].map(String::as_bytes);
        anyhow::Ok(Credentials::from_pem(ca, certificate, key)?)
    };
    Ok([issue("asker")?, issue(ANSWERER)?])
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

const ANSWERER: &str = "answerer";
