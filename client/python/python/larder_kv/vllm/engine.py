"""vLLM's configuration as the connector needs it; it refuses by name what it cannot serve."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

import larder_kv
from larder_kv.identity import weights_digest
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.actor import Actor
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.facts import Facts
from larder_kv.vllm.groups import Group, GroupPool, Kind, pools_of
from larder_kv.vllm.hashes import checked_seed
from larder_kv.vllm.layout import LAYOUTS
from larder_kv.vllm.node import Node
from larder_kv.vllm.plan import Shape
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.speculation import Speculation, draft_details, speculation_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

MAX_POOLS = 8
"""Pools that a namespace may have."""
ELSEWHERE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Engine:
    """One rank of an engine, or its scheduler."""

    settings: Settings
    facts: Facts
    shape: Shape
    pools: Sequence[GroupPool]
    blocks: int
    """Blocks of the engine's cache."""
    tensor_rank: int
    replicas: int
    """Consecutive ranks that hold the same KV."""
    ranks: int
    """Ranks of the engine."""

    @classmethod
    def of(cls, config: "VllmConfig", kv: "KVCacheConfig") -> "Engine":
        """Reads the configuration, and refuses what is not supported."""
        transfer = config.kv_transfer_config
        assert transfer is not None
        settings = Settings.parse(transfer.kv_connector_extra_config)
        refuse_unsupported(config, kv, settings)
        speculation = speculation_of(config.speculative_config, settings.load, len(kv.kv_cache_groups))
        settings.check_events(endpoints_of(config))
        groups = groups_of(kv)
        spec = spec_of(groups[0].spec)
        parallel = config.parallel_config
        shape = shape_of(groups, kv.hash_block_size, settings, speculation)
        of_each = [(one.group, size_of(spec_of(one.spec)), one.spec.layer_names) for one in groups]
        pools = pools_of(of_each, shape.chunk_tokens)
        if len(pools) > MAX_POOLS:
            raise UnsupportedError(f"the model has {len(pools)} kinds of KV cache groups: {MAX_POOLS} are supported")
        replicas = kv.kv_tp_replicas
        algorithm = config.cache_config.prefix_caching_hash_algo
        function = get_hash_fn_by_name(algorithm)
        seed = os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED)
        model = config.model_config
        facts = Facts(
            model=model.model,
            revision=settings.model_revision or model.revision or "",
            kv_dtype=f"{config.cache_config.cache_dtype} {spec.dtype}".replace("torch.", ""),
            layout=str(kv.kv_cache_layout),
            hash_algorithm=algorithm,
            hash_seed=checked_seed(algorithm, seed, function),
            chunk_tokens=shape.chunk_tokens,
            block_tokens=shape.block_tokens,
            tensor_parallel=parallel.tensor_parallel_size,
            slices=parallel.tensor_parallel_size // replicas,
            layers=len(pools[0].layers),
            page_bytes=pools[0].page_bytes,
            details=details(config, groups, pools, settings, speculation),
            others=[
                larder_kv.Pool(
                    name=pool.name, layers=len(pool.layers), layer_bytes=pool.page_bytes * pool.pages, hit=pool.hit
                )
                for pool in pools[1:]
            ],
        )
        rank = parallel.rank % parallel.tensor_parallel_size
        return cls(settings, facts, shape, pools, kv.num_blocks, rank, replicas, parallel.world_size)

    def slice_of_rank(self) -> int:
        """The slice that this rank holds."""
        return self.tensor_rank // self.replicas

    def writes_its_slice(self) -> bool:
        """Whether this rank is the one that saves its slice."""
        return self.settings.save and self.tensor_rank % self.replicas == 0

    def open_node(
        self, slices: Sequence[int], window_bytes: int, counts: Counts, actor: Actor, *, begins: bool = True
    ) -> Node:
        """Opens the way to an actor of the node on this host; later, where it does not begin."""
        settings = self.settings

        def connect(device: int | None) -> larder_kv.Session:
            return settings.open_session("larder-kv for vLLM", window_bytes, device)

        spec = self.facts.namespace()
        return Node(lambda: actor.open(connect), spec, list(slices), settings.reconnect_seconds, counts.add, begins=begins)


@dataclass(frozen=True)
class EngineGroup:
    """One of vLLM's groups, and what it is to the cache."""

    group: Group
    spec: "KVCacheGroupSpec"


def groups_of(kv: "KVCacheConfig") -> list[EngineGroup]:
    """vLLM's groups; the first is attention."""
    groups = [EngineGroup(group_of(number, spec), spec) for number, spec in enumerate(kv.kv_cache_groups)]
    groups.sort(key=lambda one: (one.group.kind is not Kind.ATTENTION, one.group.number))
    if not groups or groups[0].group.kind is not Kind.ATTENTION:
        raise UnsupportedError("the model has no layer with full attention: at least one is needed")
    return groups


