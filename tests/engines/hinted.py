"""Requests with hints to real vLLM: pins of a session, and a wrong hint that does no harm."""

from answers import counted, prompt, same
from driver import Engine
from scenarios import until


def run(world, row) -> None:
    cluster = world.cluster("hinted", 1)
    tokens, expected = world.fresh()
    with Engine(world.scratch, "hinted", {"socket": cluster.sockets[0]}) as engine:

        def pins() -> float:
            return cluster.metric(0, "larder_held", what="pins")

        hints = {"session": "alice", "retain_seconds": 60, "priority": 3, "return_seconds": 3_600}
        same(engine.ask(tokens, kv_transfer_params={"larder_hints": hints}), expected)
        until(lambda: pins() == 1, "the first turn is pinned")
        longer = tokens + prompt(50)[:100]
        engine.ask(longer, kv_transfer_params={"larder_hints": hints | {"ttl": 5}})
        answer = until(lambda: ended(engine, 6 + 9), "all chunks of both turns are pinned")
        assert pins() == 1, "a session has the pin of its last turn"
        assert answer["totals"]["larder_wrong_hints"] == 1 and answer["totals"]["larder_dropped_hints"] == 0, f"{answer['totals']}"
        again = engine.ask(tokens, forget=True)
        same(again, expected)
        assert counted(again, "loads") == 1, f"{again['counts']}"
        row("hints: two turns of a session", "15 chunks pinned by one pin after the other, a wrong hint counted, identical")
    cluster.stop()


def ended(engine: Engine, pinned: int) -> dict | None:
    """The answer that shows the pinned chunks: the engine learns of counters with its steps."""
    answer = engine.ask(prompt(99), max_tokens=1)
    return answer if answer["totals"].get("larder_pinned_chunks", 0) >= pinned else None
