"""Ready files: what they say is what arrives, for any characters; schemas and parsers of the programs that read them agree."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.cli.launch import KINDS
from lightnet_llm.config import dump_config, load_config
from lightnet_llm.errors import UserError
from lightnet_llm.launch import kubernetes, slurm
from lightnet_llm.launch.job import Job, job_of

ROOT = Path(__file__).resolve().parents[3]
# The paper's runs: GPUs and samples of each GPU an update (model-spec 7).
PILE = {"pile_150m": (8, 26), "pile_379m": (8, 15), "pile_1b": (16, 10), "pile_2.9b": (48, 36)}
SMALL = """
model: {layers: 2, width: 32, heads: 2, glu_width: 64, vocab_size: 100}
train: {steps: 10, global_batch: 96, micro_batch: 2, name: small}
"""
ODD = """ two  spaces, "quotes", it's $HOME $(id) `id` $$ \\ %n a=b;c|d&e>f *
second line """
LAUNCHES: dict[str, list[str]] = {
    "one host": ["launch.nodes=1", "launch.gpus_per_node=2"],
    "three hosts": ["launch.nodes=3", "launch.gpus_per_node=4", "launch.partition=gpu", "launch.account=me"],
    "all fields": [
        "launch.nodes=2",
        "launch.cpus_per_node=64",
        "launch.memory_gib=500",
        "launch.time=2-12:00:00",
        "launch.partition=gpu",
        "launch.account=me@there",
        "launch.qos=high",
        "launch.grace_seconds=120",
        "launch.namespace=team",
        "launch.secret=keys",
        "launch.image=registry.example.org/lightnet:1.0",
        "launch.volumes={/lustre/me: /work, claim: /data}",
        "launch.setup=[ulimit -n 4096]",
    ],
}
TRICKY = [f"data.path=/data/{ODD.strip()}", "train.output=/work/it's $RUNS", "data.validation={a b: '/x y'}"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A configuration whose file name and environment are as awkward as can be."""
    folder = tmp_path / "with space's $x"
    folder.mkdir()
    tree = yaml.safe_load(SMALL) | {"launch": {"environment": {"ODD": ODD, "NUMBER": 1, "EMPTY": ""}}}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.fixture(params=LAUNCHES)
def job(request: pytest.FixtureRequest, source: str) -> Job:
    return job_of(source, (*TRICKY, *LAUNCHES[request.param]))


SHELL = [kind for kind in KINDS if kind != "kubernetes"]


