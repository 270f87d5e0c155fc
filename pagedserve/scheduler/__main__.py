"""`python -m pagedserve.scheduler`: reads the configuration and the model's shape, makes the pool, serves."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from pagedserve.config import Config, load_config
from pagedserve.contract import segments
from pagedserve.contract.errors import PagedServeError
from pagedserve.contract.instance import Instance, own
from pagedserve.contract.messages import ModelInfo, Setup
from pagedserve.contract.parent import die_with_parent
from pagedserve.models.catalog import resolve
from pagedserve.models.open import open_checkpoint
from pagedserve.models.spec import ModelSpec
from pagedserve.scheduler import pool_size
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.scheduler.service import Service, ServiceSettings
from pagedserve.scheduler.team import Team

log = logging.getLogger("pagedserve.scheduler")

STEP_TIMEOUT_S = 120.0  # far above any honest step: what takes longer is a stopped process
MAX_TEAM = 64


def main() -> int:
    """Run the scheduler; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pagedserve.scheduler", description="The scheduler of a server.")
    parser.add_argument("--supervised", action="store_true", help="whoever starts us owns the instance")
    supervised: bool = parser.parse_args().supervised
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor ends us
    die_with_parent()
    try:
        config = load_config()
        logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
        _serve(config, supervised)
    except PagedServeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _serve(config: Config, supervised: bool) -> None:
    instance = Instance(config.instance)
    owner = None if supervised else own(instance)  # without a supervisor (Procfile) we own the instance's names
    try:
        service = _build(config, instance)
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.run()
    finally:
        if owner is not None:
            owner.release()


def _build(config: Config, instance: Instance) -> Service:
    path = str(resolve(config.model, config.models_dir))
    checkpoint = open_checkpoint(path)
    spec, eos_token_ids = checkpoint.spec, checkpoint.generation.eos_token_ids
    max_model_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    pool_dtype = "float32" if config.compute == "f32" else "float16"
    block_bytes = config.block_size * spec.kv_bytes_per_token(4 if pool_dtype == "float32" else 2)
    num_blocks = pool_size.num_blocks(
        pool_tokens=config.pool_tokens,
        pool_bytes=config.pool_bytes,
        block_size=config.block_size,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        free_bytes=pool_size.free_memory_bytes(),
    )
    # Before the scheduler's own lists of blocks: a pool that is far too large is refused by its bytes.
    segments.create(segments.segment_name(instance.tag, "kv"), num_blocks * block_bytes)
    scheduler = Scheduler(
        Limits(
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_waiting=config.max_waiting,
            vocab_size=spec.vocab_size,
            eos_token_ids=eos_token_ids,
            sliding_window=_common_window(spec),
            enable_prefix_caching=config.prefix_caching,
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_rows=config.max_num_batched_tokens,
        )
    )
    endpoints = (instance.client_endpoint, *((config.tcp_endpoint,) if config.tcp_endpoint else ()))
    settings = ServiceSettings(
        instance=config.instance,
        tag=instance.tag,
        client_endpoints=endpoints,
        worker_endpoint=instance.worker_endpoint,
        model=ModelInfo(
            name=_served_name(config.model),
            path=path,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
        ),
        block_size=config.block_size,
        num_blocks=num_blocks,
        pool_bytes=num_blocks * block_bytes,
        max_num_seqs=config.max_num_seqs,
        step_timeout_s=STEP_TIMEOUT_S,
    )
    setup = Setup(
        worker_id=0,
        tag=instance.tag,
        prepare=True,
        model_path=path,
        compute=config.compute,
        quantize=config.quantize,
        block_size=config.block_size,
        num_blocks=num_blocks,
        pool_dtype=pool_dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_team=MAX_TEAM,
    )
    service = Service(settings, scheduler, Team(setup))
    log.info(
        "pool of %s tokens in %s blocks, %.1f MB", f"{num_blocks * config.block_size:,}", f"{num_blocks:,}",
        num_blocks * block_bytes / 1e6,
    )
    return service


def _served_name(model: str) -> str:
    """What clients call the model: the catalogue's name, or that of its file or folder."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


def _common_window(spec: ModelSpec) -> int:
    """The widest sliding window if every layer has one, so that blocks outside it serve nobody; else 0."""
    windows = [layer.sliding_window for layer in spec.layers]
    return max(windows) if windows and all(windows) else 0


if __name__ == "__main__":
    sys.exit(main())
