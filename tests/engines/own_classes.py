"""Engines of several ranks in this process, with vLLM's own configuration, cache planning, scheduler and aggregation of ranks,
and the connector in each rank: for cases that vLLM cannot run on CPUs. Only the model is not vLLM's: its "result" for a token
depends on all tokens before it, the layer and the head, so a block in a wrong place, or of a wrong prompt or rank, is noticed.
"""

import copy
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

import torch

NUM_BLOCKS, HEAD = 64, 8

Specs = Callable[[int], dict]
"""The layers of a rank: vLLM's specifications by name."""


class Planned:
    """vLLM's configuration, and the cache that it plans for these layers."""

    def __init__(self, model: str, specs: Specs, transfer: dict, block: int, **options):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_kv_cache_configs,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )

        init_none_hash(sha256_cbor)
        prefill_context = options.pop("prefill_context_parallel_size", 1)
        self.config = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=1_000,
            max_num_batched_tokens=512,
            block_size=block,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            async_scheduling=False,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=transfer | {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
            num_gpu_blocks_override=NUM_BLOCKS,
            **options,
        ).create_engine_config()
        # vLLM has other values for latent attention on CPUs; this test is about engines on GPUs.
        self.config.device_config.device_type = "cuda"
        self.config.cache_config.enable_prefix_caching, self.config.cache_config.block_size = True, block
        self.config.scheduler_config.enable_chunked_prefill = True
        self.config.scheduler_config.max_num_batched_tokens = 512
        # The runner for CPUs refuses this setting.
        self.config.parallel_config.prefill_context_parallel_size = prefill_context
        self.config.parallel_config.world_size *= prefill_context
        ranks = range(self.config.parallel_config.world_size)
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.caches = get_kv_cache_configs(self.config, [specs(rank) for rank in ranks], [1 << 30] * len(ranks))
        for cache in self.caches:
            cache.kv_cache_layout = "LBHNC"
        self.plan = generate_scheduler_kv_cache_config(self.caches)
        self.config.cache_config.num_gpu_blocks = self.plan.num_blocks
        self.block_tokens, self.hash_tokens = resolve_kv_cache_block_sizes(self.plan, self.config)
        for cache in (*self.caches, self.plan):
            cache.hash_block_size = self.hash_tokens


class OwnEngine:
    """A scheduler and ranks."""

    def __init__(self, model: str, socket: str, specs: Specs, *, block: int = 32, chunk: int = 64, load: str = "async", **options):
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = {
            "kv_connector": "LarderConnector",
            "kv_connector_module_path": "larder_kv.vllm",
            "kv_connector_extra_config": {"socket": socket, "chunk_tokens": chunk, "load": load, "verify": "always"},
        }
        planned = Planned(model, specs, transfer, block, **options)
        config, self.hash_tokens = planned.config, planned.hash_tokens
        self.scheduler = Scheduler(
            config,
            planned.plan,
            StructuredOutputManager(config),
            block_size=planned.block_tokens,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.ranks = [OwnRank(config, rank, cache) for rank, cache in enumerate(planned.caches)]
        self.aggregator = KVOutputAggregator.from_connector(self.ranks[0].connector, len(self.ranks))
        self.answered: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    @property
    def node(self) -> str:
        """The name of the engine's node."""
        return self.scheduler.connector._plans._node.current().session.node

    def request(self, name: str, tokens: list[int], kv_transfer_params: dict | None = None):
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(self.hash_tokens, sha256_cbor)
        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=extra)
        return Request(name, list(tokens), sampling, None, block_hasher=hasher)

    def finds(self, tokens: list[int]) -> int:
        """Tokens of a prompt that the node would serve now."""
        plans = self.scheduler.connector._plans
        node = plans._node.current()
        hashes = plans.shape.chunk_hashes(self.request("found", tokens).block_hashes)
        return node.session.lookup(node.namespace, node.namespace.chain(hashes)).tokens

    def ask(self, tokens: list[int], kv_transfer_params: dict | None = None, seconds: float = 60.0) -> int:
        """Runs a prompt for some further tokens; returns how many of its tokens were there before its first step, from Larder or
        from this engine's own cache. Raises if a rank has anything wrong before a step that reads it."""
        name = f"request-{len(self.answered)}"
        request = self.request(name, tokens, kv_transfer_params)
        self.scheduler.add_request(request)
        deadline = time.monotonic() + seconds
        # The engine has work until every rank has saved what it computed, and then none.
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, f"{name} is not answered: {request.status}"
            self.step()
        return self.answered[name]

    def forget(self) -> None:
        """Empties the engine's own cache, and all blocks that its ranks hold."""
        deadline = time.monotonic() + 30
        while not self.scheduler.reset_prefix_cache():
            assert time.monotonic() < deadline, "blocks are still held"
            self.step()
        for rank in self.ranks:
            for tensor in rank.tensors.values():
                tensor.fill_(-1)

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        plan = self.scheduler.schedule()
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in plan.num_scheduled_tokens}
        work = []
        for name, count in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            computed = request.num_computed_tokens - count
            work.append((list(request.all_token_ids), computed, computed + count, tables[name]))
            self.answered.setdefault(name, computed)
        names = list(plan.num_scheduled_tokens)
        sampled = [
            [1] if end >= len(tokens) else [] for tokens, _, end, _ in work
        ]
        outputs = []
        for rank in self.ranks:
            told = rank.step(plan, work)
            outputs.append(
                ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told)
            )
        for output in self.scheduler.update_from_output(plan, self.aggregator.aggregate(outputs)).values():
            stats = output.scheduler_stats
            self.counts.update(stats.kv_connector_stats or {} if stats else {})


