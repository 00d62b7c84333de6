//! `larder status`: the state of nodes and coordinator, and their problems.

use std::process::ExitCode;

use larder_coordinator::{LostStatus, Status as CoordinatorStatus};
use larder_node::ActorStatus;
use larder_node::metrics::TenantRates;
use serde_json::json;

use crate::failure::FAILED;
use crate::listing::{Cell, Format, FormatArgs, Listing, column, wide};
use crate::output::{self, counted, duration};
use crate::survey::{Servers, Survey, Surveyed};

/// Show the state of nodes and coordinator, and what is wrong
///
/// A member that was removed after long silence stays in the list as `lost`, until it comes back or the coordinator forgets it
/// (membership.remember_lost_ms). An answer counts only if it has the name and the incarnation that the coordinator knows.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder status                                The cluster of the context, or the newest development cluster
  larder status --coordinator larder.example   The nodes that this coordinator knows
  larder status --node 127.0.0.1:9440 --json   One node, as JSON
  larder status -o tsv | cut -f 1,2            Names and states, for scripts

JSON is one object: `health`, `troubles`, and the servers' own answers in `coordinator` and `nodes`. A node that does not answer
has `name`, `http` and `error` instead.

Exit status: 0 if all is well; 1 if something is wrong (`degraded`), or no node serves (`down`); 2 after wrong arguments.")]
pub(crate) struct Args {
    #[command(flatten)]
    servers: Servers,

