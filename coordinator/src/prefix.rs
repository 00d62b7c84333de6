//! Finds how much of a prefix each node holds, for routers that route by cache.
//!
//! The coordinator holds no rows: it asks the homes, as a node does. A home that answers late is left out for a second.

mod late;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use larder_net::quic::{Connection, read_message, write_message};
use larder_net::trace::{SpanKind, Trace};
use larder_protocol::peer::{Find, PeerRequest, PeerResponse, RowSpan};
use larder_protocol::table::{Holder, Member, NodeNumber, RowKey, Table};
use larder_protocol::{Chain, Fingerprint};
use serde::Serialize;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};

use self::late::LateHomes;
use crate::nodes::Nodes;
use crate::published::Published;

/// A question, and where its answer goes.
pub(crate) struct HoldingsQuery {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) chain: Chain,
    /// The trace of the question.
    pub(crate) trace: Trace,
    pub(crate) answer: oneshot::Sender<Holdings>,
}

/// How much of a prefix is held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Holdings {
    /// Chunks of the longest prefix whose chunks all have a holder.
    pub(crate) cluster_chunks: usize,
    /// Chunks of the longest prefix that each member holds alone, by name.
    pub(crate) chunks: BTreeMap<String, usize>,
    /// Chunks of the cluster's prefix that each member holds, wherever they are in it, by name.
    pub(crate) held: BTreeMap<String, usize>,
    /// Homes that did not answer, or answered late a moment ago: the counts above lack their rows.
    pub(crate) silent_homes: Vec<String>,
}

/// Answers questions, each after all its homes were asked together. Lives on the endpoint's thread.
pub(crate) async fn answer(
    nodes: Rc<Nodes>,
    tables: watch::Receiver<Arc<Published>>,
    mut questions: mpsc::Receiver<HoldingsQuery>,
) {
    let asker = Rc::new(Asker { nodes, late: RefCell::default() });
    let asking = Arc::new(Semaphore::new(MAX_ASKING));
    while let Some(HoldingsQuery { fingerprint, chain, trace, answer }) = questions.recv().await {
        // This never fails, since nobody closes the semaphore.
        let Ok(place) = Arc::clone(&asking).acquire_owned().await else { return };
        let (asker, table) = (Rc::clone(&asker), Arc::clone(tables.borrow().table()));
        actix_rt::spawn(async move {
            let holdings = asker.holdings(&table, &fingerprint, &chain, &trace).await;
            trace.count("larder.chunks_here", holdings.cluster_chunks as u64);
            drop(trace);
            // An error means that the router went away.
            let _ = answer.send(holdings);
            drop(place);
        });
    }
}

struct Asker {
    nodes: Rc<Nodes>,
    late: RefCell<LateHomes>,
}

impl Asker {
    async fn holdings(
        &self,
        table: &Table,
        fingerprint: &Fingerprint,
        chain: &Chain,
        trace: &Trace,
    ) -> Holdings {
        let rows: Vec<RowKey> = chain.chunks().map(|chunk| RowKey::new(fingerprint, &chunk)).collect();
        let mut by_home = BTreeMap::<NodeNumber, Vec<u32>>::new();
        for (position, row) in (0..).zip(&rows) {
            if let Some(home) = table.home(row.run.partition()) {
                by_home.entry(home).or_default().push(position);
            }
        }
        let asked = by_home.iter().map(|(&home, positions)| {
            let rows = positions.iter().map(|&position| rows[position as usize]).collect();
            async move { (home, positions, self.ask_home(table, home, rows, trace).await) }
        });
        let mut holders: Vec<Vec<Holder>> = vec![Vec::new(); rows.len()];
        let mut silent_homes = Vec::new();
        for (home, positions, answer) in join_all(asked).await {
            let Some(spans) = answer else {
                silent_homes.extend(table.member(home).map(|member| member.name.clone()));
                continue;
            };
            note(&mut holders, positions, &spans);
        }
        fold(table, &holders, silent_homes)
    }

