//! A ZeroMQ ROUTER socket that sends old messages again, as vLLM's does, or snapshots of the held chunks.
//!
//! A request has an empty frame, which REQ sockets add by themselves, and the number of the first wanted message, 8 bytes, big
//! endian. The answer repeats each message from this number on: an empty frame, topic, number, payload. The last message of the
//! answer has an empty topic, an empty payload and the number -1. There are two additions to vLLM's protocol. A third frame of
//! the request has the prefix of the wanted topics, for nodes with several topics. The number -2 asks for a snapshot. Its
//! messages have the number of the last live message that the snapshot includes, so a subscriber goes on after this number.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::zmtp::{
    GuestMessage, Guests, MAX_FRAME_BYTES, SILENCE, accept, greet, pong, put_message, take_frame, wrong,
};

/// Keeps messages, and sends them again. Once dropped, it takes no more requests.
pub(super) struct Replay {
    kept: Arc<Mutex<Kept>>,
    asks: mpsc::Receiver<Ask>,
    accepting: actix_rt::task::JoinHandle<()>,
    address: SocketAddr,
}

/// A message that was sent, or a part of a snapshot.
#[derive(Debug, Clone)]
pub(super) struct Old {
    pub(super) topic: Bytes,
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

/// A request for a snapshot.
#[derive(Debug)]
pub(super) struct Ask {
    /// The prefix of the wanted topics.
    pub(super) topic: Bytes,
    /// Takes the snapshot.
    pub(super) answer: oneshot::Sender<Vec<Old>>,
}

#[derive(Debug)]
struct Kept {
    messages: VecDeque<Old>,
    most: usize,
    bytes: usize,
}

/// A guest's request.
#[derive(Debug, PartialEq)]
enum Request {
    From(u64, Bytes),
    Snapshot(Bytes),
}

impl Replay {
    /// Listens, and keeps `most` messages. Needs an actix system.
    ///
    /// # Errors
    /// The system's error.
    pub(super) async fn bind(listen: SocketAddr, most: usize) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let kept = Arc::new(Mutex::new(Kept { messages: VecDeque::new(), most, bytes: 0 }));
        let (ask, asks) = mpsc::channel(MAX_GUESTS);
        let known = Arc::clone(&kept);
        let accepting = actix_rt::spawn(accept(
            listener,
            Guests::new(MAX_GUESTS, MAX_FROM_ONE_ADDRESS),
            move |socket, place| {
                let (known, ask) = (Arc::clone(&known), ask.clone());
                actix_rt::spawn(async move {
                    if let Err(error) = serve(socket, &known, &ask).await {
                        tracing::debug!(%error, "a replay of events has ended");
                    }
                    drop(place);
                });
            },
        ));
        Ok(Self { kept, asks, accepting, address })
    }

