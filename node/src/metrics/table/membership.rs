//! The metrics of a member of a cluster.

use larder_net::metrics::{Label, Metric, Section};

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
