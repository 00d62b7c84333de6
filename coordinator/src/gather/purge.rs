//! A purge of several nodes: it begins at each, and ends at each when all are done.

use std::time::Duration;

use futures_util::future::join_all;
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::purge::{PurgeCommand, PurgeMode, PurgeReport, PurgeScope};
use larder_protocol::table::{Member, Table};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::{Shown, exchange, lost_nodes, members};
use crate::membership::{Lost, Millis};
use crate::nodes::Nodes;

/// The chunks of a node's purge, as the console shows them.
#[derive(Debug, Serialize)]
struct Purged {
    memory_chunks: u64,
    memory_bytes: u64,
    /// Chunks among them that somebody still reads.
    read_chunks: u64,
    disk_chunks: u64,
    objects: u64,
}

/// A node that purges; an error instead of a report if it does not answer.
struct Purging<'a> {
    member: &'a Member,
    report: Result<PurgeReport, String>,
}

/// Purges all members, or one of them by name.
pub(super) async fn purge(
    nodes: &Nodes,
    table: &Table,
    (scope, mode): (&PurgeScope, PurgeMode),
    of: Option<&str>,
) -> Vec<Shown> {
    let start = |member| async move {
        let report = ask(nodes, table, member, PurgeCommand::Start(scope.clone(), mode)).await;
        Purging { member, report }
    };
    let mut all = join_all(members(table, of).map(start)).await;
    let until = Instant::now() + PATIENCE;
    while all.iter().any(Purging::goes_on) && Instant::now() < until {
        sleep(LOOK_EVERY).await;
        // Nodes that are done hear that the purge as a whole is not.
        tell(nodes, table, &mut all, PurgeCommand::Report).await;
    }
    tell(nodes, table, &mut all, PurgeCommand::End).await;
    all.into_iter().map(Purging::shown).collect()
}

/// The nodes that a purge did not reach and that may bring purged chunks: lost nodes, and members that joined after its start. A
/// count changes nothing, so later members do not matter to it.
pub(super) fn not_reached(
    (asked, now): (&Table, &[Member]),
    lost: &[(Lost, Millis)],
    mode: PurgeMode,
    of: Option<&str>,
) -> Vec<Shown> {
    let is_wanted = |member: &&Member| of.is_none_or(|name| name == member.name);
    let was_asked = |member: &&Member| {
        let is_it = |asked: &Member| (&asked.name, asked.incarnation) == (&member.name, member.incarnation);
        asked.members.iter().any(is_it)
    };
    let new = now.iter().filter(is_wanted).filter(|member| mode == PurgeMode::Remove && !was_asked(member));
    let new = new.map(|member| Shown {
        node: member.name.clone(),
        said: Err("joined during the purge: purge again".to_owned()),
    });
    lost_nodes(lost, of, "it is lost and keeps its chunks: purge again when it is back").chain(new).collect()
}

async fn tell(nodes: &Nodes, table: &Table, all: &mut [Purging<'_>], command: fn(u64) -> PurgeCommand) {
    join_all(all.iter_mut().map(|one| async {
        if let Ok(report) = &one.report {
            one.report = ask(nodes, table, one.member, command(report.purge)).await;
        }
    }))
    .await;
}

async fn ask(
    nodes: &Nodes,
    table: &Table,
    member: &Member,
    command: PurgeCommand,
) -> Result<PurgeReport, String> {
    match exchange(nodes, table, member, &PeerRequest::Purge(Box::new(command))).await? {
        PeerResponse::Purges(report) => Ok(*report),
        _ => Err("the node sent an unexpected answer".to_owned()),
    }
}

impl Purging<'_> {
    fn goes_on(&self) -> bool {
        self.report.as_ref().is_ok_and(|report| !report.is_over)
    }

    fn shown(self) -> Shown {
        let said = self.report.and_then(|PurgeReport { is_over, trouble, counts, .. }| match trouble {
            Some(trouble) => Err(trouble),
            None if !is_over => Err("the purge did not end in time: purge again".to_owned()),
            None => {
                let purged = Purged {
                    memory_chunks: counts.memory_chunks,
                    memory_bytes: counts.memory_bytes,
                    read_chunks: counts.read_chunks,
                    disk_chunks: counts.disk_chunks,
                    objects: counts.objects,
                };
                serde_json::to_vec(&purged).map_err(|error| error.to_string())
            }
        });
        Shown { node: self.member.name.clone(), said }
    }
}

/// Pause between questions for the nodes' progress.
const LOOK_EVERY: Duration = Duration::from_millis(150);

/// Time for all nodes together: longer than a node waits for writes that began before the purge.
const PATIENCE: Duration = Duration::from_secs(90);

#[cfg(test)]
mod tests {
    use larder_protocol::table::{MemberState, NodeNumber};

    use super::*;

    fn member(name: &str, incarnation: u64) -> Member {
        let address = ([127, 0, 0, 1], 1).into();
        let (number, state) = (NodeNumber(1), MemberState::Alive);
        let name = name.to_owned();
        Member { number, name, incarnation, peer: address, http: address, devices: 1, weight: 1, state }
    }

    fn table<const N: usize>(members: [Member; N]) -> Table {
        Table { members: members.into(), ..Table::default() }
    }

    #[test]
    fn nodes_that_are_lost_or_join_during_a_purge_are_named() {
        let asked = table([member("a", 1), member("b", 1)]);
        let now = [member("a", 1), member("b", 2), member("c", 1)];
        let lost = [(Lost { member: member("d", 1), heard: 0, removed: 0 }, 9)];
        let named = |mode, of| -> Vec<String> {
            let shown = not_reached((&asked, &now), &lost, mode, of).into_iter();
            shown.filter(|one| one.said.is_err()).map(|one| one.node).collect()
        };
        assert_eq!(
            named(PurgeMode::Remove, None),
            ["d", "b", "c"],
            "one is lost, one started again, one is new"
        );
        assert_eq!(named(PurgeMode::Count, None), ["d"]);
        assert_eq!(named(PurgeMode::Remove, Some("a")), [""; 0]);
    }
}
