"""Names that tell models apart, no longer than a namespace allows."""

import hashlib
from pathlib import Path

from larder_kv.settings import UnsupportedError

NAME_BYTES = 256
LEAST_GAPS, SAMPLE_BYTES = 64, 4096
SAMPLED_BYTES = 4 << 20
"""Bytes of a file for which one sample stands at most: a matrix of this size has a sample, and only small ones may have none."""


def shortened(text: str) -> str:
    """The text, or its end and digest if it is too long for a name."""
    encoded = text.encode()
    if len(encoded) <= NAME_BYTES:
        return text
    tail = encoded[-(NAME_BYTES - 65) :].decode(errors="ignore")
    return f"{hashlib.sha256(encoded).hexdigest()} {tail}"


def weights_digest(folder: Path) -> str:
    """Tells apart the weights of models in folders of the same name: a digest of the names and sizes of the files, and of samples
    of their contents."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    if not files:
        raise UnsupportedError(f"{folder} has no weights to tell its model from others: set `model_revision`")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            last = max(LEAST_GAPS, -(-size // (SAMPLED_BYTES - SAMPLE_BYTES)))
            for sample in range(last + 1):
                file.seek((size - min(size, SAMPLE_BYTES)) * sample // last)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
