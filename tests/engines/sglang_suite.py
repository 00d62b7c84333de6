"""Scenarios with SGLang's own caches: restored pages have exactly the bytes that were saved, or are a miss.

sglang_suite.py [NAME...]     all scenarios, or the named ones
"""

import sys
from pathlib import Path

import sglang_prefill_decode
import sglang_ranks
import sglang_whole
from driver import Cluster
from scenarios import Scenarios, row, until
from sglang_driver import PAGE, SGLang, prompt, until_restored

scenario = Scenarios()
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LATENT_LAYOUTS = LAYOUTS[:3]


@scenario
def every_layout(scratch: Path) -> None:
    """From the device over the host to Larder; then, in a fresh cache, from Larder over the host to the device. Layouts never
    share pages."""
    cluster = Cluster(scratch / "layouts", 1)
    with SGLang(scratch, "layouts") as engine:
        for number, layout in enumerate(LAYOUTS):
            round_trip(engine, cluster.sockets[0], layout)
            told = engine.send({"do": "stats", "cache": "fresh"})
            assert (told["prefetched"], told["loaded"]) == ([6], 6 * (number + 1)), f"{told}"
            engine.close("fresh")
        # Latent attention has no keys and values, but one row for each layer and token.
        for layout in LATENT_LAYOUTS:
            round_trip(engine, cluster.sockets[0], layout, kind="latent")
            engine.close("fresh")
        for what, options in {
            "dtype": {"dtype": "float16"},
            "model_revision": {"storage": {"model_revision": "2"}},
        }.items():
            engine.open("other", cluster.sockets[0], "page_first_direct", **options)
            assert engine.ask("restore", "other", prompt(1))["restored"] == 0, f"another {what} hit"
            engine.close("other")
            row(f"another {what}", "a miss")
        refused = engine.try_open("lost", cluster.sockets[0], storage={"colour": "red"})
        assert refused and "colour" in refused, refused
        row("a setting that it does not know", "refused to start")
        refused = engine.try_open("lost", cluster.sockets[0], without_addresses=True)
        assert refused and "--hicache-mem-layout" in refused, refused
        row("a host pool that gives no addresses", "refused to start")
    cluster.stop()


def round_trip(engine: SGLang, socket: str, layout: str, **options) -> None:
    """Saves a prompt, and restores it into a fresh cache, which stays open."""
    tokens = prompt(1)
    engine.open("first", socket, layout, **options)
    saved = engine.ask("put", "first", tokens)
    assert saved["counts"]["saved_keys"] == 6, f"{saved['counts']}"
    again = engine.ask("save", "first", tokens)
    assert again["counts"]["saved_keys"] == 6 and again["counts"]["shed_keys"] == 0, f"{again['counts']}"
    engine.close("first")
    engine.open("fresh", socket, layout, **options)
    come = engine.ask("restore", "fresh", tokens)
    assert come["restored"] == len(tokens), f"{layout}: {come}"
    assert come["digest"] == saved["digest"], f"{layout}: other bytes"
    row(" ".join([layout, *options.values()]), f"{len(tokens)} tokens restored, bytes identical; saved again, nothing was written")


@scenario
def hybrid_models(scratch: Path) -> None:
    """A prefix can be restored only where its recurrent state was saved, or where the window at its end was saved; SGLang saves
    the window with every page."""
    cluster = Cluster(scratch / "hybrid", 1)
    long = prompt(2, 7)
    expected = {"state": {2: 0, 3: 3, 5: 3, 6: 3, 7: 7}, "window": {2: 2, 3: 3, 5: 5, 6: 6, 7: 7}}
    with SGLang(scratch, "hybrid") as engine:
        for kind, of_kind in expected.items():
            engine.open("first", cluster.sockets[0], kind=kind)
            engine.ask("put", "first", long[: 3 * PAGE])
            engine.ask("put", "first", long)
            ends = set(of_kind.values()) - {0}
            saved = {pages: engine.ask("digest", "first", long[: pages * PAGE])["digest"] for pages in ends}
            engine.close("first")
            for pages, come in of_kind.items():
                engine.open("fresh", cluster.sockets[0], kind=kind)
                # Another text follows the common pages.
                answer = engine.ask("restore", "fresh", long[: pages * PAGE] + prompt(900 + pages, 1))
                assert answer["restored"] == come * PAGE, f"{kind}, {pages} pages in common: {answer}"
                assert answer["digest"] == saved.get(come), f"{kind}, {pages} pages in common: other bytes"
                engine.close("fresh")
            row(
                {"state": "recurrent state", "window": "sliding window"}[kind],
                f"saved after 3 and 7 pages; {told(of_kind)}",
            )
    cluster.stop()


def told(restored: dict[int, int]) -> str:
    return ", ".join(f"{pages} in common: {come} restored" for pages, come in restored.items())


