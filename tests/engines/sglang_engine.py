"""SGLang's caches in this process, controlled by JSON lines. Each line names a cache and a request; each answer is a line on the
original standard output. SGLang's own output goes elsewhere."""

import json
import os
import signal
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
# The ranks of one engine are on this host.
os.environ.update(HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo")


def main() -> None:
    from sglang_host import HostCache

    caches = {}
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        do, name = asked.pop("do"), asked.pop("cache", "")
        if do == "open":
            kind = decode_cache() if asked.pop("decodes", False) else HostCache
            try:
                caches[name] = kind(**asked)
                say()
            except ValueError as error:
                say(refused=str(error))
        elif do == "close":
            caches.pop(name).close()
            say()
        else:
            say(**answer(caches[name], do, **asked))


def decode_cache() -> type:
    """A decode engine's caches. Imported only on demand, as the imports take long."""
    from sglang_decode import DecodeCache

    return DecodeCache


def answer(cache, do: str, tokens=(), salt=None, output=(), kill_before_load=None, priority=0) -> dict:
    """A cache's answer to a request."""
    if do == "stats":
        return stats(cache)
    if do == "stored":
        return {"stored": cache.stored(tokens, salt)}
    if do == "decode":
        return cache.decode(tokens, output, salt)
    if kill_before_load:
        killed_before_load(cache.storage, kill_before_load)
    if do == "put":
        cache.put(tokens, salt, priority)
    restored = cache.restore(tokens, salt) if do == "restore" else None
    if do in ("put", "save"):
        cache.save(tokens, salt)
    return {
        "restored": restored,
        "digest": cache.digest(tokens, salt) if restored is None or restored else None,
        "counts": cache.storage.counts.now(),
    }


def killed_before_load(storage, victim: int) -> None:
    """Kills the node after pages were found and before they are loaded."""
    load = storage.batch_get_v1

    def killing(*arguments):
        storage.batch_get_v1 = load
        os.kill(victim, signal.SIGKILL)
        # The process has gone once its sockets are closed.
        while os.path.exists(f"/proc/{victim}/fd/0"):
            time.sleep(0.001)
        return load(*arguments)

    storage.batch_get_v1 = killing


def stats(cache) -> dict:
    """The values that SGLang's metrics and Prometheus got."""
    from prometheus_client import REGISTRY

    told = [call.args[0] for call in cache.cache.storage_metrics_collector.log_storage_metrics.call_args_list]
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {
        "prefetched": [pages for one in [*told, cache.storage.get_stats()] for pages in one.prefetch_pgs],
        "loaded": sum(sample.value for sample in samples if sample.name == "sglang:larder_loaded_keys_total"),
    }


def say(**answer) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
