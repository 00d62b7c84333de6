"""Moves recurrent states from block to block on CPUs, where vLLM's own kernel for that lacks Triton."""

import ctypes


def install() -> None:
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = move


def move(sources, targets, sizes) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
