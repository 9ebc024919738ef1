"""What the machine has: cores, NVML, topology. The root of parallel and cli import it."""
