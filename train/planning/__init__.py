"""What a training run is going to need, before it starts."""
