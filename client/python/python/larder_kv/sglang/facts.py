"""The facts that decide whether two engines' pages are interchangeable, and the namespaces made from them.

The namespaces are flat. A page's hash names its whole prefix, so a hit needs no order; and SGLang does not say reliably where in
its prompt a page stands: the `prefix_keys` of a prefetch lack the pages of the node that it continues. Host pools besides the KV
have namespaces of their own, since SGLang saves them at other times and for other pages. Each rank has namespaces of its own too,
as ranks may be on several hosts; SGLang takes the shortest of their prefixes. Ranks with equal bytes (latent attention) share a
namespace, which the first rank fills.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder_kv.identity import shortened
from larder_kv.namespace import NamespaceSpec, Pool


@dataclass(frozen=True)
class PoolFacts:
    """One host pool of one rank, as far as its bytes are concerned."""

    name: str
    kind: str
    """SGLang's class of the pool, and the order of the device's pool; they determine the pool's content."""
    layout: str
    """The order of its memory, in SGLang's words."""
    dtype: str
    sizes: Sequence[int]
    """Bytes of the pieces of one page, in order."""
    is_replicated: bool
    """Whether every tensor parallel rank has the same bytes."""


@dataclass(frozen=True)
class Facts:
    """One rank of one engine."""

    model: str
    revision: str
    page_tokens: int
    hash_vector: str
    """SGLang's hash of a known page: an engine with another hash function has other keys."""
    tp: tuple[int, int]
    """Rank and size."""
    pp: tuple[int, int]
    cp: tuple[int, int]
    details: Mapping[str, object]
    """Other facts that change the numbers."""

    def namespace(self, pool: PoolFacts) -> NamespaceSpec:
        """The namespace of one pool of this rank.

        It is flat. A page's hash names its whole prefix, so order adds nothing to a hit; and some of SGLang's `prefix_keys` are
        missing (for a prefetch, those of the node that it continues), so pages would get wrong places.

        Each rank has namespaces of its own: SGLang takes the shortest of its ranks' prefixes, and ranks on several hosts are each
        served by their own node.
        """
        details = json.dumps(self.details, sort_keys=True, default=str)
        digest = hashlib.sha256(details.encode()).hexdigest()[:32]
        tp_rank, tp_size = (0, 1) if pool.is_replicated else self.tp
        pieces = hashlib.sha256(json.dumps(list(pool.sizes)).encode()).hexdigest()[:16]
        ranks = f"tp{tp_rank}/{tp_size} pp{self.pp[0]}/{self.pp[1]} cp{self.cp[0]}/{self.cp[1]}"
        return NamespaceSpec(
            model=shortened(self.model),
            revision=shortened(f"{digest} {self.revision}".strip()),
            kv_dtype=pool.dtype,
            layout=shortened(f"sglang {pool.name} {pool.kind} {pool.layout} {pieces} {ranks}"),
            hash_algorithm="sglang sha256",
            hash_seed=self.hash_vector,
            chunk_tokens=self.page_tokens,
            engine_block_tokens=self.page_tokens,
            tensor_parallel=tp_size,
            pipeline_parallel=self.pp[1],
            context_parallel=self.cp[1],
            pools=(Pool(layers=1, layer_bytes=sum(pool.sizes)),),
            flat=True,
        )
