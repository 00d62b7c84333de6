"""Scenario: SGLang's prefill and decode engines, on two nodes, share the storage."""

from pathlib import Path

from driver import Cluster
from scenarios import row, until
from sglang_driver import PAGE, SGLang, prompt, until_restored


def prefill_decode(scratch: Path) -> None:
    """Decode loads a prompt's prefix from the storage, to which prefill saved it, and offloads the decoded tokens; prefill then
    gets the next turn of the conversation."""
    cluster = Cluster(scratch / "handoff", 2)
    with SGLang(scratch, "prefill") as prefill, SGLang(scratch, "decode") as decode:
        for kind, salt, seed in (("full", None, 21), ("latent", "alice", 22)):
            turn, output = prompt(seed, 7)[: 6 * PAGE + 5], prompt(seed + 10, 3)[: 2 * PAGE + 8]
            prefill.open("prefill", cluster.sockets[0], kind=kind)
            decode.open("decode", cluster.sockets[1], kind=kind, decodes=True)
            saved = prefill.ask("put", "prefill", turn[: 6 * PAGE], salt)
            until(lambda: decode.ask("stored", "decode", turn, salt)["stored"] == 6 * PAGE, "decode finds the prefix")
            told = decode.ask("decode", "decode", turn, salt, output=output)
            assert (told["prefix"], told["prefix_digest"]) == (6 * PAGE, saved["digest"]), f"{told}"
            row(f"decode, {kind} attention", f"{told['prefix']} tokens from the storage, identical to prefill's")
            # The last token of an answer is never computed.
            assert told["whole"] == 8 * PAGE and told["counts"]["saved_keys"] == 2, f"{told}"
            prefill.open("another", cluster.sockets[0], kind=kind)
            for cache, what in (("prefill", "where the prompt was computed"), ("another", "elsewhere")):
                come = until_restored(prefill, cache, turn + output, told["whole"], salt)
                assert come["digest"] == told["digest"], f"{kind}, {cache}: other bytes"
                row(f"next turn {what}, {kind} attention", f"{come['restored']} tokens, identical to decode's")
            assert prefill.ask("restore", "another", turn + output, "bob")["restored"] == 0, "another salt hit"
            for engine, cache in ((prefill, "prefill"), (prefill, "another"), (decode, "decode")):
                engine.close(cache)
    cluster.stop()
