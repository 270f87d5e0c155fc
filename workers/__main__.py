"""`python -m workers`: one worker process. Sets up the compiler's environment, then joins the team."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pagedserve.config import Config, load_config
from pagedserve.contract.errors import PagedServeError
from pagedserve.contract.instance import Instance
from pagedserve.contract.messages import Setup
from pagedserve.contract.parent import die_with_parent
from workers.isa import kernel_environment

log = logging.getLogger("workers")


def main() -> int:
    """Run one worker; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="One worker of a PagedServe team.")
    parser.add_argument("--worker-id", type=int, default=-1, help="its place in the team (default: the next free one)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor ends us
    die_with_parent()
    try:
        config = load_config()
        logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
        _work(config, arguments.worker_id)
    except PagedServeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _work(config: Config, worker_id: int) -> None:
    environment = kernel_environment(config.isa, Path(config.home))
    cache = Path(environment["NUMBA_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment)
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    from workers import worker  # no numba yet: only the socket, so that Setup travels while we compile

    socket = worker.join(Instance(config.instance), worker_id)
    with _compile_lock(cache):
        started = time.monotonic()
        is_first = len(list(cache.iterdir())) <= 1  # nothing but the lock
        log.info("compiling kernels, once on this machine: up to a minute" if is_first else "loading kernels")
        from workers.kernels import program

        program.compile_all()
        log.info("kernels for %s loaded in %.1f s", program.isa_name(), time.monotonic() - started)
    setup = worker.receive(socket)
    assert isinstance(setup, Setup)
    worker.Worker(socket, setup, program.isa_name()).run()


@contextlib.contextmanager
def _compile_lock(cache: Path) -> Iterator[None]:
    """One process at a time fills the cache (numba #10128); the others then load what it wrote."""
    with (cache / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
