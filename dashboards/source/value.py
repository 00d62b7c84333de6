"""What the cache is worth."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="value",
    title="cluster value",
    description="What the cache saves: how much of what engines ask was computed before.",
    panels=[
        Panel(
            "How much of what engines ask is hit?",
            "percentunit",
            "Prompt tokens found, of prompt tokens asked, over all tiers. Lookups whose caller could not use a hit are in "
            "neither.",
            {"hit rate": "sum(rate(larder_tokens_hit_total{@t}[$__rate_interval]))"
             " / sum(rate(larder_tokens_asked_total{@t}[$__rate_interval]))"},
            kind="stat", most=1, width=6,
        ),
        Panel(
            "How much would an infinite cache hit?",
            "percentunit",
            "Over the last ten minutes, all nodes together. Where it is close to the hit rate, more memory buys nothing. A chunk "
            "that two nodes missed counts as new at each, so the figure may be too low by these.",
            {"infinite": 'sum(larder_tenant_window_tokens{@t,window="10m",tokens="reusable"})'
             ' / sum(larder_tenant_window_tokens{@t,window="10m",tokens="asked"})'},
            kind="stat", most=1, width=6,
        ),
        Panel(
            "How many tokens are not computed again?",
            "suffix: tokens/s",
            "Prompt tokens hit in a second, over all tiers.",
            {"tokens/s": "sum(rate(larder_tokens_hit_total{@t}[$__rate_interval]))"},
            kind="stat", width=6,
        ),
        Panel(
            "How many engines would compute what is hit?",
            "none",
            "Seconds of prefill avoided in a second, at the speed that engines say they have; those that say none are not "
            "counted. Loading takes time too, and the first tokens of a prompt are cheaper than the last, so take it as an "
            "order of magnitude.",
            {"engines": "sum(rate(larder_recompute_avoided_seconds_total{@t}[$__rate_interval]))"},
            kind="stat", width=6,
        ),
        Panel(
            "How much sooner do first tokens come?",
            "s",
            "A mean over all lookups: seconds of prefill that hits save, at the speed that engines say they have, beside the time that "
            "lookups, leases and waits for prefetches take. The distance between both is the time to first token saved.",
            {
                "prefill saved": "sum(rate(larder_recompute_avoided_seconds_total{@t}[$__rate_interval]))"
                ' / sum(rate(larder_request_seconds_count{@n,request="lookup"}[$__rate_interval]))',
                "time of the cache": 'sum(rate(larder_request_seconds_sum{@n,request=~"lookup|lease|prefetch|progress|collect"}'
                '[$__rate_interval])) / sum(rate(larder_request_seconds_count{@n,request="lookup"}[$__rate_interval]))',
            },
        ),
        Panel(
            "How much money do hits save an hour?",
            "none",
            "The engines that would compute what is hit, times the price of one (the variable Price), in the currency of that price.",
            {"an hour": "sum(rate(larder_recompute_avoided_seconds_total{@t}[$__rate_interval])) * $price"},
            kind="stat", width=6,
        ),
        Panel(
            "How much money did hits save?",
            "none",
            "The same over the time that the dashboard shows.",
            {"saved": "sum(increase(larder_recompute_avoided_seconds_total{@t}[$__range])) / 3600 * $price"},
            kind="stat", width=6,
        ),
        Panel(
            "Where are tokens hit?",
            "suffix: tokens/s",
            "Prompt tokens a second: asked; found in the memory of the node itself (host); found in other nodes (peer).",
            {
                "asked": "sum(rate(larder_tokens_asked_total{@t}[$__rate_interval]))",
                "hit, {{tier}}": "sum by (tier) (rate(larder_tokens_hit_total{@t}[$__rate_interval]))",
            },
        ),
        Panel(
            "Would more memory help?",
            "percentunit",
            "The hit rate of the last ten minutes beside that of an infinite cache, of all chosen nodes together: both count hits "
            "in every node. The distance between both is what more memory, or another policy, could win.",
            {
                "this cache": 'sum(larder_tenant_window_tokens{@t,window="10m",tokens="hit"})'
                ' / sum(larder_tenant_window_tokens{@t,window="10m",tokens="asked"})',
                "an infinite cache": 'sum(larder_tenant_window_tokens{@t,window="10m",tokens="reusable"})'
                ' / sum(larder_tenant_window_tokens{@t,window="10m",tokens="asked"})',
            },
            most=1,
        ),
        Panel(
            "How much do engines read and write?",
            "Bps",
            "Bytes of blocks leased to engines, and committed by them.",
            {"{{movement}}": "sum by (movement) (rate(larder_moved_bytes_total{@n}[$__rate_interval]))"},
        ),
        Panel(
            "How many loads fail?",
            "short",
            "Chunks a second that a lease wanted from another node and that did not come: the engine computes them. And "
            "leases that were answered with busy or refused.",
            {
                "chunks missed": 'sum(rate(larder_fetched_chunks_total{@n,placement="missed"}[$__rate_interval]))',
                "leases {{outcome}}": "sum by (outcome) "
                '(rate(larder_requests_total{@n,request="lease",outcome!="done"}[$__rate_interval]))',
            },
            zero_is_fine=True,
        ),
    ],
)
