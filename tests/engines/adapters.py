"""Scenario: LoRA adapters; prompts with different adapters never share chunks."""

import subprocess
import sys

from answers import computed, loaded, same
from driver import HERE, Engine
from scenarios import row, until

OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def run(world) -> None:
    """The same prompt with an adapter, with another adapter and without one, on two nodes."""
    adapters = {}
    for number, name in enumerate(("red", "blue"), start=1):
        folder = world.scratch / f"adapter-{name}"
        subprocess.run([sys.executable, HERE / "model.py", folder, "adapter", str(number)], check=True)
        adapters[name] = {"adapter": [name, number, str(folder)]}
    cluster = world.cluster("adapters", 2)
    tokens, expected = world.fresh()
    with Engine(world.scratch, "adapters-alone", **OPTIONS) as alone:
        red, blue = (alone.ask(tokens, **adapter) for adapter in adapters.values())
        plain = alone.ask(tokens)
    assert red["tokens"] != blue["tokens"] and red["tokens"] != plain["tokens"], "the adapters change nothing"
    assert plain["tokens"] == expected["tokens"]
    with Engine(world.scratch, "adapters-first", {"socket": cluster.sockets[0]}, **OPTIONS) as first:
        same(first.ask(tokens, **adapters["red"]), red)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
        with Engine(world.scratch, "adapters-second", {"socket": cluster.sockets[1]}, **OPTIONS) as second:
            for adapter, right in (({}, plain), (adapters["blue"], blue)):
                answer = second.ask(tokens, **adapter)
                same(answer, right)
                assert (loaded(answer), computed(answer)) == (0, 200), f"{answer['counts']}"
            answer = second.ask(tokens, **adapters["red"])
            same(answer, red)
            assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
    row("the same prompt with LoRA adapters", "its own: 192 loaded over QUIC; another, or none: 0; identical")
    cluster.stop()
