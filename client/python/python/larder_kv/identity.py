"""Names that tell models apart, no longer than a namespace allows."""

import hashlib
import os
import platform
import time
from pathlib import Path

from larder_kv.settings import UnsupportedError

NAME_BYTES = 256
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""The endings of files with weights."""
CONFIGURATIONS = ("config.json", "params.json", "*processor_config.json", "adapter_config.json")
"""The files beside them that change a model's numbers: its architecture, the processing of images and the like, an adapter's
scale."""
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


def weights_of(model: str, revision: str | None, cache: str | None = None, configured: str | None = None) -> str:
    """Tells apart the weights of models of the same name: the digest of the files if the name is a path, otherwise the commit of
    the snapshot in this host's cache of the Hugging Face Hub, or in the folder `cache`. If the engine's revision is not known
    (None), only a single snapshot tells. `configured` is the commit of the engine's configuration, if the engine knows it. Raises
    `UnsupportedError` if nothing tells, or if the revision has moved since the engine may have loaded it."""
    path = Path(model)
    if path.exists():
        return weights_digest(path)
    caches = [Path(cache)] if cache else []
    for one in (*caches, hub_cache()):
        cached = one / f"models--{model.replace('/', '--')}"
        commit = commit_of(cached, revision)
        if commit is None:
            continue
        if commit != configured if configured else has_moved(cached, revision):
            raise UnsupportedError(
                f"the revision {revision} of {model} has moved while the engine started, so its weights may be of another commit: "
                f"start it again, or give it a commit as `--revision`; the revision is now at {commit}"
            )
        return f"commit {commit}"
    raise UnsupportedError(
        f"nothing on this host tells the weights of {model} from others: it is no path, and its revision is not known from the "
        "cache of the Hugging Face Hub. Set `model_revision` to a name of its weights, such as its commit"
    )


def has_moved(cached: Path, revision: str | None) -> bool:
    """Whether a revision was written since this process began, and may have named another snapshot before. A first download has
    only one snapshot."""
    try:
        written = (cached / "refs" / str(revision)).stat().st_mtime
    except OSError:
        return False
    return written >= process_start() and len(list((cached / "snapshots").glob("*"))) > 1


def process_start() -> float:
    """When this process began, in seconds of the system's clock."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began / os.sysconf("SC_CLK_TCK")


def commit_of(cached: Path, revision: str | None) -> str | None:
    """The commit of a revision in a model's folder of the Hub's cache; of its single snapshot if the revision is None."""
    snapshots = {path.name for path in (cached / "snapshots").glob("*")}
    if revision is None:
        return snapshots.pop() if len(snapshots) == 1 else None
    try:
        revision = (cached / "refs" / revision).read_text().strip()
    except OSError:
        # A commit needs no reference.
        pass
    return revision if revision in snapshots else None


def abilities_of_cpu() -> str:
    """This host's CPU, by all that engines choose their kernels by."""
    import torch

    able = torch.cpu.get_capabilities()
    return " ".join([platform.machine(), *sorted(name for name, is_able in able.items() if is_able is True)])


def hub_cache() -> Path:
    """This host's cache of the Hub. Engines that load models from the Hub have its library."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path("/nonexistent")
    return Path(HF_HUB_CACHE)


def weights_digest(path: Path) -> str:
    """Tells apart the weights of models at the same path, a folder or one file: a digest of the names and sizes of the files, of
    samples of their contents, and of the model's configuration."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.suffix in WEIGHTS)
    if not files:
        raise UnsupportedError(f"{path} has no weights to tell its model from others: set `model_revision`")
    for one in sorted({one for pattern in CONFIGURATIONS for one in path.glob(pattern)}):
        contents = one.read_bytes()
        digest.update(f"{one.name} {len(contents)};".encode() + contents)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            last = max(LEAST_GAPS, -(-size // (SAMPLED_BYTES - SAMPLE_BYTES)))
            for sample in range(last + 1):
                file.seek((size - min(size, SAMPLE_BYTES)) * sample // last)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
