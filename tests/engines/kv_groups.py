"""Scenario: compares the connector's rule for KV cache groups with vLLM's own manager of blocks, without a model."""

import math
import random

BLOCKS, CASES = 4_000, 60


def run(row) -> None:
    """The scenario."""
    seed = random.randrange(1 << 32)
    print(f"  seed {seed}", flush=True)
    generator = random.Random(seed)
    saved = loaded = 0
    for _ in range(CASES):
        case = Case(generator)
        saved += case.save_a_prompt()
        loaded += case.load_a_prefix()
    row("vLLM's own block manager, random groups", f"{saved} chunks had their blocks, {loaded} blocks to load")
    refused()
    row("groups that cannot be served", "refused by name")


class Case:
    """A model with random groups, and a prompt that is computed in random steps."""

    def __init__(self, generator: random.Random):
        from larder_kv.vllm.engine import groups_of, shape_of
        from larder_kv.vllm.settings import Settings
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.random = generator
        block = generator.choice([16, 32])
        specs = [attention(block), window(block * generator.choice([1, 2]), generator.randint(2, 400))]
        if generator.random() < 0.5:
            specs.append(state(block * generator.choice([1, 2])))
        if generator.random() < 0.3:
            specs.append(window(block, generator.randint(2, 400)))
        generator.shuffle(specs)
        sizes = [spec.block_size for spec in specs]
        self.aligned = math.lcm(*sizes)
        kv = config(specs)
        settings = Settings(socket="", chunk_tokens=self.aligned * generator.randint(1, 4))
        groups = groups_of(kv)
        self.groups = [one.group for one in groups]
        self.shape = shape_of(groups, math.gcd(*sizes), settings)
        self.manager = KVCacheManager(
            kv, max_model_len=8_192, scheduler_block_size=self.aligned, hash_block_size=math.gcd(*sizes)
        )
        self.null = self.manager.block_pool.null_block.block_id
        self.tokens = generator.randint(1, 1_500)

    def request(self, name: str, tokens: int):
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256_cbor)
        prompt = [self.random.randrange(1_000) for _ in range(tokens)]
        hasher = get_request_block_hasher(self.manager.block_pool.hash_block_size, sha256_cbor)
        return Request(name, prompt, SamplingParams(), None, block_hasher=hasher)

    def save_a_prompt(self) -> int:
        """Checks that a chunk that a step completes has its blocks when the step is planned; once held, vLLM gives them to nobody
        else."""
        from larder_kv.vllm.groups import Kind, blocks_to_save
        from larder_kv.vllm.held import HeldBlocks

        request = self.request("a", self.tokens)
        held = HeldBlocks(self.manager.block_pool, ranks=1)
        reading: set[int] = set()
        chunk_tokens, saved, numbers = self.shape.chunk_tokens, 0, []
        while request.num_computed_tokens < self.tokens:
            before = {block for table in self.manager.get_block_ids("a") for block in table}
            step = self.step(request.num_computed_tokens)
            assert self.manager.allocate_slots(request, step) is not None
            tables = self.manager.get_block_ids("a")
            fresh = {block for table in tables for block in table} - before - {self.null}
            assert not fresh & reading, "blocks that are being saved were given away"
            self.manager.new_step_starts()
            offered = self.manager.take_boundary_state_offloads().get("a", [])
            states = {(group, boundary): block for group, block, boundary in offered}
            first, end = request.num_computed_tokens // chunk_tokens, request.num_computed_tokens + step
            for chunk in range(first, end // chunk_tokens):
                for group in self.groups:
                    blocks = blocks_to_save(group, chunk_tokens, chunk, tables[group.number], self.null, states)
                    is_told = (chunk + 1) * chunk_tokens == end
                    assert blocks or (group.kind is Kind.STATE and not is_told), f"{group} lacks chunk {chunk}"
                    reading.update(blocks)
                    numbers.append(held.hold(blocks))
                saved += 1
            request.num_computed_tokens += step
        self.manager.free(request)
        held.ended(dict.fromkeys(numbers, 1))
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "every block was given back"
        return saved

    def step(self, computed: int) -> int:
        """Tokens of the next step; with recurrent layers, vLLM lets a step end at a block, or with the prompt."""
        end = min(computed + self.random.randint(1, 600), self.tokens)
        if any(group.kind.value == "state" for group in self.groups) and end < self.tokens:
            end = end // self.aligned * self.aligned
            end = end if end > computed else min(computed + self.aligned, self.tokens)
        return end - computed

    def load_a_prefix(self) -> int:
        """Checks that exactly the blocks for which vLLM makes room are loaded."""
        from larder_kv.vllm.groups import blocks_to_load

        chunks = self.tokens // self.shape.chunk_tokens
        if chunks == 0:
            return 0
        end = chunks * self.shape.chunk_tokens
        request = self.request("b", end + 1)
        allocated = self.manager.allocate_slots(
            request, 0, num_external_computed_tokens=end, delay_cache_blocks=True
        )
        assert allocated is not None
        tables, loaded = self.manager.get_block_ids("b"), 0
        for group in self.groups:
            run = blocks_to_load(group, self.shape.chunk_tokens, 0, end, tables[group.number], self.null)
            assert run.blocks == [block for block in tables[group.number] if block != self.null], f"{group}"
            loaded += len(run.blocks)
        self.manager.free(request)
        return loaded


def refused() -> None:
    from larder_kv.settings import UnsupportedError
    from larder_kv.vllm.engine import groups_of
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    local = ChunkedLocalAttentionSpec(32, num_kv_heads=2, head_size=64, dtype=dtype(), attention_chunk_size=128)
    for specs, words in (
        ([attention(32), local], "ChunkedLocalAttentionSpec"),
        ([window(32, 64), window(32, 128)], "no layer with full attention"),
        ([attention(32), state(32, mode="none")], "cache mode 'none'"),
    ):
        try:
            groups_of(config(specs))
        except UnsupportedError as error:
            assert words in str(error), f"{error}"
        else:
            raise AssertionError(f"{specs} were not refused")


def attention(block_tokens: int):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_tokens, num_kv_heads=2, head_size=64, dtype=dtype())


def window(block_tokens: int, tokens: int):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_tokens, num_kv_heads=2, head_size=64, dtype=dtype(), sliding_window=tokens)


def state(block_tokens: int, mode: str = "align"):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_tokens, shapes=((2, 256),), dtypes=(dtype(),), mamba_cache_mode=mode)


def dtype():
    import torch

    return torch.bfloat16


def config(specs: list):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
