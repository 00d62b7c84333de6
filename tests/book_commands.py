#!/usr/bin/env python3
"""Runs the commands of pages of the book, exactly as they are there, on two hosts: network namespaces of this machine with an
/etc, /usr, /run, /var/lib and home of their own. Short scripts stand in for systemd and ssh. Then compares the answers of the
running cluster with the book's HTTP reference.

    tests/book_commands.py

Needs root, for the namespaces. The program is target/debug/larder, or $LARDER; tests/programs builds it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

sys.dont_write_bytecode = True
import http_reference
from parts import NOTHING_DONE, skip

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/book/src"
LARDER = Path(os.environ.get("LARDER", Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/larder")).resolve()
# A program that looks prompts up and saves KV, as engines do: client/rust/examples/put_and_get.rs.
ENGINE_PROGRAM = LARDER.parent / "example-put-and-get"
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
# The address that pages give the coordinator, which runs on `a`.
COORDINATOR = "10.0.0.10"
BLOCK = re.compile(r"(?:<!-- (run|not run): (.+?) -->\n)?```sh\n(.*?)```", re.S)
# Commands whose result depends on the machine: a test machine may lack huge pages and large socket buffers, and doctor says so.
MAY_FAIL = {"doctor", "begin", "own-doctor", "wrong"}
# The other pages: what runs their commands, or why nothing runs them. A test in client/cli/src/args.rs checks that every `larder`
# line is a command.
ENGINE = "starts an engine with the reader's model; tests/engines/run starts it with the same settings"
ELSEWHERE = {
    "first-hour.md": "run by tests/engines/run first_hour",
    "console.md": "run by client/cli/tests/explain.rs and tests/console/run",
    "kubernetes-vllm.md": "checked by tests/deploy/run, and started by tests/engines/run kubernetes",
    "kubernetes.md": "run, as far as a machine can, by tests/deploy/run",
    "gpu.md": "needs a GPU: tests/gpu/run",
    "lmcache.md": ENGINE,
    "sglang.md": ENGINE,
    "vllm.md": ENGINE,
    "routing.md": ENGINE,
    "router.md": "run by client/python/tests/test_router.py and tests/engines/run prefill_decode_router",
    "router-dynamo.md": ENGINE,
    "router-llm-d.md": ENGINE,
    "python.md": "builds a package: client/python/tests/run",
    "network.md": "changes the machine's settings",
    "coordinators.md": "needs several coordinators: tests/tests/suite/elections.rs starts them",
    "tracing.md": "needs a collector: tests/tracing/run",
}
# Files that the pages' readers have: a model, and a trace in which prompts begin alike.
MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "intermediate_size": 512,
}
TRACE = [
    {"timestamp": 100 * n, "input_length": 1536, "output_length": 8, "hash_ids": [n % 5, 100 + n % 20, 200 + n]} for n in range(200)
]
NAMESPACE = {
    "model": "qwen",
    "kv_dtype": "bfloat16",
    "layout": "nhd",
    "pools": [{"name": "kv", "layers": 2, "layer_bytes": 4096}],
}

# Starts the program of a unit, as the unit's user, with the unit's folders.
SYSTEMCTL = """#!/bin/sh
verb=$1; shift
[ "$1" = --now ] && shift
for unit; do
  file=/etc/systemd/system/$unit.service
  value() { sed -n "s/^$1=//p" $file; }
  [ -f $file ] || { echo "no unit $unit" >&2; exit 5; }
  if [ $verb != enable ] && [ -f /run/$unit.pid ]; then
    pid=$(cat /run/$unit.pid); kill $pid; while [ -d /proc/$pid ] && ! grep -q '^State:.Z' /proc/$pid/status; do sleep 0.05; done
    rm /run/$unit.pid
  fi
  case $verb in stop | disable) continue ;; esac
  user=$(value User)
  for folder in $(value RuntimeDirectory); do install -d -o $user -g $user /run/$folder; done
  for folder in $(value StateDirectory); do install -d -m 0750 -o $user -g $user /var/lib/$folder; done
  setsid setpriv --reuid $user --regid $user --init-groups $(value ExecStart) >> /run/$unit.log 2>&1 < /dev/null &
  echo $! > /run/$unit.pid
