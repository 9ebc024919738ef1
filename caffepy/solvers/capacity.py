"""What would have fitted: better advice in the errors of a training that runs out of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from caffepy.config.filter import filter_net
from caffepy.errors import CaffepyError, OutOfMemoryError
from caffepy.net.memory_plan import largest_batch, read_sample_shapes, written_batch
from caffepy.solvers.net_factory import NetFactory

log = logging.getLogger(__name__)


@contextmanager
def suggest_batch_size_on_oom(factory: NetFactory, histories: int) -> Iterator[None]:
    """Let an out-of-memory error within a `with` block say which batch would fit.

    Args:
        factory: makes the nets of the solver that is built or run in the block.
        histories: values that the solver keeps for each parameter.

    Raises:
        OutOfMemoryError: with that advice.
    """
    try:
        yield
    except OutOfMemoryError as error:
        advice = _advice(factory, histories, error.available)
        raise error.advising(advice) if advice else error from error.__cause__


def _advice(factory: NetFactory, histories: int, available: int | None) -> str:
    """What to do; empty where nothing better than the error itself can be said."""
    if available is None:
        return ""
    try:
        param, context, state = factory.train_setup()
        written = written_batch(filter_net(param, state))
        if not written:
            return ""
        context = replace(context, sample_shapes=read_sample_shapes(param, context, state))
        batch_size = largest_batch(param, context, state, factory.fuse, factory.share, histories, available, written)
    except CaffepyError as error:  # the failure itself matters more
        log.debug("the largest batch that fits cannot be told: %s", error)
        return ""
    if not batch_size:
        return "not even batch_size 1 fits; use another GPU, or FLOAT16 (default_forward_type, default_backward_type)"
    return (
        f"the largest batch_size that fits is {batch_size} instead of {written}; iter_size makes up for smaller batches"
    )
