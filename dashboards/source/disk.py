"""The disk tier."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="disk",
    title="disk",
    description="The disk tier of nodes that have one.",
    panels=[
        Panel(
            "How much is read and written?",
            "Bps",
            "Headers, moves and what the scrubber reads are included.",
            {
                "{{node}}, read": "sum by (node) (rate(larder_disk_read_bytes_total{@n}[$__rate_interval]))",
                "{{node}}, written": "sum by (node) (rate(larder_disk_written_bytes_total{@n}[$__rate_interval]))",
            },
        ),
        Panel(
            "How much is written twice?",
            "percentunit",
            "Bytes that were moved because they were in use when their segment was given up, of all that was written.",
            {"{{node}}": "sum by (node) (rate(larder_disk_moved_bytes_total{@n}[$__rate_interval]))"
             " / sum by (node) (rate(larder_disk_written_bytes_total{@n}[$__rate_interval]))"},
            zero_is_fine=True, most=1,
        ),
        Panel(
            "How long does a sync take?",
            "s",
            "Until the drive has everything: median and 99th percentile. Writes are answered only then.",
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
            "Orders a second: read, written, or why not. Busy: the queue was full, and the chunk was let go.",
            {"{{outcome}}": "sum by (outcome) (rate(larder_disk_orders_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How many chunks are on disk?",
            "short",
            "By node.",
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
            "Records whose bytes were wrong, in the last ten minutes, by who found them. Nobody was given them. Recovery: "
            "what a killed process left half written counts too.",
            {"{{node}}, {{found_by}}": "sum by (node, found_by) (increase(larder_disk_checksum_failures_total{@n}[10m]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Can the drive read what it holds?",
            "short",
            "Records and pages that it could not read, in the last hour. Each is a miss; after many the tier closes itself.",
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
            "1 where it did, after a failure of the drive: the node serves on from memory.",
            {"{{node}}": "larder_disk_closed{@n}"},
            zero_is_fine=True, most=1,
            alert="LarderDiskClosed", above=1,
        ),
    ],
)
