"""The disk tier."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="disk",
    title="disk",
    description="The disk tiers of nodes.",
    panels=[
        Panel(
            "How much is read and written?",
            "Bps",
            "Bytes a second, including headers, moves and the scrubber's reads.",
            {
                "{{node}}, read": "sum by (node) (rate(larder_disk_read_bytes_total{@n}[$__rate_interval]))",
                "{{node}}, written": "sum by (node) (rate(larder_disk_written_bytes_total{@n}[$__rate_interval]))",
            },
        ),
        Panel(
            "How much is written twice?",
            "percentunit",
            "Of all written bytes, the share that was moved, because it was in use when its segment was given up.",
            {"{{node}}": "sum by (node) (rate(larder_disk_moved_bytes_total{@n}[$__rate_interval]))"
             " / sum by (node) (rate(larder_disk_written_bytes_total{@n}[$__rate_interval]))"},
            zero_is_fine=True, most=1,
        ),
        Panel(
            "How long does a sync take?",
            "s",
            "Time until the drive has stored everything: median and 99th percentile. Writes are answered only after "
            "a sync.",
            {
                "median": "histogram_quantile(0.5, sum by (le) "
                "(rate(larder_disk_sync_seconds_bucket{@n}[$__rate_interval])))",
                "99 %": "histogram_quantile(0.99, sum by (le) "
                "(rate(larder_disk_sync_seconds_bucket{@n}[$__rate_interval])))",
            },
        ),
        Panel(
            "What comes of orders?",
            "short",
            "Orders a second: read, written, or the reason of a failure. Busy: the queue was full, and the chunk was "
            "dropped.",
            {"{{outcome}}": "sum by (outcome) (rate(larder_disk_orders_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How many chunks are on disk?",
            "short",
            "Chunks on disk, by node.",
            {"{{node}}": "larder_disk_records{@n}"},
        ),
        Panel(
            "How are segments used?",
            "short",
            "Free, open and sealed segments.",
            {"{{state}}": "sum by (state) (larder_disk_segments{@n})"},
            stacked=True,
        ),
        Panel(
            "How many chunks leave the disk?",
            "short",
            "Chunks a second that left because their segment was given up.",
            {"{{node}}": "sum by (node) (rate(larder_disk_evicted_chunks_total{@n}[$__rate_interval]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Were wrong bytes found on disk?",
            "short",
            "Records with wrong bytes in the last ten minutes, by finder. No engine got them. Recovery also counts "
            "records that a killed process left half written.",
            {"{{node}}, {{found_by}}": "sum by (node, found_by) (increase(larder_disk_checksum_failures_total{@n}[10m]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Can the drive read what it holds?",
            "short",
            "Records and pages that the drive could not read, in the last hour. Each is a miss; after many the tier "
            "closes itself.",
            {"{{node}}": "sum by (node) (increase(larder_disk_read_errors_total{@n}[1h]))"},
            zero_is_fine=True,
            alert="LarderDiskReadErrors", above=1,
        ),
        Panel(
            "How much does the scrubber verify?",
            "Bps",
            "Bytes a second, by node.",
            {"{{node}}": "sum by (node) (rate(larder_disk_scrubbed_bytes_total{@n}[$__rate_interval]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Has a disk tier closed itself?",
            "bool",
            "1: the tier has closed itself after failures of the drive; the node continues from memory.",
            {"{{node}}": "larder_disk_closed{@n}"},
            zero_is_fine=True, most=1,
            alert="LarderDiskClosed", above=1,
        ),
        Panel(
            "Does the drive answer?",
            "bool",
            "1: the drive does not answer; the node continues from memory until it does.",
            {"{{node}}": "larder_disk_silent{@n}"},
            zero_is_fine=True, most=1,
            alert="LarderDiskSilent", above=1,
        ),
    ],
)
