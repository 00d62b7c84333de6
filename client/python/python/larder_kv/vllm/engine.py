"""vLLM's configuration as the connector needs it; unsupported settings are refused by name."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.utils import get_pp_indices
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
from larder_kv.identity import weights_of
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.actor import Actor
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.facts import Facts
from larder_kv.vllm.groups import Group, GroupPool, Kind, pools_of
from larder_kv.vllm.hashes import checked_seed
from larder_kv.vllm.layout import LAYOUTS
from larder_kv.vllm.node import Node
from larder_kv.vllm.packing import packing_of
from larder_kv.vllm.plan import Shape
from larder_kv.vllm.ranks import Ranks
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.speculation import Speculation, draft_details, speculation_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

MAX_POOLS = 8
"""Pools that a namespace may have."""
ELSEWHERE = ("_commit_hash", "_name_or_path", "transformers_version")
"""The source of a configuration, and its reader: they do not change the numbers."""
PROCESSING = (
    "media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method"
).split()
"""Settings that change the tokens or the numbers of images, videos and sounds. vLLM's hash of a block has none of them."""

IF_SET = {
    "model_config": ("model_class_overrides", "quantization_config"),
    "lora_config": ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras"),
}
"""Other settings that change the weights, or the use of adapters. Engines without them have the namespaces that they always had."""


@dataclass(frozen=True)
class Engine:
    """One rank of an engine, or its scheduler."""

    settings: Settings
    facts: Facts
    shape: Shape
    pools: Sequence[GroupPool]
    blocks: int
    """Blocks of the engine's cache."""
    ranks: Ranks
    rank: int
    """The number of this rank; 0 for the scheduler."""
    has_micro_batches: bool = False
    """Whether a step may compute each layer several times, each time for a part of its requests."""

    @classmethod
    def of(cls, config: "VllmConfig", kv: "KVCacheConfig") -> "Engine":
        """Reads the configuration, and raises `UnsupportedError` for unsupported settings."""
        transfer = config.kv_transfer_config
        assert transfer is not None
        settings = Settings.parse(transfer.kv_connector_extra_config)
        refuse_unsupported(config, kv, settings)
        ranks, rank = ranks_of(config, kv)
        groups = groups_of(kv, ranks.decode_context)
        kinds = {one.group.kind for one in groups}
        speculation = speculation_of(config.speculative_config, settings.load, kinds == {Kind.ATTENTION})
        settings.check_events(endpoints_of(config))
        shape = shape_of(groups, kv.hash_block_size, settings, speculation)
        pools = pools_of([(one.group, one.page_bytes, one.names) for one in groups], shape.chunk_tokens)
        if len(pools) > MAX_POOLS:
            raise UnsupportedError(f"the model has {len(pools)} kinds of KV cache groups: {MAX_POOLS} are supported")
        if settings.load == "sync" and len(pools) > 1:
            raise UnsupportedError(
                '`load` is "sync": vLLM cannot recover from a failed load of a model with several kinds of layers: '
                'use "async"'
            )
        stages = stages_of(config, ranks, rank, pools, speculation)
        spec = groups[0].spec
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
            ranks=ranks,
            layers=max(stages),
            page_bytes=pools[0].page_bytes,
            details=details(config, groups, pools, settings, speculation) | parallel_details(config, ranks, stages),
            others=[
                larder_kv.Pool(
                    name=pool.name, layers=len(pool.layers), layer_bytes=pool.page_bytes * pool.pages, hit=pool.hit
                )
                for pool in pools[1:]
            ],
        )
        has_micro_batches = config.parallel_config.use_ubatching
        return cls(settings, facts, shape, pools, kv.num_blocks, ranks, rank, has_micro_batches)

    def slice_of_rank(self) -> int:
        """The slice that this rank holds."""
        return self.ranks.slice_of(self.rank)

    def writes_its_slice(self) -> bool:
        """Whether this rank saves its slice."""
        return self.settings.save and self.ranks.is_writer(self.rank)

    def open_node(
        self, slices: Sequence[int], window_bytes: int, counts: Counts, actor: Actor, *, begins: bool = True
    ) -> Node:
        """Opens the way to an actor of the node on this host; later, if it does not begin at once."""
        settings = self.settings

        def connect(device: int | None) -> larder_kv.Session:
            return settings.open_session("larder-kv for vLLM", window_bytes, device)

        namespace = self.facts.namespace()
        return Node(lambda: actor.open(connect), namespace, list(slices), settings.reconnect_seconds, counts.add, begins=begins)


@dataclass(frozen=True)
class EngineGroup:
    """Layers of one of vLLM's groups with blocks of the same size, and the group's kind for the cache."""

    group: Group
    spec: Any
    """vLLM's description of the group, or of its first layer."""
    page_bytes: int
    """Bytes of one block in one layer, without padding."""
    names: Sequence[str]


