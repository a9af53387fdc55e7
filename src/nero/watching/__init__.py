"""Watching a training run: how far each layer's neurons have turned, and what else a person wants to know."""

from nero.watching.reading import Layer, Reading, Spread
from nero.watching.watcher import Watch, watch

__all__ = ["Layer", "Reading", "Spread", "Watch", "watch"]
