"""The connector's decisions without vLLM: keys, plans, settings."""

import hashlib
import importlib
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from absent import absent_packages
from larder_kv import identity
from larder_kv.identity import shortened, weights_digest, weights_of
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.counts import COUNTERS, Counts, summed
from larder_kv.vllm.facts import Facts
from larder_kv.vllm.hashes import block_hash, checked_seed, none_hash
from larder_kv.vllm.plan import (
    MAX_CHUNKS,
    Garbage,
    Load,
    Saved,
    Shape,
    failed_pages,
    plan_load,
    plan_save,
    tail,
    tokens_by_tier,
)
from larder_kv.vllm.ranks import Ranks
from larder_kv.vllm.settings import Settings

SHAPE = Shape(chunk_tokens=64, block_tokens=16)
HASHES = [bytes([number]) * 32 for number in range(40)]
TABLE = list(range(100, 140))


def test_block_hashes_are_vllms():
    prompt = [(i * i * 7 + i * 13) % 1000 + 3 for i in range(32)]
    root = none_hash("vllm-none-hash")
    assert root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    assert len(block_hash(root, prompt)) == 32
    assert block_hash(root, prompt) != block_hash(block_hash(root, prompt), prompt)


def engine_hash(asked):
    """The hash of a seed or a block by vLLM's sha256_cbor, written by hand for the test vector."""
    if isinstance(asked, str):
        return none_hash(asked)
    parent, tokens, extra = asked
    assert extra is None
    return block_hash(parent, tokens)


def test_a_hash_that_differs_from_the_vector_is_refused():
    assert checked_seed("sha256_cbor", "0", engine_hash).startswith("0:")
    assert checked_seed("sha256_cbor", "0", engine_hash) != checked_seed("sha256_cbor", "1", engine_hash)
    with pytest.raises(UnsupportedError, match="differently"):
        checked_seed("sha256_cbor", "0", lambda _: bytes(32))


def test_seeds_that_each_process_draws_are_refused():
    with pytest.raises(UnsupportedError, match="each process"):
        checked_seed("xxhash", "0", engine_hash)
    with pytest.raises(UnsupportedError, match="fixed seed"):
        checked_seed("sha256", "random", engine_hash)


def test_the_hash_of_a_chunk_is_that_of_its_last_block():
    assert SHAPE.chunk_hashes(HASHES[:11]) == [HASHES[3], HASHES[7]]
    assert SHAPE.chunk_hashes(HASHES, 1) == [HASHES[3]]


def test_at_least_one_token_is_computed():
    assert [SHAPE.usable_chunks(tokens) for tokens in (0, 1, 64, 65, 128, 129)] == [0, 0, 0, 1, 1, 2]
    assert Shape(32, 32).usable_chunks(200) == 6
    assert SHAPE.usable_chunks(10**9) == MAX_CHUNKS


def test_a_load_begins_behind_what_the_engine_has_also_within_a_chunk():
    # 96 tokens are computed: the second chunk is loaded from its third block on, and the third chunk as a whole.
    load = plan_load(SHAPE, "r", SHAPE.chunk_hashes(HASHES), 96, 96, TABLE)
    assert (load.first_page, load.pages) == (6, [106, 107, 108, 109, 110, 111])
    assert load.hashes == [HASHES[3], HASHES[7], HASHES[11]]
    assert tail(load, SHAPE) == (1, 2)


def test_blocks_of_chunks_that_do_not_come_fail():
    load = plan_load(SHAPE, "r", SHAPE.chunk_hashes(HASHES), 96, 96, TABLE)
    assert failed_pages(load, SHAPE, 2) == []
    assert failed_pages(load, SHAPE, 1) == [108, 109, 110, 111]
    assert failed_pages(load, SHAPE, 0) == load.pages


def test_chunks_are_saved_once_when_they_are_complete():
    saved = Saved()
    assert plan_save(SHAPE, "r", saved, HASHES, 63, TABLE) is None and not saved.in_flight
    first = plan_save(SHAPE, "r", saved, HASHES, 130, TABLE)
    assert (first.first_chunk, first.hashes, first.pages) == (0, [HASHES[3], HASHES[7]], TABLE[:8])
    assert saved.in_flight
    assert plan_save(SHAPE, "r", saved, HASHES, 191, TABLE) is None
    second = plan_save(SHAPE, "r", saved, HASHES, 192, TABLE)
    assert (second.first_chunk, second.hashes, second.pages) == (2, [HASHES[3], HASHES[7], HASHES[11]], TABLE[8:12])