    #[command(flatten)]
    format: FormatArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let survey = args.servers.targets()?.survey()?;
    let troubles = survey.troubles();
    let health = survey.health(&troubles);
    let format = args.format.format();
    match format {
        Format::Json => output::print_json(&json!({
            "health": health,
            "troubles": troubles,
            "coordinator": survey.coordinator.as_ref().map(|(words, _)| words),
            "nodes": survey.nodes.iter().map(Surveyed::json).collect::<Vec<_>>(),
        }))?,
        Format::Tsv => output::print(&nodes(&survey).text(format))?,
        Format::Table | Format::Wide => output::print(&text(&survey, &troubles, format))?,
    }
    Ok(if health == "healthy" { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn text(survey: &Survey, troubles: &[String], format: Format) -> String {
    let mut text = String::new();
    if let Some((_, coordinator)) = &survey.coordinator {
        let CoordinatorStatus { version, uptime_seconds, epoch, nodes, lost, .. } = coordinator;
        let nodes = counted(nodes.len(), "node");
        let lost = if lost.is_empty() { String::new() } else { format!(" and {} lost", lost.len()) };
        let up = duration(*uptime_seconds);
        text = format!("coordinator: version {version}, up {up}, {nodes}{lost}, epoch {epoch}\n");
    }
    text += &nodes(survey).text(format);
    let tenants = tenants(survey);
    if !tenants.is_empty() {
        text += &format!("\n{}", tenants.text(format));
    }
    if let Some(upgrading) = survey.upgrading() {
        text += &format!("\n{upgrading}\n");
    }
    let health = survey.health(troubles);
    let troubles: String = troubles.iter().map(|trouble| format!("\n  {trouble}")).collect();
    let colon = if troubles.is_empty() { "" } else { ":" };
    format!("{text}\n{health}{colon}{troubles}")
}

/// A row for each actor, for each node without one, and for each lost node.
fn nodes(survey: &Survey) -> Listing {
    let mut list = Listing::new(&[
        column("node"),
        column("state"),
        column("up"),
        column("device"),
        column("chunks"),
        column("memory"),
        column("sessions"),
        column("hit rate"),
        wide("on disk"),
        wide("used"),
        wide("arena"),
        wide("quarantined"),
        wide("most chunks"),
        wide("leases"),
        wide("policy"),
        wide("number"),
        wide("partitions"),
        wide("heard"),
        wide("http"),
        wide("peer"),
        wide("protocol"),
        wide("zone"),
        wide("disk"),
    ]);
    for node in &survey.nodes {
        let actors = node.said.as_ref().map_or(&[][..], |(_, status)| &status.actors);
        let up = node.said.as_ref().map_or(Cell::Unknown, |(_, status)| Cell::Seconds(status.uptime_seconds));
        let rows = actors.iter().map(Some).chain(actors.is_empty().then_some(None));
        for actor in rows {
            let first = [node.name.as_str().into(), node.state().into(), up.clone()];
            let disk = disk_fill(actor);
            let actor = actor.map_or_else(|| vec![Cell::Unknown; ACTOR_COLUMNS], actor_cells);
            list.add(first.into_iter().chain(actor).chain(member_cells(node)).chain([disk]));
        }
    }
    for LostStatus { name, number, silent_seconds, http, .. } in
        survey.coordinator.iter().flat_map(|(_, coordinator)| &coordinator.lost)
    {
        let known = [Cell::Count((*number).into()), Cell::Count(0), Cell::Seconds(*silent_seconds)];
        let unknown = vec![Cell::Unknown; ACTOR_COLUMNS + 1];
        let first = [name.as_str().into(), "lost".into()].into_iter().chain(unknown);
        list.add(first.chain(known).chain([http.to_string().into()]));
    }
    list
}

fn share(part: u64, whole: u64) -> Cell {
    Cell::of((whole > 0).then(|| part as f64 / whole as f64), Cell::Share)
}

fn disk_fill(actor: Option<&ActorStatus>) -> Cell {
    let disk = actor.and_then(|actor| actor.disk.as_ref());
    disk.map_or(Cell::Unknown, |disk| share(disk.used_bytes, disk.capacity_bytes))
}

fn actor_cells(actor: &ActorStatus) -> Vec<Cell> {
    let on_disk = match (&actor.disk, &actor.disk_trouble) {
        (None, Some(_)) => "closed".into(),
        (disk, _) => Cell::of(disk.as_ref(), |disk| Cell::Count(disk.chunks)),
    };
    vec![
        Cell::Count(actor.device.into()),
        Cell::Count(actor.chunks),
        share(actor.used_bytes, actor.arena_bytes),
        Cell::Count(actor.sessions),
        share(actor.tokens_hit, actor.tokens_asked),
        on_disk,
        Cell::Bytes(actor.used_bytes),
        Cell::Bytes(actor.arena_bytes),
        Cell::Bytes(actor.quarantined_bytes),
        Cell::of(actor.capacity_chunks, Cell::Count),
        Cell::Count(actor.leases),
        actor.policy.as_str().into(),
    ]
}

fn member_cells(node: &Surveyed) -> [Cell; 7] {
    let member = node.member.as_ref();
    let cluster = node.said.as_ref().ok().and_then(|(_, status)| status.cluster.as_ref());
    [
        Cell::of(member, |member| Cell::Count(member.number.into())),
        Cell::of(member, |member| Cell::Count(member.partitions as u64)),
        Cell::of(member, |member| Cell::Seconds(member.silent_seconds)),
        node.http.as_str().into(),
        Cell::of(member, |member| member.peer.to_string().into()),
        Cell::of(member.filter(|member| member.protocol > 0), |member| Cell::Count(member.protocol.into())),
        Cell::of(cluster.and_then(|cluster| cluster.zone.as_deref()), Cell::from),
    ]
}

/// A row for each tenant that asked for something lately.
fn tenants(survey: &Survey) -> Listing {
    let names = ["node", "device", "tenant", "window", "tokens asked", "hit rate", "if infinite"];
    let mut list = Listing::new(&names.map(column));
    for node in &survey.nodes {
        for actor in node.said.iter().flat_map(|(_, status)| &status.actors) {
            for rates in actor.tenants.iter().filter(|rates| rates.tokens_asked > 0) {
                let TenantRates { tenant, window, tokens_asked, hit_rate, infinite_hit_rate } = rates;
                list.add([
                    node.name.as_str().into(),
                    Cell::Count(actor.device.into()),
                    tenant.as_str().into(),
                    window.as_str().into(),
                    Cell::Count(*tokens_asked),
                    Cell::Share(*hit_rate),
                    Cell::Share(*infinite_hit_rate),
                ]);
            }
        }
    }
    list
}

/// Number of columns that describe an actor.
const ACTOR_COLUMNS: usize = 12;

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value};

    use super::*;

    fn answering(words: Value, member: Option<Value>) -> Surveyed {
        let status: larder_node::Status = from_value(words.clone()).unwrap();
        let member = member.map(|member| from_value(member).unwrap());
        Surveyed { name: status.name.clone(), http: "127.0.0.1:1".into(), member, said: Ok((words, status)) }
    }

    fn survey() -> Survey {
        let member = json!({
            "name": "node-0", "http": "127.0.0.1:1", "number": 7, "state": "suspect",
            "peer": "127.0.0.1:2", "partitions": 4096, "silent_seconds": 3.21, "later": 1
        });
        let coordinator = json!({
            "role": "coordinator", "version": "9.9.9", "uptime_seconds": 200.0, "epoch": "3.14", "later": 1,
            "nodes": [member.clone()],
            "lost": [{"name": "node-9", "http": "10.0.0.9:9440", "number": 9, "incarnation": 1, "silent_seconds": 300.0}]
        });
        let node = json!({
            "name": "node-0", "ready": true, "uptime_seconds": 5.5, "later": {},
            "cluster": {"number": 7, "incarnation": 1, "epoch": "3.14", "members": 1, "suspects": 0, "silent": [], "shares": true, "zone": "rack-4"},
            "object": {"url": "s3://b/p", "reads": false, "trouble": "no such bucket"}, "actors": [{
                "device": 0, "policy": "lru", "chunks": 12, "capacity_chunks": 3000, "used_bytes": 1 << 20,
                "arena_bytes": 1 << 30, "quarantined_bytes": 0, "sessions": 1, "leases": 2,
                "tokens_asked": 1000, "tokens_hit": 512, "later": true,
                "disk": {"chunks": 9, "used_bytes": 7 << 20, "capacity_bytes": 8 << 20}, "tenants": [
                    {"tenant": "red", "window": "1h", "tokens_asked": 70123, "hit_rate": 0.312,
                     "infinite_hit_rate": 0.423},
                    {"tenant": "idle", "window": "1h", "tokens_asked": 0, "hit_rate": 0.0, "infinite_hit_rate": 0.0}
                ]
            }]
        });
        let understood = from_value(coordinator.clone()).unwrap();
        Survey { coordinator: Some((coordinator, understood)), nodes: vec![answering(node, Some(member))] }
    }

    #[test]
    fn the_tables_show_each_actor_and_let_unknown_fields_pass() {
        let survey = survey();
        let text = text(&survey, &survey.troubles(), Format::Wide);
        let parts = [
            "version 9.9.9, up 3 min, 1 node and 1 lost, epoch 3.14",
            "suspect",
            "4,096",
            "3.2 s",
            "3,000",
            "1.0 MiB",
            "51.2 %",
            "87.5 %",
            "70,123",
            "rack-4",
            "31.2 %",
            "42.3 %",
            "degraded:",
            "node-0 does without s3://b/p: no such bucket",
            "node-0 is suspect: the coordinator has not heard it for 3.2 s",
            "node-9 is lost: it was last heard 5 min ago, at 10.0.0.9:9440",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("idle"), "who asked nothing is not shown\n{text}");
    }

    #[test]
    fn the_columns_that_everybody_sees_fit_80_characters() {
        let text = text(&survey(), &[], Format::Table);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.ends_with("healthy"), "{text}");
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("node-")).collect();
        assert!(rows[1].contains("lost"), "{text}");
    }

    #[test]
    fn nodes_of_an_earlier_version_are_named_and_are_no_trouble() {
        let node = |name: &str, protocol: u8| {
            let words = json!({"name": name, "ready": true, "uptime_seconds": 5.5, "actors": []});
            let member = json!({"name": name, "http": "127.0.0.1:1", "peer": "127.0.0.1:2", "state": "alive",
                "protocol": protocol});
            answering(words, Some(member))
        };
        let nodes = vec![node("node-0", 2), node("node-1", 1), node("node-2", 0)];
        let survey = Survey { coordinator: None, nodes };
        let text = text(&survey, &survey.troubles(), Format::Wide);
        assert!(
            text.contains("\nnode-1 of an earlier version than the others (larder/2): upgrade"),
            "{text}"
        );
        assert!(text.ends_with("healthy"), "{text}");
        let nodes = vec![node("node-0", 2), node("node-2", 0)];
        assert_eq!(Survey { coordinator: None, nodes }.upgrading(), None);
    }

    #[test]
    fn a_row_has_a_field_for_each_column() {
        let text = nodes(&survey()).text(Format::Tsv);
        let fields: Vec<usize> = text.lines().map(|line| line.split('\t').count()).collect();
        assert_eq!(fields, [23, 23, 23], "{text}");
        let node: Vec<&str> = text.lines().nth(1).unwrap().split('\t').collect();
        assert_eq!((node[14], node[15], node[19], node[21]), ("lru", "7", "127.0.0.1:2", "rack-4"), "{text}");
        assert_eq!(node[22], "0.8750", "{text}");
        let lost: Vec<&str> = text.lines().nth(2).unwrap().split('\t').collect();
        assert_eq!((lost[15], lost[18]), ("9", "10.0.0.9:9440"), "{text}");
    }

    #[test]
    fn a_node_that_does_not_answer_is_shown_as_such() {
        let said = Err("connection refused".to_owned());
        let silent = Surveyed { name: "node-1".into(), http: "127.0.0.1:1".into(), member: None, said };
        let survey = Survey { coordinator: None, nodes: vec![silent] };
        let text = text(&survey, &survey.troubles(), Format::Table);
        assert!(
            text.contains("silent")
                && text.ends_with("\ndown:\n  node-1 does not answer: connection refused"),
            "{text}"
        );
        assert_eq!(survey.nodes[0].json()["error"], "connection refused");
    }

    #[test]
    fn a_member_on_loopback_among_others_is_named() {
        let member = |name: &str, peer: &str| {
            let ready = json!({"name": name, "ready": true, "uptime_seconds": 1.0, "actors": []});
            answering(ready, Some(json!({"name": name, "http": peer, "peer": peer})))
        };
        let survey = |peers: [&str; 2]| {
            let nodes = vec![member("a", peers[0]), member("b", peers[1])];
            Survey { coordinator: None, nodes }.troubles()
        };
        assert!(survey(["127.0.0.1:1", "127.0.0.1:2"]).is_empty(), "one host");
        let troubles = survey(["127.0.0.1:1", "10.0.0.2:2"]);
        assert!(troubles.len() == 1 && troubles[0].starts_with("other hosts cannot reach a"), "{troubles:?}");
    }
}
