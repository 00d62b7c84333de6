//! Every metric of a node, with its documentation.

use larder_core::reports::Reporter;
use larder_core::store::policy::PolicyName;
use larder_net::http::HttpMetrics;
use larder_net::metrics::{CertificateMetrics, Label, Part as _, ProcessMetrics, Section, TracingMetrics};
use larder_net::metrics_table;
use strum::VariantNames;

use crate::directory::DirectoryMetrics;
use crate::disk::DiskMetrics;
use crate::disk::metrics::DEVICE;
use crate::exchange::ExchangeMetrics;
use crate::object::ObjectMetrics;

/// All sections, in the order in which people should read them.
pub const NODE: &[Section] = &[
    Value::SECTION,
    Operations::SECTION,
    Tiers::SECTION,
    DiskMetrics::SECTION,
    ObjectMetrics::SECTION,
    Tenants::SECTION,
    ExchangeMetrics::SECTION,
    DirectoryMetrics::SECTION,
    Membership::SECTION,
    CertificateMetrics::SECTION,
    Recording::SECTION,
    TracingMetrics::SECTION,
    HttpMetrics::SECTION,
    ProcessMetrics::SECTION,
];

metrics_table! {
    /// The value of the cache.
    pub(super) struct Value: "Value", "" => {
        tokens_asked: IntCounterVec = "larder_tokens_asked_total", "tokens", [TENANT, NAMESPACE, PREEMPTED],
            "Prompt tokens of lookups whose caller could use a hit";
        tokens_hit: IntCounterVec = "larder_tokens_hit_total", "tokens", [TENANT, NAMESPACE, PREEMPTED, TIER],
            "Prompt tokens found, by tier";
        tokens_skipped: IntCounterVec = "larder_tokens_skipped_total", "tokens", [TENANT, NAMESPACE],
            "Prompt tokens of lookups whose caller could not use a hit";
        avoided_seconds: CounterVec = "larder_recompute_avoided_seconds_total", "seconds",
            [TENANT, NAMESPACE],
            "Seconds of prefill saved: the time to compute the found tokens that are worth loading, at the speed that the engine reported";
        hit_rate: GaugeVec = "larder_hit_rate", "ratio", [TENANT, NAMESPACE, DEVICE, WINDOW],
            "Share of the prompt tokens that were hit, in a sliding window";
        infinite_hit_rate: GaugeVec = "larder_infinite_hit_rate", "ratio",
            [TENANT, NAMESPACE, DEVICE, WINDOW],
            "Hit rate of an infinite cache: if larder_hit_rate is close to this rate, more memory brings nothing";
    }
}

metrics_table! {
    /// The requests of engines.
    pub(super) struct Operations: "Operations", "" => {
        requests: IntCounterVec = "larder_requests_total", "requests",
            [REQUEST, Label::one_of("outcome", &["done", "busy", "refused"])],
            "Requests of sessions, by outcome";
        request_seconds: HistogramVec = "larder_request_seconds", "seconds", [REQUEST],
            "Time to answer a session's request, questions to other nodes included"
            in [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 5e-4, 2e-3, 1e-2, 0.05, 0.1, 0.5, 2.0, 10.0];
        moved_bytes: IntCounterVec = "larder_moved_bytes_total", "bytes",
            [DEVICE, Label::one_of("movement", &MOVEMENTS)],
            "Bytes of blocks that engines committed, or that were leased to engines";
        held: IntGaugeVec = "larder_held", "things",
            [DEVICE, Label::one_of("what", &["sessions", "leases", "reservations", "pins", "fetches",
                "grants", "follows", "device_copies", "lingering_processes"])],
            "Objects that engines and other nodes hold; lingering_processes: processes that ended their sessions and may still touch memory";
        session_ends: IntCounterVec = "larder_session_ends_total", "sessions",
            [TENANT, Label::one_of("how", SESSION_ENDS)],
            "Sessions that ended, or were refused";
        damage_reports: IntCounterVec = "larder_damage_reports_total", "reports",
            [DEVICE, Label::one_of("by", Reporter::VARIANTS), Label::one_of("found", &REPORT_FINDINGS)],
            "Reports that the bytes of a chunk differ from the committed bytes, by the node's finding; the node dropped the damaged chunks";
        up: IntGaugeVec = "larder_actor_up", "bool", [DEVICE], "Whether the actor answers";
        build: IntGaugeVec = "larder_build_info", "",
            [Label::one_of("role", &["node"]), Label::each("version", "the version that runs")],
            "Always 1; the labels name the version";
    }
}

