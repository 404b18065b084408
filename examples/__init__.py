"""Real models, real text and complete jobs, each one runnable."""
