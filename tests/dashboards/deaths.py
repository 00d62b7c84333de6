"""Kills processes of clusters; nobody starts them again. Measures which alerts fire, and how soon."""

import time

import live
from processes import Cluster

# The interval of operators, not the shortest that a test could use.
SCRAPE_SECONDS = 15
# The most that an alert about a dead process may take.
WITHIN_SECONDS = 120
# LarderMemberSuspect waits for a minute by itself: a dead node is suspect before it is removed.
SUSPECT_WITHIN_SECONDS = 180
# LarderCoordinatorGone waits for two minutes by itself: a coordinator that starts again is no trouble.
COORDINATOR_WITHIN_SECONDS = 180
# `larder health` asks every node.
HEALTH_SECONDS = 10
# Silence after which a node is suspect.
SUSPECT_SECONDS = 3


def alerts(larder, folder, rules):
    """Kills a node of one cluster and the coordinator of another; yields the alerts, and the seconds after which they fired."""
    with Cluster(larder, folder / "one") as one, Cluster(larder, folder / "two") as two:
        clusters = {"one": one, "two": two}
        wait("both clusters are whole", lambda: all(of.health() == ("healthy", 0) for of in clusters.values()))
        with live.Prometheus(clusters, folder, rules, f"{SCRAPE_SECONDS}s") as prometheus:
            assert not firing(prometheus), firing(prometheus)
            died = time.monotonic()
            one.kill("a")
            two.kill("main")
            wait("the first is degraded", lambda: one.health() == ("degraded", 1), HEALTH_SECONDS)
            wait("the second is down", lambda: two.health() == ("down", 1), HEALTH_SECONDS)
            for _ in range(3):
                one.stop_for("b", SUSPECT_SECONDS + 1)
                time.sleep(SUSPECT_SECONDS)
            for alert, cluster, within in [
                ("LarderMemberLost", "one", WITHIN_SECONDS),
                ("LarderTargetUnreachable", "one", WITHIN_SECONDS),
                ("LarderTargetUnreachable", "two", WITHIN_SECONDS),
                ("LarderMemberSuspect", "one", SUSPECT_WITHIN_SECONDS),
                ("LarderCoordinatorGone", "two", COORDINATOR_WITHIN_SECONDS),
            ]:
                fires = lambda: (alert, cluster) in firing(prometheus)
                wait(f"{alert} fires", fires, died + within - time.monotonic())
                yield alert, cluster, time.monotonic() - died


def firing(prometheus):
    found = prometheus.api("alerts")["alerts"]
    return {(one["labels"]["alertname"], one["labels"].get("cluster")) for one in found if one["state"] == "firing"}


def wait(what, holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
