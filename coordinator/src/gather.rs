//! Asks members for users of the console, who may not reach them: reads their HTTP answers, and carries out an admin's changes.

mod purge;

use std::error::Error;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder_net::audit::Audit;
use larder_net::in_one_line;
use larder_net::quic::{Connection, MessageError, read_message, write_message};
use larder_protocol::drain::DrainCommand;
use larder_protocol::peer::{PeerRequest, PeerResponse, Show};
use larder_protocol::pin::{DevicePin, PinCommand};
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::table::{Member, Table};
use serde::Serialize;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::membership::{Lost, Millis};
use crate::nodes::Nodes;
use crate::published::Published;

/// A question for all members, or for one of them by name.
pub(crate) struct NodeQuery {
    pub(crate) wanted: Wanted,
    pub(crate) node: Option<String>,
    pub(crate) answer: oneshot::Sender<Vec<Shown>>,
}

/// A request to members.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// The answer to a request.
    Answer(PeerRequest),
    /// A purge, from its start to its end.
    Purge(PurgeScope, PurgeMode),
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer(PeerRequest::SetPolicy(policy)) => write!(f, "evict by {policy}"),
            Self::Answer(PeerRequest::Drain(DrainCommand::Start(start))) => {
                write!(f, "drain within {} ms", start.within_ms)
            }
            Self::Answer(PeerRequest::Drain(_)) => f.write_str("drain no more"),
            Self::Answer(PeerRequest::Pin(command)) => match &**command {
                PinCommand::Start(start) => {
                    write!(f, "pin {} chunks for {} ms", start.hashes.len(), start.duration_ms)
                }
                PinCommand::End(device, pin) => write!(f, "end pin {pin} of device {device}"),
            },
            Self::Answer(PeerRequest::Show(Show { path, .. })) => write!(f, "show {path}"),
            Self::Answer(_) => f.write_str("a request"),
            Self::Purge(scope, PurgeMode::Count) => write!(f, "count {scope}"),
            Self::Purge(scope, PurgeMode::Remove) => write!(f, "purge {scope}"),
        }
    }
}

/// A member's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) node: String,
    /// JSON, or an error for people.
    pub(crate) said: Result<Vec<u8>, String>,
}

/// The admin in whose name the console changes nodes.
pub(crate) struct Admin {
    /// The name in the certificate.
    pub(crate) name: String,
    pub(crate) nodes: Nodes,
    pub(crate) audit: Audit,
}

/// Answers questions, a few at a time. Lives on the endpoint's thread.
pub(crate) async fn answer(
    (nodes, admin): (Rc<Nodes>, Option<Admin>),
    tables: watch::Receiver<Arc<Published>>,
    known: impl Fn() -> (Vec<Member>, Vec<(Lost, Millis)>) + Clone + 'static,
    mut questions: mpsc::Receiver<NodeQuery>,
) {
    let admin = admin.map(Rc::new);
    let places = Arc::new(Semaphore::new(QUESTIONS_AT_A_TIME));
    let purges = Arc::new(Semaphore::new(PURGES_AT_A_TIME));
    while let Some(NodeQuery { wanted, node, answer }) = questions.recv().await {
        let is_reading = matches!(wanted, Wanted::Answer(PeerRequest::Show(_)));
        let admin = admin.clone().filter(|_| !is_reading);
        if admin.is_none() && !is_reading {
            // No other request gets this far.
            continue;
        }
        // A purge takes long: it holds up no other question.
        let place = match wanted {
            Wanted::Purge(..) => Arc::clone(&purges).try_acquire_owned().ok(),
            // Never `None`, since nobody closes the semaphore.
            Wanted::Answer(_) => Arc::clone(&places).acquire_owned().await.ok(),
        };
        let (nodes, table) = (Rc::clone(&nodes), Arc::clone(tables.borrow().table()));
        let known = known.clone();
        actix_rt::spawn(async move {
            let (by, of) = (admin.as_ref().map_or(&*nodes, |admin| &admin.nodes), node.as_deref());
            let change = wanted.change();
            let shown = match wanted {
                Wanted::Answer(request) => {
                    let mut shown = gather(by, &table, &request, of).await;
                    if matches!(request, PeerRequest::SetPolicy(_)) {
                        let advice = "it is lost: set the policy again when it is back";
                        shown.extend(lost_nodes(&known().1, of, advice));
                    }
                    shown
                }
                Wanted::Purge(..) if place.is_none() => refused(&table, of),
                Wanted::Purge(scope, mode) => {
                    let mut shown = purge::purge(by, &table, (&scope, mode), of).await;
                    // Not the published table: a node that has just joined is in neither that nor the list of the lost.
                    let (now, lost) = known();
                    shown.extend(purge::not_reached((&table, &now), &lost, mode, of));
                    shown
                }
            };
            if let Some((admin, change)) = admin.zip(change) {
                admin.note(change, of, &shown);
            }
            // An error means that the user went away.
            let _ = answer.send(shown);
            drop(place);
        });
    }
}

