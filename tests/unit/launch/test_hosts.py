"""Host files, addresses, ports; what reaches a host; the command that starts them."""

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightnet_llm.errors import UserError
from lightnet_llm.launch import command, host, hosts
from lightnet_llm.training import failures

BAD = [
    ("", r"hosts: names no host"),
    ("# nothing\n\n", r"names no host"),
    ("a slots=2\nb\n", r":2: 'b' is not of the form 'host slots=N'"),
    ("a slots=two\n", r":1: 'a slots=two' is not of the form"),
    ("a slots=2 max=3\n", r":1: 'a slots=2 max=3' is not of the form"),
    ("a  slots = 2\n", r":1: 'a  slots = 2' is not of the form"),
    ("a slots=-2\n", r":1: 'a slots=-2' is not of the form"),
    ("a slots=٣\n", r":1: 'a slots=٣' is not of the form"),
    ("a slots=0\n", r":1: 'a slots=0': a host needs at least one slot"),
    ("a slots=2\n\n#\nb slots=2\na slots=4\n", r":5: 'a slots=4': host 'a' is on line 1 already"),
    ("node[1-4] slots=8\n", r":1: .*'node\[1-4\]' is neither a host name nor"),
    ("a,b slots=8\n", r"'a,b' is neither"),
    ("-oProxyCommand=x slots=8\n", r"'-oProxyCommand=x' is neither"),
    ("me@a slots=8\n", r"'me@a' is neither"),
    ("fe80::1 slots=8\n", r"'fe80::1' is neither"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_host_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        hosts.read_hostfile(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_host_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        hosts.read_hostfile(tmp_path / "absent")
    with pytest.raises(UserError, match="Is a directory"):
        hosts.read_hostfile(tmp_path)
    (tmp_path / "bytes").write_bytes(b"a slots=2\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8 text"):
        hosts.read_hostfile(tmp_path / "bytes")


def test_good_host_file_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\r\nz-1.example.org\tslots=8  # first\r\n\r\n   10.0.0.2   slots=4")
    assert list(hosts.read_hostfile(path).items()) == [("z-1.example.org", 8), ("10.0.0.2", 4)]


def test_free_port_is_free_and_below_the_range_of_outgoing_connections() -> None:
    port = hosts.free_port()
    assert port in hosts.PORTS and max(hosts.PORTS) < 32768
    with socket.socket() as taken:
        taken.bind(("", port))


def test_free_port_passes_over_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        busy = taken.getsockname()[1]
        free = hosts.free_port()
        monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [busy, free])
        assert hosts.free_port() == free
        monkeypatch.setattr("random.SystemRandom.sample", lambda *_: [busy])
        with pytest.raises(UserError, match="no free port"):
            hosts.free_port()


def test_free_port_of_another_host() -> None:
    ask = ["bash", "-c", 'exec bash -c "$1"']  # bash -c SCRIPT host command: what ssh does with its words
    assert hosts.free_port_on("192.0.2.1", ask) in hosts.PORTS
    with pytest.raises(UserError, match=r"host '192.0.2.1' could not be asked for a free port: no way; it must be"):
        hosts.free_port_on("192.0.2.1", ["bash", "-c", "echo no way >&2; exit 255"])


def test_addresses() -> None:
    assert hosts.is_here("localhost") and not hosts.is_here("192.0.2.1")
    assert hosts.master_address({"localhost": 2}) == "127.0.0.1"
    assert hosts.master_address({"10.1.2.3": 2, "10.1.2.4": 2}) == "10.1.2.3"
    with pytest.raises(UserError, match=r"host 'localhost' is 127.0.0.1 here, which '127.0.0.2' cannot reach"):
        hosts.master_address({"localhost": 2, "127.0.0.2": 2})
    with pytest.raises(UserError, match=r"host 'no.such.invalid' has no address"):
        hosts.master_address({"no.such.invalid": 2})


# What reaches a host ---------------------------------------------------------------------------------------------------
PRINT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(deadline=None)
@given(
    st.dictionaries(st.from_regex(r"LN_[A-Z]{1,5}", fullmatch=True), values, max_size=4), st.lists(values, max_size=4)
)
def test_handover_loses_nothing(environment: dict[str, str], arguments: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "handover.json"
        odd = {**environment, "LN": os.fsdecode(b"\xff=bytes that are no text")}
        host.write_handover(path, ["python", *arguments, host.RANK], {"a": 2, "b": 4}, odd, path)
        content = json.loads(path.read_text())
        assert content["environment"] == odd and content["command"] == ["python", *arguments, "{rank}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_host_applies_the_handover(tmp_path: Path) -> None:
    path = tmp_path / "it's 100%n" / "handover.json"
    environment = {
        "LN_ODD": """ spaces  "quotes" 'single' $HOME `id` \\ %n a=b;c|d&e>f\nnext """,
        "LN_BYTES": os.fsdecode(b"\xff"),
        "HOME": "/other",
        "RANK": "7",
        "CUDA_VISIBLE_DEVICES": "3",
        "SSH_AUTH_SOCK": "/tmp/x",
        "BASH_FUNC_module%%": "() { :; }",
    }
    words = [sys.executable, "-c", PRINT, "{rank}", "a {rank}"]
    host.write_handover(path, words, {"x": 1, "y": 2}, environment, tmp_path / "2")
    (tmp_path / "1").write_text("of an earlier start")
    own = {"PATH": os.environ["PATH"], "HOME": "/mine", "LN_STALE": "kept out", "USER": "me", "RANK": "9"}
    command = [sys.executable, "-m", "lightnet_llm.launch.host", str(path), "y"]
    result = subprocess.run(command, env=own, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    arguments, seen, directory = json.loads(result.stdout)
    assert arguments == ["1", "a {rank}"] and directory == str(Path.cwd())
    travelling = {k: v for k, v in environment.items() if k.startswith(("LN_", "BASH_"))}
    assert {k: seen.get(k) for k in travelling} == travelling
    assert seen["HOME"] == "/mine" and seen["USER"] == "me" and seen["RANK"] == "9"
    assert not {"LN_STALE", "CUDA_VISIBLE_DEVICES", "SSH_AUTH_SOCK"} & set(seen)
    assert int(seen["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)


def test_host_says_what_it_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main([str(tmp_path / "absent"), "a"]) == 1
    assert "all hosts must see the run folder under the same path" in capsys.readouterr().err
    path = tmp_path / "handover.json"
    host.write_handover(path, ["true"], {"a": 1}, {}, tmp_path / "failed")
    content = json.loads(path.read_text()) | {"directory": str(tmp_path / "gone")}
    path.write_text(json.dumps(content))
    assert host.main([str(path), "a"]) == 1
    assert "all hosts must have the working directory" in capsys.readouterr().err


def start(path: Path, name: str) -> subprocess.Popen[str]:
    # The shell between stands for sshd: when it goes, its child must go too.
    words = [sys.executable, "-c", "import sys; from lightnet_llm.launch import host; host.GRACE = 0.5\n"
             "sys.exit(host.main(sys.argv[1:]))", str(path), name]  # fmt: skip
    script = '"$@" & trap "" TERM; wait $!; exit $?'
    return subprocess.Popen(["bash", "-c", script, "bash", *words], stderr=subprocess.PIPE, text=True)


def descendants(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    deadline = time.time() + 30
    while time.time() < deadline:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError("the command was not started")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def test_host_ends_what_it_started_when_its_connection_goes(tmp_path: Path) -> None:
    path = tmp_path / "handover.json"
    host.write_handover(
        path, ["bash", "-c", "sleep 1000 & sleep 1000"], {"a": 1}, dict(os.environ), tmp_path / "failed"
    )
    process = start(path, "a")
    children = descendants(process, 4)  # the module, bash and two sleeps
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(children)


def test_first_failing_host_ends_the_others(tmp_path: Path) -> None:
    """... of its own start: a second one on this run folder, which is refused, leaves the first alone."""
    path = tmp_path / "handover.json"
    script = 'if [ "$1" = 1 ]; then exit 3; fi; sleep 1000'
    failing = ["bash", "-c", script, "x", "{rank}"]
    host.write_handover(path, failing, {"a": 1, "b": 1}, dict(os.environ), tmp_path / "1" / "failed")
    first = start(path, "a")
    children = descendants(first, 2)  # the module and sleep
    ours = path.read_text()
    host.write_handover(path, failing, {"c": 1, "b": 1}, dict(os.environ), tmp_path / "2" / "failed")
    assert start(path, "b").wait(30) == 3 and (tmp_path / "2" / "failed").is_file()
    time.sleep(1)
    assert first.poll() is None and all(child.is_running() for child in children)
    path.write_text(ours)
    second = start(path, "b")
    assert second.wait(30) == 3
    assert first.stderr is not None and "a: ended, because host b ended with exit code 3" in first.stderr.read()
    assert first.wait(30) == 1 and gone(children)


# The command ----------------------------------------------------------------------------------------------------------
def _world(words: list[str]) -> dict[str, list[int | str]]:
    """GPUs by host, as DeepSpeed's launcher reads them."""
    found: dict[str, list[int | str]] = json.loads(base64.urlsafe_b64decode(words[words.index("--world_info") + 1]))
    return found


def test_command_for_hosts_is_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "free_port_on", lambda *_: 12345)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    folder = tmp_path / "it's 100%n"
    environment = {"SECRET": "s3cret", failures.VARIABLE: str(tmp_path / "1")}
    words = command.hosts_command("c.yaml", ("a=$x y",), {"10.9.0.1": 2, "10.9.0.2": 4}, folder, environment)
    assert words[0] == "pdsh" and words[words.index("-w") + 1] == "10.9.0.1,10.9.0.2"
    assert "s3cret" not in " ".join(words) and "$x" not in " ".join(words)
    # As pdsh and the remote shell read it:
    as_read = words[-1].replace("%%", "\0").replace("%h", "10.9.0.2").replace("\0", "%")
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {as_read}"], capture_output=True, text=True).stdout
    assert shown.splitlines()[-2:] == [str(folder / "handover.json"), "10.9.0.2"]
    content = json.loads((folder / "handover.json").read_text())
    launcher = content["command"]
    assert content["failed"] == str(tmp_path / "1" / "failed_host")
    assert launcher[launcher.index("--master_addr") + 1] == "10.9.0.1"
    assert launcher[-5:] == ["lightnet_llm.training.main", "--config", "c.yaml", "--launched", "a=$x y"]
    from deepspeed.launcher.launch import parse_args

    monkeypatch.setattr("sys.argv", [word if word != "{rank}" else "1" for word in launcher[2:]])
    parsed = parse_args()
    assert parsed.node_rank == 1 and parsed.master_port == 12345 and parsed.module
    assert _world(launcher) == {"10.9.0.1": [0, 1], "10.9.0.2": [0, 1, 2, 3]}


def test_fewer_visible_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "device_count", lambda: 2)
    for names, passed in (("2,3", ["2", "3"]), ("GPU-ab12, MIG-cd", ["GPU-ab12", "MIG-cd"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert _world(command.local_command("c", (), 2)) == {"localhost": passed}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(
        UserError, match=r"^4 ranks, but CUDA_VISIBLE_DEVICES=2,3 names 2 GPUs; .* or start with --gpus 2$"
    ):
        command.local_command("c", (), 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(
        UserError, match=r"^4 ranks, but this machine has 2 GPU\(s\); start with --gpus 2, or name hosts"
    ):
        command.local_command("c", (), 4)
    monkeypatch.setattr(command, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert _world(command.local_command("c", (), 2)) == {"localhost": [0, 1]}


def test_one_local_host_needs_no_pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    words = command.hosts_command("c", (), {"localhost": 2}, tmp_path, {failures.VARIABLE: str(tmp_path)})
    assert words[-3:] == ["lightnet_llm.launch.host", str(tmp_path / "handover.json"), "localhost"]
    with pytest.raises(UserError, match="pdsh, which is not installed"):
        command.hosts_command("c", (), {"localhost": 2, "10.9.0.1": 2}, tmp_path, {})


def test_user_options_of_ssh_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o ConnectTimeout=99")
    options = command.environment_for(4, {"a": 4})["PDSH_SSH_ARGS_APPEND"]
    shown = subprocess.run(["ssh", "-G", *options.split(), "x.invalid"], capture_output=True, text=True).stdout
    assert "connecttimeout 99" in shown and "batchmode yes" in shown and "serveraliveinterval 5" in shown
