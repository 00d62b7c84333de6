//! A ZeroMQ PUB socket: as much of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>, NULL mechanism) and of publish and subscribe
//! (<https://rfc.zeromq.org/spec/29/>) as a publisher needs.
//!
//! Anybody who reaches the port may connect, so every resource of a subscriber has a bound: connections (in all and from one
//! address), the bytes of a frame, subscriptions, and waiting messages. The ZeroMQ crate of the tests bounds none of these:
//! it reserves whatever length a frame announces, so that 20 bytes of a stranger would end the node.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

/// Sends messages to the subscribers of their topics. Once dropped, it takes no more subscribers.
pub(super) struct Publisher {
    messages: broadcast::Sender<Message>,
    accepting: actix_rt::task::JoinHandle<()>,
}

/// A message on its way to every subscriber.
#[derive(Debug, Clone)]
struct Message {
    topic: Bytes,
    /// Its frames, as they are sent.
    encoded: Bytes,
}

/// A message of a subscriber.
#[derive(Debug, PartialEq)]
enum Said {
    Command(Bytes),
    Message(Bytes),
}

/// The subscribers, by address.
#[derive(Debug, Clone, Default)]
struct Subscribers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A connected subscriber.
#[derive(Debug)]
struct Subscriber {
    all: Subscribers,
    address: IpAddr,
}

impl Publisher {
    /// Listens. Needs an actix system.
    ///
    /// # Errors
    /// The system's error.
    pub(super) async fn bind(listen: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(listen).await?;
        let bound = listener.local_addr()?;
        let (messages, _) = broadcast::channel(WAITING_MESSAGES);
        let accepting = actix_rt::spawn(accept(listener, messages.clone()));
        Ok((Self { messages, accepting }, bound))
    }

