"""Runs the commands of the book's page on the first hour with vLLM exactly as they are there, with the test's paths and port."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from driver import LARDER, ROOT
from scenarios import free_port

PAGE = ROOT / "docs/book/src/first-hour.md"
WORDS = 97


class Page:
    """The page's commands by name, with the values that a reader would put in place of its paths."""

    def __init__(self, scratch: Path, model: Path):
        text = PAGE.read_text()
        self.commands = dict(re.findall(r"<!-- run: (\w+) -->\n```sh\n(.*?)```", text, re.S))
        assert text.count("```sh") == len(self.commands), "a command of the page is not run by this test"
        self.folder, self.port, self.ran = scratch / "hour", free_port(), set()
        self.folder.mkdir()
        path = os.pathsep.join([str(LARDER.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        # `larder status` finds the newest cluster of its user, which must be this one.
        runtime = scratch / "hour-runtime"
        runtime.mkdir(mode=0o700)
        self.environment |= {"MODEL": str(model), "VLLM_CPU_KVCACHE_SPACE": "1", "XDG_RUNTIME_DIR": str(runtime)}

    def command(self, name: str) -> str:
        self.ran.add(name)
        return self.commands[name].replace("/tmp/larder", str(self.folder)).replace("8000", str(self.port))

    def run(self, name: str, **replaced: str) -> str:
        """Runs a command to its end, and returns its output."""
        command = self.command(name)
        for old, new in replaced.items():
            assert old in command, f"{old} is not in {command}"
            command = command.replace(old, new)
        done = subprocess.run(
            ["bash", "-ec", command], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, name: str, is_ready):
        """Runs a command in its terminal, until Ctrl-C."""
        log = self.folder.with_suffix(f".{name}.log")
        with open(log, "a") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.command(name)}"],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + 400
            while not is_ready():
                tail = "".join(log.read_text().splitlines(keepends=True)[-30:])
                assert process.poll() is None and time.monotonic() < deadline, f"{name}: {tail}"
                time.sleep(0.2)
            yield log
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)

    def is_served(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
        except (OSError, urllib.error.URLError):
            return False
        return True


def run(world, row) -> None:
    page = Page(world.scratch, model_with_words(world.scratch))
    # The test sets the page's environment; its model differs.
    assert page.command("settings").startswith("export MODEL=")
    installed = str(world.scratch / "installed")
    page.run(
        "install",
        **{" release": "", "wheels/dist": "wheels/dev", "pip install": f"pip install -q --no-index --no-deps --target {installed}"},
    )
    assert (Path(installed) / "larder_kv").is_dir()
    socket = page.folder / "node-0.sock"
    with page.running("node", socket.exists):
        assert page.run("check").splitlines()[-1] == "An engine can use this node."
        page.run("prompt")
        with page.running("serve", page.is_served) as log:
            first = json.loads(page.run("ask"))["choices"][0]["text"]
            before = metrics(page.run("metrics"))
            counted_when(page, lambda now: now.get("larder_saved_chunks_total") == 2)
            assert "using the Larder node node-0" in log.read_text()
        with page.running("serve", page.is_served):
            again = json.loads(page.run("ask"))["choices"][0]["text"]
            after = counted_when(page, lambda now: now.get("larder_loads_total") == 1)
        assert "node-0" in page.run("status")
    assert again == first, f"{again!r} is not {first!r}"
    source = 'prompt_tokens_by_source_total{source="external_kv_transfer"}'
    assert (before["larder_lookups_total"], after["larder_lookups_total"]) == (1, 1)
    assert before["larder_found_tokens_total"] == 0 and after["larder_found_tokens_total"] == 512
    assert (before.get(source), after[source]) == (0, 512)
    assert after["larder_saved_chunks_total"] == 0
    assert page.ran == set(page.commands), f"not run: {set(page.commands) - page.ran}"
    row("the book's first hour", "every command runs; 512 of 600 tokens are loaded after a restart, the answer is the same")


def counted_when(page: Page, is_so) -> dict[str, float]:
    """The page's metrics, once they satisfy `is_so`: vLLM learns of saved chunks with its steps."""
    deadline = time.monotonic() + 60
    while not is_so(now := metrics(page.run("metrics"))):
        assert time.monotonic() < deadline, f"{now}"
        page.run("ask")
    return now


def metrics(text: str) -> dict[str, float]:
    """Samples by name, with the source if there is one."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", text, re.M):
        source = re.search(r'source="(\w+)"', labels)
        found[name + (f'{{source="{source[1]}"}}' if source else "")] = float(value)
    return found


def model_with_words(scratch: Path, name: str = "hour") -> Path:
    """The suite's model with a tokenizer in which every word of the page's prompt is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = scratch / f"{name}-model"
    shutil.copytree(scratch / "model", folder)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{number}": 3 + number for number in range(WORDS)}
    vocabulary |= {f"other{number}": number for number in range(len(vocabulary), 1_024)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return folder
