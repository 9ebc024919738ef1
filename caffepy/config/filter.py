"""Which layers of a net are in: phase, level and stage rules."""

from __future__ import annotations

from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, NetState, NetStateRule, Phase, V1LayerParameter


def net_state(phase: int, *overrides: NetState) -> NetState:
    """The state under which a net is built: `phase`, then each of `overrides` merged in.

    A solver passes the net's own ``state`` and then its ``train_state`` or ``test_state``, so that the
    latter has the last word. Stages add up.
    """
    state = NetState(phase=Phase.Name(phase))
    for override in overrides:
        state.MergeFrom(override)
    return state


def filter_net(param: NetParameter, state: NetState) -> NetParameter:
    """A copy of `param` with the layers that `state` includes, each with its ``phase`` set.

    Follows ``Net::FilterNet`` and ``Net::StateMeetsRule`` of Caffe: a layer without ``include`` rules is
    in unless one of its ``exclude`` rules holds; with ``include`` rules it is in when one of them holds.

    Raises:
        ConfigError: a layer has both ``include`` and ``exclude`` rules.
    """
    filtered = NetParameter()
    for field, value in param.ListFields():
        if field.name != "layer":
            filtered.MergeFrom(NetParameter(**{field.name: value}))
    filtered.state.CopyFrom(state)
    for layer in param.layer:
        if not is_included(layer, state):
            continue
        included = filtered.layer.add()
        included.CopyFrom(layer)
        if not included.HasField("phase"):
            included.phase = state.phase
    return filtered


def is_included(layer: LayerParameter | V1LayerParameter, state: NetState) -> bool:
    """Whether the rules of `layer` let it into a net in `state`.

    Raises:
        ConfigError: it has both kinds of rules.
    """
    if layer.include and layer.exclude:
        raise ConfigError(f"layer '{layer.name}' has both include and exclude rules; keep one kind")
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def meets_rule(state: NetState, rule: NetStateRule) -> bool:
    """Whether everything that `rule` asks for holds in `state`; an empty rule always holds."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)
