"""Who has what, and who is there."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="directory",
    title="directory and consistency",
    description="The directory gives hints: their quality, their delay, and whether all nodes know the same table.",
    panels=[
        Panel(
            "How often is the directory right?",
            "percentunit",
            "Of the chunks that a holder was asked for because of a hint, the share that it had. A wrong hint costs "
            "a round trip, never wrong data.",
            {"hint accuracy": 'sum(rate(larder_peer_fetches_total{@n,outcome="here"}[$__rate_interval]))'
             ' / sum(rate(larder_peer_fetches_total{@n,outcome=~"here|not_held"}[$__rate_interval]))'},
            most=1,
            alert="LarderHintsWrong", below=0.9,
        ),
        Panel(
            "How many hints are stale?",
            "short",
            "Chunks a second that the hinted holder did not have.",
            {"{{node}}": "sum by (node) (rate(larder_directory_stale_chunks_total{@n}[$__rate_interval]))"},
            zero_is_fine=True,
        ),
        Panel(
            "How soon does the directory know?",
            "s",
            "Time from a chunk's gain or loss until its home knows: median and 99th percentile.",
            {
                "median": "histogram_quantile(0.5, sum by (le) "
                "(rate(larder_directory_announce_lag_seconds_bucket{@n}[$__rate_interval])))",
                "99 %": "histogram_quantile(0.99, sum by (le) "
                "(rate(larder_directory_announce_lag_seconds_bucket{@n}[$__rate_interval])))",
            },
            alert="LarderAnnouncesLag", above=5,
        ),
        Panel(
            "How many rows does each home have?",
            "short",
            "Rows of the directory by home. The rows should be spread by the members' weights.",
            {"{{node}}": "larder_directory_rows{@n}"},
        ),
        Panel(
            "Do rows and chunks agree?",
            "short",
            "All rows of the directory beside all chunks that actors hold. The difference: announcements under way, "
            "and rows of nodes that left.",
            {
                "rows": "sum(larder_directory_rows{@c})",
                "chunks held": "sum(larder_directory_held_chunks{@c})",
            },
        ),
        Panel(
            "How many changes wait to be announced?",
            "short",
            "Gains and losses that no announcement carries yet.",
            {"{{node}}": "larder_directory_waiting_changes{@n}"},
            zero_is_fine=True,
        ),
        Panel(
            "What comes of announcements?",
            "short",
            "Announcements sent in a second: known; restarted, because the home asked for a new stream; again, "
            "because the home did not answer; late.",
            {"{{outcome}}": "sum by (outcome) (rate(larder_directory_announces_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "What is repaired?",
            "short",
            "Events in a second at homes: rows of another home (foreign), rows dropped for lack of room, restarted "
            "streams, differing sums, repaired rows.",
            {"{{event}}": "sum by (event) (rate(larder_directory_shard_events_total{@n}[$__rate_interval]))"},
            zero_is_fine=True,
        ),
        Panel(
            "How many homes does a lookup ask?",
            "short",
            "Other homes asked in one lookup, on average.",
            {"{{node}}": "sum by (node) (rate(larder_directory_homes_asked_sum{@n}[$__rate_interval]))"
             " / sum by (node) (rate(larder_directory_homes_asked_count{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How much does a node know without asking?",
            "percentunit",
            "Of the chunks asked for, the share whose holders the node remembered.",
            {"{{node}}": "sum by (node) (rate(larder_directory_cached_chunks_total{@n}[$__rate_interval]))"
             " / sum by (node) (rate(larder_directory_asked_chunks_total{@n}[$__rate_interval]))"},
            most=1,
        ),
        Panel(
            "What do homes answer?",
            "short",
            "Questions to other homes in a second, by outcome. Shed: too many questions were under way, so the asked "
            "chunks count as not held.",
            {"{{outcome}}": "sum by (outcome) (rate(larder_directory_finds_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "Who is a member?",
            "short",
            "Number of members that the coordinator knows, and that each node knows.",
            {
                "coordinator: {{state}}": "sum by (state) (max by (cluster, state) (larder_coordinator_members{@c}))",
                "{{node}}": "sum by (node) (larder_membership_members{@n})",
            },
        ),
        Panel(
            "Is a node lost?",
            "short",
            "Nodes that the coordinator removed after long silence, and that have not come back.",
            {"lost": "sum(max by (cluster) (larder_coordinator_lost_members{@c}))"},
            zero_is_fine=True,
            alert="LarderMemberLost", above=1,
        ),
        Panel(
            "How often do nodes become suspect?",
            "short",
            "Suspicions in the last ten minutes, without those of nodes that were then removed.",
            {"suspicions": 'clamp_min(sum(increase(larder_coordinator_events_total{@c,event="suspect"}[10m]))'
             ' - sum(increase(larder_coordinator_events_total{@c,event="remove"}[10m])), 0)'},
            zero_is_fine=True,
            alert="LarderMemberSuspect", above=2,
        ),
        Panel(
            "Do homes have room for their rows?",
            "short",
            "Rows without room, by home.",
            {"{{node}}": "larder_directory_missing_rows{@n}"},
            zero_is_fine=True,
            alert="LarderDirectoryFull", above=1,
        ),
        Panel(
            "Do all know the same table?",
            "short",
            "The number of the epoch, at the coordinator and at each node. Lines part for a moment when members change.",
            {
                "coordinator": 'max(larder_coordinator_epoch{@c,part="number"})',
                "{{node}}": 'max by (node) (larder_membership_epoch{@n,part="number"})',
            },
        ),
        Panel(
            "How often do members and partitions move?",
            "short",
            "Joins, leaves, suspicions, removals and partitions moved, in the last ten minutes.",
            {"{{event}}": "sum by (event) (increase(larder_coordinator_events_total{@c}[10m]))"},
            zero_is_fine=True,
        ),
        Panel(
            "How long was a member silent?",
            "s",
            "Time since the last heartbeat of the most silent member.",
            {"longest silence": "max(larder_coordinator_longest_silence_seconds{@c})"},
        ),
        Panel(
            "How many members are late?",
            "short",
            "Members without a heartbeat for more than two intervals.",
            {"late": "sum(larder_coordinator_late_members{@c})"},
            zero_is_fine=True,
        ),
    ],
)
