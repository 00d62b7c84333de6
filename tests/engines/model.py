"""Makes a tiny random model whose greedy output depends on all of its KV cache.

model.py FOLDER              a Llama
model.py FOLDER windows      a Llama in which every second layer has a sliding window
model.py FOLDER gemma        a Llama in which every fourth layer has full attention, and the others sliding windows
model.py FOLDER recurrent    a model in which every second layer has recurrent state
model.py FOLDER eagle        an EAGLE head of one layer for the first model
model.py FOLDER adapter N    a LoRA adapter for the first model; adapters of other numbers differ
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 256, 512, 4, 4, 2, 64, 1024
CONTEXT = 4096
WINDOW = 50
"""Tokens that a token sees in a sliding window, including itself."""
TAPS = 3
"""Tokens over which a layer with recurrent state convolves: it keeps one token less."""


def main(folder: str, kind: str = "plain", number: str = "") -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if kind == "adapter":
        (path / "adapter_config.json").write_text(json.dumps(ADAPTER))
        save_file(adapter_weights(number), path / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    made = {"recurrent": recurrent_weights, "eagle": eagle_weights}.get(kind, weights)()
    config = recurrent() if kind == "recurrent" else llama(kind)
    (path / "config.json").write_text(json.dumps(config))
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})


ADAPTER = {
    "base_model_name_or_path": "",
    "bias": "none",
    "lora_alpha": 8,
    "peft_type": "LORA",
    "r": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


def llama(kind: str) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }
    if kind == "windows":
        config |= {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "sliding_window": WINDOW}
    if kind == "gemma":
        config |= {"layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"], "sliding_window": WINDOW}
    if kind == "eagle":
        config |= {"num_hidden_layers": 1}
    return config


def recurrent() -> dict:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "block_auto_adjust_ff_dim": False,
        "block_dim": HIDDEN,
        "block_ff_dim": INTERMEDIATE,
        "block_multiple_of": 32,
        "conv_bias": False,
        "conv_dim": HIDDEN,
        "conv_L_cache": TAPS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "max_position_embeddings": CONTEXT,
        "norm_eps": 1e-5,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


class Random:
    """Large random weights: with small weights all logits are about the same, whatever the cache holds."""

    def __init__(self, seed: int = 7):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, outputs: int, inputs: int, scale: float) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=self.generator) * scale).to(torch.bfloat16)


def recurrent_weights() -> dict[str, torch.Tensor]:
    random, ones = Random(), torch.ones(HIDDEN, dtype=torch.bfloat16)
    made = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN, 0.3), "model.embedding_norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        if layer % 2:
            for name, outputs in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                made[f"{prefix}.self_attn.{name}_proj.weight"] = random(outputs * HEAD, HIDDEN, 0.12)
                if name != "v":
                    made[f"{prefix}.self_attn.{name}_layernorm.weight"] = ones[:HEAD].clone()
            made[f"{prefix}.self_attn.out_proj.weight"] = random(HIDDEN, HEADS * HEAD, 0.25)
        else:
            made[f"{prefix}.conv.in_proj.weight"] = random(3 * HIDDEN, HIDDEN, 0.12)
            made[f"{prefix}.conv.conv.weight"] = random(HIDDEN, TAPS, 0.6).unsqueeze(1)
            made[f"{prefix}.conv.out_proj.weight"] = random(HIDDEN, HIDDEN, 0.12)
        for name in ("w1", "w3"):
            made[f"{prefix}.feed_forward.{name}.weight"] = random(INTERMEDIATE, HIDDEN, 0.06)
        made[f"{prefix}.feed_forward.w2.weight"] = random(HIDDEN, INTERMEDIATE, 0.06)
        for name in ("operator_norm", "ffn_norm"):
            made[f"{prefix}.{name}.weight"] = ones.clone()
    return made


def adapter_weights(number: str) -> dict[str, torch.Tensor]:
    random, made, rank = Random(100 + int(number)), {}, ADAPTER["r"]
    for layer in range(LAYERS):
        for name, outputs in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            made[f"{prefix}.lora_A.weight"] = random(rank, HIDDEN, 0.1)
            made[f"{prefix}.lora_B.weight"] = random(outputs * HEAD, rank, 0.3)
    return made


def eagle_weights() -> dict[str, torch.Tensor]:
    """The target's first layer, after a layer that joins hidden states and tokens. Tokens and logits are the target's own."""
    first = "model.layers.0."
    made = {name.removeprefix("model."): one for name, one in weights().items() if name.startswith(first)}
    del made["layers.0.input_layernorm.weight"]
    return made | {"fc.weight": Random(11)(HIDDEN, 2 * HIDDEN, 0.1)}


def weights() -> dict[str, torch.Tensor]:
    random, ones = Random(), torch.ones(HIDDEN, dtype=torch.bfloat16)
    made = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, 1.0),
        "lm_head.weight": random(VOCABULARY, HIDDEN, 0.3),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, outputs in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            made[f"{prefix}.self_attn.{name}_proj.weight"] = random(outputs * HEAD, HIDDEN, 0.12)
        made[f"{prefix}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD, 0.25)
        for name in ("gate", "up"):
            made[f"{prefix}.mlp.{name}_proj.weight"] = random(INTERMEDIATE, HIDDEN, 0.06)
        made[f"{prefix}.mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE, 0.06)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = ones.clone()
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
