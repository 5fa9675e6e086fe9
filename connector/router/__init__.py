"""An OpenAI-compatible router for prefill and decode engines."""