done
"""
# Copies files to the home of the other host. The last argument is `HOST:`.
SCP = """#!/bin/sh
for last; do :; done
while [ $# -gt 1 ]; do cp "$1" "$HOMES/${last%:}/"; shift; done
"""


class Hosts:
    def __init__(self, folder):
        self.folder, self.holders = folder, {}
        self.network = {name: f"larder-book-{os.getpid()}-{name}" for name in ADDRESSES}

    def __enter__(self):
        try:
            for name in ADDRESSES:
                quiet("ip", "netns", "add", self.network[name])
                quiet("ip", "-n", self.network[name], "link", "set", "lo", "up")
            one, other = self.network.values()
            quiet("ip", "-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
            for name, address in ADDRESSES.items():
                quiet("ip", "-n", self.network[name], "address", "add", f"{address}/24", "dev", "cable")
                quiet("ip", "-n", self.network[name], "link", "set", "cable", "up")
                self.furnish(name)
            quiet("ip", "-n", one, "address", "add", f"{COORDINATOR}/24", "dev", "cable")
        except (subprocess.CalledProcessError, OSError) as error:
            self.__exit__()
            raise Impossible(f"no namespaces here: {error}") from error
        return self

    def furnish(self, name):
        """Makes a host's own files, and the scripts that stand in for systemd and ssh."""
        own = self.folder / name
        tree = own / "tree"
        (tree / "target/dist").mkdir(parents=True)
        (tree / "deploy").symlink_to(ROOT / "deploy")
        (tree / "target/dist/larder").symlink_to(LARDER)
        (tree / "qwen.json").write_text(json.dumps(NAMESPACE))
        (tree / "prompt.json").write_text(json.dumps(list(range(2_000))))
        (tree / "config.json").write_text(json.dumps(MODEL))
        (tree / "trace.jsonl").write_text("".join(json.dumps(request) + "\n" for request in TRACE))
        (self.folder / "homes" / ADDRESSES[name]).mkdir(parents=True)
        layers = "".join(
            f"mkdir -p {own}/ram{place}/up {own}/ram{place}/work\n"
            f"mount -t overlay overlay -o lowerdir={place},upperdir={own}/ram{place}/up,workdir={own}/ram{place}/work {place}\n"
            for place in ["/etc", "/usr", "/var/lib"]
        )
        script = f"set -e\nmkdir {own}/ram\nmount -t tmpfs tmpfs {own}/ram\n{layers}mount -t tmpfs tmpfs /run\n"
        script += f"mkdir -m 700 /run/user-0\nhostname {name}\necho ready\nexec sleep infinity\n"
        command = ["ip", "netns", "exec", self.network[name], "unshare", "--mount", "--uts", "sh", "-c", script]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.holders[name] = holder
        if holder.stdout.readline() != "ready\n":
            raise OSError(holder.stderr.read())
        for program, text in {"systemctl": SYSTEMCTL, "scp": SCP}.items():
            self.run(name, f"cat > /usr/local/bin/{program}; chmod 755 /usr/local/bin/{program}", input=text)

    def run(self, name, command, **options):
        """Runs a command to its end."""
        options = {"text": True, "capture_output": True, "check": False, "timeout": 240} | options
        return subprocess.run(self.entered(name, command), env=self.environment(name), **options)

    @contextmanager
    def running(self, name, command):
        """Runs a command as in a terminal of its own, until Ctrl-C. Yields the process, and the file with its output."""
        terminal = self.folder / name / "terminal"
        with terminal.open("w") as output:
            options = {"stdout": output, "stderr": output, "start_new_session": True, "preexec_fn": hear_ctrl_c}
            process = subprocess.Popen(self.entered(name, f"exec {command}"), env=self.environment(name), **options)
        try:
            yield process, terminal
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)

    def entered(self, name, command):
        enter = ["nsenter", f"--target={self.holders[name].pid}", "--mount", "--uts", "--net", "sh", "-ec"]
        return [*enter, f"cd {self.folder / name / 'tree'}\n{command}"]

    def environment(self, name):
        homes = self.folder / "homes"
        # A program that is not installed yet is found in its build folder.
        path = f"/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin:{self.folder / name / 'tree/target/dist'}"
        own = {"PATH": path, "HOME": str(homes / ADDRESSES[name]), "HOMES": str(homes)}
        return own | {"XDG_RUNTIME_DIR": "/run/user-0", "LANG": "C.UTF-8"}

    def logs(self):
        return "\n".join(self.run(name, "tail -n 20 /run/*.log").stdout for name in self.holders)

    def __exit__(self, *_):
        for name, holder in self.holders.items():
            if holder.poll() is None:
                self.run(name, "for file in /run/*.pid; do kill -9 $(cat $file) || true; done")
                holder.kill()
            holder.wait()
        for network in self.network.values():
            subprocess.run(["ip", "netns", "delete", network], capture_output=True, check=False)


