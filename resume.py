"""A run that goes on: what must be as it was, and what comes back from its checkpoint."""

import math
from dataclasses import asdict
from typing import NamedTuple

import typeguard

from checkpoint import checkpoints, load_checkpoint, load_weights, peek, read_config
from config import FREE_ON_RESUME
from data import fingerprint

MOST_THREADS = 1024  # that a checkpoint may ask for


class Progress(NamedTuple):
    """How far the run of a checkpoint was.

    best: lowest validation loss in nats per token. micro_batch: sequences per forward pass of a rank. threads: of one
    process on a CPU, by which sums are split; None for others.
    """

    step: int
    best: float
    micro_batch: int | None
    threads: int | None


def known_tokens(folder):
    """Digest of the tokens that a run last had, by its config.json or else its newest good checkpoint; or None."""
    digests = (peek(path, "tokens_sha256") for path in checkpoints(folder))
    return read_config(folder, quiet=True).tokens_sha256 or next(filter(None, digests), None)


def restore(path, record, config, corpus, model, parts):
    """Give a model and its parts (name -> optimizer, scaler or guard) the state of a checkpoint.

    Args:
        path: of the checkpoint. record: what the run's config.json holds. config: Config of this process.
        corpus: its Corpus.

    Returns:
        Progress.

    Raises:
        ValueError: the checkpoint is not good, or another run than config and corpus describe; or it is at its end.
    """
    contents = load_checkpoint(path, ("config", "tokenizer_hash", "tokens_sha256", "step", "best", *parts))
    if record.edited:
        _check_edits(contents["config"], config, path)
    _check_data(contents, config, corpus, record.tokens_sha256, path)
    load_weights(model, contents, path)
    _load_parts(parts, contents, path)
    progress = _progress(contents, path)
    if progress.step >= config.steps:
        raise ValueError(
            f"run {config.resume} is finished at step {progress.step}; give more --steps and --allow_changes True to "
            "go on"
        )
    # best.pt may be newer than the checkpoint, if that is not the newest
    other = peek(path.with_name("best.pt"), "best")
    return progress._replace(best=min(progress.best, other if isinstance(other, float) else math.inf))


def _progress(contents, path):
    progress = Progress(*(contents.get(name) for name in Progress._fields))
    try:
        for name, kind in Progress.__annotations__.items():
            typeguard.check_type(getattr(progress, name), kind)
        if progress.threads is not None and not 0 < progress.threads <= MOST_THREADS:
            raise typeguard.TypeCheckError(f"{progress.threads} threads")
    except typeguard.TypeCheckError as error:
        raise ValueError(f"checkpoint {path} is damaged ({error}); use another one") from error
    return progress


def _check_edits(before, config, path):
    """ValueError if an edited config.json makes a run another one than that of its checkpoint; before: its options."""
    for name, value in asdict(config).items():
        if not config.allow_changes and name not in FREE_ON_RESUME and before.get(name, value) != value:
            raise ValueError(
                f"config.json says {name}={value!r}, but {path} was trained with {before[name]!r}; "
                "change it back, or add --allow_changes True"
            )


def _check_data(contents, config, corpus, accepted, path):
    """ValueError unless a checkpoint was trained on the tokens of the corpus.

    accepted: digest of the tokens that the run last accepted, which may be newer than this checkpoint; or None.
    """
    if contents["tokenizer_hash"] != fingerprint(corpus.tokenizer):
        raise ValueError(
            f"checkpoint {path} was trained with another tokenizer than the corpus now has; prepare it anew"
        )
    if corpus.digest() not in (contents["tokens_sha256"], accepted) and not config.allow_changes:
        raise ValueError(
            f"the tokens in {corpus.folder} are not those that {path} was trained on (sha256 {corpus.digest()[:12]}.., "
            f"not {contents['tokens_sha256'][:12]}..); prepare the same text again, or add --allow_changes True"
        )


def _load_parts(parts, contents, path):
    optimizer = parts["optimizer"]
    if len(contents["optimizer"]["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(f"checkpoint {path} has the state of another --optimizer; go on with that one")
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for name, part in parts.items():
        if contents[name]:  # a scaler has a state for float16 only
            part.load_state_dict(contents[name])
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)  # the flags of this process, not the checkpoint's
