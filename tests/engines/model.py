"""Makes a tiny random Llama whose greedy output depends on all of its KV cache: `model.py FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 256, 512, 4, 4, 2, 64, 1024
CONTEXT = 4096


def main(folder: str) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
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
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(), path / "model.safetensors", metadata={"format": "pt"})


def weights() -> dict[str, torch.Tensor]:
    """Large weights: with small ones all logits are about the same, whatever the cache holds."""
    generator = torch.Generator().manual_seed(7)

    def random(outputs: int, inputs: int, scale: float) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
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
