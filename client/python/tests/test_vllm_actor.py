"""The choice of a node's actor for an engine, without vLLM."""

from dataclasses import dataclass

import larder_kv
import pytest
from larder_kv.vllm.actor import Actor, ChosenActor


@dataclass
class Session:
    device: int


class Node:
    """A node with some actors. The next session gets the least busy actor."""

    def __init__(self, actors: int, least_busy: int) -> None:
        self.actors, self.least_busy = actors, least_busy
        self.asked: list[int | None] = []

    def connect(self, device: int | None) -> Session:
        self.asked.append(device)
        if device is not None and device >= self.actors:
            error = larder_kv.RefusedError("this node has fewer devices")
            error.code = "unknown"
            raise error
        return Session(self.least_busy if device is None else device)


def test_an_engine_keeps_the_actor_that_the_node_chose():
    node, actor = Node(4, least_busy=2), ChosenActor(None)
    assert actor.number is None, "nobody knows before"
    assert actor.open(node.connect).device == 2
    node.least_busy = 0
    assert actor.open(node.connect).device == 2 and node.asked == [None, 2], "its ranks are there"


def test_another_actor_is_chosen_where_the_node_has_so_many_no_more():
    node, actor = Node(4, least_busy=3), ChosenActor(None)
    actor.open(node.connect)
    node.actors, node.least_busy = 2, 1
    with pytest.raises(larder_kv.RefusedError):
        actor.open(node.connect)
    assert actor.open(node.connect).device == 1 and node.asked == [None, 3, None]


def test_settings_go_before_the_nodes_choice_and_are_never_given_up():
    node, actor = Node(4, least_busy=2), ChosenActor(7)
    for _ in range(2):
        with pytest.raises(larder_kv.RefusedError):
            actor.open(node.connect)
    node.actors = 8
    assert actor.open(node.connect).device == 7


def test_a_rank_asks_for_the_actor_that_it_was_told_and_for_no_other():
    node, actor = Node(2, least_busy=0), Actor(None)
    actor.number = 5
    for _ in range(2):
        with pytest.raises(larder_kv.RefusedError):
            actor.open(node.connect)
    assert node.asked == [5, 5]
