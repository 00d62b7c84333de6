"""The hints of gateways and engines about a request: its prompt's priority, the time to keep it, the return of its session.

`{"larder_hints": {...}}` of a request's `kv_transfer_params`, or an action `larder_hints` of vLLM's hint envelope with the same
as its payload. A hint never fails a request: a wrong hint is counted and ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NAME = "larder_hints"
LEAST_PRIORITY, MOST_PRIORITY = -128, 127
MOST_SECONDS, MOST_SESSION_BYTES = 86_400.0, 256


@dataclass(frozen=True)
class Hints:
    """A request's hints; without hints, the defaults apply."""

    priority: int = 0
    """Priority of the request's chunks: chunks of a higher priority stay longer under the policy `priority`."""
    retain_seconds: float | None = None
    """Time for which the request's chunks are pinned after its end; the node limits it by its configuration."""
    session: str | None = None
    """The session of this turn: a session has one pin, and a new turn cancels the plans of the turn before."""
    return_seconds: float | None = None
    """When the session's next turn is expected, after the end of this one: its prompt is brought near by then."""

    @property
    def is_for_the_end(self) -> bool:
        """Whether a hint applies after the end of the request."""
        return self.retain_seconds is not None or self.return_seconds is not None


NONE = Hints()


def hints_of(params: Mapping[str, Any] | None, envelope: Any = None) -> tuple[Hints, int]:
    """A request's hints, and the number of wrong ones. Hints in `kv_transfer_params` override hints in the envelope."""
    given: dict[str, Any] = {}
    wrong = 0
    for payload in (*payloads(envelope), params.get(NAME) if params else None):
        if isinstance(payload, Mapping):
            given |= payload
        elif payload is not None:
            wrong += 1
    kept = {key: value for key, value in given.items() if is_right(key, value)}
    return Hints(**kept) if kept else NONE, wrong + len(given) - len(kept)


def payloads(envelope: Any) -> Iterable[Any]:
    """The payloads of the envelope's actions that are meant for this connector."""
    actions = getattr(envelope, "actions", None) or ()
    return [one.payload for one in actions if one.action_type == NAME and one.action_version == "1"]


def is_right(key: str, value: object) -> bool:
    """Whether a hint is known, and its value has the right type and range."""
    match key:
        case "priority":
            return type(value) is int and LEAST_PRIORITY <= value <= MOST_PRIORITY
        case "retain_seconds" | "return_seconds":
            return type(value) in (int, float) and 0 < value <= MOST_SECONDS  # type: ignore[operator]
        case "session":
            return isinstance(value, str) and 0 < len(value.encode(errors="replace")) <= MOST_SESSION_BYTES
    return False
