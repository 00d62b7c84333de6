"""The parts of scenarios with SGLang: processes with its caches, alone or as the ranks of one engine."""

import os
import sys
from pathlib import Path

from driver import HERE
from process import Process
from scenarios import until

PAGE = 16


class SGLang(Process):
    """A process with SGLang's caches."""

    def __init__(self, scratch: Path, name: str):
        super().__init__(scratch, name, [sys.executable, HERE / "sglang_engine.py"], dict(os.environ))

    def open(self, cache: str, socket: str, layout: str = "page_first_direct", **options) -> None:
        refused = self.try_open(cache, socket, layout, **options)
        assert refused is None, refused

    def try_open(self, cache: str, socket: str, layout: str = "page_first_direct", **options) -> str | None:
        """Opens a cache; returns the reason if it was refused."""
        self.start_open(cache, socket, layout, **options)
        return self.answer().get("refused")

    def start_open(self, cache: str, socket: str, layout: str = "page_first_direct", **options) -> None:
        """The same, without waiting for the answer."""
        storage = storage_config(socket, reconnect_seconds=2.0, timeout_seconds=5.0, **options.pop("storage", {}))
        self.write({"do": "open", "cache": cache, "storage": storage, "layout": layout, **options})

    def close(self, cache: str) -> None:
        self.send({"do": "close", "cache": cache})

    def ask(self, do: str, cache: str, tokens: list[int], salt: str | None = None, **more) -> dict:
        self.start_ask(do, cache, tokens, salt, **more)
        return self.answer()

    def start_ask(self, do: str, cache: str, tokens: list[int], salt: str | None = None, **more) -> None:
        """The same, without waiting for the answer."""
        self.write({"do": do, "cache": cache, "tokens": tokens, "salt": salt, **more})


class Ranks:
    """The tensor parallel ranks of one engine. They act together, since SGLang has them agree."""

    def __init__(self, scratch: Path, ranks: list[SGLang]):
        self._ranks, self._meeting = ranks, str(scratch / "meeting")

    def open(self, cache: str, sockets: list[str], **options) -> None:
        """Opens the cache of each rank at the node of its host."""
        for number, (rank, socket) in enumerate(zip(self._ranks, sockets, strict=True)):
            rank.start_open(cache, socket, rank=number, ranks=len(self._ranks), meeting=self._meeting, **options)
        refused = [rank.answer().get("refused") for rank in self._ranks]
        assert refused == [None] * len(self._ranks), f"{refused}"

    def ask(self, do: str, cache: str, tokens: list[int], only: dict[int, dict] | None = None) -> list[dict]:
        """Asks all ranks; `only` has additional arguments of some ranks."""
        for number, rank in enumerate(self._ranks):
            rank.start_ask(do, cache, tokens, **(only or {}).get(number, {}))
        return [rank.answer() for rank in self._ranks]


def storage_config(socket: str, **settings) -> dict:
    """The value that users write into `--hicache-storage-backend-extra-config`."""
    loaded = {"backend_name": "larder", "module_path": "larder_kv.sglang", "class_name": "LarderStorage", "interface_v1": 1}
    return loaded | {"prefetch_threshold": PAGE, "socket": socket} | settings


def prompt(seed: int, pages: int = 6) -> list[int]:
    """Tokens whose first page no other seed has."""
    return [seed + 3] + [(i * i * 7 + i * (13 + seed)) % 1_000 + 3 for i in range(1, pages * PAGE)]


def until_restored(engine: SGLang, cache: str, tokens: list[int], at_least: int = 1, salt: str | None = None) -> dict:
    """Asks until that much comes: another node learns of new pages a moment later."""

    def restored() -> dict | None:
        answer = engine.ask("restore", cache, tokens, salt)
        return answer if answer["restored"] >= at_least else None

    return until(restored, f"{at_least} tokens are restored")