impl Admin {
    /// Notes each member's result in the audit log: done, or refused with the reason.
    fn note(&self, (action, how): (&str, String), of: Option<&str>, shown: &[Shown]) {
        let by = format!("console of admin {}", self.name);
        for Shown { node, said } in shown {
            self.audit.note(&by, action, &format!("{how}{node}"), said.as_ref().map(|_| ()));
        }
        if shown.is_empty() {
            let node = of.unwrap_or("all");
            self.audit.note(&by, action, &format!("{how}{node}"), Err("there is no such member"));
        }
    }
}

impl Wanted {
    /// The words for a change in the audit log, before the node's name; `None` if nothing changes.
    fn change(&self) -> Option<(&'static str, String)> {
        Some(match self {
            Self::Answer(PeerRequest::SetPolicy(policy)) => ("set_policy", format!("{policy} at ")),
            Self::Answer(PeerRequest::Drain(DrainCommand::Start(_))) => ("drain", String::new()),
            Self::Answer(PeerRequest::Drain(DrainCommand::Cancel)) => ("cancel_drain", String::new()),
            Self::Answer(PeerRequest::Pin(command)) => match &**command {
                PinCommand::Start(start) => {
                    ("pin", format!("{} chunks for {} ms at ", start.hashes.len(), start.duration_ms))
                }
                PinCommand::End(device, pin) => ("unpin", format!("pin {pin} of device {device} at ")),
            },
            Self::Purge(scope, PurgeMode::Remove) => ("purge", format!("{scope} at ")),
            _ => return None,
        })
    }
}

/// The answer to a purge that has no place.
fn refused(table: &Table, of: Option<&str>) -> Vec<Shown> {
    let said = || Err("other purges are under way: try again when one is over".to_owned());
    members(table, of).map(|member| Shown { node: member.name.clone(), said: said() }).collect()
}

/// The lost nodes, or one of them by name, each with this error.
fn lost_nodes<'a>(
    lost: &'a [(Lost, Millis)],
    of: Option<&'a str>,
    error: &'a str,
) -> impl Iterator<Item = Shown> + 'a {
    let names = lost.iter().map(|(lost, _)| &lost.member.name);
    let wanted = names.filter(move |node| of.is_none_or(|name| name == *node));
    wanted.map(|node| Shown { node: node.clone(), said: Err(error.to_owned()) })
}

fn members<'a>(table: &'a Table, of: Option<&'a str>) -> impl Iterator<Item = &'a Member> {
    table.members.iter().filter(move |member| of.is_none_or(|name| name == member.name))
}

async fn gather(nodes: &Nodes, table: &Table, request: &PeerRequest, of: Option<&str>) -> Vec<Shown> {
    let asked = members(table, of).enumerate().map(|(place, member)| async move {
        let said = exchange(nodes, table, member, request).await.and_then(said);
        (place, Shown { node: member.name.clone(), said })
    });
    // Answers count when they come, so that a silent member keeps no others waiting in memory uncounted.
    let mut asked: FuturesUnordered<_> = asked.collect();
    let (mut shown, mut bytes) = (Vec::new(), 0);
    while let Some((place, mut one)) = asked.next().await {
        bytes += one.said.as_ref().map_or(0, Vec::len);
        if bytes > MOST_BYTES {
            one.said = Err("the nodes' answers together are too large: ask one node".to_owned());
        }
        shown.push((place, one));
    }
    shown.sort_by_key(|(place, _)| *place);
    shown.into_iter().map(|(_, one)| one).collect()
}

/// A member's answer, or an error for people.
async fn exchange(
    nodes: &Nodes,
    table: &Table,
    member: &Member,
    request: &PeerRequest,
) -> Result<PeerResponse, String> {
    let mut used = None;
    let asked = async {
        let connection = nodes.connection(table, member.number).await;
        ask(used.insert(connection.map_err(|error| in_one_line(&error))?), request).await
    };
    let answer = timeout(DEADLINE, asked).await;
    let answer = answer.unwrap_or_else(|_| Err("no answer in time".to_owned()));
    match answer {
        Ok(PeerResponse::Refused(why)) => Err(why),
        Ok(PeerResponse::Busy(_)) => Err("the node has too much to do".to_owned()),
        Ok(answer) => Ok(answer),
        Err(lost) => {
            used.iter().for_each(|used| nodes.forget(member.number, used));
            Err(lost)
        }
    }
}