def groups_of(kv: "KVCacheConfig", decode_context: int = 1) -> list[EngineGroup]:
    """vLLM's groups; the first is attention. A group with blocks of different sizes comes once for each size."""
    pages = {name: min(one.layer_stride, one.block_stride) for one in kv.kv_cache_tensors for name in one.layers}
    groups = [
        one for number, group in enumerate(kv.kv_cache_groups) for one in parts_of(number, group, pages, decode_context)
    ]
    groups.sort(key=lambda one: (one.group.kind is not Kind.ATTENTION, one.group.number))
    if not groups or groups[0].group.kind is not Kind.ATTENTION:
        raise UnsupportedError("the model has no layer with full attention: at least one is needed")
    return groups


def parts_of(
    number: int, group: "KVCacheGroupSpec", pages: Mapping[str, int], decode_context: int
) -> list[EngineGroup]:
    """A group's layers by the size of their blocks; refuses layers whose size is not certain. A scheduler knows only a group's
    first layer, so sizes come from `pages`, which all ranks and the scheduler know for each layer."""
    if not group.enable_kv_transfer or group.host_resident or group.role != KVCacheGroupRole.DEFAULT:
        raise UnsupportedError(f"KV cache groups that are not transferred ({group.role.value}) are not supported")
    specs = list(iter_layer_specs(group.kv_cache_spec))
    (kind, *others) = dict.fromkeys(kind_of(number, group.layer_names[0], spec, decode_context) for spec in specs)
    sizes = {size_of(spec) for spec in specs}
    found = {pages[name] for name in group.layer_names if name in pages}
    if len(found) < 2 and len(sizes) == 1 and not others:
        return [EngineGroup(kind, specs[0], size_of(specs[0]), group.layer_names)]
    if others or kind.kind is not Kind.ATTENTION or not sizes <= found:
        raise UnsupportedError("layers of one KV cache group that differ in more than the size of their blocks are not supported")
    parts: dict[int, list[str]] = {}
    for name in group.layer_names:
        parts.setdefault(pages[name], []).append(name)
    return [EngineGroup(kind, specs[0], size, names) for size, names in parts.items()]


def kind_of(number: int, name: str, spec: Any, decode_context: int) -> Group:
    """The kind of a layer's group for the cache."""
    kind = type(spec).__name__
    if not spec.prefix_cacheable or spec.prefix_replay_tokens:
        raise UnsupportedError(f"the KV cache of {name} ({kind}) is no part of a prefix: not supported")
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        spread = decode_context if spec.dcp_sharded else 1
        return Group(number, Kind.ATTENTION, spec.block_size * spread, spread=spread)
    if isinstance(spec, SlidingWindowSpec):
        return Group(number, Kind.WINDOW, spec.block_size, window=spec.sliding_window)
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return Group(number, Kind.STATE, spec.block_size)
    mode = f" in the cache mode {spec.mamba_cache_mode!r}" if isinstance(spec, MambaSpec) else ""
    raise UnsupportedError(
        f"the KV cache of {name} ({kind}{mode}) is not supported: full attention (MLA included), sliding windows and recurrent "
        "state with prefix caching are"
    )


def size_of(spec: Any) -> int:
    """Bytes of one block of a layer, without padding."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def shape_of(
    groups: Sequence[EngineGroup],
    hash_tokens: int | None,
    settings: Settings,
    speculation: Speculation | None = None,
) -> Shape:
    """The sizes of chunks and blocks: a chunk is a whole number of blocks of every group."""
    first, *others = dict.fromkeys(one.group for one in groups)
    whole = math.lcm(*(one.group.block_tokens for one in groups))
    chunk_tokens = settings.chunk_for(whole)
    hash_tokens = hash_tokens or first.block_tokens
    if chunk_tokens % hash_tokens != 0:
        raise UnsupportedError(f"a hash stands for {hash_tokens} tokens: a chunk's {chunk_tokens} are no multiple of that")
    dropped = whole if speculation is not None and speculation.drops_block else 0
    return Shape(chunk_tokens, first.block_tokens, hash_tokens, first.number, tuple(others), dropped)


def refuse_unsupported(config: "VllmConfig", kv: "KVCacheConfig", settings: Settings) -> None:
    """Refuses settings that Larder could not serve, or not correctly."""
    if kv.kv_cache_layout not in LAYOUTS:
        raise UnsupportedError(f"unknown KV cache layout {kv.kv_cache_layout!r}: known are {', '.join(LAYOUTS)}")
    if not config.cache_config.enable_prefix_caching:
        raise UnsupportedError("prefix caching is off, so that blocks have no hashes: turn it on")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales gives each process scales of its own: turn it off")
    if settings.load == "sync" and config.parallel_config.world_size != 1:
        raise UnsupportedError('`load` is "sync": with several ranks only "async" is supported')
    if settings.load == "sync" and config.use_v2_model_runner:
        raise UnsupportedError(
            '`load` is "sync": vLLM\'s model runner of version 2 continues with wrong KV if such a load fails: use "async", or '
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def ranks_of(config: "VllmConfig", kv: "KVCacheConfig") -> tuple[Ranks, int]:
    """The engine's ranks, and the number of this one."""
    parallel = config.parallel_config
    ranks = Ranks(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        replicas=kv.kv_tp_replicas,
    )
    if ranks.count != parallel.world_size:
        raise UnsupportedError(f"the engine has {parallel.world_size} ranks, but {ranks.count} were expected ({ranks})")
    return ranks, parallel.rank % ranks.count


