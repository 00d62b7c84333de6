"""Scenario: the tier below vLLM's own offloading, made and driven by vLLM's own classes over memory of the test's.

vLLM's offloading worker needs a GPU, so nothing copies between it and the host here.
"""

from types import SimpleNamespace

import numpy

ROWS, ROW_BYTES = 6, 65_536


def run(world, row, until) -> None:
    """The scenario."""
    cluster = world.cluster("tier", 2)
    memories = [bytearray(b"".join(bytes([10 * node + one]) * ROW_BYTES for one in range(ROWS))) for node in range(2)]
    tiers = [make(cluster.sockets[node], memories[node]) for node in range(2)]
    keys = keys_of(4)
    job(tiers[0], "submit_store", 1, keys, [0, 1, 2, 3])
    results = until(lambda: finished(tiers[0]), "the chunks are stored")
    assert [(one.job_id, one.success, one.transfer_bytes) for one in results] == [(1, True, 4 * ROW_BYTES)]
    until(lambda: looked_up(tiers[1], keys_of(5)) == ["HIT"] * 4 + ["MISS"], "the other node finds them")
    job(tiers[1], "submit_load", 2, keys_of(5)[3:], [4, 5], is_promotion=True)
    (result,) = until(lambda: finished(tiers[1]), "what there is was loaded")
    assert not result.success and list(result.successful_keys) == keys[3:]
    assert memories[1][4 * ROW_BYTES :] == bytes([3]) * ROW_BYTES + bytes([15]) * ROW_BYTES
    for tier in tiers:
        tier.drain_jobs()
        tier.shutdown()
    row("a tier of vLLM's own offloading", "4 chunks stored on one node, found and loaded on the other, by vLLM's classes")
    cluster.stop()


def make(socket: str, memory: bytearray):
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    config = {"type": "LarderTier", "module_path": "larder_kv.vllm", "socket": socket}
    rows = memoryview(memory).cast("B", (ROWS, ROW_BYTES))
    return SecondaryTierFactory.create_secondary_tier(config, rows, offloading_spec())


def offloading_spec():
    """What the tier reads of an OffloadingSpec."""
    group = SimpleNamespace(tokens_per_block=32, layer_names=["layer.0"])
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False)
    config = SimpleNamespace(
        groups=[group],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
        model=SimpleNamespace(name="tiny", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=32),
    )
    return SimpleNamespace(config=config, vllm_config=None)


def keys_of(count: int) -> list[bytes]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(bytes([one + 1]) * 32, 0) for one in range(count)]


def job(tier, what: str, number: int, keys: list[bytes], rows: list[int], is_promotion: bool = False) -> None:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    getattr(tier, what)(TransferJob(number, keys, numpy.array(rows), is_promotion, ReqContext("job")))


def finished(tier) -> list:
    return list(tier.get_finished_jobs())


def looked_up(tier, keys: list[bytes]) -> list[str]:
    """What the tier says of keys, asked as vLLM does: step by step."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    context = ReqContext("request")
    tier.on_new_request(context)
    while True:
        found = [tier.lookup(key, context) for key in keys]
        if LookupResult.RETRY not in found:
            tier.on_request_finished(context)
            return [one.name for one in found]
        tier.on_schedule_end(None)
