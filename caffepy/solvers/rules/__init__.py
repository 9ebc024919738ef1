"""Update rules and learning-rate policies. The root of solvers imports it."""
