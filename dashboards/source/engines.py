"""Larder as engines of vLLM see it."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="engines",
    title="vLLM's connector",
    description="What engines of vLLM look up, load and save, and what goes wrong there: the counters that Larder's connector adds to "
    "vLLM's own.",
    panels=[
        Panel(
            "Do engines look their prompts up?",
            "reqps",
            "Prompts a second: looked up; too short for a hit; not looked up, because the engine had no node; and those whose lookup failed.",
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
            "Tokens that the cache has of a prompt that was looked up, on average, by engine.",
            {"{{instance}}": "sum by (instance) (rate(vllm:larder_found_tokens_total{@c}[$__rate_interval]))"
             " / sum by (instance) (rate(vllm:larder_lookups_total{@c}[$__rate_interval]))"},
        ),
        Panel(
            "How much do engines load and save?",
            "Bps",
            "Bytes copied from the cache into engines' blocks, and from there into the cache.",
            {
                "loaded": "sum(rate(vllm:larder_loaded_bytes_total{@c}[$__rate_interval]))",
                "saved": "sum(rate(vllm:larder_saved_bytes_total{@c}[$__rate_interval]))",
            },
        ),
        Panel(
            "Which loads fail?",
            "percentunit",
            "Engine blocks that did not come, of those requested, by engine: it computes them again.",
            {"{{instance}}": "sum by (instance) (rate(vllm:larder_failed_blocks_total{@c}[$__rate_interval]))"
             " / (sum by (instance) (rate(vllm:larder_loaded_blocks_total{@c}[$__rate_interval]))"
             " + sum by (instance) (rate(vllm:larder_failed_blocks_total{@c}[$__rate_interval])))"},
            zero_is_fine=True, most=1,
        ),
        Panel(
            "Why are chunks not saved?",
            "short",
            "Chunks a second: too many waited already (queue), the node had no room (room), there was no node or it failed (node), the "
            "request was preempted (gone).",
            {
                reason: f"sum(rate(vllm:larder_shed_chunks_{reason}_total{{@c}}[$__rate_interval]))"
                for reason in ["queue", "room", "node", "gone"]
            },
            zero_is_fine=True,
        ),
        Panel(
            "Which engines find no node?",
            "short",
            "Tries to open a session that failed, in the last five minutes, by engine.",
            {"{{instance}}": "sum by (instance) (increase(vllm:larder_failed_connects_total{@c}[5m]))"},
            zero_is_fine=True,
        ),
        Panel(
            "Do engines get wrong bytes?",
            "short",
            "Chunks with wrong bytes in the last five minutes, by engine. The engine computes them again, and reports them to its node.",
            {"{{instance}}": "sum by (instance) (increase(vllm:larder_damaged_chunks_total{@c}[5m]))"},
            zero_is_fine=True,
            alert="LarderDamagedChunk", above=1,
        ),
        Panel(
            "What comes of hints?",
            "short",
            "Chunks a second that were pinned, or brought near, because a request hinted at its return; hints that were dropped or wrong.",
            {
                what.replace("_", " "): f"sum(rate(vllm:larder_{what}_total{{@c}}[$__rate_interval]))"
                for what in ["pinned_chunks", "brought_chunks", "dropped_hints", "wrong_hints"]
            },
            zero_is_fine=True,
        ),
    ],
)
