"""The tensors in which a pipeline stage takes its input, on CPUs. vLLM makes them in a warm-up. On CPUs it skips the warm-up if
nothing is compiled, and then fails at the first request. The process of a stage takes the engine's stand-in for a GPU.
"""

import os

import fake_gpu
from vllm.distributed.parallel_state import get_pp_group


if library := os.environ.get("FAKE_GPU"):
    fake_gpu.install(library)


class Stage:
    def make_stage_inputs(self) -> None:
        """Makes the tensors for all stages but the first."""
        if get_pp_group().is_first_rank:
            return
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
