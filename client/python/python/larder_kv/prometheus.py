"""The adapters' counters for Prometheus, in the process's own registry, where the engine's metrics are."""

from collections.abc import Callable, Mapping

from prometheus_client import REGISTRY, Counter

from larder_kv.keyed import COUNTERS


def exporter(prefix: str, labels: Mapping[str, str]) -> Callable[[str, int], None]:
    """Makes a counter PREFIX_NAME for each name of `COUNTERS`; the returned function counts."""
    counters = {name: counter(f"{prefix}_{name}", meaning, labels) for name, meaning in COUNTERS.items()}

    def count(name: str, more: int) -> None:
        counters[name].inc(more)

    return count


def counter(name: str, meaning: str, labels: Mapping[str, str]) -> Counter:
    """The counter with these labels. An adapter that is made again gets the existing counter."""
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(name)
    made = known if isinstance(known, Counter) else Counter(name, meaning, tuple(labels))
    return made.labels(**labels) if labels else made
