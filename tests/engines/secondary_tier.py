"""Scenario: the tier below vLLM's own offloading, made and driven by vLLM's own classes: its configuration, its planning of
caches, its offloading specification with the host memory that workers share, and its manager of tiers.

vLLM's offloading worker needs a GPU, so the test writes and reads the host's memory in its place.
"""

from types import SimpleNamespace

import numpy
from own_classes import Planned
from parallel import attention, drafted, indexed, latent_model, staged
from scenarios import until

ROWS, ROW_BYTES = 6, 65_536


def run(world, row) -> None:
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
    offloaded(world, row, cluster)
    localities(world, row, cluster)
    cluster.stop()


def offloaded(world, row, cluster) -> None:
    """Engines with context parallelism, a latent cache with an indexer, MTP and several pipeline stages offload on one node;
    equal engines find it on the other node, and an engine that differs finds nothing."""
    model, folder = world.scratch / "model", world.scratch / "tier-latent"
    latent_model(model, folder)
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    spread = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    cases = (
        ("one rank", model, attention, {}),
        ("pipeline 2, tensor 2", model, staged(attention, 2, 2), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("decode context 4, an indexer", folder, indexed, spread),
        ("decode context 4, an indexer, MTP", folder, drafted, spread | {"speculative_config": drafts}),
    )
    keys = keys_of(5)
    for name, path, specs, options in cases:
        with Offloading(path, cluster.sockets[0], specs, **options) as first:
            first.store(keys[:4])
        with Offloading(path, cluster.sockets[1], specs, **options) as second:
            assert second.load(keys) == [True] * 4 + [False], name
    row("what vLLM's offloading has, the tier has", f"{'; '.join(name for name, *_ in cases)}: stored, found and read on the other node")
    with Offloading(model, cluster.sockets[1], attention, tensor_parallel_size=2) as other:
        assert other.load(keys) == [False] * 5, "an engine of other ranks found them"


def localities(world, row, cluster) -> None:
    """A local tier finds the chunks of its own host; a remote tier finds those of others, too. Requests choose between them by
    vLLM's own fields."""
    from vllm.v1.kv_offload.base import Locality, Medium, TierFilter, TierMatcher

    model, keys = world.scratch / "model", [bytes([100 + one]) * 36 for one in range(2)]
    published = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with Offloading(model, cluster.sockets[0], attention, tier={"locality": "REMOTE"}, **published) as first:
        first.store(keys)
        told = [one for one in first.manager.take_events() if one.ownership == "larder"]
        assert [(list(one.keys), one.medium, one.locality, one.removed) for one in told] == [
            (keys, Medium.STORAGE, Locality.REMOTE, False)
        ], f"{told}"
        near = TierFilter((TierMatcher(Medium.STORAGE, Locality.LOCAL),))
        with Offloading(model, cluster.sockets[1], attention, tier={"locality": "LOCAL"}) as elsewhere:
            assert elsewhere.load(keys) == [False] * 2, "a local tier found another host's"
        with Offloading(model, cluster.sockets[0], attention, tier={"locality": "LOCAL"}) as here:
            assert here.load(keys, near) == [True] * 2
        with Offloading(model, cluster.sockets[1], attention, tier={"locality": "REMOTE"}) as remote:
            assert remote.load(keys, near) == [False] * 2, "the request allows local tiers alone"
            assert remote.load(keys) == [True] * 2
    try:
        Offloading(model, cluster.sockets[0], attention, tier={"locality": "nearby"})
    except ValueError as error:
        assert '`locality` is \'nearby\': it must be "LOCAL" or "REMOTE"' in str(error), f"{error}"
    else:
        raise AssertionError("an unknown locality was taken")
    row("the tier's locality", "local: its own host's chunks alone; remote: all; any other word is refused")


class Offloading:
    """vLLM's offloading of one engine, with its tiers."""

    def __init__(self, model, socket: str, specs, tier: dict | None = None, block: int = 32, **options):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        entry = {"type": "LarderTier", "module_path": "larder_kv.vllm", "socket": socket} | (tier or {})
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 8 << 20,
                "secondary_tiers": [entry],
            },
        }
        planned = Planned(str(model), specs, transfer, block, **options)
        self.spec = TieringOffloadingSpec(build_offloading_config(planned.config, planned.plan))
        self.manager = self.spec.get_manager()
        rows = self.manager.primary_tier.get_kv_memoryview()
        self.row_bytes, self.rows = rows.strides[0], rows.cast("B")
        self.requests = 0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.rows.release()
        self.manager.shutdown()

    def request(self, load_tiers=None):
        from vllm.v1.kv_offload.base import ReqContext, TierFilter

        self.requests += 1
        context = ReqContext(f"request-{self.requests}", load_tier_filter=load_tiers or TierFilter.ALL)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def store(self, keys: list[bytes]) -> None:
        """Stores as a worker does that has copied blocks out of a GPU; returns when the tier has them."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.row(row)[:] = self.content(key)
        self.manager.complete_store(keys, context, True)
        self.manager.on_request_finished(context)
        until(self.is_quiet, "the tier has stored them")

    def is_quiet(self) -> bool:
        self.step()
        self.manager.lookup(bytes(36), self.request())
        return not self.manager.has_pending_work()

    def load(self, keys: list[bytes], load_tiers=None) -> list[bool]:
        """Whether each key came, asked as a step does until it is known. Checks the bytes that came."""
        from vllm.v1.kv_offload.base import LookupResult

        context, found = self.request(load_tiers), [LookupResult.RETRY]

        def is_known() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return all(one in (LookupResult.HIT, LookupResult.MISS) for one in found)

        until(is_known, "every key is found or not")
        hits = [key for key, one in zip(keys, found, strict=True) if one is LookupResult.HIT]
        if hits:
            spec = self.manager.prepare_load(hits, context)
            for key, row in zip(hits, spec.chunk_ids, strict=True):
                assert bytes(self.row(row)) == self.content(key), "other bytes than were stored"
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return [one is LookupResult.HIT for one in found]

    def row(self, row: int) -> memoryview:
        return self.rows[int(row) * self.row_bytes : (int(row) + 1) * self.row_bytes]

    def content(self, key: bytes) -> bytes:
        row_bytes = self.row_bytes
        return (key * (row_bytes // len(key) + 1))[:row_bytes]


def make(socket: str, memory: bytearray):
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    config = {"type": "LarderTier", "module_path": "larder_kv.vllm", "socket": socket, "model_revision": "1"}
    rows = memoryview(memory).cast("B", (ROWS, ROW_BYTES))
    return SecondaryTierFactory.create_secondary_tier(config, rows, offloading_spec())


def offloading_spec():
    """The part of an OffloadingSpec that the tier reads."""
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
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=False))


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
    """The tier's answers for keys, asked as vLLM does: step by step."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    context = ReqContext("request")
    tier.on_new_request(context)
    while True:
        found = [tier.lookup(key, context) for key in keys]
        if LookupResult.RETRY not in found:
            tier.on_request_finished(context)
            return [one.name for one in found]
        tier.on_schedule_end(None)
