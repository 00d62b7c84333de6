//! The directory's metrics.

use larder_core::directory::{Outbox, Shard, ShardCounts};
use larder_net::metrics::{Label, show_totals};
use larder_net::metrics_table;

use crate::exchange::metrics::SHARING;

metrics_table! {
    /// The directory's metrics.
    pub struct DirectoryMetrics: "Directory", SHARING => {
        rows: IntGauge = "larder_directory_rows", "rows", [], "Rows whose home this node is";
        max_rows: IntGauge = "larder_directory_max_rows", "rows", [],
            "Rows that this home can keep: a share of the memory of the host or control group";
        missing_rows: IntGauge = "larder_directory_missing_rows", "rows", [],
            "Rows for which this home has no room; the home asks for these rows again once it has room";
        holders: IntGauge = "larder_directory_holders", "actors", [],
            "Actors of the cluster that announce to this home";
        held: IntGauge = "larder_directory_held_chunks", "chunks", [], "Chunks that this node's actors hold";
        waiting: IntGauge = "larder_directory_waiting_changes", "changes", [],
            "Changes that wait for an announcement";
        finds: IntCounterVec = "larder_directory_finds_total", "questions",
            [Label::one_of("outcome", &["found", "busy", "refused", "silent", "shed"])],
            "Questions to other homes, by outcome";
        homes: Histogram = "larder_directory_homes_asked", "homes", [],
            "Other homes asked in one lookup"
            in [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
        asked: IntCounter = "larder_directory_asked_chunks_total", "chunks", [], "Chunks of lookups whose holders were wanted";
        cached: IntCounter = "larder_directory_cached_chunks_total", "chunks", [],
            "Chunks of lookups whose holders were known from an earlier answer";
        served: IntCounter = "larder_directory_served_finds_total", "questions", [],
            "Questions of peers that were answered";
        announced: IntCounterVec = "larder_directory_served_announces_total", "announcements",
            [Label::one_of("outcome", &["known", "start_anew", "later", "other_incarnation"])],
            "Announcements received, by outcome";
        batches: IntCounterVec = "larder_directory_announces_total", "announcements",
            [Label::one_of("outcome", &["known", "restarted", "again", "late"])],
            "Announcements sent, by outcome";
        changes: IntCounter = "larder_directory_announced_changes_total", "changes", [],
            "Changes that homes have taken";
        lag: Histogram = "larder_directory_announce_lag_seconds", "seconds", [],
            "Time from a chunk's gain or loss until its home knows"
            in [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0];
        moved: IntCounterVec = "larder_directory_moved_total", "announcements",
            [Label::one_of("outcome", &["done", "failed"])],
            "Messages to holders that chunks moved, by outcome";
        stale: IntCounter = "larder_directory_stale_chunks_total", "chunks", [],
            "Chunks that their listed holder did not have: the hint was wrong, and cost a round trip";
        shard: IntCounterVec = "larder_directory_shard_events_total", "events",
            [Label::one_of("event", &["foreign", "dropped", "crowded", "refilled", "restart", "differing",
                "repaired"])],
            "Events of this home's rows; dropped: for want of room; crowded: enough other nodes have the chunk";
    }
}

impl DirectoryMetrics {
    /// Updates the gauges.
    pub(super) fn show(&self, shard: &Shard, outbox: &Outbox) {
        self.rows.set(shard.len() as i64);
        self.missing_rows.set(shard.missing() as i64);
        self.max_rows.set(shard.max_rows() as i64);
        self.holders.set(shard.holders() as i64);
        self.held.set(outbox.held() as i64);
        self.waiting.set(outbox.waiting() as i64);
        let ShardCounts { foreign, dropped, crowded, refilled, restarts, differing, repaired } =
            shard.counts();
        let events = [
            ("foreign", foreign),
            ("dropped", dropped),
            ("crowded", crowded),
            ("refilled", refilled),
            ("restart", restarts),
            ("differing", differing),
            ("repaired", repaired),
        ];
        show_totals(&self.shard, events);
    }
}
