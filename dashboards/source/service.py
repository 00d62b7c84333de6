"""Objectives, and whether they are reached."""

from grafana import Dashboard, Panel

DASHBOARD = Dashboard(
    uid="service",
    title="service levels",
    description="The objectives of a cluster: lookups in time, loads that come, requests that are served.",
    panels=[
        Panel(
            "Are lookups answered in time?",
            "percentunit",
            "Share of lookups answered within 10 ms, over an hour. Objective: 99 %.",
            {"in time": "1 - avg(larder:lookups_late:ratio_rate1h{@c})"},
            kind="stat", most=1, width=6,
            below=0.99,
        ),
        Panel(
            "Do loads come?",
            "percentunit",
            "Of the chunks wanted from other nodes, the share that came, over an hour. Objective: 99 %.",
            {"came": "1 - avg(larder:loads_failed:ratio_rate1h{@c})"},
            kind="stat", most=1, width=6,
            below=0.99,
        ),
        Panel(
            "Are requests served?",
            "percentunit",
            "Share of requests that were neither busy nor refused, over five minutes.",
            {"served": "1 - avg(larder:requests_not_served:ratio_rate5m{@c})"},
            kind="stat", most=1, width=6,
            alert="LarderRequestsNotServed", below=0.99,
        ),
        Panel(
            "Were wrong bytes found?",
            "short",
            "Chunks with wrong bytes in the last day: from other nodes, by their checksum; and in memory, if a "
            "reader and then the node found them wrong. No engine got them. Expected: none.",
            {
                "wrong": 'sum(increase(larder_peer_fetches_total{@c,outcome="checksum"}[1d]))'
                ' + sum(increase(larder_damage_reports_total{@c,found="damaged"}[1d]))'
            },
            kind="stat", width=6, zero_is_fine=True,
            alert="LarderWrongBytes", above=1,
        ),
        Panel(
            "How fast is the budget for late lookups spent?",
            "none",
            "1: the budget lasts exactly until the end of the month. An alert comes at 14.4 over an hour, and at 6 "
            "over six hours.",
            {
                "5 minutes": "avg(larder:lookups_late:ratio_rate5m{@c}) / 0.01",
                "1 hour": "avg(larder:lookups_late:ratio_rate1h{@c}) / 0.01",
                "6 hours": "avg(larder:lookups_late:ratio_rate6h{@c}) / 0.01",
            },
            zero_is_fine=True,
        ),
        Panel(
            "How fast is the budget for failed loads spent?",
            "none",
            "1: the budget lasts exactly until the end of the month. An alert comes at 14.4 over an hour, and at 6 "
            "over six hours.",
            {
                "5 minutes": "avg(larder:loads_failed:ratio_rate5m{@c}) / 0.01",
                "1 hour": "avg(larder:loads_failed:ratio_rate1h{@c}) / 0.01",
                "6 hours": "avg(larder:loads_failed:ratio_rate6h{@c}) / 0.01",
            },
            zero_is_fine=True,
        ),
        Panel(
            "How long does a lookup take?",
            "s",
            "Median, 90th and 99th percentile; questions to other homes are included.",
            {
                f"{int(q * 100)} %": f"histogram_quantile({q}, sum by (le) "
                '(rate(larder_request_seconds_bucket{@n,request="lookup"}[$__rate_interval])))'
                for q in [0.5, 0.9, 0.99]
            },
        ),
        Panel(
            "How long does a lease take?",
            "s",
            "Median, 90th and 99th percentile; fetches from other nodes are included.",
            {
                f"{int(q * 100)} %": f"histogram_quantile({q}, sum by (le) "
                '(rate(larder_request_seconds_bucket{@n,request="lease"}[$__rate_interval])))'
                for q in [0.5, 0.9, 0.99]
            },
        ),
        Panel(
            "Which requests are not served?",
            "reqps",
            "Requests a second that were answered with busy or refused.",
            {"{{request}}, {{outcome}}": "sum by (request, outcome) "
             '(rate(larder_requests_total{@n,outcome!="done"}[$__rate_interval]))'},
            zero_is_fine=True,
        ),
        Panel(
            "How good are the hit rate and the directory?",
            "percentunit",
            "The figures of the recording rules, over five minutes.",
            {
                "tokens hit": "larder:token_hit:ratio_rate5m{@c}",
                "hints right": "larder:hints_right:ratio_rate5m{@c}",
            },
            most=1,
        ),
    ],
)