metrics_table! {
    /// The chunks in each tier, and their moves.
    pub(super) struct Tiers: "Tiers", "" => {
        arena_bytes: IntGaugeVec = "larder_arena_bytes", "bytes",
            [DEVICE, Label::one_of("state", &["total", "free", "used", "quarantined", "pinned", "passing"])],
            "Bytes of the arena: total = free + used + quarantined; pinned and passing are parts of used";
        placement_bytes: IntGaugeVec = "larder_arena_placement_bytes", "bytes",
            [DEVICE, Label::each("place", "huge_pages, transparent_huge_pages, ordinary_pages, misplaced, unknown, and numa_node_N for each of the host")],
            "Bytes of the arena by their place as the kernel reports it, and bytes in a wrong place";
        mismatches: IntGaugeVec = "larder_placement_mismatches", "things",
            [Label::one_of("kind", &["unplaced_gpu", "no_cpus", "no_memory", "arenas_too_large"])],
            "Parts of the node that are not on the best NUMA node, by kind";
        cached_chunks: IntGaugeVec = "larder_cached_chunks", "chunks", [DEVICE, LOCAL_TIER],
            "Chunks in a tier; for the device tier, blocks";
        cached_bytes: IntGaugeVec = "larder_cached_bytes", "bytes", [DEVICE, MEMORY_TIER],
            "Bytes of chunks in a tier";
        evictions: IntCounterVec = "larder_evicted_chunks_total", "chunks",
            [DEVICE, Label::one_of("reason", &["watermark", "need", "clearing"])],
            "Chunks evicted: above the capacity or watermark, for want of a slot, or with a whole extent";
        remembered_bytes: IntGaugeVec = "larder_remembered_bytes", "bytes",
            [DEVICE, Label::one_of("what", &["evictions", "lookups"])],
            "Memory for the last evictions and the hashes of the last lookups; they explain misses and show what another cache would have hit";
        policy_changes: IntCounterVec = "larder_policy_changes_total", "changes",
            [DEVICE, Label::one_of("to", PolicyName::VARIANTS)],
            "Changes of the eviction policy while the node ran, by the new policy";
        residence_seconds: CounterVec = "larder_evicted_residence_seconds_total", "seconds", [DEVICE],
            "Sum of the times that evicted chunks had been cached; divided by the number of evicted chunks, the mean time";
        fetched_chunks: IntCounterVec = "larder_fetched_chunks_total", "chunks",
            [DEVICE, Label::one_of("placement", &PLACEMENTS)],
            "Chunks wanted from other nodes, or from other GPUs of this node, by outcome; missed: the load failed, and the engine computes the chunk";
        handed_over_layers: IntCounterVec = "larder_handed_over_layers_total", "pieces",
            [DEVICE, Label::one_of("how", &HANDED_OVER)],
            "Ranges of layers that were handed over while their chunk was being written: given by an engine, sent to a node that follows, or come from the followed node";
        handed_over_bytes: IntCounterVec = "larder_handed_over_bytes_total", "bytes",
            [DEVICE, Label::one_of("how", &HANDED_OVER)],
            "Bytes of the layers that were handed over; layers that came count once their chunk is whole";
        device_copies: IntCounterVec = "larder_device_copies_total", "copies",
            [DEVICE, Label::one_of("how", &DEVICE_COPIES)],
            "Copies by the node between engines' GPU memory and the arena, by outcome; stalled: the GPU did not end the copy in time";
        device_bytes: IntCounterVec = "larder_device_copied_bytes_total", "bytes",
            [DEVICE, Label::one_of("direction", &DEVICE_DIRECTIONS)],
            "Bytes of successful copies by the node between engines' GPU memory and the arena; tier: bytes that loads took from the device tier";
        device_evictions: IntCounterVec = "larder_device_evicted_blocks_total", "blocks", [DEVICE],
            "Blocks evicted from the device tier; the host may still have them";
        follows_lost: IntCounterVec = "larder_follows_lost_chunks_total", "chunks", [DEVICE],
            "Chunks that were followed and did not come: the writer ended or failed, or was silent for too long";
        given_up: IntCounterVec = "larder_given_up_chunks_total", "chunks", [DEVICE],
            "Chunks that moved to other nodes, or to other GPUs of this node";
        forwarded: IntCounterVec = "larder_forwarded_chunks_total", "chunks",
            [DEVICE, Label::one_of("how", &["offered", "sent", "taken"])],
            "Evicted chunks that no other node had, by step; offered: to a node whose room is worth less; sent: the other node has the chunk; taken: a chunk of another node came here";
        forwarded_bytes: IntCounterVec = "larder_forwarded_bytes_total", "bytes", [DEVICE],
            "Bytes of the evicted chunks that were sent to other nodes";
        misnamed: IntCounterVec = "larder_misnamed_chunks_total", "chunks", [DEVICE],
            "Chunks whose name was not the requested name: a fault of Larder, answered as a miss";
        refused_names: IntCounterVec = "larder_refused_chunk_names_total", "chunks", [DEVICE],
            "Chunks refused because their parent or index contradicts chunks that are here";
        restarts: IntCounterVec = "larder_actor_restarts_total", "restarts", [DEVICE],
            "Times that a fault of Larder ended the actor's sessions and emptied its memory; the actor began again, with the chunks of its disk";
    }
}

