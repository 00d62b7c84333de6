"""Scenario: KV caches on a GPU, here a CUDA driver over host memory."""

import subprocess

from answers import computed, counted, loaded, prompt, same
from driver import HERE, Engine
from hybrid import WINDOW_BLOCKS, make_model
from prefill_decode import ask
from scenarios import row, until


def run(world) -> None:
    """Engines with KV on GPUs save chunks that other engines load, wherever their KV is; hand-over layer by layer; several
    pools; stages."""
    library = world.scratch / "libcuda.so"
    source = HERE.parents[1] / "client/device/fake/libcuda.c"
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}"]
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    gpu = {"fake_gpu": str(library)}
    cluster = world.cluster("gpus", 2)
    tokens, expected = world.fresh()
    backwards, backwards_expected = world.fresh()
    with Engine(world.scratch, "gpu-first", {"socket": cluster.sockets[0]}, **gpu) as first:
        same(first.ask(tokens), expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
        with Engine(world.scratch, "host-second", {"socket": cluster.sockets[1]}) as second:
            assert_loaded(second.ask(tokens), expected)
            same(second.ask(backwards), backwards_expected)
            until(lambda: cluster.metric(1, "larder_cached_chunks", tier="host") >= 12, "chunks are saved")
        assert_loaded(first.ask(backwards), backwards_expected)
    row("GPU to host and back, two nodes", "192 of 200 loaded over QUIC, 8 computed, identical, both ways")
    for load in ("sync", "async"):
        prefill_and_decode(world, cluster, gpu, load)
    altered(world, cluster, gpu)
    cluster.stop()
    windows(world, gpu, "windows", groups=1)
    windows(world, gpu, "gemma", groups=3)
    uneven_stages(world, gpu)


def assert_loaded(answer: dict, expected: dict) -> None:
    same(answer, expected)
    assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
    assert counted(answer, "failed_blocks") == 0, f"{answer['counts']}"


def prefill_and_decode(world, cluster, gpu: dict, load: str) -> None:
    tokens, expected = world.fresh()
    decoder = {"socket": cluster.sockets[1], "load": load, "handoff_seconds": 60}
    prefiller = {"socket": cluster.sockets[0]}
    with (
        Engine(world.scratch, f"gpu-reads-{load}", decoder, role="kv_consumer", **gpu) as decode,
        Engine(world.scratch, f"gpu-writes-{load}", prefiller, role="kv_producer", **gpu) as prefill,
    ):
        decoding = ask(decode, tokens, kv_transfer_params={"do_remote_prefill": True, "remote_node": "node-0"})
        prefilling = ask(prefill, tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        answer = decoding.get()
        prefilling.get()
        assert_loaded(answer, expected)
        assert counted(answer, "followed_chunks") == 6, f"{answer['counts']}"
    row(f"prefill on one GPU, decode on another, {load} load", "6 chunks followed layer by layer, identical")


def altered(world, cluster, gpu: dict) -> None:
    """The output depends on the bytes that come to the GPU, and bytes from another node are verified before."""
    tokens, expected = prompt(1), world.reference[1]
    with Engine(world.scratch, "gpu-saver", {"socket": cluster.sockets[0]}, **gpu) as saver:
        same(saver.ask(tokens), expected)
        until(lambda: saved(saver) >= 6, "chunks are saved")
    cluster.flip_a_bit_in_every_page(0)
    with Engine(world.scratch, "gpu-near", {"socket": cluster.sockets[0]}, **gpu) as near:
        answer = near.ask(tokens)
        assert loaded(answer) == 192 and answer["logprobs"] != expected["logprobs"], "what is loaded is not read"
    with Engine(world.scratch, "gpu-far", {"socket": cluster.sockets[1]}, **gpu) as far:
        answer = far.ask(tokens)
        same(answer, expected)
        assert loaded(answer) == 0, f"{answer['counts']}"
    row("altered bytes before a GPU", "a miss from another node, identical; control: its own node's are loaded, and differ")


def saved(engine: Engine) -> int:
    """Saved chunks: the engine reports its counts with its steps."""
    return int(engine.ask(prompt(99))["totals"].get("larder_saved_chunks", 0))


def windows(world, gpu: dict, kind: str, groups: int) -> None:
    """Full attention and sliding windows, one pool for each. vLLM lays groups over each other, and the groups of windows share a
    pool."""
    cluster, model = world.cluster(f"gpu-{kind}", 2), make_model(world, kind)
    tokens = prompt(1)
    with Engine(world.scratch, f"gpu-{kind}-reference", **model) as alone:
        expected = alone.ask(tokens)
    with Engine(world.scratch, f"gpu-{kind}-first", {"socket": cluster.sockets[0]}, **gpu, **model) as first:
        same(first.ask(tokens), expected)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
        with Engine(world.scratch, f"gpu-{kind}-second", {"socket": cluster.sockets[1]}, **gpu, **model) as second:
            answer, blocks = second.ask(tokens), 6 + groups * WINDOW_BLOCKS
            assert_loaded(answer, expected)
            assert counted(answer, "loaded_blocks") == blocks, f"{answer['counts']}"
    row(f"sliding windows on a GPU, groups of windows: {groups}", f"192 loaded over QUIC, {blocks} blocks, identical")
    cluster.stop()


def uneven_stages(world, gpu: dict) -> None:
    """The stage with fewer layers repeats its last layer."""
    cluster, tokens = world.cluster("gpu-stages", 2), prompt(80)
    stages = {"pipeline_parallel_size": 2, "environment": {"VLLM_PP_LAYER_PARTITION": "3,1"}} | gpu
    with Engine(world.scratch, "gpu-stages-saves", {"socket": cluster.sockets[0]}, **stages) as saves:
        saves.ask(tokens)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
        # The engine's own cache ends where a load would end.
        expected = saves.ask(tokens)
    with Engine(world.scratch, "gpu-stages-loads", {"socket": cluster.sockets[1]}, **stages) as loads:
        assert_loaded(loads.ask(tokens), expected)
    row("pipeline parallelism of 2, 3,1 layers, on GPUs", "192 loaded over QUIC by both stages, 8 computed, identical")
    cluster.stop()