    /// Sends a message of these frames; the first is the topic. A subscriber that is [`WAITING_MESSAGES`] behind misses it.
    pub(super) fn send(&self, frames: [&[u8]; 3]) {
        let mut encoded = BytesMut::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
        for (i, frame) in frames.iter().enumerate() {
            put_frame(&mut encoded, if i + 1 < frames.len() { MORE } else { 0 }, frame);
        }
        let encoded = encoded.freeze();
        // An error: nobody has subscribed.
        let _ = self.messages.send(Message { topic: Bytes::copy_from_slice(frames[0]), encoded });
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, messages: broadcast::Sender<Message>) {
    let subscribers = Subscribers::default();
    loop {
        let (socket, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot take a subscriber of events");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(place) = subscribers.enter(from.ip()) else {
            tracing::debug!(%from, "a subscriber of events is turned away: there are too many");
            continue;
        };
        let messages = messages.subscribe();
        actix_rt::spawn(async move {
            if let Err(error) = serve(socket, messages).await {
                tracing::debug!(%from, %error, "a subscriber of events has gone");
            }
            drop(place);
        });
    }
}

/// Serves one subscriber until either side ends.
async fn serve(mut socket: TcpStream, mut messages: broadcast::Receiver<Message>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let (mut reader, mut writer) = socket.split();
    let mut buffer = BytesMut::with_capacity(MAX_FRAME_BYTES);
    timeout(SILENCE, greet(&mut reader, &mut writer, &mut buffer)).await??;
    let mut prefixes: Vec<Bytes> = Vec::new();
    loop {
        while let Some(said) = take_frame(&mut buffer)? {
            match said {
                Said::Command(command) => {
                    if let Some(pong) = pong(&command) {
                        timeout(SILENCE, writer.write_all(&pong)).await??;
                    }
                }
                Said::Message(message) => subscribe(&mut prefixes, message)?,
            }
        }
        tokio::select! {
            read = reader.read_buf(&mut buffer) => if read? == 0 {
                return Ok(());
            },
            message = messages.recv() => match message {
                Ok(message) if prefixes.iter().any(|prefix| message.topic.starts_with(prefix)) => {
                    timeout(SILENCE, writer.write_all(&message.encoded)).await??;
                }
                // It misses what it was too slow for, and sees so by the numbers.
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

/// Exchanges greetings and roles.
async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut BytesMut,
) -> io::Result<()> {
    writer.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING_BYTES];
    reader.read_exact(&mut theirs).await?;
    let is_null = theirs[12..32] == greeting()[12..32];
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !is_null {
        return Err(wrong("it does not speak ZMTP 3 with the NULL mechanism"));
    }
    let mut ready = BytesMut::new();
    put_frame(&mut ready, COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    writer.write_all(&ready).await?;
    loop {
        match take_frame(buffer)? {
            Some(Said::Command(command)) if command.starts_with(b"\x05READY") => return Ok(()),
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
fn take_frame(buffer: &mut BytesMut) -> io::Result<Option<Said>> {
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
    // A copy, which a subscription keeps: a part would keep all that was read.
    let body = Bytes::copy_from_slice(&buffer.split_to(bytes));
    Ok(Some(if flags & COMMAND != 0 { Said::Command(body) } else { Said::Message(body) }))
}

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
fn pong(command: &[u8]) -> Option<BytesMut> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut pong = BytesMut::new();
    put_frame(&mut pong, COMMAND, &[b"\x04PONG", context].concat());
    Some(pong)
}

/// Adds a subscription or ends one.
fn subscribe(prefixes: &mut Vec<Bytes>, mut message: Bytes) -> io::Result<()> {
    if message.is_empty() {
        return Err(wrong("its message says nothing"));
    }
    match message.get_u8() {
        1 if prefixes.len() == MAX_SUBSCRIPTIONS => return Err(wrong("it subscribes to too much")),
        1 => prefixes.push(message),
        0 => {
            if let Some(i) = prefixes.iter().position(|prefix| *prefix == message) {
                prefixes.swap_remove(i);
            }
        }
        _ => return Err(wrong("it sends what only publishers send")),
    }
    Ok(())
}

fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Subscribers {
    /// A place, if there is one.
    fn enter(&self, address: IpAddr) -> Option<Subscriber> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.values().sum::<usize>() >= MAX_SUBSCRIBERS
            || known.get(&address).is_some_and(|&subscribers| subscribers >= MAX_FROM_ONE_ADDRESS)
        {
            return None;
        }
        *known.entry(address).or_default() += 1;
        Some(Subscriber { all: self.clone(), address })
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let mut known = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(subscribers) = known.get_mut(&self.address) {
            *subscribers -= 1;
            if *subscribers == 0 {
                known.remove(&self.address);
            }
        }
    }
}

/// Flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

const GREETING_BYTES: usize = 64;

/// The longest frame of a subscriber: a subscription has a topic's prefix.
const MAX_FRAME_BYTES: usize = 1_024;

/// Subscriptions of one subscriber.
const MAX_SUBSCRIPTIONS: usize = 64;

/// Subscribers, in all and from one address.
const MAX_SUBSCRIBERS: usize = 256;
const MAX_FROM_ONE_ADDRESS: usize = 64;

/// Messages that wait for a subscriber, as many as ZeroMQ's own default (`ZMQ_SNDHWM`).
const WAITING_MESSAGES: usize = 1_000;

/// How long a subscriber may take to greet, and to take a message.
const SILENCE: Duration = Duration::from_secs(5);

/// How long to wait where the system gives no socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(flags: u8, body: &[u8]) -> BytesMut {
        let mut encoded = BytesMut::new();
        put_frame(&mut encoded, flags, body);
        encoded
    }

    #[test]
    fn a_frame_is_taken_when_it_is_whole() {
        let whole = [frame(0, b"\x01topic"), frame(COMMAND, &[7; 300])].concat();
        let mut buffer = BytesMut::new();
        let mut taken = Vec::new();
        for &byte in &whole {
            buffer.extend_from_slice(&[byte]);
            taken.extend(take_frame(&mut buffer).unwrap());
        }
        let expected = [Said::Message(Bytes::from_static(b"\x01topic")), Said::Command(vec![7; 300].into())];
        assert_eq!(taken, expected);
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
    fn a_subscription_ends_as_often_as_it_began_and_there_are_not_many() {
        let mut prefixes = Vec::new();
        let mut say = |bytes: &'static [u8]| {
            let said = subscribe(&mut prefixes, Bytes::from_static(bytes));
            (prefixes.len(), said.is_ok())
        };
        assert_eq!([say(b"\x01a"), say(b"\x01a"), say(b"\x01")].map(|(held, _)| held), [1, 2, 3]);
        assert_eq!([say(b"\x00a"), say(b"\x00b"), say(b"\x00a")].map(|(held, _)| held), [2, 2, 1]);
        assert!(!say(b"").1 && !say(b"\x02").1);
        assert!((0..MAX_SUBSCRIPTIONS).map(|_| say(b"\x01b")).any(|(_, ok)| !ok));
    }

    #[test]
    fn one_address_does_not_take_all_places() {
        let subscribers = Subscribers::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let places: Vec<_> = (0..MAX_SUBSCRIBERS).map_while(|_| subscribers.enter(address(1))).collect();
        assert_eq!(places.len(), MAX_FROM_ONE_ADDRESS);
        let others: Vec<_> = (2..=9)
            .flat_map(|last| vec![last; 60])
            .filter_map(|last| subscribers.enter(address(last)))
            .collect();
        assert_eq!(places.len() + others.len(), MAX_SUBSCRIBERS);
        drop(places);
        assert!(subscribers.enter(address(1)).is_some());
    }

    #[test]
    fn a_heartbeat_is_answered_with_its_own_context() {
        assert_eq!(pong(b"\x04PING\0\x0acontext").unwrap(), frame(COMMAND, b"\x04PONGcontext"));
        assert_eq!(pong(b"\x04PING"), None);
        assert_eq!(pong(b"\x05ERROR"), None);
    }
}
