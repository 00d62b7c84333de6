"""Scenario: prefill in one engine, decode in an engine on another node, layer by layer."""

import json
import re
import threading
from pathlib import Path

from driver import Cluster, Engine
from scenarios import until

LAYERS = 4


class Logs:
    """The logs of the connectors of both engines: numbered messages, one file for each process."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.prefill, self.decode, self.message = folder / "prefill", folder / "decode", folder / "message"

    def prefill_faults(self) -> dict:
        return {"log": str(self.prefill), "hold_last_layer_until": str(self.message), "last_layer": LAYERS - 1}

    def decode_faults(self) -> dict:
        return {"log": str(self.decode), "tell_first_read": str(self.message)}

    @staticmethod
    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]


class Events:
    """The events of vLLM's own publisher."""

    def __init__(self, endpoint: str):
        import zmq

        self._endpoint = endpoint
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def config(self) -> dict:
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self._endpoint}

    def assert_told(self, step, row) -> None:
        """Checks that the node's chunks are published, by the hashes of the engine's own blocks, which are published too."""
        own: set[int] = set()
        node: set[int] = set()

        def read() -> bool:
            # The engine publishes with its steps.
            step()
            while self._socket.poll(100):
                for event in self._batch(self._socket.recv_multipart()[2]):
                    if event["type"] == "BlockStored":
                        (node if event.get("ownership") == "larder" else own).update(event["block_hashes"])
                        assert event["medium"] == ("CPU" if event.get("ownership") == "larder" else "GPU"), f"{event}"
            return len(node) >= 6

        until(read, "the node's chunks are told", patience=60)
        assert node <= own, f"{node - own}"
        row("KV events of the node", f"{len(node)} chunks told by vLLM's publisher, by the engine's own hashes")

    @staticmethod
    def _batch(payload: bytes) -> list[dict]:
        import msgspec

        return msgspec.msgpack.decode(payload)[1]


def ask(engine: Engine, tokens: list[int], **options) -> "Asked":
    return Asked(engine, tokens, options)


class Asked:
    """A prompt that runs in the background."""

    def __init__(self, engine: Engine, tokens: list[int], options: dict):
        self.answer: dict = {}
        self._thread = threading.Thread(target=lambda: self.answer.update(engine.ask(tokens, **options)))
        self._thread.start()

    def get(self) -> dict:
        self._thread.join(timeout=120)
        assert self.answer, "the engine did not answer"
        return self.answer


def assert_overlap(logs: Logs, cluster: Cluster) -> str:
    """Checks that decode read layer 0 before prefill had committed the last layer: by the numbers of messages, not by clocks."""
    prefill, decode = logs.read(logs.prefill), logs.read(logs.decode)
    first_read = next(one for one in decode if one["event"] == "read" and one["layer"] == 0)
    heard = next(one for one in prefill if one["event"] == "heard")
    assert heard["message"] == first_read["message"], f"{heard} {first_read}"
    last_layer = next(one for one in prefill if one["event"] == "hand over" and one["layer"] == LAYERS - 1)
    assert heard["number"] < last_layer["number"], "the last layer was handed over before decode had read the first"
    # The commit comes in the background.
    until(lambda: messages(cluster.node_log(1).read_text(), "a chunk is whole"), "the commit is heard of")
    # The nodes number the messages of the stream: those of the last layer and of the commit come after the first layer's.
    sender, receiver = (cluster.node_log(node).read_text() for node in range(2))
    sent = [(int(number), int(offset)) for number, offset in messages(sender, "layers are sent", "offset")]
    came = [(int(number), int(offset)) for number, offset in messages(receiver, "layers came", "offset")]
    assert sent and sorted(sent) == sorted(came), f"{sent} {came}"
    last = max(offset for _, offset in sent)
    of_first = max(number for number, offset in sent if offset == 0)
    of_last = min(number for number, offset in sent if offset == last)
    whole = min(int(number) for (number,) in messages(receiver, "a chunk is whole"))
    assert of_first < of_last < whole, f"{of_first} {of_last} {whole}"
    return f"layer 0 in messages to {of_first}, the last from {of_last}, the commit from {whole}"


