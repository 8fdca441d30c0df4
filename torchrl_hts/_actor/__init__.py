"""Actors answer observations, many at a time, with the policy's actions."""
