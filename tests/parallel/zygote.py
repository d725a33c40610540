"""A process that imports the training stack once and forks ranks on request: a fast launcher for tests.

Protocol, one JSON object a line. In: {"world", "arguments", "log", "plant", "timeout", "grace", "environment"}. Out:
{"codes", "seconds"}. ``grace`` is how long ranks may outlive the first that failed before they are killed.
``plant`` names functions of tests.parallel.faults, with commas, that every rank calls before it trains.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, world: int, port: int, request: dict) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(request.get("environment") or {})
    log = os.open(f"{request['log']}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        for name in filter(None, (request.get("plant") or "").split(",")):
            from tests.parallel import faults

            getattr(faults, name)()
        from lightnet_llm.training.main import main

        code = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict) -> dict:
    world, port, start = request["world"], _free_port(), time.time()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank(rank, world, port, request)
        pids.append(pid)
    codes: dict[int, int] = {}
    kill_at = start + request.get("timeout", 240)
    while len(codes) < world:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        kill_at = min(kill_at, time.time() + request.get("grace", 5))
        if time.time() > kill_at:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return {"codes": [codes[rank] for rank in range(world)], "seconds": round(time.time() - start, 2)}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import lightnet_llm.training.loop  # noqa: F401  (the import that ranks share)

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
