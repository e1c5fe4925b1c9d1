"""The engines' processes: started when a request needs them, watched, shared, and ended."""
