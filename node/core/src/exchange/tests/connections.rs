//! Tests of which connections are kept: single rules, then random histories of nodes that dial, ask and close over a slow
//! network.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::connections::MAX_IDLE;
use super::*;

/// The connections of node `a`, at most `most`.
fn of_a(most: usize) -> Connections {
    let mut connections = Connections::new(most, MAX_IDLE);
    connections.set_own("a");
    connections
}

fn closes(connections: &mut Connections, now: Duration) -> Vec<(ConnectionId, Closing)> {
    connections.tick(now);
    std::iter::from_fn(|| connections.poll_close()).collect()
}

/// A connection that the peer dialed from its own address.
fn came(connections: &mut Connections, now: Duration, peer: &str) -> ConnectionId {
    let id = connections.opened(now, peer, Dialler::There);
    connections.is_at_home(id);
    id
}

fn uses(connections: &mut Connections, now: Duration, id: ConnectionId) {
    connections.begins(id);
    connections.ends(now, id, false);
}

#[test]
fn a_connection_that_the_peer_dialled_is_used_unless_it_came_from_elsewhere() {
    let mut a = of_a(9);
    let other = a.opened(ms(0), "b", Dialler::There);
    assert_eq!(a.used("b"), None);
    assert_eq!(a.unknown().collect::<Vec<_>>(), [other]);
    a.is_at_home(other);
    assert_eq!((a.used("b"), a.used("c"), a.unknown().count()), (Some(other), None, 0));
}

#[test]
fn of_two_dials_at_once_that_of_the_lower_name_is_kept_and_of_two_in_turn_the_later_one() {
    for here_first in [true, false] {
        let mut a = of_a(9);
        let [mut here, mut there] = [None, None];
        for at in 0..2 {
            if (at == 0) == here_first {
                here = Some(a.opened(ms(at * 500), "b", Dialler::Here));
            } else {
                there = Some(came(&mut a, ms(at * 500), "b"));
            }
        }
        assert_eq!(a.used("b"), here);
        assert_eq!(closes(&mut a, ms(1_750)), [(there.unwrap(), Closing::Double)]);
        let later = came(&mut a, ms(10_000), "b");
        assert_eq!(a.used("b"), Some(later), "the peer does not see the first any more");
    }
}

#[test]
fn a_second_connection_to_a_peer_closes_when_idle_and_is_used_if_the_first_breaks() {
    let mut a = of_a(9);
    let double = came(&mut a, ms(0), "b");
    a.begins(double);
    let kept = a.opened(ms(1), "b", Dialler::Here);
    assert_eq!(closes(&mut a, ms(20_000)), []);
    a.closed(kept);
    assert_eq!(a.used("b"), Some(double));
    let again = a.opened(ms(20_000), "b", Dialler::Here);
    a.ends(ms(20_100), double, false);
    assert_eq!(closes(&mut a, ms(21_099)), []);
    assert_eq!(closes(&mut a, ms(21_100)), [(double, Closing::Double)]);
    assert_eq!(a.used("b"), Some(again));
}

#[test]
fn a_connection_closes_a_minute_after_its_last_use_and_requests_that_ride_are_no_use() {
    let mut a = of_a(9);
    let id = a.opened(ms(0), "b", Dialler::Here);
    a.begins(id);
    assert_eq!((a.next_deadline(), closes(&mut a, MAX_IDLE * 2)), (None, vec![]), "something is in flight");
    let used = MAX_IDLE * 2;
    a.ends(used, id, false);
    a.begins(id);
    a.ends(used + MAX_IDLE / 2, id, true);
    assert_eq!(closes(&mut a, used + MAX_IDLE - ms(1)), []);
    assert_eq!(a.next_deadline(), Some(used + MAX_IDLE));
    assert_eq!(closes(&mut a, used + MAX_IDLE), [(id, Closing::Idle)]);
    assert!(a.is_empty() && a.used("b").is_none());
}

#[test]
fn beyond_the_bound_the_connection_goes_that_was_used_longest_ago_and_none_that_is_in_use() {
    let mut a = of_a(2);
    let [b, c, d] = ["b", "c", "d"].map(|peer| a.opened(ms(0), peer, Dialler::Here));
    a.begins(b);
    uses(&mut a, ms(10), d);
    uses(&mut a, ms(20), c);
    assert_eq!(closes(&mut a, ms(100)), [], "their askers may only just have them");
    assert_eq!(closes(&mut a, ms(300)), [(d, Closing::Bound)]);
    a.begins(c);
    let e = a.opened(ms(400), "e", Dialler::Here);
    assert_eq!(closes(&mut a, ms(600)), []);
    a.begins(e);
    assert_eq!(closes(&mut a, ms(5_000)), [], "all are in use");
    a.ends(ms(5_000), b, false);
    assert_eq!(a.next_deadline(), Some(ms(5_250)));
    assert_eq!(closes(&mut a, ms(5_250)), [(b, Closing::Bound)]);
}

