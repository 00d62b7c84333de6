"""A vLLM engine in this process, controlled by JSON lines: `vllm_engine.py OPTIONS`, where OPTIONS is a JSON object.

Each line on standard input is a prompt; each answer is a line on the original standard output. vLLM's own output goes elsewhere.
"""

import json
import os
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)
# The engine's metrics that say where tokens came from.
COUNTED = ("vllm:prompt_tokens_by_source", "vllm:num_preemptions", "vllm:larder_", "vllm:spec_decode_num_")


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.pop("recurrent", False):
        import cpu_states

        cpu_states.install()
    if library := options.pop("fake_gpu", None):
        import fake_gpu

        os.environ["FAKE_GPU"] = library
        fake_gpu.install(library)
    has_stages = options.get("pipeline_parallel_size", 1) > 1
    if has_stages:
        options["worker_extension_cls"] = "cpu_stages.Stage"
    from vllm import LLM

    llm = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=8,
        seed=0,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        disable_log_stats=False,
        **options,
    )
    if has_stages:
        llm.collective_rpc("make_stage_inputs")
    say(ready=True)
    for line in sys.stdin:
        say(**answer(llm, json.loads(line)))
    llm.llm_engine.engine_core.shutdown()


def answer(llm, asked: dict) -> dict:
    """Runs prompts (lists of tokens) at once, with further options."""
    from vllm import SamplingParams

    while asked.get("forget") and not llm.reset_prefix_cache():
        # Blocks that are being saved become free when the engine, which steps only while it has requests, learns of it.
        llm.llm_engine.step()
    before = counts(llm)
    if connector := sys.modules.get("faulty"):
        connector.LarderConnector.leaves_alone = asked.get("leave_alone", False)
    handed_over = asked.get("kv_transfer_params")
    sampling = SamplingParams(
        temperature=0,
        max_tokens=asked.get("max_tokens", 16),
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        extra_args={"kv_transfer_params": handed_over} if handed_over else None,
    )
    prompts = [{"prompt_token_ids": tokens, **asked.get("with", {})} for tokens in asked["prompts"]]
    adapter = adapter_of(asked)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    seconds = time.perf_counter() - start
    after = counts(llm)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [next(iter(one.values())).logprob for one in output.outputs[0].logprobs or []] for output in outputs
        ],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "seconds": seconds,
        "first_token_seconds": [first_token(output) for output in outputs],
        "counts": {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)},
        "totals": after,
        "connector_seconds": connector_seconds("seconds"),
        "connector_seconds_to_first_token": connector_seconds("seconds_to_first_token"),
        "kv_transfer_params": [output.kv_transfer_params for output in outputs],
    }


def adapter_of(asked: dict):
    """A LoRA adapter: its name, number and folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(*asked["adapter"]) if "adapter" in asked else None


def first_token(output) -> float | None:
    metrics = output.metrics
    return metrics.first_token_latency if metrics is not None else None


def connector_seconds(of: str) -> float | None:
    """Seconds that this thread has spent in the connector, if the connector measures them."""
    measuring = sys.modules.get("faulty")
    return getattr(measuring.LarderConnector, of) if measuring else 0.0


def counts(llm) -> dict[str, float]:
    found = {}
    for metric in llm.get_metrics():
        # Counts by position are vectors.
        if metric.name.startswith(COUNTED) and hasattr(metric, "value"):
            source = metric.labels.get("source")
            found[metric.name.removeprefix("vllm:") + (f".{source}" if source else "")] = metric.value
    return found


def say(**what: object) -> None:
    ANSWERS.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main()
