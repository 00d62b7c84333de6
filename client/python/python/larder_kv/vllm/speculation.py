"""Speculative decoding: the drafts that keep their own KV, and the part of a hit that is computed again for them. Needs no vLLM.

A draft that reads the target's hidden states (EAGLE, MTP) knows at each token the next token. So the last block of a hit was
drafted for another prompt's next token: vLLM drops that block of its own hits, and so does the connector. Drafts change the time
at which tokens come, never the tokens: the target accepts or rejects a draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from larder_kv.settings import UnsupportedError

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods that keep no state of a prefix."""
OWN_MODEL = "draft_model"
READING_TARGETS = ("eagle", "eagle3", "mtp")


@dataclass(frozen=True)
class Speculation:
    """The speculative decoding of an engine."""

    method: str
    has_kv: bool
    """Whether the draft's layers are among those whose blocks are saved and loaded."""
    drops_block: bool
    """Whether the last block of a hit is computed again."""


def speculation_of(config: Any, load: str, is_attention: bool) -> Speculation | None:
    """The meaning of vLLM's `speculative_config` for a cache; `is_attention`: all layers have full attention. Raises
    `UnsupportedError` for unsupported methods and settings."""
    if config is None:
        return None
    method = str(config.method)
    if method not in (*WITHOUT_KV, OWN_MODEL, *READING_TARGETS):
        known = ", ".join((*WITHOUT_KV, OWN_MODEL, *READING_TARGETS))
        raise UnsupportedError(f"speculative decoding by {method!r} is not supported: {known} are")
    if load == "sync":
        raise UnsupportedError('`load` is "sync": with speculative decoding only "async" is supported')
    drops_block = bool(config.use_eagle_block_drop())
    if drops_block and not is_attention:
        raise UnsupportedError(
            f"speculative decoding by {method!r} is not supported for models with sliding windows or recurrent state: a hit without "
            "its last block could not be restored"
        )
    return Speculation(method, method not in WITHOUT_KV, drops_block)


def draft_details(model: Any, digest: str) -> Mapping[str, object]:
    """The facts that determine a draft's KV: its model, an object of vLLM's `ModelConfig`, and a digest of its weights."""
    return {"model": model.model, "revision": model.revision, "dtype": str(model.dtype), "weights": digest}