class Impossible(Exception):
    """This machine cannot play two hosts."""


class Page:
    """The commands of a page, by name. Each command names its hosts, or the reason why it does not run."""

    def __init__(self, name):
        self.name, self.commands, self.ran = name, {}, set()
        for mark, what, command in BLOCK.findall((PAGES / name).read_text()):
            assert mark, f"{name}: nothing says where this runs:\n{command}"
            if mark == "run":
                label, hosts = what.split(" on ")
                assert label not in self.commands, f"{name}: {label} comes twice"
                self.commands[label] = (hosts.split(), command)

    def running(self, hosts, label):
        """Runs a command until Ctrl-C."""
        (name,), command = self.commands[label]
        self.ran.add(label)
        say(self.name, f"{label}: {name}")
        return hosts.running(name, command)

    def run(self, hosts, label, until=None, **replaced):
        """Runs a command on each of its hosts, again until it succeeds. Returns its output on each host. `replaced` has a
        reader's values for words in capitals."""
        names, command = self.commands[label]
        for old, new in replaced.items():
            assert old in command, f"{self.name}: {label} has no {old}"
            command = command.replace(old, new)
        self.ran.add(label)
        printed = {}
        for name in names:
            deadline = time.monotonic() + 120
            while True:
                done = hosts.run(name, command)
                fine = done.returncode == 0 or label in MAY_FAIL
                if fine and (until is None or until(done.stdout)):
                    break
                assert until and time.monotonic() < deadline, (
                    f"{self.name}: {label} on {name}: {done.returncode}\n{command}\n{done.stdout}{done.stderr}\n{hosts.logs()}"
                )
                time.sleep(0.3)
            printed[name] = done.stdout
        say(self.name, f"{label}: {' and '.join(names)}")
        return printed

    def end(self):
        assert self.ran == set(self.commands), f"{self.name}: not run: {set(self.commands) - self.ran}"


def main():
    if not LARDER.exists():
        sys.exit(f"{LARDER} is not there: tests/programs, or set LARDER")
    every_page_is_checked()
    with tempfile.TemporaryDirectory(prefix="larder-book-") as folder:
        os.chmod(folder, 0o755)
        try:
            with Hosts(Path(folder)) as hosts:
                pages_run(hosts)
        except Impossible as error:
            skip("commands of the book", error)
            sys.exit(NOTHING_DONE)


def every_page_is_checked():
    """Checks that a page with commands runs here, or has a reason not to."""
    here = set(re.findall(r'Page\("([\w-]+\.md)"\)', Path(__file__).read_text()))
    pages = {page.name for page in PAGES.glob("*.md") if "```sh" in page.read_text()}
    assert pages == here | set(ELSEWHERE), f"not checked, or without commands: {pages ^ (here | set(ELSEWHERE))}"
    assert not here & set(ELSEWHERE)


def quick_start_runs(hosts):
    page = Page("quick-start.md")
    page.run(hosts, "replay")
    with page.running(hosts, "dev") as (_, terminal):
        printed = wait_for(terminal.read_text, lambda said: "Ctrl-C" in said)
        address = re.search(r"coordinator\W+([\d.:]+)", printed)[1]
        looked = page.run(hosts, "look", ADDR=address)["a"]
        assert "all together" in looked, looked
    page.run(hosts, "own")
    page.run(hosts, "own-doctor")
    with page.running(hosts, "own-node"):
        wait_for(lambda: hosts.run("a", "curl -s http://127.0.0.1:9440/readyz").stdout, lambda said: said == "ok\n")
    page.end()


