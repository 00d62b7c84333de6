//! The metrics of a node among others.

use larder_client::metrics::{Label, Metric, Section};

/// Blocks between nodes.
pub const PEERS: Section = Section {
    title: "Peers",
    only: SHARING,
    metrics: &[
        Metric::counter(
            "larder_peer_received_bytes_total",
            "bytes",
            &[PEER],
            "Bytes of blocks that came from another node",
        ),
        Metric::counter(
            "larder_peer_sent_bytes_total",
            "bytes",
            &[PEER],
            "Bytes of blocks sent to another node",
        ),
        Metric::gauge(
            "larder_peer_in_flight_bytes",
            "bytes",
            &[PEER],
            "Bytes of blocks that were asked of another node and have not come, in credits",
        ),
        Metric::counter(
            "larder_peer_credit_wait_seconds_total",
            "seconds",
            &[PEER, Label::one_of("class", &["decode", "prefetch"])],
            "How long fetches waited, summed, for a stream or credits because as much was under way from that node as may be",
        ),
        Metric::gauge(
            "larder_peer_rtt_seconds",
            "seconds",
            &[PEER],
            "Round trip of packets, as QUIC smooths it; of several connections the slowest",
        ),
        Metric::counter("larder_peer_sent_packets_total", "packets", &[PEER], "Packets sent to another node"),
        Metric::counter(
            "larder_peer_lost_packets_total",
            "packets",
            &[PEER],
            "Packets of those that QUIC gave up for lost, and repeated",
        ),
        Metric::histogram(
            "larder_peer_round_trip_seconds",
            &[5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 1.0],
            "seconds",
            &[],
            "Time of a small request to another node, from asking to answer",
        ),
        Metric::gauge(
            "larder_peer_fetches_in_flight",
            "chunks",
            &[],
            "Chunks that are being fetched from other nodes",
        ),
        Metric::counter(
            "larder_peer_fetches_total",
            "chunks",
            &[Label::one_of("outcome", FETCHED)],
            "Chunks asked of other nodes, by what came of it; checksum: wrong bytes, which nobody was given",
        ),
        Metric::gauge("larder_peer_silent", "nodes", &[], "Nodes that do not answer this one"),
        Metric::counter(
            "larder_peer_missed_deadlines_total",
            "requests",
            &[Label::one_of("how", &["slow", "silent"])],
            "Requests to other nodes whose answer did not come in time; slow: the node was heard meanwhile",
        ),
        Metric::counter(
            "larder_peer_stalled_sends_total",
            "fetches",
            &[],
            "Fetches of other nodes that were given up because they did not read what was sent",
        ),
        Metric::gauge(
            "larder_peer_connections",
            "connections",
            &[],
            "Connections that others made to this node",
        ),
        Metric::counter(
            "larder_peer_requests_total",
            "requests",
            &[Label::one_of("request", &["find", "announce", "repair", "fetch", "moved", "damaged", "ping"])],
            "Requests that other processes made, by kind",
        ),
        Metric::counter(
            "larder_peer_rejected_total",
            "refusals",
            &[Label::one_of("reason", REJECTED)],
            "Connections and requests turned away, by reason",
        ),
    ],
};