#[test]
fn a_connection_that_just_came_waits_for_its_first_request() {
    let mut a = Connections::new(1, ms(10));
    let id = came(&mut a, ms(0), "b");
    assert_eq!(closes(&mut a, ms(259)), []);
    assert_eq!(closes(&mut a, ms(260)), [(id, Closing::Idle)]);
}

#[test]
fn another_life_is_dialled_and_what_the_peer_dialled_before_ends_its_requests() {
    let mut a = of_a(9);
    let (dialled, other) = (a.opened(ms(0), "b", Dialler::Here), a.opened(ms(0), "c", Dialler::Here));
    a.begins(dialled);
    let came = a.opened(ms(10), "b", Dialler::There);
    a.begins(came);
    a.gone("b");
    assert_eq!(closes(&mut a, ms(20)), [(dialled, Closing::Gone)]);
    assert_eq!((a.used("b"), a.used("c")), (None, Some(other)));
    a.is_at_home(came);
    assert_eq!(a.used("b"), None, "it may lead to the earlier life");
    a.ends(ms(30), came, false);
    assert_eq!(closes(&mut a, ms(2_000)), [(came, Closing::Double)]);
}

#[test]
fn in_random_histories_no_request_fails_and_each_pair_ends_with_one_connection() {
    let first: u64 = std::env::var("LARDER_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + 300 {
        // The output is shown if the history fails.
        println!("LARDER_SEED={seed}");
        let mut world = World::new(seed);
        world.live();
    }
}

/// Nodes with their connections, and the network between them.
struct World {
    random: fastrand::Rng,
    now: Duration,
    nodes: Vec<Peer>,
    wires: Vec<Wire>,
    queue: BinaryHeap<Reverse<(Duration, u64, Step)>>,
    planned: u64,
    asked: usize,
    answered: usize,
    asked_again: usize,
    dials: usize,
}

struct Peer {
    connections: Connections,
    wires: BTreeMap<ConnectionId, usize>,
    /// For each peer that is being dialed, the requests that wait for the connection.
    dialling: BTreeMap<usize, Vec<Request>>,
}

/// A connection in the network, with its end at each of two nodes.
struct Wire {
    ends: [(usize, ConnectionId, End); 2],
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct End {
    is_open: bool,
    asks: usize,
    serves: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Request {
    from: usize,
    to: usize,
    attempts: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Ask(Request),
    Dialled(usize, usize),
    Came(Request, usize),
    Served(Request, usize),
    Answer(Request, usize),
    Acknowledged(Request, usize),
    /// An end hears that the other end closed.
    Closed(usize, usize),
    Refused(Request, usize),
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let most = random.usize(1..6);
        let max_idle = ms(random.u64(100..3_000));
        let node = |number: usize| {
            let mut connections = Connections::new(most, max_idle);
            connections.set_own(&name(number));
            Peer { connections, wires: BTreeMap::new(), dialling: BTreeMap::new() }
        };
        let nodes = (0..random.usize(2..7)).map(node).collect();
        let (wires, queue) = (Vec::new(), BinaryHeap::new());
        let (planned, asked, answered, asked_again, dials) = (0, 0, 0, 0, 0);
        Self { random, now: ms(0), nodes, wires, queue, planned, asked, answered, asked_again, dials }
    }

    fn live(&mut self) {
        for _ in 0..200 {
            let from = self.random.usize(0..self.nodes.len());
            let to = self.random.usize(0..self.nodes.len());
            if from != to {
                self.asked += 1;
                self.plan(0, Step::Ask(Request { from, to, attempts: 0 }));
            }
            let pause = if self.random.u8(..) < 4 { 70_000 } else { self.random.u64(0..400) };
            self.pass(ms(pause));
        }
        self.pass(ms(10_000));
        assert_eq!(self.answered, self.asked, "every request is answered");
        for from in 0..self.nodes.len() {
            for to in 0..from {
                let open = |wire: &&Wire| {
                    let pair = [wire.ends[0].0, wire.ends[1].0];
                    (pair == [from, to] || pair == [to, from]) && wire.ends[0].2.is_open
                };
                assert!(self.wires.iter().filter(open).count() <= 1, "{from} and {to} have one connection");
                let used = |of: usize, peer: usize| {
                    let node = &self.nodes[of];
                    node.connections.used(&name(peer)).map(|id| node.wires[&id])
                };
                assert_eq!(used(from, to), used(to, from), "{from} and {to} use the same one");
            }
        }
        self.pass(MAX_IDLE);
        assert!(
            self.nodes.iter().all(|node| node.connections.is_empty()),
            "all are closed when nobody speaks"
        );
    }

    fn plan(&mut self, after_ms: u64, step: Step) {
        self.planned += 1;
        self.queue.push(Reverse((self.now + ms(after_ms), self.planned, step)));
    }

    fn delay(&mut self) -> u64 {
        self.random.u64(0..40)
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let tick = self.nodes.iter().filter_map(|node| node.connections.next_deadline()).min();
            let next = self.queue.peek().map(|Reverse((at, ..))| *at);
            let Some(at) = tick.into_iter().chain(next).min().filter(|&at| at <= end) else { break };
            self.now = self.now.max(at);
            if next.is_some_and(|next| next <= self.now) {
                let Some(Reverse((_, _, step))) = self.queue.pop() else { break };
                self.step(step);
            }
            for node in 0..self.nodes.len() {
                self.nodes[node].connections.tick(self.now);
                self.close_those(node);
            }
        }
        self.now = end;
    }

