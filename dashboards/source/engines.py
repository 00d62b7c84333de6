"""Larder as engines of vLLM see it."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="engines",
    title="vLLM's connector",
    description="The lookups, loads and saves of vLLM engines, and their failures: the counters that Larder's connector adds to vLLM's own.",
    panels=[
        Panel(
            "Do engines look their prompts up?",
            "reqps",
            "Prompts a second: looked up; too short for a hit; not looked up, because the engine had no node; with a "
            "failed lookup.",
            {
                "looked up": "sum(rate(vllm:larder_lookups_total{@c}[$__rate_interval]))",
                "too short": "sum(rate(vllm:larder_short_prompts_total{@c}[$__rate_interval]))",
                "without a node": "sum(rate(vllm:larder_lookups_without_node_total{@c}[$__rate_interval]))",
                "failed": "sum(rate(vllm:larder_lookups_failed_total{@c}[$__rate_interval]))",
            },
            zero_is_fine=True,
        ),
        Panel(
            "How much does a lookup find?",
            "none",
            "Cached tokens of a looked-up prompt, on average, by engine.",
            {"{{instance}}": "sum by (instance) (rate(vllm:larder_found_tokens_total{@c}[$__rate_interval]))"
             " / sum by (instance) (rate(vllm:larder_lookups_total{@c}[$__rate_interval]))"},
        ),
        Panel(
            "How much do engines load and save?",
            "Bps",
            "Bytes copied from the cache into engines' blocks (loads), and from these blocks into the cache (saves).",
            {
                "loaded": "sum(rate(vllm:larder_loaded_bytes_total{@c}[$__rate_interval]))",
                "saved": "sum(rate(vllm:larder_saved_bytes_total{@c}[$__rate_interval]))",
            },
        ),
        Panel(
            "Which loads fail?",
            "percentunit",
            "Of the requested engine blocks, the share that did not come, by engine. The engine computes these "
            "blocks again.",
            {"{{instance}}": "sum by (instance) (rate(vllm:larder_failed_blocks_total{@c}[$__rate_interval]))"
             " / (sum by (instance) (rate(vllm:larder_loaded_blocks_total{@c}[$__rate_interval]))"
             " + sum by (instance) (rate(vllm:larder_failed_blocks_total{@c}[$__rate_interval])))"},
            zero_is_fine=True, most=1,
        ),
        Panel(
            "Why are chunks not saved?",
            "short",
            "Chunks a second: too many waited already (queue), the node had no room (room), there was no node or it failed (node), the "
            "node refused them (refused), the request was preempted (gone).",
            {
                reason: f"sum(rate(vllm:larder_shed_chunks_{reason}_total{{@c}}[$__rate_interval]))"
                for reason in ["queue", "room", "node", "refused", "gone"]
            },
            zero_is_fine=True,
        ),
        Panel(
            "Which engines find no node?",
            "short",
            "Failed tries to open a session in the last five minutes, by engine.",
            {"{{instance}}": "sum by (instance) (increase(vllm:larder_failed_connects_total{@c}[5m]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Do engines get wrong bytes?",
            "short",
            "Chunks with wrong bytes in the last five minutes, by engine. The engine computes these chunks again, "
            "and reports them to its node.",
            {"{{instance}}": "sum by (instance) (increase(vllm:larder_damaged_chunks_total{@c}[5m]))"},
            zero_is_fine=True,
            alert="LarderDamagedChunk", above=1,
        ),
        Panel(
            "What comes of hints?",
            "short",
            "Chunks a second that were pinned or brought near because of a hint; hints a second that were dropped or "
            "wrong.",
            {
                what.replace("_", " "): f"sum(rate(vllm:larder_{what}_total{{@c}}[$__rate_interval]))"
                for what in ["pinned_chunks", "brought_chunks", "dropped_hints", "wrong_hints"]
            },
            zero_is_fine=True,
        ),
    ],
)
