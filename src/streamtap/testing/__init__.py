"""For the tests of Streamtap and of what is built on it: tiny real models, tokenizers, and a plain reference."""
