"""The paper's claims in words, put to the test on small networks."""
