"""Fixtures of the integration tests: run folders, servers of one test, and one server that a module's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.api_server import free_port
from tests.server import TINY, RunFolder, Running, command

Start = Callable[..., Running]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes, and the first start on a machine compiles the kernels."""
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    """A run folder of this test's own."""
    run_folder = RunFolder()
    yield run_folder
    run_folder.remove()


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Start]:
    """Starts `pagedserve up` with these arguments, by default those of a tiny server; ends all at the end."""
    started: list[Running] = []

    def run(*arguments: str) -> Running:
        started.append(Running(command("up", *(arguments or TINY)), folder.environment))
        return started[-1]

    yield run
    for running in started:
        running.kill()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[RunFolder, Running]]:
    """A tiny server that is ready, for tests that leave it as it was."""
    run_folder = RunFolder()
    running = Running(command("up", *TINY), run_folder.environment)
    try:
        running.wait_for("ready: ")
        yield run_folder, running
    finally:
        running.kill()
        run_folder.remove()


@pytest.fixture(scope="session")
def api_url() -> Iterator[str]:
    """The address of a server with HTTP and room for 16 requests at once, for all tests of the API."""
    run_folder, port = RunFolder(), free_port()
    arguments = ("--model", "demo", "--workers", "2", "--pool-tokens", "8192", "--http-port", str(port))
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64")
    running = Running(command("up", *arguments, *limits), run_folder.environment)
    try:
        running.wait_for("ready: ")
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        run_folder.remove()
