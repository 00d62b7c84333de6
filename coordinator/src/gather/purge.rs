//! A purge of several nodes: it begins at each, and ends at each when all are done.

use std::time::Duration;

use futures_util::future::join_all;
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::purge::{PurgeCommand, PurgeMode, PurgeReport, PurgeScope};
use larder_protocol::table::{Member, Table};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::{Shown, exchange};
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
    let members = table.members.iter().filter(|member| of.is_none_or(|name| name == member.name));
    let start = |member| async move {
        let report = ask(nodes, table, member, PurgeCommand::Start(scope.clone(), mode)).await;
        Purging { member, report }
    };
    let mut all = join_all(members.map(start)).await;
    let until = Instant::now() + PATIENCE;
    while all.iter().any(Purging::goes_on) && Instant::now() < until {
        sleep(LOOK_EVERY).await;
        // Nodes that are done hear that the purge as a whole is not.
        tell(nodes, table, &mut all, PurgeCommand::Report).await;
    }
    tell(nodes, table, &mut all, PurgeCommand::End).await;
    all.into_iter().map(Purging::shown).collect()
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

/// Time for all nodes together.
const PATIENCE: Duration = Duration::from_secs(60);