def sizes_are_found(hosts):
    """Runs the page on sizes with the configuration of the quick start's own node."""
    page = Page("sizing.md")
    sizes = page.run(hosts, "model")["a"]
    assert "a chunk from another node takes, measured" in sizes, sizes
    planned = page.run(hosts, "plan")["a"]
    assert "lru" in planned and "%" in planned, planned
    with page.running(hosts, "record"):
        wait_for(lambda: hosts.run("a", "curl -s http://127.0.0.1:9440/readyz").stdout, lambda said: said == "ok\n")
        for _ in range(3):
            hosts.run("a", f"{ENGINE_PROGRAM} /run/larder/default.sock", check=True)
    recorded = page.run(hosts, "plan-record")["a"]
    assert "3 requests" in recorded, recorded
    page.end()
    page = Page("replay.md")
    played = page.run(hosts, "trace")["a"]
    assert re.search(r"^ *wrong bytes +0 *$", played, re.M) and re.search(r"^ *requests +200 *$", played, re.M), played
    page.end()


def operators_work(hosts):
    """Runs the page on operations on the cluster of two hosts, with the files that the page's reader would have."""
    page = Page("operations.md")
    hosts.run("a", "larder ca issue admin me --dir ca; cp ca/ca.pem ca/me.pem ca/me.key /etc/larder/node.toml .", check=True)
    for label in ["watch", "prompt", "policy", "wrong"]:
        page.run(hosts, label)
    with page.running(hosts, "follow") as (following, _):
        time.sleep(1)
        assert following.poll() is None, "it ended by itself"
    page.end()
    page = Page("http.md")
    for label in ["node", "coordinator"]:
        assert json.loads(page.run(hosts, label)["a"])["role"] == label
    page.end()
    page = Page("commands.md")
    page.run(hosts, "install")
    page.end()
    page = Page("security.md")
    hosts.run("a", "mv ca ca-of-hosts", check=True)
    for label in ["issue", "rotate"]:
        page.run(hosts, label)
    page.end()


def pages_run(hosts):
    quick_start_runs(hosts)
    sizes_are_found(hosts)
    page = Page("hosts.md")
    for label in ["install", "install-coordinator", "certificates", "certificates-of-b", "configuration"]:
        page.run(hosts, label)
    for label in ["configuration-of-coordinator", "start-coordinator", "start"]:
        page.run(hosts, label)
    for printed in page.run(hosts, "see", both_are_alive).values():
        assert "lost" not in printed, printed
    for printed in page.run(hosts, "doctor").values():
        assert "certificate" in printed, printed
    console_is_right(hosts, page.run(hosts, "console")["a"])
    quick_start_is_right(hosts)
    renew = Page("runbooks/larder-certificate-expires.md")
    renew.run(hosts, "renew")
    hosts.run("a", "runuser -u larder -- cat /etc/larder/node.key /etc/larder/node.pem", check=True)
    renew.end()
    trouble = Page("troubleshooting.md")
    assert "alive" in trouble.run(hosts, "begin")["a"]
    asked = trouble.run(hosts, "ask")["a"]
    assert asked.startswith("ok\n") and json.loads(asked.split("\n", 1)[1])["name"] == "a", asked
    for label in ["check", "hits", "report"]:
        trouble.run(hosts, label)
    trouble.end()
    answers_are_described(hosts)
    operators_work(hosts)
    upgrade = Page("upgrade.md")
    for label in ["upgrade", "healthy", "coordinator"]:
        upgrade.run(hosts, label)
    upgrade.end()
    # A node that stops before it follows the new coordinator cannot say goodbye.
    wait_for(lambda: epochs(hosts), lambda both: len(both) == 2 and both[0] == both[1])
    page.run(hosts, "leave")
    left = wait_for(lambda: hosts.run("a", "larder status").stdout, lambda text: text and "\nb " not in text)
    assert "lost" not in left and hosts.run("a", "larder health").stdout == "healthy\n", left
    page.end()


def console_is_right(hosts, printed):
    """Checks that the console answers at the address that the command prints. From the other host the console wants a token, and
    the command says so."""
    assert printed == "http://127.0.0.1:7600/\n", printed
    assert "<script" in hosts.run("a", f"curl -s --fail {printed.strip()}").stdout
    for path, field in [("/status", "hardware"), ("/usage", None)]:
        said = json.loads(hosts.run("a", f"curl -s --fail '{printed.strip()}console/nodes?path={path}'").stdout)
        assert {one["node"] for one in said} == {"a", "b"}, said
        assert all(one["said"] is not None and (field is None or field in one["said"]) for one in said), said
    links = json.loads(hosts.run("a", f"curl -s --fail '{printed.strip()}console/nodes?path=/links'").stdout)
    assert all(one["said"] is not None for one in links), links
    there = hosts.run("b", "larder console")
    assert there.stdout == "http://10.0.0.1:7600/\n" and "a token, or a tunnel" in there.stderr, there
    refused = hosts.run("b", "curl -s -w ' %{http_code}' 'http://10.0.0.1:7600/console/nodes?path=/status'").stdout
    assert refused.endswith(" 401") and "console_token_file" in refused, refused
    say("console", "shows both hosts at the address that `larder console` prints")


