"""A vLLM engine in this process, for the steps: `engine.py OPTIONS`, where OPTIONS is a JSON object with options of `vllm.LLM`.

A first line on the original standard output says what runs. Then each line of JSON on standard input is answered with a line of
JSON there. vLLM's own output goes to standard error.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

COUNTED = ("vllm:prompt_tokens_by_source", "vllm:num_preemptions", "vllm:larder_", "vllm:kv_offload")
"""The beginnings of the names of metrics that an answer reports."""
FORGET_SECONDS = 20.0
QUIET_SECONDS = 0.02
"""Between two prompts that are timed."""


class Engine:
    """The commands of an engine. Each public method is one; its result is the answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=False,
            **options,
        )

    def facts(self) -> dict[str, Any]:
        """What runs."""
        torch: Any = importlib.import_module("torch")
        platform: Any = importlib.import_module("vllm.platforms").current_platform
        config = self._llm.llm_engine.vllm_config
        worker = self._llm.llm_engine.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        layers = config.compilation_config.static_forward_context.values()
        return {
            "vllm": self._vllm.__version__,
            "torch": torch.__version__,
            "device": platform.get_device_name(),
            "runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "attention": sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}),
            "layout": str(getattr(config.cache_config, "kv_cache_layout", None)),
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
        }

    def ask(self, prompts: list[list[int]], max_tokens: int, at_once: bool, forget: bool) -> dict[str, Any]:
        """Answers prompts, at once or one after the other. `forget` empties the engine's own prefix cache before."""
        if forget:
            self._forget()
        before, outputs = self._counts(), []
        for group in [prompts] if at_once else [[one] for one in prompts]:
            outputs += self._generate(group, max_tokens, logprobs=1)
        answers = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)] for answer in answers
            ],
            "counts": self._counts_since(before),
        }

    def first_tokens(self, prompts: list[list[int]], rounds: int, forget: bool) -> dict[str, Any]:
        """Times the first token of each prompt, one after the other. `forget` empties the own prefix cache before each."""
        before, seconds = self._counts(), []
        for tokens in prompts * rounds:
            if forget:
                self._forget()
            time.sleep(QUIET_SECONDS)
            start = time.perf_counter()
            self._generate([tokens], 1, logprobs=None)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "counts": self._counts_since(before)}

    def _generate(self, prompts: list[list[int]], max_tokens: int, logprobs: int | None) -> list[Any]:
        sampling = self._vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        return list(self._llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False))

    def _forget(self) -> None:
        """Empties the prefix cache. Blocks that are being saved become free when the engine, which steps only while it has
        requests, learns of it."""
        end = time.monotonic() + FORGET_SECONDS
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise TimeoutError("the prefix cache cannot be emptied: blocks stay in use")
            self._llm.llm_engine.step()

    def _counts(self) -> dict[str, float]:
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith(COUNTED) and hasattr(metric, "value"):
                source = metric.labels.get("source") or metric.labels.get("transfer_type")
                found[metric.name.removeprefix("vllm:") + (f".{source}" if source else "")] = metric.value
        return found

    def _counts_since(self, before: dict[str, float]) -> dict[str, float]:
        """The counts that have changed."""
        return {name: value - before.get(name, 0) for name, value in self._counts().items() if value != before.get(name, 0)}


def main() -> None:
    """Serves until standard input ends."""
    # The signal by which the program ends an engine that hangs; the stacks of all threads go to the log.
    faulthandler.enable()
    start = time.monotonic()
    engine = Engine(json.loads(sys.argv[1]))
    say(engine.facts() | {"start_seconds": round(time.monotonic() - start, 1)})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(getattr(engine, asked.pop("do"))(**asked))
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            say({"error": type(error).__name__, "text": str(error)})


def say(told: dict[str, Any]) -> None:
    """Writes an answer."""
    ANSWERS.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    status = 0
    try:
        main()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    # Threads of vLLM and of the driver do not keep the process.
    sys.stderr.flush()
    os._exit(status)
