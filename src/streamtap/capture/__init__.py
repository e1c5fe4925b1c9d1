"""Read the residual stream of any decoder-only model: find its blocks, watch them, plan the passes."""
