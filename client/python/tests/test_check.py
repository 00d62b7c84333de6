"""`python -m larder_kv.check`, against nodes that can be used and nodes that cannot."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from conftest import start_cluster, take_all_memory
from larder_kv.check import check, main, socket_file
from larder_kv.settings import NodeSettings


def outcomes(path: str, **settings) -> dict[str, tuple[str, str, str]]:
    findings = check(NodeSettings.parse({"socket": path, "timeout_seconds": 1, **settings}, "the test"))
    return {one.name: (one.outcome, one.found, one.advice) for one in findings}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "larder_kv.check", *arguments], capture_output=True, text=True)


def test_a_node_that_can_be_used_is_said_to_be_on_one_page(cluster):
    done = run("--socket", cluster.sockets[0])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "An engine can use this node." and len(lines) <= 40
    for words in ("larder-kv ", "node node-", "default: its engines", "67108864 bytes", "came back as they were put"):
        assert words in done.stdout, f"{words}: {done.stdout}"


def test_routers_cannot_ask_for_prompts_among_the_checks_blocks(cluster):
    assert outcomes(cluster.sockets[0])["put and get"][0] == "ok"
    with urllib.request.urlopen(f"http://{cluster.http[0]}/namespaces") as answer:
        (left,) = [one for one in json.load(answer) if one["model"] == "larder_kv.check"]
    assert left["chunks"] > 0 and left["hash"] is None


def test_a_program_reads_the_same_as_json(cluster):
    told = json.loads(run("--socket", cluster.sockets[0], "--json").stdout)
    assert told["usable"] is True
    by_name = {one["name"]: one for one in told["findings"]}
    assert by_name["put and get"]["outcome"] == "ok" and set(by_name["tenant"]) == {"name", "outcome", "found", "advice"}


def test_a_socket_that_is_not_there_is_said_with_those_that_are(cluster, tmp_path):
    there = cluster.sockets[0]
    absent = there.replace("node-0", "node-9")
    done = run("--socket", absent)
    assert done.returncode == 1 and f"{absent} is not there" in done.stdout and there in done.stdout
    assert done.stdout.splitlines()[-1] == "No engine can use this node as it is."
    found = outcomes(str(tmp_path / "folder" / "s"))
    assert "mount" in found["socket"][2] and found["put and get"][0] == "skipped"


def test_what_is_no_socket_or_nobodys_is_said(tmp_path):
    file, left = tmp_path / "file", tmp_path / "left"
    file.write_text("")
    assert "is no socket" in outcomes(str(file))["socket"][1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    found = outcomes(str(left))
    assert found["socket"][0] == "ok" and found["session"][0] == "failed" and "start it again" in found["session"][1]


def test_a_socket_that_this_user_may_not_open_is_said(tmp_path):
    path = tmp_path / "s"
    tmp_path.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.chmod(0o600 if os.getuid() == 0 else 0)
    mine = os.geteuid()
    # The superuser may open everything.
    if mine == 0:
        for folder in tmp_path.parents[:2]:
            folder.chmod(0o755)
        os.seteuid(65_534)
    try:
        found = socket_file(str(path))
    finally:
        os.seteuid(mine)
    assert found.outcome == "failed" and "group" in found.advice


def test_a_node_that_does_not_answer_or_speaks_another_language_is_said(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        found = outcomes(path)
        assert found["session"][0] == "failed" and "does not answer within 1 s" in found["session"][1]

        def babble():
            # The first client has gone by now.
            listener.accept()[0].close()
            connection = listener.accept()[0]
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 8)
            connection.close()

        thread = threading.Thread(target=babble)
        thread.start()
        found = outcomes(path)
        thread.join()
    assert found["session"][0] == "failed" and "released with the node" in found["session"][2]


def test_an_actor_that_the_node_does_not_have_is_said(cluster):
    found = outcomes(cluster.sockets[0], device=99)
    assert found["session"][0] == "failed" and "`device`" in found["session"][2], found["session"]


def test_a_smaller_window_than_asked_for_is_noted(cluster):
    found = outcomes(cluster.sockets[0], window_bytes=1 << 40)
    assert found["window"][0] == "note" and "max_window_bytes" in found["window"][2]
    assert found["put and get"][0] == "ok"


def test_a_full_node_and_a_stopped_one_cannot_be_used():
    own = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    held = take_all_memory(own.sockets[0])
    found = outcomes(own.sockets[0])
    assert found["session"][0] == "ok" and found["put and get"][0] == "failed", found
    assert "more" in found["put and get"][2] and held
    del held
    children = subprocess.run(["pgrep", "-P", str(own.process.pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    try:
        assert "does not answer" in outcomes(own.sockets[0])["session"][1]
    finally:
        for child in children:
            os.kill(int(child), signal.SIGCONT)
    own.stop()


@pytest.mark.parametrize("wrong", [["--timeout-seconds", "0"], ["--device", "-1"], ["--window-bytes", "0"], ["--colour"]])
def test_wrong_arguments_have_an_exit_code_of_their_own(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--socket", "/s", *wrong])
    assert ended.value.code == 2 and wrong[0].strip("-").split("-")[0] in capsys.readouterr().err
