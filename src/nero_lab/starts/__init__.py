"""The study of parameters that start at zero or near it."""