def quick_start_is_right(hosts):
    """Runs the quick start's commands on this cluster, as the book prints them. Here a change needs an admin, and the command
    says so."""
    (_, commands) = Page("quick-start.md").commands["look"]
    lines = [line.partition("#")[0].strip().replace("ADDR", "10.0.0.1") for line in commands.splitlines()]
    said = {}
    for line in filter(None, lines):
        done = hosts.run("a", line)
        said[line] = done.stdout
        if line == "larder policy sieve":
            assert done.returncode == 2 and "an admin's" in done.stderr, done
        else:
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    rows = set(re.findall(r"^(\w) +alive", said["larder status"], re.M))
    assert rows == {"a", "b"} and said["larder status"].endswith("\nhealthy\n"), said["larder status"]
    assert re.findall(r"^(\w) +alive", said["larder top"], re.M) == ["a", "b"], said["larder top"]
    assert re.search(r"^ wrong bytes +0 *$", said["larder replay --coordinator 10.0.0.1"], re.M), said
    assert re.search(r"^a +3 +3 +1,536$", said["larder where 0 1 2"], re.M), said["larder where 0 1 2"]
    assert re.search(r"^b +0 +3 +0$", said["larder where 0 1 2"], re.M), said["larder where 0 1 2"]
    # A pin is on one node, and every host sees it.
    assert "default" in hosts.run("b", "larder list pins").stdout
    say("quick-start.md", f"{len(said)} commands are right on two hosts")


def epochs(hosts):
    """The coordinator's epoch, and the epoch of b's table."""
    asked = [hosts.run("a", f"curl -s http://{at}/status").stdout for at in ["10.0.0.1:7600", "10.0.0.2:9440"]]
    told = [json.loads(text) for text in asked if text]
    return [status.get("cluster", status)["epoch"] for status in told]


def both_are_alive(printed):
    return printed.startswith("healthy\n") and set(re.findall(r"^(\w) +alive", printed, re.M)) == {"a", "b"}


def answers_are_described(hosts):
    """Checks that every path of the HTTP reference answers, and that every answer has the fields of its table."""
    checked = 0
    for heading, address in [("A node", "10.0.0.1:9440"), ("The coordinator", "10.0.0.1:7600")]:
        for method, path, root in http_reference.roots(heading):
            # Other hosts need the console's token.
            if method == "POST" or path in ("/events", "/console/nodes", "/console/history", "/console/what_if"):
                continue
            answer = hosts.run("a", f"curl -s --fail http://{address}{path}")
            assert answer.returncode == 0, f"{address}{path}: {answer.stderr}"
            if root:
                wrong = http_reference.differences(json.loads(answer.stdout), *root)
                assert not wrong, f"{address}{path}: {wrong}"
                checked += 1
    question = {"fingerprint": "ab" * 32, "chunk_tokens": 256, "tokens": list(range(512)), "with_hashes": True}
    answer = hosts.run("a", f"curl -s --fail http://10.0.0.1:7600/v1/prefix -d '{json.dumps(question)}'")
    wrong = http_reference.differences(json.loads(answer.stdout), "coordinator/src/http/prefix.rs", "PrefixAnswer")
    assert not wrong, wrong
    say("http.md", f"{checked + 1} JSON answers have the fields of their tables")


def wait_for(ask, is_so):
    deadline = time.monotonic() + 120
    while not is_so(said := ask()):
        assert time.monotonic() < deadline, said
        time.sleep(0.3)
    return said


def hear_ctrl_c():
    """Restores SIGINT as in a terminal: processes in the background of a script ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def quiet(*command):
    subprocess.run(command, check=True, capture_output=True)


def say(what, detail):
    print(f"{what}: {detail}", flush=True)


if __name__ == "__main__":
    main()
