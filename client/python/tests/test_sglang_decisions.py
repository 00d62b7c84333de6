"""The decisions of SGLang's storage, without SGLang."""

import dataclasses
import importlib
import os
import shutil
from types import SimpleNamespace

import pytest
from absent import absent_packages
from larder_kv import identity
from larder_kv.lmcache.blocks import digest
from larder_kv.settings import NodeSettings, UnsupportedError
from larder_kv.sglang.facts import Facts, PoolFacts
from larder_kv.sglang.hits import PoolPages, fold, leading
from larder_kv.sglang.priorities import Priorities, _heard, inserted

YES, NO = True, False
FACTS = Facts("model", "", 64, "vector", (1, 2), (0, 1), (0, 1), {"quantization": None})
POOL = PoolFacts("kv", "MHATokenToKVPoolHost", "page_first", "bfloat16", (4_096, 4_096), False)


def test_the_kv_alone_is_restored_to_its_last_page():
    assert fold(3, []) == fold(3, ()) and fold(3, []).pages == 3
    assert fold(3, []).restorable == [1, 2, 3] and fold(3, []).of_pool == {"kv": 3}
    assert fold(0, []).pages == 0 and fold(0, []).of_pool == {}
    assert leading([]) == 0 and leading([YES, NO, YES]) == 1


def test_a_pool_that_every_page_needs_cuts_at_its_first_hole():
    hits = fold(4, [PoolPages("indexer", "all_pages", [YES, YES, NO, YES])])
    assert (hits.pages, hits.restorable, hits.of_pool) == (2, [1, 2], {"kv": 4, "indexer": 2})


def test_a_state_is_restored_where_it_was_saved_and_nowhere_else():
    hits = fold(5, [PoolPages("mamba", "trailing_pages", [NO, YES, NO, YES, NO])])
    assert (hits.pages, hits.restorable, hits.of_pool) == (4, [2, 4], {"kv": 5, "mamba": 4})
    assert fold(5, [PoolPages("mamba", "trailing_pages", [NO] * 5)]).pages == 0


def test_a_window_needs_its_last_pages_or_all_where_there_are_fewer():
    hits = fold(6, [PoolPages("swa", "trailing_pages", [YES, NO, YES, YES, YES, NO], trailing=2)])
    assert hits.restorable == [1, 4, 5]
    assert fold(2, [PoolPages("swa", "trailing_pages", [YES, YES], trailing=8)]).restorable == [1, 2]


def test_all_pools_must_agree_on_a_prefix():
    pools = [
        PoolPages("indexer", "all_pages", [YES, YES, YES, NO]),
        PoolPages("mamba", "trailing_pages", [NO, YES, NO, YES]),
    ]
    hits = fold(4, pools)
    assert (hits.pages, hits.restorable) == (2, [2])
    assert hits.of_pool == {"kv": 4, "indexer": 3, "mamba": 4}


def test_block_groups_say_how_far_they_go_and_cut_nothing():
    group = {"policy": "block_groups", "block_pages": 2, "group_pages": 1}
    hits = fold(5, [PoolPages("packed", has=[YES, NO, YES, NO, NO], **group)])
    assert (hits.pages, hits.of_pool) == (5, {"kv": 5, "packed": 4})
    assert fold(5, [PoolPages("packed", has=[NO] * 5, **group)]).of_pool == {"kv": 5}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "2"},
        {"page_tokens": 32},
        {"hash_vector": "other"},
        {"tp": (0, 2)},
        {"tp": (1, 4)},
        {"pp": (1, 2)},
        {"cp": (1, 2)},
        {"details": {"quantization": "fp8"}},
    ],
)
def test_engines_that_differ_never_share(change):
    assert dataclasses.replace(FACTS, **change).namespace(POOL) != FACTS.namespace(POOL)


@pytest.mark.parametrize(
    "change",
    [{"name": "mamba"}, {"kind": "other"}, {"layout": "page_head"}, {"dtype": "float16"}, {"sizes": (2_048, 6_144)}],
)
def test_pools_that_differ_never_share(change):
    other = FACTS.namespace(dataclasses.replace(POOL, **change))
    assert other != FACTS.namespace(POOL) and other.flat


def test_ranks_of_any_number_share_what_is_the_same_on_all_of_them():
    replicated = dataclasses.replace(POOL, is_replicated=True)
    alone = dataclasses.replace(FACTS, tp=(0, 1))
    assert FACTS.namespace(replicated) == alone.namespace(replicated)


def test_keys_of_lmcache_differ_wherever_their_fields_do():
    assert digest("a", "bc") != digest("ab", "c") and digest("a", b"") != digest("a")
    assert len(digest(b"x", 1, "salt")) == 32


def test_the_highest_priority_of_a_page_counts_and_the_oldest_pages_are_forgotten():
    priorities = Priorities(most=3)
    priorities.note(["a", "b"], 2)
    priorities.note(["b"], -1)
    priorities.note(["c"], 1_000)
    assert priorities.of(["a", "b", "c", "d"]) == [2, 2, 127, 0]
    priorities.note(["d"], -1_000)
    assert priorities.of(["a", "b", "c", "d"]) == [0, 2, 127, -128]


