"""Observation of a training run: how far the neurons of each layer have turned, and how healthy they are."""

from nero.watching.reading import Layer, Reading, Spread
from nero.watching.watcher import Watch, watch

__all__ = ["Layer", "Reading", "Spread", "Watch", "watch"]
