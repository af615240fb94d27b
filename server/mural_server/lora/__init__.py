"""LoRA in the engine: request → weights → model → manager → worker, `layers/` and `punica/`."""
