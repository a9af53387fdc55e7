"""Loops compiled for the CPU."""
