"""Commands. Each module holds one command; `main` is its entry point."""