def test_a_chunk_whose_hash_is_not_known_yet_waits():
    # A token that was just computed has no hash until it is sampled.
    assert plan_save(SHAPE, "r", Saved(), HASHES[:3], 64, TABLE) is None


def test_what_was_computed_from_blocks_that_did_not_come_is_not_saved():
    garbage = Garbage()
    assert garbage.may_save(-1)
    garbage.load_failed(7)
    # Steps 7 and 8 were planned before the scheduler heard of the failure. When it heard, 8 was the last planned step.
    assert not garbage.may_save(-1) and garbage.may_save(8)
    garbage.load_failed(9)
    assert not garbage.may_save(8) and garbage.may_save(9)


def test_tokens_are_counted_by_tier_from_where_the_load_begins():
    spans = [(0, 2, "host"), (2, 5, "peer")]
    assert tokens_by_tier(spans, SHAPE, 96, 96) == {"host": 32, "peer": 64}
    assert tokens_by_tier(spans, SHAPE, 128, 64) == {"peer": 64}


def test_a_chunk_is_a_whole_number_of_blocks():
    assert Settings.parse({"socket": "/s"}).chunk_for(16) == 256
    assert Settings.parse({"socket": "/s"}).chunk_for(48) == 240
    assert Settings.parse({"socket": "/s"}).chunk_for(512) == 512
    assert Settings.parse({"socket": "/s", "chunk_tokens": 32}).chunk_for(32) == 32
    with pytest.raises(UnsupportedError, match="multiple of the block size"):
        Settings.parse({"socket": "/s", "chunk_tokens": 40}).chunk_for(16)
    chosen = {"timeout_seconds": 3, "chunk_tokens": None, "events": "[::1]:9100", "prefetch_seconds": 0}
    settings = Settings.parse({"socket": "/s", **chosen})
    assert (settings.timeout_seconds, settings.chunk_tokens) == (3, None)


def facts(**changes) -> Facts:
    fields = {
        "model": "m",
        "revision": "r",
        "kv_dtype": "bfloat16",
        "layout": "LBHNC",
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "s:1",
        "chunk_tokens": 64,
        "block_tokens": 16,
        "ranks": Ranks(tensor=2),
        "layers": 3,
        "page_bytes": 1_000,
        "details": {"quantization": None},
    }
    return Facts(**(fields | changes))


def test_whatever_changes_the_bytes_changes_the_namespace(session):
    changes = [
        {},
        {"model": "n"},
        {"revision": "q"},
        {"kv_dtype": "fp8"},
        {"layout": "BLHNC"},
        {"hash_algorithm": "sha256"},
        {"hash_seed": "s:2"},
        {"chunk_tokens": 128},
        {"block_tokens": 32},
        {"ranks": Ranks(tensor=4)},
        {"ranks": Ranks(tensor=2, replicas=2)},
        {"ranks": Ranks(tensor=2, pipeline=2)},
        {"ranks": Ranks(tensor=2, decode_context=2)},
        {"layers": 4},
        {"page_bytes": 2_000},
        {"details": {"quantization": "awq"}},
    ]
    fingerprints = {session.register(facts(**change).namespace()).fingerprint for change in changes}
    assert len(fingerprints) == len(changes)
    assert facts().namespace().pools[0].layer_bytes == 4_000
    assert facts(ranks=Ranks(tensor=2, prefill_context=2)).namespace() == facts().namespace()


def test_long_names_are_told_apart():
    long = "a" * 300
    assert len(shortened(long).encode()) <= 256 and shortened(long) != shortened("b" + long)
    assert shortened("short") == "short"


def test_weights_in_folders_of_one_name_are_told_apart(tmp_path):
    weights = tmp_path / "model.safetensors"
    with pytest.raises(UnsupportedError, match="no weights"):
        weights_digest(tmp_path)
    weights.write_bytes(bytes(100_000))
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    weights.write_bytes(bytes(99_999) + b"1")
    assert weights_digest(tmp_path) != before


