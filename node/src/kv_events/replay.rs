//! A ZeroMQ ROUTER socket that sends old messages again, as vLLM's does, or snapshots of the held chunks.
//!
//! A request has an empty frame, which REQ sockets add by themselves, and the number of the first wanted message, 8 bytes, big
//! endian. The answer repeats each message from this number on: an empty frame, topic, number, payload. The last message of the
//! answer has an empty topic, an empty payload and the number -1. There are two additions to vLLM's protocol. A third frame of
//! the request has the prefix of the wanted topics, for nodes with several topics. The number -2 asks for a snapshot. Its
//! messages have the number of the last live message that the snapshot includes, so a subscriber goes on after this number.
//!
//! An answer takes memory until its guest has read it, so answers have places: few in all, one for an address, and each for a
//! limited time.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::told::Event;
use super::zmtp::{
    GuestMessage, MAX_FRAME_BYTES, SILENCE, accept, greet, pong, put_message, take_frame, wrong,
};
use crate::config::EventHashes;
use crate::guests::{Guest, Guests};

/// Keeps messages, and sends them again. Once dropped, it takes no more requests.
pub(super) struct Replay {
    kept: Arc<Mutex<Kept>>,
    asks: mpsc::Receiver<Ask>,
    accepting: actix_rt::task::JoinHandle<()>,
    address: SocketAddr,
}

/// A message that was sent, or one of a snapshot.
#[derive(Debug, Clone)]
pub(super) struct Old {
    pub(super) topic: Bytes,
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

/// The held chunks of one GPU in one topic, for a snapshot.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) topic: Bytes,
    pub(super) number: u64,
    pub(super) device: u16,
    pub(super) hashes: EventHashes,
    pub(super) events: Vec<Event>,
}

