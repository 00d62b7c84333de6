"""The facts that decide whether two engines' KV is interchangeable, and the namespace made from them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder_kv.identity import shortened
from larder_kv.namespace import NamespaceSpec, Pool
from larder_kv.vllm.ranks import Ranks


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
    ranks: Ranks
    layers: int
    page_bytes: int
    """Bytes of one block in one layer of one slice."""
    details: Mapping[str, object]
    """All other facts that change the numbers: the model's configuration, quantization, names of layers."""
    others: Sequence[Pool] = ()
    """The pools of a hybrid model besides the first one, which `layers` and `page_bytes` describe."""

    def namespace(self) -> NamespaceSpec:
        """The namespace. Facts without a field are part of the revision, as a digest."""
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
            tensor_parallel=self.ranks.tensor,
            pipeline_parallel=self.ranks.pipeline,
            # Without decode-context parallelism, prefill-context parallelism changes no KV.
            context_parallel=self.ranks.decode_context,
            slices=self.ranks.slices,
            pools=[Pool(layers=self.layers, layer_bytes=self.page_bytes * pages), *self.others],
        )
