"""The kinds of objects that LMCache's server stores, without LMCache."""

import importlib
import queue
from types import SimpleNamespace

import pytest
from absent import absent_packages


class Dtype:
    itemsize = 2

    def __str__(self) -> str:
        return "torch.bfloat16"


class Server:
    """The objects of LMCache's server, and its adapter at an absent node."""

    def __init__(self, l2, folder):
        self.ended = queue.Queue()
        l2.create_event_notifier = lambda: SimpleNamespace(notify=lambda: self.ended.put(None), close=lambda: None)
        l2.L2StoreResult = lambda is_successful, size: is_successful
        self.adapter = l2.LarderL2Adapter({"socket": str(folder / "absent"), "window_bytes": 1_000, "reconnect_seconds": 60.0})

    def store(self, *elements: int) -> bool:
        """Stores objects with these numbers of elements, of two bytes each, and returns whether all are stored."""
        fields = {"model_name": "model", "kv_rank": 0, "object_group_id": 0, "cache_salt": ""}
        keys = [SimpleNamespace(chunk_hash=bytes([number]), **fields) for number in range(len(elements))]
        self.adapter.submit_store_task(keys, [self._object(one) for one in elements])
        self.ended.get(timeout=30)
        (is_successful,) = self.adapter.pop_completed_store_tasks().values()
        return is_successful

    def count(self, name: str) -> int:
        return self.adapter.counts.now()[name]

    def _object(self, elements: int) -> SimpleNamespace:
        memory = bytes(2 * elements)
        return SimpleNamespace(
            metadata=None,
            byte_array=memory,
            get_shape=lambda: (elements,),
            get_dtype=Dtype,
            get_size=lambda: len(memory),
        )


@pytest.fixture
def server(tmp_path):
    with absent_packages("lmcache"):
        running = Server(importlib.import_module("larder_kv.lmcache.l2"), tmp_path)
        yield running
        running.adapter.close()


def test_objects_larger_than_the_window_are_shed_and_one_warning_says_what_to_set(server, caplog):
    for _ in range(2):
        assert not server.store(501, 501, 500)
    assert server.count("shed_keys") == 6 and server.count("without_node") == 2, "the third object is asked of the node"
    (warning,) = [record.getMessage() for record in caplog.records if "not stored" in record.getMessage()]
    assert "model@(501,):bfloat16" in warning and "set `window_bytes` to 2004 or more" in warning


def test_kinds_beyond_the_limit_are_shed_and_each_is_told_once(server, caplog):
    for _ in range(2):
        assert not server.store(*range(1, 19))
    assert server.count("shed_keys") == 36 and server.count("without_node") == 32
    warnings = [record.getMessage() for record in caplog.records if "16 kinds are in use" in record.getMessage()]
    assert [f"model@({number},):" in warning for number, warning in zip((17, 18), warnings, strict=True)] == [True, True]


def test_a_server_with_ever_new_kinds_warns_of_some(server, caplog):
    for elements in range(501, 601):
        server.store(elements)
    assert caplog.text.count("not stored") == 16 and server.count("shed_keys") == 100


def test_a_load_gives_its_chunks_back_if_no_further_one_can_be_made():
    """Each chunk that nobody gives back stays taken from LMCache's memory."""
    chunks, given_back = [], []

    def allocate(*_, **__):
        if len(chunks) == 2:
            raise MemoryError("no more memory")
        number = len(chunks)
        chunks.append(SimpleNamespace(ref_count_down=lambda: given_back.append(number)))
        return chunks[-1]

    with absent_packages("lmcache"):
        connector_class = importlib.import_module("larder_kv.lmcache.connector").LarderConnector
        connector = object.__new__(connector_class)
        connector._allocator = SimpleNamespace(allocate=allocate)
        connector.meta_shapes = connector.meta_dtypes = connector.meta_fmt = None
        with pytest.raises(MemoryError):
            connector._load_now(["a", "b", "c"])
    assert given_back == [0, 1]


def test_engines_whose_devices_pack_pages_differently_share_nothing(monkeypatch):
    fields = {"model": "m", "revision": "", "dtype": "bfloat16", "layout": "KV", "hashing": "h", "tokens": 256, "block_bytes": 64}
    seen = []
    with absent_packages("lmcache"):
        blocks = importlib.import_module("larder_kv.lmcache.blocks")
        for device, abilities in (("cuda", ""), ("cpu", "x86_64 amx_tile"), ("cpu", "x86_64 avx512_f")):
            monkeypatch.setattr(importlib.import_module("lmcache"), "torch_device_type", device, raising=False)
            monkeypatch.setattr(blocks, "abilities_of_cpu", lambda able=abilities: able)
            seen.append(blocks.namespace(**fields).layout)
    assert len(set(seen)) == 3


def test_keys_with_other_tags_are_never_the_same():
    """LMCache's text of a key joins names and values of tags by signs that may be in them."""

    def key(*tags: tuple[str, str]) -> SimpleNamespace:
        text = "@".join(["model", "1", "0", "ab", "bfloat16", *(f"{name}%{value}" for name, value in tags)])
        fields = {"model_name": "model", "world_size": 1, "worker_id": 0, "chunk_hash_hex": "ab", "dtype": Dtype()}
        return SimpleNamespace(**fields, tags=tags or None, to_string=lambda: text)

    with absent_packages("lmcache"):
        connector = importlib.import_module("larder_kv.lmcache.connector")
        keys = [key(), key(("a", "1@b%2")), key(("a", "1"), ("b", "2")), key(("a", "1%2")), key(("a%1", "2")), key(("a@b", "2"))]
        assert keys[1].to_string() == keys[2].to_string()
        assert len(set(map(connector.digest_of, keys))) == len(keys)
        for one in (keys[0], keys[2]):
            assert connector.digest_of(one) == connector.digest(one.to_string()), "chunks of earlier releases are found"
