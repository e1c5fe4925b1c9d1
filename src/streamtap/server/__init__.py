"""The service: keys and limits, engine processes, and the HTTP surface that gives back the residual stream."""
