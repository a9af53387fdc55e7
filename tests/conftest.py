"""Shared settings of the tests."""

import hypothesis
import torch

# examples are derived from the test alone: a run today is the run of tomorrow
hypothesis.settings.register_profile("nero", derandomize=True, deadline=None, max_examples=150)
hypothesis.settings.load_profile("nero")
torch.set_num_threads(2)