/// Who has what.
pub const DIRECTORY: Section = Section {
    title: "Directory",
    only: SHARING,
    metrics: &[
        Metric::gauge("larder_directory_rows", "rows", &[], "Rows whose home this node is"),
        Metric::gauge(
            "larder_directory_max_rows",
            "rows",
            &[],
            "Rows that this home can keep: a share of the memory of the host or control group",
        ),
        Metric::gauge(
            "larder_directory_missing_rows",
            "rows",
            &[],
            "Rows for which this home has no room; they are asked for again once it has",
        ),
        Metric::gauge(
            "larder_directory_holders",
            "actors",
            &[],
            "Actors of the cluster that announce to this home",
        ),
        Metric::gauge("larder_directory_held_chunks", "chunks", &[], "Chunks that this node's actors hold"),
        Metric::gauge(
            "larder_directory_waiting_changes",
            "changes",
            &[],
            "Changes that no announcement carries yet",
        ),
        Metric::counter(
            "larder_directory_finds_total",
            "questions",
            &[Label::one_of("outcome", &["found", "busy", "refused", "silent", "shed"])],
            "Questions to other homes, by outcome",
        ),
        Metric::histogram(
            "larder_directory_homes_asked",
            &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
            "homes",
            &[],
            "Other homes asked in one lookup",
        ),
        Metric::counter("larder_directory_asked_chunks_total", "chunks", &[], "Chunks asked for"),
        Metric::counter(
            "larder_directory_cached_chunks_total",
            "chunks",
            &[],
            "Chunks asked for whose answer was known",
        ),
        Metric::counter(
            "larder_directory_served_finds_total",
            "questions",
            &[],
            "Questions of peers that were answered",
        ),
        Metric::counter(
            "larder_directory_served_announces_total",
            "announcements",
            &[Label::one_of("outcome", &["known", "start_anew", "later", "other_incarnation"])],
            "Announcements received, by outcome",
        ),
        Metric::counter(
            "larder_directory_announces_total",
            "announcements",
            &[Label::one_of("outcome", &["known", "restarted", "again", "late"])],
            "Announcements sent, by outcome",
        ),
        Metric::counter(
            "larder_directory_announced_changes_total",
            "changes",
            &[],
            "Changes that homes have taken",
        ),
        Metric::histogram(
            "larder_directory_announce_lag_seconds",
            &[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0],
            "seconds",
            &[],
            "From a chunk's gain or loss until its home knows",
        ),
        Metric::counter(
            "larder_directory_moved_total",
            "announcements",
            &[Label::one_of("outcome", &["done", "failed"])],
            "Holders told that chunks moved, by outcome",
        ),
        Metric::counter(
            "larder_directory_stale_chunks_total",
            "chunks",
            &[],
            "Chunks that their holder did not have: the hint was wrong, and cost a round trip",
        ),
        Metric::counter(
            "larder_directory_shard_events_total",
            "events",
            &[Label::one_of("event", SHARD_EVENTS)],
            "What happened to rows of this home; dropped: for want of room; crowded: enough others have the chunk",
        ),
    ],
};

/// Who is there, as this node knows it.
pub const MEMBERSHIP: Section = Section {
    title: "Membership",
    only: "nodes in a cluster",
    metrics: &[
        Metric::gauge(
            "larder_membership_epoch",
            "",
            &[Label::one_of("part", &["term", "number"])],
            "The epoch of the node's table; it follows larder_coordinator_epoch",
        ),
        Metric::gauge(
            "larder_membership_members",
            "nodes",
            &[Label::one_of("state", &["alive", "suspect"])],
            "Nodes in the node's table, by state",
        ),
        Metric::counter(
            "larder_peer_task_panics_total",
            "panics",
            &[Label::one_of("task", TASKS)],
            "Tasks of the peer thread that panicked, and were begun again with nothing",
        ),
    ],
};

/// What runs on the peer thread.
const TASKS: &[&str] = &[
    "directory",
    "peers",
    "orders",
    "accept",
    "serve",
    "fetch",
    "follow",
    "tables",
    "follower",
    "certificates",
];

const SHARING: &str = "nodes that share chunks in a cluster";

const PEER: Label =
    Label::each("peer", "each other node of the table; `other` for one that is not in it (yet)");

/// What comes of a chunk that is asked of another node.
const FETCHED: &[&str] =
    &["here", "not_held", "busy", "unreachable", "deadline", "broken", "malformed", "checksum", "full"];

/// What happens to rows.
const SHARD_EVENTS: &[&str] =
    &["foreign", "dropped", "crowded", "refilled", "restart", "differing", "repaired"];

/// Why somebody is turned away.
const REJECTED: &[&str] = &[
    "handshakes",
    "connections",
    "certificate",
    "identity",
    "handshake",
    "malformed",
    "too_long",
    "not_allowed",
];
