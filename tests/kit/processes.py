"""Processes of a group: ranks that run one task and report what they find."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

TIMEOUT: Final = 60.0
Task = Callable[[int], Iterable[tuple[str, Any]]]
"""The task of a rank, given its number: a module's function or a partial of one. It yields names and findings."""


def work(rank: int, world_size: int, timeout: float, store: str, task: Task, backend: str, reports: Any) -> None:
    """The life of a rank: it joins the group, runs the task and reports. With NCCL each rank has its own GPU."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
        for key, value in task(rank):
            reports.put((rank, key, value))
        reports.put((rank, None, None))
    except Exception:
        reports.put((rank, "crash", traceback.format_exc()))
    reports.close()
    reports.join_thread()
    os._exit(0)  # a group whose other ranks are dead cannot be taken down


def run(
    task: Task,
    directory: Path,
    world_size: int,
    *,
    timeout: float = TIMEOUT,
    wait_for: int | None = None,
    backend: str = "gloo",
    life: Callable[..., None] = work,
) -> list[dict[str, Any]]:
    """Runs a task on all ranks and returns what each reported. A fork server imports torch once and forks them.

    Args:
        task: the task of each rank.
        directory: where the file is by which ranks find each other.
        timeout: timeout of the group in seconds.
        wait_for: ranks that must finish, all by default; then the others are killed.
        backend: "gloo" on CPUs, "nccl" with a GPU for each rank.
        life: the life of a rank: `work`, or a function that calls it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kit.context_workers"])
    reports = context.Queue()
    arguments = (world_size, timeout, str(directory / "group"), task, backend, reports)
    processes = [context.Process(target=life, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    found: list[dict[str, Any]] = [{} for _ in range(world_size)]
    missing = world_size if wait_for is None else wait_for
    try:
        while missing:
            rank, key, value = reports.get(timeout=max(timeout, TIMEOUT))
            if key == "crash":
                raise AssertionError(f"rank {rank}: {value}")
            missing -= key is None
            found[rank] |= {} if key is None else {key: value}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found
