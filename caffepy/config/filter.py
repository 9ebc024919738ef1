"""Filtering of a net's layers by phase, level and stage rules."""

from __future__ import annotations

from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, NetState, NetStateRule, Phase, V1LayerParameter


def net_state(phase: int, *overrides: NetState) -> NetState:
    """Return the state for building a net: `phase`, then each of `overrides` merged in.

    A solver passes the net's ``state`` and then its ``train_state`` or ``test_state``, so the latter wins. Stages
    accumulate.
    """
    state = NetState(phase=Phase.Name(phase))
    for override in overrides:
        state.MergeFrom(override)
    return state


def filter_net(param: NetParameter, state: NetState) -> NetParameter:
    """Return a copy of `param` with the layers that `state` includes, each with its ``phase`` set.

    As Caffe's ``Net::FilterNet`` and ``Net::StateMeetsRule``: a layer without ``include`` rules is included unless one
    of its ``exclude`` rules holds; with ``include`` rules it is included if one of them holds.

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
    """Return whether a net in `state` includes `layer`.

    Raises:
        ConfigError: the layer has both ``include`` and ``exclude`` rules.
    """
    if layer.include and layer.exclude:
        raise ConfigError(f"layer '{layer.name}' has both include and exclude rules; keep one kind")
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def meets_rule(state: NetState, rule: NetStateRule) -> bool:
    """Return whether all conditions of `rule` hold in `state`; an empty rule always holds."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)
