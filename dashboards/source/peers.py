"""What nodes send each other."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="peers",
    title="peer matrix",
    description="Blocks between nodes: their number, their speed, and their obstacles.",
    panels=[
        Panel(
            "Who sends how much to whom?",
            "Bps",
            "Bytes of blocks a second: a row receives, a column sends.",
            {"": 'sum by (node, peer) (rate(larder_peer_received_bytes_total{@n,peer!="other"}[$__rate_interval]))'},
            kind="table",
        ),
        Panel(
            "How far is each node from each other?",
            "s",
            "Round trip of packets, smoothed by QUIC; the slowest of several connections.",
            {"": "max by (node, peer) (larder_peer_rtt_seconds{@n})"},
            kind="table",
        ),
        Panel(
            "Who loses packets on the way to whom?",
            "percentunit",
            "Share of the sent packets that were lost, over ten minutes: a row sends, a column should receive. Lost "
            "packets are sent again; from 1 % on throughput suffers.",
            {"": "sum by (node, peer) (rate(larder_peer_lost_packets_total{@n}[10m]))"
             " / sum by (node, peer) (rate(larder_peer_sent_packets_total{@n}[10m]))"},
            kind="table", zero_is_fine=True,
            alert="LarderPacketLoss", above=0.02,
        ),
        Panel(
            "Who waits for credits of whom?",
            "percentunit",
            "Seconds in a second that all fetches together waited for a stream or for credits. A row waits for a "
            "column, since the limit of bytes under way from the column is reached. Lasting values above 1: the link "
            "or the column is the bottleneck.",
            {"": "sum by (node, peer) (rate(larder_peer_credit_wait_seconds_total{@n}[$__rate_interval]))"},
            kind="table", zero_is_fine=True,
        ),
        Panel(
            "How much do nodes send each other?",
            "Bps",
            "Bytes of blocks received, by receiving node.",
            {"{{node}}": "sum by (node) (rate(larder_peer_received_bytes_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How much of that do block threads receive?",
            "percentunit",
            "Share of the received bytes that block threads received, beside the thread that does everything else between "
            "nodes; 0 where a node has no block threads, or where all fetches are small.",
            {
                "{{node}}": "sum by (node) (rate(larder_peer_block_thread_bytes_total{@n}[$__rate_interval])) "
                "/ sum by (node) (rate(larder_peer_received_bytes_total{@n}[$__rate_interval]))"
            },
            zero_is_fine=True,
        ),
        Panel(
            "What comes of chunks that are asked of other nodes?",
            "short",
            "Chunks a second: here; no longer held; or the reason of the failure.",
            {"{{outcome}}": "sum by (outcome) (rate(larder_peer_fetches_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "What becomes of fetched chunks?",
            "short",
            "Chunks a second: migrated (the holder gives its copy up); replicated; only passed to the engine; missed "
            "(the engine recomputes them).",
            {"{{placement}}": "sum by (placement) (rate(larder_fetched_chunks_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How long does a small request take?",
            "s",
            "Time from the question to another node to its answer: median and 99th percentile.",
            {
                "median": "histogram_quantile(0.5, sum by (le) "
                "(rate(larder_peer_round_trip_seconds_bucket{@n}[$__rate_interval])))",
                "99 %": "histogram_quantile(0.99, sum by (le) "
                "(rate(larder_peer_round_trip_seconds_bucket{@n}[$__rate_interval])))",
            },
        ),
        Panel(
            "How much is on its way?",
            "bytes",
            "Bytes of requested blocks that have not come yet, in credits, by requesting node.",
            {"{{node}}": "sum by (node) (larder_peer_in_flight_bytes{@n})"},
            zero_is_fine=True,
        ),
        Panel(
            "Does anybody not answer?",
            "short",
            "Number of nodes that do not answer this node. It does not ask them until they answer again.",
            {"{{node}}": "larder_peer_silent{@n}"},
            zero_is_fine=True,
            alert="LarderPeersSilent", above=1,
        ),
        Panel(
            "What is asked of nodes?",
            "reqps",
            "Requests of other processes in a second, by kind.",
            {"{{request}}": "sum by (request) (rate(larder_peer_requests_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "Who is turned away?",
            "short",
            "Refused connections and requests a second, by reason. Reason certificate: issued by another authority, "
            "or expired.",
            {"{{reason}}": "sum by (reason) (rate(larder_peer_rejected_total{@n}[$__rate_interval]))"},
            zero_is_fine=True,
        ),
    ],
)
