"""Scenario: vLLM's kernels for CPUs pack keys and values inside a page by the host's instructions. Engines that pack differently
share nothing, although vLLM's name for the order of their caches, and all sizes, are the same.
"""

from unittest.mock import patch

import torch
from own_classes import Planned


def run(world, row) -> None:
    """The scenario."""
    model = str(world.scratch / "model")
    of_cpus = {isa: names_of(model, isa) for isa in ("vec", "amx", "rvv")}
    same_bytes = names_of(model, "vec")
    on_gpu = names_of(model, "vec", device="cuda")
    assert len({of_cpus["vec"], of_cpus["amx"], on_gpu}) == 3, f"{of_cpus} {on_gpu}"
    assert of_cpus["vec"] == same_bytes
    assert "nothing tells how vLLM packs" in of_cpus["rvv"], "a kernel that this host does not have was taken"
    row("pages as AVX-512, AMX and GPUs pack them", "three namespaces")


def names_of(model: str, isa: str, device: str = "cpu") -> str:
    """The namespace's names of an engine on a host for which vLLM chooses these instructions; or why the engine is refused."""
    from larder_kv.settings import UnsupportedError
    from larder_kv.vllm.engine import Engine
    from vllm.v1.attention.backends import cpu_attn

    transfer = {"kv_connector": "LarderConnector", "kv_connector_module_path": "larder_kv.vllm"}
    planned = Planned(model, layers, transfer | {"kv_connector_extra_config": {"socket": "/none"}}, 32)
    planned.config.device_config.device_type = device
    with patch.object(cpu_attn, "_get_attn_isa", lambda *_: isa):
        try:
            namespace = Engine.of(planned.config, planned.plan).facts.namespace()
        except UnsupportedError as error:
            return str(error)
    return f"{namespace.revision} {namespace.kv_dtype} {namespace.layout}"


def layers(_: int) -> dict:
    """Attention of the usual size, in every layer."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(4)}
