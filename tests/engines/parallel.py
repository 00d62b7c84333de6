"""Scenario: engines whose KV is spread over ranks. Pipeline parallelism runs with real vLLM; cases that vLLM cannot run on CPUs
run with its own configuration, cache planning and scheduler (`own_classes.py`).
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from answers import computed, counted, loaded, prompt, same
from driver import BLOCK_TOKENS, Engine
from own_classes import HEAD, OwnEngine
from scenarios import until

PROMPT, LONGER = 200, 330


def run(world, row) -> None:
    """The scenario."""
    pipeline(world, row)
    own_classes(world, row)


def pipeline(world, row) -> None:
    """Two stages, with equally many layers and with one more in the first: one engine computes, another loads."""
    tokens = prompt(80)
    for name, partition in (("even", "2,2"), ("uneven", "3,1")):
        with ExitStack() as running:
            cluster = world.cluster(f"stages-{name}", 2)
            running.callback(cluster.stop)
            stages = {"pipeline_parallel_size": 2, "environment": {"VLLM_PP_LAYER_PARTITION": partition}}
            with Engine(world.scratch, f"stages-{name}-alone", **stages) as alone:
                alone.ask(tokens)
                # The engine's own cache ends where a load would end.
                expected = alone.ask(tokens)
            with Engine(world.scratch, f"stages-{name}-saves", {"socket": cluster.sockets[0]}, **stages) as saves:
                saves.ask(tokens)
                until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 6, "chunks are saved")
            with Engine(world.scratch, f"stages-{name}-loads", {"socket": cluster.sockets[1]}, **stages) as loads:
                answer = loads.ask(tokens)
                same(answer, expected)
                assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
                assert counted(answer, "loaded_blocks") == 12, "each stage loads six blocks"
        row(f"pipeline parallelism of 2, {partition} layers", "192 loaded over QUIC by both stages, 8 computed, identical")


def own_classes(world, row) -> None:
    """Every case: one engine computes and saves; an engine on another node loads, forgets and loads again, and computes on."""
    model, mla = world.scratch / "model", world.scratch / "latent"
    latent_model(model, mla)
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    cases = (
        ("tensor 4, decode context 2", model, attention, {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
        ("the same, 8 tokens at a time", model, attention,
         {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 8}),
        ("pipeline 2, tensor 2", model, staged(attention, 2, 2), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("latent attention, tensor 4", mla, latent, {"tensor_parallel_size": 4}),
        ("latent attention with an indexer, tensor 4, decode context 4", mla, indexed,
         {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}),
        ("latent attention with an indexer and MTP, tensor 4, decode context 4", mla, drafted,
         {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "speculative_config": drafts}),
        ("latent attention, tensor 2, prefill context 2", mla, latent,
         {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}),
        ("latent attention, tensor 2, prefill and decode context 2", mla, latent,
         {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}),
    )
    with ExitStack() as running:
        cluster = world.cluster("own-classes", 2)
        running.callback(cluster.stop)
        for number, (name, folder, specs, options) in enumerate(cases):
            one_case(cluster, number, name, str(folder), specs, options, row)


def one_case(cluster, number: int, name: str, model: str, specs, options: dict, row) -> None:
    tokens = prompt(810 + number, LONGER)
    span = BLOCK_TOKENS * options.get("decode_context_parallel_size", 1)
    chunk = 2 * span
    dropped = span if "speculative_config" in options else 0
    with OwnEngine(model, cluster.sockets[0], specs, block=BLOCK_TOKENS, chunk=chunk, **options) as first:
        assert first.ask(tokens) == 0
    chunks = LONGER // chunk
    with OwnEngine(model, cluster.sockets[1], specs, block=BLOCK_TOKENS, chunk=chunk, **options) as second:
        until(lambda: second.finds(tokens) == chunks * chunk, f"{name}: the other node finds them")
        for _ in range(2):
            hit = second.ask(tokens)
            assert hit == chunks * chunk - dropped, f"{name}: {hit} of {LONGER} were loaded: {second.counts}"
            second.forget()
        part = second.ask(tokens[:PROMPT])
        assert part == max((PROMPT - 1) // chunk * chunk - dropped, 0), f"{name}: {part} of {PROMPT} were loaded"
    handed = handed_over(cluster, number, name, model, specs, options)
    row(name, f"{handed} chunks handed over by layers; {hit} of {LONGER} tokens loaded on the other node, each in its place on each of {len(second.ranks)} ranks")


def handed_over(cluster, number: int, name: str, model: str, specs, options: dict) -> int:
    """One engine computes a prompt and hands it over by layers, while an engine on the other node follows."""
    tokens = prompt(850 + number, LONGER)
    span = BLOCK_TOKENS * options.get("decode_context_parallel_size", 1)
    made = {"block": BLOCK_TOKENS, "chunk": 2 * span, **options}
    chunks = LONGER // (2 * span)
    with OwnEngine(model, cluster.sockets[0], specs, **made) as prefill, OwnEngine(model, cluster.sockets[1], specs, **made) as decode:
        follow = {"do_remote_prefill": True, "remote_node": prefill.node, "remote_device": 0}
        with ThreadPoolExecutor(1) as decoding:
            decoded = decoding.submit(decode.ask, tokens, follow)
            until(lambda: cluster.metric(1, "larder_held", what="follows") > 0 or decoded.done(), f"{name}: the prompt is followed")
            assert prefill.ask(tokens, {"do_remote_decode": True}) == 0
            hit = decoded.result()
        dropped = span if "speculative_config" in options else 0
        assert hit == chunks * 2 * span - dropped, f"{name}: {hit} of {LONGER} were handed over"
        slices = prefill.counts["handed_over_chunks"]
        assert slices >= chunks and decode.counts["followed_chunks"] == chunks, f"{prefill.counts} {decode.counts}"
    return chunks


def attention(rank: int, layers: range = range(4)) -> dict:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD, dtype=torch.float32, max_tp_shards=2)
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in layers}


def staged(specs, stages: int, tensor: int):
    """The layers of a rank's stage."""
    each = 4 // stages

    def of_rank(rank: int) -> dict:
        stage = rank // tensor
        return specs(rank, range(stage * each, (stage + 1) * each))

    return of_rank


def mla(size: int):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=size, dtype=torch.float32, max_tp_shards=1)


def latent(rank: int) -> dict:
    return {f"model.layers.{layer}.self_attn.attn": mla(24) for layer in range(4)}


def indexed(rank: int) -> dict:
    return latent(rank) | {f"model.layers.{layer}.self_attn.indexer.k_cache": mla(12) for layer in range(4)}


def drafted(rank: int) -> dict:
    return indexed(rank) | {"model.layers.4.self_attn.attn": mla(24), "model.layers.4.self_attn.indexer.k_cache": mla(12)}


def latent_model(model, folder) -> None:
    """The configuration of a small model with latent attention. Its weights are another model's: nobody computes with them."""
    folder.mkdir()
    shutil.copy(model / "model.safetensors", folder)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 1_024,
        "max_position_embeddings": 4_096,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