    /// Asks a home for the holders of these rows; `None` if it does not answer in time, or was late a moment ago.
    async fn ask_home(
        &self,
        table: &Table,
        home: NodeNumber,
        rows: Vec<RowKey>,
        trace: &Trace,
    ) -> Option<Vec<RowSpan>> {
        let member = table.member(home)?;
        if !self.late.borrow_mut().is_asked(member, Instant::now()) {
            return None;
        }
        let trace = trace.child(SpanKind::Client, "find");
        trace.count("larder.chunks", rows.len() as u64);
        let mut used = None;
        let asked = async {
            let connection = self.nodes.connection(table, home).await.ok()?;
            ask(used.insert(connection), table, rows, &trace).await
        };
        let answer = timeout(HOME_DEADLINE, asked).await;
        if let (Err(_) | Ok(None), Some(used)) = (&answer, &used) {
            self.nodes.forget(home, used);
        }
        match answer {
            Ok(answer) => {
                self.late.borrow_mut().answered(home);
                match answer? {
                    PeerResponse::Rows(rows) => Some(rows.spans),
                    _ => None,
                }
            }
            Err(_) => {
                self.late.borrow_mut().was_late(table, member, Instant::now());
                None
            }
        }
    }
}

/// Asks a home for the holders of these rows; `None` if the connection is of no use any more.
async fn ask(
    connection: &Connection,
    table: &Table,
    rows: Vec<RowKey>,
    trace: &Trace,
) -> Option<PeerResponse> {
    let (mut send, mut receive) = connection.quic().open_bi().await.ok()?;
    if let Some(context) = trace.context() {
        write_message(&mut send, &PeerRequest::Trace(context)).await.ok()?;
    }
    write_message(&mut send, &PeerRequest::Find(Find { epoch: table.epoch, rows })).await.ok()?;
    send.finish().ok()?;
    read_message(&mut receive).await.ok()?
}

/// Notes a home's answer. An honest home names each chunk [`MAX_HOLDERS`] times at most; further holders are ignored.
fn note(holders: &mut [Vec<Holder>], positions: &[u32], spans: &[RowSpan]) {
    let mut named = positions.len() * MAX_HOLDERS;
    for span in spans {
        let within = span.from as usize..(span.to as usize).min(positions.len());
        let within = positions.get(within).unwrap_or_default();
        let Some(left) = named.checked_sub(within.len()) else { return };
        named = left;
        within.iter().for_each(|&position| holders[position as usize].push(span.holder));
    }
}

/// The prefixes that follow from the holders of single chunks.
fn fold(table: &Table, holders: &[Vec<Holder>], silent_homes: Vec<String>) -> Holdings {
    let cluster_chunks = holders.iter().take_while(|held| !held.is_empty()).count();
    let counts = count(&holders[..cluster_chunks]);
    let by_member = |count: &dyn Fn(&Counted) -> usize| {
        let of = |member: &Member| counts.get(&member.number).map_or(0, count);
        table.members.iter().map(|member| (member.name.clone(), of(member))).collect()
    };
    Holdings {
        cluster_chunks,
        chunks: by_member(&|counted| counted.prefix),
        held: by_member(&|counted| counted.held),
        silent_homes,
    }
}

/// Counts the chunks of each node in one pass: a cluster has thousands of members, a prefix thousands of chunks, and a chunk few
/// holders.
fn count(holders: &[Vec<Holder>]) -> HashMap<NodeNumber, Counted> {
    let mut counts = HashMap::<NodeNumber, Counted>::new();
    for (at, held) in holders.iter().enumerate() {
        for (nth, holder) in held.iter().enumerate() {
            // Several actors of a node may hold the chunk.
            if held[..nth].iter().all(|before| before.node != holder.node) {
                let counted = counts.entry(holder.node).or_default();
                counted.held += 1;
                counted.prefix += usize::from(counted.prefix == at);
            }
        }
    }
    counts
}

/// Chunks that one node holds: all of them, and the longest prefix.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    held: usize,
    prefix: usize,
}

/// Questions to homes at a time; the others wait.
const MAX_ASKING: usize = 64;

/// Time for a home's answer.
const HOME_DEADLINE: Duration = Duration::from_millis(200);

