"""What the real-engine tests stand on: a tiny model, and fleets of real engines."""
