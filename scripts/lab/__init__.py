"""The laboratory: what a machine can do, and what the bundled models and the quickstart are made by."""