/// Most holders that a home names for a chunk.
const MAX_HOLDERS: usize = 8;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use larder_net::quic::Endpoint;
    use larder_protocol::ChunkHash;
    use larder_protocol::table::PARTITIONS;

    use super::*;
    use crate::nodes::tests::{member, member_at, serve, with_node};

    /// Asks for a chunk, whose home is the node.
    fn asks_for_one_chunk(nodes: Nodes, node: &Endpoint) -> impl AsyncFn() -> Holdings {
        let homes = vec![NodeNumber(1); usize::from(PARTITIONS)];
        let table = Table { members: vec![member(1, node)], homes, ..Table::default() };
        let asker = Asker { nodes: Rc::new(nodes), late: RefCell::default() };
        let fingerprint = Fingerprint([9; 32]);
        let chain = Chain::from_root(fingerprint.root(), vec![ChunkHash([1; 32])]);
        async move || asker.holdings(&table, &fingerprint, &chain, &Trace::default()).await
    }

    #[test]
    fn a_home_that_was_late_is_named_as_silent_without_another_question() {
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        // A node that stands still: it takes questions, and does not answer.
        let stands_still = |node| {
            serve(node, move |connection| {
                let count = Rc::clone(&count);
                tokio::task::spawn_local(async move {
                    let mut streams = Vec::new();
                    while let Ok(stream) = connection.quic().accept_bi().await {
                        count.set(count.get() + 1);
                        streams.push(stream);
                    }
                });
            })
        };
        with_node(stands_still, async |nodes, node| {
            let ask = asks_for_one_chunk(nodes, &node);
            for _ in 0..3 {
                let holdings = ask().await;
                assert_eq!((holdings.cluster_chunks, &holdings.silent_homes[..]), (0, &["node".into()][..]));
                assert_eq!(asked.get(), 1);
            }
        });
    }

    #[test]
    fn a_home_that_refuses_is_asked_again_over_the_same_connection() {
        let met = Rc::new(Cell::new((0, 0)));
        let count = Rc::clone(&met);
        let refuses = |node| {
            serve(node, move |connection| {
                let count = Rc::clone(&count);
                count.set((count.get().0 + 1, count.get().1));
                tokio::task::spawn_local(async move {
                    while let Ok((mut send, mut receive)) = connection.quic().accept_bi().await {
                        let _: Option<PeerRequest> = read_message(&mut receive).await.unwrap();
                        count.set((count.get().0, count.get().1 + 1));
                        let refused = PeerResponse::Refused("this node shares no chunks".into());
                        write_message(&mut send, &refused).await.unwrap();
                        send.finish().unwrap();
                    }
                });
            })
        };
        with_node(refuses, async |nodes, node| {
            let ask = asks_for_one_chunk(nodes, &node);
            for questions in 1..=3 {
                let holdings = ask().await;
                assert_eq!(holdings.silent_homes, ["node"]);
                assert_eq!(met.get(), (1, questions), "connections and questions");
            }
        });
    }

    #[test]
    fn each_member_counts_once_a_chunk_whichever_of_its_actors_hold_it() {
        let address = ([127, 0, 0, 1], 1).into();
        let member =
            |number| Member { name: format!("node-{number}"), devices: 2, ..member_at(number, address) };
        let table = Table { members: [1, 2, 3].map(member).to_vec(), ..Table::default() };
        let held = |held: &[(u16, u16)]| {
            held.iter().map(|&(node, device)| Holder { node: NodeNumber(node), device }).collect()
        };
        let holders: [Vec<Holder>; 5] = [
            held(&[(1, 0), (2, 0), (1, 1)]),
            held(&[(2, 0), (9, 0), (1, 1)]),
            held(&[(2, 1)]),
            held(&[(1, 0)]),
            held(&[]),
        ];
        let Holdings { cluster_chunks, chunks, held, .. } = fold(&table, &holders, Vec::new());
        assert_eq!(cluster_chunks, 4);
        assert_eq!(chunks.into_values().collect::<Vec<_>>(), [2, 3, 0]);
        assert_eq!(held.into_values().collect::<Vec<_>>(), [3, 3, 0]);
    }

    #[test]
    fn a_home_that_names_everybody_for_everything_costs_no_more_than_an_honest_one() {
        let positions: Vec<u32> = (0..8_192).collect();
        let span =
            |node| RowSpan { from: 0, to: u32::MAX, holder: Holder { node: NodeNumber(node), device: 0 } };
        let spans: Vec<RowSpan> = (0..60_000).map(span).collect();
        let mut holders = vec![Vec::new(); positions.len()];
        note(&mut holders, &positions, &spans);
        assert!(holders.iter().all(|holders| holders.len() == MAX_HOLDERS));
        let mut holders = vec![Vec::new(); positions.len()];
        note(
            &mut holders,
            &positions,
            &[RowSpan { from: 9, to: 3, ..span(1) }, RowSpan { from: 8_190, ..span(2) }],
        );
        assert_eq!(holders.iter().filter(|holders| !holders.is_empty()).count(), 2);
    }
}