def messages(log: str, what: str, *fields: str) -> list[tuple[str, ...]]:
    """The numbers, and these fields, of a node's log lines."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = [line for line in plain.splitlines() if what in line]
    return [tuple(re.search(rf"\b{name}=(\d+)", line)[1] for name in ("number", *fields)) for line in lines]


def run(world, same, loaded, computed, counted, row) -> None:
    """The scenario; its parameters besides the world are the suite's helpers."""
    cluster = world.cluster("handed-over", 2, log="info,larder_node::exchange=debug")
    first = {"do_remote_decode": True}
    events = Events(f"ipc://{world.scratch}/events")
    prefiller = {"socket": cluster.sockets[0], "events": cluster.http[0]}
    with Engine(
        world.scratch, "prefill-0", prefiller, faults={}, role="kv_producer", kv_events_config=events.config()
    ) as prefill:
        # One after the other: the answer of the prefill says where its chunks are.
        tokens, expected = world.fresh()
        answer = prefill.ask(tokens, max_tokens=1, kv_transfer_params=first)
        told = answer["kv_transfer_params"][0]
        assert told["remote_node"] == "node-0" and told["remote_chunks"] == 6, f"{told}"
        for load in ("sync", "async"):
            connector = {"socket": cluster.sockets[1], "load": load}
            with Engine(world.scratch, f"decode-{load}", connector, faults={}, role="kv_consumer") as decode:
                answer = decode.ask(tokens, kv_transfer_params=told)
                same(answer, expected)
                assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
        row("prefill, then decode with its kv_transfer_params", "192 loaded, 8 computed, identical, sync and async")
        events.assert_told(lambda: prefill.ask(tokens, max_tokens=1), row)
        # The prefill engine's own prefix cache is on.
        again = prefill.ask(tokens, max_tokens=1, kv_transfer_params=first)
        assert again["counts"].get("prompt_tokens_by_source.local_cache_hit", 0) > 0, f"{again['counts']}"
    together(world, cluster, same, loaded, computed, counted, row)
    prefill_dies(world, cluster, same, loaded, counted, row)
    cluster.stop()


def together(world, cluster, same, loaded, computed, counted, row) -> None:
    """Both at the same time: decode starts on layer 0 while prefill is held before the last layer."""
    to_node = {"do_remote_prefill": True, "remote_node": "node-0"}
    for load in ("sync", "async"):
        for node in range(2):
            cluster.node_log(node).write_text("")
        logs = Logs(world.scratch / f"logs-{load}")
        tokens, expected = world.fresh()
        decoder = {"socket": cluster.sockets[1], "load": load, "handoff_seconds": 60}
        prefiller = {"socket": cluster.sockets[0]}
        with (
            Engine(world.scratch, f"reads-{load}", decoder, faults=logs.decode_faults(), role="kv_consumer") as decode,
            Engine(world.scratch, f"writes-{load}", prefiller, faults=logs.prefill_faults(), role="kv_producer") as prefill,
        ):
            decoding = ask(decode, tokens, kv_transfer_params=to_node)
            prefilling = ask(prefill, tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            answer = decoding.get()
            prefilling.get()
            same(answer, expected)
            assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
            assert counted(answer, "followed_chunks") == 6, f"{answer['counts']}"
            row(f"prefill and decode together, {load} load", f"identical; {assert_overlap(logs, cluster)}")


def prefill_dies(world, cluster, same, loaded, counted, row) -> None:
    """The prefill engine is killed between two layers: decode computes the prompt itself."""
    to_node = {"do_remote_prefill": True, "remote_node": "node-0"}
    tokens, expected = world.fresh()
    decoder = {"socket": cluster.sockets[1], "load": "sync", "handoff_seconds": 60}
    with Engine(world.scratch, "survivor", decoder, faults={}, role="kv_consumer") as decode:
        prefill = Engine(
            world.scratch, "mortal", {"socket": cluster.sockets[0]}, faults={"die_before_layer": 2}, role="kv_producer"
        )
        with prefill.dying():
            decoding = ask(decode, tokens, kv_transfer_params=to_node)
            prefill.tell(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            answer = decoding.get()
        same(answer, expected)
        lost = cluster.metric(1, "larder_follows_lost_chunks_total")
        assert lost > 0 and counted(answer, "failed_blocks") in (0, 6), f"{answer['counts']}"
        row("prefill dies between two layers", f"{lost:.0f} lost chunks counted, recomputed, identical")
