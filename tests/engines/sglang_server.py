"""A whole SGLang engine on the CPU, including scheduler and model, controlled by JSON lines. Each line has the tokens of a
prompt; each answer is a line on the original standard output.

sglang_server.py OPTIONS      a JSON object of SGLang's own arguments
"""

import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo", SGLANG_USE_CPU_ENGINE="1")

import sglang_stubs  # noqa: E402

# SGLang's processes import this file again.
sglang_stubs.install()

ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "max_total_tokens": 4_096,
    "max_running_requests": 4,
}


def main(options: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(**ON_CPU, **json.loads(options))
    answers.write(json.dumps({"ready": True}) + "\n")
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    for line in sys.stdin:
        told = engine.generate(input_ids=json.loads(line)["tokens"], sampling_params=sampling, return_logprob=True)
        facts = told["meta_info"]
        logprobs = [logprob for logprob, *_ in facts["output_token_logprobs"]]
        cached = facts["cached_tokens_details"] or {}
        answers.write(json.dumps({"tokens": told["output_ids"], "logprobs": logprobs, "cached": cached}) + "\n")
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
