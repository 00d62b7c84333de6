//! A ZeroMQ PUB socket: the part of publish and subscribe (<https://rfc.zeromq.org/spec/29/>) that a publisher needs. A
//! subscriber's subscriptions and waiting messages are bounded too.

use std::io;
use std::net::SocketAddr;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;

use super::zmtp::{
    GuestMessage, MAX_FRAME_BYTES, SILENCE, accept, greet, pong, put_message, take_frame, wrong,
};
use crate::guests::Guests;

/// Sends messages to the subscribers of their topics. Once dropped, it takes no more subscribers.
pub(super) struct Publisher {
    messages: broadcast::Sender<Message>,
    accepting: actix_rt::task::JoinHandle<()>,
}

/// A message on its way to every subscriber.
#[derive(Debug, Clone)]
struct Message {
    topic: Bytes,
    /// The message's frames, as they are sent.
    encoded: Bytes,
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
        let all = messages.clone();
        let accepting = actix_rt::spawn(accept(
            listener,
            Guests::new(MAX_SUBSCRIBERS, MAX_FROM_ONE_ADDRESS),
            move |socket, place| {
                let messages = all.subscribe();
                actix_rt::spawn(async move {
                    if let Err(error) = serve(socket, messages).await {
                        tracing::debug!(%error, "a subscriber of events has gone");
                    }
                    drop(place);
                });
            },
        ));
        Ok((Self { messages, accepting }, bound))
    }

    /// Sends a message of these frames; the first is the topic. A subscriber that is [`WAITING_MESSAGES`] behind misses messages.
    pub(super) fn send(&self, frames: [&[u8]; 3]) {
        let mut encoded = BytesMut::new();
        put_message(&mut encoded, &frames);
        // An error: nobody has subscribed.
        let _ = self
            .messages
            .send(Message { topic: Bytes::copy_from_slice(frames[0]), encoded: encoded.freeze() });
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Serves one subscriber until either side ends.
async fn serve(mut socket: TcpStream, mut messages: broadcast::Receiver<Message>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let (mut reader, mut writer) = socket.split();
    let mut buffer = BytesMut::with_capacity(MAX_FRAME_BYTES);
    timeout(SILENCE, greet(&mut reader, &mut writer, &mut buffer, "PUB")).await??;
    let mut prefixes: Vec<Bytes> = Vec::new();
    loop {
        while let Some(said) = take_frame(&mut buffer)? {
            match said {
                GuestMessage::Command(command) => {
                    if let Some(pong) = pong(&command) {
                        timeout(SILENCE, writer.write_all(&pong)).await??;
                    }
                }
                GuestMessage::Message(message, _) => subscribe(&mut prefixes, message)?,
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
                // A slow subscriber misses messages, and sees the gap in their numbers.
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
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
        _ => return Err(wrong("it sends messages that only publishers send")),
    }
    Ok(())
}

/// Maximum number of subscriptions of one subscriber.
const MAX_SUBSCRIPTIONS: usize = 64;

/// Maximum number of subscribers, in all and from one address.
const MAX_SUBSCRIBERS: usize = 256;
const MAX_FROM_ONE_ADDRESS: usize = 64;

/// Maximum number of messages that wait for a subscriber: the same as ZeroMQ's default (`ZMQ_SNDHWM`).
pub(super) const WAITING_MESSAGES: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

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
}
