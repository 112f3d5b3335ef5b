"""Publishing on the Hugging Face Hub, which training can do as well (--publish.repo)."""
