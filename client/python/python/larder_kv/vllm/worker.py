"""The connector's worker half: copies between this rank's blocks and the node.

It tells vLLM the blocks that did not come. Blocks of several groups cannot be reported so: there a failed load is reported by its
request. Preemption ends a copy before its blocks are overwritten.
"""

import atexit
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from larder_kv import LayerPages
from larder_kv.namespace import NamespaceSpec
from larder_kv.vllm.actor import Actor
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.device import Device, device_of
from larder_kv.vllm.engine import Engine
from larder_kv.vllm.groups import Kind
from larder_kv.vllm.layout import LayerTensor, layer_pages, page_bytes
from larder_kv.vllm.memory import Memory, PoolMemory
from larder_kv.vllm.messages import SavesEnded, StepPlan
from larder_kv.vllm.plan import Garbage, Save
from larder_kv.vllm.saver import Saver
from larder_kv.vllm.settings import UnsupportedError
from larder_kv.vllm.transfer import LayerGate, Loader

if TYPE_CHECKING:
    from larder_kv.vllm.node import Node

logger = logging.getLogger("vllm.larder")

IDLE_SECONDS = 0.002
"""Time for which a step without computation waits for a load."""
DRAIN_SECONDS = 10.0
"""Time for which an ending engine waits for its last saves."""


