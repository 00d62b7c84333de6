"""Compares the stub file with the native part."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from larder_kv import _native

PACKAGE = Path(__file__).resolve().parents[1]
STUB = PACKAGE / "python/larder_kv/_native.pyi"


def test_the_stub_file_is_what_is_made_of_the_definitions():
    made = subprocess.run([sys.executable, PACKAGE / "stub"], capture_output=True, text=True, check=True)
    assert made.stdout == STUB.read_text(), "run client/python/stub write"


@pytest.mark.parametrize("of", re.findall(r"^class (\w+)", STUB.read_text(), re.MULTILINE))
def test_a_class_has_what_the_stub_file_says_and_nothing_else(of):
    text = re.split(r"^@final\n", STUB.read_text().split(f"\nclass {of}")[1], maxsplit=1, flags=re.MULTILINE)[0]
    written = set(re.findall(r"^    (?:async )?(?:def )?([a-z]\w*)[(:]", text, re.MULTILINE))
    assert written == {name for name in dir(getattr(_native, of)) if not name.startswith("_")}
