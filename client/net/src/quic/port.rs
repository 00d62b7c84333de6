//! One UDP address with several sockets, each served by a thread of its own.
//!
//! The kernel hands each packet to the socket that the packet's connection id names. An endpoint on a [`PortShare`] issues ids of
//! 8 bytes that begin with the share's number. A client that names a share begins with such an id too. All other clients begin
//! with 20 random bytes, as QUIC's implementations do, and get share 0.
//!
//! Two connections between the same two addresses must not go to different shares: a network card joins packets of one pair of
//! addresses to one large packet, which goes to one socket as a whole. So a client that names a share dials from a socket with a
//! port of its own.

use std::net::SocketAddr;
use std::time::Duration;

use quinn::{ConnectionId, ConnectionIdGenerator};
use rustix::net::sockopt::set_socket_reuseport;
use rustls::crypto::ring::default_provider;
use socket2::{Domain, Protocol, Socket, Type};

use super::endpoint::BindError;
use super::settings::TransportSettings;
use super::steer::{check_of, steer_by_connection_id};

/// A bound socket, for an endpoint on any thread.
#[derive(Debug)]
pub struct PortShare {
    pub(super) socket: Socket,
    pub(super) listen: SocketAddr,
    /// `None` if the address has one socket.
    pub(super) number: Option<u8>,
}

/// Issues connection ids that name a share.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShareIds(pub(super) u8);

impl PortShare {
    /// The only socket of an address.
    ///
    /// # Errors
    /// [`BindError`] if the address is in use, or is not this machine's.
    pub fn whole(listen: SocketAddr, settings: &TransportSettings) -> Result<Self, BindError> {
        let failed = |source| BindError { protocol: "UDP", listen, source };
        let socket = socket(listen, settings).map_err(failed)?;
        socket.bind(&listen.into()).map_err(failed)?;
        Ok(Self { socket, listen, number: None })
    }

    /// The address of the socket.
    ///
    /// # Errors
    /// Those of the system.
    pub fn local_address(&self) -> Result<SocketAddr, BindError> {
        let local = self.socket.local_addr().map(|local| local.as_socket());
        let local = local.and_then(|local| local.ok_or_else(|| std::io::ErrorKind::Unsupported.into()));
        local.map_err(|source| BindError { protocol: "UDP", listen: self.listen, source })
    }

    /// `count` sockets of one address. There is one socket if `count` is less than 2, or if the system does not steer packets,
    /// which is logged.
    ///
    /// # Errors
    /// [`BindError`] if the address is in use, or is not this machine's.
    pub fn bind(
        listen: SocketAddr,
        settings: &TransportSettings,
        count: usize,
    ) -> Result<Vec<Self>, BindError> {
        // This socket cannot be bound if another process has the address. The others can: `others` binds them to the first one's
        // address.
        let mut first = Self::whole(listen, settings)?;
        let count = count.min(usize::from(u8::MAX));
        if count < 2 {
            return Ok(vec![first]);
        }
        match first.others(settings, count) {
            Ok(others) => {
                first.number = Some(0);
                Ok(std::iter::once(first).chain(others).collect())
            }
            Err(error) => {
                tracing::warn!(%listen, %error, "the system does not spread packets over sockets: one thread receives all");
                drop(first);
                Ok(vec![Self::whole(listen, settings)?])
            }
        }
    }

    fn others(&self, settings: &TransportSettings, count: usize) -> std::io::Result<Vec<Self>> {
        set_socket_reuseport(&self.socket, true)?;
        let address = self.socket.local_addr()?;
        let share = |number| {
            let socket = socket(self.listen, settings)?;
            set_socket_reuseport(&socket, true)?;
            socket.bind(&address)?;
            Ok(Self { socket, listen: self.listen, number: Some(number) })
        };
        let others = (1..count as u8).map(share).collect::<std::io::Result<Vec<_>>>()?;
        steer_by_connection_id(&self.socket, count as u8, CONNECTION_ID_BYTES as u8)?;
        Ok(others)
    }
}

/// A socket with large buffers, not bound yet.
fn socket(listen: SocketAddr, settings: &TransportSettings) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(listen), Type::DGRAM, Some(Protocol::UDP))?;
    let wanted = settings.socket_buffer_bytes;
    socket.set_recv_buffer_size(wanted)?;
    socket.set_send_buffer_size(wanted)?;
    let got = socket.recv_buffer_size()?.min(socket.send_buffer_size()?);
    if got < wanted {
        tracing::warn!(
            wanted,
            got,
            "the system gives smaller socket buffers, and packets will be lost: raise net.core.rmem_max and wmem_max"
        );
    }
    Ok(socket)
}

impl ConnectionIdGenerator for ShareIds {
    fn generate_cid(&mut self) -> ConnectionId {
        share_id(self.0)
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// A random connection id that names a share. If there are fewer shares, [`steer_by_connection_id`] maps it to one of them.
pub(super) fn share_id(share: u8) -> ConnectionId {
    let mut bytes = [0; CONNECTION_ID_BYTES];
    // An error: the system has no random numbers, and TLS makes no connection either.
    let _ = default_provider().secure_random.fill(&mut bytes);
    (bytes[0], bytes[1]) = (share, check_of(share));
    ConnectionId::new(&bytes)
}

/// The fewest bytes of a connection id that a client may begin with (RFC 9000, section 7.2).
const CONNECTION_ID_BYTES: usize = 8;
