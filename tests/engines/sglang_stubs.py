"""Lets SGLang's host side be imported and run on a machine without a GPU: import this first.

Missing packages become modules of mocks, streams and events of the CPU do nothing, and indexing replaces the kernels that copy
between device and host. The tested parts (radix cache, cache controller, host pools, storage threads) are SGLang's own.
"""

import hashlib
import importlib.abc
import importlib.machinery
import sys
import types
from unittest import mock

MISSING = (
    "IPython cutlass datasets deep_gemm distro flash_attn flashinfer gguf kernels modelscope outlines pynvml quack sgl_kernel "
    "soundfile tilelang timm torch_memory_saver triton"
).split()


class AnyClass(type):
    """Makes classes that have every requested attribute."""

    def __getattr__(cls, name):
        return made(cls, name)


class AnyModule(types.ModuleType):
    __path__ = []
    __version__ = "0"

    def __getattr__(self, name):
        return made(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: only for packages that are really missing."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


def made(owner, name):
    """A class if the name looks like a class, so that it can be subclassed and named in annotations; otherwise a mock."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    is_class = name[:1].isupper() and not name.isupper()
    value = (
        AnyClass(name, (), {"__init__": lambda self, *arguments, **named: None})
        if is_class
        else mock.MagicMock(name=name)
    )
    setattr(owner, name, value)
    return value


class Event:
    """An event that has happened already, as always on the CPU."""

    def __init__(self, *arguments, **named):
        pass

    def record(self, *arguments):
        pass

    def wait(self, *arguments):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.0


class Stream:
    def __init__(self, *arguments, **named):
        pass

    def wait_stream(self, *arguments):
        pass

    def wait_event(self, *arguments):
        pass

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def install() -> None:
    """Installs all stand-ins."""
    sys.meta_path.append(Finder())
    import torch
    from triton.runtime import driver

    driver.active.get_current_target.side_effect = RuntimeError("there is no GPU")
    torch.cpu.Event, torch.cpu.Stream = Event, Stream
    torch.cpu.stream = lambda stream: stream or Stream()
    torch.cpu.current_stream = lambda *_: Stream()
    torch.Tensor.record_stream = lambda *_: None
    from sglang.srt.mem_cache import utils as cache_utils
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    common._cuda_host_register = base._cuda_host_unregister = lambda *_, **__: None
    for module in (mha, mamba, mla):
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_all_layer_direct_lf_pf = copy_pages_out
        module.transfer_kv_per_layer_direct_pf_lf = copy_pages_in
    mha.transfer_kv_all_layer_lf_pf, mha.transfer_kv_per_layer_pf_lf = rows_out, rows_in
    mla.transfer_kv_all_layer_mla_lf_pf, mla.transfer_kv_per_layer_mla_pf_lf = layers_out, layers_in
    mha.transfer_kv_all_layer_lf_ph, mha.transfer_kv_per_layer_ph_lf = heads_out, heads_in
    try:
        cache_utils.get_native_hash([1], None, 1)
    except Exception:
        # SGLang's compiled function would need OpenSSL's headers.
        cache_utils.get_native_hash = page_hashes


def copy_rows(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_pages_out(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copies layers of rows to pages of layers: all layers of K, then all of V, to one buffer each."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for part, pages in enumerate(dst_ptrs):
        for start in range(0, len(src_indices), page_size):
            page = int(dst_indices[start]) // page_size
            rows = src_indices[start : start + page_size]
            for layer in range(layers):
                pages[page, layer] = src_ptrs[part * layers + layer][rows]


def copy_pages_in(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Copies one layer from pages of layers to rows."""
    for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
        for start in range(0, len(src_indices), page_size):
            page = int(src_indices[start]) // page_size
            layer[dst_indices[start : start + page_size]] = pages[page, layer_id]


def layers_out(src_layers, dst, src_indices, dst_indices, **_):
    """Copies layers of rows to rows of layers."""
    for number, layer in enumerate(src_layers):
        dst[dst_indices, number] = layer[src_indices]


def layers_in(src, dst, src_indices, dst_indices, layer_id, **_):
    dst[dst_indices] = src[src_indices, layer_id]


def rows_out(src_k_layers, dst_k, src_v_layers, dst_v, **which):
    layers_out(src_k_layers, dst_k, **which)
    layers_out(src_v_layers, dst_v, **which)


def rows_in(src_k, dst_k, src_v, dst_v, **which):
    layers_in(src_k, dst_k, **which)
    layers_in(src_v, dst_v, **which)


def heads_out(src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, page_size, **_):
    """Copies layers of rows to pages of heads; each head has rows of layers."""
    for layers, pages in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for number, layer in enumerate(layers):
            pages[dst_indices // page_size, :, dst_indices % page_size, number] = layer[src_indices]


def heads_in(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, page_size, **_):
    for pages, layer in ((src_k, dst_k), (src_v, dst_v)):
        layer[dst_indices] = pages[src_indices // page_size, :, src_indices % page_size, layer_id]


def page_hashes(tokens, prior, page_size=None):
    """The hashes of SGLang's compiled function: each page's hash covers the page before it and its tokens."""
    raw = tokens.raw_token_ids() if hasattr(tokens, "raw_token_ids") else getattr(tokens, "token_ids", tokens)
    raw = list(raw)[: len(tokens)]

    def one(before, part):
        return hashlib.sha256((before or b"") + b"".join(int(token).to_bytes(4, "little") for token in part)).digest()

    if page_size is None:
        return one(prior, raw).hex()
    hashes = []
    for start in range(0, len(raw), page_size):
        prior = one(prior, raw[start : start + page_size])
        hashes.append(prior.hex())
    return hashes
