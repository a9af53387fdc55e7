"""Pools of gloo processes that run a test's functions together; a hang is a failure."""

import contextlib
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

#: A case that takes longer is taken for a hang.
MAX_CASE_S = 60.0
#: When one process has failed, the others may wait for it in a collective: they get this long.
MAX_WAIT_AFTER_ERROR_S = 2.0
#: Imported once, by the fork server. If another test has started that server, each process imports them.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "pytest",
    "numba",
]


class Pool:
    """A group of processes that stay: each call runs one function in all of them."""

    def __init__(self, world: int) -> None:
        self.world, self.limit_s = world, MAX_CASE_S
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of a module in every process, and return its results by rank.

        Raises:
            AssertionError: if it raises in any process, or takes too long. The next call starts new processes.
        """
        if not self._processes:
            self._start()
        # not Connection.send, which would share the memory of tensors
        order = pickle.dumps((function, arguments))
        for connection in self._connections:
            connection.send_bytes(order)
        answers, errors = self._collect()
        if errors:
            self.stop()
            raise AssertionError(f"of {self.world} processes\n" + "\n".join(errors))
        return [answers[rank] for rank in range(self.world)]

    def _collect(self) -> tuple[dict[int, Any], list[str]]:
        answers: dict[int, Any] = {}
        errors: list[str] = []
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        end = time.monotonic() + self.limit_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                errors += [f"rank {rank} did not answer: it hangs, or waits for another" for rank in pending.values()]
                for rank in pending.values():
                    self._processes[rank].kill()
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    is_done, answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    is_done, answer = False, "the process died"
                if is_done:
                    answers[rank] = answer
                else:
                    errors.append(f"rank {rank}: {answer}")
                    end = min(end, time.monotonic() + MAX_WAIT_AFTER_ERROR_S)
        return answers, errors

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        coverage_options = _coverage_options()
        for rank in range(self.world):
            here, there = context.Pipe()
            # one process is traced: the others run the same lines
            arguments = (rank, self.world, self._folder.name, there, coverage_options if rank == 0 else None)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def stop(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()  # ends the loop of a process
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Pools:
    """One pool for each number of processes, started when it is first used."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function in a number of processes; see :meth:`Pool.run`."""
        return self._pools.setdefault(world, Pool(world)).run(function, *arguments)

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()


def _coverage_options() -> dict[str, Any] | None:
    """Return the settings of the coverage that runs here, so that a process can write beside it."""
    current = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if current is None:
        return None
    return {
        "data_file": current.get_option("run:data_file"),
        "source": current.get_option("run:source"),
        "branch": current.get_option("run:branch"),
    }


def _serve(rank: int, world: int, folder: str, connection: Connection, coverage_options: dict[str, Any] | None) -> None:
    """Answer orders until the connection closes."""
    with _traced(coverage_options):
        torch.set_num_threads(1)
        store = distributed.FileStore(f"{folder}/store", world)
        limit = timedelta(seconds=MAX_CASE_S)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        while True:
            try:
                order = connection.recv_bytes()
            except (EOFError, ConnectionError):
                break
            try:
                function, arguments = pickle.loads(order)
                answer = pickle.dumps((True, function(*arguments)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
        distributed.destroy_process_group()


@contextlib.contextmanager
def _traced(options: dict[str, Any] | None):
    if options is None:
        yield
        return
    from coverage import Coverage

    tracer = Coverage(data_suffix=True, **options)
    tracer.start()
    try:
        yield
    finally:
        tracer.stop()
        tracer.save()