    /// The address of the socket.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Keeps a message.
    pub(super) fn keep(&self, message: Old) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).add(message);
    }

    /// Waits for the next request for a snapshot.
    ///
    /// Cancel safe.
    pub(super) async fn asked(&mut self) -> Ask {
        match self.asks.recv().await {
            Some(ask) => ask,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Kept {
    fn add(&mut self, message: Old) {
        self.bytes += message.payload.len();
        self.messages.push_back(message);
        while (self.messages.len() > self.most || self.bytes > MOST_KEPT_BYTES)
            && let Some(oldest) = self.messages.pop_front()
        {
            self.bytes -= oldest.payload.len();
        }
    }

    fn from(&self, number: u64, topic: &[u8]) -> Vec<Old> {
        let wanted = |message: &&Old| message.number >= number && message.topic.starts_with(topic);
        self.messages.iter().filter(wanted).cloned().collect()
    }
}

/// Serves one guest until it goes.
async fn serve(mut socket: TcpStream, kept: &Mutex<Kept>, ask: &mpsc::Sender<Ask>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let (mut reader, mut writer) = socket.split();
    let mut buffer = BytesMut::with_capacity(MAX_FRAME_BYTES);
    timeout(SILENCE, greet(&mut reader, &mut writer, &mut buffer, "ROUTER")).await??;
    let mut frames = Vec::new();
    loop {
        match take_frame(&mut buffer)? {
            Some(GuestMessage::Command(command)) => {
                if let Some(pong) = pong(&command) {
                    timeout(SILENCE, writer.write_all(&pong)).await??;
                }
            }
            Some(GuestMessage::Message(frame, is_more)) => {
                frames.push(frame);
                if frames.len() > MAX_FRAMES {
                    return Err(wrong("its request has too many frames"));
                }
                if !is_more {
                    let messages = match request(&std::mem::take(&mut frames))? {
                        Request::From(number, topic) => {
                            kept.lock().unwrap_or_else(PoisonError::into_inner).from(number, &topic)
                        }
                        Request::Snapshot(topic) => snapshot(ask, topic).await?,
                    };
                    answer(&mut writer, &messages).await?;
                }
            }
            None if reader.read_buf(&mut buffer).await? == 0 => return Ok(()),
            None => {}
        }
    }
}

async fn snapshot(ask: &mpsc::Sender<Ask>, topic: Bytes) -> io::Result<Vec<Old>> {
    let (answer, made) = oneshot::channel();
    ask.send(Ask { topic, answer }).await.map_err(|_| wrong("the node stops"))?;
    made.await.map_err(|_| wrong("the node stops"))
}

/// Reads a request.
fn request(frames: &[Bytes]) -> io::Result<Request> {
    let (number, topic) = match frames {
        [empty, number] if empty.is_empty() => (number, Bytes::new()),
        [empty, number, topic] if empty.is_empty() => (number, topic.clone()),
        _ => return Err(wrong("its request is not an empty frame and a number")),
    };
    let number = number[..].try_into().map_err(|_| wrong("its number has not 8 bytes"))?;
    Ok(match i64::from_be_bytes(number) {
        SNAPSHOT => Request::Snapshot(topic),
        _ => Request::From(u64::from_be_bytes(number), topic),
    })
}

async fn answer(writer: &mut (impl AsyncWrite + Unpin), messages: &[Old]) -> io::Result<()> {
    let end = Old { topic: Bytes::new(), number: END.cast_unsigned(), payload: Bytes::new() };
    for Old { topic, number, payload } in messages.iter().chain([&end]) {
        let mut encoded = BytesMut::new();
        put_message(&mut encoded, &[b"", topic, &number.to_be_bytes(), payload]);
        timeout(SILENCE, writer.write_all(&encoded)).await??;
    }
    Ok(())
}

/// The number of the message that ends an answer.
const END: i64 = -1;

/// The number that asks for a snapshot.
const SNAPSHOT: i64 = -2;

/// Maximum number of guests, in all and from one address.
const MAX_GUESTS: usize = 32;
const MAX_FROM_ONE_ADDRESS: usize = 8;

/// Maximum number of frames of a request.
const MAX_FRAMES: usize = 3;

/// Maximum bytes of all kept messages.
const MOST_KEPT_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn old(topic: &'static str, number: u64, bytes: usize) -> Old {
        Old { topic: Bytes::from_static(topic.as_bytes()), number, payload: vec![0; bytes].into() }
    }

    #[test]
    fn a_bounded_number_of_messages_is_kept_and_found_by_number_and_topic() {
        let mut kept = Kept { messages: VecDeque::new(), most: 3, bytes: 0 };
        for number in 0..4 {
            kept.add(old("kv@a", number, 10));
        }
        kept.add(old("kv@b", 0, 10));
        let found = |number, topic: &str| {
            let found = kept.from(number, topic.as_bytes());
            found.iter().map(|one| one.number).collect::<Vec<_>>()
        };
        assert_eq!(
            (found(0, ""), found(3, ""), found(0, "kv@a"), found(9, "")),
            (vec![2, 3, 0], vec![3], vec![2, 3], vec![])
        );
        assert_eq!(kept.bytes, 30);
    }

    #[test]
    fn long_messages_make_room_sooner() {
        let mut kept = Kept { messages: VecDeque::new(), most: 100, bytes: 0 };
        for number in 0..5 {
            kept.add(old("a", number, MOST_KEPT_BYTES / 2));
        }
        assert_eq!((kept.messages.len(), kept.bytes), (2, MOST_KEPT_BYTES));
    }

    #[test]
    fn a_request_is_an_empty_frame_and_a_number_and_perhaps_a_topic() {
        let frames = |frames: &[&'static [u8]]| {
            frames.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>()
        };
        let read = |given: &[&'static [u8]]| request(&frames(given)).ok();
        assert_eq!(read(&[b"", b"\0\0\0\0\0\0\0\x07"]), Some(Request::From(7, Bytes::new())));
        assert_eq!(
            read(&[b"", b"\0\0\0\0\0\0\0\x07", b"kv@"]),
            Some(Request::From(7, Bytes::from_static(b"kv@")))
        );
        assert_eq!(read(&[b"", b"\xff\xff\xff\xff\xff\xff\xff\xfe"]), Some(Request::Snapshot(Bytes::new())));
        assert_eq!(read(&[b"\0\0\0\0\0\0\0\x07"]), None);
        assert_eq!(read(&[b"", b"\x07"]), None);
        assert_eq!(read(&[]), None);
    }
}