@scenario
def salts(scratch: Path) -> None:
    """Prompts under a salt are found only under that salt."""
    cluster = Cluster(scratch / "salts", 1)
    tokens = prompt(3)
    with SGLang(scratch, "salts") as engine:
        engine.open("first", cluster.sockets[0])
        saved = engine.ask("put", "first", tokens, "alice")
        engine.open("fresh", cluster.sockets[0])
        found = {salt: engine.ask("restore", "fresh", tokens, salt)["restored"] for salt in (None, "bob", "alice")}
        assert found == {None: 0, "bob": 0, "alice": len(tokens)}, f"{found}"
        assert engine.ask("save", "fresh", tokens, "alice")["digest"] == saved["digest"]
        row("saved with a salt", "without one and with another: 0 restored; with its own: all, identical")
    cluster.stop()


@scenario
def priorities(scratch: Path) -> None:
    """The pages of a request with a priority outlive later pages without, if the nodes' policy is `priority`."""
    cluster = Cluster(scratch / "priorities", 1, options=["--policy", "priority", "--chunks-per-node", "14"])
    with SGLang(scratch, "priorities") as engine:
        restored = {}
        for seed, priority in ((20, 7), (30, 0)):
            engine.open("first", cluster.sockets[0])
            engine.ask("put", "first", prompt(seed), priority=priority)
            for later in range(1, 4):
                engine.ask("put", "first", prompt(seed + later))
            engine.close("first")
            engine.open("fresh", cluster.sockets[0])
            restored[priority] = engine.ask("restore", "fresh", prompt(seed))["restored"]
            engine.close("fresh")
        assert restored == {7: len(prompt(20)), 0: 0}, f"{restored}"
        row("a request with priority 7, three without behind it", "restored whole; without a priority nothing is left")
    cluster.stop()


@scenario
def two_nodes(scratch: Path) -> None:
    """An engine on another node gets the pages that the first engine saved, over QUIC; altered bytes are a miss."""
    cluster = Cluster(scratch / "two", 2)
    tokens, altered = prompt(4), prompt(5)
    with SGLang(scratch, "first") as first, SGLang(scratch, "second") as second:
        first.open("cache", cluster.sockets[0])
        second.open("cache", cluster.sockets[1])
        saved = first.ask("put", "cache", tokens)
        first.ask("put", "cache", altered)
        came = cluster.metric(1, "larder_peer_received_bytes_total")
        come = until_restored(second, "cache", tokens)
        assert come["restored"] == len(tokens) and come["digest"] == saved["digest"], f"{come}"
        came = cluster.metric(1, "larder_peer_received_bytes_total") - came
        assert came >= come["counts"]["loaded_bytes"] > 0, "the bytes did not come from the other node"
        row("restored on another node", f"{len(tokens)} tokens, {came:.0f} bytes over QUIC, identical")
        cluster.flip_a_bit_in_every_page(0)
        second.open("again", cluster.sockets[1])
        come = second.ask("restore", "again", altered)
        noticed = cluster.metric(1, "larder_peer_fetches_total", outcome="checksum")
        assert come["restored"] == 0 and come["counts"]["missed_keys"] > 0 and noticed > 0, f"{come}, {noticed}"
        row("stored bytes altered behind its back", f"a miss, {come['counts']['missed_keys']} pages counted")
    cluster.stop()


@scenario
def failures(scratch: Path) -> None:
    """A node that is absent, killed, and back again: the engine goes on, and missing pages are counted."""
    folder = scratch / "failing"
    tokens, later = prompt(6), prompt(7)
    with SGLang(scratch, "failing") as engine:
        engine.open("early", str(folder / "node-0.sock"))
        assert engine.ask("restore", "early", tokens)["counts"]["without_node"] == 1
        alone = engine.ask("put", "early", tokens)
        assert alone["counts"]["shed_keys"] == 6, f"{alone['counts']}"
        row("node absent at the start", f"a miss, {alone['counts']['shed_keys']} pages counted that were not saved")
        folder.mkdir()
        cluster = Cluster(folder, 1)
        until(lambda: engine.ask("save", "early", tokens)["counts"]["saved_keys"] == 6, "the node is used")
        row("the node comes later", "used without a restart of the engine")
        engine.open("fresh", cluster.sockets[0])
        victim = cluster.pid(0)
        come = engine.ask("restore", "fresh", tokens, kill_before_load=victim)
        counts = come["counts"]
        assert come["restored"] == 0 and counts["found_keys"] == counts["missed_keys"] == 6, f"{counts}"
        # The session's end may be noticed before the load asks the node.
        assert counts["failures"] + counts["without_node"] == 1, f"{counts}"
        row("node killed between lookup and load", f"a miss, {counts['missed_keys']} pages counted")
        # The node is started again, with nothing in memory.
        until(lambda: engine.ask("save", "early", tokens)["counts"]["saved_keys"] == 12, "the node is used again")
        come = until_restored(engine, "fresh", tokens)
        assert come["digest"] == alone["digest"], "other bytes"
        engine.ask("put", "early", later)
        row("the node comes back", f"{come['restored']} tokens restored, identical")
    cluster.stop()


scenario(sglang_ranks.tensor_parallel)
scenario(sglang_prefill_decode.prefill_decode)
scenario(sglang_whole.whole_engines)


if __name__ == "__main__":
    scenario.run(sys.argv[1:], Path)
