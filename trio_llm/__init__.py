"""trio_llm: an inference engine whose every request is a structured-concurrency scope."""
