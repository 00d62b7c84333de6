//! The part of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>, NULL mechanism) that the sockets for events and replays need:
//! greetings, frames and heartbeats. A guest is a process that connects.
//!
//! Anybody who reaches the port may connect, so every resource of a guest has a bound: connections (in all and from one address)
//! and the bytes of a frame. The ZeroMQ crate that the tests use bounds none of these. It reserves the length that a frame
//! announces, so 20 bytes from a stranger would end the node.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use larder_net::keepalive::probe_when_idle;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::accept::NotAccepted;
use crate::guests::{Guest, Guests};

/// A message of a guest.
#[derive(Debug, PartialEq)]
pub(super) enum GuestMessage {
    Command(Bytes),
    /// A part of a message, and whether more parts follow.
    Message(Bytes, bool),
}

/// Accepts guests forever, and passes each to `welcome` with its place.
pub(super) async fn accept(listener: TcpListener, guests: Guests, mut welcome: impl FnMut(TcpStream, Guest)) {
    let mut not_accepted = NotAccepted::new();
    loop {
        let (socket, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tokio::time::sleep(not_accepted.failed("subscribers of events", error)).await;
                continue;
            }
        };
        not_accepted.accepted();
        // A guest that is gone without a word must not keep its place.
        probe_when_idle(&socket);
        match guests.enter(from.ip()) {
            Some(place) => welcome(socket, place),
            None => tracing::debug!(%from, "a subscriber of events is turned away: there are too many"),
        }
    }
}

/// Exchanges greetings and roles; `role` is the role of this side.
pub(super) async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut BytesMut,
    role: &str,
) -> io::Result<()> {
    writer.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING_BYTES];
    reader.read_exact(&mut theirs).await?;
    let is_null = theirs[12..32] == greeting()[12..32];
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !is_null {
        return Err(wrong("it does not speak ZMTP 3 with the NULL mechanism"));
    }
    let mut ready = BytesMut::new();
    let bytes = (role.len() as u32).to_be_bytes();
    put_frame(&mut ready, COMMAND, &[&b"\x05READY\x0bSocket-Type"[..], &bytes, role.as_bytes()].concat());
    writer.write_all(&ready).await?;
    loop {
        match take_frame(buffer)? {
            Some(GuestMessage::Command(command)) if command.starts_with(b"\x05READY") => return Ok(()),
            Some(_) => return Err(wrong("it does not say that it is ready")),
            None if reader.read_buf(buffer).await? == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            None => {}
        }
    }
}

/// Version 3.0, NULL mechanism.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Takes a whole frame out of the read bytes, if there is one.
pub(super) fn take_frame(buffer: &mut BytesMut) -> io::Result<Option<GuestMessage>> {
    let &[flags, ref rest @ ..] = &buffer[..] else { return Ok(None) };
    let (header, bytes) = match (flags & LONG != 0, rest) {
        (false, &[bytes, ..]) => (2, u64::from(bytes)),
        (true, rest) => match rest.first_chunk() {
            Some(bytes) => (9, u64::from_be_bytes(*bytes)),
            None => return Ok(None),
        },
        (false, []) => return Ok(None),
    };
    if bytes > (MAX_FRAME_BYTES - header) as u64 {
        return Err(wrong("its frame is too long"));
    }
    let bytes = bytes as usize;
    if buffer.len() < header + bytes {
        return Ok(None);
    }
    buffer.advance(header);
    // A subscription keeps the body. So the body is a copy: a slice of the buffer would keep everything that was read.
    let body = Bytes::copy_from_slice(&buffer.split_to(bytes));
    Ok(Some(if flags & COMMAND != 0 {
        GuestMessage::Command(body)
    } else {
        GuestMessage::Message(body, flags & MORE != 0)
    }))
}

/// Adds a frame.
fn put_frame(to: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(bytes) => to.extend_from_slice(&[flags, bytes]),
        Err(_) => {
            to.extend_from_slice(&[flags | LONG]);
            to.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    to.extend_from_slice(body);
}

/// The answer to a heartbeat.
pub(super) fn pong(command: &[u8]) -> Option<BytesMut> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut pong = BytesMut::new();
    put_frame(&mut pong, COMMAND, &[b"\x04PONG", context].concat());
    Some(pong)
}

/// Adds a message of these frames.
pub(super) fn put_message(to: &mut BytesMut, frames: &[&[u8]]) {
    to.reserve(frames.iter().map(|frame| frame.len() + 9).sum());
    for (i, frame) in frames.iter().enumerate() {
        put_frame(to, if i + 1 < frames.len() { MORE } else { 0 }, frame);
    }
}

/// The error of a guest's wrong message.
pub(super) fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

const GREETING_BYTES: usize = 64;

/// The longest frame of a guest. The longest useful frame is a subscription, with the prefix of a topic.
pub(super) const MAX_FRAME_BYTES: usize = 1_024;

/// How long a guest may take to greet, and to take a message.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::socket_keepalive;

    use super::*;

    fn frame(flags: u8, body: &[u8]) -> BytesMut {
        let mut encoded = BytesMut::new();
        put_frame(&mut encoded, flags, body);
        encoded
    }

    #[tokio::test]
    async fn a_guest_that_is_gone_without_a_word_keeps_no_place() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _theirs = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (welcomed, mut guests) = tokio::sync::mpsc::unbounded_channel();
        let accepting = accept(listener, Guests::new(1, 1), |socket, _| welcomed.send(socket).unwrap());
        tokio::select! {
            () = accepting => {}
            guest = guests.recv() => assert!(socket_keepalive(guest.unwrap()).unwrap()),
        }
    }

    #[test]
    fn a_frame_is_taken_when_it_is_whole() {
        let whole = [frame(0, b"\x01topic"), frame(COMMAND, &[7; 300]), frame(MORE, b"")].concat();
        let mut buffer = BytesMut::new();
        let mut taken = Vec::new();
        for &byte in &whole {
            buffer.extend_from_slice(&[byte]);
            taken.extend(take_frame(&mut buffer).unwrap());
        }
        let topic = GuestMessage::Message(Bytes::from_static(b"\x01topic"), false);
        assert_eq!(
            taken,
            [topic, GuestMessage::Command(vec![7; 300].into()), GuestMessage::Message(Bytes::new(), true)]
        );
    }

    #[test]
    fn what_a_frame_says_of_its_length_takes_no_memory() {
        for bytes in [MAX_FRAME_BYTES as u64, 1 << 40, u64::MAX] {
            let mut buffer = BytesMut::from(&[LONG][..]);
            buffer.extend_from_slice(&bytes.to_be_bytes());
            assert!(take_frame(&mut buffer).is_err());
        }
    }

    #[test]
    fn a_heartbeat_is_answered_with_its_own_context() {
        assert_eq!(pong(b"\x04PING\0\x0acontext").unwrap(), frame(COMMAND, b"\x04PONGcontext"));
        assert_eq!(pong(b"\x04PING"), None);
        assert_eq!(pong(b"\x05ERROR"), None);
    }
}
