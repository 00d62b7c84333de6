"""The KV events that routers follow: vLLM's own publisher publishes the node's chunks, and the node publishes them itself. Every
decoder reads both (`decoders.py`).
"""

import msgspec
from answers import counted, prompt
from decoders import SNAPSHOT, Dynamo, LlmD, Subscriber, routers
from driver import BLOCK_TOKENS, Engine, Node
from vllm.distributed.kv_events import BlockStored, KVEventBatch

POD, MODEL = "10.1.2.3", "a-model"
TOPIC = f"kv@{POD}@{MODEL}"
CHUNK_BLOCKS = 2
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
SALT = "alice"


def vllm_decoder(payload: bytes) -> list:
    return msgspec.msgpack.decode(payload, type=KVEventBatch).events


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
        "chunk_tokens": CHUNK_TOKENS,
    }
    tokens, salted, early = prompt(700), prompt(701), prompt(702)
    chunks = len(tokens) // CHUNK_TOKENS
    # Another engine has saved chunks before. This engine learns their tokens when it is asked for them.
    before = connector | {"events": None, "events_tokens": None, "events_again_seconds": None}
    with Engine(world.scratch, "router-early", before) as other:
        other.ask(early)
        until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= chunks, "chunks are saved")
    with Engine(world.scratch, "router-events", connector, kv_events_config=published) as engine:
        indexes = routers(BLOCK_TOKENS)
        gpu = LlmD(BLOCK_TOKENS, medium="GPU")
        read: set[int] = set()

        def learn() -> None:
            # The engine publishes with its steps.
            engine.ask(prompt(99, 40), max_tokens=1)
            subscriber.read()
            for number in sorted(subscriber.batches.keys() - read):
                read.add(number)
                for index in (*indexes, gpu):
                    index.take(TOPIC, subscriber.batches[number])

        learn()
        assert [index.overlap(early) for index in indexes] == [0] * 4, "nobody knows its tokens yet"
        engine.ask(tokens)
        engine.ask(salted, **{"with": {"cache_salt": SALT}})
        assert counted(engine.ask(early), "loads") == 1
        expected = chunks * CHUNK_BLOCKS

        def is_found() -> bool:
            learn()
            return min(overlaps(index, (tokens, early), salted) for index in indexes) >= expected

        until(is_found, "every router finds the prompts by their tokens", patience=60)
        assert [index.refused for index in indexes] == [0] * 4, f"{[index.refused for index in indexes]}"
        events = [event for payload in subscriber.batches.values() for event in vllm_decoder(payload)]
        stored = [one for one in events if isinstance(one, BlockStored)]
        ours = [one for one in stored if one.ownership == "larder"]
        own = {one: event for event in stored if event.medium == "GPU" for one in event.block_hashes}
        for event in ours:
            assert set(event.block_hashes) <= own.keys(), "hashes differ from the engine's own"
            first = own[event.block_hashes[0]]
            assert (event.block_size, event.lora_name) == (first.block_size, first.lora_name)
        keys = {key for event in ours for each in event.extra_keys or () for key in each or ()}
        assert keys == {SALT}, f"{keys}"
        assert gpu.overlap(tokens) >= expected, "vLLM's own blocks are told beside them"
        assert sorted(subscriber.batches) == list(range(min(subscriber.batches), max(subscriber.batches) + 1))
        late = Dynamo(BLOCK_TOKENS)
        for _, topic, payload in subscriber.replayed(0):
            late.take(topic, payload)
        assert late.overlap(tokens) >= expected, "what was missed is not replayed"
        # A late subscriber that requests nothing gets everything again.
        silent, start = Dynamo(BLOCK_TOKENS), max(subscriber.batches) + 1

        def is_heard() -> bool:
            learn()
            for number in range(start, max(subscriber.batches) + 1):
                silent.take(TOPIC, subscriber.batches[number])
            return overlaps(silent, (tokens, early), salted) >= expected

        until(is_heard, "everything is published again", patience=60)
    cluster.stop()
    row("KV events for routers", f"{len(ours)} events stand alone; found by four routers, replayed, and told again")


def of_nodes(world, row, until) -> None:
    """The node's own events about chunks that an engine describes: live, replayed, and as a snapshot; then an engine goes away,
    and then a chunk."""
    node = Node(
        world.scratch,
        "telling",
        '[kv_events]\nlisten = "127.0.0.1:0"\nreplay_listen = "127.0.0.1:0"\ntokens = "local"\ntopic = "kv@10.9.8.7@a-model"\n',
    )
    status = node.status()
    subscriber = Subscriber(f"tcp://{status['kv_events']}", f"tcp://{status['kv_events_replay']}")
    connector = {"socket": node.socket, "chunk_tokens": CHUNK_TOKENS, "describe": True}
    tokens, salted, early = prompt(710), prompt(711), prompt(712)
    expected = len(tokens) // CHUNK_TOKENS * CHUNK_BLOCKS
    indexes, read = routers(BLOCK_TOKENS), set()

    def learn() -> None:
        subscriber.read()
        for number in sorted(subscriber.batches.keys() - read):
            read.add(number)
            for index in indexes:
                index.take(subscriber.topic, subscriber.batches[number])

    with Engine(world.scratch, "quiet", connector | {"describe": None}) as quiet:
        quiet.ask(early)
        until(lambda: node.metric("larder_cached_chunks", tier="host") >= 3, "chunks are saved")
    learn()
    assert [index.overlap(early) for index in indexes] == [0] * 4, "nobody has told the tokens"
    with Engine(world.scratch, "telling-engine", connector) as engine:
        engine.ask(tokens)
        engine.ask(salted, **{"with": {"cache_salt": SALT}})
        engine.ask(early)
        subscriber.read()
        # Messages from before the subscription took effect are requested.
        missed = [one for one in subscriber.replayed(0) if one[0] not in subscriber.batches]
        for number, topic, payload in missed:
            subscriber.batches[number], subscriber.topic = payload, topic

        def is_found() -> bool:
            learn()
            return min(overlaps(index, (tokens, early), salted) for index in indexes) >= expected

        until(is_found, "every router finds the prompts by their tokens", patience=60)
    assert [index.refused for index in indexes] == [0] * 4, f"{[index.refused for index in indexes]}"
    assert subscriber.topic == TOPIC.replace(POD, "10.9.8.7")
    events = [event for payload in subscriber.batches.values() for event in vllm_decoder(payload)]
    keys = {key for event in events if isinstance(event, BlockStored) for each in event.extra_keys or () for key in each or ()}
    assert keys == {SALT}, f"{keys}"
    # The engine is gone, the node is not: a late subscriber gets everything.
    late = routers(BLOCK_TOKENS)
    for _, topic, payload in subscriber.replayed(SNAPSHOT):
        for index in late:
            index.take(topic, payload)
    assert min(overlaps(index, (tokens, early), salted) for index in late) >= expected, "the snapshot lacks something"
    node.stop()
    row("a node's own KV events", "found by four routers: live, replayed, and in a snapshot after the engine had gone")


def overlaps(index, prompts, salted) -> int:
    """The least overlap that an index finds for some prompts, and for a prompt with a salt."""
    with_salt = index.overlap(salted, SALT) if isinstance(index, LlmD) else index.overlap(salted)
    return min(with_salt, *map(index.overlap, prompts))