def test_equal_weights_under_other_configurations_are_told_apart(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    seen = {weights_digest(tmp_path)}
    for name in ("config.json", "params.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).write_text('{"rope_scaling": null}')
        seen.add(weights_digest(tmp_path))
        (tmp_path / name).write_text('{"rope_scaling": 4}')
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 9
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{}")
    assert weights_digest(tmp_path) in seen, "these files change no KV"


@pytest.mark.parametrize("start", range(1, 1_000, 90))
def test_weights_that_differ_in_one_matrix_are_told_apart(tmp_path, start):
    """As those of a model of which a few matrices were trained further: their files have the same names and sizes."""
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(1_000 << 20)
    before = weights_digest(tmp_path)
    with weights.open("r+b") as file:
        file.seek((start << 20) + 12_345)
        file.write(b"1" * (4 << 20))
    assert weights_digest(tmp_path) != before


def test_counts_are_taken_once():
    counts = Counts()
    counts.add("loads")
    counts.add("loads", 2)
    counts.add("failed_blocks", 0)
    assert counts.take() == {"loads": 3} and counts.take() == {}
    assert summed({"loads": 1}, {"loads": 2, "lookups": 1}) == {"loads": 3, "lookups": 1}
    with pytest.raises(KeyError):
        counts.add("whatever")
    assert all(name.isidentifier() for name in COUNTERS)


def test_loads_and_hashes_are_plain_values():
    assert Load("r", [], 0, []) == Load("r", [], 0, [])
    assert hashlib.sha256(b"").digest() != none_hash("")


class Hub:
    """A host's cache of the Hugging Face Hub."""

    def __init__(self, folder):
        self.model = folder / "models--example--model"

    def download(self, commit: str, *, is_earlier: bool = True, **refs: str) -> None:
        """Adds a snapshot, as a process that ran earlier than this one, or runs now."""
        (self.model / "snapshots" / commit).mkdir(parents=True)
        (self.model / "refs").mkdir(exist_ok=True)
        for name, of in refs.items():
            (self.model / "refs" / name).write_text(of)
            if is_earlier:
                os.utime(self.model / "refs" / name, (1, 1))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "hub_cache", lambda: tmp_path)
    return Hub(tmp_path)


def test_the_weights_of_a_model_of_the_hub_are_told_apart_by_their_commit(hub):
    with pytest.raises(UnsupportedError, match="model_revision"):
        weights_of("example/model", "main")
    hub.download("11aa", main="11aa", v1="11aa")
    first = weights_of("example/model", "main")
    assert [weights_of("example/model", revision) for revision in ("v1", "11aa", None)] == [first] * 3
    hub.download("22bb", main="22bb")
    assert weights_of("example/model", "main") != first, "the branch has moved on"
    assert weights_of("example/model", "v1") == first
    for unknown in (None, "v9", "../main"):
        with pytest.raises(UnsupportedError, match="model_revision"):
            weights_of("example/model", unknown)


def test_a_revision_that_moves_while_an_engine_starts_names_no_weights(hub):
    hub.download("11aa", is_earlier=False, main="11aa")
    assert weights_of("example/model", "main") == "commit 11aa", "the engine's own first download"
    hub.download("22bb", is_earlier=False, main="22bb")
    with pytest.raises(UnsupportedError, match="has moved"):
        weights_of("example/model", "main")
    assert weights_of("example/model", "22bb") == "commit 22bb", "a commit never moves"
    assert weights_of("example/model", "main", configured="22bb") == "commit 22bb", "the engine itself moved the revision"
    hub.download("33cc", main="33cc")
    assert weights_of("example/model", "main") == "commit 33cc", "it had moved before the engine started"
    with pytest.raises(UnsupportedError, match="has moved"):
        weights_of("example/model", "main", configured="22bb")


def test_the_commit_is_also_found_where_the_engine_downloads_to(hub, tmp_path):
    other = Hub(tmp_path / "other")
    other.download("33cc", main="33cc")
    assert weights_of("example/model", "main", str(tmp_path / "other")) == "commit 33cc"
    hub.download("11aa", main="11aa")
    assert weights_of("example/model", "main", str(tmp_path / "other")) == "commit 33cc"
    assert weights_of("example/model", "main", str(tmp_path / "nowhere")) == "commit 11aa"


class Config:
    def __init__(self, **fields: object):
        self._fields = fields

    def to_dict(self) -> dict:
        return dict(self._fields)


def model_of(**changes: object) -> SimpleNamespace:
    """An object of vLLM's `ModelConfig`, as far as details need it."""
    text = Config(hidden_size=8, _name_or_path="/a", rope_parameters={"rope_type": "default"})
    fields = {
        "model": "example/model",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "max_model_len": 4_096,
        "hf_text_config": text,
        "hf_config": Config(text_config=text.to_dict(), transformers_version="5"),
        "multimodal_config": None,
    }
    return SimpleNamespace(**(fields | changes))


def long_rope(max_model_len: int) -> dict:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4_096}
    return {"hf_text_config": Config(rope_parameters=rope), "max_model_len": max_model_len}