def stages_of(
    config: "VllmConfig", ranks: Ranks, rank: int, pools: Sequence[GroupPool], speculation: Speculation | None
) -> list[int]:
    """Layers of each pipeline stage in the first pool. Stages share a namespace, in which each stage has as many layers as the
    longest."""
    here = len(pools[0].layers)
    if ranks.pipeline == 1:
        return [here]
    if len(pools) > 1 or (speculation is not None and speculation.has_kv):
        raise UnsupportedError(
            "pipeline parallelism is not supported for hybrid models (several kinds of layers), and with drafts that keep KV: stages "
            "would differ"
        )
    total = config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(total, stage, ranks.pipeline) for stage in range(ranks.pipeline)]
    stages = [end - start for start, end in bounds]
    if stages[ranks.stage_of(rank)] != here:
        raise UnsupportedError(
            f"a pipeline stage of {stages[ranks.stage_of(rank)]} layers has KV caches of {here}: not supported"
        )
    return stages


def parallel_details(config: "VllmConfig", ranks: Ranks, stages: Sequence[int]) -> dict[str, object]:
    """The facts about shared KV between ranks that have no field in a namespace."""
    found: dict[str, object] = {}
    if ranks.pipeline > 1:
        # Each rank knows the names of its own layers only.
        found["layers"] = list(stages)
    if ranks.decode_context > 1:
        found["tokens of a block are spread"] = [
            ranks.decode_context,
            config.parallel_config.cp_kv_cache_interleave_size,
        ]
    return found


def endpoints_of(config: "VllmConfig") -> list[str] | None:
    """The addresses on which vLLM publishes KV events, and repeats them on demand; None if it does not."""
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
    """The facts that change KV bytes and have no field in a namespace."""
    model = config.model_config
    configs = [without_source(one.to_dict()) for one in (model.hf_text_config, model.hf_config)]
    processing = model.multimodal_config
    found: dict[str, object] = {
        "config": configs,
        "dtype": str(model.dtype),
        "layers": {pool.name: [layer.name for layer in pool.layers] for pool in pools},
        "pages": packing_of(config, [one.spec for one in groups]),
        "processing": {name: getattr(processing, name, None) for name in PROCESSING} if processing else None,
        "quantization": model.quantization,
        "rope is long": is_rope_long(model),
        "specs": sorted({str(one.spec) for one in groups}),
        "weights": weights(model, config.load_config, settings.model_revision),
    }
    for part, names in IF_SET.items():
        given = getattr(config, part)
        found |= {name: value for name in names if (value := getattr(given, name, None))}
    if speculation is not None and speculation.has_kv:
        draft = config.speculative_config.draft_model_config
        # `model_revision` names the model's weights. Those of a draft in a folder tell themselves.
        named = "" if Path(draft.model).is_dir() else settings.model_revision
        found["draft"] = draft_details(draft, weights(draft, config.load_config, named))
    return found


def weights(model: Any, load: Any, model_revision: str) -> str:
    """Tells apart the weights of models of the same name; `model` and `load` are objects of vLLM's `ModelConfig` and `LoadConfig`.
    Raises `UnsupportedError` if nothing does."""
    if load.load_format == "dummy":
        # The files are not read: the weights are random.
        return "dummy"
    # Some versions of transformers tell the commit. A configuration may come from elsewhere.
    configured = None if getattr(model, "hf_config_path", None) else getattr(model.hf_config, "_commit_hash", None)
    return model_revision or weights_of(model.model, model.revision or "main", load.download_dir, configured)


def is_rope_long(model: Any) -> object:
    """Whether a model with LongRoPE turns all its keys by the factors for long prompts, which depends on the engine's longest
    prompt; None for other models."""
    config = model.hf_text_config.to_dict()
    if "longrope" not in json.dumps(config, default=str):
        return None
    limits = sorted(set(values_of(config, "original_max_position_embeddings")))
    return [model.max_model_len > limit for limit in limits] if limits else model.max_model_len


def values_of(value: Any, name: str) -> Iterator[int]:
    """The numbers of this name in a configuration and its parts."""
    if isinstance(value, Mapping):
        if isinstance(number := value.get(name), int):
            yield number
        for part in value.values():
            yield from values_of(part, name)


def without_source(value: Any) -> Any:
    """A configuration without the facts of `ELSEWHERE`, also in its parts."""
    if isinstance(value, Mapping):
        return {key: without_source(part) for key, part in value.items() if key not in ELSEWHERE}
    return [without_source(part) for part in value] if isinstance(value, list | tuple) else value
