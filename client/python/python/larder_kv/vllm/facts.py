"""What decides whether two engines' KV is interchangeable, and the namespace that it makes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from larder_kv.namespace import NamespaceSpec, Pool
from larder_kv.vllm.settings import UnsupportedError

NAME_BYTES = 256
SAMPLES, SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class Facts:
    """One engine, as far as its KV is concerned."""

    model: str
    revision: str
    kv_dtype: str
    layout: str
    hash_algorithm: str
    hash_seed: str
    chunk_tokens: int
    block_tokens: int
    tensor_parallel: int
    slices: int
    layers: int
    page_bytes: int
    """Bytes of one block in one layer of one slice."""
    details: Mapping[str, object]
    """Whatever else changes the numbers: the model's configuration, quantization, names of layers."""

    def namespace(self) -> NamespaceSpec:
        """The namespace. What has no field of its own is part of the revision, as a digest."""
        digest = hashlib.sha256(json.dumps(self.details, sort_keys=True, default=str).encode()).hexdigest()
        revision = f"{digest[:32]} {self.revision}".strip()
        pages = self.chunk_tokens // self.block_tokens
        return NamespaceSpec(
            model=shortened(self.model),
            revision=shortened(revision),
            kv_dtype=self.kv_dtype,
            layout=f"vllm {self.layout}",
            hash_algorithm=self.hash_algorithm,
            hash_seed=shortened(self.hash_seed),
            chunk_tokens=self.chunk_tokens,
            engine_block_tokens=self.block_tokens,
            tensor_parallel=self.tensor_parallel,
            slices=self.slices,
            pools=[Pool(layers=self.layers, layer_bytes=self.page_bytes * pages)],
        )


def shortened(text: str) -> str:
    """The text, or its end and digest where it is longer than a name may be."""
    encoded = text.encode()
    if len(encoded) <= NAME_BYTES:
        return text
    tail = encoded[-(NAME_BYTES - 65) :].decode(errors="ignore")
    return f"{hashlib.sha256(encoded).hexdigest()} {tail}"


def weights_digest(folder: Path) -> str:
    """Tells apart the weights of models that stand in folders of the same name: a digest of the names and sizes of the files,
    and of samples of their contents."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    if not files:
        raise UnsupportedError(f"{folder} has no weights to tell its model from others: set `model_revision`")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek((size - min(size, SAMPLE_BYTES)) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
