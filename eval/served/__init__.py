"""What another engine makes of a draft, beside ours."""
