"""Formulas that reference implementations of primitives and several families of layers share."""

from __future__ import annotations

from math import exp, fabs, sqrt, tanh

from caffepy.backend.expression import Channel, Each, Scalar, expression


@expression
def scaled(x: Each, factor: Scalar) -> Each:
    return x * factor


@expression
def absolute(x: Each) -> Each:
    return fabs(x)


@expression
def scaled_magnitude(x: Each, factor: Scalar) -> Each:
    return fabs(x) * factor


@expression
def squared(x: Each) -> Each:
    return x * x


@expression
def scaled_square(x: Each, factor: Scalar) -> Each:
    return x * x * factor


@expression
def root(x: Each) -> Each:
    return sqrt(x)


@expression
def negated(x: Each) -> Each:
    return -x


@expression
def difference(x: Each, y: Each) -> Each:
    return x - y


@expression
def minus_channel(x: Each, y: Channel) -> Each:
    return x - y


@expression
def squared_difference(x: Each, y: Each) -> Each:
    return (x - y) * (x - y)


@expression
def pair_gradient(x: Each, y: Each, slope: Channel, factor: Scalar) -> Each:
    return (x - y) * slope * factor


@expression
def scaled_over_count(x: Each, count: Channel, factor: Scalar) -> Each:
    return x * factor / max(count, 1.0)


@expression
def ratio_or_zero(x: Each, y: Each) -> Each:
    return 0.0 if y == 0 else x / y


@expression
def squared_distance(x: Each, mean: Channel, factor: Scalar) -> Each:
    return (x - mean) * (x - mean) * factor


@expression
def finished(
    mean: Each,
    variance: Each,
    old_mean: Each,
    old_variance: Each,
    fraction: Scalar,
    correction: Scalar,
    epsilon: Scalar,
) -> tuple[Each, Each, Each]:
    return 1 / sqrt(variance + epsilon), old_mean * fraction + mean, old_variance * fraction + variance * correction


@expression
def running_count(count: Each, fraction: Scalar) -> Each:
    return count * fraction + 1


@expression
def moments(total: Each, squares: Each, per_element: Scalar) -> tuple[Each, Each]:
    mean = total * per_element
    return mean, max(squares * per_element - mean * mean, 0.0)


@expression
def stored_statistics(mean_sum: Each, variance_sum: Each, count: Channel, epsilon: Scalar) -> tuple[Each, Each]:
    factor = 0.0 if count == 0 else 1 / count
    return mean_sum * factor, 1 / sqrt(variance_sum * factor + epsilon)


@expression
def normalise(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return (x - mean) * inverse * scale + bias


@expression
def normalise_relu(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return max((x - mean) * inverse * scale + bias, 0.0)


@expression
def plus_rectified(x: Each, y: Each) -> Each:
    return max(x + y, 0.0)


@expression
def total(x: Each, y: Each) -> Each:
    return x + y


@expression
def rectified(x: Each) -> Each:
    return max(x, 0.0)


@expression
def rectified_with_channel(x: Each, y: Channel) -> Each:
    return max(x + y, 0.0)


@expression
def where_positive(y: Each, dy: Each) -> Each:
    return dy if y > 0 else 0.0


@expression
def where_normal_positive(x: Each, dy: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return dy if (x - mean) * inverse * scale + bias > 0 else 0.0


@expression
def gradient_sums(x: Each, dy: Each, mean: Channel, inverse: Channel) -> tuple[Each, Each]:
    return dy * ((x - mean) * inverse), dy


@expression
def input_gradient(
    x: Each,
    dy: Each,
    mean: Channel,
    inverse: Channel,
    scale: Channel,
    sum_dy_x: Channel,
    sum_dy: Channel,
    per_element: Scalar,
) -> Each:
    normal = (x - mean) * inverse
    return (dy - (sum_dy + sum_dy_x * normal) * per_element) * inverse * scale


@expression
def product_with_channel(x: Each, y: Channel) -> Each:
    return x * y


@expression
def identity(x: Each) -> Each:
    return x


@expression
def drop(x: Each, chance: Each, ratio: Scalar, scale: Scalar) -> Each:
    return x * scale if chance >= ratio else 0.0


@expression
def product(x: Each, y: Each) -> Each:
    return x * y


@expression
def product_plus(x: Each, y: Each, z: Each) -> Each:
    return x * y + z


@expression
def total_with_channel(x: Each, y: Channel) -> Each:
    return x + y


@expression
def hyperbolic_tangent(x: Each) -> Each:
    return tanh(x)


@expression
def tanh_gradient(y: Each, dy: Each) -> Each:
    return dy * (1 - y * y)


@expression
def elu(x: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * x if x > 0 else scale * alpha * (exp(x) - 1)


@expression
def elu_gradient_from_bottom(x: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if x > 0 else scale * alpha * exp(x))