class WorkerHalf:
    """The worker half. vLLM's model runner calls it, on its own thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts = engine, Counts()
        self._actor = Actor(engine.settings.device)
        # The actor to which the way was opened last.
        self._used: int | None = None
        self._layers: dict[str, int] = {}
        self._memory_layers = 0
        self._device: Device | None = None
        self._node: Node | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._loaded: LayerGate | None = None
        self._computed: LayerGate | None = None
        self._finished: set[str] = set()
        # The step that has begun and not ended.
        self._begun: StepPlan | None = None
        # Saves that this rank leaves to others.
        self._unsaved: list[int] = []
        self._garbage = Garbage()
        atexit.register(self.close)

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the KV caches, and opens the way to the node."""
        engine = self.engine
        expected = [layer.name for pool in engine.pools for layer in pool.layers]
        names = [name for name in expected if name in tensors]
        if len(names) != len(expected) or len(tensors) != len(names):
            raise UnsupportedError(
                f"this rank has KV caches of {len(tensors)} layers, {len(names)} of them of the {len(expected)} "
                "whose blocks are transferred: drafts of speculative decoding and the like are not supported"
            )
        all_storages = [tensor.untyped_storage() for tensor in tensors.values()]
        storages = list({storage.data_ptr(): storage for storage in all_storages}.values())
        self._device = device_of(list(tensors.values()), storages)
        memory = memory_of(engine, tensors, storages, self._device)
        if engine.writes_its_slice():
            engine.settings.check_block("a chunk of this rank", memory.chunk_bytes)
        self._layers, self._memory_layers = {name: number for number, name in enumerate(names)}, memory.layers
        slices, window_bytes = [engine.slice_of_rank()], engine.settings.window_bytes
        self._node = engine.open_node(slices, window_bytes, self.counts, self._actor, begins=False)
        self._loader = Loader(self._node, memory, engine.shape, self.counts, engine.settings)
        if engine.writes_its_slice():
            self._saver = Saver(self._node, memory, engine.shape, self.counts, engine.settings.save_queue_chunks)

    def begin_step(self, plan: StepPlan) -> None:
        """Opens the way to the node before the step uses it, and stops reading blocks before they are overwritten. First ends the
        step before it if vLLM has not: with speculation, vLLM's older model runner ends steps in the last pipeline stage alone."""
        if self._begun is not None:
            self.end_step(self._begun)
        self._begun = plan
        self._use(plan)
        for request in plan.preempted:
            self._cancel(request)

    def start_loads(self, plan: StepPlan) -> None:
        """Begins the step's loads: synchronous ones are leased before this returns."""
        if self._loader is None or self._device is None or not plan.loads:
            return
        # Steps that are still under way may write blocks that these loads were given meanwhile.
        free = self._device.mark()
        if self.engine.settings.load == "async":
            self._loader.load_soon(plan.loads, free)
            return
        self._loaded = self._loader.load_now(plan.loads, free)
        if self._loader.has_failed():
            self._garbage.load_failed(plan.step)

    def wait_for_layer(self, name: str) -> None:
        """Waits until the step may read the layer."""
        if self._loaded is not None and name in self._layers:
            self._loaded.wait(self._layers[name])

    def layer_computed(self, name: str, plan: StepPlan) -> None:
        """Notes that the step has written the layer: saves that are handed over may read it. Other saves begin with the end of
        the step: an engine on processors would lose processors to its saves, and on a GPU each copy is an order to the GPU. With
        micro-batches, all saves do: the layer lacks the tokens of the other micro-batches."""
        if self.engine.has_micro_batches:
            return
        if name in self._layers and self._device is not None and any(save.attempt is not None for save in plan.saves):
            # The loads of all layers up to this one have ended. With the last layer the saves commit.
            self._give_up_garbage(plan)
            self._begin_saves(plan)
            if self._computed is not None:
                self._computed.open(self._layers[name], self._device.mark())

    def end_step(self, plan: StepPlan) -> None:
        """Ends the forward pass. Does not wait for saves."""
        self._begun = None
        if self._loaded is not None:
            self._loaded.wait_all()
            self._give_up_garbage(plan)
            self._loaded = None
        if plan.saves:
            self._begin_saves(plan)
            if self._saver is None:
                self._leave_unsaved(plan.saves)
        if self._computed is not None and self._device is not None:
            self._computed.open_all(self._device.mark())
            self._computed = None

    def finished(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Requests whose blocks are no longer read, and requests whose loads have ended. A step without computation waits a
        moment for a load: otherwise the engine would ask again at once, and keep the interpreter's lock from the loading
        thread."""
        if plan.is_idle and self._loader is not None:
            self._loader.wait_for_one(IDLE_SECONDS)
        self._finished.update(plan.finished)
        saver = self._saver
        sent = {name for name in self._finished if saver is None or not saver.is_reading(name)}
        self._finished -= sent
        if saver is not None:
            for name in sent:
                saver.forget(name)
        return sent, self._loader.take_done() if self._loader else set()

    def failed_blocks(self) -> set[int]:
        """Blocks that did not come, since the last call."""
        return self._loader.take_failed() if self._loader else set()

    def failed_requests(self, received: set[str]) -> set[str]:
        """The requests with ended loads that must be computed as a whole."""
        return self._loader.take_failed_requests(received) if self._loader else set()

    def ended_saves(self) -> SavesEnded | None:
        """Saves whose blocks are no longer read, since the last call."""
        ended, self._unsaved = self._unsaved, []
        if self._saver is not None:
            ended += self._saver.take_ended()
        return SavesEnded(Counter(ended)) if ended else None

    def close(self) -> None:
        """Ends the threads of this half. None may be in native code when the interpreter ends."""
        atexit.unregister(self.close)
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close(DRAIN_SECONDS)
        if self._node is not None:
            self._node.close()
        self._loader = self._saver = self._node = None

    def _use(self, plan: StepPlan) -> None:
        """Opens the way to the engine's actor, at the first step that names it, under the scheduler's names."""
        if self._node is None or plan.actor is None or plan.actor == self._used:
            return
        named = with_names_of(plan.namespace, self._node.namespace)
        if named != plan.namespace:
            logger.error(
                "the scheduler and this rank find different blocks, so this rank's chunks are of no use: %s; %s",
                plan.namespace,
                named,
            )
        self._actor.number = self._used = plan.actor
        self._node.namespace = named
        self._node.begin()
        self._node.wait_for_first_try(self.engine.settings.reconnect_seconds)

    def _leave_unsaved(self, saves: list[Save]) -> None:
        self._unsaved += [save.number for save in saves if save.number is not None]

    def _cancel(self, request: str) -> None:
        if self._saver is not None:
            self._saver.cancel(request)

    def _give_up_garbage(self, plan: StepPlan) -> None:
        """Stops the step's saves if a load of the step has failed: the step computes from blocks that did not come."""
        if self._loaded is None or self._loader is None or not self._loader.has_failed():
            return
        self._garbage.load_failed(plan.step)
        for save in plan.saves:
            self._cancel(save.request)

    def _begin_saves(self, plan: StepPlan) -> None:
        """Begins the step's saves, once. Begins none if the step computed from blocks that did not come."""
        if self._computed is not None or self._saver is None:
            return
        self._computed = LayerGate(self._memory_layers)
        if not self._garbage.may_save(plan.recovered):
            self.counts.add("shed_chunks_gone", sum(len(save.hashes) - save.first_chunk for save in plan.saves))
            self._leave_unsaved(plan.saves)
            return
        self._saver.save_soon(plan.saves, self._computed)


def with_names_of(scheduler: NamespaceSpec, rank: NamespaceSpec) -> NamespaceSpec:
    """A rank's namespace under the names that the scheduler read from the configuration; the sizes are the rank's own."""
    return replace(rank, model=scheduler.model, revision=scheduler.revision, kv_dtype=scheduler.kv_dtype)


def memory_of(
    engine: Engine, tensors: dict[str, torch.Tensor], storages: Sequence[torch.UntypedStorage], device: Device
) -> Memory:
    """The engine's blocks by their addresses."""
    places = [storage.data_ptr() for storage in storages]

    def pages_of(name: str, rows: int) -> LayerPages:
        tensor = tensors[name]
        place = tensor.untyped_storage().data_ptr()
        layer = LayerTensor(
            name=name,
            region=places.index(place),
            offset=tensor.data_ptr() - place,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            element_bytes=tensor.element_size(),
        )
        return layer_pages(layer, engine.facts.layout, engine.blocks, rows)

    pools: list[PoolMemory] = []
    for pool in engine.pools:
        layers = [pages_of(layer.name, pool.rows) for layer in pool.layers]
        found = page_bytes(layers[0])
        if found != pool.page_bytes:
            raise UnsupportedError(
                f"a block has {found} bytes in each layer of {pool.name}, but {pool.page_bytes} were expected"
            )
        groups = [layer.group for layer in pool.layers]
        # A pipeline stage with fewer layers than another repeats its last layer, so that all slices are alike.
        lacking = engine.facts.layers - len(layers) if not pools else 0
        layers, groups = layers + layers[-1:] * lacking, groups + groups[-1:] * lacking
        pools.append(PoolMemory(device.pages(layers, pool.pages), tuple(groups), pool.kind is Kind.STATE))
    return Memory(pools)