/// The connection to a node is of no use. A node that does not accept the coordinator's certificate says so only now.
fn lost(error: &dyn Error) -> String {
    format!("the coordinator does not reach the node: {}", in_one_line(error))
}

async fn ask(connection: &Connection, request: &PeerRequest) -> Result<PeerResponse, String> {
    if connection.version() < request.since() {
        // The connection stays usable.
        let why =
            format!("the node speaks {}, which lacks this answer: upgrade the node", connection.version());
        return Ok(PeerResponse::Refused(why));
    }
    let (mut send, mut receive) = connection.quic().open_bi().await.map_err(|error| lost(&error))?;
    write_message(&mut send, request).await.map_err(|error| lost(&error))?;
    send.finish().map_err(|error| lost(&error))?;
    let answer = read_message(&mut receive).await.map_err(|error| lost(&error))?;
    answer.ok_or_else(|| lost(&MessageError::Cut))
}

/// An answer in JSON.
fn said(answer: PeerResponse) -> Result<Vec<u8>, String> {
    match answer {
        PeerResponse::Shown(json) => Ok(json),
        PeerResponse::Done | PeerResponse::Drains(_) => Ok(b"true".to_vec()),
        PeerResponse::Pinned(pins) => {
            let pins: Vec<PinnedThere> = pins.iter().map(PinnedThere::of).collect();
            serde_json::to_vec(&pins).map_err(|error| error.to_string())
        }
        _ => Err("the node sent an unexpected answer".to_owned()),
    }
}

/// The chunks that a device of a node pinned.
#[derive(Debug, Serialize)]
struct PinnedThere {
    device: u16,
    pin: u64,
    chunks: u32,
    seconds: f64,
}

impl PinnedThere {
    fn of(&DevicePin { device, pin, chunks, duration_ms }: &DevicePin) -> Self {
        Self { device, pin, chunks, seconds: duration_ms as f64 / 1_000.0 }
    }
}

/// Time for a node's answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// Questions to nodes at a time; the others wait.
const QUESTIONS_AT_A_TIME: usize = 4;

/// Purges at a time; the others are refused.
const PURGES_AT_A_TIME: usize = 4;

/// Most bytes of all answers to a question.
const MOST_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use larder_protocol::table::NodeNumber;

    use super::*;
    use crate::nodes::tests::{member, serve, with_node};

    #[test]
    fn the_error_says_why_a_node_is_not_reached() {
        let closing =
            |node| serve(node, |guest| guest.quic().close(1_u32.into(), b"the certificate has expired"));
        with_node(closing, async |nodes, node| {
            let there = member(1, &node);
            let other = Member { number: NodeNumber(2), name: "other".to_owned(), ..there.clone() };
            let table = Table { members: vec![there, other], ..Table::default() };
            let errors =
                table.members.iter().map(|member| exchange(&nodes, &table, member, &PeerRequest::Ping));
            let [closed, other] = <[_; 2]>::try_from(join_all(errors).await).unwrap();
            for (error, why) in
                [(closed, "the certificate has expired"), (other, "the process at this address is")]
            {
                let error = error.unwrap_err();
                assert!(error.starts_with("the coordinator does not reach the node: "), "{error}");
                assert!(error.contains(why), "{error}");
            }
        });
    }

    #[test]
    fn a_change_of_the_policy_names_the_lost_nodes() {
        with_node(
            |_| std::future::pending(),
            async |nodes, node| {
                let lost = (Lost { member: member(1, &node), heard: 0, removed: 0 }, 9);
                let known = move || (Vec::new(), vec![lost.clone()]);
                let admin = Admin { name: "me".to_owned(), nodes, audit: Audit::default() };
                let table = Arc::new(Table::default());
                let published = Arc::new(Published::new(&table, Arc::clone(&table)));
                let (_tables, tables) = watch::channel(published);
                let (ask, questions) = mpsc::channel(1);
                actix_rt::spawn(answer((Rc::new(Nodes::new(node)), Some(admin)), tables, known, questions));
                let (answer, answered) = oneshot::channel();
                let wanted = Wanted::Answer(PeerRequest::SetPolicy("lru".to_owned()));
                ask.send(NodeQuery { wanted, node: None, answer }).await.ok().unwrap();
                let why = "it is lost: set the policy again when it is back".to_owned();
                assert_eq!(answered.await.unwrap(), [Shown { node: "node".to_owned(), said: Err(why) }]);
            },
        );
    }
}
