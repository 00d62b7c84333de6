//! The figures as a table, with a column for each size.

use super::Figures;
use super::options::Played;

/// The whole report.
pub(super) fn table(all: &[Played]) -> String {
    let Some(first) = all.first().map(|played| &played.figures) else { return String::new() };
    let mut text = format!(
        "Load: {} requests a second and node, each of {:.0} chunks; {} chunks of {} MiB a node, all full at the start; for each\n\
         16 nodes a copy of {} with names of its own; seed {}. A light list of names stands for the store.\n",
        first.rate,
        first.request_chunks,
        first.chunks,
        first.block_bytes >> 20,
        first.traces.join(", "),
        first.seed,
    );
    for played in all.iter().filter(|played| played.figures.players < played.figures.nodes) {
        let Figures { nodes, players, .. } = played.figures;
        text += &format!(
            "Of {nodes} nodes, {players} play requests and hold chunks; all are homes and members.\n"
        );
    }
    text += "\n";
    for (name, of) in rows() {
        let cells: Vec<String> = all.iter().map(|played| format!("{:>10}", of(played))).collect();
        text += &format!("{name:<58}{}\n", cells.concat());
    }
    text += "\n";
    for played in all {
        for goal in &played.goals {
            let word = if goal.is_met { "met   " } else { "MISSED" };
            let nodes = played.figures.nodes;
            text += &format!(
                "{word} at {nodes:>6} nodes: {} {:.3} (at most {})\n",
                goal.name, goal.is, goal.at_most
            );
        }
    }
    text
}

type TableRow = (&'static str, fn(&Played) -> String);

fn rows() -> Vec<TableRow> {
    let mut rows: Vec<TableRow> = vec![
        ("nodes", |played| played.figures.nodes.to_string()),
        ("of these play requests", |played| played.figures.players.to_string()),
        ("requests come before anything counts, s", |played| played.figures.warm_up.to_string()),
        ("and then for, s", |played| played.figures.seconds.to_string()),
        ("homes a lookup asks, mean", |played| format!("{:.2}", played.figures.homes_mean)),
        ("homes a lookup asks, p99", |played| played.figures.homes_p99.to_string()),
        ("questions to homes, a second and node", |played| format!("{:.1}", played.figures.finds_a_second)),
        ("announcements", |played| format!("{:.1}", played.figures.announces_a_second)),
        ("comparisons of sums", |played| format!("{:.1}", played.figures.compares_a_second)),
        ("repairs, moves, heads of fetches", |played| format!("{:.1}", played.figures.others_a_second)),
        ("metadata, KB a second and node", |played| kilo(played.figures.metadata_bytes_a_second)),
        ("metadata of block bytes between nodes, %", |played| {
            format!("{:.4}", 100.0 * played.figures.metadata_share)
        }),
        ("stale rows of those used, %", |played| format!("{:.2}", 100.0 * played.figures.stale_share)),
        ("busiest node: rows, of the mean", |played| format!("{:.2}", played.figures.skew_rows)),
        ("busiest node: requests, of the mean", |played| format!("{:.2}", played.figures.skew_requests)),
        ("busiest node: served bytes, of the mean", |played| format!("{:.2}", played.figures.skew_served)),
        ("directory's memory, MB a node", |played| mega(played.measured.directory_bytes as f64)),
        ("of these outbox", |played| mega(played.measured.outbox_bytes as f64)),
        ("of these rows", |played| mega(played.measured.shard_bytes as f64)),
        ("connections open, a node", |played| format!("{:.0}", played.figures.connections_open)),
        ("connections of a node at most", |played| played.figures.connections_most.to_string()),
        ("handshakes, a second and node", |played| format!("{:.1}", played.figures.handshakes_a_second)),
        ("lookups that waited for a handshake, %", |played| percent(played.figures.handshake_share)),
        ("nodes spoken with in 10 s, a node", |played| format!("{:.0}", played.figures.connections_used)),
        ("coordinator: CPU, s a second, no network", |played| {
            format!("{:.4}", played.measured.coordinator_cpu)
        }),
        ("coordinator: KB a second", |played| kilo(played.figures.coordinator_bytes_a_second)),
        ("coordinator: CPU of a join's tables, s", |played| {
            format!("{:.3}", played.measured.coordinator_cpu_a_table)
        }),
        ("a whole table, KB", |played| kilo(played.figures.table_bytes as f64)),
        ("token hit rate shared, %", |played| percent(played.figures.hit_rate_shared)),
        ("token hit rate routed, %", |played| percent(played.figures.hit_rate_routed)),
        ("token hit rate local, %", |played| percent(played.figures.hit_rate_local)),
        ("start: all nodes, until homes know all, s", |played| {
            format!("{:.1}", played.figures.start_seconds)
        }),
    ];
    rows.extend(change_rows());
    rows
}

/// The rows about joins, leaves and crashes.
fn change_rows() -> Vec<TableRow> {
    vec![
        ("a join: from it to its table, s", |played| seconds(played.figures.join.table_after_seconds)),
        ("    until every node has the table, s", |played| {
            seconds(played.figures.join.everywhere_after_seconds)
        }),
        ("    until the directory is right, s", |played| seconds(played.figures.join.repaired_after_seconds)),
        ("    partitions moved", |played| played.figures.join.moved_partitions.to_string()),
        ("    rows told", |played| played.figures.join.told_rows.to_string()),
        ("a leave: until every node has the table, s", |played| {
            seconds(played.figures.leave.everywhere_after_seconds)
        }),
        ("    until the directory is right, s", |played| {
            seconds(played.figures.leave.repaired_after_seconds)
        }),
        ("    partitions moved", |played| played.figures.leave.moved_partitions.to_string()),
        ("    rows told", |played| played.figures.leave.told_rows.to_string()),
        ("a crash of 5 %: from it to the removal, s", |played| {
            seconds(played.figures.crash.table_after_seconds)
        }),
        ("    until every node has the table, s", |played| {
            seconds(played.figures.crash.everywhere_after_seconds)
        }),
        ("    until the directory is right, s", |played| {
            seconds(played.figures.crash.repaired_after_seconds)
        }),
        ("    partitions moved", |played| played.figures.crash.moved_partitions.to_string()),
        ("    rows told", |played| played.figures.crash.told_rows.to_string()),
        ("    tables sent to a node, KB", |played| kilo(played.figures.crash.table_bytes as f64)),
        ("rows unknown after all of this, of 1,000", |played| {
            played.figures.crash.unknown_of_1000.to_string()
        }),
        ("CPU of the simulation, s", |played| format!("{:.0}", played.measured.cpu_seconds)),
        ("memory of the simulation, MB", |played| mega(played.measured.allocated_bytes as f64)),
    ]
}

fn kilo(bytes: f64) -> String {
    format!("{:.1}", bytes / 1e3)
}

fn mega(bytes: f64) -> String {
    format!("{:.2}", bytes / 1e6)
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.2}")
}