class OwnRank:
    """A worker without a model."""

    def __init__(self, config, rank: int, cache):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import iter_layer_specs

        own = copy.copy(config)
        own.parallel_config = copy.copy(config.parallel_config)
        own.parallel_config.rank = rank
        parallel, self.interleave = own.parallel_config, config.parallel_config.cp_kv_cache_interleave_size
        tensor, prefill = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
        self.tensor_rank, self.prefill_rank = rank % tensor, rank // tensor % prefill
        self.tensor = tensor
        self.spread = parallel.decode_context_parallel_size
        # vLLM's groups span prefill-context ranks first.
        self.spread_rank = (self.tensor_rank * prefill + self.prefill_rank) % self.spread
        self.tensors, self.layers = {}, {}
        for number, group in enumerate(cache.kv_cache_groups):
            each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            for name in group.layer_names:
                spec = each[name] if each else next(iter(iter_layer_specs(group.kv_cache_spec)))
                content = spec.state_content_size_bytes // 4
                self.layers[name] = (number, spec)
                self.tensors[name] = torch.full((cache.num_blocks, spec.num_heads, spec.block_size, content), -1.0, dtype=torch.float32)
        self.connector = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, cache)
        self.connector.register_kv_caches(self.tensors)

    def step(self, plan, work):
        """Drives the connector as vLLM's model runners do, around a stand-in for the forward pass."""
        from vllm.v1.outputs import KVConnectorOutput

        connector, told = self.connector, KVConnectorOutput()
        metadata = plan.kv_connector_metadata
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if plan.has_sync_kv_loads:
            connector.start_load_kv(None)
        for name in self.tensors:
            if work:
                connector.wait_for_layer_load(name)
                for tokens, computed, end, tables in work:
                    self.forward(name, tokens, computed, end, tables)
                connector.save_kv_layer(name, self.tensors[name], None)
        if not plan.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(plan.finished_req_ids)
        told.finished_sending, told.finished_recving = results.finished_sending, results.finished_recving
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return told

    def forward(self, name: str, tokens: list[int], computed: int, end: int, tables) -> None:
        """Reads the cached rows of a prompt, and writes the new ones. If ranks spread tokens, a token's rows are on one of
        them."""
        number, spec = self.layers[name]
        spread = self.spread if spec.dcp_sharded else 1
        mine = self.spread_rank if spec.dcp_sharded else 0
        heads = self.tensor // spec.max_tp_shards if spec.max_tp_shards else 1
        head = self.tensor_rank // max(heads, 1)
        running, span = zlib.crc32(f"{name} {head}".encode()), spec.block_size * spread
        for position, token in enumerate(tokens[:end]):
            running = zlib.crc32(token.to_bytes(4, "little"), running)
            block, offset = divmod(position, span)
            turn, in_turn = divmod(offset, self.interleave)
            if turn % spread != mine:
                continue
            row = self.tensors[name][tables[number][block], :, turn // spread * self.interleave + in_turn]
            value = float(running % 65_521)
            if position >= computed:
                row.fill_(value)
            else:
                assert bool((row == value).all()), f"{name}, token {position} of rank {mine}: {row.flatten()[:2]} is not {value}"
