"""Tests of kvtide; a package, so that they can share fakes and helpers by name."""
