//! Streams between nodes, like QUIC's: each is in order, and lost messages are sent again until the connection is given up.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::exchange::Body;
use crate::network::{Packed, Packet, Party};
use crate::process::Own;
use crate::world::{Happening, Life, World};

/// The streams of a process.
#[derive(Default)]
pub(crate) struct Streams {
    /// Number of messages sent, by host and call.
    sent: BTreeMap<(usize, u64), u64>,
    /// The arriving streams, by sender and call.
    coming: BTreeMap<(Life, u64), Coming>,
    /// Number of lost connections to each host.
    lost: BTreeMap<usize, u64>,
}

/// The state of an arriving stream.
#[derive(Default)]
struct Coming {
    next: u64,
    /// Messages that came before their turn.
    early: BTreeMap<u64, Body>,
}

/// A message on a stream.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    from: Life,
    to: usize,
    /// For an answer, the life that it is meant for.
    meant: Option<Life>,
    number: u64,
    body: Body,
}

/// A message that was lost.
#[derive(Debug)]
pub(crate) struct Again {
    message: Message,
    /// The number of connections lost before this message's connection.
    lost_before: u64,
    waited: Duration,
    pause: Duration,
}

impl World {
    /// Sends something to a peer, on the stream of its call.
    pub(crate) fn send(&mut self, from: Life, to: usize, meant: Option<Life>, body: &Body) {
        let Some(process) = self.process(from) else { return };
        let sent = process.streams.sent.entry((to, body.call())).or_default();
        let number = *sent;
        *sent += 1;
        let lost_before = process.streams.lost.get(&to).copied().unwrap_or(0);
        let message = Message { from, to, meant, number, body: body.clone() };
        self.send_again(from, Again { message, lost_before, waited: Duration::ZERO, pause: FIRST_PAUSE });
    }

    /// Sends a message for the first time, or again.
    pub(crate) fn send_again(&mut self, life: Life, Again { message, lost_before, waited, pause }: Again) {
        let to = message.to;
        let Some(process) = self.process(life) else { return };
        if process.streams.lost.get(&to).copied().unwrap_or(0) > lost_before {
            return;
        }
        let (sender, receiver) = (Party::Host(life.host), Party::Host(to));
        let arrivals = self.arrivals(sender, receiver, message.body.bytes());
        if arrivals.is_empty() {
            if waited >= IDLE_TIMEOUT {
                return self.connection_is_lost(life, to);
            }
            let again = Again { message, lost_before, waited: waited + pause, pause: pause * 2 };
            return self.plan_local(life, pause, Own::SendAgain(again));
        }
        for after in arrivals {
            let body = Packed::Peer(message.clone());
            self.plan(after, Happening::Packet(Packet { from: sender, to: receiver, body }));
        }
    }

    /// A message arrives, perhaps before its turn, perhaps for the second time.
    pub(crate) fn message_comes(&mut self, life: Life, message: Message) {
        let Message { from, meant, number, body, .. } = message;
        let Some(process) = self.process(life) else { return };
        if meant.is_some_and(|meant| meant != life) {
            return;
        }
        let call = body.call();
        let coming = process.streams.coming.entry((from, call)).or_default();
        if number >= coming.next {
            coming.early.insert(number, body);
        }
        while let Some(process) = self.process(life) {
            let Some(coming) = process.streams.coming.get_mut(&(from, call)) else { return };
            let Some(body) = coming.early.remove(&coming.next) else { return };
            coming.next += 1;
            self.peer_says(life, from, body);
        }
    }

    /// Nothing has come through for so long that both ends give the connection up.
    fn connection_is_lost(&mut self, life: Life, host: usize) {
        self.note("lost", &[life.host as u64, host as u64]);
        let other = self.hosts[host].process.as_ref().map(|process| (process.life, life.host));
        for (life, host) in [Some((life, host)), other].into_iter().flatten() {
            let Some(process) = self.process(life) else { continue };
            *process.streams.lost.entry(host).or_default() += 1;
            self.stop_asking(life, |_, at| at == host);
            self.stop_serving(life, host);
        }
    }
}

/// The pause before a lost message is sent again; then twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(40);
/// How long a connection lives without any message coming through.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
