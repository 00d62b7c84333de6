//! Bounds the number of connections that have not said hello, and chooses which connection makes way for a new one.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The connections to one tenant's socket that have not said hello. A new connection always gets a place: if none is free, the
/// oldest connection of the process with the most connections makes way. So silent connections keep no engine out.
#[derive(Clone, Default)]
pub(super) struct Greetings(Rc<RefCell<Waiting>>);

/// The process that connected, by its user and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Source {
    uid: u32,
    /// `None` for all processes that the node cannot see.
    pid: Option<i32>,
}

/// The place of one connection. The place is free again when this is dropped.
pub(super) struct Seat {
    greetings: Greetings,
    number: u64,
    /// Ready when the connection has to make way.
    makes_way: oneshot::Receiver<()>,
}

#[derive(Default)]
struct Waiting {
    /// The places by number, the oldest first.
    places: BTreeMap<u64, (Source, oneshot::Sender<()>)>,
    last: u64,
}

impl Source {
    /// The process at the other end. All processes that the system does not name count as one process.
    pub(super) fn of(socket: &UnixStream) -> Self {
        let known = socket.peer_cred().ok();
        Self {
            uid: known.map_or(u32::MAX, |known| known.uid()),
            pid: known.and_then(|known| known.pid()).filter(|&pid| pid > 0),
        }
    }
}

impl Greetings {
    /// Takes a place for a connection that was just accepted.
    pub(super) fn enter(&self, source: Source) -> Seat {
        let mut waiting = self.0.borrow_mut();
        waiting.make_room(source);
        waiting.last += 1;
        let (number, (sender, makes_way)) = (waiting.last, oneshot::channel());
        waiting.places.insert(number, (source, sender));
        Seat { greetings: self.clone(), number, makes_way }
    }
}

impl Seat {
    /// Waits until the connection has to make way for another connection.
    ///
    /// Cancel safe.
    pub(super) async fn makes_way(&mut self) {
        // An error: the connection was told before.
        let _ = (&mut self.makes_way).await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.greetings.0.borrow_mut().places.remove(&self.number);
    }
}

impl Waiting {
    /// Makes a connection give way if `source`, or all sources together, have as many connections as allowed.
    fn make_room(&mut self, source: Source) {
        let mut counts = HashMap::<Source, usize>::new();
        self.places.values().for_each(|(source, _)| *counts.entry(*source).or_default() += 1);
        let heaviest = if counts.get(&source).is_some_and(|&count| count >= MOST_OF_A_SOURCE) {
            source
        } else if self.places.len() >= MOST {
            let most = counts.values().copied().max().unwrap_or(0);
            let Some((source, _)) = self.places.values().find(|(source, _)| counts[source] == most) else {
                return;
            };
            *source
        } else {
            return;
        };
        let oldest =
            self.places.iter().find(|(_, (source, _))| *source == heaviest).map(|(&number, _)| number);
        if let Some((_, makes_way)) = oldest.and_then(|number| self.places.remove(&number)) {
            // An error: the connection has ended by itself.
            let _ = makes_way.send(());
        }
    }
}

/// Maximum number of connections to one tenant's socket that have not said hello.
const MOST: usize = 64;

/// Maximum number of these connections from one process: an engine opens a session for each of its ranks.
const MOST_OF_A_SOURCE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn source(pid: i32) -> Source {
        Source { uid: 1_000, pid: Some(pid) }
    }

    fn was_told(place: &mut Seat) -> bool {
        place.makes_way.try_recv().is_ok()
    }

    #[test]
    fn a_process_with_many_silent_connections_loses_its_oldest_and_nobody_elses() {
        let greetings = Greetings::default();
        let mut other = greetings.enter(source(1));
        let mut silent: Vec<Seat> = (0..MOST_OF_A_SOURCE + 3).map(|_| greetings.enter(source(2))).collect();
        let told: Vec<bool> = silent.iter_mut().map(was_told).collect();
        assert!(told[..3].iter().all(|&told| told) && !told[3..].iter().any(|&told| told), "{told:?}");
        assert!(!was_told(&mut other));
    }

    #[test]
    fn where_all_places_are_taken_the_process_with_the_most_makes_way() {
        let greetings = Greetings::default();
        let mut of_few: Vec<Seat> = (0..2).map(|_| greetings.enter(source(1))).collect();
        let mut of_many: Vec<Seat> = (0..10).map(|_| greetings.enter(source(2))).collect();
        let mut singles: Vec<Seat> = (0..MOST - 12).map(|i| greetings.enter(source(10 + i as i32))).collect();
        let mut newcomer = greetings.enter(source(9_999));
        assert!(was_told(&mut of_many[0]) && !of_many[1..].iter_mut().any(was_told));
        assert!(!of_few.iter_mut().chain(&mut singles).any(was_told) && !was_told(&mut newcomer));
        assert_eq!(greetings.0.borrow().places.len(), MOST);
    }

    #[test]
    fn whoever_leaves_frees_its_place() {
        let greetings = Greetings::default();
        for _ in 0..3 * MOST {
            let mut place = greetings.enter(source(1));
            assert!(!was_told(&mut place));
        }
        assert!(greetings.0.borrow().places.is_empty());
    }
}
