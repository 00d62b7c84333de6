//! The metrics of the directory.

use larder_net::metrics::{Label, Metric, Section};

use crate::exchange::metrics::table::SHARING;

/// Who has what.
pub(crate) const DIRECTORY: Section = Section {
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

/// What happens to rows.
const SHARD_EVENTS: &[&str] =
    &["foreign", "dropped", "crowded", "refilled", "restart", "differing", "repaired"];