@pytest.fixture
def details_of(hub):
    """The details of an engine with such a model."""
    hub.download("11aa", main="11aa")
    with absent_packages("vllm"):
        engine = importlib.import_module("larder_kv.vllm.engine")

        def made(
            model: SimpleNamespace, load_format: str = "auto", revision: str = "", device: str = "cuda", **adapters: object
        ) -> str:
            load = SimpleNamespace(load_format=load_format, download_dir=None)
            config = SimpleNamespace(model_config=model, load_config=load, device_config=SimpleNamespace(device_type=device))
            config.lora_config = SimpleNamespace(**adapters) if adapters else None
            settings = SimpleNamespace(model_revision=revision)
            return json.dumps(engine.details(config, [], [], settings, None), sort_keys=True)

        yield made


def test_whatever_changes_a_models_numbers_changes_its_details(hub, details_of):
    images = SimpleNamespace(mm_processor_kwargs={"max_pixels": 100}, media_io_kwargs={})
    fewer = SimpleNamespace(mm_processor_kwargs={"max_pixels": 50}, media_io_kwargs={})
    seen = [
        details_of(model_of()),
        details_of(model_of(quantization="fp8")),
        details_of(model_of(multimodal_config=images)),
        details_of(model_of(multimodal_config=fewer)),
        details_of(model_of(hf_config=Config(vision_config={"depth": 3}))),
        details_of(model_of(**long_rope(4_096))),
        details_of(model_of(**long_rope(4_097))),
        details_of(model_of(), load_format="dummy"),
        details_of(model_of(), revision="mine"),
        details_of(model_of(), device="cpu"),
        details_of(model_of(quantization_config={"ignore": ["lm_head"]})),
        details_of(model_of(model_class_overrides={"A": "m:B"})),
        details_of(model_of(), target_modules=["o_proj"]),
        details_of(model_of(), enable_tower_connector_lora=True),
    ]
    hub.download("22bb", main="22bb")
    seen.append(details_of(model_of()))
    assert len(set(seen)) == len(seen)
    assert details_of(model_of(revision="11aa")) == seen[0]
    assert details_of(model_of(revision="11aa"), target_modules=None, enable_tower_connector_lora=False) == seen[0]
    with pytest.raises(UnsupportedError, match="model_revision"):
        details_of(model_of(model="example/unknown"))


def test_where_a_model_comes_from_and_its_longest_prompt_do_not_change_its_details(details_of):
    moved = Config(hidden_size=8, _name_or_path="/b", _commit_hash="x", rope_parameters={"rope_type": "default"})
    whole = Config(text_config=moved.to_dict(), transformers_version="6")
    assert details_of(model_of(hf_text_config=moved, hf_config=whole, max_model_len=9)) == details_of(model_of())
    assert details_of(model_of(**long_rope(2_000))) == details_of(model_of(**long_rope(4_096)))


def test_random_weights_are_never_taken_for_real_ones(details_of):
    named = [details_of(model_of(), load_format, "mine") for load_format in ("dummy", "auto")]
    assert named[0] != named[1]


def test_the_tier_has_the_weights_of_its_model_in_its_namespace(hub, tmp_path):
    names = {"model_name": "example/model", "dtype": "bfloat16", "tokens_per_hash": 16}
    spec = SimpleNamespace(config=SimpleNamespace(canonical_layout=True))
    with absent_packages("vllm"):
        tier = importlib.import_module("larder_kv.vllm.tier")
        tier.FileMapper = SimpleNamespace(from_offloading_spec=lambda *_: SimpleNamespace(fields=names))
        found = []
        for commit in ("11aa", "22bb"):
            hub.download(commit)
            found.append(tier.namespace_of(spec, 4_096, "").layout)
            shutil.rmtree(hub.model)
        assert found[0] != found[1]
        with pytest.raises(UnsupportedError, match="model_revision"):
            tier.namespace_of(spec, 4_096, "")
        assert tier.namespace_of(spec, 4_096, "11aa").revision == "11aa"


def test_the_tier_refuses_keys_that_are_too_short_to_be_safe():
    with absent_packages("vllm"):
        tier = importlib.import_module("larder_kv.vllm.tier")
        tier.check_hash(bytes(36))
        with pytest.raises(UnsupportedError, match="prefix_caching_hash_algo"):
            tier.check_hash(bytes(20))