/// A request for a snapshot.
#[derive(Debug)]
pub(super) struct Ask {
    /// The prefix of the wanted topics.
    pub(super) topic: Bytes,
    /// Takes the snapshot.
    pub(super) answer: oneshot::Sender<Vec<Part>>,
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
        let answers = Guests::new(MAX_ANSWERS, 1);
        let accepting = actix_rt::spawn(accept(
            listener,
            Guests::new(MAX_GUESTS, MAX_FROM_ONE_ADDRESS),
            move |socket, place| {
                let (known, ask, answers) = (Arc::clone(&known), ask.clone(), answers.clone());
                actix_rt::spawn(async move {
                    let answer_place = || answer_place(&answers, &place);
                    if let Err(error) = serve(socket, &known, &ask, answer_place).await {
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
        larder_net::lock(&self.kept).add(message);
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

/// Serves one guest until it goes, or is silent for too long.
async fn serve(
    mut socket: TcpStream,
    kept: &Mutex<Kept>,
    ask: &mpsc::Sender<Ask>,
    answer_place: impl AsyncFn() -> Guest,
) -> io::Result<()> {
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
                    let request = request(&std::mem::take(&mut frames))?;
                    let _place = answer_place().await;
                    answer(&mut writer, request, kept, ask).await?;
                }
            }
            None if timeout(MOST_SILENCE, reader.read_buf(&mut buffer)).await?? == 0 => return Ok(()),
            None => {}
        }
    }
}

/// Waits for the place of an answer.
async fn answer_place(answers: &Guests, guest: &Guest) -> Guest {
    loop {
        let left = answers.left();
        if let Some(place) = answers.enter(guest.address()) {
            return place;
        }
        left.await;
    }
}

async fn answer(
    writer: &mut (impl AsyncWrite + Unpin),
    request: Request,
    kept: &Mutex<Kept>,
    ask: &mpsc::Sender<Ask>,
) -> io::Result<()> {
    match request {
        Request::From(number, topic) => {
            let messages = larder_net::lock(kept).from(number, &topic);
            send(writer, messages.into_iter()).await
        }
        Request::Snapshot(topic) => {
            let (answer, made) = oneshot::channel();
            let stops = |()| wrong("the node stops");
            timeout(SILENCE, ask.send(Ask { topic, answer })).await?.map_err(|_| ()).map_err(stops)?;
            let parts = timeout(SILENCE, made).await?.map_err(|_| ()).map_err(stops)?;
            send(writer, parts.iter().flat_map(Part::messages)).await
        }
    }
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

/// Sends messages, and the message that ends an answer. Takes a message when the one before it has been sent. Ends with an error if
/// the guest reads too slowly.
async fn send(writer: &mut (impl AsyncWrite + Unpin), messages: impl Iterator<Item = Old>) -> io::Result<()> {
    let end = Old { topic: Bytes::new(), number: END.cast_unsigned(), payload: Bytes::new() };
    let (mut until, mut sent) = (Instant::now() + ANSWER_PATIENCE, 0);
    for Old { topic, number, payload } in messages.chain([end]) {
        let mut encoded = BytesMut::new();
        put_message(&mut encoded, &[b"", &topic, &number.to_be_bytes(), &payload]);
        drop(payload);
        sent += encoded.len() as u64;
        until += Duration::from_millis(sent / SLOWEST_BYTES_A_MS);
        sent %= SLOWEST_BYTES_A_MS;
        timeout_at(until, timeout(SILENCE, writer.write_all(&encoded))).await???;
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

/// A guest without a word for this time gives its place to others. ZeroMQ's clients connect again by themselves.
const MOST_SILENCE: Duration = Duration::from_secs(600);

/// Maximum number of answers at a time. Each may keep as much as [`MOST_KEPT_BYTES`].
const MAX_ANSWERS: usize = 4;

/// How long an answer may take, and the slowest rate of its bytes beyond that: a guest that reads more slowly keeps its place from
/// others.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST_BYTES_A_MS: u64 = 1_000;

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

    #[tokio::test]
    async fn an_answer_is_made_as_fast_as_it_is_read() {
        let (mut writer, mut reader) = tokio::io::duplex(100);
        let made = std::cell::Cell::new(0);
        let messages = (0..10).map(|number| {
            made.set(made.get() + 1);
            old("a", number, 100)
        });
        let mut sending = Box::pin(send(&mut writer, messages));
        let read = async {
            let mut bytes = [0; 117];
            for begun in 1..9 {
                tokio::task::yield_now().await;
                assert!(made.get() <= begun, "{} are made, {begun} are begun", made.get());
                reader.read_exact(&mut bytes).await.unwrap();
            }
        };
        tokio::select! {
            biased;
            sent = &mut sending => panic!("the guest has not read all of it: {sent:?}"),
            () = read => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_asks_nothing_for_long_gives_its_place_to_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let ours = listener.accept().await.unwrap().0;
        let kept = Mutex::new(Kept { messages: VecDeque::new(), most: 3, bytes: 0 });
        let (ask, _asks) = mpsc::channel(1);
        let guests = Guests::new(1, 1);
        let serving = serve(ours, &kept, &ask, async || guests.enter([127, 0, 0, 1].into()).unwrap());
        let guest = async {
            let (mut reader, mut writer) = theirs.split();
            greet(&mut reader, &mut writer, &mut BytesMut::new(), "REQ").await.unwrap();
            let greeted = Instant::now();
            let end = reader.read_u8().await;
            (end.unwrap_err().kind(), greeted.elapsed())
        };
        let (served, (end, silent)) = tokio::join!(async { drop(serving.await) }, guest);
        assert_eq!((served, end), ((), io::ErrorKind::UnexpectedEof));
        assert!((MOST_SILENCE..MOST_SILENCE * 2).contains(&silent), "{silent:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_slow_guests_of_one_address_wait_for_each_other_and_for_nobody_else() {
        let (guests, answers) = (Guests::new(8, 8), Guests::new(MAX_ANSWERS, 1));
        let guest = |last| guests.enter([127, 0, 0, last].into()).unwrap();
        let (one, two, other) = (guest(1), guest(1), guest(2));
        let held = answer_place(&answers, &one).await;
        let _other = answer_place(&answers, &other).await;
        let patience = Duration::from_secs(1);
        assert!(timeout(patience, answer_place(&answers, &two)).await.is_err());
        drop(held);
        assert!(timeout(patience, answer_place(&answers, &two)).await.is_ok());
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
