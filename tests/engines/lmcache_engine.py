"""LMCache's engines and second-level adapters in this process, controlled by JSON lines. Each line names one of them and a
request; each answer is a line on the original standard output. LMCache's own output goes elsewhere."""

import hashlib
import json
import os
import select
import sys
import traceback

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ.update(
    LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING", HF_HUB_OFFLINE="1"
)

import torch  # noqa: E402
from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402

CHUNK, LAYERS, HEADS, HEAD_SIZE = 32, 4, 2, 64


class Rows(GPUConnectorInterface):
    """The engine's KV: in each layer, one row for each token of its only prompt."""

    def __init__(self):
        self.kv = torch.zeros(2, LAYERS, 4_096, HEADS * HEAD_SIZE, dtype=torch.bfloat16)

    def to_gpu(self, memory_obj, start, end, **_):
        self.kv[:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj, start, end, **_):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs, starts, ends, **_):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*one)

    def batched_from_gpu(self, memory_objs, starts, ends, **_):
        for one in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*one)

    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD_SIZE])

    def digest(self, tokens: int) -> str:
        part = self.kv[:, :, :tokens].contiguous().view(torch.uint8)
        return hashlib.sha256(part.numpy().tobytes()).hexdigest()


class Engine:
    """An LMCache engine with Larder behind it, and no memory of its own that could answer."""

    def __init__(self, name: str, plugin: dict, **options):
        self.name, self.rows = name, Rows()
        where = "remote_storage_plugin.larder"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            max_local_cpu_size=0.1,
            remote_storage_plugins=["larder"],
            extra_config={
                f"{where}.module_path": "larder_kv.lmcache",
                f"{where}.class_name": "LarderAdapter",
                **{f"{where}.{key}": value for key, value in plugin.items()},
            },
            **({"pre_caching_hash_algorithm": "sha256_cbor"} | options),
        )
        shape = (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE)
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=CHUNK)
        self.engine = LMCacheEngineBuilder.get_or_create(
            name, config, metadata, self.rows, lambda tensor, source: None, lambda one, source: one
        )
        self.engine.post_init()
        backends = self.engine.storage_manager.storage_backends.values()
        remote = next((backend for backend in backends if hasattr(backend, "connection")), None)
        if remote is None:
            raise ValueError("LMCache goes on without Larder")
        self.larder = remote.connection.getWrappedConnector()

    def store(self, tokens: list[int]) -> dict:
        random = torch.Generator().manual_seed(tokens[0])
        part = self.rows.kv[:, :, : len(tokens)]
        part.copy_(torch.randn(part.shape, generator=random).to(part.dtype))
        self.engine.store(torch.tensor(tokens))
        return {"digest": self.rows.digest(len(tokens) // CHUNK * CHUNK)}

    def retrieve(self, tokens: list[int]) -> dict:
        self.rows.kv.zero_()
        found = int(self.engine.retrieve(torch.tensor(tokens)).sum())
        return {"retrieved": found, "digest": self.rows.digest(len(tokens) // CHUNK * CHUNK)}

    def lookup(self, tokens: list[int]) -> dict:
        return {"found": self.engine.lookup(torch.tensor(tokens))}

    def counts(self) -> dict:
        return self.larder.counts.now()

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)


class Server:
    """The objects that LMCache's server has for an adapter: objects of two shapes, tasks, and descriptors to wait for."""

    def __init__(self, params: dict):
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        config = {"module_path": "larder_kv.lmcache", "class_name": "LarderL2Adapter", "adapter_params": params}
        self.adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(config), None)

    def store(self, names: list[str], salt: str = "") -> dict:
        keys, objects = self._objects(names, salt, fill=True)
        self._run(self.adapter.submit_store_task(keys, objects), self.adapter.get_store_event_fd())
        (result,) = self.adapter.pop_completed_store_tasks().values()
        return {"stored": result.is_successful(), "digest": digests(objects)}

    def lookup(self, names: list[str], salt: str = "") -> dict:
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        keys, objects = self._objects(names, salt)
        layouts = {
            key.object_group_id: MemoryLayoutDesc([one.get_shape()], [one.get_dtype()])
            for key, one in zip(keys, objects, strict=True)
        }
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        self._run(task, self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None, "a result is told twice"
        self.adapter.submit_unlock(keys)
        return {"found": [found.test(number) for number in range(len(keys))]}

    def load(self, names: list[str], salt: str = "") -> dict:
        keys, objects = self._objects(names, salt)
        task = self.adapter.submit_load_task(keys, objects)
        self._run(task, self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        return {"loaded": [loaded.test(number) for number in range(len(keys))], "digest": digests(objects)}

    def counts(self) -> dict:
        return self.adapter.counts.now()

    def close(self) -> None:
        self.adapter.close()

    def _objects(self, names: list[str], salt: str, fill: bool = False):
        """Objects of these names; those with odd numbers are in a group of larger objects."""
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        keys, objects = [], []
        for name in names:
            group = int(name) % 2
            shape = torch.Size([2, LAYERS, CHUNK * (1 + group), HEADS * HEAD_SIZE])
            raw = torch.zeros(shape.numel() * 2, dtype=torch.uint8)
            if fill:
                raw.random_(0, 256, generator=torch.Generator().manual_seed(int(name)))
            about = MemoryObjMetadata(shape, torch.bfloat16, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD)
            hashed = hashlib.sha256(name.encode()).digest()
            keys.append(ObjectKey(hashed, "model", ObjectKey.ComputeKVRank(1, 0, 1, 0), group, salt))
            objects.append(TensorMemoryObj(raw, about, None))
        return keys, objects

    def _run(self, task, descriptor: int) -> None:
        assert select.select([descriptor], [], [], 60)[0], "the task did not end in time"
        os.eventfd_read(descriptor)


def digests(objects) -> list[str]:
    return [hashlib.sha256(bytes(one.byte_array)).hexdigest() for one in objects]


def main() -> None:
    known = {}
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        do, name = asked.pop("do"), asked.pop("name")
        if do in ("engine", "server"):
            try:
                known[name] = Engine(name, **asked) if do == "engine" else Server(**asked)
            except ValueError as error:
                say(refused=str(error))
                continue
            say()
        elif do == "close":
            known.pop(name).close()
            say()
        else:
            say(**getattr(known[name], do)(**asked), counts=known[name].counts())


def say(**answer) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Some of LMCache's threads would keep the process alive.
        os._exit(code)
