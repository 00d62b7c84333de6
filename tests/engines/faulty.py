"""LarderConnector with faults of a test's choice, given by the environment variable LARDER_FAULTS (a JSON object).

- `lose_chunks_from`: chunks from this one on do not come, in every load;
- `kill_before_load`: the process of this id is killed before the first load is leased;
- `log`: hand-overs and reads are written to this file, one numbered JSON object a line;
- `tell_first_read`: the message that layer 0 was read goes into this file;
- `hold_last_layer_until`: the layer `last_layer` is handed over only when that message is there;
- `die_before_layer`: the process ends before it hands this layer over.
"""

import itertools
import json
import os
import signal
import time

from larder_kv.vllm import saver, transfer
from larder_kv.vllm.connector import LarderConnector as Faultless
from larder_kv.vllm.memory import Memory

FAULTS = json.loads(os.environ.get("LARDER_FAULTS", "{}"))
lease_of = transfer.lease_of


def faulty_lease_of(node, hashes, first_chunk):
    if victim := FAULTS.pop("kill_before_load", None):
        os.kill(victim, signal.SIGKILL)
        # The process has gone once its socket is closed.
        while os.path.exists(f"/proc/{victim}/fd/0"):
            time.sleep(0.001)
    last = FAULTS.get("lose_chunks_from")
    return lease_of(node, hashes[:last], min(first_chunk, len(hashes[:last])))


transfer.lease_of = faulty_lease_of


hand_over_layer, load_layer = saver.hand_over_layer, Memory.load_layer
numbers = itertools.count(1)


def log(**what) -> None:
    if path := FAULTS.get("log"):
        with open(path, "a") as file:
            file.write(json.dumps({"number": next(numbers)} | what) + "\n")


def faulty_hand_over_layer(node, reservation, pieces, layer, copy, pool, patience):
    if FAULTS.get("die_before_layer") == layer:
        os._exit(9)
    path = FAULTS.get("hold_last_layer_until")
    if path and layer == FAULTS["last_layer"]:
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path) as file:
            log(event="heard", message=file.read())
    is_given = hand_over_layer(node, reservation, pieces, layer, copy, pool, patience)
    log(event="hand over", layer=layer)
    return is_given


def faulty_load_layer(memory, lease, runs, layer):
    load_layer(memory, lease, runs, layer)
    message = f"{os.getpid()} has read layer {layer}"
    log(event="read", layer=layer, message=message)
    if layer == 0 and (path := FAULTS.get("tell_first_read")):
        with open(f"{path}.new", "w") as file:
            file.write(message)
        os.rename(f"{path}.new", path)


saver.hand_over_layer, Memory.load_layer = faulty_hand_over_layer, faulty_load_layer


class LarderConnector(Faultless):
    """Also measures the time that the engine's own thread spends in the connector. Ignores requests on demand: the connector
    never hears of them, so it looks nothing up for them and saves nothing."""

    seconds = 0.0
    seconds_before = 0.0
    seconds_to_first_token = None
    leaves_alone = False

    def on_new_request(self, request):
        LarderConnector.seconds_before, LarderConnector.seconds_to_first_token = LarderConnector.seconds, None
        if not self.leaves_alone:
            super().on_new_request(request)

    def build_connector_meta(self, scheduler_output):
        # The second step begins when the first token is out.
        if LarderConnector.seconds_to_first_token is None and not scheduler_output.scheduled_new_reqs:
            LarderConnector.seconds_to_first_token = LarderConnector.seconds - LarderConnector.seconds_before
        return super().build_connector_meta(scheduler_output)


def timed(method):
    def call(*arguments, **named):
        start = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            LarderConnector.seconds += time.perf_counter() - start

    return call


for name in (
    "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
    "request_finished_all_groups handle_preemptions start_load_kv wait_for_layer_load save_kv_layer wait_for_save "
    "get_finished build_connector_worker_meta get_block_ids_with_load_errors get_kv_connector_stats"
).split():
    setattr(LarderConnector, name, timed(getattr(LarderConnector, name)))
