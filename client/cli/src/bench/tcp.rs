//! Blocks over a bare TCP connection: the yardstick of everything that crosses a network.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use super::placement::CpuPair;
use super::transfer::{CpuMeter, REQUEST_BYTES, Source, Transfer};

/// One end asks and a thread answers; neither does anything else.
#[derive(Debug)]
pub struct RawTcp {
    transfer: Transfer,
    socket: TcpStream,
    targets: Vec<Vec<u8>>,
    meter: CpuMeter,
    /// Taken when dropped.
    peer: Option<JoinHandle<io::Result<()>>>,
}

impl RawTcp {
    /// Connects over loopback to a thread that it starts on the answerer's CPU.
    ///
    /// # Errors
    /// The system gives no socket or no thread.
    pub fn start(transfer: Transfer, placement: &CpuPair) -> io::Result<Self> {
        let placement = placement.clone();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        for end in [&socket, &peer] {
            end.set_nodelay(true)?;
        }
        let peer = std::thread::Builder::new().name("raw-tcp".into()).spawn(move || {
            placement.be_answerer()?;
            answer(peer, transfer.source())
        })?;
        let (targets, meter) = (transfer.targets(), CpuMeter::default());
        Ok(Self { transfer, socket, targets, meter, peer: Some(peer) })
    }

    /// Reads the blocks of one pass.
    ///
    /// # Errors
    /// The thread that answers is gone.
    pub fn pass(&mut self) -> anyhow::Result<Duration> {
        let Self { transfer, socket, targets, meter, .. } = self;
        meter.timed(transfer.bytes(), || Ok(get(*transfer, socket, targets)?))
    }

    /// CPU seconds of both ends for 10^9 bytes, over all passes.
    pub fn cpu_s_per_gigabyte(&self) -> f64 {
        self.meter.per_gigabyte()
    }
}

impl Drop for RawTcp {
    fn drop(&mut self) {
        // The peer's loop ends at its next read; the thread's result does not matter.
        let _ = self.socket.shutdown(Shutdown::Both);
        let _ = self.peer.take().map(JoinHandle::join);
    }
}

fn get(transfer: Transfer, socket: &mut TcpStream, targets: &mut [Vec<u8>]) -> io::Result<()> {
    let (request, blocks) = ([1; REQUEST_BYTES], transfer.blocks());
    let ahead = transfer.in_flight.min(blocks);
    for _ in 0..ahead {
        socket.write_all(&request)?;
    }
    for block in 0..blocks {
        for piece in targets[block % transfer.in_flight].chunks_mut(PIECE_BYTES) {
            socket.read_exact(piece)?;
        }
        if block + ahead < blocks {
            socket.write_all(&request)?;
        }
    }
    Ok(())
}

fn answer(mut socket: TcpStream, mut source: Source) -> io::Result<()> {
    let mut request = [0; REQUEST_BYTES];
    loop {
        socket.read_exact(&mut request)?;
        for piece in source.block().chunks(PIECE_BYTES) {
            socket.write_all(piece)?;
        }
    }
}

/// Bytes of one system call. Blocks of 32 MiB in one call each come at two thirds of the speed or less.
const PIECE_BYTES: usize = 256 << 10;