metrics_table! {
    /// Each tenant's use of the node.
    pub(super) struct Tenants: "Tenants", "" => {
        hit_rate: GaugeVec = "larder_tenant_hit_rate", "ratio", [TENANT, DEVICE, WINDOW],
            "Share of the prompt tokens that were hit, in a sliding window";
        infinite_hit_rate: GaugeVec = "larder_tenant_infinite_hit_rate", "ratio", [TENANT, DEVICE, WINDOW],
            "Hit rate of an infinite cache, in a sliding window";
        window_tokens: IntGaugeVec = "larder_tenant_window_tokens", "tokens",
            [TENANT, DEVICE, WINDOW, Label::one_of("tokens", &["asked", "hit", "reusable"])],
            "Prompt tokens of lookups in a sliding window: all tokens, found tokens, and tokens that an infinite cache would have found; the sum over nodes is the cluster's";
        arena_bytes: IntGaugeVec = "larder_tenant_arena_bytes", "bytes",
            [TENANT, DEVICE, Label::one_of("state", &["held", "limit"])],
            "Bytes of the tenant's extents, with or without blocks in them, and their limit";
        window_bytes: IntGaugeVec = "larder_tenant_window_bytes", "bytes",
            [TENANT, Label::one_of("state", &["held", "limit"])],
            "Bytes of the write windows of the tenant's sessions, and their limit; windows are memory outside the arena";
    }
}

metrics_table! {
    /// The lookup log.
    pub(super) struct Recording: "Recording", "" => {
        unrecorded: IntCounter = "larder_unrecorded_lookups_total", "lookups", [],
            "Lookups that the lookup log left out";
    }
}

