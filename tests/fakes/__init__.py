"""Stand-ins that speak the real protocols on loopback: servers, not mocks."""
