"""The settings by which an adapter reaches its node, each declared once and checked when the engine starts.

A declaration (`setting`) has the type, the default, the range and the meaning. The check and the tables of the book use the
declarations.
"""

import difflib
import logging
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, Self, TypeAlias, TypeVar, Union, get_args, get_origin

import larder_kv
from larder_kv.link import Link, Opened, goes_on

S = TypeVar("S")


class UnsupportedError(ValueError):
    """Larder cannot serve the engine's configuration: the engine refuses to start, and the message says what to change."""


Verify: TypeAlias = Literal["off", "sample", "always"]


@dataclass(frozen=True)
class Form:
    """The form of a text."""

    words: str
    fits: Callable[[str], bool]


def is_path(text: str) -> bool:
    """Whether a Unix socket can have this path."""
    return 0 < len(text.encode()) <= PATH_BYTES and "\0" not in text and "://" not in text


def is_address(text: str) -> bool:
    """Whether the text is HOST:PORT; HOST may be an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:[^\s:/@\[\]]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) <= 65_535


PATH_BYTES, NAME_BYTES = 107, 256
PATH = Form(f"a path of 1 to {PATH_BYTES} bytes", is_path)
NAME = Form(f"text of at most {NAME_BYTES} bytes", lambda text: len(text.encode()) <= NAME_BYTES)
ADDRESS = Form("HOST:PORT", is_address)
HOUR = 3_600


def setting(
    meaning: str,
    *,
    default: Any = MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    form: Form | None = None,
) -> Any:
    """A field of settings. A number is at least `least`, or above `above`, and at most `most`; a text has a `form`."""
    metadata = {"meaning": meaning, "least": least, "above": above, "most": most, "form": form}
    return field(default=default, metadata=metadata)


def read_settings(cls: type[S], given: Mapping[str, Any], where: str) -> S:
    """Makes settings of class `cls`, a dataclass, from the configuration `given`; `where` is the configuration's name. `None`
    counts as not given if the field has a default. Raises `UnsupportedError` with all problems: unknown keys, missing fields, and
    values of a wrong type, range or form."""
    known: dict[str, Field[Any]] = {known.name: known for known in fields(cls)}  # type: ignore[arg-type]
    chosen = {key: value for key, value in given.items() if key not in known or needs(known[key], value)}
    problems = [unknown(key, value, list(known)) for key, value in chosen.items() if key not in known]
    for name, setting in known.items():
        if name in chosen and not fits(setting, chosen[name]):
            problems.append(f"`{name}` is {chosen[name]!r}: it must be {allowed(setting)}{advice(setting, chosen[name])}")
        elif name not in chosen and setting.default is MISSING:
            problems.append(f"`{name}` is missing: it must be {allowed(setting)}")
    if problems:
        raise UnsupportedError(f"{where} is wrong: {'; '.join(problems)}")
    return cls(**chosen)


def needs(setting: Field[Any], value: Any) -> bool:
    """Whether a value counts as given."""
    return value is not None or setting.default is MISSING


def unknown(key: str, value: Any, known: list[str]) -> str:
    """The problem of an unknown key."""
    near = difflib.get_close_matches(str(key), known, n=1)
    instead = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(f'`{name}`' for name in known)}"
    return f"`{key}` (with the value {value!r}) is no setting: {instead}"


def fits(setting: Field[Any], value: Any) -> bool:
    """Whether a setting may have this value."""
    kind = kind_of(setting)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if type(value) is not kind and not (kind is float and type(value) is int):
        return False
    least, above, most, form = (setting.metadata[name] for name in ("least", "above", "most", "form"))
    if form is not None:
        return bool(form.fits(value))
    if kind is bool:
        return True
    # A value that is no number fails each comparison.
    return (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)


def allowed(setting: Field[Any]) -> str:
    """The values that a setting may have, in words."""
    kind = kind_of(setting)
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    least, above, most, form = (setting.metadata[name] for name in ("least", "above", "most", "form"))
    if kind is bool:
        return "true or false"
    if form is not None:
        return str(form.words)
    number = "a whole number" if kind is int else "a number"
    return f"{number} above {above} up to {most}" if least is None else f"{number} from {least} to {most}"


def advice(setting: Field[Any], value: Any) -> str:
    """The end of an error about a value of another type."""
    if isinstance(value, str) and kind_of(setting) in (int, float, bool):
        return ", without quotes"
    if setting.metadata["form"] is PATH and isinstance(value, str) and "://" in value:
        return ", not a URL"
    return ""


def kind_of(setting: Field[Any]) -> Any:
    """A setting's type, without `None`."""
    kind: Any = setting.type
    if get_origin(kind) in (types.UnionType, Union):
        return next(member for member in get_args(kind) if member is not types.NoneType)
    return kind


@dataclass(frozen=True)
class NodeSettings:
    """Settings that all adapters have in common."""

    socket: str = setting("the tenant's socket of the node on this host", form=PATH)
    device: int | None = setting(
        "the number of the node's actor that the engine talks to, for nodes with several GPUs; by default the actor with the "
        "fewest sessions",
        default=None,
        least=0,
        most=65_535,
    )
    window_bytes: int = setting(
        "write window of each rank: room for two blocks at least", default=64 << 20, least=1, most=1 << 40
    )
    timeout_seconds: float = setting(
        "how long one request to the node may take; one call of the engine's starts no request after that time",
        default=5.0,
        above=0,
        most=HOUR,
    )
    reconnect_seconds: float = setting("how often an absent node is tried again", default=1.0, above=0, most=HOUR)
    verify: Verify = setting(
        "the loaded blocks to verify; `sample` is one in 64; a wrong block is a miss, and the node drops its chunk",
        default="sample",
    )
    copy_threads: int = setting(
        "threads that share a copy of 4 MiB or more between the engine's memory and the node's; 0 for half of the CPUs that the "
        "engine may use, at most 4",
        default=0,
        least=0,
        most=64,
    )
    model_revision: str = setting(
        "names the model's weights if neither the engine nor the files do", default="", form=NAME
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads the configuration named `where`."""
        return read_settings(cls, given, where)

    def link(self, client: str, logger: logging.Logger, count: Callable[[str], None]) -> Link[Opened]:
        """Keeps a session open as `client`; `count` is as for `Link`."""

        def connect() -> Opened:
            return Opened(self.open_session(client, self.window_bytes, self.device))

        return Link(connect, self.reconnect_seconds, logger, count, is_open=lambda opened: goes_on(opened.session))

    def open_session(self, client: str, window_bytes: int, device: int | None) -> larder_kv.Session:
        """Opens a session as `client` at the actor `device`."""
        return larder_kv.Session(
            self.socket,
            client=client,
            device=device,
            window_bytes=window_bytes,
            timeout=self.timeout_seconds,
            verify=self.verify,
            copy_threads=self.copy_threads,
        )

    def check_block(self, what: str, block_bytes: int) -> None:
        """Raises `UnsupportedError` if a block has no room in the window."""
        if block_bytes > self.window_bytes:
            raise UnsupportedError(
                f"{what} has {block_bytes} bytes, and `window_bytes` is {self.window_bytes}: set it to twice the former or more, "
                "and the node's `session.max_window_bytes` too"
            )
