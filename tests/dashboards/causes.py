"""Brings about the cause of each alert on a cluster of processes under a Prometheus, until the alert fires.

In a copy of the rules only `for` is shortened; thresholds and windows are those of the rules. Deaths of processes are in
deaths.py. A debugger brings about what no request does: faults of Larder itself.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import live
from cables import Cable
from deaths import firing
from debugger import PLACES, StoppedThread
from processes import Cluster

# The value that replaces `for` in the rules.
FOR = "2s"
WITHIN_SECONDS = 60
DISK = '[disk]\nfolder = "{dir}.disk"\ncapacity_bytes = "64MiB"\nsegment_bytes = "1MiB"'
# A silent member stays a member.
PATIENT = "[membership]\nremove_after_ms = 600000\nremove_reported_after_ms = 600000"
READ_ERRORS = Path(__file__).resolve().parents[1] / "src/soak/faults/read_errors.c"
CAUSES = {}


def cause(*alerts):
    """Registers a function that brings a cause about. The function may return a function that brings the cause about again, until
    all its alerts fire."""

    def register(function):
        for alert in alerts:
            CAUSES[alert] = function
        return function

    return register


class Stage:
    """A cluster and everything that is done to it."""

    def __init__(self, larder, engine, folder, prometheus, name):
        self.larder, self.engine_program, self.folder, self.prometheus, self.name = larder, engine, folder / name, prometheus, name
        self.stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.prometheus.scrape_no_more(self.name)
        self.stack.close()

    def cluster(self, **options):
        """Starts a cluster, and waits until all of it is scraped: Prometheus must have seen a counter before it grows."""
        made = self.stack.enter_context(Cluster(self.larder, self.folder, **options))
        wait("the cluster is whole", lambda: made.health() == ("healthy", 0))
        self.scrape(made)
        return made

    def scrape(self, cluster):
        self.prometheus.scrape(self.name, cluster)
        up = f'up{{cluster="{self.name}"}} == 1 and count_over_time(up{{cluster="{self.name}"}}[1m]) > 2'
        servers = len(cluster.nodes) + 1
        wait("it is scraped", lambda: len(self.prometheus.api("query", query=up)["result"]) == servers)

    def engine(self, cluster, name, deed):
        """Starts an engine, and waits until it has done its deed, or has begun a deed that goes on."""
        command = [self.engine_program, cluster.socket(name), deed]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([str(word) for word in command], **options)
        self.stack.callback(lambda: (process.kill(), process.wait()))
        assert process.stdout.readline() == "done\n", f"the engine could not {deed}"
        return process

    def cable(self, to):
        return self.stack.enter_context(Cable(to))

    def cables(self):
        """The cables through which the other nodes reach each node, by name, and the function that makes them."""
        made = {}

        def between(name, address):
            host, _, port = address.rpartition(":")
            made[name] = self.cable((host, int(port)))
            return made[name].address

        return made, between

    def later(self, undo):
        self.stack.callback(undo)


# Deeds of engines.


@cause("LarderPinnedFull")
def pins(stage):
    stage.engine(stage.cluster(names=["a"]), "a", "pin much")


@cause("LarderQuarantineStays")
def a_process_that_keeps_memory(stage):
    stage.engine(stage.cluster(names=["a"]), "a", "hold much and close")


@cause("LarderWindowsFull")
def a_window_for_one_engine(stage):
    stage.engine(stage.cluster(names=["a"], node='max_window_bytes = "1MiB"'), "a", "put")


@cause("LarderRequestsNotServed")
def no_room(stage):
    stage.engine(stage.cluster(names=["a"]), "a", "ask too much")


@cause("LarderChunksLeaveSoon")
def more_chunks_than_room(stage):
    stage.engine(stage.cluster(names=["a"]), "a", "churn")


@cause("LarderFalseDamageReports")
def an_engine_with_bad_memory(stage):
    cluster = stage.cluster(names=["a"])
    stage.engine(cluster, "a", "put")
    return lambda: stage.engine(cluster, "a", "report")


@cause("LarderChunkNamesRefused")
def one_hash_for_two_chunks(stage):
    stage.engine(stage.cluster(names=["a"]), "a", "contradict")


@cause("LarderRecordMisnamed")
def one_hash_for_two_chunks_of_which_the_store_has_one(stage):
    cluster, _ = with_objects(stage)
    stage.engine(cluster, "a", "misplace")


# Faults of memory, drives and stores.


@cause("LarderDamagedChunk")
def memory_that_forgets(stage):
    cluster = stage.cluster(names=["a"])
    stage.engine(cluster, "a", "put")
    flip_a_bit_in_every_page(cluster.pid("a"))
    stage.engine(cluster, "a", "report")


@cause("LarderWrongBytes")
def memory_of_another_node_that_forgets(stage):
    cluster = stage.cluster()
    stage.engine(cluster, "a", "put")
    flip_a_bit_in_every_page(cluster.pid("a"))
    return lambda: stage.engine(cluster, "b", "get")


@cause("LarderDiskWrongBytes")
def a_drive_that_forgets(stage):
    cluster = stage.cluster(names=["a"], node=DISK)
    let_churn(stage, cluster)
    for path in (stage.folder / "a.disk").rglob("*"):
        if path.is_file() and path.stat().st_size >= 1 << 20:
            with path.open("r+b") as drive:
                # Damages something in every 16 KiB, except the first ones, which describe the drive.
                for at in range(1 << 20, path.stat().st_size, 1 << 14):
                    drive.seek(at)
                    drive.write(b"rot" * 16)
    stage.engine(cluster, "a", "read")


@cause("LarderDiskReadErrors")
def a_drive_with_bad_sectors(stage):
    cluster = stage.cluster(names=["a"], node=DISK, environment=bad_sectors(stage.folder.with_suffix(".sectors")))
    let_churn(stage, cluster)
    stage.engine(cluster, "a", "read")


@cause("LarderDiskSilent")
def a_drive_that_hangs(stage):
    hangs = stage.folder.with_suffix(".hangs")
    environment = {**bad_sectors(stage.folder.with_suffix(".sectors")), "LARDER_SOAK_HANGS": str(hangs)}
    cluster = stage.cluster(names=["a"], node=DISK + "\nread_deadline_ms = 1000", environment=environment)
    let_churn(stage, cluster)
    hangs.touch()
    stage.later(hangs.unlink)
    stage.engine(cluster, "a", "churn")


@cause("LarderDiskClosed")
def a_drive_that_is_taken_away(stage):
    cluster = stage.cluster(names=["a"], node=DISK)
    let_churn(stage, cluster)
    shutil.rmtree(stage.folder / "a.disk")
    stage.engine(cluster, "a", "churn")


@cause("LarderObjectWrongBytes")
def a_store_that_forgets(stage):
    cluster, objects = with_objects(stage)
    for path in objects:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    stage.engine(cluster, "a", "read")


@cause("LarderObjectStoreLeftAlone")
def a_store_that_is_no_store(stage):
    cluster, _ = with_objects(stage)
    shutil.rmtree(stage.folder.with_suffix(".objects"))
    stage.folder.with_suffix(".objects").write_text("no folder")
    stage.engine(cluster, "a", "churn")


# Faults between processes.


@cause("LarderNameTwice")
def two_processes_of_one_name(stage):
    cluster = stage.cluster()
    cluster.start_node("a", process="another a")


@cause("LarderPeersSilent", "LarderLoadsFail")
def a_holder_that_stands_still(stage):
    cluster = stage.cluster(coordinator=PATIENT)
    stage.engine(cluster, "a", "put")
    # The node looks up first, so that it knows the holders.
    stage.engine(cluster, "b", "look up")
    time.sleep(1)
    cluster.signal("a", signal.SIGSTOP)
    stage.later(lambda: cluster.signal("a", signal.SIGCONT))
    return lambda: stage.engine(cluster, "b", "get")


@cause("LarderPacketLoss")
def a_network_that_loses(stage):
    cables, between = stage.cables()
    cluster = stage.cluster(cables=between)
    for cable in cables.values():
        cable.loss = 0.1
    stage.engine(cluster, "a", "churn")
    stage.engine(cluster, "b", "read")


@cause("LarderLookupsLate")
def a_network_that_is_slow(stage):
    cables, between = stage.cables()
    cluster = stage.cluster(cables=between)
    for cable in cables.values():
        cable.seconds = 0.02
    stage.engine(cluster, "a", "look up")


@cause("LarderAnnouncesLag")
def a_network_that_comes_and_goes(stage):
    cables, between = stage.cables()
    cluster = stage.cluster(cables=between, coordinator=PATIENT)

    def again():
        for cable in cables.values():
            cable.is_cut = True
        let_churn(stage, cluster, seconds=1)
        time.sleep(6)
        for cable in cables.values():
            cable.is_cut = False
        time.sleep(3)

    return again


@cause("LarderHintsWrong")
def chunks_that_leave_before_anybody_hears(stage):
    cables, between = stage.cables()
    cluster = stage.cluster(cables=between)
    for cable in cables.values():
        cable.seconds = 0.1
    stage.engine(cluster, "a", "churn")
    stage.engine(cluster, "b", "read")


@cause("LarderEpochsDiffer")
def a_coordinator_that_is_not_heard(stage):
    cluster = stage.cluster(names=["a", "b"], coordinator=PATIENT)
    host, _, port = cluster.peer.rpartition(":")
    cable = stage.cable((host, int(port)))
    for name in ["c", "d"]:
        cluster.ca("issue", "node", name)
    cluster.start_node("c", coordinator=cable.address)
    stage.scrape(cluster)
    cable.is_cut = True
    cluster.start_node("d")


@cause("LarderDirectoryFull")
def a_home_of_which_the_bound_is_reached(stage):
    # A home keeps a million rows at least, which would take an engine too long to save: the bound is lowered.
    cluster = stage.cluster()
    stage.engine(cluster, "a", "churn")
    said = urllib.request.urlopen(f"http://{cluster.nodes['a']}/metrics", timeout=10).read().decode()
    (bound,) = re.findall(r"^larder_directory_max_rows(?:\{.*\})? (\d+)$", said, re.M)
    thread = StoppedThread(cluster.pid("a"), PEERS)
    shard = thread.until(COUNTED)[PLACES["rdi"]]
    places = range(shard, shard + SHARD_BYTES, 8)
    found = [at for at in places if thread.memory(at, 8) == int(bound).to_bytes(8, "little")]
    # A value after the home's own fields may equal the bound, too.
    if found:
        thread.change(found[0], ROWS_AT_MOST.to_bytes(8, "little"))
    # A process with a stopped thread cannot end.
    thread.go_on()
    assert found, f"the home has no bound of {bound}"


# Faults of a process.


@cause("LarderCertificateExpires")
def a_certificate_of_yesterday(stage):
    stage.cluster(names=["a"], days=6)


@cause("LarderFilesRunOut")
def few_descriptors(stage):
    cluster = stage.cluster(names=["a"])
    used = len(os.listdir(f"/proc/{cluster.pid('a')}/fd"))
    _, hard = resource.prlimit(cluster.pid("a"), resource.RLIMIT_NOFILE)
    resource.prlimit(cluster.pid("a"), resource.RLIMIT_NOFILE, (used + 4, hard))


@cause("LarderProcessRestarts")
def a_node_that_dies_again_and_again(stage):
    cluster = stage.cluster(names=["a"])
    return lambda: cluster.restart("a")


@cause("LarderActorSilent")
def a_thread_that_hangs(stage):
    cluster = stage.cluster(names=["a"])
    thread = StoppedThread(cluster.pid("a"), ACTOR)
    stage.later(thread.go_on)


# Faults of Larder itself.


@cause("LarderActorRestarted")
def a_panic_in_an_actor(stage):
    cluster = stage.cluster(names=["a"])
    stage.engine(cluster, "a", "look up")
    StoppedThread(cluster.pid("a"), ACTOR).panic(LOOKUP)


@cause("LarderTaskPanicked")
def a_panic_in_the_directory(stage):
    cluster = stage.cluster()
    stage.engine(cluster, "a", "churn")
    StoppedThread(cluster.pid("a"), PEERS).panic(ANSWERED)


@cause("LarderChunkMisnamed")
def a_name_that_changes_between_decision_and_answer(stage):
    cluster = stage.cluster(names=["a"])
    stage.engine(cluster, "a", "put")
    stage.engine(cluster, "a", "read")
    thread = StoppedThread(cluster.pid("a"), ACTOR)
    # The requested names: in tests, the name of a prompt and the number of a chunk, in turn.
    names = thread.until(NAMED_PREFIX)[PLACES["rdx"]]
    first = thread.memory(names, 4)
    assert first[:2] == first[2:] and first[1] == 1, f"no name of a first chunk: {first}"
    thread.change(names, bytes([first[0] ^ 1]))
    thread.go_on()


ACTOR = re.compile(r"gpu|actor|device")
PEERS = re.compile(r"larder-peer")
LOOKUP = re.compile(r"12lookup_found17h")
# Called each time the metrics are read.
COUNTED = re.compile(r"5Shard7missing17h")
# More bytes than the fields of a home take.
SHARD_BYTES = 512
ROWS_AT_MOST = 100
ANSWERED = re.compile(r"6Outbox8answered17h")
NAMED_PREFIX = re.compile(r"12named_prefix17h")


def let_churn(stage, cluster, seconds=4):
    """Saves more chunks than memory has room for, and then rests."""
    engine = stage.engine(cluster, "a", "churn")
    time.sleep(seconds)
    engine.kill()
    engine.wait()
    time.sleep(1)


def with_objects(stage):
    """A node with an object store in a folder. Chunks that memory has evicted are there. Also returns the chunks' files."""
    folder = stage.folder.with_suffix(".objects")
    folder.mkdir()
    cluster = stage.cluster(names=["a"], node=f'[object]\nurl = "file://{folder}"')
    let_churn(stage, cluster)
    return cluster, [path for path in sorted(folder.rglob("*")) if path.is_file()]


