"""Nodes, their operations and their memory."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="nodes",
    title="nodes and tiers",
    description="The work of nodes, its latencies, and the content of their memory.",
    panels=[
        Panel(
            "What do engines ask for?",
            "reqps",
            "Requests of sessions in a second, by kind.",
            {"{{request}}": "sum by (request) (rate(larder_requests_total{@n}[$__rate_interval])) > 0"},
        ),
        Panel(
            "How long do requests take?",
            "s",
            "99th percentile by kind of request, including questions to other nodes.",
            {"{{request}}": "histogram_quantile(0.99, sum by (le, request) "
             "(rate(larder_request_seconds_bucket{@n}[$__rate_interval])))"},
        ),
        Panel(
            "How are the arenas used?",
            "bytes",
            "Bytes of the arenas: free, used and quarantined; the sum is the whole. Quarantined: a process that "
            "closed its session may still touch these bytes.",
            {"{{state}}": 'sum by (state) (larder_arena_bytes{@n,state=~"free|used|quarantined"})'},
            stacked=True,
        ),
        Panel(
            "How full is each node?",
            "percentunit",
            "Used share of the arena, by node.",
            {"{{node}}": 'sum by (node) (larder_arena_bytes{@n,state="used"})'
             ' / sum by (node) (larder_arena_bytes{@n,state="total"})'},
            most=1,
        ),
        Panel(
            "How much is pinned, passing or quarantined?",
            "bytes",
            "Bytes that eviction cannot take: pinned by engines, passing through from another node, or quarantined.",
            {"{{state}}": 'sum by (state) (larder_arena_bytes{@n,state=~"pinned|passing|quarantined"})'},
            zero_is_fine=True,
        ),
        Panel(
            "Which part of each arena is pinned?",
            "percentunit",
            "Share of the arena that pins keep from eviction, by node.",
            {"{{node}}": 'sum by (node) (larder_arena_bytes{@n,state="pinned"})'
             ' / sum by (node) (larder_arena_bytes{@n,state="total"})'},
            most=1, zero_is_fine=True,
            alert="LarderPinnedFull", above=0.4,
        ),
        Panel(
            "Which part of each arena is quarantined?",
            "percentunit",
            "Share of the arena that vanished processes or devices may still touch, by node.",
            {"{{node}}": 'sum by (node) (larder_arena_bytes{@n,state="quarantined"})'
             ' / sum by (node) (larder_arena_bytes{@n,state="total"})'},
            most=1, zero_is_fine=True,
            alert="LarderQuarantineStays", above=0.1,
        ),
        Panel(
            "How many chunks are cached?",
            "short",
            "Chunks in host memory, by node.",
            {"{{node}}": 'sum by (node) (larder_cached_chunks{@n,tier="host"})'},
        ),
        Panel(
            "Why are chunks evicted?",
            "short",
            "Chunks evicted in a second: watermark, because more is cached than the capacity or the watermark allows; "
            "need, because a reservation found no slot; clearing, because an extent serves other blocks.",
            {"{{reason}}": "sum by (reason) (rate(larder_evicted_chunks_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How long does a chunk stay before it is evicted?",
            "s",
            "Mean over the evicted chunks, by node. If this time is shorter than the pause between two turns of a "
            "conversation, the second turn finds nothing.",
            {"{{node}}": "sum by (node) (rate(larder_evicted_residence_seconds_total{@n}[$__rate_interval]))"
             " / sum by (node) (rate(larder_evicted_chunks_total{@n}[$__rate_interval]))"},
            alert="LarderChunksLeaveSoon", below=60,
        ),
        Panel(
            "How much goes to the object store and comes from there?",
            "Bps",
            "Bytes of objects a second, including headers. Empty if no node has an object store.",
            {
                "{{node}}, read": "sum by (node) (rate(larder_object_read_bytes_total{@n}[$__rate_interval]))",
                "{{node}}, written": "sum by (node) (rate(larder_object_written_bytes_total{@n}[$__rate_interval]))",
            },
        ),
        Panel(
            "Does the object store do what it is asked?",
            "short",
            "Failed requests a second, by outcome; sides of the store that a node leaves alone after failures; "
            "objects a second with wrong bytes, which no engine got.",
            {
                "{{kind}}: {{outcome}}": "sum by (kind, outcome) (rate(larder_object_requests_total"
                '{@n,outcome!~"ok|absent|exists"}[$__rate_interval]))',
                "left alone: {{node}}, {{side}}": "larder_object_closed{@n}",
                "wrong bytes: {{node}}": "rate(larder_object_checksum_failures_total{@n}[$__rate_interval])",
            },
            zero_is_fine=True,
        ),
        Panel(
            "Does a node leave the object store alone?",
            "short",
            "1: the node leaves this side of the store alone after failures. And how often it began to in the last 15 "
            "minutes: again and again if only small requests succeed. Empty if no node has an object store.",
            {
                "{{node}}, {{side}}": "larder_object_closed{@n}",
                "{{node}}, {{side}}: times": "increase(larder_object_closings_total{@n}[15m])",
            },
            zero_is_fine=True,
            alert="LarderObjectStoreLeftAlone", above=1,
        ),
        Panel(
            "What do engines and peers hold?",
            "short",
            "Open sessions, leases, reservations and pins of engines; fetches from other nodes and grants to them; "
            "processes that closed their sessions and may still run.",
            {"{{what}}": "sum by (what) (larder_held{@n})"},
        ),
        Panel(
            "Does every actor answer?",
            "bool",
            "1 where it does.",
            {"{{node}}, device {{device}}": "larder_actor_up{@n}"},
            most=1,
            alert="LarderActorSilent", below=1,
        ),
        Panel(
            "Does Prometheus reach every process?",
            "bool",
            "1 where it does.",
            # As in the alert: a process that died does not tell that it is Larder's.
            {"{{instance}}": "(up{@c} and on (cluster, job, instance) present_over_time(larder_build_info[1d])) or "
             '(up{@c,cluster!=""} and on (cluster, node, job) present_over_time(larder_build_info[1d]))'},
            most=1,
            alert="LarderTargetUnreachable", below=1,
        ),
        Panel(
            "Did a fault of Larder empty an actor?",
            "short",
            "Number of times in the last half hour that a fault ended an actor's sessions and emptied its memory.",
            {"{{node}}, device {{device}}": "sum by (node, device) (increase(larder_actor_restarts_total{@n}[30m]))"},
            zero_is_fine=True,
            alert="LarderActorRestarted", above=1,
        ),
        Panel(
            "How long do certificates last?",
            "s",
            "Time until each process's own certificate expires.",
            {"{{instance}}": "(larder_certificate_expires_timestamp_seconds{@c} > 0) - time()"},
            alert="LarderCertificateExpires", below=604800,
        ),
        Panel(
            "How much CPU does each process use?",
            "none",
            "CPU seconds in a second, in the kernel and outside.",
            {"{{node}} ({{role}})": "sum by (node, role) (rate(process_cpu_seconds_total{@c}[$__rate_interval])"
             " * on (cluster, job, instance) group_left (role) larder_build_info{@c})"},
        ),
        Panel(
            "How much memory does each process have?",
            "bytes",
            "Resident memory, including the arena's pages after their first use.",
            {"{{node}} ({{role}})": "sum by (node, role) (process_resident_memory_bytes{@c}"
             " * on (cluster, job, instance) group_left (role) larder_build_info{@c})"},
        ),
        Panel(
            "Do file descriptors suffice?",
            "percentunit",
            "Open file descriptors as a share of the limit. Every extent, session and engine process takes one.",
            {"{{node}}": "process_open_fds{@n} / process_max_fds{@n} and on (cluster, job, instance) larder_build_info"},
            most=1,
            alert="LarderFilesRunOut", above=0.8,
        ),
        Panel(
            "How do sessions end?",
            "short",
            "Sessions a second that ended, or were refused.",
            {"{{how}}": "sum by (how) (rate(larder_session_ends_total{@t}[$__rate_interval]))"},
        ),
        Panel(
            "Where does the kernel say the arena is?",
            "bytes",
            "Bytes of the arena on each NUMA node, and in huge pages; misplaced bytes are on another NUMA node than "
            "requested.",
            {"{{node}}, {{place}}": "sum by (node, place) (larder_arena_placement_bytes{@n})"},
        ),
        Panel(
            "Which versions run?",
            "short",
            "Processes by role and version. Two versions are fine during an upgrade.",
            {"{{role}} {{version}}": "count by (role, version) (larder_build_info{@c})"},
        ),
    ],
)
