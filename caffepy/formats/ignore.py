"""Fields of forks that a user leaves out: which they are, and how they leave the text of a prototxt.

`parse_text` and `refuse_fork_fields` ask here. The environment variable CAFFEPY_IGNORE_FIELDS holds the names, so that
child processes leave out the same fields.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from caffepy.errors import ConfigError
from caffepy.formats.messages import schema_name
from caffepy.utils.environment import environment_variable

log = logging.getLogger(__name__)

VARIABLE = "CAFFEPY_IGNORE_FIELDS"
ALL = "all"
"""In place of names: every field that the schema lacks."""
MAX_NAMED = 5
"""Maximum number of layers to list for a field."""
_NAME = re.compile(r"\w+(\.\w+)+")
_TOKEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]+|\\.)*"?|'(?:[^'\\\n]+|\\.)*'?|[\w.+-]+|\S""")
"""An unterminated string ends with its line, so matching is linear in the text."""
_END = re.compile(r"\Z")
"""In place of the token behind the last one: an empty one."""
_CLOSING = {"{": "}", "<": ">", "[": "]"}


def ignored_fields(more: Iterable[str] = ()) -> frozenset[str]:
    """Return `more` and the names of CAFFEPY_IGNORE_FIELDS: ``Message.field``, or "all".

    Raises:
        ConfigError: a name has another form.
    """
    names = frozenset(name.strip() for name in (*os.environ.get(VARIABLE, "").split(","), *more) if name.strip())
    for name in names - {ALL}:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"ignore_fields: '{name}' is not the name of a field; write Message.field, as "
                f"PoolingParameter.dilation, or {ALL}"
            )
    return names


@contextmanager
def ignoring(names: str) -> Iterator[None]:
    """Leave out fields within a `with` block, in this process and in processes that it starts.

    Args:
        names: as CAFFEPY_IGNORE_FIELDS, which they replace.

    Raises:
        ConfigError: see `ignored_fields`.
    """
    with environment_variable(VARIABLE, names):
        ignored_fields()
        yield


def leave_out(text: str, root: Any, ignored: frozenset[str], origin: str) -> str:
    """Replace the ignored fields of a prototxt by spaces, and log each field with its layers once.

    Args:
        text: the prototxt. A text that does not parse may stay as it is.
        root: the descriptor of the message that the text describes.
        ignored: see `ignored_fields`. "all" stands for fields that the schema lacks.
        origin: the file's name, for the log.

    Returns:
        The text; each other character has its line and column.
    """
    if not ignored:
        return text
    spans, owners = list[tuple[int, int]](), dict[str, list[str]]()
    for name, layer, begin, end in _ignored_parts(text, root, ignored):
        spans.append((begin, end))
        owners.setdefault(name, []).append(layer)
    for name, layers in owners.items():
        tell_ignored(f"{origin}: {name}", _listing(layers))
    parts, at = list[str](), 0
    for begin, end in spans:
        parts += [text[at:begin], re.sub(r"[^\n]", " ", text[begin:end])]
        at = end
    return "".join([*parts, text[at:]])


def unknown_fields(text: str, root: Any) -> dict[str, list[str]]:
    """Return the fields of a prototxt that the schema lacks, each with the names of its layers.

    Args:
        text: the prototxt. If it does not parse, the result may be incomplete.
        root: the descriptor of the message that the text describes.

    Returns:
        Layers by ``Message.field``, in order; "" stands for a field outside of layers. Fields inside of an unknown
        field are not listed.
    """
    found: dict[str, list[str]] = {}
    for name, layer, _, _ in _ignored_parts(text, root, frozenset({ALL})):
        found.setdefault(name, []).append(layer.removeprefix("layer ").strip("\"'"))
    return found


@cache
def tell_ignored(name: str, where: str) -> None:
    """Log an ignored field, once in a process."""
    log.warning("%s is ignored%s", name, where)


def _listing(layers: list[str]) -> str:
    """The clause that names layers; fields outside of layers have ''."""
    named = [layer for layer in dict.fromkeys(layers) if layer]
    if not named:
        return ""
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f" in {', '.join(named[:MAX_NAMED])}{more}"


def _ignored_parts(text: str, root: Any, ignored: frozenset[str]) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, layer, begin and end of each ignored field, in order; ends early where the text does not parse."""
    tokens = [token for token in _TOKEN.finditer(text) if token[0][0] != "#"]
    tokens += _END.finditer(text, len(text))
    messages, layer, at = [root], "", 0
    while at < len(tokens) - 1:
        word, begin = tokens[at][0], tokens[at].start()
        if word in "}>":
            if len(messages) == 1:
                return
            messages.pop()
        if not (word[0].isalpha() or word[0] == "_"):
            at += 1
            continue
        at += 2 if tokens[at + 1][0] == ":" else 1
        message = messages[-1]
        found, name = message.fields_by_name.get(word), f"{schema_name(message)}.{word}"
        if len(messages) == 2 and word == "name":
            layer = f"layer {tokens[at][0]}"
        elif len(messages) == 1:
            layer = ""
        if name in ignored or (found is None and ALL in ignored):
            at = _after_value(tokens, at)
            yield name, layer, begin, tokens[at - 1].end()
        elif tokens[at][0] in ("{", "<"):
            if found is None or found.message_type is None:
                return
            messages.append(found.message_type)
            at += 1
        else:
            at = _after_value(tokens, at)


def _after_value(tokens: list[re.Match[str]], at: int) -> int:
    """Return the number of the token behind the value that begins at a token."""
    if tokens[at][0] in _CLOSING:
        open_ones = list[str]()
        while tokens[at][0]:
            word = tokens[at][0]
            if word in _CLOSING:
                open_ones.append(_CLOSING[word])
            elif word == open_ones[-1]:
                open_ones.pop()
            at += 1
            if not open_ones:
                break
    elif tokens[at][0][:1] in ('"', "'"):
        while tokens[at][0][:1] in ('"', "'"):
            at += 1
    elif tokens[at][0]:
        at += 1
    return at + 1 if tokens[at][0] in (";", ",") else at
