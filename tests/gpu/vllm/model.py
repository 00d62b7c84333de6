"""Makes two Llamas of random weights, whose answers depend on all of their KV cache: `model.py FOLDER [--cpu]`.

FOLDER/large is for rates. FOLDER/small computes in float32, where requests that are computed together give the same tokens as
requests that are computed alone. With --cpu both are tiny.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

torch: Any = importlib.import_module("torch")


class Shape(NamedTuple):
    """The sizes of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    context: int


LARGE = Shape(4_096, 14_336, 8, 32, 8, 128, 8_192, 8_192)
SMALL = Shape(1_024, 2_816, 6, 8, 4, 128, 4_096, 4_096)
TINY = Shape(256, 512, 4, 4, 2, 64, 1_024, 8_192)


class Random:
    """Large random weights: with small weights all logits are about the same, whatever the cache holds."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(7)

    def __call__(self, outputs: int, inputs: int, scale: float) -> Any:
        values = torch.randn(outputs, inputs, generator=self._generator, device=self._device)
        return (values * (scale / inputs**0.5)).to(torch.bfloat16).cpu()


def main(folder: Path, cpu: bool) -> None:
    """Makes both models."""
    for name, shape in {"large": LARGE, "small": SMALL}.items():
        make(folder / name, TINY if cpu else shape, "cpu" if cpu else "cuda")


def make(folder: Path, shape: Shape, device: str) -> None:
    """Makes a model."""
    folder.mkdir(parents=True)
    save_file = importlib.import_module("safetensors.torch").save_file
    save_file(weights(shape, Random(device)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration(shape)))


def weights(shape: Shape, random: Random) -> dict[str, Any]:
    """The tensors, by their names."""
    hidden, ones = shape.hidden, torch.ones(shape.hidden, dtype=torch.bfloat16)
    made = {
        "model.embed_tokens.weight": random(shape.vocabulary, hidden, hidden**0.5),
        "lm_head.weight": random(shape.vocabulary, hidden, 4.8),
        "model.norm.weight": ones,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            made[f"{prefix}.self_attn.{name}_proj.weight"] = random(heads * shape.head, hidden, 1.9)
        made[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, shape.heads * shape.head, 4.0)
        for name in ("gate", "up"):
            made[f"{prefix}.mlp.{name}_proj.weight"] = random(shape.intermediate, hidden, 0.96)
        made[f"{prefix}.mlp.down_proj.weight"] = random(hidden, shape.intermediate, 1.36)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = ones.clone()
    return made


def configuration(shape: Shape) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--cpu" in sys.argv[2:])
