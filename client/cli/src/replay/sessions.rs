//! Finds the sessions of a trace, and chooses the request that may start next.
//!
//! A request is the next turn of the latest earlier request whose whole prompt it continues: of all earlier requests, this one
//! shares the longest prefix with it. A turn starts when the turn before was saved, as a user types after the answer. The first
//! request that continues a turn stays in the turn's session; each further one begins a new session.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::trace::Request;

/// The place of a request among the sessions of its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// The request whose prompt and answer this request continues.
    pub after: Option<usize>,
    /// The request's session: sessions are numbered by their first request.
    pub session: usize,
}

/// The turns of a trace, by request.
pub fn turns(requests: &[Request]) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::with_capacity(requests.len());
    let mut known = HashSet::<u64>::new();
    // By the last full block of a prompt: the latest request with this block, and whether another request continues it already.
    let mut ends = HashMap::<u64, (usize, bool)>::new();
    for (number, request) in requests.iter().enumerate() {
        let blocks = request.full_chunks();
        let shared = blocks.iter().rposition(|block| known.contains(block));
        let before = shared.and_then(|last| ends.get_mut(&blocks[last]));
        let before = before.filter(|(before, _)| request.input_tokens >= requests[*before].input_tokens);
        turns.push(match before {
            None => Turn { after: None, session: number },
            Some((before, goes_on)) => {
                let is_fork = std::mem::replace(goes_on, true);
                let session = if is_fork { number } else { turns[*before].session };
                Turn { after: Some(*before), session }
            }
        });
        known.extend(blocks);
        if let Some(&last) = blocks.last() {
            ends.insert(last, (number, false));
        }
    }
    turns
}

/// The order in which requests start: that of the trace, except for turns that wait for the turn before.
#[derive(Debug)]
pub struct Schedule {
    turns: Vec<Turn>,
    /// Sessions in flight at a time.
    most: usize,
    /// The next request of the trace.
    next: usize,
    done: Vec<bool>,
    /// Requests that came up and are not done, by session.
    open: BTreeMap<usize, usize>,
    /// Requests that came up and wait for the turn before.
    waiting: BTreeMap<usize, Vec<usize>>,
    /// Requests that may start, the last first.
    ready: Vec<usize>,
    /// Requests that came up and are not done.
    unfinished: usize,
}

impl Schedule {
    /// The schedule of these requests, with at most `most` sessions in flight.
    pub fn new(requests: &[Request], most: usize) -> Self {
        let turns = turns(requests);
        let done = vec![false; turns.len()];
        let (open, waiting, ready) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { turns, most: most.max(1), next: 0, done, open, waiting, ready, unfinished: 0 }
    }

    /// A request that may start now; `None` until another is done, or at the end.
    pub fn start(&mut self) -> Option<usize> {
        while self.ready.is_empty() && self.may_come_up() {
            let Turn { after, session } = self.turns[self.next];
            *self.open.entry(session).or_default() += 1;
            self.unfinished += 1;
            match after.filter(|&before| !self.done[before]) {
                Some(before) => self.waiting.entry(before).or_default().push(self.next),
                None => self.ready.push(self.next),
            }
            self.next += 1;
        }
        self.ready.pop()
    }

    /// Notes that a started request is done: its prompt was saved, as far as the node had room.
    pub fn done(&mut self, request: usize) {
        self.done[request] = true;
        self.unfinished -= 1;
        let next = self.waiting.remove(&request).unwrap_or_default();
        self.ready.extend(next);
        self.ready.sort_unstable_by(|a, b| b.cmp(a));
        let session = self.turns[request].session;
        if let Some(open) = self.open.get_mut(&session) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&session);
            }
        }
    }

    fn may_come_up(&self) -> bool {
        let Some(turn) = self.turns.get(self.next) else { return false };
        let has_place = self.open.len() < self.most || self.open.contains_key(&turn.session);
        has_place && self.unfinished < self.most * AHEAD
    }
}