def test_a_storage_hears_the_priorities_of_what_its_own_cache_inserts():
    class Storage:
        pass

    storage, other = Storage(), Storage()
    priorities, others = Priorities(), Priorities()
    _heard[storage], _heard[other] = priorities, others
    tree = SimpleNamespace(get_prefix_hash_values=lambda node: ["a", "b"], get_hash_values=lambda node: [f"{node}"])
    cache = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=storage), tree_core=tree)
    inserted(SimpleNamespace(last_device_node=7), cache, SimpleNamespace(priority=3))
    inserted(SimpleNamespace(last_device_node=8), cache, SimpleNamespace(priority=0))
    inserted(SimpleNamespace(last_device_node=None), cache, SimpleNamespace(priority=9))
    assert priorities.of(["a", "b", "7", "8"]) == [3, 3, 3, 0] and others.of(["a"]) == [0]


def test_a_tree_that_has_changed_harms_no_insertion(caplog):
    class Storage:
        pass

    storage = Storage()
    _heard[storage] = Priorities()
    cache = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=storage), tree_core=object())
    for _ in range(2):
        inserted(SimpleNamespace(last_device_node=7), cache, SimpleNamespace(priority=3))
    assert caplog.text.count("the priorities of requests are not used from now on") == 1, "it is said once"


def test_a_storage_that_was_cleared_has_none_of_its_pages(monkeypatch, tmp_path):
    """SGLang clears its storage when the weights have changed."""
    monkeypatch.setattr("larder_kv.sglang.priorities._is_hooked", True)
    extra = {"interface_v1": 1, "socket": str(tmp_path / "absent"), "reconnect_seconds": 0.01}
    labels = {"model_name": "model", "tp_rank": 0, "pp_rank": 0}
    stored: set[bytes] = set()
    with absent_packages("sglang", "torch"):
        storage_class = importlib.import_module("larder_kv.sglang.storage").LarderStorage
        storage = storage_class(SimpleNamespace(extra_config=extra, enable_storage_metrics=False, **labels), {})
        storage._pools, storage._specs = {"kv": POOL}, {"kv": FACTS.namespace(POOL)}
        storage._keyed = SimpleNamespace(exists=lambda _, keys: [stored.add(key) or len(key) == 32 for key in keys])
        pages = ["ab" * 32, "cd" * 32]
        assert storage.batch_exists(pages) == 2 and stored == set(map(bytes.fromhex, pages))
        before = set(stored)
        storage.clear()
        assert storage.batch_exists(pages) == 2
        after = stored - before
        assert len(after) == 2
        storage.batch_exists(pages)
        storage.clear()
        storage.batch_exists(pages)
        assert len(stored) == 6, "each clearing begins with other names, which then stay"
        storage._link.close()


def test_a_pools_kind_tells_the_order_of_pages_on_the_device():
    class Host:
        device_pool = SimpleNamespace(kv_cache_layout="nhd")

    with absent_packages("torch"):
        kind_of = importlib.import_module("larder_kv.sglang.pools").kind_of
        before = kind_of(Host())
        Host.device_pool.kv_cache_layout = "hnd"
        assert before != kind_of(Host()) and "Host" in before
        Host.device_pool = None
        assert kind_of(Host()) == "Host"


