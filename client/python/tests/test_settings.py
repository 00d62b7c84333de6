"""The check of users' settings: nothing passes that would leave an engine without its cache."""

import math
import random
from dataclasses import MISSING, fields

import larder_kv
import pytest
from larder_kv.settings import NodeSettings, UnsupportedError, allowed, read_settings
from larder_kv.vllm.settings import Settings

SOCKET = {"socket": "/s"}
HERE = "kv_connector_extra_config is wrong: "


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "`socket` is missing: it must be a path of 1 to 107 bytes"),
        ({"socket": ""}, "`socket` is '': it must be a path of 1 to 107 bytes"),
        ({"socket": None}, "`socket` is None: it must be a path"),
        ({"socket": "/" * 108}, "it must be a path of 1 to 107 bytes"),
        ({"socket": "unix:///run/s"}, "it must be a path of 1 to 107 bytes, not a URL"),
        ({**SOCKET, "load": "lazy"}, "`load` is 'lazy': it must be \"async\" or \"sync\""),
        ({**SOCKET, "load": ["sync"]}, "`load` is ['sync']"),
        ({**SOCKET, "verify": True}, "`verify` is True: it must be \"off\" or \"sample\" or \"always\""),
        ({**SOCKET, "prefetches": 0}, "`prefetches` is 0: it must be a whole number from 1 to 64"),
        ({**SOCKET, "prefetches": True}, "`prefetches` is True"),
        ({**SOCKET, "handoffs": 97}, "`handoffs` is 97: it must be a whole number from 1 to 96"),
        ({**SOCKET, "device": -1}, "`device` is -1: it must be a whole number from 0 to 65535"),
        ({**SOCKET, "device": 65_536}, "`device` is 65536"),
        ({**SOCKET, "device": 1.0}, "`device` is 1.0"),
        ({**SOCKET, "window_bytes": -1}, "`window_bytes` is -1: it must be a whole number from 1 to"),
        ({**SOCKET, "window_bytes": 1 << 64}, "`window_bytes` is 18446744073709551616"),
        ({**SOCKET, "window_bytes": "64MiB"}, "`window_bytes` is '64MiB'"),
        ({**SOCKET, "chunk_tokens": 65_537}, "`chunk_tokens` is 65537"),
        ({**SOCKET, "timeout_seconds": "10"}, "is '10': it must be a number above 0 up to 3600, without quotes"),
        ({**SOCKET, "timeout_seconds": math.inf}, "`timeout_seconds` is inf"),
        ({**SOCKET, "timeout_seconds": 1e300}, "`timeout_seconds` is 1e+300"),
        ({**SOCKET, "prefetch_seconds": "1"}, "a number from 0 to 3600, without quotes"),
        ({**SOCKET, "prefetch_seconds": math.nan}, "`prefetch_seconds` is nan"),
        ({**SOCKET, "prefetch_seconds": math.inf}, "`prefetch_seconds` is inf"),
        ({**SOCKET, "prefill_tokens_per_second": 0}, "`prefill_tokens_per_second` is 0: it must be a number above 0"),
        ({**SOCKET, "save": "false"}, "`save` is 'false': it must be true or false, without quotes"),
        ({**SOCKET, "save": 0}, "`save` is 0: it must be true or false"),
        ({**SOCKET, "events": "http://x"}, "`events` is 'http://x': it must be HOST:PORT"),
        ({**SOCKET, "events": "host"}, "`events` is 'host'"),
        ({**SOCKET, "events": "host:65536"}, "`events` is 'host:65536'"),
        ({**SOCKET, "model_revision": "x" * 257}, "it must be text of at most 256 bytes"),
        ({**SOCKET, "model_revision": 7}, "`model_revision` is 7"),
        ({**SOCKET, "windowbytes": 5}, "`windowbytes` (with the value 5) is no setting: did you mean `window_bytes`?"),
        ({**SOCKET, "colour": 1}, "`colour` (with the value 1) is no setting: there are `socket`, `device`, "),
        ({"sockets": "/s"}, "did you mean `socket`?; `socket` is missing"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_its_value_and_what_is_allowed(given, words):
    with pytest.raises(UnsupportedError) as refused:
        Settings.parse(given)
    assert str(refused.value).startswith(HERE) and words in str(refused.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UnsupportedError) as refused:
        NodeSettings.parse({"socket": "/s", "device": "0", "verify_": "off", "timeout_seconds": -1}, "it")
    for word in ("it is wrong: ", "`verify`", "`device` is '0'", "`timeout_seconds` is -1"):
        assert word in str(refused.value)


def test_a_chunk_that_has_no_room_in_the_window_is_refused():
    with pytest.raises(UnsupportedError, match="window_bytes"):
        NodeSettings("/s", window_bytes=100).check_block("a page", 101)
    NodeSettings("/s", window_bytes=101).check_block("a page", 101)


def test_whatever_passes_the_check_a_session_takes(cluster):
    """Values at the edges of each range, in any combination, open a session on a real node."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(40):
        given = {"socket": cluster.sockets[0]}
        for one in fields(NodeSettings):
            if chance.random() < 0.5 and one.metadata["most"] is not None and one.name != "device":
                least, most = one.metadata["least"], one.metadata["most"]
                given[one.name] = chance.choice([least if least is not None else 0.5, most])
        settings = NodeSettings.parse(given, "it")
        with settings.open_session("edges", min(settings.window_bytes, 1 << 20), settings.device) as session:
            assert session.node
    # A window that no node has room for is cut to the node's limit.
    with NodeSettings(cluster.sockets[0], window_bytes=1 << 40).open_session("large", 1 << 40, None) as session:
        assert 0 < session.window_bytes < 1 << 40


def test_every_setting_says_what_it_means_and_its_default_is_allowed():
    for one in fields(Settings):
        assert one.metadata["meaning"] and allowed(one)
        if one.default is not MISSING:
            read_settings(Settings, {**SOCKET, one.name: one.default}, "defaults")


def test_the_package_tells_its_version():
    from importlib.metadata import version

    assert larder_kv.__version__ == version("larder-kv")
    with pytest.raises(AttributeError):
        larder_kv.no_such_name
