"""What the cache is worth."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="value",
    title="cluster value",
    description="The savings of the cache: tokens that engines need and that were computed before.",
    panels=[
        Panel(
            "How much of what engines ask is hit?",
            "percentunit",
            "Of the prompt tokens asked, the share that was found, over all tiers. Lookups whose caller could not "
            "use a hit do not count.",
            {"hit rate": "sum(rate(larder_tokens_hit_total{@t}[$__rate_interval]))"
             " / sum(rate(larder_tokens_asked_total{@t}[$__rate_interval]))"},
            kind="stat", most=1, width=6,
        ),
        Panel(
            "How much would an infinite cache hit?",
            "percentunit",
            "Over the last ten minutes, all nodes together. If this rate is close to the hit rate, more memory buys "
            "nothing. A chunk that two nodes missed counts as new at both, so the rate may be somewhat too low.",
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
            "Seconds of prefill avoided in a second, by the speeds that engines report; engines without a reported "
            "speed do not count. Loading takes time too, and the first tokens of a prompt are cheaper than the last, "
            "so the figure is an order of magnitude.",
            {"engines": "sum(rate(larder_recompute_avoided_seconds_total{@t}[$__rate_interval]))"},
            kind="stat", width=6,
        ),
        Panel(
            "How much sooner do first tokens come?",
            "s",
            "Means over all lookups of all tenants, whichever are chosen, since nodes time requests without their tenant: "
            "seconds of prefill that hits save, by the speeds that engines report, beside the time that lookups, leases "
            "and waits for prefetches take. The distance between both is the saved time to the first token.",
            {
                "prefill saved": "sum(rate(larder_recompute_avoided_seconds_total{@n}[$__rate_interval]))"
                ' / sum(rate(larder_request_seconds_count{@n,request="lookup"}[$__rate_interval]))',
                "time of the cache": 'sum(rate(larder_request_seconds_sum{@n,request=~"lookup|lease|prefetch|progress|collect"}'
                '[$__rate_interval])) / sum(rate(larder_request_seconds_count{@n,request="lookup"}[$__rate_interval]))',
            },
        ),
        Panel(
            "How much money do hits save an hour?",
            "none",
            "The engines that would compute the hits, times the price of one engine (the variable Price), in its "
            "currency.",
            {"an hour": "sum(rate(larder_recompute_avoided_seconds_total{@t}[$__rate_interval])) * $price"},
            kind="stat", width=6,
        ),
        Panel(
            "How much money did hits save?",
            "none",
            "The money that hits saved over the time that the dashboard shows.",
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
            "The hit rate of the last ten minutes beside the rate of an infinite cache, of all chosen nodes "
            "together: both count hits in every node. The distance between both is the possible gain by more memory, "
            "or by another policy.",
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
            "Chunks a second that a lease wanted from another node and that did not come: the engine computes them. "
            "Also leases a second that were answered with busy or refused.",
            {
                "chunks missed": 'sum(rate(larder_fetched_chunks_total{@n,placement="missed"}[$__rate_interval]))',
                "leases {{outcome}}": "sum by (outcome) "
                '(rate(larder_requests_total{@n,request="lease",outcome!="done"}[$__rate_interval]))',
            },
            zero_is_fine=True,
        ),
    ],
)
