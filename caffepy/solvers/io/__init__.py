"""What a solver shows, scores and saves. The root of solvers imports it."""
