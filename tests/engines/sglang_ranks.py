"""Scenario: tensor parallel ranks of one SGLang engine, each with its node."""

from pathlib import Path

from driver import Cluster
from scenarios import row, until
from sglang_driver import PAGE, Ranks, SGLang, prompt, until_restored


def tensor_parallel(scratch: Path) -> None:
    """Each rank has its own share, and a prefix ends with the shortest share; or all ranks have the same KV, and one saves it."""
    cluster = Cluster(scratch / "ranks", 2)
    with SGLang(scratch, "rank-0") as first, SGLang(scratch, "rank-1") as second:
        ranks = Ranks(scratch, [first, second])
        own_shares(ranks, first, second, cluster)
        shortest(ranks, first, second, cluster)
        lost_by_one(ranks, first, second, cluster)
        one_saves(ranks, first, second, cluster)
    cluster.stop()


def own_shares(ranks: Ranks, first: SGLang, second: SGLang, cluster: Cluster) -> None:
    tokens = prompt(11)
    ranks.open("own", cluster.sockets)
    saved = ranks.ask("put", "own", tokens)
    assert [answer["counts"]["saved_keys"] for answer in saved] == [6, 6], f"{saved}"
    assert saved[0]["digest"] != saved[1]["digest"], "the ranks have the same"
    ranks.open("own again", cluster.sockets)
    come = ranks.ask("restore", "own again", tokens)
    assert [answer["restored"] for answer in come] == [len(tokens)] * 2, f"{come}"
    assert digests(come) == digests(saved), "another rank's bytes"
    row("two ranks", f"{len(tokens)} tokens restored by both, each its own bytes")
    # Not a delay: at the same node, the other rank's share is under other keys.
    for rank, of in ((0, 1), (0, 4), (1, 4)):
        name = f"{rank} of {of}"
        first.open(name, cluster.sockets[0], rank=rank, ranks=of)
        assert first.ask("restore", name, tokens)["restored"] == 0, f"rank {name} hit"
        first.close(name)
    first.open("1 of 2", cluster.sockets[1], rank=1, ranks=2)
    assert until_restored(first, "1 of 2", tokens)["digest"] == saved[1]["digest"], "rank 0's bytes for rank 1"
    first.close("1 of 2")
    row("ranks of one engine and of four", "a miss")


def shortest(ranks: Ranks, first: SGLang, second: SGLang, cluster: Cluster) -> None:
    """One rank could not save everything that the other rank saved."""
    tokens = prompt(12)
    saved = []
    for number, (rank, pages) in enumerate(((first, 6), (second, 4))):
        rank.open("alone", cluster.sockets[number], rank=number, ranks=2)
        rank.ask("put", "alone", tokens[: pages * PAGE])
        saved.append(rank.ask("digest", "alone", tokens[: 4 * PAGE]))
    ranks.open("uneven", cluster.sockets)
    come = ranks.ask("restore", "uneven", tokens)
    assert [answer["restored"] for answer in come] == [4 * PAGE] * 2, f"{come}"
    assert digests(come) == digests(saved), "other bytes"
    assert [answer["counts"]["found_keys"] for answer in come] == [6, 4], f"{come}"
    row("a rank that saved 4 pages, another 6", "4 pages restored by both")


def lost_by_one(ranks: Ranks, first: SGLang, second: SGLang, cluster: Cluster) -> None:
    """No rank uses pages that one rank found and could not load."""
    tokens = prompt(13)
    ranks.open("kept", cluster.sockets)
    saved = ranks.ask("put", "kept", tokens)
    ranks.open("lost", cluster.sockets)
    come = ranks.ask("restore", "lost", tokens, only={1: {"kill_before_load": cluster.pid(1)}})
    assert [answer["restored"] for answer in come] == [0, 0], f"{come}"
    assert [answer["counts"]["loaded_keys"] for answer in come] == [6, 0], f"{come}"
    counts = come[1]["counts"]
    # The session's end may be noticed before the load asks the node.
    assert counts["missed_keys"] == 6 and counts["failures"] + counts["without_node"] == 1, f"{counts}"
    until(lambda: ranks.ask("save", "kept", tokens)[1]["counts"]["saved_keys"] == 12, "the second node is used again")
    until(lambda: ranks.ask("restore", "lost", tokens)[1]["restored"] == len(tokens), "both ranks find all again")
    assert digests(ranks.ask("digest", "lost", tokens)) == digests(saved), "other bytes"
    row("one rank's node killed between lookup and load", "a miss for both; saved again, all is restored")


def one_saves(ranks: Ranks, first: SGLang, second: SGLang, cluster: Cluster) -> None:
    """Latent attention: all ranks have the same KV, and the first saves one copy."""
    tokens = prompt(14)
    ranks.open("latent", cluster.sockets, kind="latent")
    saved = ranks.ask("put", "latent", tokens)
    assert [answer["counts"]["saved_keys"] for answer in saved] == [6, 0], f"{saved}"
    ranks.open("latent again", cluster.sockets, kind="latent")
    until(lambda: ranks.ask("restore", "latent again", tokens)[0]["restored"] == len(tokens), "both ranks find all")
    come = ranks.ask("digest", "latent again", tokens)
    assert digests(come) == digests(saved) and come[0]["digest"] == come[1]["digest"], "other bytes"
    second.open("3 of 4", cluster.sockets[1], kind="latent", rank=3, ranks=4)
    assert until_restored(second, "3 of 4", tokens, len(tokens))["digest"] == saved[0]["digest"], "other bytes"
    row("latent attention", "one rank saved, both restored; so did one of four ranks")


def digests(answers: list[dict]) -> list[str]:
    return [answer["digest"] for answer in answers]
