"""Whose cache it is."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="tenants",
    title="tenants",
    description="Each tenant's questions, hits and memory.",
    panels=[
        Panel(
            "Who asks how much?",
            "suffix: tokens/s",
            "Prompt tokens a second, by tenant.",
            {"{{tenant}}": "sum by (tenant) (rate(larder_tokens_asked_total{@t}[$__rate_interval]))"},
        ),
        Panel(
            "Who hits how much?",
            "percentunit",
            "Of the prompt tokens asked, the share that was found, by tenant.",
            {"{{tenant}}": "sum by (tenant) (rate(larder_tokens_hit_total{@t}[$__rate_interval]))"
             " / sum by (tenant) (rate(larder_tokens_asked_total{@t}[$__rate_interval]))"},
            most=1,
        ),
        Panel(
            "Who would gain by more memory?",
            "percentunit",
            "Further hits that an infinite cache would have in the last hour, by tenant, over all chosen nodes.",
            {"{{tenant}}": '(sum by (tenant) (larder_tenant_window_tokens{@t,window="1h",tokens="reusable"})'
             ' - sum by (tenant) (larder_tenant_window_tokens{@t,window="1h",tokens="hit"}))'
             ' / sum by (tenant) (larder_tenant_window_tokens{@t,window="1h",tokens="asked"})'},
        ),
        Panel(
            "Who holds how much of the arenas?",
            "bytes",
            "Bytes of extents, with or without blocks: an extent serves one tenant at a time.",
            {"{{tenant}}": 'sum by (tenant) (larder_tenant_arena_bytes{@t,state="held"})'},
            stacked=True,
        ),
        Panel(
            "Who is near to its limit?",
            "percentunit",
            "Bytes of extents as a share of the tenant's limit (max_bytes, or the arena).",
            {"{{tenant}}": 'sum by (tenant) (larder_tenant_arena_bytes{@t,state="held"})'
             ' / sum by (tenant) (larder_tenant_arena_bytes{@t,state="limit"})'},
            most=1,
        ),
        Panel(
            "Whose write windows are near their limit?",
            "percentunit",
            "Bytes of write windows as a share of the tenant's limit (max_window_bytes). At the limit, no session "
            "opens.",
            {"{{node}}, {{tenant}}": 'sum by (node, tenant) (larder_tenant_window_bytes{@t,state="held"})'
             ' / sum by (node, tenant) (larder_tenant_window_bytes{@t,state="limit"})'},
            most=1, zero_is_fine=True,
            alert="LarderWindowsFull", above=0.9,
        ),
        Panel(
            "Which namespaces hit how much?",
            "percentunit",
            "Hit rates of the last ten minutes, by namespace (its first eight digits): a model, its chunk size, and "
            "all other facts that make bytes interchangeable.",
            {"{{tenant}} {{short}}": "sum by (tenant, short) (label_replace("
             'rate(larder_tokens_hit_total{@t}[10m]), "short", "$1", "namespace", "(.{8}).*"))'
             " / sum by (tenant, short) (label_replace("
             'rate(larder_tokens_asked_total{@t}[10m]), "short", "$1", "namespace", "(.{8}).*"))'},
            most=1,
        ),
        Panel(
            "Whose engines are preempted?",
            "short",
            "Prompt tokens a second in lookups of requests that were preempted before. Such lookups always hit: "
            "subtract them from a hit rate that should describe users.",
            {"{{tenant}}": 'sum by (tenant) (rate(larder_tokens_asked_total{@t,preempted="true"}[$__rate_interval]))'},
            zero_is_fine=True,
        ),
        Panel(
            "Whose sessions end badly?",
            "short",
            "Sessions in the last ten minutes that were refused, broke the protocol, or had a failed socket.",
            {"{{tenant}}, {{how}}": "sum by (tenant, how) "
             '(increase(larder_session_ends_total{@t,how=~"protocol_error|socket_error|refused"}[10m]))'},
            zero_is_fine=True,
        ),
    ],
)
