"""Decoder processes: results, deaths and signals."""

import multiprocessing
import os
import re
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from lab.photo_cases import damage, decoded, streamed, write_class_folder

from nero_lab import distributed
from nero_lab.data import DataError, decoder_pool, photos
from nero_lab.data.class_folder import find_class_folder
from nero_lab.data.decoder_pool import DecoderPool
from nero_lab.data.photos import load_photos


def test_pool_decodes_as_the_caller_and_names_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_class_folder(tmp_path)
    alone = decoded(folder)
    together = load_photos(find_class_folder(folder), DecoderPool(2))
    assert torch.equal(alone.train[0], together.train[0])
    assert torch.equal(alone.test[0], together.test[0])
    pooled = streamed(folder, monkeypatch, 2).with_measured_rate(4)
    assert pooled.rate > 0
    assert "streamed by 2 processes; " in pooled.description
    assert "images a second can be loaded" in pooled.description
    monkeypatch.setattr(photos, "JOB_IMAGES", 3)
    batches = (data.epoch(5, torch.Generator(), None) for data in (streamed(folder, monkeypatch), pooled))
    for (one, labels), (other, same) in zip(*batches, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(labels, same)
    broken = damage(folder, "train/b/2.JPEG")
    with pytest.raises(DataError, match=f"^{re.escape(str(broken))} does not decode"):
        list(pooled.epoch(4, torch.Generator(), None))
    with pytest.raises(DataError, match=r"a process that decodes images died, .*: run the same command again"):
        decoder_pool.result(pooled.pool.submit(os._exit, 1))
    pooled.pool.close()


def test_pool_after_a_death_raises_and_ends_the_others():
    """The error meets the next submit; the surviving worker is busy and ignores SIGTERM."""
    pool, before = DecoderPool(2), multiprocessing.active_children()
    for future in [pool.submit(time.sleep, 0.3) for _ in range(2)]:
        decoder_pool.result(future)
    pending = [pool.submit(time.sleep, 600) for _ in range(2)]
    workers = [child for child in multiprocessing.active_children() if child not in before]
    assert len(workers) == 2
    workers[0].kill()
    assert isinstance(pending[0].exception(60), BrokenProcessPool)
    with pytest.raises(DataError, match=r"a process that decodes images died, .*: run the same command again"):
        pool.submit(int)
    workers[1].join(60)
    assert not workers[1].is_alive()
    pool.close()


def test_pool_ignores_signals_to_the_training_process():
    """Job managers signal every process of a job."""
    pool = DecoderPool(1)
    # the worker, and the fork server
    others = [decoder_pool.result(pool.submit(which)) for which in (os.getpid, os.getppid)]
    assert os.getpid() not in others
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        for other in others:
            os.kill(other, number)
        assert decoder_pool.result(pool.submit(os.getpid)) == others[0]
    assert signal.getsignal(signal.SIGTERM) == before
    pool.close()


def test_default_count_shares_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [decoder_pool.default_count(processes) for processes in (1, 4, 16)] == [16, 4, 0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert distributed.local_world_size() == 1  # not started by torchrun
    monkeypatch.setattr(distributed, "started", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.local_world_size() == 4
    assert distributed.local_gpu() == torch.device("cuda:3")
