"""Training loops: supervised, adversarial (two networks), and of an agent that plays."""
