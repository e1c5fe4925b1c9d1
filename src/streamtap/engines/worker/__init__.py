"""An engine as a process of its own, which speaks the dialect of vLLM with vllm-lens over HTTP."""