def bad_sectors(folder):
    """The environment of a node for which some sectors of its drive cannot be read."""
    folder.mkdir()
    library = folder / "read_errors.so"
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O1", "-o", library, READ_ERRORS, "-ldl"]
    subprocess.run([str(word) for word in command], check=True)
    # One sector in the middle of every second megabyte; more would close the tier.
    sectors = [(2 * number << 20) + (1 << 19) for number in range(1, 8)]
    return {"LD_PRELOAD": str(library), "LARDER_SOAK_BAD": ",".join(map(str, sectors)), "LARDER_SOAK_LASTS": "0"}


def flip_a_bit_in_every_page(pid):
    """Flips bits in the arena of a node, as broken memory does."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "memfd:larder-arena" in line]
    assert ranges, "the process has no arena"
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in ranges:
            for page in range(int(start, 16), int(end, 16), 4096):
                memory.seek(page + 1234)
                byte = memory.read(1)[0]
                memory.seek(page + 1234)
                memory.write(bytes([byte ^ 0x10]))


def impatient(rules, folder):
    """Copies of the rules whose alerts wait only a moment."""
    folder.mkdir()
    for path in rules:
        (folder / path.name).write_text(re.sub(r"^( +)for: .*$", rf"\1for: {FOR}", path.read_text(), flags=re.M))
    return sorted(folder.iterdir())


def alerts(larder, engine, folder, rules, names=None):
    """Brings the causes about, one after the other; yields alerts, and the time that each took to fire."""
    with live.Prometheus({}, folder, impatient(rules, folder / "rules")) as prometheus:
        for function in dict.fromkeys(CAUSES.values()):
            wanted = [alert for alert, of in CAUSES.items() if of is function and (not names or alert in names)]
            if not wanted:
                continue
            with Stage(larder, engine, folder, prometheus, function.__name__) as stage:
                began = time.monotonic()
                again = function(stage)
                for alert in wanted:
                    while (alert, stage.name) not in firing(prometheus):
                        passed = time.monotonic() - began
                        assert passed < WITHIN_SECONDS, f"{alert} does not fire: {function.__name__}"
                        if again:
                            again()
                        time.sleep(0.2)
                    yield alert, function.__name__.replace("_", " "), time.monotonic() - began


def wait(what, holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
