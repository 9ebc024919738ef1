"""Who is alive, who is late, what failed. The root of parallel and distributed import it."""
