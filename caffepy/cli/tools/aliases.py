"""Caffe's programs that `caffe` itself replaced: each stands for a command of caffepy.

Their arguments had no names: ``train_net solver.prototxt``, ``test_net net.prototxt net.caffemodel 100 GPU 0``.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIASES = {
    "train_net": ("train", ("--solver", "--snapshot")),
    "finetune_net": ("train", ("--solver", "--weights")),
    "test_net": ("test", ("--model", "--weights", "--iterations")),
    "net_speed_benchmark": ("time", ("--model", "--iterations")),
}
"""Of each program the command, and the options that its arguments are in their order."""


def expand(arguments: Sequence[str]) -> list[str]:
    """A command line in which the name of such a program, and its arguments without names, are replaced."""
    if not arguments or arguments[0] not in ALIASES:
        return list(arguments)
    command, options = ALIASES[arguments[0]]
    rest = list(arguments[1:])
    end = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, device = _device(rest[:end])
    named = [part for pair in zip(options, words, strict=False) for part in pair]
    return [command, *named, *words[len(options) :], *device, *rest[end:]]


def _device(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before ``CPU`` or ``GPU``, and the option that it and the number behind it are."""
    at = next((index for index, word in enumerate(words) if word in ("CPU", "GPU")), len(words))
    if at == len(words):
        return words, []
    number = (words[at + 1 :] or ["0"])[0]
    return words[:at], ["--cpu"] if words[at] == "CPU" else ["--gpu", number]
