"""The KV events that routers follow: vLLM's own publisher tells of the node's chunks, and decoders read them as routers do.

Each decoder is written from what its router documents of the messages that it takes.
"""

import msgspec
import zmq
from answers import counted, prompt
from driver import BLOCK_TOKENS, Engine
from vllm.distributed.kv_events import BlockStored, KVEventBatch

POD, MODEL = "10.1.2.3", "a-model"
TOPIC = f"kv@{POD}@{MODEL}"
CHUNK_BLOCKS = 2


class Subscriber:
    """As vLLM's example of a subscriber: a topic, a number without gaps, a batch; what was missed is asked for again."""

    def __init__(self, endpoint: str, replay: str):
        context = zmq.Context.instance()
        self._events, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._events.connect(endpoint)
        self._replay.connect(replay)
        self.batches: dict[int, bytes] = {}

    def read(self) -> None:
        while self._events.poll(100):
            topic, number, payload = self._events.recv_multipart()
            assert topic.decode() == TOPIC
            self.batches[int.from_bytes(number, "big")] = payload

    def replayed(self, start: int) -> dict[int, bytes]:
        """Everything from a number on, as whoever came later asks for it."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        found = {}
        while self._replay.poll(5_000):
            frames = self._replay.recv_multipart()
            number, payload = frames[-2], frames[-1]
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            found[int.from_bytes(number, "big")] = payload
        return found


def vllm_decoder(payload: bytes) -> list:
    return msgspec.msgpack.decode(payload, type=KVEventBatch).events


class Dynamo:
    """An index by the tokens of blocks, as Dynamo's relay fills it: `[time, events, rank]`, each event a map with `type`.
    It takes only blocks of its own size, whose parents it knows."""

    def __init__(self):
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.refused = 0

    def take(self, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self.blocks.pop(one, None)
            if event["type"] != "BlockStored" or event.get("medium") != "CPU":
                continue
            hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
            if event["block_size"] != BLOCK_TOKENS or len(tokens) != len(hashes) * BLOCK_TOKENS:
                self.refused += 1
                continue
            for number, one in enumerate(hashes):
                block = tuple(tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
                self.blocks[one] = (parent, block)
                parent = one

    def overlap(self, tokens: list[int]) -> int:
        """Blocks of a prompt that the worker has."""
        parent, found = None, 0
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tuple(tokens[start : start + BLOCK_TOKENS])
            child = next((one for one, known in self.blocks.items() if known == (parent, block)), None)
            if child is None:
                break
            parent, found = child, found + 1
        return found


class LlmD:
    """Locations by the engine's hashes, as llm-d's index has them: the topic names the pod and the model, and a stored block has a
    tier by its medium. Tokens give the index its own keys for the engine's."""

    def __init__(self):
        self.pods: dict[int, set[tuple[str, str]]] = {}
        self.keys: dict[tuple[int, ...], int] = {}

    def take(self, topic: str, payload: bytes) -> None:
        kind, pod, model = topic.split("@")
        assert kind == "kv" and model == MODEL
        for event in msgspec.msgpack.decode(payload)[1]:
            tier = (event.get("medium") or "GPU").lower()
            for one in event["block_hashes"]:
                if event["type"] == "BlockStored":
                    self.pods.setdefault(one, set()).add((pod, tier))
                    continue
                self.pods.get(one, set()).discard((pod, tier))


def run(world, row, until) -> None:
    cluster = world.cluster("routers", 1)
    endpoint, replay = (f"ipc://{world.scratch}/router-{name}" for name in ("events", "replay"))
    subscriber = Subscriber(endpoint, replay)
    published = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": TOPIC}
    connector = {
        "socket": cluster.sockets[0],
        "events": cluster.http[0],
        "events_tokens": "local",
        "events_again_seconds": 1,
        "chunk_tokens": CHUNK_BLOCKS * BLOCK_TOKENS,
    }
    tokens, salted = prompt(700), prompt(701)
    chunks = len(tokens) // (CHUNK_BLOCKS * BLOCK_TOKENS)
    # Another engine has saved chunks before, whose tokens this one learns when it is asked for them.
    before = connector | {"events": None, "events_tokens": None, "events_again_seconds": None}
    early = prompt(702)
    with Engine(world.scratch, "router-early", before) as other:
        other.ask(early)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= chunks, "chunks are saved")
    with Engine(world.scratch, "router-events", connector, kv_events_config=published) as engine:
        dynamo, llm_d = Dynamo(), LlmD()
        read: set[int] = set()

        def learn(is_so) -> bool:
            # The engine tells with its steps.
            engine.ask(prompt(99, 40), max_tokens=1)
            subscriber.read()
            for number in sorted(subscriber.batches.keys() - read):
                read.add(number)
                dynamo.take(subscriber.batches[number])
                llm_d.take(TOPIC, subscriber.batches[number])
            return is_so()

        bare = until(lambda: learn(lambda: dynamo.refused >= chunks), "what is there already is told", patience=60)
        assert bare and dynamo.overlap(early) == 0, "a chunk without tokens is a location, and no more"
        engine.ask(tokens)
        engine.ask(salted, **{"with": {"cache_salt": "alice"}})
        assert counted(engine.ask(early), "loads") == 1
        expected = chunks * CHUNK_BLOCKS
        until(
            lambda: learn(lambda: min(map(dynamo.overlap, (tokens, salted, early))) >= expected),
            "a router finds the prompts by their tokens",
            patience=60,
        )
        events = [event for payload in subscriber.batches.values() for event in vllm_decoder(payload)]
        ours = [one for one in events if isinstance(one, BlockStored) and one.ownership == "larder" and one.token_ids]
        own = {one for event in events if isinstance(event, BlockStored) and event.medium == "GPU" for one in event.block_hashes}
        assert {one for event in ours for one in event.block_hashes} <= own, "hashes differ from the engine's own"
        keys = {key for event in ours for each in event.extra_keys or () for key in each or ()}
        assert keys == {"alice"}, f"{keys}"
        for event in ours:
            gpu = next(one for one in events if isinstance(one, BlockStored) and one.medium == "GPU" and event.block_hashes[0] in one.block_hashes)
            assert (event.block_size, event.lora_name) == (gpu.block_size, gpu.lora_name)
        both = [one for one, places in llm_d.pods.items() if places == {(POD, "gpu"), (POD, "cpu")}]
        assert len(both) >= 3 * expected, f"{len(both)}"
        assert sorted(subscriber.batches) == list(range(min(subscriber.batches), max(subscriber.batches) + 1))
        late = Dynamo()
        for payload in subscriber.replayed(0).values():
            late.take(payload)
        assert late.overlap(tokens) >= expected, "what was missed is not replayed"
        # Whoever comes later and asks for nothing hears everything again.
        silent, start = Dynamo(), max(subscriber.batches) + 1

        def heard() -> bool:
            learn(lambda: True)
            for number in range(start, max(subscriber.batches) + 1):
                silent.take(subscriber.batches[number])
            return min(map(silent.overlap, (tokens, salted, early))) >= expected

        until(heard, "everything is published again", patience=60)
    cluster.stop()
    row("KV events for routers", f"{len(ours)} events stand alone; found by tokens, by hash with its tier, replayed, and again")