    /// Closes the connections that a node wants closed. Nothing may be in flight on them.
    fn close_those(&mut self, node: usize) {
        while let Some((id, why)) = self.nodes[node].connections.poll_close() {
            assert!(why.is_idle());
            let at = self.nodes[node].wires.remove(&id).unwrap();
            let end = self.end(at, node);
            assert_eq!(*end, End { is_open: true, asks: 0, serves: 0 }, "{why:?}");
            end.is_open = false;
            let delay = self.delay();
            self.plan(delay, Step::Closed(self.other(at, node), at));
        }
    }

    fn end(&mut self, wire: usize, node: usize) -> &mut End {
        let ends = &mut self.wires[wire].ends;
        &mut ends.iter_mut().find(|end| end.0 == node).unwrap().2
    }

    fn id(&self, wire: usize, node: usize) -> ConnectionId {
        self.wires[wire].ends.iter().find(|end| end.0 == node).unwrap().1
    }

    fn other(&self, wire: usize, node: usize) -> usize {
        self.wires[wire].ends.iter().find(|end| end.0 != node).unwrap().0
    }

    fn step(&mut self, step: Step) {
        let delay = self.delay();
        match step {
            Step::Ask(request) => self.ask(request, delay),
            Step::Dialled(from, to) => self.dialled(from, to),
            Step::Came(request, wire) => {
                if !self.end(wire, request.to).is_open {
                    return self.plan(delay, Step::Refused(request, wire));
                }
                self.end(wire, request.to).serves += 1;
                let id = self.id(wire, request.to);
                self.nodes[request.to].connections.begins(id);
                let took = self.random.u64(0..100);
                self.plan(took, Step::Served(request, wire));
            }
            Step::Served(request, wire) => {
                self.plan(delay, Step::Answer(request, wire));
            }
            Step::Answer(request, wire) => {
                self.answered += 1;
                self.ends(wire, request.from, true);
                self.plan(delay, Step::Acknowledged(request, wire));
            }
            // An asker that closed meanwhile acknowledges nothing. The end of the connection then ends the wait.
            Step::Acknowledged(request, wire) => self.ends(wire, request.to, false),
            Step::Closed(node, wire) => {
                if std::mem::take(&mut self.end(wire, node).is_open) {
                    let id = self.id(wire, node);
                    self.nodes[node].wires.remove(&id);
                    self.nodes[node].connections.closed(id);
                }
            }
            Step::Refused(request, wire) => {
                self.step(Step::Closed(request.from, wire));
                self.end(wire, request.from).asks -= 1;
                self.asked_again += 1;
                assert!(request.attempts < 3, "{request:?}");
                self.step(Step::Ask(Request { attempts: request.attempts + 1, ..request }));
            }
        }
    }

    fn ask(&mut self, request: Request, delay: u64) {
        let Request { from, to, .. } = request;
        if let Some(id) = self.nodes[from].connections.used(&name(to)) {
            let wire = self.nodes[from].wires[&id];
            self.nodes[from].connections.begins(id);
            self.end(wire, from).asks += 1;
            return self.plan(delay, Step::Came(request, wire));
        }
        let waiting = self.nodes[from].dialling.entry(to).or_default();
        waiting.push(request);
        if waiting.len() == 1 {
            self.dials += 1;
            self.plan(delay, Step::Dialled(from, to));
        }
    }

    /// Opens both ends of a new connection, and sends the waiting requests.
    fn dialled(&mut self, from: usize, to: usize) {
        let wire = self.wires.len();
        let here = self.nodes[from].connections.opened(self.now, &name(to), Dialler::Here);
        let there = self.nodes[to].connections.opened(self.now, &name(from), Dialler::There);
        self.nodes[to].connections.is_at_home(there);
        self.nodes[from].wires.insert(here, wire);
        self.nodes[to].wires.insert(there, wire);
        let end = End { is_open: true, asks: 0, serves: 0 };
        self.wires.push(Wire { ends: [(from, here, end), (to, there, end)] });
        for request in self.nodes[from].dialling.remove(&to).unwrap_or_default() {
            let delay = self.delay();
            self.ask(request, delay);
        }
    }

    fn ends(&mut self, wire: usize, node: usize, is_asker: bool) {
        let end = self.end(wire, node);
        if is_asker {
            end.asks -= 1
        } else {
            end.serves -= 1
        }
        let id = self.id(wire, node);
        self.nodes[node].connections.ends(self.now, id, false);
    }
}

fn name(number: usize) -> String {
    format!("node-{number}")
}