def group_of(number: int, group: "KVCacheGroupSpec") -> Group:
    """What a group is to the cache; refuses what it cannot be sure of."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    spec = specs[0]
    kind = type(spec).__name__
    if not group.enable_kv_transfer or group.host_resident or group.role != KVCacheGroupRole.DEFAULT:
        raise UnsupportedError(f"KV cache groups that are not transferred ({group.role.value}) are not supported")
    if not spec.prefix_cacheable or spec.prefix_replay_tokens:
        raise UnsupportedError(f"the KV cache of {group.layer_names[0]} ({kind}) is no part of a prefix: not supported")
    if len({(type(one), one.block_size, size_of(one)) for one in specs}) != 1:
        raise UnsupportedError("layers of one KV cache group with blocks of different sizes are not supported")
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        return Group(number, Kind.ATTENTION, spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        return Group(number, Kind.WINDOW, spec.block_size, window=spec.sliding_window)
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return Group(number, Kind.STATE, spec.block_size)
    mode = f" in the cache mode {spec.mamba_cache_mode!r}" if isinstance(spec, MambaSpec) else ""
    raise UnsupportedError(
        f"the KV cache of {group.layer_names[0]} ({kind}{mode}) is not supported: full attention (MLA included), "
        "sliding windows and recurrent state with prefix caching are"
    )


def spec_of(group: "KVCacheGroupSpec") -> Any:
    """What vLLM says of each layer of a group: they are alike."""
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def size_of(spec: Any) -> int:
    """Bytes of one block of a layer, without padding."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def shape_of(
    groups: Sequence[EngineGroup],
    hash_tokens: int | None,
    settings: Settings,
    speculation: Speculation | None = None,
) -> Shape:
    """How prompts are cut: a chunk is a whole number of blocks of every group."""
    first, *others = (one.group for one in groups)
    chunk_tokens = settings.chunk_for(math.lcm(*(one.group.block_tokens for one in groups)))
    hash_tokens = hash_tokens or first.block_tokens
    if chunk_tokens % hash_tokens != 0:
        raise UnsupportedError(f"a hash stands for {hash_tokens} tokens: a chunk's {chunk_tokens} are no multiple of that")
    dropped = first.block_tokens if speculation is not None and speculation.drops_block else 0
    return Shape(chunk_tokens, first.block_tokens, hash_tokens, first.number, tuple(others), dropped)


def refuse_unsupported(config: "VllmConfig", kv: "KVCacheConfig", settings: Settings) -> None:
    """Refuses what would not be served, or not rightly."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size != 1:
        raise UnsupportedError("pipeline parallelism is not supported")
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise UnsupportedError("context parallelism is not supported")
    if kv.kv_cache_layout not in LAYOUTS:
        raise UnsupportedError(f"unknown KV cache layout {kv.kv_cache_layout!r}: known are {', '.join(LAYOUTS)}")
    if not config.cache_config.enable_prefix_caching:
        raise UnsupportedError("prefix caching is off, so that blocks have no hashes: turn it on")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales gives each process scales of its own: turn it off")
    if settings.load == "sync" and parallel.tensor_parallel_size != 1:
        raise UnsupportedError('`load` is "sync": with several ranks only "async" is supported')
    if settings.load == "sync" and config.use_v2_model_runner:
        raise UnsupportedError(
            '`load` is "sync": vLLM\'s model runner of version 2 goes on with wrong KV where such a load fails: use "async", or '
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if settings.load == "sync" and len(kv.kv_cache_groups) > 1:
        raise UnsupportedError('`load` is "sync": for a hybrid model (several KV cache groups) only "async" is supported')


def endpoints_of(config: "VllmConfig") -> list[str] | None:
    """Where vLLM publishes KV events, and again on demand; None where it does not."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher == "null":
        return None
    return [endpoint for endpoint in (events.endpoint, events.replay_endpoint) if endpoint]


def details(
    config: "VllmConfig",
    groups: Sequence[EngineGroup],
    pools: Sequence[GroupPool],
    settings: Settings,
    speculation: Speculation | None,
) -> dict[str, object]:
    """What changes KV bytes and has no field of its own in a namespace."""
    model = config.model_config
    folder = Path(model.model)
    # Where the configuration was read from, and by what, changes no number.
    known = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in ELSEWHERE}
    found: dict[str, object] = {
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": known,
        "dtype": str(model.dtype),
        "layers": {pool.name: [layer.name for layer in pool.layers] for pool in pools},
        "quantization": model.quantization,
        "specs": sorted({str(spec_of(one.spec)) for one in groups}),
        "weights": settings.model_revision or (weights_digest(folder) if folder.is_dir() else ""),
    }
    if speculation is not None and speculation.has_kv:
        draft = config.speculative_config.draft_model_config
        path = Path(draft.model)
        found["draft"] = draft_details(draft, weights_digest(path) if path.is_dir() else "")
    return found