/// Requests that may have come up for each session in flight. A turn that waits lets later requests start before their turn, but
/// so few that the order stays close to the trace's.
const AHEAD: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tokens: u64, block_ids: &[u64]) -> Request {
        Request { timestamp_ms: 0, input_tokens: tokens, output_tokens: 1, block_ids: block_ids.to_vec() }
    }

    fn turn(after: impl Into<Option<usize>>, session: usize) -> Turn {
        Turn { after: after.into(), session }
    }

    /// Two sessions with one head; the second goes on twice, and its last turn has an answer edited out.
    fn sessions() -> Vec<Request> {
        vec![
            request(1_100, &[1, 2, 90]),
            request(1_700, &[1, 3, 4, 91]),
            request(1_600, &[1, 2, 5, 92]),
            request(2_100, &[1, 3, 4, 6, 93]),
            request(1_800, &[1, 3, 4, 94]),
            request(1_600, &[1, 3, 7, 95]),
        ]
    }

    #[test]
    fn a_prompt_that_goes_on_with_a_whole_earlier_one_is_its_next_turn() {
        let expected = [turn(None, 0), turn(None, 1), turn(0, 0), turn(1, 1), turn(1, 4), turn(None, 5)];
        assert_eq!(turns(&sessions()), expected, "a shared head makes no session, and a fork begins one");
    }

    #[test]
    fn a_repeated_prompt_is_a_turn_and_a_shorter_one_is_not() {
        let requests = [request(1_100, &[1, 2, 3]), request(1_100, &[1, 2, 4]), request(1_050, &[1, 2, 5])];
        assert_eq!(turns(&requests), [turn(None, 0), turn(0, 0), turn(None, 2)]);
    }

    #[test]
    fn a_prompt_without_a_full_block_stands_alone() {
        assert_eq!(turns(&[request(100, &[1]), request(100, &[1])]), [turn(None, 0), turn(None, 1)]);
    }

    #[test]
    fn a_turn_starts_when_the_one_before_is_done_and_takes_no_place_meanwhile() {
        let mut schedule = Schedule::new(&sessions(), 2);
        assert_eq!((schedule.start(), schedule.start()), (Some(0), Some(1)));
        assert_eq!(schedule.start(), None, "two wait, and the next would be a third session");
        schedule.done(1);
        assert_eq!((schedule.start(), schedule.start()), (Some(3), None));
        schedule.done(0);
        assert_eq!((schedule.start(), schedule.start()), (Some(2), None));
        schedule.done(2);
        assert_eq!((schedule.start(), schedule.start()), (Some(4), None));
        schedule.done(3);
        assert_eq!((schedule.start(), schedule.start()), (Some(5), None));
    }

    #[test]
    fn one_session_in_flight_plays_the_trace_in_its_order() {
        let mut schedule = Schedule::new(&sessions(), 1);
        for expected in 0..6 {
            assert_eq!((schedule.start(), schedule.start()), (Some(expected), None));
            schedule.done(expected);
        }
        assert_eq!(schedule.start(), None);
    }

    #[test]
    fn whatever_order_requests_end_in_each_starts_once_and_after_the_turn_before() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let requests: Vec<Request> = crate::generator::Generator::new(seed).take(400).collect();
        let turns = turns(&requests);
        let mut schedule = Schedule::new(&requests, 8);
        let (mut running, mut done) = (Vec::new(), vec![false; requests.len()]);
        loop {
            while let Some(request) = schedule.start() {
                assert!(turns[request].after.is_none_or(|before| done[before]));
                running.push(request);
            }
            if running.is_empty() {
                break;
            }
            assert!(running.len() <= 8);
            let request = running.swap_remove(rng.usize(..running.len()));
            assert!(!std::mem::replace(&mut done[request], true));
            schedule.done(request);
        }
        assert!(done.into_iter().all(|done| done));
    }
}