def one_rank() -> SimpleNamespace:
    """SGLang's configuration of a storage."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    return SimpleNamespace(should_split_heads=False, model_name="model", **ranks)


def test_an_adapter_that_was_replaced_at_its_path_is_another_one(monkeypatch, tmp_path):
    settings = NodeSettings(socket="/nowhere", model_revision="3")
    with absent_packages("sglang"):
        engine = importlib.import_module("larder_kv.sglang.engine")
        engine.get_hash_str = lambda *_: "a hash"

        def namespace_of(adapters: list[tuple[str, str]] | None, modules: set[str] | None = None) -> object:
            refs = [SimpleNamespace(lora_name=name, lora_path=path) for name, path in adapters] if adapters is not None else None
            arguments = SimpleNamespace(model_path="example/model", revision=None, lora_target_modules=modules)
            monkeypatch.setattr(engine, "server_arguments", lambda: arguments)
            monkeypatch.setattr(engine, "adapters_at_start", lambda: refs or ())
            return engine.read(one_rank(), 16, settings).namespace(POOL)

        adapters = [("sql", str(tmp_path)), ("chat", "example/adapter")]
        (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
        (tmp_path / "adapter_model.safetensors").write_bytes(b"old")
        seen = [namespace_of(None), namespace_of(adapters), namespace_of(adapters, {"o_proj", "qkv_proj"})]
        assert namespace_of([]) == seen[0] and namespace_of(adapters[::-1]) == seen[1], "their order tells nothing"
        (tmp_path / "adapter_model.safetensors").write_bytes(b"new")
        seen.append(namespace_of(adapters))
        (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
        seen.append(namespace_of(adapters))
        assert all(seen.count(one) == 1 for one in seen)


def test_engines_that_leave_rows_of_pages_unwritten_share_with_their_own_kind_alone(monkeypatch):
    features = SimpleNamespace(enable_decoder_swa_bounded_replay=False)
    with absent_packages("sglang"):
        engine = importlib.import_module("larder_kv.sglang.engine")
        engine.get_hash_str = lambda *_: "a hash"
        context = importlib.import_module("sglang.srt.runtime_context")
        monkeypatch.setattr(context, "get_server_args", lambda: SimpleNamespace(model_path="example/model", revision=None))

        def namespace() -> object:
            return engine.read(one_rank(), 16, NodeSettings(socket="/nowhere", model_revision="3")).namespace(POOL)

        before = namespace()
        monkeypatch.setattr(context, "get_exec", lambda: SimpleNamespace(features=features))
        assert namespace() == before, "the namespaces of other engines stay"
        features.enable_decoder_swa_bounded_replay = True
        assert namespace() != before


def test_arguments_that_change_the_weights_separate_engines(monkeypatch, tmp_path):
    (tmp_path / "scales.json").write_text("1.0")
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/model.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with absent_packages("sglang"):
        engine = importlib.import_module("larder_kv.sglang.engine")
        engine.get_hash_str = lambda *_: "a hash"

        def namespace_of(**arguments: object) -> object:
            given = SimpleNamespace(**{"model_path": str(tmp_path), "kt_method": "AMXINT4", "load_format": "auto", **arguments})
            monkeypatch.setattr(engine, "server_arguments", lambda: given)
            return engine.read(one_rank(), 16, NodeSettings(socket="/nowhere")).namespace(POOL)

        experts, scales = str(tmp_path / "experts"), str(tmp_path / "scales.json")
        seen = [
            namespace_of(),
            namespace_of(load_format="flash_rl"),
            namespace_of(forward_hooks=[{"name": "steer"}]),
            namespace_of(enforce_shared_experts_fusion=True),
            namespace_of(speculative_draft_load_format="dummy"),
            namespace_of(kt_weight_path=experts),
            namespace_of(kt_weight_path=experts, kt_num_gpu_experts=8),
            namespace_of(modelopt_checkpoint_restore_path=experts),
            namespace_of(quantization_param_path=scales),
        ]
        assert namespace_of(load_format="safetensors", kt_num_gpu_experts=0) == seen[0], "the same weights in another way"
        (tmp_path / "experts/model.safetensors").write_bytes(b"new")
        (tmp_path / "scales.json").write_text("2.0")
        seen += [namespace_of(kt_weight_path=experts), namespace_of(quantization_param_path=scales)]
        assert all(seen.count(one) == 1 for one in seen), [seen.count(one) for one in seen]


def test_engines_whose_models_branch_has_moved_never_share(monkeypatch, tmp_path):
    cached = tmp_path / "models--example--model"
    (cached / "refs").mkdir(parents=True)
    monkeypatch.setattr(identity, "hub_cache", lambda: tmp_path)
    config, settings = one_rank(), NodeSettings(socket="/nowhere")
    with absent_packages("sglang"):
        engine = importlib.import_module("larder_kv.sglang.engine")
        engine.get_hash_str = lambda *_: "a hash"
        engine.server_arguments = lambda: SimpleNamespace(model_path="example/model", revision=None)

        def facts_at(commit: str) -> Facts:
            (cached / "snapshots" / commit).mkdir(parents=True)
            (cached / "refs/main").write_text(commit)
            # An earlier process has downloaded the snapshot.
            os.utime(cached / "refs/main", (1, 1))
            return engine.read(config, 16, settings)

        before, after = facts_at("11aa"), facts_at("22bb")
        assert before.namespace(POOL) != after.namespace(POOL)
        (cached / "refs/main").unlink()
        with pytest.raises(UnsupportedError, match="model_revision"):
            engine.read(config, 16, settings)
        named = dataclasses.replace(settings, model_revision="3")
        real = engine.read(config, 16, named)
        assert "model_path weights" not in real.details
        # Random weights have the names of real ones.
        engine.server_arguments = lambda: SimpleNamespace(model_path="example/model", revision=None, load_format="dummy")
        assert engine.read(config, 16, named).namespace(POOL) != real.namespace(POOL)
        assert engine.read(config, 16, settings).details["is_dummy"], "they need no name"
        arguments = SimpleNamespace(model_path="example/model", revision=None, download_dir=str(tmp_path / "other"))
        engine.server_arguments = lambda: arguments
        with pytest.raises(UnsupportedError, match="model_revision"):
            engine.read(config, 16, settings)
        shutil.copytree(cached, tmp_path / "other" / cached.name)
        (tmp_path / "other" / cached.name / "refs/main").write_text("11aa")
        os.utime(tmp_path / "other" / cached.name / "refs/main", (1, 1))
        assert engine.read(config, 16, settings).details["model_path weights"] == "commit 11aa"