metrics_table! {
    /// The members of the cluster, as this node knows them.
    pub(crate) struct Membership: "Membership", "nodes in a cluster" => {
        epoch: IntGaugeVec = "larder_membership_epoch", "", [Label::one_of("part", &["term", "number"])],
            "The epoch of the node's table; it follows larder_coordinator_epoch";
        members: IntGaugeVec = "larder_membership_members", "nodes",
            [Label::one_of("state", &["alive", "suspect", "draining"])],
            "Nodes in the node's table, by state";
        panics: IntCounterVec = "larder_peer_task_panics_total", "panics",
            [Label::one_of("task", &["directory", "peers", "orders", "accept", "serve", "fetch", "follow",
                "tables", "follower", "certificates", "purge"])],
            "Tasks of the peer thread that panicked, and were started again with empty state; a purge is not started again";
    }
}

const TENANT: Label = Label::each("tenant", "each tenant of the configuration");
const NAMESPACE: Label =
    Label::each("namespace", "each namespace that the node knows; at most 1,024 an actor");
const PREEMPTED: Label = Label::one_of("preempted", &super::PREEMPTED);
const TIER: Label = Label::one_of("tier", &["device", "host", "disk", "peer", "object"]);
const LOCAL_TIER: Label = Label::one_of("tier", &["device", "host", "disk"]);
const MEMORY_TIER: Label = Label::one_of("tier", &["device", "host"]);
const WINDOW: Label = Label::one_of("window", &["10m", "1h"]);
const REQUEST: Label = Label::one_of(
    "request",
    &[
        "register",
        "lookup",
        "reserve",
        "commit",
        "abort",
        "lease",
        "release",
        "pin",
        "unpin",
        "prefetch",
        "progress",
        "collect",
        "cancel",
        "hand_over",
        "follow",
        "ask_in_place",
        "register_tensors",
        "load_pages",
        "save_pages",
        "ask_copy",
        "forget_copy",
        "report_damage",
    ],
);

/// The ways in which blocks move between node and engine.
pub(super) const MOVEMENTS: [&str; 2] = ["leased", "committed"];

/// The outcomes of fetches of chunks.
pub(super) const PLACEMENTS: [&str; 5] = ["migrated", "replicated", "passed", "missed", "forwarded"];

/// The steps at which handed-over layers are counted.
pub(super) const HANDED_OVER: [&str; 3] = ["given", "sent", "came"];

/// How copies by a device end: see [`larder_core::DeviceCopyEnd`].
pub(super) const DEVICE_COPIES: [&str; 5] = ["loaded", "saved", "promoted", "failed", "stalled"];

/// The directions of copies by a device.
pub(super) const DEVICE_DIRECTIONS: [&str; 4] = ["load", "save", "promotion", "tier"];

/// The node's findings about a reported chunk. `nothing`: the chunk is not in memory, or is already being verified.
/// `not_examined`: too many chunks are already being verified.
pub(super) const REPORT_FINDINGS: [&str; 4] = ["damaged", "right", "nothing", "not_examined"];

/// How sessions end.
pub(super) const SESSION_ENDS: &[&str] = &[
    "closed",
    "process_gone",
    "stopping",
    "tenant_left",
    "fault",
    "protocol_error",
    "socket_error",
    "refused",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use larder_net::metrics::{Kind, Metric};

    use super::*;

    #[test]
    fn names_are_unique_and_follow_prometheus_rules() {
        let mut names = BTreeSet::new();
        for metric in NODE.iter().flat_map(|section| section.metrics) {
            let Metric { name, kind, unit, help, .. } = metric;
            assert!(names.insert(name), "{name} comes twice");
            assert_eq!(*kind == Kind::Counter, name.ends_with("_total"), "{name}");
            let stem = name.trim_end_matches("_total");
            for base in ["seconds", "bytes"] {
                assert_eq!(*unit == base, stem.ends_with(base), "{name} counts {unit}");
            }
            assert!(!help.starts_with(char::is_lowercase) && !help.ends_with('.'), "{name}");
        }
    }
}
