"""Parallel engines: the part of a chunk that each rank holds, and the rank that saves it. Needs no vLLM.

vLLM counts ranks by pipeline stage, then prefill-context rank, then tensor rank. Each stage has its own layers. Each tensor rank
has its own heads, or several have the same KV (`replicas`). Decode-context parallelism spreads the tokens of each block over
ranks, including the ranks of prefill-context parallelism. Without decode-context parallelism, ranks of prefill-context
parallelism hold the same KV.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """The ranks of an engine."""

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    replicas: int = 1
    """Consecutive tensor ranks that hold the same KV."""

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.prefill_context * self.tensor

    @property
    def slices(self) -> int:
        """Different parts of a chunk."""
        return self.pipeline * self._slices_of_a_stage

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.prefill_context * self.tensor)

    def slice_of(self, rank: int) -> int:
        """The slice of a chunk that a rank holds."""
        in_stage = rank % (self.prefill_context * self.tensor)
        if not self._spreads_tokens:
            in_stage %= self.tensor
        return self.stage_of(rank) * self._slices_of_a_stage + in_stage // self.replicas

    def is_writer(self, rank: int) -> bool:
        """Whether a rank saves its slice."""
        in_stage = rank % (self.prefill_context * self.tensor)
        is_copy = in_stage >= self.tensor and not self._spreads_tokens
        return not is_copy and in_stage % self.replicas == 0

    @property
    def _spreads_tokens(self) -> bool:
        return self.decode_context > 1

    @property
    def _slices_of_a_stage(self) -> int:
        context = self.prefill_context if self._spreads_tokens else 1
        return context * self.tensor // self.replicas
