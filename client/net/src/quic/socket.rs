//! The UDP socket of an endpoint, with batches that the kernel takes.

use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime as _, TokioRuntime, UdpPoller};
use socket2::Socket;

use super::settings::TransportSettings;

/// A socket that hands the kernel no larger batches than [`TransportSettings::max_segments`].
#[derive(Debug)]
pub(super) struct BatchedSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    max_segments: usize,
}

impl BatchedSocket {
    /// A bound socket, served by the runtime of the calling thread.
    pub(super) fn new(socket: Socket, settings: &TransportSettings) -> io::Result<Arc<Self>> {
        let socket = TokioRuntime.wrap_udp_socket(socket.into())?;
        Ok(Arc::new(Self { socket, max_segments: settings.max_segments() }))
    }
}

impl AsyncUdpSocket for BatchedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments().min(self.max_segments)
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
