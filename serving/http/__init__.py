"""The HTTP server: OpenAI's interface over the engine. `docs/http.md` says what is served."""