@pytest.mark.parametrize("kind", SHELL)
def test_shell_is_sound(kind: str, job: Job, tmp_path: Path) -> None:
    path = tmp_path / f"script{KINDS[kind][1]}"
    path.write_text(KINDS[kind][0](job))
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "make install brings it"
    # SC1091: the activate script is not here. SC2016: quoted for a shell on the node, on purpose.
    # SC2329: a trap calls the function.
    command = [shellcheck, "--shell=bash", "--exclude=SC1091,SC2016,SC2329", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


RECORD = """#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd()]) + "\\n")
"""
SRUN = """#!/bin/bash
for rank in $(seq 0 $((NODES - 1))); do
    words=("$@")
    while [[ ${words[0]} == --* ]]; do words=("${words[@]:1}"); done
    SLURM_NODEID=$rank "${words[@]}"
done
"""


def recorded(job: Job, kind: str, tmp_path: Path, *arguments: str) -> list[list[Any]]:
    """Name, arguments, environment and folder of every program that the script starts; no real one is."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    texts = {name: RECORD.format(python=sys.executable, log=str(log)) for name in ("torchrun", "deepspeed", "lightnet")}
    texts |= {"srun": SRUN, "scontrol": '#!/bin/bash\n[ "$2" = hostnames ] && printf "node-7\\nnode-8\\n"\n'}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (tmp_path / ".venv/bin/activate").write_text("export ACTIVATED=1\n")
    (tmp_path / "script").write_text(KINDS[kind][0](job))
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/mine", "NODES": str(job.launch.nodes)}
    environment |= {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_ID": "77"}
    command = ["bash", str(tmp_path / "script"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in log.read_text().splitlines()]
    for _, _, seen, _ in found:
        assert {name: seen.get(name) for name in job.launch.environment} == job.launch.environment
        assert ("ACTIVATED" in seen) == (job.launch.setup is None)
    return found


def check_training(words: list[str], job: Job) -> None:
    """The arguments of the training are those of the job, and a run of so many ranks can be started with them."""
    assert words[0] == "--config"
    name, overrides = words[1], words[2:]
    result = CliRunner().invoke(main, ["train", name, *overrides, "--dry-run", "--gpus", str(job.world)])
    assert result.exit_code == 0, result.output
    ranks = [line.split()[0] for line in result.output.splitlines() if line[:1] == " "]  # the table's lines
    assert f"{job.world} ranks" in result.output and ranks[-1] == str(job.world - 1)
    without = {"launch"}
    now, meant = load_config(name, overrides).model_dump(), job.config.model_dump()
    assert {k: v for k, v in now.items() if k not in without} == {k: v for k, v in meant.items() if k not in without}
    assert now["train"]["resume"] == "auto"


def check_torchrun(words: list[str], job: Job, rank: int, address: str) -> None:
    """What torchrun itself makes of its arguments."""
    from torch.distributed.run import parse_args

    parsed = parse_args(words)
    assert parsed.nnodes == str(job.launch.nodes) and parsed.nproc_per_node == str(job.launch.gpus_per_node)
    if job.launch.nodes > 1:
        assert (parsed.node_rank, parsed.master_addr) == (rank, address)
        assert 1024 < parsed.master_port < 65536
    assert parsed.module and parsed.training_script == "lightnet_llm.training.main"
    check_training(parsed.training_script_args, job)


def test_slurm_starts_torchrun_on_every_node(job: Job, tmp_path: Path) -> None:
    found = recorded(job, "slurm", tmp_path)
    assert len(found) == job.launch.nodes
    for rank, (name, words, _, _) in enumerate(found):
        assert name == "torchrun"
        check_torchrun(words, job, rank, "node-7")
    assert len({json.dumps([w for w in words if "master" in w]) for _, words, _, _ in found}) == 1


def test_torchrun_script(job: Job, tmp_path: Path) -> None:
    for rank in range(job.launch.nodes):
        arguments = [] if job.launch.nodes == 1 else [str(rank), "10.9.8.7"]
        ((name, words, _, _),) = recorded(job, "torchrun", tmp_path, *arguments)
        assert name == "torchrun" and ("--standalone" in words) == (job.launch.nodes == 1)
        if job.launch.nodes == 1:
            words.remove("--standalone")
            words.insert(0, "--nnodes=1")
        check_torchrun(words, job, rank, "10.9.8.7")


def test_deepspeed_script(job: Job, tmp_path: Path) -> None:
    from deepspeed.launcher.runner import parse_args

    hosts = {f"h{i}": job.launch.gpus_per_node for i in range(job.launch.nodes)}
    hostfile = tmp_path / "host file"
    hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()))
    many = job.launch.nodes > 1
    ((name, words, _, _),) = recorded(job, "deepspeed", tmp_path, *([str(hostfile)] if many else []))
    assert name == "lightnet" and words[0] == "train"
    assert words[-2:] == (["--hostfile", str(hostfile)] if many else ["--gpus", str(job.world)])
    check_training(["--config", *words[1:-2]], job)
    if many:
        ((name, words, _, _),) = recorded(job, "deepspeed", tmp_path, str(hostfile), "1", "10.9.8.7")
        parsed = parse_args(words)
        assert name == "deepspeed" and parsed.no_ssh and parsed.node_rank == 1 and parsed.master_addr == "10.9.8.7"
        assert parsed.hostfile == str(hostfile) and parsed.user_script == "lightnet_llm.training.main"
        check_training(parsed.user_args, job)
        result = subprocess.run(
            ["bash", str(tmp_path / "script"), "absent", "1", "h"], capture_output=True, cwd=tmp_path
        )
        assert result.returncode == 1 and b"hostfile absent cannot be read" in result.stderr


# sbatch ---------------------------------------------------------------------------------------------------------------
def sbatch_parser() -> argparse.ArgumentParser:
    """The options of sbatch(1), Slurm 22.05 and later, that a script of ours may hold, and the form of their values."""

    def form(pattern: str):  # type: ignore[no-untyped-def]
        def check(text: str) -> str:
            if not re.fullmatch(pattern, text):
                raise ValueError(text)
            return text

        return check

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    time = r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}(:\d{1,2})?)?"
    forms = {"nodes": r"\d+(-\d+)?", "ntasks-per-node": r"\d+", "gpus-per-node": r"(\w+:)?\d+", "cpus-per-task": r"\d+"}
    forms |= {
        "mem": r"\d+[KMGT]?",
        "time": time,
        "signal": r"([RB]+:)?[A-Z0-9]+(@\d+)?",
        "open-mode": "append|truncate",
    }
    forms |= dict.fromkeys(("job-name", "partition", "account", "qos", "output"), r"\S+")
    for name, pattern in forms.items():
        parser.add_argument(f"--{name}", type=form(pattern))
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--exclusive", action="store_true")
    return parser


def test_the_stop_is_asked_for_where_the_run_is(source: str) -> None:
    """Of nested volumes the innermost holds the run folder."""
    volumes = "launch.volumes={/lustre/me: /work, /scratch/runs: /work/runs}"
    job = job_of(source, ("launch.image=x", volumes, "train.output=/work/runs", "train.name=small"))
    assert "run=/scratch/runs/small" in slurm.emit(job)


def test_sbatch_directives(job: Job) -> None:
    text = slurm.emit(job).splitlines()
    found = [line.removeprefix("#SBATCH ") for line in text if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(text) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in text[first_command:]), "sbatch stops reading at a command"
    parsed = sbatch_parser().parse_args(found)
    launch = job.launch
    assert parsed.nodes == str(launch.nodes) and parsed.gpus_per_node == str(launch.gpus_per_node)
    assert parsed.ntasks_per_node == "1" and parsed.requeue and parsed.partition == launch.partition
    assert parsed.exclusive == (launch.cpus_per_node is None), "else the task of a node may have one core"
    assert parsed.signal == f"B:TERM@{launch.grace_seconds}" and parsed.time == launch.time


def test_slurm_saves_before_the_limit_and_queues_again(source: str, tmp_path: Path) -> None:
    """The batch script gets SIGTERM: it asks the ranks to stop, waits for them, and requeues unless the run is finished."""
    job = job_of(source, (f"train.output={tmp_path}/runs", "launch.nodes=1"))
    script = tmp_path / "script"
    script.write_text(slurm.emit(job))
    programs = tmp_path / "bin"
    programs.mkdir()
    run = tmp_path / "runs/small"
    wait = f'#!/bin/bash\ntouch {tmp_path}/started\nwhile [ ! -e "{run}/stop" ]; do sleep 0.05; done\nsleep 0.5\n'
    wait += "exit ${CODE:-0}\n"
    scontrol = f'#!/bin/bash\nif [ "$1" = requeue ]; then echo "$2" >> {tmp_path}/requeued; else echo n1; fi\n'
    for name, text in {"srun": wait, "scontrol": scontrol}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for code, finished, requeued in ((0, False, True), (3, False, False), (0, True, False)):
        for path in (tmp_path / "requeued", tmp_path / "started", run / "stop"):
            path.unlink(missing_ok=True)
        if finished:
            (run / "finished.json").write_text("{}")
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "77"}
        process = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=environment | {"CODE": str(code)})
        while not (tmp_path / "started").exists():
            assert process.poll() is None
        process.terminate()
        assert process.wait(20) == code
        assert (tmp_path / "requeued").exists() == requeued, (code, finished)


# Kubernetes -----------------------------------------------------------------------------------------------------------
def expanded(text: str) -> str:
    """As Kubernetes expands arguments and values when no variable is defined: $$ is $, an unknown $(NAME) stays."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda match: "$" if match[0] == "$$" else match[0], text)


def test_kubernetes_objects(job: Job) -> None:
    import kubernetes_validate

    objects = list(yaml.safe_load_all(kubernetes.emit(job)))
    assert [item["kind"] for item in objects] == ["ConfigMap", "Service", "Job"]
    version = kubernetes_validate.latest_version()
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", item["metadata"]["name"])
        assert item["metadata"].get("namespace") == job.launch.namespace
    config, service, run = objects
    spec, pod = run["spec"], run["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": run["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert spec["completions"] == spec["parallelism"] == job.launch.nodes and spec["completionMode"] == "Indexed"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": job.launch.gpus_per_node}
    assert {item["name"]: expanded(item["value"]) for item in container["env"]} == job.launch.environment
    assert {item["name"] for item in container["volumeMounts"]} == {item["name"] for item in pod["volumes"]}
    for source, path in job.launch.volumes.items():
        (mount,) = [item for item in container["volumeMounts"] if item["mountPath"] == path]
        (volume,) = [item for item in pod["volumes"] if item["name"] == mount["name"]]
        assert source in (
            volume.get("hostPath", {}).get("path"),
            volume.get("persistentVolumeClaim", {}).get("claimName"),
        )
    # The configuration travels with the job, overrides applied.
    ((name, text),) = config["data"].items()
    mount = next(item for item in container["volumeMounts"] if item["name"] == "config")
    words = [expanded(word) for word in container["args"]]
    assert words[-2:] == ["--config", f"{mount['mountPath']}/{name}"] and text == dump_config(job.config)
    # As the pod's bash runs it, with a torchrun that prints its words:
    script = "torchrun() { printf '%s\\0' \"$@\"; }; " + container["command"][2]
    command = ["bash", "-c", expanded(script), *container["command"][3:], *words]
    shown = subprocess.run(
        command, capture_output=True, text=True, env={"JOB_COMPLETION_INDEX": "1", "PATH": "/bin"}
    ).stdout
    from torch.distributed.run import parse_args

    parsed = parse_args(shown.split("\0")[:-1])
    assert parsed.node_rank == 1 and parsed.nnodes == str(job.launch.nodes)
    if job.launch.nodes > 1:
        assert parsed.master_addr == f"{run['metadata']['name']}-0.{service['metadata']['name']}"


@pytest.mark.parametrize("stop_at", [None, 40])
def test_kubernetes_goes_on_until_the_end(stop_at: int | None, source: str, tmp_path: Path) -> None:
    """One of two pods is removed: the ranks of both save and exit 0, and both pods are started again unless it is the end."""
    given = ["launch.nodes=2", f"train.output={tmp_path}/it's $HOME $$ runs"]
    job = job_of(source, (*given, *([] if stop_at is None else [f"train.stop_at_step={stop_at}"])))
    run = Path(job.run_folder)
    (run / "checkpoints").mkdir(parents=True)
    spec = list(yaml.safe_load_all(kubernetes.emit(job)))[-1]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    disrupted, stopped = spec["podFailurePolicy"]["rules"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "else kubectl refuses a podFailurePolicy"
    assert disrupted["action"] == stopped["action"] == "Ignore", "neither counts towards backoffLimit"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    again = stopped["onExitCodes"]["values"]
    assert stopped["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": again}
    assert not {0, 1, 70, 75} & set(again), "codes that mean something else"
    program = tmp_path / "torchrun"
    program.write_text(f"""#!/bin/bash
touch {tmp_path}/started.$$
while [ ! -e "$RUN/stop" ]; do sleep 0.05; done
sleep 0.5
exit ${{CODE:-0}}
""")
    program.chmod(0o755)
    ends = [(0, False, 39, again), (0, True, 39, [0]), (3, False, 39, [3]), (0, False, 40, [0] if stop_at else again)]
    for code, finished, saved, wanted in ends:
        for path in (*tmp_path.glob("started.*"), run / "stop", run / "finished.json"):
            path.unlink(missing_ok=True)
        if finished:
            (run / "finished.json").write_text("{}")
        (run / "checkpoints/latest").write_text(f"step_{saved:08d}\n")
        words = [expanded(word) for word in container["command"]]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RUN": str(run), "CODE": str(code)}
        pods = [subprocess.Popen(words, env=environment | {"JOB_COMPLETION_INDEX": str(i)}) for i in range(2)]
        while len(list(tmp_path.glob("started.*"))) < 2:
            assert [pod.poll() for pod in pods] == [None, None]
        pods[1].terminate()
        assert [pod.wait(20) for pod in pods] == wanted * 2, (code, finished, saved)


def test_kubernetes_config_trains(job: Job, tmp_path: Path) -> None:
    config = next(yaml.safe_load_all(kubernetes.emit(job)))
    (text,) = config["data"].values()
    (tmp_path / "small.yaml").write_text(text)
    check_training(["--config", str(tmp_path / "small.yaml")], job)


# The paper's runs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PILE)
def test_pile_runs_stand_ready(name: str, tmp_path: Path) -> None:
    job = job_of(name, ())
    gpus, samples = PILE[name]
    assert job.world == gpus and job.config.train.global_batch == gpus * samples and job.launch.gpus_per_node == 8
    for kind, (emit, suffix) in KINDS.items():
        path = ROOT / "launch/pile" / f"{name}{suffix}"
        again = f"lightnet launch {name} --emit {kind} --output launch/pile"
        assert path.read_text() == emit(job), f"{path} is out of date: {again}"
        assert os.access(path, os.X_OK) == suffix.endswith("sh")
    found = recorded(job, "slurm", tmp_path)
    assert len(found) == gpus // 8
    check_torchrun(found[0][1], job, 0, "node-7")
    assert {path.name for path in (ROOT / "launch/pile").iterdir()} == {
        f"{run}{suffix}" for run in PILE for _, suffix in KINDS.values()
    }


# The command ----------------------------------------------------------------------------------------------------------
def test_command_writes_or_prints(source: str, tmp_path: Path) -> None:
    emits = [word for kind in KINDS for word in ("--emit", kind)]
    output = tmp_path / "new" / "folder"
    result = CliRunner().invoke(main, ["launch", source, *emits, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in output.iterdir()) == sorted(f"small{suffix}" for _, suffix in KINDS.values())
    result = CliRunner().invoke(main, ["launch", source, "--emit", "slurm"])
    assert result.output == (output / "small.sbatch").read_text()


def test_host_file_names_the_first_host(source: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=8\nbeta slots=8\n")
    arguments = ["launch", source, "launch.nodes=2", "--hostfile", str(tmp_path / "hosts"), "--emit"]
    assert "{2:-alpha}" in CliRunner().invoke(main, [*arguments, "torchrun"]).output
    assert f"{{1:-{tmp_path / 'hosts'}}}" in CliRunner().invoke(main, [*arguments, "deepspeed"]).output


REFUSED = [
    (["launch.nodes=5"], "is not a multiple of"),
    (["launch.gpus_per_node=0"], "launch.gpus_per_node"),
    (["launch.partition='a b'"], "launch.partition: 'a b' is not a name"),
    (["launch.time=tomorrow"], "launch.time: 'tomorrow' is not a time of Slurm"),
    (["launch.volumes={/a: b}"], "'/a: b' is not a folder or claim to absolute path"),
    (["launch.volumes={/a: /c, /b: /c}"], "two volumes have the same path"),
    (["launch.environment={a-b: x}"], "'a-b' is not a variable's name"),
    (["launch.image='a b'"], "'a b' is not an image's name"),
    (["launch.node=2"], "unknown key 'launch.node' (did you mean 'nodes'?)"),
    (["train.name='my run'"], "train.name 'my run' names files and jobs here"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refused(overrides: list[str], message: str, source: str) -> None:
    result = CliRunner().invoke(main, ["launch", source, *overrides, "--emit", "slurm"])
    assert result.exit_code == 1 and message in result.output and result.output.count("\n") == 1, result.output


def test_host_file_must_fit(source: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=4\n")
    with pytest.raises(
        UserError, match=r"has 2 host\(s\) \(a slots=8, b slots=4\), but the run wants launch.nodes 2 with"
    ):
        job_of(source, ("launch.nodes=2",), {"a": 8, "b": 4}, str(tmp_path / "hosts"))
    result = CliRunner().invoke(main, ["launch", source, "--hostfile", str(tmp_path / "absent"), "--emit", "deepspeed"])
    assert result.exit_code == 1 and "cannot be read" in result.output
